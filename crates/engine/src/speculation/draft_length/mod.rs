//! Chooses how many tokens to draft for each sequence of a step.
//!
//! [`choose`] maximises the expected tokens per second from predicted costs and estimated probabilities. Both can be
//! wrong, so [`DraftLengths`] keeps an account of time: drafts are paid from it in advance, accepted tokens pay into
//! it, and 0.5 % of the time goes into it unconditionally. A drafter that is always wrong is left with that income. A
//! second account of 1 % pays for probes, because a draft model that does not draft cannot be observed (a lookup can:
//! see [`Acceptance`](super::Acceptance)).
//!
//! Costs of row counts that no step had are guesses. A step tries such a count if it would be the best choice at the
//! cost of the next smaller count that is known, and if the account can pay its guessed cost. A plain step is measured
//! again if none was for a while, since all gains are relative to it.

mod allocation;
#[cfg(test)]
mod tests;

pub use allocation::{Candidate, Limits, choose};

use allocation::Step;

use crate::scheduler::{StepCosts, Work};

/// Part of the time that goes into the account of drafts, and into that of probes.
const DRAFT_INCOME: f64 = 0.005;
const PROBE_INCOME: f64 = 0.01;
/// Plain steps that the account of drafts begins with, and the maximum that it holds.
const INITIAL_STEPS: f64 = 1.5;
const MAX_STEPS: f64 = 16.0;
/// Maximum plain steps that the account of probes holds.
const MAX_PROBE_STEPS: f64 = 4.0;
/// Plain steps by which a step can be later than predicted; a longer pause is none of the drafts.
const MAX_SURPRISE: f64 = 4.0;
/// A plain step is measured if the last this number of steps had none: often if drafts hardly pay, when the difference
/// decides, and so rarely otherwise that it costs 1 %.
const PLAIN_INTERVALS: (f64, f64) = (32.0, 512.0);
const PLAIN_SHARE: f64 = 0.01;
/// A row count that was not measured is tried if it promises this multiple of the known rate.
const MIN_PROMISE: f64 = 1.05;

/// Chooses the draft lengths of an engine's steps. An engine has one.
#[derive(Debug, Clone, Default)]
pub struct DraftLengths {
    /// Seconds that drafts may cost; `None` before the first step.
    balance: Option<f64>,
    /// Seconds that probes may cost.
    probe_balance: f64,
    /// The step that was not finished yet.
    chosen: Option<Chosen>,
    /// The candidate at which the search for the next probe begins.
    next_probe: usize,
}

/// A step with drafts, as it was predicted.
#[derive(Debug, Clone, Copy, Default)]
struct Chosen {
    /// Time without drafting.
    step_seconds: f64,
    /// Time of a step without drafts, and its part for one token.
    plain_seconds: f64,
    token_seconds: f64,
    /// Time that was paid for drafts, and for a probe.
    draft_seconds: f64,
    probe_seconds: f64,
}

impl DraftLengths {
    /// Returns the number of tokens to draft for each candidate. There must be a candidate for each sequence that
    /// decodes in the step, also for those without a draft: their tokens become later too. `base` is the work of the
    /// step without drafts.
    ///
    /// A draft of a lookup that is not used should still be observed; see
    /// [`Acceptance::observe`](super::Acceptance::observe).
    pub fn choose(&mut self, costs: &StepCosts, base: Work, candidates: &[Candidate], limits: Limits) -> Vec<usize> {
        let none = vec![0; candidates.len()];
        let Some(step) = Step::new(costs, base, candidates) else { return none };
        self.chosen = None;
        let balance = self.balance.unwrap_or(INITIAL_STEPS * step.plain_seconds) + DRAFT_INCOME * step.plain_seconds;
        let balance = balance.min(MAX_STEPS * step.plain_seconds);
        self.balance = Some(balance);
        self.probe_balance += PROBE_INCOME * step.plain_seconds;
        self.probe_balance = self.probe_balance.min(MAX_PROBE_STEPS * step.plain_seconds);
        if candidates.iter().all(|candidate| candidate.len == 0) || costs.is_stale(base, PLAIN_INTERVALS.1 as u64) {
            return none;
        }
        let mut choice = step.allocate(limits, balance, false);
        if step.is_explorable(limits) {
            let trial = step.allocate(limits, balance, true);
            if trial.rate > MIN_PROMISE * choice.rate {
                choice = trial;
            }
        }
        let speed_up = choice.rate * step.token_seconds();
        let interval = ((speed_up - 1.0) / PLAIN_SHARE).clamp(PLAIN_INTERVALS.0, PLAIN_INTERVALS.1);
        if choice.extra_seconds > 0.0 && costs.is_stale(base, interval as u64) {
            return none;
        }
        self.balance = Some(balance - choice.extra_seconds);
        let probe_seconds = self.add_probe(&step, candidates, limits, &mut choice.lengths);
        self.probe_balance -= probe_seconds;
        self.chosen = choice.lengths.iter().any(|&len| len > 0).then(|| Chosen {
            step_seconds: costs.predict(step.work(&choice.lengths)),
            plain_seconds: step.plain_seconds,
            token_seconds: step.token_seconds(),
            draft_seconds: choice.extra_seconds,
            probe_seconds,
        });
        choice.lengths
    }

    /// Learns how the step of the last choice ended: `seconds` is its time as [`StepCosts::measure`] gets it, without
    /// the time of drafting, and `num_accepted` the number of drafted tokens of all sequences that were accepted. Call
    /// it before the next choice, after each step with drafts.
    pub fn finish_step(&mut self, seconds: f64, num_accepted: usize) {
        let Some(chosen) = self.chosen.take() else { return };
        let late = (seconds - chosen.step_seconds).clamp(0.0, MAX_SURPRISE * chosen.plain_seconds);
        let late = if late.is_finite() { late } else { 0.0 };
        let extra = chosen.draft_seconds + chosen.probe_seconds;
        let part_of_probe = if extra > 0.0 { chosen.probe_seconds / extra } else { 0.0 };
        self.probe_balance -= late * part_of_probe;
        if let Some(balance) = &mut self.balance {
            *balance += num_accepted as f64 * chosen.token_seconds - late * (1.0 - part_of_probe);
            *balance = balance.min(MAX_STEPS * chosen.plain_seconds);
        }
    }

    /// Lets a draft model that is silent propose one token, if the account of probes can pay for it. Returns its time.
    fn add_probe(&mut self, step: &Step<'_>, candidates: &[Candidate], limits: Limits, lengths: &mut [usize]) -> f64 {
        if lengths.iter().sum::<usize>() >= limits.num_rows {
            return 0.0;
        }
        let mut order = (0..candidates.len()).map(|i| (self.next_probe + i) % candidates.len());
        let silent = |i: &usize| candidates[*i].is_slow() && candidates[*i].len > 0 && lengths[*i] == 0;
        let Some(probed) = order.find(silent) else { return 0.0 };
        let before = step.extra_seconds(lengths);
        lengths[probed] = 1;
        let after = step.extra_seconds(lengths);
        if after - before <= self.probe_balance && step.is_within(limits, after) {
            self.next_probe = probed + 1;
            after - before
        } else {
            lengths[probed] = 0;
            0.0
        }
    }
}
