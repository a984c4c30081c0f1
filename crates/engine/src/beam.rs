//! Beam search: keep the `width` most probable continuations at every step, and return the best that were completed.
//!
//! The definitions are those of the `transformers` library (5.22), whose results the goldens hold. With B beams, end tokens E and at most M
//! generated tokens, step t does this:
//!
//! 1. Every running beam is continued by every token; a candidate's total is the sum of its log probabilities. The best
//!    `max(2, 1 + |E|) * B` are kept: enough that B of them do not end.
//! 2. Candidates that end (in E, or t = M) and are among the first B join the finished pool with the score `total / t^length_penalty`, where t
//!    counts generated tokens, the end token included; the pool keeps its best B.
//! 3. The first B candidates that do not end run on.
//! 4. The search stops when t = M, or when the pool is full and, by `early_stopping`, nothing better is to be hoped for.

use pellucid_sampling::StepKind;

use crate::{Error, Request};

/// How to search.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BeamParams {
    pub width: usize,
    pub num_returned: usize,
    /// Above 0 favours longer replies, below 0 shorter ones.
    pub length_penalty: f32,
    pub early_stopping: EarlyStopping,
}

/// When a full pool ends the search.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EarlyStopping {
    /// At once.
    Always,
    /// When the best running beam, scored as if it ended now, is no better than the worst finished one.
    Heuristic,
    /// When the best running beam cannot become better, scored at the greatest length if that favours it.
    Never,
}

/// A finished continuation.
#[derive(Debug, Clone, PartialEq)]
pub struct Beam {
    /// Generated tokens, the end token included.
    pub ids: Vec<u32>,
    /// The sum of log probabilities over the length to the power of the length penalty.
    pub score: f64,
}

impl BeamParams {
    /// Refuses parameters of the draw: the search does not draw, and ignoring them would be silent.
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
            ("trace", request.trace),
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
    /// Generated tokens of every running beam, and the sum of their log probabilities.
    running: Vec<RunningBeam>,
    /// Best first, at most `width`.
    finished: Vec<Beam>,
    num_steps: usize,
}

#[derive(Debug, Clone)]
struct RunningBeam {
    ids: Vec<u32>,
    total: f64,
}

/// A continuation of a running beam.
#[derive(Debug, Clone, Copy)]
struct BeamCandidate {
    beam: usize,
    token: u32,
    total: f64,
}

/// What the next step computes: for each running beam, which of the last ones it continues, and by which token.
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

    /// Takes the logits of every running beam and gives the beams of the next step; `None` when the search is over.
    pub(crate) fn advance(&mut self, logits: &[&[f32]]) -> Option<Vec<Continuation>> {
        assert_eq!(logits.len(), self.running.len(), "one row of logits for each beam");
        self.num_steps += 1;
        let width = self.params.width;
        let is_last = self.num_steps == self.max_tokens;
        let kept = self.best_candidates(logits, width * (1 + self.end_ids.len()).max(2));
        let ends = |candidate: &BeamCandidate| is_last || self.end_ids.binary_search(&candidate.token).is_ok();

        let (ended, going_on): (Vec<(usize, BeamCandidate)>, Vec<_>) =
            kept.iter().copied().enumerate().partition(|(_, candidate)| ends(candidate));
        for (_, candidate) in ended.iter().filter(|(rank, _)| *rank < width) {
            let mut ids = self.running[candidate.beam].ids.clone();
            ids.push(candidate.token);
            self.finished.push(Beam { ids, score: self.score(candidate.total, self.num_steps) });
        }
        // Stable, so that of equals the one that finished first stays ahead.
        self.finished.sort_by(|a, b| b.score.total_cmp(&a.score));
        self.finished.truncate(width);

        let next: Vec<BeamCandidate> = going_on.into_iter().map(|(_, candidate)| candidate).take(width).collect();
        if is_last || next.is_empty() || !self.is_worth_going_on(next[0].total) {
            return None;
        }
        self.running = (next.iter())
            .map(|candidate| {
                let mut ids = self.running[candidate.beam].ids.clone();
                ids.push(candidate.token);
                RunningBeam { ids, total: candidate.total }
            })
            .collect();
        Some(next.iter().map(|c| Continuation { parent: c.beam, token: c.token }).collect())
    }

    /// The best of what was finished. When the search was ended from outside, running beams stand in for what is missing.
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

    fn is_worth_going_on(&self, best_total: f64) -> bool {
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

    /// The `count` best continuations, best first; ties to the older beam, then to the lower token.
    fn best_candidates(&self, logits: &[&[f32]], count: usize) -> Vec<BeamCandidate> {
        let mut best: Vec<BeamCandidate> = Vec::new();
        for (beam, logits) in logits.iter().enumerate() {
            let log_sum = log_sum_exp(logits);
            // Of one beam, no more than `count` can be among the best.
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

/// ln of the sum of exp, in f64.
fn log_sum_exp(logits: &[f32]) -> f64 {
    let largest = f64::from(logits.iter().copied().fold(f32::NEG_INFINITY, f32::max));
    let sum: f64 = logits.iter().map(|&logit| libm::exp(f64::from(logit) - largest)).sum();
    largest + libm::log(sum)
}
