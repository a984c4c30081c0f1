//! Whole tokenizers against the reference library, the `tokenizers` crate, on random text.

use pellucid_tokenizer::Tokenizer;
use proptest::prelude::*;

use crate::common;

const FAMILIES: [&str; 15] = [
    "bert",
    "bert-cased",
    "deepseek-v3",
    "falcon",
    "foreign",
    "gemma",
    "gpt-4o",
    "gpt2",
    "gpt2-prefix-space",
    "llama2",
    "llama3",
    "mistral",
    "qwen2",
    "smollm",
    "xglm",
];

fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[ \t\r\n]{1,3}",
        4 => "[a-zA-Z]{1,6}",
        2 => "[0-9]{1,5}",
        2 => "[!-/:-@\\[-`{-~]{1,3}",
        2 => "(the |house|Hello|, world|'s|'LL|\n\n|<s>|</s>|<\\|im_end\\|>|<MASK>|<mask>|<think>|\\[CLS\\]|\\[sep\\]|the river runs|äpfel)",
        2 => "[éÉßİe\u{301}\u{323}가\u{1100}\u{1161}中文あアﾊﾟＡ１½Ⅷﬁ]{1,4}",
        1 => "[\u{a0}\u{85}\u{200b}\u{200d}\u{3000}\u{feff}\u{fffd}▁\u{0}\u{7f}]{1,2}",
        1 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..20).prop_map(|parts| parts.concat())
}

#[test]
fn ids_are_those_of_the_reference_library() {
    let load = |name: &str| {
        let folder = common::fixture(name);
        let reference = tokenizers::Tokenizer::from_bytes(folder.tokenizer.as_ref().unwrap()).unwrap();
        (name.to_owned(), Tokenizer::from_hugging_face(&folder).unwrap(), reference)
    };
    let all: Vec<_> = FAMILIES.into_iter().map(load).collect();
    let config = ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(text in text())| {
        for (name, ours, reference) in &all {
            let expected = reference.encode_fast(text.as_str(), false).unwrap();
            prop_assert_eq!(ours.encode_special(&text), expected.get_ids(), "{} on {:?}", name, text);
        }
    });
}
