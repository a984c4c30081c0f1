//! Every normalizer and pre-tokenizer against the reference library, the `tokenizers` crate, on random text.

use proptest::prelude::*;
use serde_json::{Value, json};
use tokenizers::tokenizer::normalizer::Range as Bytes;
use tokenizers::{
    NormalizedString, Normalizer as _, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer as _, PreTokenizerWrapper,
};

use super::stages;
use crate::algorithms::normalize::Normalizer;
use crate::algorithms::pretokenize::{Step, run_steps};

/// Text in which words, marks, white space, scripts and characters that normalization changes often meet.
fn nasty_text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        4 => "[ \t\r\n,.;-]{1,3}",
        4 => "[a-zA-Z0-9']{1,5}",
        // Marks, composed and decomposed letters, letters whose lower case has two characters.
        3 => "[eéÉßẞİıǅΣςſﬁ\u{301}\u{327}\u{323}\u{307}\u{30a}\u{345}\u{94d}\u{1fbe}\u{1ab0}\u{483}]{1,4}",
        // Hangul, jamo, kana with marks, wide and narrow forms, Chinese characters and their compatibility forms.
        3 => "[가각\u{1100}\u{1161}\u{11a8}カー\u{3099}がヴﾊﾟ中文豈\u{2f800}\u{20000}ＡＢ１２あア]{1,4}",
        2 => "[\u{a0}\u{85}\u{1680}\u{200b}\u{200d}\u{2028}\u{3000}\u{feff}\u{fffd}\u{2581}▁]{1,3}",
        2 => "[\u{0}\u{1}\u{7f}\u{8f}\u{ad}\u{61c}\u{e000}\u{f0000}\u{fdd0}\u{378}]{1,2}",
        2 => "[½Ⅷ²٣€☃«»、。！？״׃።–—¿§©\u{166d}\u{111c9}\u{1885}\u{2e52}]{1,3}",
        2 => "(👩‍👩‍👧|🏳️‍🌈|👍🏽|🇩🇪|e\u{301}\u{323}|क्षि|กำ)",
        2 => "[абвΑβאبहिகไทያ\u{10300}𝒜ᚠ]{1,4}",
        2 => any::<char>().prop_map(String::from),
    ];
    prop::collection::vec(piece, 0..16).prop_map(|parts| parts.concat())
}

fn fixture(name: &str) -> Value {
    let path = format!("{}/fixtures/tokenizers/{name}.json", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn normalizers() -> Vec<Value> {
    let bert = |clean: bool, chinese: bool, accents: Option<bool>, lowercase: bool| {
        json!({ "type": "BertNormalizer", "clean_text": clean, "handle_chinese_chars": chinese,
                "strip_accents": accents, "lowercase": lowercase })
    };
    let replace = |pattern: Value, content: &str| json!({ "type": "Replace", "pattern": pattern, "content": content });
    let xglm = fixture("xglm");
    let map = &xglm["normalizer"]["normalizers"][0];
    let mut all = vec![
        json!({ "type": "NFC" }),
        json!({ "type": "NFD" }),
        json!({ "type": "NFKC" }),
        json!({ "type": "NFKD" }),
        json!({ "type": "Lowercase" }),
        json!({ "type": "StripAccents" }),
        json!({ "type": "Strip", "strip_left": true, "strip_right": true }),
        json!({ "type": "Strip", "strip_left": false, "strip_right": true }),
        json!({ "type": "Strip", "strip_left": true, "strip_right": false }),
        json!({ "type": "Nmt" }),
        json!({ "type": "Prepend", "prepend": "▁x" }),
        bert(true, true, None, true),
        bert(true, false, Some(true), false),
        bert(false, true, Some(false), true),
        replace(json!({ "String": " " }), "▁"),
        replace(json!({ "String": "e\u{301}" }), ""),
        replace(json!({ "Regex": r"\s+" }), " "),
        replace(json!({ "Regex": "[^a-z]" }), "<>"),
        map.clone(),
    ];
    let sequence = |steps: &[&Value]| json!({ "type": "Sequence", "normalizers": steps });
    all.push(sequence(&[&all[3], &all[5], &all[4]]));
    all.push(sequence(&[&all[9], &all[2], &all[16]]));
    all.push(sequence(&[map, &all[16]]));
    all.push(xglm["normalizer"].clone());
    all
}

fn pre_tokenizers() -> Vec<Value> {
    let mut all = vec![
        json!({ "type": "Whitespace" }),
        json!({ "type": "WhitespaceSplit" }),
        json!({ "type": "BertPreTokenizer" }),
        json!({ "type": "Digits", "individual_digits": true }),
        json!({ "type": "Digits", "individual_digits": false }),
        json!({ "type": "CharDelimiterSplit", "delimiter": "e" }),
        json!({ "type": "UnicodeScripts" }),
        json!({ "type": "FixedLength", "length": 3 }),
        json!({ "type": "FixedLength" }),
        json!({ "type": "Punctuation" }),
    ];
    for behavior in ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"] {
        all.push(json!({ "type": "Punctuation", "behavior": behavior }));
        for pattern in [json!({ "String": " " }), json!({ "String": "" }), json!({ "Regex": r"\w+|\s" })] {
            for invert in [false, true] {
                all.push(json!({ "type": "Split", "pattern": pattern, "behavior": behavior, "invert": invert }));
            }
        }
    }
    for add_prefix_space in [false, true] {
        for use_regex in [false, true] {
            all.push(json!({ "type": "ByteLevel", "add_prefix_space": add_prefix_space, "trim_offsets": true,
                             "use_regex": use_regex }));
        }
    }
    for scheme in ["first", "never", "always"] {
        for (mark, split) in [("▁", true), ("▁", false), ("_", true)] {
            all.push(json!({ "type": "Metaspace", "replacement": mark, "prepend_scheme": scheme, "split": split }));
        }
    }
    // Each step after a step that removes, and after one that rewrites.
    let before = [json!({ "type": "WhitespaceSplit" }), all[all.len() - 10].clone(), all[all.len() - 9].clone()];
    let single = all.clone();
    for first in &before {
        all.extend(single.iter().map(|step| json!({ "type": "Sequence", "pretokenizers": [first, step] })));
    }
    all
}

fn steps(part: &Value) -> Vec<Step> {
    stages::flatten(part, "pretokenizers").into_iter().flat_map(|step| stages::general_steps(step).unwrap()).collect()
}

fn reference_pieces(pre_tokenizer: &PreTokenizerWrapper, text: &str) -> Vec<String> {
    let mut pieces = PreTokenizedString::from(text);
    pre_tokenizer.pre_tokenize(&mut pieces).unwrap();
    let splits = pieces.get_splits(OffsetReferential::Normalized, OffsetType::Byte);
    splits.into_iter().map(|(piece, _, _)| piece.to_owned()).collect()
}

fn pieces(steps: &[Step], text: &str) -> Vec<String> {
    let mut pieces = Vec::new();
    if !text.is_empty() {
        run_steps(steps, text, true, &mut |piece| pieces.push(piece.to_owned())).unwrap();
    }
    pieces
}

fn config() -> ProptestConfig {
    ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() }
}

