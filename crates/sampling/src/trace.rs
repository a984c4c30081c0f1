//! The trace of one token: the setting of each step, the candidates before and after it, and the draw.
//!
//! Plain data for `pellucid explain`, the web page and the API, which show the same trace. Recorded only on request:
//! without a recorder the chain does none of this work.

use crate::candidates::{Candidate, Candidates};
use crate::draw::{Outcome, Runner};
use crate::philox::unit;
use crate::probabilities::Probabilities;
use crate::{MAX_LOGPROBS, StepKind};

/// Trace of one token.
#[derive(Debug, Clone, PartialEq)]
pub struct TokenTrace {
    pub position: u32,
    /// Steps that ran, in their order.
    pub steps: Vec<StepTrace>,
    pub draw: DrawTrace,
    /// ln p of the sampled token by the model itself, before any step.
    pub logprob: f32,
}

/// Trace of one step.
#[derive(Debug, Clone, PartialEq)]
pub struct StepTrace {
    pub kind: StepKind,
    pub name: &'static str,
    /// Setting in words, such as "0.8" or "tau 5, eta 0.1".
    pub setting: String,
    /// Number of candidates before the step.
    pub entered: usize,
    /// Number of candidates after the step.
    pub left: usize,
    /// The most probable candidates by the higher of both probabilities, at most 20.
    pub candidates: Vec<CandidateTrace>,
}

/// A candidate before and after a step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateTrace {
    pub id: u32,
    /// Probability among the candidates before the step.
    pub before: f64,
    /// Probability among the candidates after the step; 0 when cut.
    pub after: f64,
    /// Whether this step dropped the candidate.
    pub cut: bool,
}

/// Trace of the draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawTrace {
    /// Number of candidates in the race. With one there is nothing to draw.
    pub entrants: usize,
    pub winner: RunnerTrace,
    /// Second of the race, if there were two or more.
    pub runner_up: Option<RunnerTrace>,
}

/// A candidate in the race of the draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunnerTrace {
    pub id: u32,
    /// Probability in the race.
    pub probability: f64,
    /// Random number of seed, position and token.
    pub u: f64,
    /// -ln(u) / probability; the shortest time wins.
    pub time: f64,
}

/// The candidates at one point of the chain.
#[derive(Debug)]
struct Snapshot {
    /// All candidates, by ascending id.
    members: Vec<Candidate>,
    highest: Vec<Candidate>,
    probabilities: Probabilities,
}

impl Snapshot {
    fn new(set: &mut Candidates<'_>) -> Self {
        let mut members = set.from(f32::NEG_INFINITY);
        members.sort_unstable_by_key(|candidate| candidate.id);
        let highest = set.highest(MAX_LOGPROBS as usize);
        Snapshot { members, highest, probabilities: set.probabilities() }
    }

    /// Returns `None` for a token that is not a candidate.
    fn probability(&self, id: u32) -> Option<f64> {
        let index = self.members.binary_search_by_key(&id, |candidate| candidate.id).ok()?;
        Some(self.probabilities.of(self.members[index].logit))
    }
}

/// Records a trace while the chain runs.
#[derive(Debug)]
pub(crate) struct Recorder {
    last: Snapshot,
    steps: Vec<StepTrace>,
}

impl Recorder {
    pub(crate) fn new(set: &mut Candidates<'_>) -> Self {
        Recorder { last: Snapshot::new(set), steps: Vec::new() }
    }

    /// Records a step; called after it.
    pub(crate) fn step(&mut self, kind: StepKind, setting: String, set: &mut Candidates<'_>) {
        let now = Snapshot::new(set);
        // The highest before and after, because a step that changes logits can lift a token into the second list.
        let mut ids: Vec<u32> = self.last.highest.iter().chain(&now.highest).map(|candidate| candidate.id).collect();
        ids.sort_unstable();
        ids.dedup();
        let mut candidates: Vec<CandidateTrace> = ids.into_iter().map(|id| self.compare(id, &now)).collect();
        let prominence = |candidate: &CandidateTrace| candidate.before.max(candidate.after);
        candidates.sort_by(|a, b| prominence(b).total_cmp(&prominence(a)).then(a.id.cmp(&b.id)));
        candidates.truncate(MAX_LOGPROBS as usize);
        let (entered, left) = (self.last.members.len(), now.members.len());
        self.steps.push(StepTrace { kind, name: kind.name(), setting, entered, left, candidates });
        self.last = now;
    }

    fn compare(&self, id: u32, now: &Snapshot) -> CandidateTrace {
        let (before, after) = (self.last.probability(id), now.probability(id));
        CandidateTrace {
            id,
            before: before.unwrap_or(0.0),
            after: after.unwrap_or(0.0),
            cut: before.is_some() && after.is_none(),
        }
    }

    pub(crate) fn finish(self, position: u32, outcome: &Outcome, logprob: f32) -> TokenTrace {
        let last = self.last;
        let trace = |runner: Runner| RunnerTrace {
            id: runner.id,
            // As in the last step. The race may hold another logit than the set if the token's is infinite there.
            probability: last.probability(runner.id).unwrap_or_else(|| last.probabilities.of(runner.logit)),
            u: unit(runner.word),
            time: libm::exp(runner.log_time) * last.probabilities.total,
        };
        let entrants = last.members.len();
        let draw = DrawTrace { entrants, winner: trace(outcome.winner), runner_up: outcome.second.map(trace) };
        TokenTrace { position, steps: self.steps, draw, logprob }
    }
}
