//! Schemas of requests for the OpenAPI document. They leave the content of nested objects to the parser.

use std::borrow::Cow;

use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::models::KeepAlive;

/// The request of `/api/chat`.
#[derive(Debug)]
pub(crate) struct OllamaChatRequest;

/// The request of `/api/generate`.
#[derive(Debug)]
pub(crate) struct OllamaGenerateRequest;

/// The request of `/api/show`.
#[derive(Debug)]
pub(crate) struct OllamaShowRequest;

/// The request of `/api/pull`.
#[derive(Debug)]
pub(crate) struct OllamaPullRequest;

impl PartialSchema for OllamaPullRequest {
    fn schema() -> RefOr<Schema> {
        object(&json!({ "model": { "type": "string", "maxLength": 512 },
            "stream": { "type": ["boolean", "null"], "default": true },
            "insecure": { "type": ["boolean", "null"], "enum": [false, null] } }))
    }
}

impl ToSchema for OllamaPullRequest {
    fn name() -> Cow<'static, str> {
        "OllamaPullRequest".into()
    }
}

impl PartialSchema for OllamaChatRequest {
    fn schema() -> RefOr<Schema> {
        let message = json!({ "type": "object", "required": ["role"], "properties": {
            "role": { "type": "string", "enum": ["system", "user", "assistant", "tool"] },
            "content": { "type": ["string", "null"] } } });
        let mut properties = common();
        properties["messages"] = json!({ "type": ["array", "null"], "maxItems": 4096, "items": message });
        properties["tools"] = json!({ "type": ["array", "null"], "items": { "type": "object" } });
        object(&properties)
    }
}

impl PartialSchema for OllamaGenerateRequest {
    fn schema() -> RefOr<Schema> {
        let mut properties = common();
        for name in ["prompt", "suffix", "system"] {
            properties[name] = json!({ "type": ["string", "null"] });
        }
        properties["raw"] = json!({ "type": ["boolean", "null"] });
        object(&properties)
    }
}

impl PartialSchema for OllamaShowRequest {
    fn schema() -> RefOr<Schema> {
        object(&json!({ "model": { "type": "string", "maxLength": 512 }, "verbose": { "type": ["boolean", "null"] } }))
    }
}

impl ToSchema for OllamaChatRequest {
    fn name() -> Cow<'static, str> {
        "OllamaChatRequest".into()
    }
}

impl ToSchema for OllamaGenerateRequest {
    fn name() -> Cow<'static, str> {
        "OllamaGenerateRequest".into()
    }
}

impl ToSchema for OllamaShowRequest {
    fn name() -> Cow<'static, str> {
        "OllamaShowRequest".into()
    }
}

/// Returns the fields that both routes have.
fn common() -> Value {
    json!({
        "model": { "type": "string", "maxLength": 512 },
        "stream": { "type": ["boolean", "null"], "default": true },
        "format": { "description": "`json`, or a schema", "anyOf": [
            { "type": "string", "enum": ["json", ""] }, { "type": "object" }, { "type": "null" }] },
        "options": { "type": ["object", "null"], "description": "Sampling options, `num_predict`, `num_ctx`, `stop`" },
        "keep_alive": keep_alive(),
        "think": { "anyOf": [{ "type": "boolean" }, { "type": "string" }, { "type": "null" }] },
    })
}

/// A duration in the form of `KeepAlive::from_str`, or a number of seconds.
pub(super) fn keep_alive() -> RefOr<Schema> {
    let schema = json!({
        "description": "Time that the model stays loaded: a duration such as `5m` or seconds, 0 to unload it after the \
                        reply, negative to keep it",
        "anyOf": [{ "type": "string", "pattern": KeepAlive::PATTERN }, { "type": "number" }, { "type": "null" }] });
    serde_json::from_value(schema).expect("the JSON in this file is a schema")
}

fn object(properties: &Value) -> RefOr<Schema> {
    let schema = json!({ "type": "object", "required": ["model"], "properties": properties });
    serde_json::from_value(schema).expect("the JSON in this file is a schema")
}
