//! Calls of tools in replies, whole and in pieces of a stream.

use std::sync::Arc;

use pellucid_generate::{CallDelta, Delta};
use serde::Serialize;
use utoipa::ToSchema;

use crate::reply::buffer::json_text_len;
use crate::reply::parts::JsonParts;

/// A call of a tool.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct CalledTool {
    /// Identifies the call; the message with its result refers to it.
    id: String,
    /// `function`.
    r#type: &'static str,
    function: CalledFunction,
}

/// The function that a call names.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct CalledFunction {
    name: String,
    /// The text of a JSON object that satisfies the schema of the tool, unless the reply was cut off.
    arguments: String,
}

impl From<CallDelta> for CalledTool {
    fn from(call: CallDelta) -> CalledTool {
        let function = CalledFunction { name: call.name.unwrap_or_default(), arguments: call.arguments };
        CalledTool { id: call.id.unwrap_or_default(), r#type: "function", function }
    }
}

/// A piece of a call in a stream. The first has id, type and name.
#[derive(Debug, Serialize)]
pub(crate) struct CallPiece<'a> {
    index: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    r#type: Option<&'static str>,
    function: FunctionPiece<'a>,
}

#[derive(Debug, Serialize)]
struct FunctionPiece<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    name: Option<&'a str>,
    arguments: &'a str,
}

impl<'a> From<&'a CallDelta> for CallPiece<'a> {
    fn from(call: &'a CallDelta) -> CallPiece<'a> {
        let name = call.name.as_deref();
        let function = FunctionPiece { name, arguments: &call.arguments };
        CallPiece { index: call.index, id: call.id.as_deref(), r#type: name.map(|_| "function"), function }
    }
}

/// Memory that pieces of calls take until a whole reply is written.
pub(crate) fn calls_bytes(calls: &[CallDelta]) -> usize {
    let texts = |call: &CallDelta| {
        call.id.as_ref().map_or(0, String::len) + call.name.as_ref().map_or(0, String::len) + call.arguments.len()
    };
    // Strings and vectors that grow have up to twice their length.
    2 * calls.iter().map(|call| size_of::<CallDelta>() + texts(call)).sum::<usize>()
}

/// Bytes of JSON that the texts of calls take in a chunk.
pub(crate) fn texts_len(calls: &[CallDelta]) -> usize {
    let texts = |call: &CallDelta| call.name.as_deref().map_or(0, json_text_len) + json_text_len(&call.arguments);
    calls.iter().map(texts).sum()
}

/// The arguments of a call, shared with the other parts of the reply.
struct Arguments {
    reply: Arc<Delta>,
    call: usize,
}

impl AsRef<str> for Arguments {
    fn as_ref(&self) -> &str {
        &self.reply.calls[self.call].arguments
    }
}

/// Writes the field `tool_calls` of a message, with a comma before it; nothing if the reply has no calls.
pub(crate) fn write_calls(reply: &Arc<Delta>, parts: &mut JsonParts) {
    for (i, call) in reply.calls.iter().enumerate() {
        parts.literal(if i > 0 { ",{\"id\":" } else { ",\"tool_calls\":[{\"id\":" });
        parts.value(&call.id.as_deref().unwrap_or_default());
        parts.literal(",\"type\":\"function\",\"function\":{\"name\":");
        parts.value(&call.name.as_deref().unwrap_or_default());
        parts.literal(",\"arguments\":\"");
        parts.text(Arguments { reply: reply.clone(), call: i });
        parts.literal("\"}}");
    }
    if !reply.calls.is_empty() {
        parts.literal("]");
    }
}
