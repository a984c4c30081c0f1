//! The messages of a conversation: read and checked, and in the form that chat templates read.

use pellucid_generate::{ThinkingSettings, ToolCall};
use pellucid_tokenizer::message;
use serde_json::Value;
use utoipa::ToSchema;

use super::openapi::schemas;
use super::thinking;
use super::tools::{self, CallReader};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::http::long_text::{append, with_capacity};

/// Maximum messages of one conversation, and parts of one message.
const MAX_MESSAGES: usize = 4096;
const MAX_PARTS: usize = 1024;
/// Maximum bytes of a message's `name`.
const MAX_NAME_LEN: usize = 256;

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, ToSchema)]
pub(crate) struct ChatMessage {
    pub(crate) role: Role,
    /// Text, or parts of text, which are joined by line ends. Images and audio are refused. Only an assistant's message
    /// with `tool_calls` may have none.
    #[schema(schema_with = schemas::optional_content, required = false)]
    pub(crate) content: Option<String>,
    /// Name of the author; refused if the model's chat template does not write it. That of a tool's result is the name
    /// of the called tool.
    #[schema(required = false, max_length = 256)]
    pub(crate) name: Option<String>,
    /// Thoughts of the assistant before its answer, given to the template where it reads them; also `reasoning`.
    #[schema(required = false)]
    pub(crate) reasoning_content: Option<String>,
    /// Calls that the assistant made.
    #[schema(schema_with = tools::tool_calls, required = false)]
    pub(crate) tool_calls: Vec<ToolCall>,
    /// The call that a tool's result answers.
    #[schema(required = false, max_length = 256)]
    pub(crate) tool_call_id: Option<String>,
}

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ToSchema)]
#[schema(rename_all = "lowercase")]
pub(crate) enum Role {
    System,
    /// Rendered as `system` if the model's template has no role `developer`.
    Developer,
    User,
    Assistant,
    /// The result of a call.
    Tool,
}

impl Role {
    fn parse(path: &str, value: Json) -> Result<Role, ApiError> {
        let name = fields::string(path, value, 64)?;
        match name.as_str() {
            "system" => Ok(Role::System),
            "developer" => Ok(Role::Developer),
            "user" => Ok(Role::User),
            "assistant" => Ok(Role::Assistant),
            "tool" => Ok(Role::Tool),
            "function" => {
                let message = format!("{path}: the role function is not supported: use tool");
                Err(ApiError::field(path, message).code("unsupported_value"))
            }
            _ => {
                let message =
                    format!("{path}: expected system, developer, user, assistant or tool, found {}", shown(&name));
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
            Role::Tool => "tool",
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
    let mut calls = CallReader::default();
    for (i, value) in values.into_iter().enumerate() {
        messages.push(read_one(format!("{path}[{i}]"), value, &mut calls)?);
    }
    tools::check_results(path, &mut messages)?;
    Ok(messages)
}

fn read_one(path: String, value: Json, calls: &mut CallReader) -> Result<ChatMessage, ApiError> {
    let mut fields = Fields::within(path, value)?;
    let role_path = fields.path("role");
    let role = Role::parse(&role_path, fields.required("role")?)?;
    let content_path = fields.path("content");
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    let reasoning_content = thinking::read_thoughts(&mut fields, role == Role::Assistant)?;
    let tool_calls = calls.calls(&mut fields, role)?;
    let tool_call_id = calls.answered(&mut fields, role)?;
    // Clients send back replies as their library represents them, with this empty list and many null fields.
    fields.refuse("annotations", is_empty, "citations are not rendered")?;
    for (name, why) in [
        ("audio", "this server does not support audio"),
        ("refusal", "the models served here have no separate refusals"),
    ] {
        fields.refuse(name, |_| false, why)?;
    }
    let content = if tool_calls.is_empty() { Some(fields.required("content")?) } else { fields.take("content") };
    let content = content.map(|value| read_content(&content_path, value)).transpose()?;
    let name = fields.string("name", MAX_NAME_LEN)?;
    fields.finish()?;
    Ok(ChatMessage { role, content, name, reasoning_content, tool_calls, tool_call_id })
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

/// Returns messages as the template reads them. The texts are copied into memory that may be refused.
pub(super) fn to_values(messages: &[ChatMessage], thinking: &ThinkingSettings) -> Result<Vec<Value>, ApiError> {
    let mut values = with_capacity(messages.len())?;
    for one in messages {
        let mut value = message(one.role.name(), "");
        value["content"] = match &one.content {
            None => Value::Null,
            Some(text) => {
                let mut content = String::new();
                append(&mut content, &[text])?;
                Value::String(content)
            }
        };
        if let Some(text) = &one.reasoning_content {
            let mut thoughts = String::new();
            append(&mut thoughts, &[text])?;
            thinking.set_thoughts(&mut value, thoughts);
        }
        if let Some(name) = &one.name {
            value["name"] = name.as_str().into();
        }
        if !one.tool_calls.is_empty() {
            value["tool_calls"] = one.tool_calls.iter().map(ToolCall::to_value).collect();
        }
        if let Some(id) = &one.tool_call_id {
            value["tool_call_id"] = id.as_str().into();
        }
        values.push(value);
    }
    Ok(values)
}
