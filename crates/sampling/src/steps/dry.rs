//! DRY, "don't repeat yourself" (text-generation-webui, pull request 5677, 2024): penalises repeated phrases.
//!
//! For a candidate token, let n be the length of the longest suffix of the text that also precedes an earlier
//! occurrence of the token: sampling the token would repeat n + 1 tokens. If n is at least `dry_allowed_length`,
//! `dry_multiplier * dry_base^(n - dry_allowed_length)` is subtracted from its logit. The suffix does not extend across
//! a sequence breaker, and a token that is itself a breaker is not penalised.

use std::collections::BTreeMap;

use super::step::Effect;
use super::{Context, Description, Step, bounded};
use crate::Error;
use crate::candidates::Candidates;

pub(super) const DESCRIPTION: Description = Description {
    name: "dry",
    label: |_| "dry",
    effect: Effect::EditsLogits,
    is_movable: true,
    summary: "subtracts multiplier x base^(n - allowed length) from a token that would continue a repeat of n tokens",
    is_used: |p| p.dry_multiplier != 0.0,
    option: |_| "dry_multiplier",
    short_setting: |p| p.dry_multiplier.to_string(),
    meaning: |_| "lowers the logit of a token that would continue the repeat of a phrase".into(),
    build: |p, _| {
        Box::new(Dry {
            multiplier: p.dry_multiplier,
            base: p.dry_base,
            allowed_length: p.dry_allowed_length,
            range: p.dry_range,
            breakers: p.dry_sequence_breakers.clone(),
        })
    },
};

#[derive(Debug)]
struct Dry {
    multiplier: f32,
    base: f32,
    allowed_length: u32,
    range: Option<u32>,
    breakers: Vec<Vec<u32>>,
}

impl Step for Dry {
    fn setting(&self) -> String {
        format!("multiplier {}, base {}, allowed length {}", self.multiplier, self.base, self.allowed_length)
    }

    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        let range = self.range.map_or(usize::MAX, |range| range as usize);
        let ids = context.input.history.ids();
        let ids = &ids[ids.len().saturating_sub(range)..];
        let longest = len_after_last_breaker(ids, &self.breakers);
        if longest < self.allowed_length as usize {
            return Ok(());
        }
        suffix_repeats(ids, set.repeats());
        // The longest repeat that each token would continue.
        let mut penalised: BTreeMap<u32, u32> = BTreeMap::new();
        for (index, &repeat) in set.repeats().iter().enumerate().skip(1) {
            let repeat = repeat.min(longest as u32);
            if repeat >= self.allowed_length {
                // `repeats` counts from the end of the text, so the token after a repeat is at the index before it.
                let longest = penalised.entry(ids[ids.len() - index]).or_default();
                *longest = repeat.max(*longest);
            }
        }
        penalised.retain(|token, _| !self.breakers.iter().any(|breaker| breaker == &[*token]));
        set.edit(penalised.into_iter(), |logit, repeat| {
            let length = f64::from(repeat - self.allowed_length);
            bounded(logit, f64::from(logit) - f64::from(self.multiplier) * libm::pow(f64::from(self.base), length))
        });
        Ok(())
    }
}

/// Returns the number of tokens after the last breaker, or of all tokens if there is no breaker.
fn len_after_last_breaker(ids: &[u32], breakers: &[Vec<u32>]) -> usize {
    // Few tokens end a breaker, so few positions need the full comparison.
    let mut lasts: Vec<u32> = breakers.iter().filter_map(|breaker| breaker.last().copied()).collect();
    lasts.sort_unstable();
    let ends_here = |end: usize| {
        lasts.binary_search(&ids[end - 1]).is_ok() && breakers.iter().any(|breaker| ids[..end].ends_with(breaker))
    };
    (1..=ids.len()).rev().find(|&end| ends_here(end)).map_or(ids.len(), |end| ids.len() - end)
}

/// Fills `repeats[i]` with the length of the longest common suffix of the text and of the text without its last i
/// tokens.
///
/// The Z algorithm (Gusfield, "Algorithms on strings, trees and sequences", 1997) on the reversed text. It takes linear
/// time: a value that lies within the rightmost match found so far is copied, not compared again.
fn suffix_repeats(ids: &[u32], repeats: &mut Vec<u32>) {
    let len = ids.len();
    let backwards = |index: usize| ids[len - 1 - index];
    repeats.clear();
    repeats.resize(len, 0);
    let (mut left, mut right) = (0, 0);
    for index in 1..len {
        let mut same = if index < right { (repeats[index - left] as usize).min(right - index) } else { 0 };
        while index + same < len && backwards(same) == backwards(index + same) {
            same += 1;
        }
        repeats[index] = same as u32;
        if index + same > right {
            (left, right) = (index, index + same);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeats_agree_with_their_definition() {
        for modulus in [1u32, 2, 3, 7] {
            let ids: Vec<u32> = (0..80u32).map(|i| (i * i / 3 + i / 5) % modulus).collect();
            let mut repeats = Vec::new();
            suffix_repeats(&ids, &mut repeats);
            for index in 1..ids.len() {
                let shorter = &ids[..ids.len() - index];
                let same = shorter.iter().rev().zip(ids.iter().rev()).take_while(|(a, b)| a == b).count();
                assert_eq!(repeats[index] as usize, same, "modulus {modulus}, index {index}");
            }
        }
    }

    #[test]
    fn breakers_end_a_repeat() {
        let ids = [1, 2, 3, 9, 1, 2];
        assert_eq!(len_after_last_breaker(&ids, &[]), 6);
        assert_eq!(len_after_last_breaker(&ids, &[vec![9]]), 2);
        assert_eq!(len_after_last_breaker(&ids, &[vec![3, 9], vec![1]]), 1);
        assert_eq!(len_after_last_breaker(&ids, &[vec![1, 2]]), 0);
        assert_eq!(len_after_last_breaker(&ids, &[vec![9, 3]]), 6);
    }
}
