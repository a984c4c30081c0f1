//! The sampler: parameters become an ordered list of steps once, and every row of logits goes through that list.
//!
//! The engine builds one [`Sampler`] per request and calls it once per token. A sampler sees logits and ids: no text,
//! no device and no clock.

use std::collections::TryReserveError;
use std::sync::Arc;

use crate::candidates::{Candidates, Workspace};
use crate::draw::race;
use crate::logprobs::{Logprobs, ModelView};
use crate::steps::mirostat::Mirostat;
use crate::steps::{Context, Step};
use crate::trace::{Recorder, TokenTrace};
use crate::{Effect, Error, History, SamplingParams, StepKind};

/// Samples tokens with the parameters of one request. Immutable: [`History`] and [`State`] hold what changes from token
/// to token.
#[derive(Debug, Clone)]
pub struct Sampler {
    pub(crate) steps: Vec<ChainStep>,
    pub(crate) seed: u64,
    vocab_size: usize,
    pub(crate) logprobs: Option<u32>,
    penalty_window: Option<u32>,
    mirostat: Option<Mirostat>,
    end_ids: Vec<u32>,
    stop_ids: Vec<u32>,
}

/// Input for one token.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// Logits of the model, one for each token of the vocabulary.
    pub logits: &'a [f32],
    pub history: &'a History,
    /// Position of the token to sample in the whole sequence: the number of tokens before it.
    pub position: u32,
    /// Mask of a grammar: token t is bit t % 32 of word t / 32, and 1 allows it. `None` allows every token.
    pub mask: Option<&'a [u32]>,
}

/// State of a sequence between tokens. Only Mirostat uses it.
///
/// Small and `Copy`, so that speculation can keep one for each position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct State {
    /// Maximum surprise of a token that Mirostat keeps, in bits.
    pub mu: f64,
}

/// A sampled token.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    pub token: u32,
    /// Whether the token ends the sequence.
    pub end: Option<End>,
    /// Present if the parameters ask for log probabilities.
    pub logprobs: Option<Logprobs>,
}

/// Why a token ends the sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// One of `end_ids`: the model ended its reply.
    EndOfSequence,
    /// One of `stop_ids`.
    Stop,
}

/// A step of one sampler's chain.
#[derive(Debug, Clone)]
pub(crate) struct ChainStep {
    pub(crate) kind: StepKind,
    /// Shared by the clones of a sampler.
    pub(crate) step: Arc<dyn Step>,
}

/// Builds the chain. Steps at their neutral value are left out; the mask and the draw are always in it.
fn chain(params: &SamplingParams, vocab_size: usize) -> Vec<ChainStep> {
    let order = params.samplers.clone().unwrap_or_else(|| StepKind::movable().collect());
    let num_edits = order.iter().take_while(|kind| kind.effect() == Effect::EditsLogits).count();
    let (edits, rest) = order.split_at(num_edits);
    let kinds = [
        &[StepKind::LogitBias, StepKind::TokenRules],
        edits,
        &[StepKind::Mask],
        rest,
        &[StepKind::Mirostat, StepKind::Draw],
    ];
    let build = |kind: StepKind| ChainStep { kind, step: (kind.description().build)(params, vocab_size).into() };
    kinds.concat().into_iter().filter(|&kind| params.uses(kind)).map(build).collect()
}

impl Sampler {
    /// Checks the parameters and builds the chain.
    pub fn new(params: &SamplingParams, vocab_size: usize) -> Result<Sampler, Error> {
        params.check()?;
        params.check_ids(vocab_size)?;
        params.check_left(vocab_size)?;
        Ok(Sampler {
            steps: chain(params, vocab_size),
            seed: params.seed,
            vocab_size,
            logprobs: params.logprobs,
            penalty_window: params.penalty_window,
            mirostat: Mirostat::of(params),
            end_ids: params.end_ids.clone(),
            stop_ids: params.stop_ids.clone(),
        })
    }

