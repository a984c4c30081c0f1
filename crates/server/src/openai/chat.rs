//! `/v1/chat/completions`: what a chat request may say, and what it becomes.

use pellucid_generate::{LoadedModel, PromptRequest};
use pellucid_sampling::MAX_LOGPROBS;
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::common::{self, CommonFields};
use super::messages::{self, ChatMessage};
use super::sampling::SamplingFields;
use crate::error::ApiError;
use crate::fields::Fields;
use crate::json::Json;
use crate::reply::{Dialect, Spec};
use crate::schemas;
use crate::state::Limits;
use crate::tenants::Tenant;

const LATER: &str = "it follows in a later version";

/// Fields of a chat request that completions do not have.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct ChatFields {
    #[schema(min_items = 1, max_items = 4096)]
    pub(crate) messages: Vec<ChatMessage>,
    /// Tokens of the reply at most; without it, as many as the context holds.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub(crate) max_completion_tokens: Option<usize>,
    /// The older name of `max_completion_tokens`.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub(crate) max_tokens: Option<usize>,
    /// Report the log probability of each token.
    pub(crate) logprobs: Option<bool>,
    /// Report so many of the most probable tokens at each place; needs `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// Variables of the model's chat template, such as `enable_thinking`.
    #[schema(schema_with = schemas::variables)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
}

/// A chat request as it was read.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) chat: ChatFields,
    pub(crate) common: CommonFields,
    pub(crate) sampling: SamplingFields,
}

impl ChatRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<ChatRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let common = CommonFields::read(&mut fields)?;
        let chat = ChatFields {
            messages: messages::read(&mut fields)?,
            max_completion_tokens: fields.whole("max_completion_tokens", 1..=i64::from(i32::MAX))?,
            max_tokens: fields.whole("max_tokens", 1..=i64::from(i32::MAX))?,
            logprobs: fields.boolean("logprobs")?,
            top_logprobs: fields.whole("top_logprobs", 0..=i64::from(MAX_LOGPROBS))?,
            chat_template_kwargs: messages::read_variables(&mut fields, model)?,
        };
        let sampling = SamplingFields::read(&mut fields)?;
        refuse_others(&mut fields)?;
        fields.finish()?;
        if chat.top_logprobs.is_some() && chat.logprobs != Some(true) {
            return Err(ApiError::field("top_logprobs", "top_logprobs does nothing without logprobs: true"));
        }
        if chat.max_tokens.is_some() && chat.max_completion_tokens.is_some() {
            let message = "max_tokens and max_completion_tokens are two names of one thing: give one of them";
            return Err(ApiError::field("max_tokens", message));
        }
        common.check_seed(&sampling)?;
        common::check_model(&common.model, model)?;
        Ok(ChatRequest { chat, common, sampling })
    }

    /// What is to be done, with the prompt as ids.
    pub(crate) fn spec(self, model: &LoadedModel, limits: &Limits, tenant: &Tenant) -> Result<Spec, ApiError> {
        let ChatRequest { chat, common, sampling } = self;
        let encoder = model.prompts().within(model.context_len);
        let ids = messages::encode(&chat.messages, true, chat.chat_template_kwargs.as_ref(), encoder)?;
        let max_tokens = chat.max_completion_tokens.or(chat.max_tokens);
        common::check_context(&ids, max_tokens, sampling.min_tokens(), model, "messages")?;
        let logprobs = (chat.logprobs == Some(true)).then(|| chat.top_logprobs.unwrap_or(0));
        let params = common::sampling_params(&sampling, logprobs, model)?;
        let request = common.request(ids, params, max_tokens, limits, tenant)?;
        Ok(Spec {
            dialect: Dialect::Chat,
            streaming: common.streaming(),
            prompts: vec![PromptRequest::chat(request)],
            sampling,
            logprobs,
            stop: common.stop,
            user: common.user,
        })
    }
}

/// Fields of OpenAI's API that are not served, each with its reason; values that ask for what is done anyway pass.
fn refuse_others(fields: &mut Fields) -> Result<(), ApiError> {
    let is_word = |value: &Json, words: &[&str]| matches!(value, Json::String(word) if words.contains(&word.as_str()));
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    let is_text =
        |value: &Json| matches!(value, Json::Array(values) if values.iter().all(|value| is_word(value, &["text"])));
    let is_text_format = |value: &Json| match value {
        Json::Object(entries) => {
            matches!(&entries[..], [(name, value)] if name == "type" && is_word(value, &["text"]))
        }
        _ => false,
    };
    fields.refuse("tools", is_empty, LATER)?;
    fields.refuse("tool_choice", |value| is_word(value, &["none", "auto"]), LATER)?;
    fields.refuse("parallel_tool_calls", |_| false, LATER)?;
    fields.refuse("functions", is_empty, LATER)?;
    fields.refuse("function_call", |value| is_word(value, &["none", "auto"]), LATER)?;
    fields.refuse(
        "response_format",
        is_text_format,
        "only {\"type\": \"text\"} for now; structured output follows in a later version",
    )?;
    fields.refuse("modalities", is_text, "this server writes text only")?;
    fields.refuse("audio", |_| false, "this server has no sound")?;
    fields.refuse("store", |value| *value == Json::Bool(false), "this server stores nothing")?;
    fields.refuse(
        "metadata",
        |value| matches!(value, Json::Object(entries) if entries.is_empty()),
        "this server stores nothing",
    )?;
    fields.refuse("service_tier", |value| is_word(value, &["auto", "default"]), "there is one tier; see priority")?;
    fields.refuse("web_search_options", |_| false, "this server opens no outbound connections")?;
    fields.refuse("prediction", |_| false, LATER)?;
    fields.refuse("reasoning_effort", |_| false, LATER)?;
    fields.refuse("verbosity", |_| false, "the models served here do not know it")?;
    fields.refuse("safety_identifier", |_| false, "use user")?;
    fields.refuse(
        "prompt_cache_key",
        |_| false,
        "prefixes are cached for each tenant by themselves; cache_salt narrows that",
    )?;
    fields.refuse("prompt_cache_retention", |_| false, "prefixes are kept while there is memory")?;
    fields.refuse(
        "prompt_cache_options",
        |_| false,
        "prefixes are cached by themselves and kept while there is memory",
    )?;
    fields.refuse("moderation", |_| false, "this server has no model for it")?;
    fields.refuse("best_of", |_| false, "it belongs to /v1/completions")?;
    fields.refuse("echo", |value| *value == Json::Bool(false), "it belongs to /v1/completions")?;
    fields.refuse("suffix", |_| false, "it belongs to /v1/completions")
}
