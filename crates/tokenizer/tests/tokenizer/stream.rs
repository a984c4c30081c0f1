//! Incremental decoding: the pieces of a stream, joined, equal the decoding of all ids.

use std::sync::OnceLock;

use pellucid_tokenizer::{TokenKind, Tokenizer};
use proptest::prelude::*;

use crate::common;

fn tokenizers() -> &'static [Tokenizer] {
    static ALL: OnceLock<Vec<Tokenizer>> = OnceLock::new();
    ALL.get_or_init(|| {
        let load = |name: &&str| Tokenizer::from_hugging_face(&common::fixture(name)).unwrap();
        ["gpt2", "llama3", "llama2", "gemma", "xglm"].iter().map(load).collect()
    })
}

/// Streams `ids`, checks every piece on the way, and returns the whole text.
fn stream(tokenizer: &Tokenizer, ids: &[u32], skip_control: bool) -> String {
    let whole = tokenizer.decode(ids, skip_control);
    let mut stream = tokenizer.stream(skip_control);
    let mut text = String::new();
    for &id in ids {
        text.push_str(&stream.push(id));
        assert!(whole.starts_with(&text), "{whole:?} does not start with {text:?}");
    }
    text.push_str(&stream.finish());
    text
}

proptest! {
    #[test]
    fn a_stream_equals_decode(
        which in 0..5usize,
        // Half of the ids are low, where single bytes are.
        ids in prop::collection::vec(prop_oneof![0..260u32, 0..900u32], 0..40),
        skip_control: bool,
    ) {
        let tokenizer = &tokenizers()[which];
        prop_assert_eq!(stream(tokenizer, &ids, skip_control), tokenizer.decode(&ids, skip_control));
    }

    #[test]
    fn byte_level_text_survives_encoding_and_decoding(text in "\\PC{0,30}") {
        // Byte-level models lose nothing; the others change some texts on purpose.
        for tokenizer in &tokenizers()[..2] {
            let ids = tokenizer.encode(&text);
            prop_assert_eq!(stream(tokenizer, &ids, false), text.clone());
        }
    }
}

#[test]
fn a_character_in_byte_tokens_is_returned_whole() {
    let mut num_in_bytes = 0;
    for tokenizer in tokenizers() {
        // A rare character: spelled in bytes by every model but the unigram model, which has no byte tokens.
        let ids = tokenizer.encode("x🦀y");
        let mut stream = tokenizer.stream(false);
        let chunks: Vec<String> = ids.iter().map(|&id| stream.push(id)).collect();
        if ids.iter().any(|&id| tokenizer.token(id).unwrap().kind == TokenKind::Unknown) {
            continue;
        }
        assert!(chunks.iter().all(|chunk| !chunk.contains('\u{FFFD}')), "{chunks:?}");
        assert!(chunks.iter().any(|chunk| chunk.contains('🦀')), "{chunks:?}");
        assert_eq!(stream.finish(), "");
        num_in_bytes += 1;
    }
    assert_eq!(num_in_bytes, 4, "all but the unigram model");
}

#[test]
fn an_incomplete_character_at_the_end_becomes_one_replacement() {
    let tokenizer = &tokenizers()[2];
    let byte = |byte: u8| tokenizer.id_of(&format!("<0x{byte:02X}>")).unwrap();
    let mut stream = tokenizer.stream(false);
    assert_eq!(stream.push(byte(0xE4)), "");
    assert_eq!(stream.push(byte(0xB8)), "");
    assert_eq!(stream.finish(), "\u{FFFD}");
}

#[test]
fn ids_past_the_vocabulary_decode_to_nothing() {
    let tokenizer = &tokenizers()[0];
    assert_eq!(tokenizer.decode(&[u32::MAX, tokenizer.vocab_size() as u32], false), "");
    assert!(tokenizer.token(u32::MAX).is_none());
}
