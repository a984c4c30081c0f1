//! Schemas of requests for the OpenAPI document.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The request of `/v1/responses`.
#[derive(Debug)]
pub(crate) struct CreateResponseRequest;

/// The request of `/v1/responses/input_tokens`.
#[derive(Debug)]
pub(crate) struct InputTokensRequest;

impl PartialSchema for CreateResponseRequest {
    fn schema() -> RefOr<Schema> {
        let mut properties = prompt();
        let word = json!({ "type": ["string", "null"], "maxLength": 64 });
        let own = json!({
            "max_output_tokens": { "type": ["integer", "null"], "minimum": 1, "maximum": i32::MAX },
            "max_tool_calls": { "type": ["integer", "null"], "minimum": 1, "maximum": i32::MAX,
                "description": "Concerns tools that a server runs; this one runs none" },
            "stream": { "type": ["boolean", "null"] },
            "stream_options": { "type": ["object", "null"], "additionalProperties": false,
                "properties": { "include_obfuscation": { "type": ["boolean", "null"] } } },
            "store": { "type": ["boolean", "null"],
                "description": "Whether to store the response, so that others can continue it. True by default" },
            "temperature": { "type": ["number", "null"], "minimum": 0, "maximum": 2 },
            "top_p": { "type": ["number", "null"], "exclusiveMinimum": 0, "maximum": 1 },
            "top_logprobs": { "type": ["integer", "null"], "minimum": 0, "maximum": 20 },
            "include": { "type": ["array", "null"], "maxItems": 16, "items": { "type": "string",
                "enum": ["message.output_text.logprobs", "reasoning.encrypted_content"] } },
            "metadata": { "type": ["object", "null"], "maxProperties": 16,
                "additionalProperties": { "type": "string", "maxLength": 512 } },
            "user": { "type": ["string", "null"], "maxLength": 512 },
            "safety_identifier": word,
            "prompt_cache_key": word,
            "prompt_cache_retention": { "type": ["string", "null"], "enum": ["in_memory", null] },
            "service_tier": { "type": ["string", "null"], "enum": ["auto", "default", null] },
            "background": { "type": ["boolean", "null"], "default": false,
                "description": "Generate the response whether or not the client stays connected. Needs `store`" },
            "seed": { "type": ["integer", "null"], "minimum": -1, "maximum": i64::MAX,
                "description": "Not in OpenAI's Responses API: the same seed gives the same response" },
        });
        extend(&mut properties, own);
        object(properties, &["model", "input"])
    }
}

impl PartialSchema for InputTokensRequest {
    fn schema() -> RefOr<Schema> {
        object(prompt(), &["model", "input"])
    }
}

impl ToSchema for CreateResponseRequest {
    fn name() -> Cow<'static, str> {
        "CreateResponseRequest".into()
    }
}

impl ToSchema for InputTokensRequest {
    fn name() -> Cow<'static, str> {
        "InputTokensRequest".into()
    }
}

/// Returns the fields that become the prompt, and those that constrain the reply.
fn prompt() -> Value {
    let item = json!({ "type": "object", "properties": { "type": { "type": ["string", "null"],
        "enum": ["message", "function_call", "function_call_output", "reasoning", "item_reference", null] } } });
    let format = json!({ "type": ["object", "null"], "required": ["type"], "properties": { "type": {
        "type": "string", "enum": ["text", "json_object", "json_schema"] } } });
    json!({
        "model": { "type": "string", "maxLength": 512 },
        "input": { "description": "Text, or items of a conversation",
            "anyOf": [{ "type": "string" }, { "type": "array", "minItems": 1, "maxItems": 4096, "items": item }] },
        "instructions": { "type": ["string", "null"], "description": "A system message before all items" },
        "previous_response_id": { "type": ["string", "null"], "maxLength": 512,
            "description": "The stored response that this one continues" },
        "tools": { "type": ["array", "null"], "maxItems": 1024, "items": { "type": "object", "required": ["type", "name"],
            "properties": { "type": { "type": "string", "enum": ["function"] } } } },
        "tool_choice": { "anyOf": [{ "type": "string", "enum": ["none", "auto", "required"] }, { "type": "object",
            "required": ["type"], "properties": { "type": { "type": "string", "enum": ["function", "allowed_tools"] } } },
            { "type": "null" }] },
        "parallel_tool_calls": { "type": ["boolean", "null"] },
        "reasoning": { "type": ["object", "null"], "description": "`effort`, and `summary`, which may be `auto`" },
        "text": { "type": ["object", "null"], "additionalProperties": false,
            "properties": { "format": format, "verbosity": { "type": ["string", "null"], "enum": ["low", "medium", "high", null] } } },
        "truncation": { "type": ["string", "null"], "enum": ["disabled", null] },
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
