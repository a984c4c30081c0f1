//! Calls of tools in a conversation: those that an assistant made, and the results that answer them.

use pellucid_generate::ToolCall;

use super::{MAX_WORD_LEN, read_object, read_type};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::{Json, MAX_VALUES};
use crate::openai::messages::{ChatMessage, Role};

/// Maximum calls of one message.
pub(super) const MAX_CALLS: usize = 128;
/// Maximum bytes of the id of a call.
pub(super) const MAX_ID_LEN: usize = 256;
/// Maximum JSON values in the arguments of all calls of a conversation. Arguments are text until they are read here, so
/// they count in no other limit.
const MAX_ARGUMENT_VALUES: usize = 1 << 16;

/// Reads the fields of messages that concern calls, within limits for the whole conversation.
#[derive(Debug)]
pub(crate) struct CallReader {
    /// Values that arguments may still have.
    num_values: usize,
}

impl Default for CallReader {
    fn default() -> CallReader {
        const { assert!(MAX_ARGUMENT_VALUES <= MAX_VALUES) };
        CallReader { num_values: MAX_ARGUMENT_VALUES }
    }
}

impl CallReader {
    /// Takes `tool_calls`, which only an assistant's message has.
    pub(crate) fn calls(&mut self, fields: &mut Fields, role: Role) -> Result<Vec<ToolCall>, ApiError> {
        let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
        fields.refuse("function_call", |_| false, "use tool_calls")?;
        if role != Role::Assistant {
            fields.refuse("tool_calls", is_empty, "only messages of the assistant call tools")?;
            return Ok(Vec::new());
        }
        let path = fields.path("tool_calls");
        let values = fields.array("tool_calls", MAX_CALLS)?.unwrap_or_default();
        let mut calls: Vec<ToolCall> = Vec::new();
        for (i, value) in values.into_iter().enumerate() {
            let call = self.call(Fields::within(format!("{path}[{i}]"), value)?)?;
            if calls.iter().any(|other| other.id == call.id) {
                let path = format!("{path}[{i}].id");
                let message = format!("{path}: expected another id than those of the other calls of the message");
                return Err(ApiError::field(path, message));
            }
            calls.push(call);
        }
        Ok(calls)
    }

    fn call(&mut self, mut fields: Fields) -> Result<ToolCall, ApiError> {
        // Clients that join the deltas of a stream send their index back.
        fields.integer("index", 0..=MAX_CALLS as i64)?;
        let id_path = fields.path("id");
        let id = fields::string(&id_path, fields.required("id")?, MAX_ID_LEN)?;
        if id.is_empty() {
            return Err(ApiError::field(&id_path, format!("{id_path}: an empty string is not allowed")));
        }
        read_type(&mut fields, &["function"])?;
        let mut function = read_object(&mut fields, "function")?;
        fields.finish()?;
        let name_path = function.path("name");
        let name = fields::string(&name_path, function.required("name")?, MAX_WORD_LEN)?;
        let path = function.path("arguments");
        let text = fields::string(&path, function.required("arguments")?, usize::MAX)?;
        // OpenAI's client for Python adds the arguments as an object when it parses a reply.
        function.refuse("parsed_arguments", |value| matches!(value, Json::Object(_)), "expected an object")?;
        function.finish()?;
        // Some clients write no arguments for a tool that has none.
        let text = if text.trim().is_empty() { "{}" } else { &text };
        let value = Json::parse_within(text.as_bytes(), &mut self.num_values);
        match value.map_err(|error| error.of(&format!("text of {path}")).param(&path))? {
            Json::Object(entries) => {
                let arguments = entries.into_iter().map(|(name, value)| (name, value.into_value())).collect();
                Ok(ToolCall { id, name, arguments })
            }
            other => Err(fields::wrong_type(&path, "the text of a JSON object", &other)),
        }
    }

    /// Takes `tool_call_id`, which the result of a tool must have and no other message.
    pub(crate) fn answered(&self, fields: &mut Fields, role: Role) -> Result<Option<String>, ApiError> {
        if role == Role::Tool {
            let path = fields.path("tool_call_id");
            return Ok(Some(fields::string(&path, fields.required("tool_call_id")?, MAX_ID_LEN)?));
        }
        fields.refuse("tool_call_id", |_| false, "only messages of the role tool answer calls")?;
        Ok(None)
    }
}

/// Checks that each result answers a call of the last message before it that has calls, and gives it the name of the
/// tool that was called, which some templates write.
pub(crate) fn check_results(path: &str, messages: &mut [ChatMessage]) -> Result<(), ApiError> {
    // Ids and names of the calls without a result.
    let mut open: Vec<(String, String)> = Vec::new();
    for (i, message) in messages.iter_mut().enumerate() {
        if !message.tool_calls.is_empty() {
            open = message.tool_calls.iter().map(|call| (call.id.clone(), call.name.clone())).collect();
        }
        let Some(id) = &message.tool_call_id else { continue };
        let Some(at) = open.iter().position(|(open, _)| open == id) else {
            let path = format!("{path}[{i}].tool_call_id");
            let message = format!(
                "{path}: expected the id of a call without a result in the last message before it that has tool_calls, \
                 found {}",
                shown(id)
            );
            return Err(ApiError::field(path, message));
        };
        let (_, name) = open.swap_remove(at);
        if let Some(given) = message.name.as_ref().filter(|given| **given != name) {
            let path = format!("{path}[{i}].name");
            let message =
                format!("{path}: expected the name of the called tool, {}, found {}", shown(&name), shown(given));
            return Err(ApiError::field(path, message));
        }
        message.name = Some(name);
    }
    Ok(())
}
