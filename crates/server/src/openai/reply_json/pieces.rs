//! Choices in the chunks of streams.

use serde::Serialize;
use serde_json::Value;

use crate::openai::logprobs::{ChatLogprobs, CompletionLogprobs};
use crate::openai::tools::CallPiece;

/// The choice in a chunk of a streamed chat.
#[derive(Debug, Serialize)]
pub(super) struct ChatPiece<'a> {
    pub(super) index: usize,
    pub(super) delta: ChatDelta<'a>,
    pub(super) logprobs: Option<ChatLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) trace: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [u32]>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) role: Option<&'static str>,
    /// `Some(None)` is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) content: Option<Option<&'a str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning_content: Option<&'a str>,
    /// The same text under the name that other clients read.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) reasoning: Option<&'a str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) tool_calls: Vec<CallPiece<'a>>,
}

/// The choice in a chunk of a streamed completion.
#[derive(Debug, Serialize)]
pub(super) struct CompletionPiece<'a> {
    pub(super) index: usize,
    pub(super) text: &'a str,
    pub(super) logprobs: Option<CompletionLogprobs>,
    pub(super) finish_reason: Option<&'static str>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) trace: Vec<Value>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [u32]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [u32]>,
}
