//! Replies in the OpenAPI document that no Rust type describes: errors of routes of other APIs, and events of streams.

use serde_json::{Map, Value, json};

use crate::http::error::form::ErrorForm;

/// Gives each route the errors that it returns, and the events of its streams.
pub(super) fn describe(document: &mut Value) {
    let Some(Value::Object(paths)) = document.get_mut("paths") else { return };
    for (path, methods) in paths {
        let errors = match ErrorForm::of(path) {
            ErrorForm::OpenAi => None,
            ErrorForm::Anthropic => Some("AnthropicError"),
            ErrorForm::Ollama => Some("OllamaError"),
        };
        for operation in methods.as_object_mut().into_iter().flat_map(Map::values_mut) {
            let Some(Value::Object(responses)) = operation.get_mut("responses") else { continue };
            for (status, response) in responses {
                describe_response(response, errors.filter(|_| !status.starts_with('2')));
            }
        }
    }
    if let Some(Value::Object(schemas)) = document.pointer_mut("/components/schemas") {
        let text = json!({ "type": "string" });
        let detail = json!({ "type": "object", "required": ["type", "message"],
            "properties": { "type": text, "message": text } });
        let anthropic = json!({ "type": "object", "required": ["type", "error", "request_id"],
            "properties": { "type": { "type": "string", "enum": ["error"] }, "error": detail, "request_id": text } });
        schemas.insert("AnthropicError".into(), anthropic);
        let ollama = json!({ "type": "object", "required": ["error"], "properties": { "error": text } });
        schemas.insert("OllamaError".into(), ollama);
    }
}

fn describe_response(response: &mut Value, error: Option<&str>) {
    if let (Some(name), Some(content)) = (error, response.pointer_mut("/content/application~1json")) {
        content["schema"] = json!({ "$ref": format!("#/components/schemas/{name}") });
    }
    // An event has fields beside its data, and not every API ends a stream with JSON.
    if let Some(content) = response.pointer_mut("/content/text~1event-stream") {
        content["schema"] = json!({});
    }
}
