//! The record of one choice: what each step was set to, who came in, who was cut, and the draw.
//!
//! Plain data for `pellucid explain`, the web page and the API, which show the same record. Made only on request: without a recorder
//! the chain does none of this work.

use crate::candidates::{Candidate, Candidates};
use crate::draw::{Outcome, Runner};
use crate::philox::unit;
use crate::probabilities::Probabilities;
use crate::{MAX_LOGPROBS, StepKind};

#[derive(Debug, Clone, PartialEq)]
pub struct TokenTrace {
    pub position: u32,
    /// The steps that took part, in their order.
    pub steps: Vec<StepTrace>,
    pub draw: DrawTrace,
    /// ln p of the chosen token by the model itself.
    pub logprob: f32,
}

#[derive(Debug, Clone, PartialEq)]
pub struct StepTrace {
    pub kind: StepKind,
    pub name: &'static str,
    /// In words: "0.8", "tau 5, eta 0.1".
    pub setting: String,
    /// Candidates that came in, and that were left.
    pub entered: usize,
    pub left: usize,
    /// The most probable, by the higher of both probabilities, at most 20.
    pub candidates: Vec<CandidateTrace>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CandidateTrace {
    pub id: u32,
    /// Probability among those who came in.
    pub before: f64,
    /// Probability among those who were left; 0 when cut.
    pub after: f64,
    /// This step dropped it.
    pub cut: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DrawTrace {
    /// How many candidates raced. With one there was nothing to draw.
    pub entrants: usize,
    pub winner: RunnerTrace,
    /// Who came second, where there was a second.
    pub runner_up: Option<RunnerTrace>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RunnerTrace {
    pub id: u32,
    /// Probability in the race.
    pub probability: f64,
    /// The keyed random number of seed, position and token.
    pub u: f64,
    /// -ln(u) / probability: the least wins.
    pub time: f64,
}

/// The set at one point of the chain.
#[derive(Debug)]
struct Snapshot {
    /// Everyone, by ascending id.
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

    /// `None` for who is not in the set.
    fn probability(&self, id: u32) -> Option<f64> {
        let index = self.members.binary_search_by_key(&id, |candidate| candidate.id).ok()?;
        Some(self.probabilities.of(self.members[index].logit))
    }
}

/// Writes the record as the chain goes.
#[derive(Debug)]
pub(crate) struct Recorder {
    last: Snapshot,
    steps: Vec<StepTrace>,
}

impl Recorder {
    pub(crate) fn new(set: &mut Candidates<'_>) -> Self {
        Recorder { last: Snapshot::new(set), steps: Vec::new() }
    }

    /// Called after each step with the set that it left.
    pub(crate) fn step(&mut self, kind: StepKind, setting: String, set: &mut Candidates<'_>) {
        let now = Snapshot::new(set);
        // Both views, because a step that changes logits can lift a token into the second that was not in the first.
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
        let Snapshot { members, probabilities, .. } = self.last;
        let trace = |runner: Runner| RunnerTrace {
            id: runner.id,
            probability: probabilities.of(runner.logit),
            u: unit(runner.word),
            time: libm::exp(runner.log_time) * probabilities.total,
        };
        let draw =
            DrawTrace { entrants: members.len(), winner: trace(outcome.winner), runner_up: outcome.second.map(trace) };
        TokenTrace { position, steps: self.steps, draw, logprob }
    }
}
