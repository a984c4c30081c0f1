//! Token rules: excludes banned tokens, all but the allowed ones, and the end of the reply before `min_tokens`.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::candidates::Candidates;
use crate::{Error, SamplingParams};

pub(super) const DESCRIPTION: Description = Description {
    name: "token_rules",
    label: |_| "rules",
    effect: Effect::ExcludesTokens,
    is_movable: false,
    summary: "excludes banned tokens, all but the allowed ones, and the end of the reply before `min_tokens`",
    is_used: |p| {
        let can_end = !(p.end_ids.is_empty() && p.stop_ids.is_empty());
        !p.banned_tokens.is_empty() || p.allowed_tokens.is_some() || (p.min_tokens > 0 && can_end)
    },
    option: |p| match &p.allowed_tokens {
        _ if !p.banned_tokens.is_empty() => "banned_tokens",
        Some(_) => "allowed_tokens",
        None => "min_tokens",
    },
    short_setting: |_| String::new(),
    meaning: |_| "takes out what may not be chosen".into(),
    build: |p, vocab_size| Box::new(TokenRules::new(p, vocab_size)),
};

#[derive(Debug)]
struct TokenRules {
    banned: Vec<u32>,
    /// One bit per token, as [`Candidates::mask`] takes it.
    allowed: Option<Vec<u32>>,
    num_allowed: usize,
    /// End and stop tokens, excluded while the output is shorter than `min_tokens`.
    ends: Vec<u32>,
    min_tokens: u32,
}

impl TokenRules {
    fn new(params: &SamplingParams, vocab_size: usize) -> Self {
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
}

impl Step for TokenRules {
    fn setting(&self) -> String {
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

    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        if let Some(words) = &self.allowed {
            set.mask(words);
        }
        if !self.banned.is_empty() {
            set.edit(self.banned.iter().map(|&token| (token, ())), |_, ()| f32::NEG_INFINITY);
        }
        if context.input.history.output().len() < self.min_tokens as usize {
            set.edit(self.ends.iter().map(|&token| (token, ())), |_, ()| f32::NEG_INFINITY);
        }
        Ok(())
    }

    fn excludes(&self, token: u32, num_output: usize) -> bool {
        let is_allowed = |words: &Vec<u32>| words[token as usize / 32] >> (token % 32) & 1 == 1;
        !self.allowed.as_ref().is_none_or(is_allowed)
            || self.banned.binary_search(&token).is_ok()
            || (num_output < self.min_tokens as usize && self.ends.binary_search(&token).is_ok())
    }
}
