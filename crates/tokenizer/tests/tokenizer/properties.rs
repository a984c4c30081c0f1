//! Properties of every text: ordinary text never becomes a control token, and segment boundaries change no id.

use std::sync::OnceLock;

use pellucid_tokenizer::{Segment, TokenKind, Tokenizer};
use proptest::prelude::*;

use crate::common;

const FAMILIES: [&str; 6] = ["llama3", "qwen2", "llama2", "mistral", "gemma", "xglm"];

fn tokenizers() -> &'static [Tokenizer] {
    static ALL: OnceLock<Vec<Tokenizer>> = OnceLock::new();
    ALL.get_or_init(|| {
        let load = |name: &&str| {
            let mut tokenizer = Tokenizer::from_hugging_face(&common::fixture(name)).unwrap();
            tokenizer.guard("<tool> </tool> <mask>");
            tokenizer
        };
        FAMILIES.iter().map(load).collect()
    })
}

/// The tokenizers without the tokens that absorb white space: with those, one id may stand for text of any length.
fn without_stripping_tokens() -> &'static [Tokenizer] {
    static ALL: OnceLock<Vec<Tokenizer>> = OnceLock::new();
    ALL.get_or_init(|| {
        let load = |name: &&str| {
            let mut folder = common::fixture(name);
            let json = folder.tokenizer.take().unwrap();
            folder.tokenizer = Some(json.replace("strip\":true", "strip\":false"));
            Tokenizer::from_hugging_face(&folder).unwrap()
        };
        FAMILIES.iter().map(load).collect()
    })
}

#[test]
fn the_minimum_number_of_ids_is_known_if_there_is_one() {
    for (name, tokenizer) in FAMILIES.iter().zip(without_stripping_tokens()) {
        // XGLM squeezes spaces, and a run of unknown characters is one token.
        assert_eq!(tokenizer.min_ids(1 << 20) > 1000, *name != "xglm", "{name}");
    }
    assert!(tokenizers().iter().all(|tokenizer| tokenizer.min_ids(1 << 20) == 0), "white space of any length");
    // NFC shortens this text the most.
    let composed = "\u{1fbe}\u{308}\u{301}".repeat(1000);
    let qwen2 = &without_stripping_tokens()[1];
    assert!(qwen2.min_ids(composed.len()) <= qwen2.encode(&composed).len());
}

/// Text with whole, broken and nested tokens in it.
fn text() -> impl Strategy<Value = String> {
    let piece = prop_oneof![
        3 => prop::sample::select(vec![
            "<s>", "</s>", "<unk>", "<pad>", "<mask>", "<|start|>", "<|end|>", "<|lstrip|>", "<|rstrip|>", "<tool>",
            "</tool>", "<h1>", "day", "<|e", "nd|>", "<", "|", "▁", "\n\n", " ",
        ]).prop_map(String::from),
        1 => "[a-zA-Z0-9 ]{1,6}",
        1 => "\\PC{1,3}",
    ];
    prop::collection::vec(piece, 0..16).prop_map(|parts| parts.concat())
}

fn has_control_token(tokenizer: &Tokenizer, ids: &[u32]) -> bool {
    ids.iter().any(|&id| tokenizer.token(id).unwrap().kind == TokenKind::Control)
}

proptest! {
    #[test]
    fn a_text_has_at_least_the_minimum_number_of_ids(which in 0..FAMILIES.len(), text in text()) {
        let tokenizer = &without_stripping_tokens()[which];
        prop_assert!(tokenizer.min_ids(text.len()) <= tokenizer.encode_special(&text).len());
    }

    #[test]
    fn ordinary_text_becomes_no_control_token(which in 0..FAMILIES.len(), text in text()) {
        let tokenizer = &tokenizers()[which];
        prop_assert!(!has_control_token(tokenizer, &tokenizer.encode(&text)));
    }

    #[test]
    fn untrusted_segments_become_no_guarded_token(
        which in 0..FAMILIES.len(),
        parts in prop::collection::vec(text(), 0..5),
    ) {
        let tokenizer = &tokenizers()[which];
        let segments: Vec<Segment> = parts.iter().map(|part| Segment::untrusted(part.as_str())).collect();
        let ids = tokenizer.encode_segments(&segments);
        let guarded = |id: &u32| tokenizer.is_guarded(*id) && tokenizer.token(*id).unwrap().kind != TokenKind::Unknown;
        prop_assert!(!ids.iter().any(guarded), "{:?}", ids);
    }

    #[test]
    fn trusted_segments_are_one_text(which in 0..FAMILIES.len(), parts in prop::collection::vec(text(), 0..5)) {
        let tokenizer = &tokenizers()[which];
        let segments: Vec<Segment> = parts.iter().map(|part| Segment::trusted(part.as_str())).collect();
        prop_assert_eq!(tokenizer.encode_segments(&segments), tokenizer.encode_special(&parts.concat()));
    }

    /// A mixed text has at most the guarded tokens that its trusted parts spell.
    #[test]
    fn untrusted_segments_add_no_guarded_token(
        which in 0..FAMILIES.len(),
        parts in prop::collection::vec((text(), any::<bool>()), 0..5),
    ) {
        let tokenizer = &tokenizers()[which];
        let segment = |(text, trusted): &(String, bool)| Segment { text: text.clone(), trusted: *trusted };
        let segments: Vec<Segment> = parts.iter().map(segment).collect();
        let ids = tokenizer.encode_segments(&segments);
        // Adjacent trusted parts count as one; each untrusted part becomes a line separator.
        let trusted: String =
            parts.iter().map(|(text, trusted)| if *trusted { text.as_str() } else { "\u{2028}" }).collect();
        for id in ids.iter().copied().filter(|&id| tokenizer.is_guarded(id)) {
            let token = tokenizer.token(id).unwrap();
            if token.kind != TokenKind::Unknown {
                let found = ids.iter().filter(|&&other| other == id).count();
                prop_assert!(found <= trusted.matches(token.piece).count(), "{} in {:?}", token.piece, segments);
            }
        }
    }
}
