//! Estimates how often a drafter is right.
//!
//! A proposal is compared with the tokens that the model chose, whether or not the model was asked to check it. A
//! drafter that proposes at no cost (a lookup) is therefore observed in every step, and one that is wrong costs nothing
//! while it is observed: it needs no probes, and a change of the text is noticed at the next few tokens.
//!
//! Each level of a drafter's confidence has an estimate of its own. In prose, a match of two tokens is wrong and never
//! drafted, while the first long match, where the text begins to quote, is.
//!
//! Two averages with different memories tell chance from change. The longer one is the estimate, because a short one is
//! high by chance now and then, and a long draft at such a moment is mostly wrong. If the short one differs by more
//! than chance explains, the text has changed, and the estimate starts again from it.

use super::scored_draft::{Level, NUM_LEVELS, ScoredDraft};
use super::{DrafterKind, MAX_DRAFT_LEN};

/// Least weight of the newest token in the estimates of a sequence.
const SEQUENCE_RATE: f64 = 0.02;
/// Least weight of the newest token in estimates over many sequences.
const SHARED_RATE: f64 = 0.005;
/// Weight of the newest token in the short average.
const RECENT_RATE: f64 = 0.2;
/// A difference between the averages that is no chance. Three tokens that are right after wrong ones make it.
const CHANGE: f64 = 0.45;
/// Number of tokens that a prior counts for.
const PRIOR_WEIGHT: f64 = 3.0;
/// Estimates stay within these bounds, so that none takes long to change.
const BOUNDS: (f64, f64) = (0.01, 0.99);

#[derive(Debug, Clone, Copy, PartialEq)]
struct Estimate {
    rate: f64,
    /// The short average.
    recent: f64,
    /// Number of tokens that were observed, with the prior.
    weight: f64,
}

/// Probability that a proposed token is right if those before it in the draft were, by drafter and confidence.
#[derive(Debug, Clone, PartialEq)]
pub struct Acceptance {
    estimates: [[Estimate; NUM_LEVELS]; DrafterKind::ALL.len()],
    min_step: f64,
    /// Whether an estimate starts again after a change.
    follows_changes: bool,
}

fn new_estimate(rate: f64) -> Estimate {
    Estimate { rate, recent: rate, weight: PRIOR_WEIGHT }
}

/// Rates until something was observed.
fn prior(drafter: DrafterKind, level: usize) -> f64 {
    match drafter {
        DrafterKind::DraftModel | DrafterKind::Mtp => [0.7, 0.7, 0.75, 0.85][level],
        DrafterKind::Ngram | DrafterKind::Suffix => [0.25, 0.45, 0.65, 0.8][level],
        DrafterKind::Prediction => [0.5, 0.65, 0.8, 0.9][level],
        DrafterKind::Custom => 0.5,
    }
}

impl Acceptance {
    /// Returns estimates over many sequences, which begin as guesses. New sequences start from them.
    pub fn shared() -> Acceptance {
        let of_drafter = |drafter| std::array::from_fn(|level| new_estimate(prior(drafter, level)));
        Acceptance { estimates: DrafterKind::ALL.map(of_drafter), min_step: SHARED_RATE, follows_changes: false }
    }

    /// Returns the estimates of a new sequence. `prior` should come from sequences of the same tenant: the lengths of
    /// drafts show in the times of tokens.
    pub fn of_sequence(prior: &Acceptance) -> Acceptance {
        let known = |estimate: Estimate| new_estimate(estimate.rate);
        Acceptance {
            estimates: prior.estimates.map(|levels| levels.map(known)),
            min_step: SEQUENCE_RATE,
            follows_changes: true,
        }
    }

    /// Compares a draft with the tokens that the model chose from the draft's first position on, and returns the number
    /// of tokens that agree. Call it for every draft of a step, also for those that were not computed; a step of one
    /// token shows whether the first token of a draft was right.
    pub fn observe(&mut self, draft: &ScoredDraft, chosen: &[u32]) -> usize {
        let mut num_right = 0;
        for ((token, level), right) in draft.tokens().iter().zip(draft.levels()).zip(chosen) {
            self.record_token(draft.drafter, *level, token == right);
            if token != right {
                break;
            }
            num_right += 1;
        }
        num_right
    }

    /// Learns that the first `num_accepted` of `num_drafted` tokens without confidence were right.
    pub fn record(&mut self, drafter: DrafterKind, num_drafted: usize, num_accepted: usize) {
        (0..num_accepted).for_each(|_| self.record_token(drafter, Level::LOWEST, true));
        if num_accepted < num_drafted {
            self.record_token(drafter, Level::LOWEST, false);
        }
    }

