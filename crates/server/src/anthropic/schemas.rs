//! Schemas of requests for the OpenAPI document.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The request of `/v1/messages`.
#[derive(Debug)]
pub(crate) struct MessagesRequest;

/// The request of `/v1/messages/count_tokens`.
#[derive(Debug)]
pub(crate) struct CountTokensRequest;

impl PartialSchema for MessagesRequest {
    fn schema() -> RefOr<Schema> {
        let mut properties = prompt();
        let own = json!({
            "max_tokens": { "type": "integer", "minimum": 1, "maximum": i32::MAX },
            "stream": { "type": ["boolean", "null"] },
            "stop_sequences": { "type": ["array", "null"], "maxItems": 16,
                "items": { "type": "string", "minLength": 1, "maxLength": 128 } },
            "temperature": { "type": ["number", "null"], "minimum": 0, "maximum": 2 },
            "top_p": { "type": ["number", "null"], "minimum": 0, "maximum": 1 },
            "top_k": { "type": ["integer", "null"], "minimum": 0, "maximum": u32::MAX },
            "seed": { "type": ["integer", "null"], "minimum": 0, "maximum": i64::MAX,
                "description": "Not in Anthropic's API: the same seed gives the same reply" },
            "metadata": { "type": ["object", "null"], "additionalProperties": false,
                "properties": { "user_id": { "type": ["string", "null"], "maxLength": 512 } } },
            "service_tier": { "type": ["string", "null"], "enum": ["auto", "standard_only", null] },
        });
        extend(&mut properties, own);
        object(properties, &["model", "max_tokens", "messages"])
    }
}

impl PartialSchema for CountTokensRequest {
    fn schema() -> RefOr<Schema> {
        object(prompt(), &["model", "messages"])
    }
}

impl ToSchema for MessagesRequest {
    fn name() -> Cow<'static, str> {
        "MessagesRequest".into()
    }
}

impl ToSchema for CountTokensRequest {
    fn name() -> Cow<'static, str> {
        "CountTokensRequest".into()
    }
}

/// Returns the fields that become the prompt.
fn prompt() -> Value {
    let text = json!({ "type": "object", "required": ["type", "text"], "additionalProperties": false, "properties": {
        "type": { "type": "string", "enum": ["text"] }, "text": { "type": "string" },
        "cache_control": { "type": ["object", "null"], "additionalProperties": false, "required": ["type"],
            "properties": { "type": { "type": "string", "enum": ["ephemeral"] } } } } });
    let texts = json!({ "type": "array", "maxItems": 1024, "items": text });
    let block = json!({ "type": "object", "required": ["type"],
        "properties": { "type": { "type": "string", "enum": ["text", "thinking", "tool_use", "tool_result"] } } });
    let content = json!({ "description": "Text, or content blocks",
        "anyOf": [{ "type": "string" }, { "type": "array", "maxItems": 1024, "items": block }] });
    let message = json!({ "type": "object", "required": ["role", "content"], "additionalProperties": false,
        "properties": { "role": { "type": "string", "enum": ["user", "assistant", "system"] }, "content": content } });
    json!({
        "model": { "type": "string", "maxLength": 512 },
        "messages": { "type": "array", "minItems": 1, "maxItems": 4096, "items": message },
        "tools": { "type": ["array", "null"], "maxItems": 1024, "items": { "type": "object", "required": ["name", "input_schema"] } },
        "tool_choice": { "type": ["object", "null"], "required": ["type"],
            "properties": { "type": { "type": "string", "enum": ["auto", "any", "tool", "none"] } } },
        "thinking": { "type": ["object", "null"], "required": ["type"],
            "properties": { "type": { "type": "string", "enum": ["enabled", "adaptive", "disabled"] } } },
        "output_config": { "type": ["object", "null"], "description": "`effort`, and the `format` of the answer" },
        "system": { "anyOf": [{ "type": "string" }, texts, { "type": "null" }] },
    })
}

fn extend(properties: &mut Value, more: Value) {
    if let (Value::Object(properties), Value::Object(more)) = (properties, more) {
        properties.extend(more);
    }
}

fn object(properties: Value, required: &[&str]) -> RefOr<Schema> {
    let schema = json!({ "type": "object", "required": required, "properties": properties });
    serde_json::from_value(schema).expect("the JSON in this file is a schema")
}
