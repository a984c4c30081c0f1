//! Schemas of the fields of structured output, for the OpenAPI document.

use pellucid_generate::{MAX_GRAMMAR_CHOICES, MAX_SOURCE_BYTES};
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};

use super::{MAX_DESCRIPTION_LEN, MAX_WORD_LEN};

fn schema(value: Value) -> RefOr<Schema> {
    serde_json::from_value(value).expect("the JSON in this file is a schema")
}

pub(crate) fn response_format() -> RefOr<Schema> {
    let description = "Format of the reply: any text, any JSON object, or JSON that satisfies a schema. Every reply \
                       satisfies the schema, with `strict` and without";
    let plain = json!({ "type": "object", "required": ["type"], "additionalProperties": false, "properties": {
        "type": { "type": "string", "enum": ["text", "json_object"] } } });
    let json_schema = json!({ "type": "object", "required": ["name", "schema"], "additionalProperties": false,
        "properties": {
            "name": { "type": "string", "minLength": 1, "maxLength": MAX_WORD_LEN, "pattern": "^[A-Za-z0-9_-]+$" },
            "description": { "type": ["string", "null"], "maxLength": MAX_DESCRIPTION_LEN / 4 },
            "strict": { "type": ["boolean", "null"] },
            "schema": { "type": "object", "description": "A JSON schema" } } });
    let structured = json!({ "type": "object", "required": ["type", "json_schema"], "additionalProperties": false,
        "properties": { "type": { "type": "string", "enum": ["json_schema"] }, "json_schema": json_schema } });
    schema(json!({ "description": description, "anyOf": [plain, structured, { "type": "null" }] }))
}

pub(crate) fn structured_outputs() -> RefOr<Schema> {
    let description = "Grammar of the reply, under the names of vLLM: exactly one of a JSON schema, any JSON object, a \
                       regular expression, a grammar in Lark or GBNF, or a list of texts";
    let text = json!({ "type": "string", "minLength": 1, "maxLength": MAX_SOURCE_BYTES / 4 });
    let properties = json!({
        "json": { "description": "A JSON schema, or its text", "type": ["object", "string", "boolean"] },
        "json_object": { "type": "boolean", "enum": [true] },
        "regex": text,
        "grammar": text,
        "choice": { "type": "array", "minItems": 1, "maxItems": MAX_GRAMMAR_CHOICES, "items": text }
    });
    let object = json!({ "type": "object", "minProperties": 1, "maxProperties": 1, "additionalProperties": false,
        "properties": properties });
    schema(json!({ "description": description, "anyOf": [object, { "type": "null" }] }))
}
