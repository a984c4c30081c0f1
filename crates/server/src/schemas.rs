//! The shapes of fields that no Rust type says exactly, for the OpenAPI document: a text or several, ids, maps.
//!
//! A test holds the document against the parser, so that neither promises what the other does not keep.

use pellucid_sampling::{MAX_DRY_BREAKERS, MAX_LISTED_TOKENS, Preset, StepKind};
use serde_json::{Value, json};
use utoipa::openapi::{RefOr, Schema};

use crate::openai::common::{MAX_CHOICES, MAX_STOP_LEN, MAX_STOPS};

fn schema(value: Value) -> RefOr<Schema> {
    serde_json::from_value(value).expect("these are schemas")
}

/// Marks token ids, whose highest is known when a model is served.
pub(crate) const TOKEN_ID: &str = "x-token-id";

fn id() -> Value {
    json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX, TOKEN_ID: true })
}

pub(crate) fn stop() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN / 4 });
    schema(json!({ "description": "The reply ends before any of these texts: one, or several", "anyOf": [
        text, { "type": "array", "maxItems": MAX_STOPS, "items": text }, { "type": "null" }] }))
}

pub(crate) fn early_stopping() -> RefOr<Schema> {
    schema(
        json!({ "description": "When enough beams have ended: true stops at once, false by a heuristic, \"never\" only when none can get better; needs `beam_width`",
        "anyOf": [{ "type": "boolean" }, { "type": "string", "enum": ["never"] }, { "type": "null" }] }),
    )
}

pub(crate) fn prompt() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1 });
    let ids = json!({ "type": "array", "minItems": 1, "items": id() });
    schema(json!({ "description": "A text, token ids, or a list of either", "anyOf": [
        text,
        ids,
        { "type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": text },
        { "type": "array", "minItems": 1, "maxItems": MAX_CHOICES, "items": ids }] }))
}

pub(crate) fn content() -> RefOr<Schema> {
    let part = json!({ "type": "object", "required": ["type", "text"], "additionalProperties": false, "properties": {
        "type": { "type": "string", "enum": ["text"] }, "text": { "type": "string" } } });
    schema(json!({ "description": "Text, or parts of text; parts are joined by line ends", "anyOf": [
        { "type": "string" }, { "type": "array", "minItems": 1, "maxItems": 1024, "items": part }] }))
}

pub(crate) fn logit_bias() -> RefOr<Schema> {
    schema(
        json!({ "description": "Token ids, as strings, to what is added to their logits", "type": ["object", "null"],
        "maxProperties": MAX_LISTED_TOKENS, "propertyNames": { "type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$" },
        "additionalProperties": { "type": "number", "minimum": -100, "maximum": 100 } }),
    )
}

pub(crate) fn breakers() -> RefOr<Schema> {
    schema(json!({ "description": "Texts that a repeat does not reach across", "type": ["array", "null"],
        "maxItems": MAX_DRY_BREAKERS, "items": { "type": "string", "minLength": 1, "maxLength": 16 } }))
}

pub(crate) fn all_ids() -> RefOr<Schema> {
    schema(json!({ "description": "Token ids", "type": "array", "maxItems": 1 << 20, "items": id() }))
}

pub(crate) fn ids() -> RefOr<Schema> {
    schema(json!({ "description": "Never chosen", "type": ["array", "null"], "items": id() }))
}

pub(crate) fn some_ids() -> RefOr<Schema> {
    schema(json!({ "description": "Only these are chosen", "type": ["array", "null"], "minItems": 1, "items": id() }))
}

pub(crate) fn few_ids() -> RefOr<Schema> {
    schema(
        json!({ "description": "The reply ends at these", "type": ["array", "null"], "maxItems": MAX_LISTED_TOKENS, "items": id() }),
    )
}

pub(crate) fn samplers() -> RefOr<Schema> {
    let names = StepKind::MOVABLE.map(StepKind::name);
    schema(
        json!({ "description": "The order of the steps; a step that is set must be listed", "type": ["array", "null"],
        "uniqueItems": true, "maxItems": names.len(), "items": { "type": "string", "enum": names } }),
    )
}

pub(crate) fn preset() -> RefOr<Schema> {
    let names = Preset::ALL.map(Preset::name);
    schema(json!({ "description": "Parameters by use; fields given beside it win",
        "anyOf": [{ "type": "string", "enum": names }, { "type": "null" }] }))
}

pub(crate) fn variables() -> RefOr<Schema> {
    schema(
        json!({ "description": "Variables of the model's chat template, such as `enable_thinking`; names that it does not have are refused",
        "type": ["object", "null"], "maxProperties": 16 }),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shape_is_a_schema() {
        let shapes: [fn() -> RefOr<Schema>; 13] = [
            stop,
            early_stopping,
            prompt,
            content,
            logit_bias,
            breakers,
            all_ids,
            ids,
            some_ids,
            few_ids,
            samplers,
            preset,
            variables,
        ];
        for shape in shapes {
            shape();
        }
    }
}
