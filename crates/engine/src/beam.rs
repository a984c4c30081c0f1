//! Beam search: keeps the `width` most probable continuations at every step, and returns the best that were completed.
//!
//! The definitions are those of the `transformers` library (5.22), which made the goldens. With B beams, end tokens E
//! and at most M generated tokens, step t does this:
//!
//! 1. It continues every running beam by every token. A candidate's total is the sum of its log probabilities. The best
//!    `max(2, 1 + |E|) * B` candidates are kept, so that at least B of them do not end.
//! 2. Candidates that end (in E, or t = M) and are among the first B join the finished pool with the score `total /
//!    t^length_penalty`, where t counts generated tokens including the end token. The pool keeps its best B.
//! 3. The first B candidates that do not end become the running beams.
//! 4. The search stops when t = M, or when the pool is full and `early_stopping` expects nothing better.

use pellucid_sampling::StepKind;

use crate::{Error, Request, fallible};

/// Parameters of a beam search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamParams {
    /// Number of beams.
    pub width: usize,
    /// Number of finished beams to return, at most `width`.
    pub num_returned: usize,
    /// A value above 0 favours longer replies, below 0 shorter ones.
    pub length_penalty: f32,
    /// When to stop once `width` beams are finished.
    pub early_stopping: EarlyStopping,
}

/// When a full pool ends the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyStopping {
    /// At once.
    Always,
    /// When the best running beam, scored as if it ended now, is no better than the worst finished one.
    Heuristic,
    /// When no running beam can become better than the worst finished one. The best running beam is scored at the
    /// maximum length if `length_penalty` favours long replies.
    Never,
}

/// A finished continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Beam {
    /// Generated tokens, the end token included.
    pub ids: Vec<u32>,
    /// Sum of the log probabilities, divided by `length^length_penalty`.
    pub score: f64,
}

impl BeamParams {
    /// Refuses sampling parameters: a search does not sample, and must not silently ignore them.
    pub fn check(&self, request: &Request) -> Result<(), Error> {
        if !(self.length_penalty.is_finite() && self.length_penalty.abs() <= 100.0) {
            return Err(Error::OutOfRange {
                name: "length_penalty",
                expected: "-100 to 100".into(),
                found: self.length_penalty.to_string(),
            });
        }
        let sampling = &request.sampling;
        let is_step = |kind: &StepKind| !matches!(kind, StepKind::Mask | StepKind::Draw) && sampling.uses(*kind);
        if let Some(kind) = StepKind::ALL.iter().find(|kind| is_step(kind)) {
            return Err(Error::NotWithBeams { name: sampling.setting_of(*kind) });
        }
        let given = [
            ("n", request.num_choices > 1),
            ("best_of", request.best_of > 1),
            ("loop_guard", request.loop_guard),
            ("trace", request.trace),
            ("probe", request.probe.is_some()),
            ("grammar", request.constraint.is_some()),
            ("stop_ids", !sampling.stop_ids.is_empty()),
            ("samplers", sampling.samplers.is_some()),
            ("logprobs", sampling.logprobs.is_some()),
        ];
        match given.into_iter().find(|(_, given)| *given) {
            Some((name, _)) => Err(Error::NotWithBeams { name }),
            None => Ok(()),
        }
    }
}

/// The state of a search between steps.
#[derive(Debug)]
pub(crate) struct BeamSearch {
    params: BeamParams,
    end_ids: Vec<u32>,
    max_tokens: usize,
    running: Vec<RunningBeam>,
    /// Best first, at most `width`.
    finished: Vec<Beam>,
    num_steps: usize,
}

/// A beam that may still be continued.
#[derive(Debug, Clone)]
struct RunningBeam {
    /// Generated tokens.
    ids: Vec<u32>,
    /// Sum of their log probabilities.
    total: f64,
}

/// A continuation of a running beam.
#[derive(Debug, Clone, Copy)]
struct BeamCandidate {
    beam: usize,
    token: u32,
    total: f64,
}

/// A running beam of the next step: the index of the current beam that it continues, and the token that it adds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Continuation {
    pub(crate) parent: usize,
    pub(crate) token: u32,
}

impl BeamSearch {
    pub(crate) fn new(params: BeamParams, end_ids: &[u32], max_tokens: usize) -> Self {
        let mut end_ids = end_ids.to_vec();
        end_ids.sort_unstable();
        end_ids.dedup();
        let start = RunningBeam { ids: Vec::new(), total: 0.0 };
        BeamSearch { params, end_ids, max_tokens, running: vec![start], finished: Vec::new(), num_steps: 0 }
    }

