//! Ids to text as they come, one at a time. The server and the CLI hold one stream for each answer.
//!
//! Half a character is held back until its other half arrives, so that everything given out is whole; what has been
//! given out, with [`TextStream::finish`], is exactly [`Tokenizer::decode`] of all ids.

use std::ops::Deref;

use crate::tokenizer::Tokenizer;

/// The incremental decoder, over a tokenizer that is borrowed or shared.
#[derive(Debug, Clone)]
pub struct TextStream<T> {
    tokenizer: T,
    skip_control: bool,
    /// Nothing has been decoded yet.
    start: bool,
    /// The bytes of an unfinished character: at most three between pushes.
    pending: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> TextStream<T> {
    pub fn new(tokenizer: T, skip_control: bool) -> Self {
        TextStream { tokenizer, skip_control, start: true, pending: Vec::new() }
    }

    /// A stream that continues after `ids`, whose text has been shown already: a leading space is text there.
    pub fn after(tokenizer: T, skip_control: bool, ids: &[u32]) -> Self {
        let mut stream = TextStream::new(tokenizer, skip_control);
        for &id in ids {
            stream.push(id);
        }
        stream
    }

    /// The text that this id completes; empty while a character is unfinished.
    pub fn push(&mut self, id: u32) -> String {
        self.pending.extend_from_slice(&self.tokenizer.decode_token(id, self.skip_control, &mut self.start));
        let mut text = String::new();
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            match std::str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(std::str::from_utf8(valid).unwrap_or_default());
                    rest = after;
                    // No length means that more bytes could still make it a character.
                    let Some(len) = error.error_len() else { break };
                    text.push(char::REPLACEMENT_CHARACTER);
                    rest = &rest[len..];
                }
            }
        }
        let held = rest.len();
        self.pending.drain(..self.pending.len() - held);
        text
    }

    /// The end: a character that was never finished becomes U+FFFD.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
