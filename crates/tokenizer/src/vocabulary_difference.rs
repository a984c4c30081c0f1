//! Compares two vocabularies. Speculation needs it: a draft model is of use only if its ids mean the same as the
//! target's.

use std::fmt;

use crate::tokenizer::Tokenizer;
use crate::vocabulary::TokenKind;

/// Maximum characters of a token that a message shows.
const MAX_SHOWN: usize = 40;

/// The first id that stands for different bytes in two vocabularies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VocabularyDifference {
    pub id: u32,
    /// Bytes in the first vocabulary; `None` if it has no such token.
    pub first: Option<Vec<u8>>,
    /// Bytes in the second vocabulary; `None` if it has no such token.
    pub second: Option<Vec<u8>>,
}

impl VocabularyDifference {
    /// Compares every id of two vocabularies; `None` if all stand for the same bytes. Files pad their vocabularies to
    /// different sizes, so an id that no text is encoded to equals an id that does not exist.
    pub fn find(first: &Tokenizer, second: &Tokenizer) -> Option<VocabularyDifference> {
        let used = |tokenizer: &Tokenizer, id: u32| {
            let token = tokenizer.token(id).filter(|token| token.kind != TokenKind::Unused)?;
            (!token.piece.is_empty()).then(|| token.bytes.into_owned())
        };
        let num_ids = first.vocab_size().max(second.vocab_size()) as u32;
        let ids = 0..num_ids;
        let tokens = ids.map(|id| VocabularyDifference { id, first: used(first, id), second: used(second, id) });
        tokens.into_iter().find(|token| token.first != token.second)
    }
}

/// Shows the bytes of a token in quotes, escaped and shortened: they come from a file that may be hostile.
struct Shown<'a>(&'a Option<Vec<u8>>);

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some(bytes) = self.0 else { return f.write_str("not used") };
        let escaped: String = bytes.escape_ascii().take(MAX_SHOWN + 1).map(char::from).collect();
        match bytes.utf8_chunks().all(|chunk| chunk.invalid().is_empty()) {
            true if bytes.len() <= MAX_SHOWN => write!(f, "{:?}", String::from_utf8_lossy(bytes)),
            _ if escaped.len() > MAX_SHOWN => write!(f, "\"{}…\"", &escaped[..MAX_SHOWN]),
            _ => write!(f, "\"{escaped}\""),
        }
    }
}

/// Shows the id with both meanings: `token 5 is "a" in the first vocabulary and "b" in the second`.
impl fmt::Display for VocabularyDifference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let VocabularyDifference { id, first, second } = self;
        write!(f, "token {id} is {} in the first vocabulary and {} in the second", Shown(first), Shown(second))
    }
}
