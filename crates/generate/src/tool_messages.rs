//! Calls of tools in the history of a conversation.

use serde_json::{Map, Value, json};

use crate::CallDelta;

/// A call that an assistant made.
#[derive(Debug, Clone, PartialEq)]
pub struct ToolCall {
    /// Identifies the call within its message; the tool's result refers to it.
    pub id: String,
    /// Name of the tool.
    pub name: String,
    /// The arguments.
    pub arguments: Map<String, Value>,
}

impl ToolCall {
    /// Returns a call of a whole reply; `None` if the reply ended within it.
    pub fn of(call: &CallDelta) -> Option<ToolCall> {
        let (id, name) = (call.id.clone()?, call.name.clone()?);
        Some(ToolCall { id, name, arguments: serde_json::from_str(&call.arguments).ok()? })
    }

    /// Returns the call as chat templates read it in `tool_calls`: the shape of the OpenAI API, except that the
    /// arguments are an object and not its text. Transformers documents the object, and templates print it as JSON.
    pub fn to_value(&self) -> Value {
        json!({ "id": self.id, "type": "function", "function": { "name": self.name, "arguments": self.arguments } })
    }
}
