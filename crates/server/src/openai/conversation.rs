//! The fields that a chat template renders, read alike by `/v1/chat/completions`, `/tokenize` and `/apply-template`.
//! `pellucid_generate::PromptEncoder` renders them.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pellucid_generate::{
    ChatPrompt, EncodedChat, Error as PromptError, LoadedModel, PromptEncoder, PromptEnd, ThinkingSettings, ToolRules,
    Turn,
};
use pellucid_tokenizer::{Error as TokenizerError, MemoryGrant, Segment};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::messages::{self, ChatMessage, Role};
use super::openapi::schemas;
use super::{thinking, tools};
use crate::http::blocking;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::limits::client_memory::{out_of_memory, working_account};

/// Maximum variables for the template, and bytes of one that is text.
const MAX_VARIABLES: usize = 16;
const MAX_VARIABLE_LEN: usize = 1024;

/// Messages, tools and variables for the model's chat template.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct Conversation {
    #[schema(min_items = 1, max_items = 4096)]
    pub(crate) messages: Vec<ChatMessage>,
    /// Tools that the model may call.
    #[schema(schema_with = tools::tools, required = false)]
    pub(crate) tools: Option<ToolRules>,
    /// Whether the model may or must call them. It is read into `tools`.
    #[schema(schema_with = tools::tool_choice, required = false)]
    pub(crate) tool_choice: (),
    /// Whether one reply may call several. It is read into `tools`.
    #[schema(schema_with = tools::parallel_tool_calls, required = false)]
    pub(crate) parallel_tool_calls: (),
    /// Variables of the model's chat template, such as `enable_thinking`.
    #[schema(schema_with = schemas::variables)]
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
    #[schema(schema_with = thinking::reasoning_effort, required = false)]
    pub(crate) reasoning_effort: Option<String>,
    /// Maximum tokens of the thoughts, which are ended then; refused if the model has none.
    #[schema(minimum = 0, maximum = 2147483647)]
    pub(crate) thinking_budget: Option<usize>,
    /// The field in which the template reads earlier thoughts.
    #[schema(ignore)]
    pub(crate) thinking: ThinkingSettings,
}

impl Conversation {
    /// Reads a conversation; `messages` is required.
    pub(crate) fn read(fields: &mut Fields, model: &LoadedModel) -> Result<Conversation, ApiError> {
        let value = fields.required("messages")?;
        Conversation::read_with(value, fields, model)
    }

    /// Reads a conversation if there are `messages`. Without them, fields that only a template uses are refused.
    pub(crate) fn read_optional(fields: &mut Fields, model: &LoadedModel) -> Result<Option<Conversation>, ApiError> {
        if let Some(value) = fields.take("messages") {
            return Conversation::read_with(value, fields, model).map(Some);
        }
        refuse_template(fields)?;
        let useless = |name: &str| ApiError::field(name, format!("{name} has no effect without messages"));
        if tools::read(fields)?.is_some() {
            return Err(useless("tools"));
        }
        for name in ["chat_template_kwargs", "reasoning_effort", "thinking_budget"] {
            if fields.take(name).is_some() {
                return Err(useless(name));
            }
        }
        Ok(None)
    }

    fn read_with(messages: Json, fields: &mut Fields, model: &LoadedModel) -> Result<Conversation, ApiError> {
        let path = fields.path("messages");
        let messages = messages::read_value(&path, messages)?;
        thinking::check_thoughts(&path, &messages, model)?;
        let mut variables = read_variables(fields, model)?;
        let conversation = Conversation {
            messages,
            reasoning_effort: thinking::read_effort(fields, model, &mut variables)?,
            thinking_budget: thinking::read_budget(fields, model, &mut variables)?,
            thinking: model.thinking().settings.clone(),
            tools: tools::read(fields)?,
            tool_choice: (),
            parallel_tool_calls: (),
            chat_template_kwargs: variables,
        };
        refuse_template(fields)?;
        Ok(conversation)
    }

