//! `/v1/chat/completions`: reads a chat request and turns it into a request to the engine.

use std::sync::Arc;

use pellucid_generate::{EncodedChat, LoadedModel, PromptEnd, PromptRequest, ToolRules};
use pellucid_sampling::MAX_LOGPROBS;
use utoipa::ToSchema;

use super::conversation::Conversation;
use super::openapi::schemas;
use super::sampling::SamplingFields;
use super::shared_fields::{self, SharedFields};
use super::speculation;
use super::tools;
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::reply::{Dialect, Spec};
use crate::state::Limits;

/// Fields of a chat request that completions do not have.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct ChatFields {
    #[schema(ignore)]
    pub(crate) conversation: Conversation,
    /// Maximum tokens of the reply; without it, the reply may fill the context.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub(crate) max_completion_tokens: Option<usize>,
    /// The older name of `max_completion_tokens`.
    #[schema(minimum = 1, maximum = 2147483647)]
    pub(crate) max_tokens: Option<usize>,
    /// Continue the text of the last message, which must be the assistant's, instead of beginning a new one.
    #[schema(default = false)]
    pub(crate) continue_final_message: Option<bool>,
    /// End the prompt with the beginning of an assistant's message; false with `continue_final_message`.
    pub(crate) add_generation_prompt: Option<bool>,
    /// Report the log probability of each token.
    pub(crate) logprobs: Option<bool>,
    /// Number of most probable tokens to report at each position; needs `logprobs`.
    #[schema(minimum = 0, maximum = 20)]
    pub(crate) top_logprobs: Option<u32>,
    /// The text that the reply is expected to contain, which makes it faster and not different.
    #[schema(schema_with = schemas::prediction)]
    pub(crate) prediction: Option<String>,
}

/// A chat request whose fields were read.
#[derive(Debug)]
pub(crate) struct ChatRequest {
    pub(crate) chat: ChatFields,
    pub(crate) shared: SharedFields,
    pub(crate) sampling: SamplingFields,
    /// Whether `max_tokens` may be more than the context has left, which then ends the reply. OpenAI's API refuses it,
    /// Anthropic's documents it.
    pub(crate) may_fill_context: bool,
}