    /// Returns the number of logits of a row.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// Returns the steps with their settings, in the order in which they run.
    pub fn steps(&self) -> impl Iterator<Item = (StepKind, String)> + '_ {
        self.steps.iter().map(|ChainStep { kind, step }| (*kind, step.setting()))
    }

    /// Returns a history that counts tokens in the window of this sampler's penalties.
    pub fn history(&self, prompt: &[u32]) -> History {
        History::new(prompt, self.penalty_window)
    }

    /// Returns a history as [`Sampler::history`] does; fails if there is no memory for it and `num_spare` more tokens.
    pub fn try_history(&self, prompt: &[u32], num_spare: usize) -> Result<History, TryReserveError> {
        History::try_new(prompt, num_spare, self.penalty_window)
    }

    /// Returns the state of a sequence without output.
    pub fn state(&self) -> State {
        State { mu: self.mirostat.as_ref().map_or(0.0, Mirostat::first_mu) }
    }

    /// Samples a token. On an error the state does not change.
    pub fn sample(&self, input: &Input<'_>, state: &mut State, space: &mut Workspace) -> Result<Choice, Error> {
        let (set, _, view) = self.run(input, state, space, false)?;
        let outcome = race(&set, self.seed, input.position, false).ok_or(Error::NothingLeft)?;
        self.advance(&set, outcome.winner.logit, state);
        let token = outcome.winner.id;
        Ok(self.choice(token, input.logits[token as usize], view.as_ref()))
    }

    /// Samples the same token as [`Sampler::sample`] and records how.
    pub fn trace(
        &self,
        input: &Input<'_>,
        state: &mut State,
        space: &mut Workspace,
    ) -> Result<(Choice, TokenTrace), Error> {
        let (set, recorder, view) = self.run(input, state, space, true)?;
        let outcome = race(&set, self.seed, input.position, true).ok_or(Error::NothingLeft)?;
        self.advance(&set, outcome.winner.logit, state);
        let token = outcome.winner.id;
        let choice = self.choice(token, input.logits[token as usize], view.as_ref());
        let (recorder, view) = (recorder.ok_or(Error::NothingLeft)?, view.ok_or(Error::NothingLeft)?);
        let logprob = view.logprob(input.logits[token as usize]);
        Ok((choice, recorder.finish(input.position, &outcome, logprob)))
    }

    /// Returns the choice of the only token that a mask allows, without its logits. `num_output` is the number of
    /// tokens of the reply before it. `None` if the row of logits is needed: for log probabilities, for the state of
    /// Mirostat, or because another step excludes the token, which is an error of [`Sampler::sample`].
    pub fn forced_choice(&self, token: u32, num_output: usize) -> Option<Choice> {
        let needs_row = self.logprobs.is_some() || self.mirostat.is_some();
        let is_excluded = || self.steps.iter().any(|chain| chain.step.excludes(token, num_output));
        (!needs_row && !is_excluded()).then(|| self.choice(token, f32::NAN, None))
    }

    /// Runs every step but the draw. Also returns the recorder of a trace and the model's own probabilities, where they
    /// are needed.
    pub(crate) fn run<'a>(
        &self,
        input: &Input<'a>,
        state: &State,
        space: &'a mut Workspace,
        traced: bool,
    ) -> Result<(Candidates<'a>, Option<Recorder>, Option<ModelView>), Error> {
        self.check(input)?;
        let mut set = Candidates::new(input.logits, space)?;
        let view = match self.logprobs {
            Some(num_top) => Some(ModelView::new(&mut set, num_top)),
            None => traced.then(|| ModelView::new(&mut set, 0)),
        };
        let mut recorder = traced.then(|| Recorder::new(&mut set));
        let context = Context { input, seed: self.seed, mu: state.mu };
        for ChainStep { kind, step } in self.steps.iter().filter(|step| step.kind != StepKind::Draw) {
            step.apply(&mut set, &context)?;
            // A mask that no caller gave is no step to show.
            let is_shown = *kind != StepKind::Mask || input.mask.is_some();
            if let Some(recorder) = recorder.as_mut().filter(|_| is_shown) {
                recorder.step(*kind, step.setting(), &mut set);
            }
        }
        Ok((set, recorder, view))
    }

    fn check(&self, input: &Input<'_>) -> Result<(), Error> {
        if input.logits.len() != self.vocab_size {
            return Err(Error::NumLogits { expected: self.vocab_size, found: input.logits.len() });
        }
        let expected = self.vocab_size.div_ceil(32);
        match input.mask {
            Some(words) if words.len() != expected => Err(Error::MaskLength { expected, found: words.len() }),
            _ => Ok(()),
        }
    }

    /// Moves Mirostat's limit by the surprise of the sampled token.
    fn advance(&self, set: &Candidates<'_>, logit: f32, state: &mut State) {
        if let Some(mirostat) = &self.mirostat {
            state.mu = mirostat.next_mu(state.mu, set.probabilities().of(logit));
        }
    }

    /// Builds the choice; `logit` is the model's own, before any step.
    pub(crate) fn choice(&self, token: u32, logit: f32, view: Option<&ModelView>) -> Choice {
        let end = if self.end_ids.contains(&token) {
            Some(End::EndOfSequence)
        } else if self.stop_ids.contains(&token) {
            Some(End::Stop)
        } else {
            None
        };
        let logprobs = view.filter(|_| self.logprobs.is_some()).map(|view| view.report(logit));
        Choice { token, end, logprobs }
    }
}
