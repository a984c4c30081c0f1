//! The ids of the prompts of one request, for replies that report the ids of tokens (`return_token_ids`). The fields
//! have the names and places of vLLM: in a chat beside the choices, in completions in each choice.

use std::sync::Arc;

use pellucid_engine::fallible;

use crate::http::error::ApiError;
use crate::reply::Spec;
use crate::reply::parts::JsonParts;

/// The ids of the prompts of one request.
#[derive(Debug, Clone)]
pub(crate) struct PromptIds {
    prompts: Arc<Vec<Vec<u32>>>,
    choices_per_prompt: usize,
}

impl PromptIds {
    /// Returns copies of the prompts of a request that asks for ids; `None` for others.
    pub(super) fn of(spec: &Spec) -> Result<Option<PromptIds>, ApiError> {
        let Some(first) = spec.prompts.first().filter(|prompt| prompt.reports_ids) else { return Ok(None) };
        let choices_per_prompt = first.request.beams.map_or(first.request.num_choices, |beams| beams.num_returned);
        let mut prompts = fallible::with_capacity(spec.prompts.len())?;
        for prompt in &spec.prompts {
            prompts.push(fallible::copy_of(&prompt.request.prompt)?);
        }
        Ok(Some(PromptIds { prompts: Arc::new(prompts), choices_per_prompt }))
    }

    /// Returns the ids of some prompts.
    #[cfg(test)]
    pub(crate) fn new(prompts: Vec<Vec<u32>>, choices_per_prompt: usize) -> PromptIds {
        PromptIds { prompts: Arc::new(prompts), choices_per_prompt }
    }

    /// Number of choices over all prompts.
    pub(super) fn num_choices(&self) -> usize {
        self.prompts.len() * self.choices_per_prompt
    }

    /// Returns the ids of the prompt of a choice.
    pub(super) fn of_choice(&self, choice: usize) -> &[u32] {
        &self.prompts[choice / self.choices_per_prompt]
    }

    /// Adds the field with the ids of the prompt of a choice.
    pub(crate) fn write(&self, choice: usize, parts: &mut JsonParts) {
        parts.literal(",\"prompt_token_ids\":[");
        let (ids, len) = (self.clone(), self.of_choice(choice).len());
        parts.list(0..len, move |i, out| out.json(&ids.of_choice(choice)[i]));
        parts.literal("]");
    }
}
