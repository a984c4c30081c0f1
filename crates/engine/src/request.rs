//! A request to the engine. It is checked once, at submission, and trusted after that.

use std::sync::Arc;
use std::time::Duration;

use pellucid_model::DecoderConfig;
use pellucid_sampling::{Sampler, SamplingParams, TokenConstraint};

use crate::{BeamParams, Error, FinishReason, ProbeRequest, Scope, TenantId};

/// Maximum replies of one request, and maximum beams of a beam search.
pub const MAX_WIDTH: usize = 128;

/// A prompt to be continued, and how.
#[derive(Debug, Clone)]
pub struct Request {
    /// Tenant, and the part of its prefix cache that the request uses. It comes from the authenticated key and a salt.
    pub scope: Scope,
    /// Token ids of the prompt; at least one.
    pub prompt: Vec<u32>,
    /// How to sample, and which tokens end a reply.
    pub sampling: SamplingParams,
    /// Grammar that every reply satisfies. A reply ends where nothing can follow, also before `min_tokens`.
    pub constraint: Option<Arc<dyn TokenConstraint>>,
    /// Maximum tokens to generate; `None` allows the rest of the context.
    pub max_tokens: Option<usize>,
    /// Number of replies to return.
    pub num_choices: usize,
    /// Number of replies to generate, of which the `num_choices` most probable are returned; at least `num_choices`.
    pub best_of: usize,
    /// Use beam search instead of sampling.
    pub beams: Option<BeamParams>,
    /// Report the log probabilities of the prompt's tokens. The prefix cache is not used then.
    pub score_prompt: bool,
    /// End a reply that repeats itself, with [`FinishReason::Repetition`], but not before it has `min_tokens` tokens.
    pub loop_guard: bool,
    /// Send a trace of the sampler's steps with every token.
    pub trace: bool,
    /// Compute one token of the reply again and report what is inside the model. The reply is the same without it.
    pub probe: Option<ProbeRequest>,
    /// Report why the prompt was not found whole in the prefix cache.
    pub explain_cache: bool,
    /// Let drafters propose tokens. The reply is the same without them.
    pub speculate: bool,
    /// Output that the client expects, as tokens; a drafter proposes from it.
    pub prediction: Vec<u32>,
    /// Keep the keys and values of the reply for later prompts that begin with it. Those of the prompt are always kept.
    pub caches_reply: bool,
    /// Requests of the same tenant with a higher priority start first.
    pub priority: i32,
    /// Time from submission after which the reply ends with the tokens that it has.
    pub deadline: Option<Duration>,
}

impl Request {
    /// A request for one reply, of tenant 0.
    pub fn new(prompt: Vec<u32>, sampling: SamplingParams) -> Request {
        Request {
            scope: Scope::of(TenantId(0)),
            prompt,
            sampling,
            constraint: None,
            max_tokens: None,
            num_choices: 1,
            best_of: 1,
            beams: None,
            score_prompt: false,
            loop_guard: false,
            trace: false,
            probe: None,
            explain_cache: false,
            speculate: true,
            prediction: Vec::new(),
            caches_reply: true,
            priority: 0,
            deadline: None,
        }
    }

    /// Returns the number of tokens, of the `num_computed` first ones, that later requests may find in the prefix
    /// cache.
    pub(crate) fn num_cacheable(&self, num_computed: usize) -> usize {
        if self.caches_reply { num_computed } else { num_computed.min(self.prompt.len()) }
    }

    /// Returns the first position whose row its probe computes again; `usize::MAX` without a probe.
    pub(crate) fn first_probed_position(&self) -> usize {
        let first = |probe: ProbeRequest| (self.prompt.len() + probe.token).saturating_sub(probe.num_rows());
        self.probe.map_or(usize::MAX, first)
    }

    /// Returns the first position whose row may be computed, by a step or by its probe, when `position` is next.
    pub(crate) fn first_window_position(&self, position: usize) -> usize {
        position.saturating_sub(self.probe.map_or(0, |probe| probe.num_rows()))
    }

    /// Returns the number of sequences that it runs at once.
    pub(crate) fn width(&self) -> usize {
        self.beams.map_or(self.best_of.max(self.num_choices), |beams| beams.width)
    }

    /// Returns the maximum length of each of its sequences, prompt included.
    pub(crate) fn max_positions(&self, config: &DecoderConfig) -> usize {
        let wanted = self.max_tokens.map_or(config.context_len, |tokens| self.prompt.len().saturating_add(tokens));
        wanted.min(config.context_len)
    }

    /// Returns why a sequence of `num_tokens` tokens, prompt included, must end; `None` if it may go on.
    pub(crate) fn limit(&self, num_tokens: usize, context_len: usize) -> Option<FinishReason> {
        if self.max_tokens == Some(num_tokens - self.prompt.len()) {
            return Some(FinishReason::MaxTokens);
        }
        (num_tokens >= context_len).then_some(FinishReason::Context)
    }

    /// Returns the sampler of one choice. Choice i samples with seed + i. `best_of` needs log probabilities even if
    /// they are not reported.
    pub(crate) fn sampler(&self, choice: usize, vocab_size: usize) -> Result<Sampler, Error> {
        let mut params = self.sampling.clone();
        params.seed = params.seed.wrapping_add(choice as u64);
        if self.best_of > self.num_choices {
            params.logprobs.get_or_insert(0);
        }
        Ok(Sampler::new(&params, vocab_size)?)
    }

    /// Returns the number of blocks that the request needs if every sequence reaches its maximum length.
    pub(crate) fn blocks_needed(&self, config: &DecoderConfig, block_len: usize) -> usize {
        self.blocks_for(self.width(), self.max_positions(config), block_len)
    }

    /// Returns the number of blocks of `num_sequences` sequences of `num_positions` positions each. They share the full
    /// blocks of the prompt.
    pub(crate) fn blocks_for(&self, num_sequences: usize, num_positions: usize, block_len: usize) -> usize {
        let full = self.prompt.len() / block_len;
        full + (num_positions.div_ceil(block_len) - full) * num_sequences
    }

    /// Refuses a request with invalid values, and returns the sampler of the first choice.
    pub(crate) fn check(&self, config: &DecoderConfig, max_sequences: usize) -> Result<Sampler, Error> {
        let (prompt, context) = (self.prompt.len(), config.context_len);
        if prompt == 0 {
            return Err(Error::EmptyPrompt);
        }
        if prompt >= context {
            return Err(Error::PromptTooLong { prompt, context });
        }
        let vocab_size = config.vocab_size;
        if let Some(&id) = self.prompt.iter().chain(&self.prediction).find(|&&id| id as usize >= vocab_size) {
            return Err(Error::IdOutsideVocabulary { id, vocab_size });
        }
        let widest = MAX_WIDTH.min(max_sequences);
        let range = |name, value: usize, min: usize, max: usize| {
            let refused = || Error::OutOfRange { name, expected: format!("{min} to {max}"), found: value.to_string() };
            if (min..=max).contains(&value) { Ok(()) } else { Err(refused()) }
        };
        range("n", self.num_choices, 1, widest)?;
        range("best_of", self.best_of, self.num_choices, widest)?;
        range("max_tokens", self.max_tokens.unwrap_or(1), 1, usize::MAX)?;
        let sampler = self.sampler(0, vocab_size)?;
        if let Some(beams) = self.beams {
            range("beam width", beams.width, 2, widest)?;
            range("beams returned", beams.num_returned, 1, beams.width)?;
            beams.check(self)?;
        }
        if let Some(probe) = self.probe {
            probe.check(self, config)?;
        }
        Ok(sampler)
    }
}