impl ChatRequest {
    pub(crate) fn read(value: Json, model: &LoadedModel) -> Result<ChatRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let shared = SharedFields::read(&mut fields)?;
        let chat = ChatFields {
            conversation: Conversation::read(&mut fields, model)?,
            max_completion_tokens: fields.whole("max_completion_tokens", 1..=i64::from(i32::MAX))?,
            max_tokens: fields.whole("max_tokens", 1..=i64::from(i32::MAX))?,
            continue_final_message: fields.boolean("continue_final_message")?,
            add_generation_prompt: fields.boolean("add_generation_prompt")?,
            logprobs: fields.boolean("logprobs")?,
            top_logprobs: fields.whole("top_logprobs", 0..=i64::from(MAX_LOGPROBS))?,
            prediction: speculation::read_prediction(&mut fields)?,
        };
        let sampling = SamplingFields::read(&mut fields)?;
        refuse_others(&mut fields)?;
        fields.finish()?;
        if chat.top_logprobs.is_some() && chat.logprobs != Some(true) {
            return Err(ApiError::field("top_logprobs", "top_logprobs has no effect without logprobs: true"));
        }
        if chat.max_tokens.is_some() && chat.max_completion_tokens.is_some() {
            let message = "max_tokens and max_completion_tokens mean the same: give one of them";
            return Err(ApiError::field("max_tokens", message));
        }
        if chat.prediction.is_some() && shared.speculate == Some(false) {
            let message = "prediction contradicts speculate: false: give one of them";
            return Err(ApiError::field("prediction", message));
        }
        shared.check_seed(&sampling)?;
        let sampling = if shared.beam_width.is_none() { sampling.with_defaults(model) } else { sampling };
        shared_fields::check_model(&shared.model, model)?;
        Ok(ChatRequest { chat, shared, sampling, may_fill_context: false })
    }

    /// Checks the request against the model and the tenant, and encodes its prompt.
    pub(crate) fn spec(self, model: &LoadedModel, limits: &Limits, tenant: &Tenant) -> Result<Spec, ApiError> {
        let ChatRequest { chat, mut shared, sampling, may_fill_context } = self;
        let encoder = model.prompts().within(model.context_len);
        let rules = chat.conversation.tools.as_ref().filter(|rules| !rules.callable().is_empty());
        let output = shared.structured_output.as_ref();
        let end = chat.conversation.prompt_end(chat.continue_final_message, chat.add_generation_prompt)?;
        let EncodedChat { ids, ending } = chat.conversation.encode_with_ending(end, encoder)?;
        let fits = |wanted: &usize| !may_fill_context || ids.len().saturating_add(*wanted) <= model.context_len;
        let max_tokens = chat.max_completion_tokens.or(chat.max_tokens).filter(fits);
        shared_fields::check_context(&ids, max_tokens, sampling.min_tokens(), model, "messages")?;
        let logprobs = (chat.logprobs == Some(true)).then(|| chat.top_logprobs.unwrap_or(0));
        let params = shared_fields::sampling_params(&sampling, logprobs, model)?;
        let mut request = shared.request(ids, params, max_tokens, limits, tenant)?;
        if let Some(text) = &chat.prediction {
            request.prediction = speculation::encode_prediction(text, model)?;
        }
        let mut prompt = PromptRequest::chat(request);
        prompt.reports_ids = shared.reports_ids();
        prompt.turns = chat.conversation.turns(model)?;
        let mut not_enforced = Arc::default();
        match (rules, output) {
            (Some(rules), _) => {
                let plan = tools::plan(rules, output, model, tenant, shared.beam_width)?;
                plan.apply(&mut prompt);
                not_enforced = plan.not_enforced().into();
            }
            (None, Some(output)) => {
                prompt.request.constraint = Some(output.compile(model, tenant, shared.beam_width)?);
            }
            (None, None) => {}
        }
        // A grammar describes every byte, so no space at the beginning is dropped.
        prompt.continues_text = end == PromptEnd::Open || output.is_some();
        let has_grammar = output.is_some() || rules.is_some_and(ToolRules::is_required);
        let budget = chat.conversation.thinking_budget;
        if budget.is_some() && shared.beam_width.is_some() {
            let message = "thinking_budget cannot be combined with beam_width, because beam search samples no tokens";
            return Err(ApiError::field("thinking_budget", message));
        }
        model.separate_thoughts(&mut prompt, &ending, budget);
        Ok(Spec {
            dialect: Dialect::Chat,
            streaming: shared.streaming(),
            prompts: vec![prompt],
            sampling,
            logprobs,
            user: shared.end_user(),
            service_tier: shared.client.tier_used(),
            may_call: rules.is_some(),
            has_grammar,
            not_enforced,
            stop: shared.stop,
        })
    }
}

/// Refuses fields of OpenAI's API that are not supported, unless their value asks for the default behaviour.
fn refuse_others(fields: &mut Fields) -> Result<(), ApiError> {
    let is_word = |value: &Json, words: &[&str]| matches!(value, Json::String(word) if words.contains(&word.as_str()));
    let is_text =
        |value: &Json| matches!(value, Json::Array(values) if values.iter().all(|value| is_word(value, &["text"])));
    fields.refuse("modalities", is_text, "this server generates only text")?;
    fields.refuse("audio", |_| false, "this server does not support audio")?;
    fields.refuse("web_search_options", |_| false, "this server opens no outbound connections")?;
    fields.refuse("verbosity", |value| is_word(value, &["medium"]), "the models served here have no such setting")?;
    fields.refuse(
        "prompt_cache_options",
        |_| false,
        "prefixes are cached automatically and kept while there is memory",
    )?;
    fields.refuse("moderation", |_| false, "this server has no moderation model")?;
    fields.refuse("best_of", |_| false, "only /v1/completions has it")?;
    fields.refuse("echo", |value| *value == Json::Bool(false), "only /v1/completions has it")?;
    fields.refuse("suffix", |_| false, "only /v1/completions has it")
}