    /// Returns what follows the last message, from the fields `continue_final_message` and `add_generation_prompt`. The
    /// names are vLLM's.
    pub(crate) fn prompt_end(
        &self,
        continue_final_message: Option<bool>,
        add_generation_prompt: Option<bool>,
    ) -> Result<PromptEnd, ApiError> {
        let (continues, name) = (continue_final_message == Some(true), "continue_final_message");
        if !continues {
            let adds = add_generation_prompt.unwrap_or(true);
            return Ok(if adds { PromptEnd::Reply } else { PromptEnd::Closed });
        }
        if add_generation_prompt == Some(true) {
            return Err(ApiError::field(name, format!("{name} contradicts add_generation_prompt: give one of them")));
        }
        match self.messages.last() {
            Some(last) if last.role == Role::Assistant && last.tool_calls.is_empty() => Ok(PromptEnd::Open),
            _ => {
                let message = format!("{name}: expected a text of the assistant as the last message");
                Err(ApiError::field(name, message))
            }
        }
    }

    /// Returns the ids of the conversation.
    pub(crate) fn encode(&self, end: PromptEnd, encoder: PromptEncoder<'_>) -> Result<Vec<u32>, ApiError> {
        self.rendering(end, encoder, |encoder, prompt| encoder.encode_chat(prompt))
    }

    /// Returns the ids of the conversation with the end of its text.
    pub(crate) fn encode_with_ending(
        &self,
        end: PromptEnd,
        encoder: PromptEncoder<'_>,
    ) -> Result<EncodedChat, ApiError> {
        self.rendering(end, encoder, |encoder, prompt| encoder.encode_with_ending(prompt))
    }

    /// Returns the messages for the guards of a model; none if it has no guards.
    pub(crate) fn turns(&self, model: &LoadedModel) -> Result<Vec<Turn>, ApiError> {
        if model.guards.is_empty() {
            Ok(Vec::new())
        } else {
            Ok(Turn::of_messages(&messages::to_values(&self.messages, &self.thinking)?))
        }
    }

    /// Returns the conversation as the template renders it.
    pub(crate) fn render(&self, end: PromptEnd, encoder: PromptEncoder<'_>) -> Result<Vec<Segment>, ApiError> {
        self.rendering(end, encoder, |encoder, prompt| encoder.render(prompt))
    }

    /// Passes `work` the conversation and an encoder whose renderings end when the client disconnects, and take what
    /// their strings need from the tenant's memory until `work` is done. Errors name the field `messages`.
    fn rendering<T>(
        &self,
        end: PromptEnd,
        encoder: PromptEncoder<'_>,
        work: impl FnOnce(&PromptEncoder<'_>, &ChatPrompt<'_>) -> Result<T, PromptError>,
    ) -> Result<T, ApiError> {
        let messages = messages::to_values(&self.messages, &self.thinking)?;
        let tools = self.tools.as_ref().and_then(ToolRules::prompt_tools);
        let variables = self.chat_template_kwargs.as_ref();
        let prompt = ChatPrompt { messages: &messages, end, variables, tools: tools.as_ref() };
        let cancel = blocking::current();
        let refusal = Arc::new(OnceLock::new());
        let (account, refused) = (Mutex::new(working_account()), refusal.clone());
        let grant = MemoryGrant(Arc::new(move |bytes| {
            let mut account = account.lock().unwrap_or_else(PoisonError::into_inner);
            let granted = account.as_mut().map_or(Ok(()), |account| account.grow_to(bytes));
            granted.map_err(|error| refused.set(error)).is_ok()
        }));
        let encoder = encoder.cancelled_by(cancel.flag()).granted_by(&grant);
        let outcome = work(&encoder, &prompt).map_err(|error| prompt_error("messages", error));
        let outcome = outcome.and_then(|done| check_names(&prompt, encoder).map(|()| done));
        match (outcome, refusal.get()) {
            (Err(_), Some(error)) => Err(error.clone()),
            (outcome, _) => outcome,
        }
    }
}

