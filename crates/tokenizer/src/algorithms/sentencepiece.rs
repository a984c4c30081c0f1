//! SentencePiece's byte-pair encoding: adjacent symbols are joined if the joined text is a token, best score first.
//! The GGUF tokenizer model "llama" (Llama 2, Mistral, Gemma, Phi-3). Called by the pipeline for each piece.

use std::collections::TryReserveError;

use crate::algorithms::bpe::{Scratch, append};
use crate::algorithms::merge_loop::{Join, Pairs, Symbol, merge};
use crate::vocabulary::Vocabulary;

/// Marks a character that has no token.
const NO_TOKEN: u32 = u32::MAX;

pub(crate) struct SentencePieceBpe {
    /// The rank of each id; a higher score is a lower rank.
    ranks: Vec<u32>,
    byte_tokens: Option<Box<[u32; 256]>>,
    /// The id for a character without a token, if there are no byte tokens.
    unknown: Option<u32>,
}

impl SentencePieceBpe {
    /// Builds the model from `scores[id]` for every id of the vocabulary.
    pub(crate) fn new(
        vocabulary: &Vocabulary,
        scores: impl Iterator<Item = f32>,
        unknown: Option<u32>,
    ) -> SentencePieceBpe {
        SentencePieceBpe { ranks: scores.map(rank_of_score).collect(), byte_tokens: vocabulary.byte_tokens(), unknown }
    }

    /// Whether every character has at least one id, possibly the unknown one.
    pub(crate) fn covers_all_text(&self) -> bool {
        self.byte_tokens.is_some() || self.unknown.is_some()
    }

    /// Appends the ids of one piece. Fails if there is no memory for them.
    pub(crate) fn encode(
        &self,
        vocabulary: &Vocabulary,
        piece: &str,
        scratch: &mut Scratch,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let symbols = &mut scratch.symbols;
        symbols.clear();
        symbols.try_reserve(piece.len())?;
        symbols.extend(piece.char_indices().map(|(start, c)| {
            let len = c.len_utf8();
            let id = vocabulary.mergeable(&piece[start..start + len]).unwrap_or(NO_TOKEN);
            Symbol { id, start: start as u32, len: len as u32 }
        }));
        merge(symbols, &ByScore { spm: self, vocabulary, piece })?;
        for symbol in symbols {
            if symbol.id != NO_TOKEN {
                append(ids, [symbol.id])?;
            } else if let Some(byte_tokens) = &self.byte_tokens {
                let bytes = &piece.as_bytes()[symbol.start as usize..(symbol.start + symbol.len) as usize];
                append(ids, bytes.iter().map(|&byte| byte_tokens[byte as usize]))?;
            } else {
                append(ids, self.unknown)?;
            }
        }
        Ok(())
    }
}

struct ByScore<'s> {
    spm: &'s SentencePieceBpe,
    vocabulary: &'s Vocabulary,
    piece: &'s str,
}

impl Pairs for ByScore<'_> {
    fn join(&self, left: Symbol, right: Symbol) -> Option<Join> {
        let joined = &self.piece[left.start as usize..(right.start + right.len) as usize];
        let id = self.vocabulary.mergeable(joined)?;
        Some(Join { rank: self.spm.ranks[id as usize], id })
    }
}

/// Maps scores to integers: a higher score is a lower rank. The order is total, so NaN does no harm.
fn rank_of_score(score: f32) -> u32 {
    // Adding 0.0 turns -0.0 into 0.0: both are the same score.
    let bits = (score + 0.0).to_bits();
    let ascending = if bits >> 31 == 1 { !bits } else { bits | 1 << 31 };
    !ascending
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_follow_scores() {
        let scores = [f32::INFINITY, 3.5, 0.0, -1.0, -1.5, -1e9, f32::NEG_INFINITY];
        assert!(scores.windows(2).all(|pair| rank_of_score(pair[0]) < rank_of_score(pair[1])));
        assert_eq!(rank_of_score(-0.0), rank_of_score(0.0));
    }
}
