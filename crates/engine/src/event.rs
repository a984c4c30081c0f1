//! The events that a request receives, and the control messages that it can send back.

use pellucid_sampling::{Logprobs, SamplingParams, TokenTrace};

use crate::{Beam, Error, PrefixMiss, Probe, Proposal, Repetition, RequestStats};

/// Something that happened to a request. Events arrive in order; the last one is `Done` or `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// The request was admitted; the first `cached_tokens` prompt tokens were found in the prefix cache. Sent once.
    Started {
        /// Prompt tokens found in the prefix cache.
        cached_tokens: usize,
        /// Why no more were found, if [`Request::explain_cache`](crate::Request::explain_cache) is set.
        miss: Option<Box<PrefixMiss>>,
    },
    /// `computed` of the `total` prompt tokens have been prefilled or found in the prefix cache.
    PromptProgress {
        /// Prompt tokens that are done.
        computed: usize,
        /// All prompt tokens.
        total: usize,
    },
    /// Log probabilities of each prompt token after the first, given those before it. Sent once, if
    /// [`Request::score_prompt`] is set.
    ///
    /// [`Request::score_prompt`]: crate::Request::score_prompt
    PromptLogprobs(Vec<Logprobs>),
    /// Result of the request's probe. Sent before the token that it is about.
    Probed(Box<Probe>),
    /// A token of a choice.
    Token(TokenEvent),
    /// A choice is complete.
    ChoiceEnd {
        /// Index of the choice.
        choice: usize,
        /// Why it ended.
        reason: FinishReason,
        /// The end token or stop token, if one ended the choice. It is no part of the reply, but its trace and log
        /// probabilities may be of interest.
        token: Option<TokenEvent>,
    },
    /// A [`Control`] message has taken effect; all choices together had `output_tokens` tokens by then.
    /// `Control::End` is answered by `ChoiceEnd` instead.
    ControlApplied {
        /// Tokens of all choices together.
        output_tokens: usize,
    },
    /// Result of a beam search.
    Beams {
        /// The best beams, best first.
        beams: Vec<Beam>,
        /// Why beams without an end token were not continued.
        reason: FinishReason,
    },
    /// The request is complete.
    Done(Box<RequestStats>),
    /// The request ended without a complete reply.
    Failed(Error),
}

/// A token of a reply.
#[derive(Debug, Clone)]
pub struct TokenEvent {
    /// Index of the choice that it belongs to.
    pub choice: usize,
    /// The token.
    pub id: u32,
    /// Its log probability and those of the most probable tokens, if the request asks for them.
    pub logprobs: Option<Logprobs>,
    /// The effect of each step of the sampler, if the request asks for it.
    pub trace: Option<Box<TokenTrace>>,
    /// The token that a drafter proposed here, if one did. The token is the same with and without it.
    pub proposal: Option<Proposal>,
    /// Number of sequences in the step that computed it.
    pub batch_size: usize,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model produced an end token.
    End,
    /// The model produced one of the caller's stop tokens, or the caller ended the choice.
    Stop,
    /// `max_tokens` was reached.
    MaxTokens,
    /// The context is full.
    Context,
    /// The request's deadline passed.
    Deadline,
    /// The loop guard found that the reply repeats itself.
    Repetition(Repetition),
}

/// A message to a request that is being served. It is applied before the next step.
#[derive(Debug, Clone)]
pub enum Control {
    /// Compute nothing until `Resume`, and keep everything. The deadline does not stop.
    Pause,
    /// Continue after `Pause`.
    Resume,
    /// Sample with these parameters from the next token on. The sender must have checked them with
    /// [`EngineHandle::check_sampling`](crate::EngineHandle::check_sampling).
    Update(Box<SamplingParams>),
    /// End this choice. Ignored by beam search and `best_of`, which compare whole replies.
    End {
        /// Index of the choice.
        choice: usize,
    },
}

/// Receives a request's events. Called on the engine's thread, so no method may block.
pub trait EventSink: Send {
    /// Takes an event.
    fn send(&mut self, event: Event);
    /// Whether anyone still reads the events. Once this is false, the request is cancelled before the next step.
    fn is_open(&self) -> bool;
    /// Whether more events can be taken. While this is false, the request is left out of the steps as if it were
    /// paused: a slow reader delays itself and keeps its own memory, and no other request.
    fn is_ready(&self) -> bool {
        true
    }
    /// Returns the next control message, if there is one.
    fn control(&mut self) -> Option<Control> {
        None
    }
}
