//! The chain: parameters become an ordered list of steps once, and each token goes through that list.
//!
//! `engine` makes a [`Sampler`] a request and calls it once a token. It knows logits and ids: no text, no device, no clock.

use std::sync::Arc;

use crate::candidates::{Candidates, Workspace};
use crate::draw::race;
use crate::logprobs::{Logprobs, ModelView};
use crate::steps::mirostat::Mirostat;
use crate::steps::{Context, Step};
use crate::trace::{Recorder, TokenTrace};
use crate::{Effect, Error, History, SamplingParams, StepKind};

/// Chooses tokens by one request's parameters. Immutable: what moves is in [`History`] and [`State`].
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

/// What one choice depends on, besides the sampler.
#[derive(Debug, Clone, Copy)]
pub struct Input<'a> {
    /// One a token of the vocabulary, as the model gave them.
    pub logits: &'a [f32],
    pub history: &'a History,
    /// Of the token to be chosen, in the whole sequence: the number of tokens before it.
    pub position: u32,
    /// What a grammar allows: token t is bit t % 32 of word t / 32, 1 for allowed. `None` allows everything.
    pub mask: Option<&'a [u32]>,
}

/// All that a sampler remembers of a sequence from token to token, and only mirostat reads it.
///
/// It is a copy away from being saved: whoever tries tokens ahead keeps one for each position.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct State {
    /// The most surprising token that mirostat lets through, in bits.
    pub mu: f64,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    pub token: u32,
    /// Whether the token ends the sequence.
    pub end: Option<End>,
    /// Where the parameters ask for them.
    pub logprobs: Option<Logprobs>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// One of `end_ids`: the model says that it is done.
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

    /// The steps by name and setting, in order: the very list that runs.
    pub fn steps(&self) -> impl Iterator<Item = (StepKind, String)> + '_ {
        self.steps.iter().map(|ChainStep { kind, step }| (*kind, step.setting()))
    }

    /// A history that counts what this sampler's penalties look at.
    pub fn history(&self, prompt: &[u32]) -> History {
        History::new(prompt, self.penalty_window)
    }

    /// The state of a sequence that has no output.
    pub fn state(&self) -> State {
        State { mu: self.mirostat.as_ref().map_or(0.0, Mirostat::first_mu) }
    }

    /// Chooses a token. On an error the state is as it was.
    pub fn sample(&self, input: &Input<'_>, state: &mut State, space: &mut Workspace) -> Result<Choice, Error> {
        let (set, _, view) = self.run(input, state, space, false)?;
        let outcome = race(&set, self.seed, input.position, false).ok_or(Error::NothingLeft)?;
        self.advance(&set, outcome.winner.logit, state);
        let token = outcome.winner.id;
        Ok(self.choice(token, input.logits[token as usize], view.as_ref()))
    }

    /// Chooses the same token, and tells how.
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

    /// Every step but the draw. The recorder and, where it is there, the view of the model's own probabilities are for the trace.
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

    /// Mirostat learns from the token that was chosen.
    fn advance(&self, set: &Candidates<'_>, logit: f32, state: &mut State) {
        if let Some(mirostat) = &self.mirostat {
            state.mu = mirostat.next_mu(state.mu, set.probabilities().of(logit));
        }
    }

    /// `logit` is the model's own.
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
