//! SentencePiece's unigram model (XGLM, T5): of all ways to spell a piece in tokens, it takes the one with the highest
//! sum of scores, found by dynamic programming. Called by the pipeline for each piece.

use std::collections::TryReserveError;

use crate::algorithms::bpe::append;
use crate::vocabulary::Vocabulary;

/// An unknown character scores this much below the worst token; SentencePiece's constant.
const UNKNOWN_PENALTY: f64 = 10.0;

pub(crate) struct Unigram {
    scores: Vec<f64>,
    unknown_score: f64,
    unknown: Option<u32>,
    byte_tokens: Option<Box<[u32; 256]>>,
    /// The byte lengths of all tokens, ascending: the prefixes to look up at each position.
    lengths: Vec<usize>,
}

/// The best way to spell the text up to a position.
#[derive(Clone, Copy)]
struct Best {
    score: f64,
    start: usize,
    /// The last token; `None` for an unknown character.
    id: Option<u32>,
}

impl Unigram {
    /// Builds the model from `scores[id]` for the first ids of the vocabulary; ids past them (added tokens) are not
    /// used.
    pub(crate) fn new(vocabulary: &Vocabulary, scores: Vec<f64>, unknown: Option<u32>, byte_fallback: bool) -> Unigram {
        let mut lengths: Vec<usize> = (0..scores.len() as u32).map(|id| vocabulary.piece(id).len()).collect();
        lengths.sort_unstable();
        lengths.dedup();
        lengths.retain(|&len| len > 0);
        let worst = scores.iter().copied().fold(f64::INFINITY, f64::min);
        Unigram {
            unknown_score: worst - UNKNOWN_PENALTY,
            scores,
            unknown,
            byte_tokens: byte_fallback.then(|| vocabulary.byte_tokens()).flatten(),
            lengths,
        }
    }

    /// Whether every character has at least one id. Without byte tokens, a run of unknown characters shares one id.
    pub(crate) fn covers_all_text(&self) -> bool {
        self.byte_tokens.is_some()
    }

    pub(crate) fn encode(
        &self,
        vocabulary: &Vocabulary,
        piece: &str,
        ids: &mut Vec<u32>,
    ) -> Result<(), TryReserveError> {
        let mut best: Vec<Option<Best>> = Vec::new();
        best.try_reserve_exact(piece.len() + 1)?;
        best.resize(piece.len() + 1, None);
        for (start, c) in piece.char_indices() {
            let so_far = if start == 0 { 0.0 } else { best[start].map_or(0.0, |best| best.score) };
            let mut offer = |end: usize, score: f64, id: Option<u32>| {
                if best[end].is_none_or(|known| score > known.score) {
                    best[end] = Some(Best { score, start, id });
                }
            };
            let mut alone = false;
            for &len in self.lengths.iter().take_while(|&&len| start + len <= piece.len()) {
                let Some(prefix) = piece.get(start..start + len) else { continue };
                let Some(id) = vocabulary.mergeable(prefix) else { continue };
                if let Some(score) = self.scores.get(id as usize) {
                    offer(start + len, so_far + score, Some(id));
                    alone |= len == c.len_utf8();
                }
            }
            if !alone {
                offer(start + c.len_utf8(), so_far + self.unknown_score, None);
            }
        }
        self.collect(piece, &best, ids)
    }

    /// Walks back along the best spelling. A run of unknown characters becomes its byte tokens, or one unknown token.
    fn collect(&self, piece: &str, best: &[Option<Best>], ids: &mut Vec<u32>) -> Result<(), TryReserveError> {
        let mut spans: Vec<(usize, usize, Option<u32>)> = Vec::new();
        let mut end = piece.len();
        while end > 0 {
            // Every position on the path was reached: each character is at least an unknown step.
            let Some(step) = best[end] else { break };
            match spans.last_mut() {
                Some((start, _, None)) if step.id.is_none() => *start = step.start,
                _ => {
                    spans.try_reserve(1)?;
                    spans.push((step.start, end, step.id));
                }
            }
            end = step.start;
        }
        for (start, end, id) in spans.into_iter().rev() {
            match (id, &self.byte_tokens) {
                (Some(id), _) => append(ids, [id])?,
                (None, Some(tokens)) => {
                    append(ids, piece.as_bytes()[start..end].iter().map(|&b| tokens[b as usize]))?;
                }
                (None, None) => append(ids, self.unknown)?,
            }
        }
        Ok(())
    }
}
