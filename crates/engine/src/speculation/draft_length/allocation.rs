//! Allocates the rows of a step to drafts, as a pure function of predicted costs and probabilities.
//!
//! The goal is the maximum of expected tokens per second. A sequence gains less from each further row, because all
//! tokens before it have to be right; for a given number of rows it is therefore best to take those of the highest
//! probability, whichever sequence they belong to. The time of a step as a function of its rows has any shape, so each
//! number of rows is compared. Rows of long contexts cost more; the order of rows deducts that difference at the
//! present rate of tokens per second. A draft model proposes one token for all its sequences in a step of its own:
//! each maximum of its draft lengths is compared as well.

use super::super::MAX_DRAFT_LEN;
use crate::scheduler::{StepCosts, Work};

/// Rows with a lower probability of being right are not considered.
const MIN_PROBABILITY: f64 = 0.01;
/// Maximum rows that are considered: those of the highest probability.
const MAX_ROWS: usize = 512;
/// Maximum sequences for which every length of a draft model is compared; with more, some are left out.
const MAX_FINE: usize = 16;
/// A row count that no step in this number of steps had counts as not measured.
pub(super) const STALE_STEPS: u64 = 2048;
/// A draft may be begun on credit up to this part of its expected gain.
const CREDIT: f64 = 0.5;

/// A sequence that decodes in a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Candidate {
    /// Number of tokens that can be drafted; 0 if there is no draft.
    pub len: usize,
    /// Probability of each token of the draft to be right if those before it are.
    pub rates: [f64; MAX_DRAFT_LEN],
    /// Number of tokens before the chunk that are computed already.
    pub depth: usize,
    /// Time in which the drafter proposes the next token of all its sequences; 0 for a lookup, whose draft is there.
    pub seconds_per_token: f64,
    /// Time that the drafter needs before its first token, for all its sequences; 0 for a lookup.
    pub start_seconds: f64,
}

impl Candidate {
    /// Returns a sequence without a draft.
    pub fn without_draft(depth: usize) -> Candidate {
        Candidate { len: 0, rates: [0.0; MAX_DRAFT_LEN], depth, seconds_per_token: 0.0, start_seconds: 0.0 }
    }

    /// Whether the draft takes time before it can be checked.
    pub(super) fn is_slow(&self) -> bool {
        self.seconds_per_token > 0.0 || self.start_seconds > 0.0
    }

    /// Returns the work of `len` drafted rows besides the row that is computed anyway.
    pub(super) fn work(&self, len: usize) -> Work {
        let (with, without) = (Work::chunk(self.depth, 1 + len), Work::chunk(self.depth, 1));
        Work {
            num_rows: len,
            num_read: with.num_read - without.num_read,
            num_compared: with.num_compared - without.num_compared,
        }
    }

    /// Returns the number of drafted tokens that are expected to be right.
    pub(crate) fn expected(&self, len: usize) -> f64 {
        let mut probability = 1.0;
        let each = self.rates.iter().take(len.min(self.len)).map(|rate| {
            probability *= rate;
            probability
        });
        each.sum()
    }
}

/// Bounds of the drafts of a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Maximum rows of all drafts together.
    pub num_rows: usize,
    /// Maximum predicted time of the step with drafts, as a multiple of its time without. Tenants that share a step
    /// must not wait for the drafts of another; infinite if one tenant is alone.
    pub max_lengthening: f64,
}

/// Returns the number of tokens to draft for each candidate, so that the expected tokens per second of the step are
/// maximal. `base` is the work of the step without drafts: one row for each candidate, and perhaps chunks of prompts.
/// Chunks of prompts are computed anyway, so their time is left out of the rate; a draft beside them must be worth its
/// own time. All lengths are 0 before the first measurement.
///
/// ```
/// use pellucid_engine::scheduler::{StepCosts, Work};
/// use pellucid_engine::speculation::{Candidate, Limits, choose};
///
/// let mut costs = StepCosts::default();
/// for num_rows in [1, 2, 4, 8, 16] {
///     // Sixteen rows take as long as one.
///     costs.measure(Work::chunk(100, num_rows), 0.01);
/// }
/// let candidate = Candidate { len: 8, rates: [0.8; 15], ..Candidate::without_draft(100) };
/// let limits = Limits { num_rows: 64, max_lengthening: f64::INFINITY };
/// assert_eq!(choose(&costs, Work::chunk(100, 1), &[candidate], limits), [8]);
/// ```
pub fn choose(costs: &StepCosts, base: Work, candidates: &[Candidate], limits: Limits) -> Vec<usize> {
    match Step::new(costs, base, candidates) {
        Some(step) => step.allocate(limits, f64::INFINITY, false).lengths,
        None => vec![0; candidates.len()],
    }
}

