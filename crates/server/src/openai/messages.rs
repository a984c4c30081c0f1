//! The messages of a conversation: read and checked, then rendered and encoded by `pellucid_generate::PromptEncoder`.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use pellucid_generate::{ChatPrompt, Error as PromptError, LoadedModel, PromptEncoder};
use pellucid_tokenizer::{Error as TokenizerError, MemoryGrant, Segment, message};
use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::openapi::schemas;
use crate::http::blocking;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::http::long_text::{append, with_capacity};
use crate::limits::client_memory::{out_of_memory, working_account};

/// Maximum messages of one conversation, and parts of one message.
const MAX_MESSAGES: usize = 4096;
const MAX_PARTS: usize = 1024;
/// Maximum bytes of a message's `name`.
const MAX_NAME_LEN: usize = 256;
/// Maximum variables for the template, and bytes of one that is text.
const MAX_VARIABLES: usize = 16;
const MAX_VARIABLE_LEN: usize = 1024;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct ChatMessage {
    pub(crate) role: Role,
    /// Text, or parts of text, which are joined by line ends. Images and audio are refused.
    #[schema(schema_with = schemas::content)]
    pub(crate) content: String,
    /// Name of the author; refused if the model's chat template does not write it.
    #[schema(required = false, max_length = 256)]
    pub(crate) name: Option<String>,
}

/// The author of a message. Tools are planned for a later version.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    /// Rendered as `system` if the model's template has no role `developer`.
    Developer,
    User,
    Assistant,
}

impl Role {
    fn parse(path: &str, value: Json) -> Result<Role, ApiError> {
        let name = fields::string(path, value, 64)?;
        match name.as_str() {
            "system" => Ok(Role::System),
            "developer" => Ok(Role::Developer),
            "user" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            "tool" | "function" => {
                let message = format!("{path}: the roles tool and function are not supported yet");
                Err(ApiError::field(path, message).code("unsupported_value"))
            }
            _ => {
                let message = format!("{path}: expected system, developer, user or assistant, found {}", shown(&name));
                Err(ApiError::field(path, message))
            }
        }
    }

    fn name(self) -> &'static str {
        match self {
            Role::System => "system",
            Role::Developer => "developer",
            Role::User => "user",
            Role::Assistant => "assistant",
        }
    }
}

/// Reads the list of messages at `path`.
pub(crate) fn read_value(path: &str, value: Json) -> Result<Vec<ChatMessage>, ApiError> {
    let values = fields::array(path, value, MAX_MESSAGES)?;
    if values.is_empty() {
        return Err(
            ApiError::field(path, format!("{path}: expected at least one message, found none")).code("empty_array")
        );
    }
    let mut messages = with_capacity(values.len())?;
    for (i, value) in values.into_iter().enumerate() {
        messages.push(read_one(format!("{path}[{i}]"), value)?);
    }
    Ok(messages)
}

fn read_one(path: String, value: Json) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::within(path, value)?;
    let role_path = fields.path("role");
    let role = Role::parse(&role_path, fields.required("role")?)?;
    let content_path = fields.path("content");
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    for name in ["tool_calls", "function_call", "tool_call_id"] {
        fields.refuse(name, is_empty, "tools are planned for a later version")?;
    }
    // Clients send back replies as their library represents them, with this empty list and many null fields.
    fields.refuse("annotations", is_empty, "citations are not rendered")?;
    for (name, why) in [
        ("audio", "this server does not support audio"),
        ("refusal", "the models served here have no separate refusals"),
    ] {
        fields.refuse(name, |_| false, why)?;
    }
    let content = read_content(&content_path, fields.required("content")?)?;
    let name = fields.string("name", MAX_NAME_LEN)?;
    fields.finish()?;
    Ok(ChatMessage { role, content, name })
}

