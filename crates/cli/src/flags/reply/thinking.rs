//! Flags of thinking: how much a model thinks before it answers. `run` and `explain` share them.

use anyhow::{Result, anyhow};
use pellucid_generate::{ChatPrompt, EncodedChat, LoadedModel, PromptRequest, REASONING_EFFORTS, ReplyPlan};
use serde_json::{Map, Value};

use crate::flags::prompt::Prompt;
use crate::flags::usage_error::{OrUsage, bail_usage};

#[derive(Debug, Clone, Default, clap::Args)]
pub(crate) struct ThinkingArgs {
    /// Amount of thinking: none, minimal, low, medium, high, xhigh or
    /// max, as far as the model's chat template has such a setting
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "LEVEL",
        help_heading = "Thinking",
        hide_possible_values = true,
        value_parser = clap::builder::PossibleValuesParser::new(REASONING_EFFORTS)
    )]
    reasoning_effort: Option<String>,

    /// Maximum tokens of the thoughts; then they are ended, and the
    /// model answers
    #[arg(long, verbatim_doc_comment, value_name = "TOKENS", help_heading = "Thinking")]
    thinking_budget: Option<u32>,
}

/// The flags in terms of a model.
#[derive(Debug, Clone, Default)]
pub(crate) struct ThinkingChoice {
    variables: Map<String, Value>,
    budget: Option<usize>,
}

impl ThinkingArgs {
    /// Returns the flag that was given.
    pub(crate) fn flag(&self) -> Option<&'static str> {
        let effort = self.reasoning_effort.is_some().then_some("--reasoning-effort");
        effort.or(self.thinking_budget.is_some().then_some("--thinking-budget"))
    }

    /// Whether thoughts have a budget, which is a constraint on the reply.
    pub(crate) fn has_budget(&self) -> bool {
        self.thinking_budget.is_some()
    }

    /// Returns the variables of the model's template, and the budget. Fails if the model has no such setting.
    pub(crate) fn for_model(&self, model: &LoadedModel) -> Result<ThinkingChoice> {
        let thinking = model.thinking();
        let mut variables = match &self.reasoning_effort {
            Some(effort) => {
                let variables = thinking.settings.variables(effort);
                variables.map_err(|error| anyhow!("--reasoning-effort {effort}: {error}")).or_usage()?
            }
            None => Map::new(),
        };
        let budget = self.thinking_budget.map(|tokens| tokens as usize);
        if budget.is_some() && thinking.markers.is_none() {
            bail_usage!("--thinking-budget: this model's chat template has no thoughts");
        }
        variables.extend(budget.into_iter().flat_map(|budget| thinking.settings.budget_variables(budget)));
        Ok(ThinkingChoice { variables, budget })
    }
}

impl ThinkingChoice {
    /// Returns the token ids of a prompt, with those that the model expects before every text. The prompt of a chat
    /// shows the tools of `plan`.
    pub(crate) fn encode(&self, prompt: &Prompt, model: &LoadedModel, plan: &ReplyPlan) -> Result<EncodedChat> {
        Ok(match prompt {
            Prompt::Chat(messages) => {
                let variables = Some(&self.variables).filter(|variables| !variables.is_empty());
                let prompt = ChatPrompt { variables, tools: plan.tools(), ..ChatPrompt::new(messages) };
                model.prompts().encode_with_ending(&prompt)?
            }
            Prompt::Text(text) => EncodedChat { ids: model.prompts().encode_text(text)?, ending: String::new() },
        })
    }

    /// Returns the request for a prompt, whose replies follow `plan` and, in a chat, separate thoughts from the answer.
    /// `make` gets the token ids.
    pub(crate) fn request(
        &self,
        prompt: &Prompt,
        model: &LoadedModel,
        plan: &ReplyPlan,
        make: impl FnOnce(Vec<u32>) -> pellucid_engine::Request,
    ) -> Result<PromptRequest> {
        let EncodedChat { ids, ending } = self.encode(prompt, model, plan)?;
        let is_chat = matches!(prompt, Prompt::Chat(_));
        // A grammar describes every byte, so no space at the beginning is dropped.
        let continues_text = !is_chat || plan.has_grammar();
        let mut request = PromptRequest { continues_text, ..PromptRequest::chat(make(ids)) };
        plan.apply(&mut request);
        if is_chat {
            model.separate_thoughts(&mut request, &ending, self.budget);
        }
        Ok(request)
    }
}
