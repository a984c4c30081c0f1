//! Finish reasons: why a reply ended.

use pellucid_engine::{FinishReason, Repetition, TokenEvent};

/// Why a choice ended. A reply that its reader cancelled has none.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Finish {
    /// The model chose one of its end tokens; the id, where the engine reports it.
    EndToken(Option<u32>),
    /// The model chose one of the request's stop tokens; the id, where the engine reports it.
    StopToken(Option<u32>),
    /// The text reached this stop string.
    StopString(String),
    /// The reply has `max_tokens` tokens.
    MaxTokens,
    /// Prompt and reply fill the context.
    ContextFull,
    /// The request's time limit was reached.
    Deadline,
    /// The model called tools and waits for their results; the id of the end token, where the engine reports it.
    ToolCalls(Option<u32>),
    /// The loop guard found that the reply repeats itself.
    Repetition(Repetition),
    /// A guard blocked the rest of the reply.
    ContentFilter {
        /// Name of the guard.
        guard: &'static str,
        /// The rule that blocked it, for the operator.
        rule: String,
    },
}

impl Finish {
    /// Returns the reason that the engine gave, with the token that ended the choice.
    pub fn new(reason: FinishReason, token: Option<&TokenEvent>) -> Finish {
        let id = token.map(|token| token.id);
        match reason {
            FinishReason::End => Finish::EndToken(id),
            FinishReason::Stop => Finish::StopToken(id),
            FinishReason::MaxTokens => Finish::MaxTokens,
            FinishReason::Context => Finish::ContextFull,
            FinishReason::Deadline => Finish::Deadline,
            FinishReason::Repetition(repetition) => Finish::Repetition(repetition),
        }
    }

    /// Returns the reason's name in reports, such as `stop_string`.
    pub fn name(&self) -> &'static str {
        match self {
            Finish::EndToken(_) => "end_of_sequence",
            Finish::StopToken(_) => "stop_token",
            Finish::StopString(_) => "stop_string",
            Finish::MaxTokens => "max_tokens",
            Finish::ContextFull => "context_full",
            Finish::Deadline => "timeout",
            Finish::ToolCalls(_) => "tool_calls",
            Finish::Repetition(_) => "repetition",
            Finish::ContentFilter { .. } => "content_filter",
        }
    }
}