/// Reads the content of a message or of a prediction: text, or parts of text.
pub(super) fn read_content(path: &str, value: Json) -> Result<String, ApiError> {
    let parts = match value {
        Json::String(text) => return Ok(text),
        Json::Array(_) => fields::array(path, value, MAX_PARTS)?,
        other => return Err(fields::wrong_type(path, "a string or an array of text parts", &other)),
    };
    if parts.is_empty() {
        return Err(
            ApiError::field(path, format!("{path}: expected at least one part, found none")).code("empty_array")
        );
    }
    let mut texts = with_capacity(parts.len())?;
    for (i, part) in parts.into_iter().enumerate() {
        let mut fields = Fields::within(format!("{path}[{i}]"), part)?;
        let (kind_path, text_path) = (fields.path("type"), fields.path("text"));
        let kind = fields::string(&kind_path, fields.required("type")?, 64)?;
        if kind != "text" {
            let message = format!("{kind_path}: this model reads text only, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
        texts.push(fields::string(&text_path, fields.required("text")?, usize::MAX)?);
        fields.finish()?;
    }
    let mut joined = String::new();
    for (i, text) in texts.iter().enumerate() {
        append(&mut joined, &[if i > 0 { "\n" } else { "" }, text])?;
    }
    Ok(joined)
}

/// Reads `chat_template_kwargs`: variables of the model's template, such as `enable_thinking`.
pub(crate) fn read_variables(fields: &mut Fields, model: &LoadedModel) -> Result<Option<Map<String, Value>>, ApiError> {
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

/// Returns the ids of a conversation. Errors name the field `messages`.
pub(crate) fn encode(
    messages: &[ChatMessage],
    add_generation_prompt: bool,
    variables: Option<&Map<String, Value>>,
    encoder: PromptEncoder<'_>,
) -> Result<Vec<u32>, ApiError> {
    let messages = to_values(messages)?;
    let prompt = ChatPrompt { messages: &messages, add_generation_prompt, variables };
    rendering(encoder, |encoder| {
        let ids = encoder.encode_chat(&prompt).map_err(|error| prompt_error("messages", error))?;
        check_names(&prompt, encoder)?;
        Ok(ids)
    })
}

/// Returns a conversation as the template renders it.
pub(crate) fn render(
    messages: &[ChatMessage],
    add_generation_prompt: bool,
    variables: Option<&Map<String, Value>>,
    encoder: PromptEncoder<'_>,
) -> Result<Vec<Segment>, ApiError> {
    let messages = to_values(messages)?;
    let prompt = ChatPrompt { messages: &messages, add_generation_prompt, variables };
    rendering(encoder, |encoder| {
        let segments = encoder.render(&prompt).map_err(|error| prompt_error("messages", error))?;
        check_names(&prompt, encoder)?;
        Ok(segments)
    })
}

/// Passes `work` an encoder whose renderings end when the client disconnects, and take what their strings need from the
/// tenant's memory until `work` is done.
fn rendering<T>(
    encoder: PromptEncoder<'_>,
    work: impl FnOnce(PromptEncoder<'_>) -> Result<T, ApiError>,
) -> Result<T, ApiError> {
    let cancel = blocking::current();
    let refusal = Arc::new(OnceLock::new());
    let (account, refused) = (Mutex::new(working_account()), refusal.clone());
    let grant = MemoryGrant(Arc::new(move |bytes| {
        let mut account = account.lock().unwrap_or_else(PoisonError::into_inner);
        let granted = account.as_mut().map_or(Ok(()), |account| account.grow_to(bytes));
        granted.map_err(|error| refused.set(error)).is_ok()
    }));
    let outcome = work(encoder.cancelled_by(cancel.flag()).granted_by(&grant));
    match (outcome, refusal.get()) {
        (Err(_), Some(error)) => Err(error.clone()),
        (outcome, _) => outcome,
    }
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

/// Returns messages as the template reads them. The texts are copied into memory that may be refused.
fn to_values(messages: &[ChatMessage]) -> Result<Vec<Value>, ApiError> {
    let mut values = with_capacity(messages.len())?;
    for one in messages {
        let mut content = String::new();
        append(&mut content, &[&one.content])?;
        let mut value = message(one.role.name(), "");
        value["content"] = Value::String(content);
        if let Some(name) = &one.name {
            value["name"] = name.as_str().into();
        }
        values.push(value);
    }
    Ok(values)
}

/// Returns the error for a prompt in the field `param`.
pub(crate) fn prompt_error(param: &str, error: PromptError) -> ApiError {
    match error {
        PromptError::OutOfMemory => out_of_memory(),
        PromptError::NoChatTemplate => {
            let message = "this model has no chat template, so it cannot chat; /v1/completions continues a text";
            ApiError::invalid(message).code("no_chat_template")
        }
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
