//! Verdicts of guards on the reply that is explained.
//!
//! The reply is generated twice, with the same tokens: first behind the guards, which hold text back and decide how
//! many tokens may be shown, then to explain these tokens.

use anyhow::Result;
use pellucid_generate::{Finish, Generation, GenerationRequest, LoadedModel, PromptRequest, TokenVerdict};

/// The judged reply.
#[derive(Debug)]
pub(super) struct JudgedReply {
    /// Verdicts on each token that may be shown.
    pub(super) tokens: Vec<Vec<TokenVerdict>>,
    /// Why the reply ended.
    pub(super) finish: Option<Finish>,
}

impl JudgedReply {
    /// Lets the guards of a model judge a prompt and its reply; `None` if there are none. A prompt that is blocked is
    /// an error.
    pub(super) fn new(model: &LoadedModel, prompt: &PromptRequest) -> Result<Option<JudgedReply>> {
        if model.guards.is_empty() {
            return Ok(None);
        }
        let mut request = GenerationRequest::new(prompt.clone());
        model.judge(&mut request)?;
        let (mut replies, _) = Generation::submit(model, request)?.into_replies()?;
        let reply = replies.swap_remove(0);
        let tokens = reply.traces.into_iter().map(|trace| trace.verdicts).collect();
        Ok(Some(JudgedReply { tokens, finish: reply.finish }))
    }

    /// Whether a guard blocked the rest of the reply.
    pub(super) fn is_blocked(&self) -> bool {
        matches!(self.finish, Some(Finish::ContentFilter { .. }))
    }
}
