//! Schemas of the fields about tools, for the OpenAPI document.

use pellucid_generate::{MAX_TOOL_NAME, MAX_TOOLS};
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};

use super::MAX_DESCRIPTION_LEN;
use super::calls::{MAX_CALLS, MAX_ID_LEN};

fn schema(value: Value) -> RefOr<Schema> {
    serde_json::from_value(value).expect("the JSON in this file is a schema")
}

fn name() -> Value {
    json!({ "type": "string", "minLength": 1, "maxLength": MAX_TOOL_NAME })
}

/// Returns the schema of an object with exactly these properties, all of them required.
fn exactly(properties: Value) -> Value {
    let names: Vec<&String> = properties.as_object().into_iter().flat_map(|entries| entries.keys()).collect();
    json!({ "type": "object", "required": names, "additionalProperties": false, "properties": properties })
}

fn word(word: &str) -> Value {
    json!({ "type": "string", "enum": [word] })
}

fn named() -> Value {
    exactly(json!({ "type": word("function"), "function": exactly(json!({ "name": name() })) }))
}

pub(crate) fn tools() -> RefOr<Schema> {
    let description = "Tools that the model may call. Arguments of a call satisfy `parameters`. A keyword of the \
                       schema that is not enforced is refused with `strict`; otherwise `pellucid.not_enforced` of the \
                       reply names it";
    let function = json!({ "type": "object", "required": ["name"], "additionalProperties": false, "properties": {
        "name": name(),
        "description": { "type": ["string", "null"], "maxLength": MAX_DESCRIPTION_LEN / 4 },
        "parameters": { "type": ["object", "null"], "description": "JSON schema of the arguments" },
        "strict": { "type": ["boolean", "null"] } } });
    let tool = exactly(json!({ "type": word("function"), "function": function }));
    schema(json!({ "description": description, "type": ["array", "null"], "maxItems": MAX_TOOLS, "items": tool }))
}

pub(crate) fn tool_choice() -> RefOr<Schema> {
    let description = "Whether the model may (`auto`), must (`required`) or must not (`none`) call tools, the one that it \
                       must call, or those among which it may choose";
    let words = json!({ "type": "string", "enum": ["none", "auto", "required"] });
    let modes = json!({ "type": "string", "enum": ["auto", "required"] });
    let list = json!({ "type": "array", "minItems": 1, "maxItems": MAX_TOOLS, "items": named() });
    let allowed = exactly(json!({
        "type": word("allowed_tools"), "allowed_tools": exactly(json!({ "mode": modes, "tools": list })) }));
    schema(json!({ "description": description, "anyOf": [words, named(), allowed, { "type": "null" }] }))
}

pub(crate) fn parallel_tool_calls() -> RefOr<Schema> {
    let description = "Whether one reply may call several tools";
    schema(json!({ "description": description, "type": ["boolean", "null"], "default": true }))
}

pub(crate) fn tool_calls() -> RefOr<Schema> {
    let description = "Calls of tools in a message of the assistant, with the ids that their results refer to";
    let function = exactly(json!({ "name": { "type": "string", "maxLength": MAX_TOOL_NAME },
        "arguments": { "type": "string", "description": "The text of a JSON object" } }));
    let call = exactly(json!({ "id": { "type": "string", "minLength": 1, "maxLength": MAX_ID_LEN / 4 },
        "type": word("function"), "function": function }));
    schema(json!({ "description": description, "type": ["array", "null"], "maxItems": MAX_CALLS, "items": call }))
}
