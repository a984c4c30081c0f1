//! Messages of a conversation.

use pellucid_generate::ToolCall;
use pellucid_tokenizer::message;
use serde_json::Value;

use crate::Reply;

/// One message of a conversation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Message {
    /// `system`, `user`, `assistant`, `tool`, or another role that the chat template knows.
    pub role: String,
    /// The text.
    pub content: String,
    /// Calls of tools in a reply of the model.
    pub calls: Vec<ToolCall>,
    /// The call that a tool's result answers.
    pub answered: Option<ToolCall>,
}

impl Message {
    /// Returns a message of any role.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Message {
        Message { role: role.into(), content: content.into(), calls: Vec::new(), answered: None }
    }

    /// Returns instructions for the model; they come first.
    pub fn system(content: impl Into<String>) -> Message {
        Message::new("system", content)
    }

    /// Returns a message of the user.
    pub fn user(content: impl Into<String>) -> Message {
        Message::new("user", content)
    }

    /// Returns an earlier reply of the model.
    pub fn assistant(content: impl Into<String>) -> Message {
        Message::new("assistant", content)
    }

    /// Returns the result of a call, for the model to go on with.
    pub fn result(call: &ToolCall, content: impl Into<String>) -> Message {
        Message { answered: Some(call.clone()), ..Message::new("tool", content) }
    }

    /// Returns the message as chat templates read it.
    pub(crate) fn to_value(&self) -> Value {
        let mut value = message(&self.role, &self.content);
        if !self.calls.is_empty() {
            value["tool_calls"] = self.calls.iter().map(ToolCall::to_value).collect();
            if self.content.is_empty() {
                value["content"] = Value::Null;
            }
        }
        if let Some(call) = &self.answered {
            value["tool_call_id"] = call.id.as_str().into();
            value["name"] = call.name.as_str().into();
        }
        value
    }
}

impl From<&Reply> for Message {
    /// The first choice as a message of the assistant, with its calls.
    fn from(reply: &Reply) -> Message {
        Message { calls: reply.calls().to_vec(), ..Message::assistant(reply.text()) }
    }
}
