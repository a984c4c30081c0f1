//! Incremental decoding: ids to text, one at a time. The server and the CLI hold one stream for each reply.
//!
//! An incomplete character is held back until its remaining bytes arrive. All returned text together, with that of
//! [`TextStream::finish`], equals [`Tokenizer::decode`] of all ids.

use std::ops::Deref;

use crate::tokenizer::Tokenizer;

/// The incremental decoder, over a tokenizer that is borrowed or shared.
#[derive(Debug, Clone)]
pub struct TextStream<T> {
    tokenizer: T,
    skip_control: bool,
    /// Whether nothing has been decoded yet.
    start: bool,
    /// The bytes of an incomplete character: at most three between pushes.
    pending: Vec<u8>,
}

impl<T: Deref<Target = Tokenizer>> TextStream<T> {
    /// Creates a stream at the beginning of a text.
    pub fn new(tokenizer: T, skip_control: bool) -> Self {
        TextStream { tokenizer, skip_control, start: true, pending: Vec::new() }
    }

    /// Creates a stream that continues after `ids`, whose text was shown before; a leading space is kept there.
    pub fn after(tokenizer: T, skip_control: bool, ids: &[u32]) -> Self {
        let mut stream = TextStream::new(tokenizer, skip_control);
        for &id in ids {
            stream.push(id);
        }
        stream
    }

    /// Whether the text is still empty, so that the next token loses the space that encoding inserts there; see
    /// [`Tokenizer::shown_bytes`].
    pub fn is_at_start(&self) -> bool {
        self.start
    }

    /// Returns the tokenizer that decodes the ids.
    pub fn tokenizer(&self) -> &Tokenizer {
        &self.tokenizer
    }

    /// Returns the text that this id completes; empty while a character is incomplete.
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
                    // Without an error length, more bytes may still complete the character.
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

    /// Ends the stream and returns U+FFFD if a character is incomplete.
    pub fn finish(self) -> String {
        String::from_utf8_lossy(&self.pending).into_owned()
    }
}