/// Lengths of drafts, and what they promise.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Choice {
    pub lengths: Vec<usize>,
    /// Expected tokens per second.
    pub rate: f64,
    /// Time that drafting and checking add to the step.
    pub extra_seconds: f64,
}

/// A row that could be drafted: a position of a candidate's draft.
#[derive(Clone, Copy)]
struct Row {
    candidate: usize,
    position: usize,
    /// Probability that it adds a token.
    probability: f64,
    /// Probability less the value of the time that its context costs.
    priority: f64,
}

/// A step whose time without drafts is known.
pub(super) struct Step<'a> {
    costs: &'a StepCosts,
    base: Work,
    base_seconds: f64,
    /// Time of the step without chunks of prompts and without drafts.
    pub(super) plain_seconds: f64,
    candidates: &'a [Candidate],
}

impl<'a> Step<'a> {
    /// Returns `None` if there is nothing to draft for, or no time is known.
    pub(super) fn new(costs: &'a StepCosts, base: Work, candidates: &'a [Candidate]) -> Option<Step<'a>> {
        let mut decode = Work::default();
        candidates.iter().for_each(|candidate| decode += Work::chunk(candidate.depth, 1));
        let base_seconds = costs.predict(base);
        let plain_seconds = costs.predict(decode).min(base_seconds);
        (plain_seconds > 0.0).then_some(Step { costs, base, base_seconds, plain_seconds, candidates })
    }

    /// Time that one token is worth: its part of a step without drafts.
    pub(super) fn token_seconds(&self) -> f64 {
        self.plain_seconds / self.candidates.len() as f64
    }

    /// Whether a step may take `extra_seconds` longer.
    pub(super) fn is_within(&self, limits: Limits, extra_seconds: f64) -> bool {
        extra_seconds <= (limits.max_lengthening - 1.0) * self.base_seconds
    }

    /// Returns the work of the step with drafts.
    pub(super) fn work(&self, lengths: &[usize]) -> Work {
        let mut work = self.base;
        self.candidates.iter().zip(lengths).for_each(|(candidate, &len)| work += candidate.work(len));
        work
    }

    /// Returns the predicted time that drafts add to the step.
    pub(super) fn extra_seconds(&self, lengths: &[usize]) -> f64 {
        let drafts = self.candidates.iter().zip(lengths).filter(|(_, len)| **len > 0);
        let drafting = drafts.map(|(draft, &len)| draft.start_seconds + draft.seconds_per_token * len as f64);
        self.costs.predict(self.work(lengths)) - self.base_seconds + drafting.fold(0.0, f64::max)
    }

    /// Whether drafts could lead to a row count that was not measured lately.
    pub(super) fn is_explorable(&self, limits: Limits) -> bool {
        let num_rows: usize = self.candidates.iter().map(|candidate| candidate.len).sum();
        let most = self.base.num_rows + num_rows.min(limits.num_rows).min(MAX_ROWS);
        let counts = std::iter::successors(Some(self.base.num_rows + 1), |rows| Some((rows + 1).next_power_of_two()));
        let mut reached = counts.take_while(|&rows| rows <= most);
        reached.any(|num_rows| self.costs.is_stale(Work { num_rows, ..self.base }, STALE_STEPS))
    }

    /// Returns the best lengths whose added time is at most `budget` and a part of the expected gain. If it `explores`,
    /// a row count that was not measured lately counts as cheap as the next smaller one that was, up to twice the
    /// latter.
    pub(super) fn allocate(&self, limits: Limits, budget: f64, explores: bool) -> Choice {
        let num_candidates = self.candidates.len();
        let mut best = Choice {
            lengths: vec![0; num_candidates],
            rate: num_candidates as f64 / self.plain_seconds,
            extra_seconds: 0.0,
        };
        let longest = |slow: bool| {
            let drafts = self.candidates.iter().filter(|candidate| candidate.is_slow() == slow);
            drafts.map(|candidate| candidate.len).max().unwrap_or(0)
        };
        if limits.num_rows == 0 || (longest(true) == 0 && longest(false) == 0) {
            return best;
        }
        // The value of time in the order of rows depends on the result: a second round uses that of the first.
        for _ in 0..2 {
            let (rows, spread) = self.rows(best.rate);
            let previous = best.rate;
            let is_fine = |len: &usize| num_candidates <= MAX_FINE || [0, 1, 2, 3, 4, 6, 8, 11, 15].contains(len);
            for max_slow in (0..=longest(true)).filter(is_fine) {
                if let Some(found) = self.scan(&rows, max_slow, limits, budget, explores, best.rate) {
                    best = found;
                }
            }
            if best.rate == previous || spread * best.rate < 0.02 {
                break;
            }
        }
        best
    }

    /// Returns all rows in the order in which they should be taken, and the difference of time between the cheapest and
    /// the most expensive context.
    fn rows(&self, rate: f64) -> (Vec<Row>, f64) {
        let mut rows = Vec::new();
        let (mut cheapest, mut dearest) = (f64::INFINITY, 0.0f64);
        for (index, candidate) in self.candidates.iter().enumerate().filter(|(_, candidate)| candidate.len > 0) {
            let context = Work { num_rows: 0, ..candidate.work(1) };
            let context_seconds = self.costs.predict(self.base.and(context)) - self.base_seconds;
            (cheapest, dearest) = (cheapest.min(context_seconds), dearest.max(context_seconds));
            let mut probability = 1.0;
            for (position, chance) in candidate.rates.iter().take(candidate.len).enumerate() {
                probability *= chance;
                if probability < MIN_PROBABILITY {
                    break;
                }
                rows.push(Row {
                    candidate: index,
                    position,
                    probability,
                    priority: probability - rate * context_seconds,
                });
            }
        }
        // Among equals the shortest draft comes first, so that the positions of a draft stay in order.
        let order = |a: &Row, b: &Row| b.priority.total_cmp(&a.priority).then(a.position.cmp(&b.position));
        if rows.len() > MAX_ROWS {
            rows.select_nth_unstable_by(MAX_ROWS, order);
            rows.truncate(MAX_ROWS);
        }
        rows.sort_by(order);
        (rows, (dearest - cheapest).max(0.0))
    }

    /// Takes row after row, with at most `max_slow` of each slow draft, and returns the best state on the way if it is
    /// better than `best_rate`.
    fn scan(
        &self,
        rows: &[Row],
        max_slow: usize,
        limits: Limits,
        budget: f64,
        explores: bool,
        best_rate: f64,
    ) -> Option<Choice> {
        let slow = self.candidates.iter().filter(|candidate| candidate.is_slow() && max_slow > 0);
        let drafting =
            slow.map(|slow| slow.start_seconds + slow.seconds_per_token * max_slow as f64).fold(0.0, f64::max);
        let (mut work, mut gain, mut fresh_rows) = (self.base, 0.0, self.base.num_rows);
        let mut lengths = vec![0; self.candidates.len()];
        let mut taken: Vec<usize> = Vec::new();
        let mut best: Option<(usize, f64, f64)> = None;
        for row in rows {
            let draft = &self.candidates[row.candidate];
            // A row that did not fit ends its draft.
            let is_next = lengths[row.candidate] == row.position;
            if !is_next || (draft.is_slow() && row.position >= max_slow) {
                continue;
            }
            if taken.len() == limits.num_rows {
                break;
            }
            let longer =
                work.and(Work { num_rows: 1, num_read: 1, num_compared: (draft.depth + row.position + 2) as u64 });
            let extra = self.costs.predict(longer) - self.base_seconds + drafting;
            if !self.is_within(limits, extra) {
                continue;
            }
            work = longer;
            gain += row.probability;
            lengths[row.candidate] += 1;
            taken.push(row.candidate);
            let mut seconds = self.plain_seconds + extra;
            if explores {
                if !self.costs.is_stale(work, STALE_STEPS) {
                    fresh_rows = work.num_rows;
                } else if work.num_rows > 2 * fresh_rows {
                    break;
                } else {
                    let known = self.costs.predict(Work { num_rows: fresh_rows, ..work });
                    seconds = self.plain_seconds + known - self.base_seconds + drafting;
                }
            }
            let rate = (self.candidates.len() as f64 + gain) / seconds;
            let affordable = extra <= budget + CREDIT * gain * self.token_seconds();
            if affordable && rate > best.map_or(best_rate, |(_, rate, _)| rate) {
                best = Some((taken.len(), rate, extra));
            }
        }
        best.map(|(count, rate, extra_seconds)| {
            taken[count..].iter().for_each(|&candidate| lengths[candidate] -= 1);
            Choice { lengths, rate, extra_seconds }
        })
    }
}
