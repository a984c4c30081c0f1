//! What a request hears of its reply.

use pellucid_sampling::{Logprobs, SamplingParams, TokenTrace};

use crate::{Beam, Error, RequestStats};

/// One thing that happened to a request. Events come in order; the last is `Done` or `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// The request was admitted; the first `cached_tokens` prompt tokens were found in the prefix cache. Sent once.
    Started {
        cached_tokens: usize,
    },
    /// `computed` of the `total` prompt tokens have been prefilled or found in the prefix cache.
    PromptProgress {
        computed: usize,
        total: usize,
    },
    /// Log probabilities of each prompt token after the first, given those before it; once, when the request asked for it.
    PromptLogprobs(Vec<Logprobs>),
    Token(TokenEvent),
    /// A choice is complete.
    ChoiceEnd {
        choice: usize,
        reason: FinishReason,
        /// The token that ended it, where one did: no part of the reply, but its choice can be explained.
        token: Option<TokenEvent>,
    },
    /// A [`Control`] message has taken effect; all choices together had `output_tokens` tokens by then.
    /// `Control::End` is answered by `ChoiceEnd` instead.
    ControlApplied {
        output_tokens: usize,
    },
    /// The result of a beam search, best first, and why those that do not end in an end token go no further.
    Beams {
        beams: Vec<Beam>,
        reason: FinishReason,
    },
    Done(RequestStats),
    Failed(Error),
}

/// A token of a reply.
#[derive(Debug, Clone)]
pub struct TokenEvent {
    pub choice: usize,
    pub id: u32,
    pub logprobs: Option<Logprobs>,
    pub trace: Option<Box<TokenTrace>>,
}

/// Why a choice ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said that it is done.
    End,
    /// A token at which the caller wanted to stop.
    Stop,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    Context,
    /// The request's time ran out.
    Deadline,
}

/// A wish about a request that is being served; takes effect before the next step.
#[derive(Debug, Clone)]
pub enum Control {
    /// Keep everything and compute nothing. The deadline goes on.
    Pause,
    Resume,
    /// Choose by these parameters from the next token on. They were checked by [`EngineHandle::check_sampling`](crate::EngineHandle::check_sampling).
    Update(Box<SamplingParams>),
    /// This choice is long enough. For replies that are told as they grow: a search, and `best_of`, which compares whole replies, go on.
    End {
        choice: usize,
    },
}

/// Where events go. Called on the engine's thread: it must not block.
pub trait EventSink: Send {
    fn send(&mut self, event: Event);
    /// Whether anybody still listens. When nobody does, the request is cancelled before the next step.
    fn is_open(&self) -> bool;
    /// Whether more can be taken. Until then the request is left out of the steps, like one that is paused: a reader that is slow holds
    /// up itself and its own memory, nothing else.
    fn is_ready(&self) -> bool {
        true
    }
    /// The next wish, where there is one.
    fn control(&mut self) -> Option<Control> {
        None
    }
}
