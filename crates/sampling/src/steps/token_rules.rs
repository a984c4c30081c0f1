//! Tokens that may not be chosen: banned ones, all but the allowed ones, and ends that would come too early.

use crate::candidates::Candidates;
use crate::history::History;
use crate::params::SamplingParams;

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct TokenRules {
    banned: Vec<u32>,
    /// A bit a token, as [`Candidates::mask`] takes it.
    allowed: Option<Vec<u32>>,
    num_allowed: usize,
    /// Ends and stops, ruled out while the output is shorter than `min_tokens`.
    ends: Vec<u32>,
    min_tokens: u32,
}

impl TokenRules {
    pub(crate) fn new(params: &SamplingParams, vocab_size: usize) -> Self {
        let allowed = params.allowed_tokens.as_ref().map(|ids| {
            let mut words = vec![0u32; vocab_size.div_ceil(32)];
            for &id in ids {
                words[id as usize / 32] |= 1 << (id % 32);
            }
            words
        });
        let num_allowed = allowed.iter().flatten().map(|word| word.count_ones() as usize).sum();
        let distinct = |mut ids: Vec<u32>| {
            ids.sort_unstable();
            ids.dedup();
            ids
        };
        TokenRules {
            banned: distinct(params.banned_tokens.clone()),
            allowed,
            num_allowed,
            ends: distinct([params.end_ids.as_slice(), &params.stop_ids].concat()),
            min_tokens: params.min_tokens,
        }
    }

    pub(crate) fn apply(&self, set: &mut Candidates<'_>, history: &History) {
        if let Some(words) = &self.allowed {
            set.mask(words);
        }
        if !self.banned.is_empty() {
            set.edit(self.banned.iter().map(|&token| (token, ())), |_, ()| f32::NEG_INFINITY);
        }
        if history.output().len() < self.min_tokens as usize {
            set.edit(self.ends.iter().map(|&token| (token, ())), |_, ()| f32::NEG_INFINITY);
        }
    }

    pub(crate) fn setting(&self) -> String {
        let mut parts = Vec::new();
        if !self.banned.is_empty() {
            parts.push(format!("{} banned", self.banned.len()));
        }
        if self.allowed.is_some() {
            parts.push(format!("{} allowed", self.num_allowed));
        }
        if self.min_tokens > 0 {
            parts.push(format!("at least {} tokens", self.min_tokens));
        }
        parts.join(", ")
    }
}
