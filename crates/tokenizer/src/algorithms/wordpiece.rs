//! WordPiece (BERT and its relatives): a word becomes its longest prefix that is a token, then the longest prefix of
//! the rest, and so on. A word with a part that no token spells becomes one unknown token. Called by the pipeline for
//! each word.

use std::collections::TryReserveError;

use crate::algorithms::bpe::append;
use crate::vocabulary::Vocabulary;

/// Maximum characters of a word that is divided, if the file does not state it: the reference's default. Longer words
/// become one unknown token.
pub(crate) const MAX_WORD_CHARS: usize = 100;

pub(crate) struct WordPiece {
    /// Spelling before the first token of a word: none in a tokenizer.json, U+2581 in GGUF files.
    first_mark: String,
    /// Spelling before every other token of a word: `##` in a tokenizer.json, none in GGUF files.
    later_mark: String,
    unknown: u32,
    max_word_chars: usize,
    /// Bytes of the longest token, its mark included.
    max_piece_len: usize,
}

impl WordPiece {
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        [first_mark, later_mark]: [&str; 2],
        unknown: u32,
        max_word_chars: usize,
    ) -> WordPiece {
        let lengths = (0..vocabulary.len() as u32).map(|id| vocabulary.piece(id).len());
        WordPiece {
            first_mark: first_mark.to_owned(),
            later_mark: later_mark.to_owned(),
            unknown,
            max_word_chars,
            max_piece_len: lengths.max().unwrap_or(0),
        }
    }

    pub(crate) fn encode(
        &self,
        vocabulary: &Vocabulary,
        word: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let num_before = ids.len();
        // A word within the limit has at most `max_word_chars` tokens, so the buffer below stays small.
        let is_short = word.chars().nth(self.max_word_chars).is_none();
        let mut rest = word;
        let mut marked = String::new();
        while is_short && !rest.is_empty() {
            let mark = if rest.len() == word.len() { &self.first_mark } else { &self.later_mark };
            let Some((id, len)) = self.longest(vocabulary, mark, rest, &mut marked)? else { break };
            append(ids, [id])?;
            rest = &rest[len..];
        }
        if !is_short || !rest.is_empty() {
            ids.truncate(num_before);
            append(ids, [self.unknown])?;
        }
        Ok(())
    }

    /// Returns the longest token at the start of `text`, and its length in bytes without the mark.
    fn longest(
        &self,
        vocabulary: &Vocabulary,
        mark: &str,
        text: &str,
        marked: &mut String,
    ) -> Result<Option<(u32, usize)>, TryReserveError> {
        let mut len = text.floor_char_boundary(self.max_piece_len.saturating_sub(mark.len()));
        marked.clear();
        marked.try_reserve(mark.len() + len)?;
        marked.push_str(mark);
        marked.push_str(&text[..len]);
        while len > 0 {
            if let Some(id) = vocabulary.mergeable(&marked[..mark.len() + len]) {
                return Ok(Some((id, len)));
            }
            len = text.floor_char_boundary(len - 1);
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::vocabulary::{Spelling, TokenKind};

    fn ids(word: &str) -> Vec<u32> {
        let pieces = ["[UNK]", "un", "##aff", "##able", "##affa", "[CLS]", "é", "##é"];
        let kind = |piece: &str| if piece.starts_with('[') { TokenKind::Control } else { TokenKind::Normal };
        let vocabulary = Vocabulary::new(pieces.into_iter().map(|p| (p, kind(p))), Spelling::WordPiece).unwrap();
        let model = WordPiece::new(&vocabulary, ["", "##"], 0, 12);
        let mut ids = vec![7];
        model.encode(&vocabulary, word, &mut ids).unwrap();
        ids[1..].to_vec()
    }

    #[test]
    fn the_longest_prefix_wins_and_there_is_no_way_back() {
        assert_eq!(ids("unaff"), [1, 2]);
        assert_eq!(ids("unéé"), [1, 7, 7]);
        // "un", "##affa", and no token for "ble": the split into "##aff" and "##able" is not found.
        assert_eq!(ids("unaffable"), [0]);
        assert_eq!(ids("é"), [6]);
    }

    #[test]
    fn long_words_and_control_tokens_are_unknown() {
        assert_eq!(ids("unéééééééééé"), [1, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7]);
        assert_eq!(ids("unééééééééééé"), [0]);
        assert_eq!(ids("[CLS]"), [0]);
    }
}