/// Refuses templates from clients.
fn refuse_template(fields: &mut Fields) -> Result<(), ApiError> {
    let why = "templates come with the model or with --chat-template of the server, never from a request";
    fields.refuse("chat_template", |_| false, why)
}

/// Reads `chat_template_kwargs`: variables of the model's template, such as `enable_thinking`.
fn read_variables(fields: &mut Fields, model: &LoadedModel) -> Result<Option<Map<String, Value>>, ApiError> {
    let path = fields.path("chat_template_kwargs");
    let entries = match fields.take("chat_template_kwargs") {
        None => return Ok(None),
        Some(Json::Object(entries)) => entries,
        Some(other) => return Err(fields::wrong_type(&path, "an object", &other)),
    };
    if entries.len() > MAX_VARIABLES {
        return Err(ApiError::field(&path, format!("{path}: expected at most {MAX_VARIABLES} names")));
    }
    let encoder = model.prompts();
    let mut variables = Map::new();
    for (name, value) in entries {
        let place = format!("{path}.{}", name.chars().take(64).collect::<String>());
        if !encoder.accepts_variable(&name) {
            let message = format!("{path}: the model's chat template has no variable {} that can be set", shown(&name));
            return Err(ApiError::field(place, message));
        }
        let value = match value {
            Json::Bool(value) => value.into(),
            Json::Integer(value) if i64::try_from(value).is_ok() => (value as i64).into(),
            Json::Float(value) => value.into(),
            Json::String(text) => fields::string(&place, Json::String(text), MAX_VARIABLE_LEN)?.into(),
            other => return Err(fields::wrong_type(&place, "a boolean, a number or a string", &other)),
        };
        variables.insert(name, value);
    }
    Ok(Some(variables))
}

/// Refuses a `name` that would have no effect.
fn check_names(prompt: &ChatPrompt<'_>, encoder: PromptEncoder<'_>) -> Result<(), ApiError> {
    match encoder.unwritten_name(prompt).map_err(|error| prompt_error("messages", error))? {
        None => Ok(()),
        Some(index) => {
            let path = format!("messages[{index}].name");
            let role = prompt.messages[index]["role"].as_str().unwrap_or_default();
            let message = format!(
                "{path} is not supported: the model's chat template does not write the name of a {role} message"
            );
            Err(ApiError::field(path, message).code("unsupported_parameter"))
        }
    }
}

/// Returns the error for a prompt in the field `param`.
pub(crate) fn prompt_error(param: &str, error: PromptError) -> ApiError {
    match error {
        PromptError::OutOfMemory => out_of_memory(),
        PromptError::NoChatTemplate => {
            let message = "this model has no chat template, so it cannot chat; /v1/completions continues a text";
            ApiError::invalid(message).code("no_chat_template")
        }
        error @ PromptError::LastMessageChanged => ApiError::field(param, error.to_string()),
        error @ PromptError::NoFillIn => ApiError::field(param, error.to_string()).code("unsupported_parameter"),
        PromptError::PromptTooLong { at_least, context_len } => {
            let message = format!(
                "this model's maximum context length is {context_len} tokens, but the prompt has at least {at_least}"
            );
            ApiError::field(param, message).code("context_length_exceeded")
        }
        PromptError::Template(
            error @ (TokenizerError::TemplateRefused(_)
            | TokenizerError::UnknownRole { .. }
            | TokenizerError::TemplateTooLarge { .. }
            | TokenizerError::TemplateTooSlow { .. }),
        ) => ApiError::field(param, error.to_string()),
        PromptError::Template(TokenizerError::Cancelled) => blocking::disconnected(),
        PromptError::Template(error) => {
            tracing::error!(%error, "the chat template failed");
            ApiError::field(param, "the model's chat template failed on this conversation")
        }
    }
}
