//! The pairs of characters that are adjacent inside some token.
//!
//! If two adjacent characters of a text form no such pair, no merge can cross them, and the text can be split there
//! without changing an id. That turns SentencePiece's one merge over a whole text into many merges over words, which is
//! faster and lets repeated words be cached. It is exact for every vocabulary. Called by the pipeline.

/// A set of character pairs as a hashed bit set. A false positive only loses a split; there are no false negatives.
pub(crate) struct JoinablePairs {
    bits: Box<[u64]>,
}

/// 2^22 bits, 512 KiB; Gemma's 262,144 tokens set about one bit in thirty.
const LOG_BITS: u32 = 22;

fn bit(left: char, right: char) -> usize {
    let key = (left as u64) << 32 | right as u64;
    (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (64 - LOG_BITS)) as usize
}

impl JoinablePairs {
    pub(crate) fn new<'p>(pieces: impl Iterator<Item = &'p str>) -> JoinablePairs {
        let mut bits = vec![0u64; 1 << (LOG_BITS - 6)].into_boxed_slice();
        for piece in pieces {
            for (left, right) in piece.chars().zip(piece.chars().skip(1)) {
                let at = bit(left, right);
                bits[at / 64] |= 1 << (at % 64);
            }
        }
        JoinablePairs { bits }
    }

    fn may_join(&self, left: char, right: char) -> bool {
        let at = bit(left, right);
        self.bits[at / 64] >> (at % 64) & 1 == 1
    }

    /// Splits a text between all characters that no token joins.
    pub(crate) fn split<'t>(&self, text: &'t str, emit: &mut dyn FnMut(&'t str)) {
        let mut start = 0;
        let mut previous = None;
        for (at, c) in text.char_indices() {
            if previous.is_some_and(|left| !self.may_join(left, c)) {
                emit(&text[start..at]);
                start = at;
            }
            previous = Some(c);
        }
        if start < text.len() {
            emit(&text[start..]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_split_where_no_token_joins_it() {
        let joinable_pairs = JoinablePairs::new(["ab", "▁c", "cd"].into_iter());
        let mut pieces = Vec::new();
        joinable_pairs.split("ab▁cdba", &mut |piece| pieces.push(piece));
        assert_eq!(pieces, ["ab", "▁cd", "b", "a"]);
    }
}
