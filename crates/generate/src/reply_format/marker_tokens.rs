//! The markers of a model's thoughts as tokens of its vocabulary.

use std::sync::Arc;

use pellucid_tokenizer::{TokenKind, Tokenizer};

use super::thoughts::ThoughtMarkers;

/// Tokens with which markers can be written. Finding them takes a pass over the vocabulary, so they are kept with the
/// model.
#[derive(Debug)]
pub struct MarkerTokens {
    pub(super) markers: Arc<ThoughtMarkers>,
    tokenizer: Arc<Tokenizer>,
    /// Number of logits of the model.
    pub(super) vocab_size: usize,
    /// Tokens that spell a part of a marker, or begin with the end of one, with their text.
    candidates: Vec<(u32, String)>,
    /// Tokens of white space alone.
    pub(super) blanks: Vec<u32>,
}

impl MarkerTokens {
    /// Finds the tokens in a vocabulary. `vocab_size` is the number of logits of the model.
    pub fn new(markers: ThoughtMarkers, tokenizer: Arc<Tokenizer>, vocab_size: usize) -> MarkerTokens {
        let texts: Vec<String> =
            [&markers.open, &markers.close].into_iter().cloned().chain(markers.answer_heading()).collect();
        let touches = |text: &str| {
            let begins_with_end_of =
                |marker: &String| marker.char_indices().any(|(at, _)| text.starts_with(&marker[at..]));
            texts
                .iter()
                .any(|marker| marker.contains(text) || text.contains(marker.as_str()) || begins_with_end_of(marker))
        };
        let (mut candidates, mut blanks) = (Vec::new(), Vec::new());
        for id in 0..tokenizer.vocab_size() as u32 {
            let text = text_of(id, &tokenizer);
            if text.is_empty() {
                continue;
            } else if text.trim().is_empty() {
                blanks.push(id);
            } else if touches(&text) {
                candidates.push((id, text));
            }
        }
        MarkerTokens { markers: Arc::new(markers), tokenizer, vocab_size, candidates, blanks }
    }

    /// Returns the tokens of a text that ends thoughts and begins the answer, behind `num_written` bytes of the closing
    /// marker.
    pub(super) fn closing(&self, num_written: usize) -> Vec<u32> {
        let text = self.markers.closing_text();
        let close = &self.markers.close;
        if num_written > 0 {
            let at = text.find(close.as_str()).unwrap_or(0);
            return self.tokenizer.encode_within(&text[at + num_written..]);
        }
        let ids = self.tokenizer.encode_special(&text);
        if self.tokenizer.decode(&ids, false) == text {
            return ids;
        }
        // Some tokenizers insert a space before a text.
        let within = |text: &str| if text.is_empty() { Vec::new() } else { self.tokenizer.encode_within(text) };
        let (before, after) = text.split_once(close.as_str()).unwrap_or_default();
        let marker = self.tokenizer.id_of(close).map_or_else(|| within(close), |id| vec![id]);
        [within(before), marker, within(after)].concat()
    }

    /// Returns the tokens for which `is_wanted` is true of `held` with the token's text behind it.
    pub(super) fn matching(&self, held: &str, is_wanted: impl Fn(&str) -> bool) -> Vec<u32> {
        let matches = |(_, text): &&(u32, String)| is_wanted(&format!("{held}{text}"));
        self.candidates.iter().filter(matches).map(|(id, _)| *id).collect()
    }

    /// Returns the text of a token, that of control tokens included.
    pub(super) fn text_of(&self, id: u32) -> String {
        text_of(id, &self.tokenizer)
    }

    /// Returns the tokens that end a reply.
    pub(super) fn end_ids(&self) -> &[u32] {
        self.tokenizer.end_ids()
    }
}

/// Bytes that are no text are replaced: no marker has any.
fn text_of(id: u32, tokenizer: &Tokenizer) -> String {
    match tokenizer.token(id) {
        Some(token) if token.kind == TokenKind::Control => token.piece.to_owned(),
        Some(token) => String::from_utf8_lossy(&token.bytes).into_owned(),
        None => String::new(),
    }
}