    fn record_token(&mut self, drafter: DrafterKind, level: Level, is_right: bool) {
        let estimate = &mut self.estimates[drafter.index()][level.index()];
        estimate.weight += 1.0;
        let step = (1.0 / estimate.weight).max(self.min_step);
        let value = f64::from(is_right);
        estimate.rate = (estimate.rate + step * (value - estimate.rate)).clamp(BOUNDS.0, BOUNDS.1);
        estimate.recent += RECENT_RATE * (value - estimate.recent);
        if self.follows_changes && (estimate.recent - estimate.rate).abs() > CHANGE {
            *estimate = new_estimate(estimate.recent);
        }
    }

    /// Probability that the next token of a drafter is right.
    pub fn rate(&self, drafter: DrafterKind, level: Level) -> f64 {
        self.estimates[drafter.index()][level.index()].rate
    }

    /// Probabilities of the tokens of a draft; 0 after its end.
    pub fn rates(&self, draft: &ScoredDraft) -> [f64; MAX_DRAFT_LEN] {
        let mut rates = [0.0; MAX_DRAFT_LEN];
        for (rate, level) in rates.iter_mut().zip(draft.levels()) {
            *rate = self.rate(draft.drafter, *level);
        }
        rates
    }

    /// Number of tokens of a draft that are expected to be right. Of several drafts, the one with the highest number is
    /// the one to check.
    pub fn expected(&self, draft: &ScoredDraft) -> f64 {
        let mut probability = 1.0;
        self.rates(draft)
            .iter()
            .map(|rate| {
                probability *= rate;
                probability
            })
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn draft(tokens: &[u32], level: Level) -> ScoredDraft {
        let mut draft = ScoredDraft::new(DrafterKind::Ngram);
        tokens.iter().for_each(|&token| draft.push(token, level));
        draft
    }

    #[test]
    fn observed_tokens_end_at_the_first_wrong_one() {
        let mut acceptance = Acceptance::shared();
        let high = Level::of_match(9);
        let before = acceptance.rate(DrafterKind::Ngram, high);
        assert_eq!(acceptance.observe(&draft(&[1, 2, 3, 4], high), &[1, 2, 9, 4]), 2);
        assert_eq!(acceptance.observe(&draft(&[1, 2, 3, 4], high), &[1]), 1, "nothing is known about the others");
        assert_eq!(acceptance.observe(&draft(&[1], high), &[1, 2, 3]), 1);
        assert_eq!(acceptance.observe(&draft(&[], high), &[1, 2, 3]), 0);
        let expected = (PRIOR_WEIGHT * before + 4.0) / (PRIOR_WEIGHT + 5.0);
        assert!((acceptance.rate(DrafterKind::Ngram, high) - expected).abs() < 1e-9, "4 of 5 tokens were right");
        let untouched = Acceptance::shared();
        for (drafter, level) in [(DrafterKind::Ngram, Level::LOWEST), (DrafterKind::Suffix, high)] {
            assert_eq!(acceptance.rate(drafter, level), untouched.rate(drafter, level));
        }
    }

    #[test]
    fn a_sequence_follows_a_change_within_few_tokens() {
        let mut acceptance = Acceptance::of_sequence(&Acceptance::shared());
        let rate = |acceptance: &Acceptance| acceptance.rate(DrafterKind::DraftModel, Level::LOWEST);
        (0..500).for_each(|_| acceptance.record(DrafterKind::DraftModel, 4, 0));
        assert!(rate(&acceptance) < 0.05);
        (0..3).for_each(|_| acceptance.record(DrafterKind::DraftModel, 4, 4));
        assert!(rate(&acceptance) > 0.7, "{}", rate(&acceptance));
        (0..15).for_each(|_| acceptance.record(DrafterKind::DraftModel, 4, 0));
        assert!(rate(&acceptance) < 0.4, "{}", rate(&acceptance));
    }

    #[test]
    fn a_new_sequence_starts_from_the_others_and_learns_faster() {
        let mut shared = Acceptance::shared();
        (0..1000).for_each(|_| shared.record(DrafterKind::Custom, 1, 0));
        let mut sequence = Acceptance::of_sequence(&shared);
        assert!(sequence.rate(DrafterKind::Custom, Level::LOWEST) < 0.02);
        shared.record(DrafterKind::Custom, 4, 4);
        sequence.record(DrafterKind::Custom, 4, 4);
        assert!(shared.rate(DrafterKind::Custom, Level::LOWEST) < 0.1);
        assert!(sequence.rate(DrafterKind::Custom, Level::LOWEST) > 0.5);
    }

    #[test]
    fn the_expected_number_of_tokens_multiplies_the_rates() {
        let acceptance = Acceptance::shared();
        let draft = draft(&[1, 2, 3], Level::LOWEST);
        assert!((acceptance.expected(&draft) - (0.25 + 0.0625 + 0.015625)).abs() < 1e-9);
        assert_eq!(acceptance.rates(&draft)[2..4], [0.25, 0.0]);
    }
}
