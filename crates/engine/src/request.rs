//! What is asked of the engine, and how an answer ends.

use pellucid_sampling::SamplingParams;

/// A prompt to be continued.
#[derive(Debug, Clone)]
pub struct Request {
    pub prompt: Vec<u32>,
    pub sampling: SamplingParams,
    /// Tokens to generate at most; `None` goes on to the end of the context.
    pub max_tokens: Option<usize>,
    /// Tokens that end the reply. They are not part of it.
    pub end_ids: Vec<u32>,
}

/// Why a reply ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model said that it is done.
    End,
    /// As many tokens as were asked for.
    MaxTokens,
    /// The context is full.
    Context,
    /// The caller stopped it.
    Cancelled,
}
