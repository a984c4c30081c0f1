//! What a request hears of its reply.

use pellucid_sampling::{Logprobs, TokenTrace};

use crate::{Beam, Error, RequestStats};

/// One thing that happened to a request. Events come in order; the last is `Done` or `Failed`.
#[derive(Debug, Clone)]
pub enum Event {
    /// Prompt tokens computed or found so far, out of how many.
    Prompt {
        computed: usize,
        total: usize,
    },
    /// ln p of each prompt token after the first, given those before it; once, when the request asked for it.
    PromptLogprobs(Vec<f32>),
    Token(TokenEvent),
    /// A choice is complete.
    ChoiceEnd {
        choice: usize,
        reason: FinishReason,
        /// The token that ended it, where one did: no part of the reply, but its choice can be explained.
        token: Option<TokenEvent>,
    },
    /// The result of a beam search, best first.
    Beams(Vec<Beam>),
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

/// Where events go. Called on the engine's thread: it must not block.
pub trait EventSink: Send {
    fn send(&mut self, event: Event);
    /// Whether anybody still listens. When nobody does, the request is cancelled before the next step.
    fn is_open(&self) -> bool;
}
