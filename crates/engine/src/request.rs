//! What is asked of the engine. A request is checked once, at submission, and trusted after that.

use std::time::Duration;

use pellucid_model::DecoderConfig;
use pellucid_sampling::{Sampler, SamplingParams};

use crate::{BeamParams, Error, FinishReason, Scope, TenantId};

/// Replies that a request may ask for at most, and beams that a search may keep.
pub const MAX_WIDTH: usize = 128;

/// A prompt to be continued.
#[derive(Debug, Clone)]
pub struct Request {
    /// Whose blocks it may find. From the authenticated key, narrowed by a salt.
    pub scope: Scope,
    pub prompt: Vec<u32>,
    /// How to choose, with the tokens that end a reply.
    pub sampling: SamplingParams,
    /// Tokens to generate at most; `None` goes on to the end of the context.
    pub max_tokens: Option<usize>,
    /// Replies to return.
    pub num_choices: usize,
    /// Replies to generate, of which the most probable are returned; at least `num_choices`.
    pub best_of: usize,
    /// Search instead of draw.
    pub beams: Option<BeamParams>,
    /// Report how probable the prompt is. Everything is computed then, nothing found.
    pub score_prompt: bool,
    /// Explain every token.
    pub trace: bool,
    /// Among the requests of one tenant, the higher comes first.
    pub priority: i32,
    /// From submission; a reply that is not complete by then ends where it is.
    pub deadline: Option<Duration>,
}

impl Request {
    /// One reply to a prompt, for the only tenant there is.
    pub fn new(prompt: Vec<u32>, sampling: SamplingParams) -> Request {
        Request {
            scope: Scope::of(TenantId(0)),
            prompt,
            sampling,
            max_tokens: None,
            num_choices: 1,
            best_of: 1,
            beams: None,
            score_prompt: false,
            trace: false,
            priority: 0,
            deadline: None,
        }
    }

    /// Sequences that it runs at once.
    pub(crate) fn width(&self) -> usize {
        self.beams.map_or(self.best_of.max(self.num_choices), |beams| beams.width)
    }

    /// Positions that each of its sequences may come to hold.
    pub(crate) fn max_positions(&self, config: &DecoderConfig) -> usize {
        let wanted = self.max_tokens.map_or(config.context_len, |tokens| self.prompt.len().saturating_add(tokens));
        wanted.min(config.context_len)
    }

    /// Why a sequence that has come to so many tokens, prompt and output, goes no further.
    pub(crate) fn limit(&self, num_tokens: usize, context_len: usize) -> Option<FinishReason> {
        if self.max_tokens == Some(num_tokens - self.prompt.len()) {
            return Some(FinishReason::MaxTokens);
        }
        (num_tokens >= context_len).then_some(FinishReason::Context)
    }

    /// The sampler of one choice: choice i draws with the seed plus i. `best_of` ranks by log probabilities, whether they are reported or not.
    pub(crate) fn sampler(&self, choice: usize, vocab_size: usize) -> Result<Sampler, Error> {
        let mut params = self.sampling.clone();
        params.seed = params.seed.wrapping_add(choice as u64);
        if self.best_of > self.num_choices {
            params.logprobs.get_or_insert(0);
        }
        Ok(Sampler::new(&params, vocab_size)?)
    }

    /// Blocks for everything that it may come to hold.
    pub(crate) fn blocks_needed(&self, config: &DecoderConfig, block_len: usize) -> usize {
        self.blocks_for(self.width(), self.max_positions(config), block_len)
    }

    /// Blocks for sequences of so many positions each: its prompt's full blocks once, the rest for each of them.
    pub(crate) fn blocks_for(&self, num_sequences: usize, num_positions: usize, block_len: usize) -> usize {
        let full = self.prompt.len() / block_len;
        full + (num_positions.div_ceil(block_len) - full) * num_sequences
    }

    /// Refuses what cannot be served, and gives the sampler of the first choice.
    pub(crate) fn check(&self, config: &DecoderConfig, max_sequences: usize) -> Result<Sampler, Error> {
        let (prompt, context) = (self.prompt.len(), config.context_len);
        if prompt == 0 {
            return Err(Error::EmptyPrompt);
        }
        if prompt >= context {
            return Err(Error::PromptTooLong { prompt, context });
        }
        let vocab_size = config.vocab_size;
        if let Some(&id) = self.prompt.iter().find(|&&id| id as usize >= vocab_size) {
            return Err(Error::IdOutsideVocabulary { id, vocab_size });
        }
        let widest = MAX_WIDTH.min(max_sequences);
        let range = |name, value: usize, least: usize, most: usize| {
            let refused =
                || Error::OutOfRange { name, expected: format!("{least} to {most}"), found: value.to_string() };
            if (least..=most).contains(&value) { Ok(()) } else { Err(refused()) }
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
        Ok(sampler)
    }
}