#[test]
fn normalizers_rewrite_as_the_reference_does() {
    let all: Vec<(Value, NormalizerWrapper, Normalizer)> = normalizers()
        .into_iter()
        .map(|part| (part.clone(), serde_json::from_value(part.clone()).unwrap(), stages::normalizer(&part).unwrap()))
        .collect();
    proptest!(config(), |(text in nasty_text())| {
        for (part, reference, ours) in &all {
            let mut expected = NormalizedString::from(text.as_str());
            reference.normalize(&mut expected).unwrap();
            let name = part.to_string().chars().take(200).collect::<String>();
            let normalized = ours.apply(&text).unwrap();
            prop_assert_eq!(&*normalized, expected.get(), "{} on {:?}", name, text);
            // A character comes from all bytes that the reference names; it leaves out those that were joined. Text
            // that was inserted comes from no bytes here.
            let origins = ours.origins(&text);
            for (at, c) in normalized.char_indices() {
                let at = at..at + c.len_utf8();
                let (origin, from) =
                    (origins.of(at.clone()).unwrap(), expected.convert_offsets(Bytes::Normalized(at)).unwrap());
                let is_covered = origin.start <= from.start && from.start < origin.end;
                prop_assert!(origin.is_empty() || is_covered || from.is_empty(),
                    "{} on {:?}: {:?} from {:?}, the reference has {:?}", name, text, c, origin, from);
                prop_assert!(text.is_char_boundary(origin.start) && text.is_char_boundary(origin.end));
            }
        }
    });
}

#[test]
fn pre_tokenizers_split_as_the_reference_does() {
    let all: Vec<(Value, PreTokenizerWrapper, Vec<Step>)> = pre_tokenizers()
        .into_iter()
        .map(|part| (part.clone(), serde_json::from_value(part.clone()).unwrap(), steps(&part)))
        .collect();
    assert!(all.len() > 200);
    proptest!(config(), |(text in nasty_text())| {
        for (part, reference, ours) in &all {
            prop_assert_eq!(pieces(ours, &text), reference_pieces(reference, &text), "{} on {:?}", part, text);
        }
    });
}

/// Every character is in the classes that the reference has for it.
#[test]
fn classes_of_characters_are_those_of_the_reference() {
    let bert: NormalizerWrapper = serde_json::from_value(json!({ "type": "BertNormalizer", "clean_text": true,
        "handle_chinese_chars": true, "strip_accents": true, "lowercase": true }))
    .unwrap();
    let part = serde_json::to_value(&bert).unwrap();
    let ours = stages::normalizer(&part).unwrap();
    let split = json!({ "type": "BertPreTokenizer" });
    let reference_split: PreTokenizerWrapper = serde_json::from_value(split.clone()).unwrap();
    let our_split = steps(&split);
    let scripts = json!({ "type": "UnicodeScripts" });
    let reference_scripts: PreTokenizerWrapper = serde_json::from_value(scripts.clone()).unwrap();
    let our_scripts = steps(&scripts);
    // A long text takes the reference long, so the characters come in blocks.
    let chars: Vec<char> = (0..=char::MAX as u32).filter_map(char::from_u32).collect();
    for block in chars.chunks(512) {
        let text: String = block.iter().collect();
        let mut expected = NormalizedString::from(text.as_str());
        bert.normalize(&mut expected).unwrap();
        assert_eq!(ours.apply(&text).unwrap(), expected.get(), "block of {:?}", block[0]);
        assert_eq!(pieces(&our_split, &text), reference_pieces(&reference_split, &text), "block of {:?}", block[0]);
        // Each character after one of its own block, and after a Latin and a Chinese one.
        let mixed: String = block.iter().flat_map(|c| ['a', *c, '中', *c]).collect();
        for text in [&text, &mixed] {
            let expected = reference_pieces(&reference_scripts, text);
            assert_eq!(pieces(&our_scripts, text), expected, "block of {:?}", block[0]);
        }
    }
}
