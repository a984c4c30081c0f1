//! The fields that a chat template renders, read alike by `/v1/chat/completions`, `/tokenize` and `/apply-template`.

use pellucid_generate::LoadedModel;
use serde_json::{Map, Value};

use super::messages::{self, ChatMessage};
use crate::http::error::ApiError;
use crate::http::fields::Fields;
use crate::http::json::Json;

const LATER: &str = "planned for a later version";

/// Messages and variables for the model's chat template.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Conversation {
    pub(crate) messages: Vec<ChatMessage>,
    pub(crate) chat_template_kwargs: Option<Map<String, Value>>,
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
        refuse_tools(fields)?;
        match fields.take("chat_template_kwargs") {
            None => Ok(None),
            Some(_) => {
                let name = "chat_template_kwargs";
                Err(ApiError::field(name, format!("{name} has no effect without messages")))
            }
        }
    }

    fn read_with(messages: Json, fields: &mut Fields, model: &LoadedModel) -> Result<Conversation, ApiError> {
        let conversation = Conversation {
            messages: messages::read_value(&fields.path("messages"), messages)?,
            chat_template_kwargs: messages::read_variables(fields, model)?,
        };
        refuse_tools(fields)?;
        Ok(conversation)
    }
}

/// Refuses tools, and templates from clients. Values that mean "no tools" are accepted.
fn refuse_tools(fields: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    let is_default = |value: &Json| matches!(value, Json::String(word) if ["none", "auto"].contains(&word.as_str()));
    fields.refuse("tools", is_empty, LATER)?;
    fields.refuse("tool_choice", is_default, LATER)?;
    fields.refuse("functions", is_empty, LATER)?;
    fields.refuse("function_call", is_default, LATER)?;
    // Without tools there are no calls, so both values have no effect.
    fields.boolean("parallel_tool_calls")?;
    fields.refuse(
        "chat_template",
        |_| false,
        "templates come with the model or with --chat-template of the server, never from a request",
    )
}
