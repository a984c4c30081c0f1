//! Schemas of requests for the OpenAPI document.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

/// The request of `/completion`.
#[derive(Debug)]
pub(crate) struct ContentRequest;

/// The request of `/infill`.
#[derive(Debug)]
pub(crate) struct InfillRequest;

impl PartialSchema for ContentRequest {
    fn schema() -> RefOr<Schema> {
        let mut properties = common();
        properties["prompt"] = json!({ "type": "string", "minLength": 1 });
        object(&properties, &["prompt"])
    }
}

impl PartialSchema for InfillRequest {
    fn schema() -> RefOr<Schema> {
        let mut properties = common();
        properties["input_prefix"] = json!({ "type": ["string", "null"] });
        properties["input_suffix"] = json!({ "type": "string", "minLength": 1 });
        properties["prompt"] = json!({ "type": ["string", "null"] });
        object(&properties, &["input_suffix"])
    }
}

impl ToSchema for ContentRequest {
    fn name() -> Cow<'static, str> {
        "ContentRequest".into()
    }
}

impl ToSchema for InfillRequest {
    fn name() -> Cow<'static, str> {
        "InfillRequest".into()
    }
}

/// Returns the fields that both routes have and clients use most; docs/llama-cpp.md lists all.
fn common() -> Value {
    json!({
        "n_predict": { "type": ["integer", "null"], "minimum": -1, "maximum": i32::MAX },
        "stream": { "type": ["boolean", "null"] },
        "temperature": { "type": ["number", "null"], "minimum": 0, "maximum": 2 },
        "top_k": { "type": ["integer", "null"], "minimum": 0, "maximum": u32::MAX },
        "top_p": { "type": ["number", "null"], "minimum": 0, "maximum": 1 },
        "seed": { "type": ["integer", "null"], "minimum": -1, "maximum": i64::MAX },
        "grammar": { "type": ["string", "null"], "description": "In GBNF or Lark" },
        "json_schema": { "type": ["object", "null"] },
    })
}

fn object(properties: &Value, required: &[&str]) -> RefOr<Schema> {
    let schema = json!({ "type": "object", "required": required, "properties": properties });
    serde_json::from_value(schema).expect("the JSON in this file is a schema")
}