    /// Takes the logits of every running beam and returns the beams of the next step; `None` when the search is over.
    pub(crate) fn advance(&mut self, logits: &[&[f32]]) -> Result<Option<Vec<Continuation>>, Error> {
        assert_eq!(logits.len(), self.running.len(), "one row of logits for each beam");
        self.num_steps += 1;
        let width = self.params.width;
        let is_last = self.num_steps == self.max_tokens;
        let kept = self.best_candidates(logits, width * (1 + self.end_ids.len()).max(2));
        let ends = |candidate: &BeamCandidate| is_last || self.end_ids.binary_search(&candidate.token).is_ok();

        let (ended, continuing): (Vec<(usize, BeamCandidate)>, Vec<_>) =
            kept.iter().copied().enumerate().partition(|(_, candidate)| ends(candidate));
        for (_, candidate) in ended.iter().filter(|(rank, _)| *rank < width) {
            let ids = self.extended(candidate)?;
            self.finished.push(Beam { ids, score: self.score(candidate.total, self.num_steps) });
        }
        // A stable sort: of equal scores, the one that finished first stays ahead.
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(width);

        let next: Vec<BeamCandidate> = continuing.into_iter().map(|(_, candidate)| candidate).take(width).collect();
        if is_last || next.is_empty() || !self.can_improve(next[0].total) {
            return Ok(None);
        }
        let running =
            next.iter().map(|candidate| Ok(RunningBeam { ids: self.extended(candidate)?, total: candidate.total }));
        self.running = running.collect::<Result<_, Error>>()?;
        Ok(Some(next.iter().map(|c| Continuation { parent: c.beam, token: c.token }).collect()))
    }

    /// Returns the tokens of a beam with those of a candidate that continues it.
    fn extended(&self, candidate: &BeamCandidate) -> Result<Vec<u32>, Error> {
        let before = &self.running[candidate.beam].ids;
        let mut ids = fallible::with_capacity(before.len() + 1)?;
        ids.extend_from_slice(before);
        ids.push(candidate.token);
        Ok(ids)
    }

    /// Returns the best finished beams. If the search was ended early, running beams fill up to `num_returned`.
    pub(crate) fn results(mut self) -> Vec<Beam> {
        if self.finished.len() < self.params.num_returned {
            let running = std::mem::take(&mut self.running);
            for RunningBeam { ids, total } in running {
                let score = self.score(total, ids.len().max(1));
                self.finished.push(Beam { ids, score });
            }
            self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        }
        self.finished.truncate(self.params.num_returned);
        self.finished
    }

    fn score(&self, total: f64, len: usize) -> f64 {
        total / (len as f64).powf(f64::from(self.params.length_penalty))
    }

    fn can_improve(&self, best_total: f64) -> bool {
        let Some(worst) = self.finished.last().filter(|_| self.finished.len() == self.params.width) else {
            return true;
        };
        let len = match self.params.early_stopping {
            EarlyStopping::Always => return false,
            EarlyStopping::Never if self.params.length_penalty > 0.0 => self.max_tokens,
            EarlyStopping::Never | EarlyStopping::Heuristic => self.num_steps,
        };
        self.score(best_total, len) > worst.score
    }

    /// Returns the `count` best candidates, best first. Ties go to the earlier beam, then to the lower token.
    fn best_candidates(&self, logits: &[&[f32]], count: usize) -> Vec<BeamCandidate> {
        let mut best: Vec<BeamCandidate> = Vec::new();
        for (beam, logits) in logits.iter().enumerate() {
            let log_sum = log_sum_exp(logits);
            // At most `count` candidates of one beam can be among the best.
            let mut tokens: Vec<u32> = (0..logits.len() as u32).collect();
            let by_logit = |a: &u32, b: &u32| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b));
            if count < tokens.len() {
                tokens.select_nth_unstable_by(count, by_logit);
                tokens.truncate(count);
            }
            let total = self.running[beam].total;
            best.extend(tokens.into_iter().map(|token| {
                let log_probability = f64::from(logits[token as usize]) - log_sum;
                BeamCandidate { beam, token, total: total + log_probability }
            }));
        }
        best.sort_by(|a, b| b.total.total_cmp(&a.total).then(a.beam.cmp(&b.beam)).then(a.token.cmp(&b.token)));
        best.truncate(count);
        best
    }
}

/// Returns `ln(sum(exp(logits)))`, computed in f64.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| libm::exp(f64::from(logit) - largest)).sum();
    largest + libm::log(sum)
}
