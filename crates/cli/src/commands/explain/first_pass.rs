//! A first pass over the reply that is explained, with the ends that the engine does not know: guards and `--stop`.
//!
//! The reply is generated twice, with the same tokens: first as `run` does, which decides how many tokens may be shown
//! and why the reply ends, then to explain these tokens.

use anyhow::Result;
use pellucid_generate::{Finish, Generation, GenerationRequest, LoadedModel, PromptRequest, TokenVerdict};

/// The reply as `run` gives it.
#[derive(Debug)]
pub(super) struct FirstPass {
    /// For each token that may be shown, the verdicts of guards.
    pub(super) tokens: Vec<Vec<TokenVerdict>>,
    /// Why the reply ended.
    pub(super) finish: Option<Finish>,
}

impl FirstPass {
    /// Generates the reply behind the guards of a model, up to one of the texts of `stop`; `None` if there are neither
    /// guards nor such texts. A prompt that a guard blocks is an error.
    pub(super) fn new(model: &LoadedModel, prompt: &PromptRequest, stop: &[String]) -> Result<Option<FirstPass>> {
        if model.guards.is_empty() && stop.is_empty() {
            return Ok(None);
        }
        let mut request = GenerationRequest { stop: stop.to_vec(), ..GenerationRequest::new(prompt.clone()) };
        model.judge(&mut request)?;
        let (mut replies, _) = Generation::submit(model, request)?.into_replies()?;
        let reply = replies.swap_remove(0);
        let tokens = reply.traces.into_iter().map(|trace| trace.verdicts).collect();
        Ok(Some(FirstPass { tokens, finish: reply.finish }))
    }

    /// Whether a guard blocked the rest of the reply.
    pub(super) fn is_blocked(&self) -> bool {
        matches!(self.finish, Some(Finish::ContentFilter { .. }))
    }

    /// Returns a text that the last token made `num_bytes` longer without the text that ended it and what follows.
    pub(super) fn without_stop<'t>(&self, text: &'t str, num_bytes: usize) -> &'t str {
        let Some(Finish::StopString(stop)) = &self.finish else { return text };
        // The last token completes it.
        let earliest = (text.len() - num_bytes).saturating_sub(stop.len().saturating_sub(1));
        let mut places = (earliest..text.len()).filter(|&at| text.is_char_boundary(at));
        places.find(|&at| text[at..].starts_with(stop)).map_or(text, |at| &text[..at])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_ends_before_the_first_stop_text_that_the_last_token_completes() {
        let reply = |stop: &str| FirstPass { tokens: Vec::new(), finish: Some(Finish::StopString(stop.into())) };
        assert_eq!(reply("aa").without_stop("baaab", 4), "b", "not the last place");
        assert_eq!(reply("aa").without_stop("aabaa", 1), "aab", "an earlier one came before --min-tokens");
        assert_eq!(reply("é.").without_stop("ééé. x", 3), "éé");
        assert_eq!(reply("x").without_stop("abc", 3), "abc", "the text with control tokens does not have it");
        let other = FirstPass { tokens: Vec::new(), finish: Some(Finish::MaxTokens) };
        assert_eq!(other.without_stop("abc", 3), "abc");
    }
}
