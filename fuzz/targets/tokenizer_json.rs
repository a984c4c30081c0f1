//! `tokenizer.json`, and after a zero byte a text to encode. An accepted tokenizer encodes every text to ids of its
//! vocabulary, to no control token, and the stream of their text equals the whole.

#![no_main]

use libfuzzer_sys::fuzz_target;
use pellucid_fuzz::{check_tokenizer, hugging_face, two_parts};
use pellucid_tokenizer::Tokenizer;

fuzz_target!(|data: &[u8]| {
    let (tokenizer, text) = two_parts(data);
    let Ok(tokenizer) = std::str::from_utf8(tokenizer) else { return };
    let Ok(tokenizer) = Tokenizer::from_hugging_face(&hugging_face(tokenizer.to_owned(), None)) else { return };
    check_tokenizer(&tokenizer, "The 3 quick\tfoxes don't jump. <s> Ünï\u{301}  \n\n ok");
    check_tokenizer(&tokenizer, &String::from_utf8_lossy(text));
});
