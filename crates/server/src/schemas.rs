//! The shapes of fields that no Rust type says exactly, for the OpenAPI document: a text or several, ids, maps.
//!
//! A test holds the document against the parser, so that neither promises what the other does not keep.

use pellucid_sampling::{
    MAX_VOCAB_SIZE, OPTIONS, OptionKind, Preset, SamplingOption, SamplingParams, StepKind, ValueRef,
};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};

use crate::openai::sampling::number;
use crate::openai::shared_fields::{MAX_CHOICES, MAX_STOP_LEN, MAX_STOPS};

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

pub(crate) fn all_ids() -> RefOr<Schema> {
    schema(json!({ "description": "Token ids", "type": "array", "maxItems": 1 << 20, "items": id() }))
}

/// Returns the schema of the sampling fields, made from the table of options.
pub(crate) fn sampling() -> RefOr<Schema> {
    let mut properties = Map::new();
    for option in OPTIONS {
        properties.insert(option.json_name().to_owned(), sampling_option(option));
    }
    let ignore_eos = "Continues the reply after the tokens with which the model ends it.";
    properties.insert("ignore_eos".to_owned(), json!({ "type": ["boolean", "null"], "description": ignore_eos }));
    properties.insert("preset".to_owned(), json!(preset()));
    schema(json!({ "type": "object", "properties": properties }))
}

fn sampling_option(option: &SamplingOption) -> Value {
    let mut shape = match option.kind() {
        OptionKind::Number { low, json_high, .. } => {
            json!({ "type": ["number", "null"], "format": "float", "minimum": bound(low), "maximum": bound(json_high) })
        }
        OptionKind::Count { low } => {
            json!({ "type": ["integer", "null"], "format": "int32", "minimum": low, "maximum": u32::MAX })
        }
        OptionKind::Seed => {
            json!({ "type": ["integer", "null"], "format": "int64", "minimum": 0, "maximum": i64::MAX })
        }
        OptionKind::TokenBias { low, high, max_len } => json!({
            "type": ["object", "null"], "maxProperties": max_len,
            "propertyNames": { "type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$" },
            "additionalProperties": { "type": "number", "minimum": bound(low), "maximum": bound(high) } }),
        OptionKind::Tokens { min_len, max_len } => {
            let mut shape = json!({ "type": ["array", "null"], "items": id() });
            if min_len > 0 {
                shape["minItems"] = json!(min_len);
            }
            // A list that may hold the whole vocabulary has no limit that a client could exceed by accident.
            if max_len < MAX_VOCAB_SIZE {
                shape["maxItems"] = json!(max_len);
            }
            shape
        }
        // A character has at most four bytes.
        OptionKind::Texts { max_len, max_bytes, .. } => json!({ "type": ["array", "null"], "maxItems": max_len,
            "items": { "type": "string", "minLength": 1, "maxLength": max_bytes / 4 } }),
        OptionKind::Steps => {
            let names: Vec<&str> = StepKind::movable().map(StepKind::name).collect();
            json!({ "type": ["array", "null"], "uniqueItems": true, "maxItems": names.len(),
                "items": { "type": "string", "enum": names } })
        }
    };
    shape["description"] = json!(option.doc());
    match option.effective(&SamplingParams::default()) {
        Some(ValueRef::Number(value)) => shape["default"] = number(value),
        Some(ValueRef::Count(value)) => shape["default"] = json!(value),
        _ => {}
    }
    shape
}

/// Returns a bound of a range, without a fraction where it is whole.
fn bound(value: f32) -> Value {
    if value.fract() == 0.0 { json!(value as i64) } else { number(value) }
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
        let shapes: [fn() -> RefOr<Schema>; 8] =
            [stop, early_stopping, prompt, content, all_ids, sampling, preset, variables];
        for shape in shapes {
            shape();
        }
    }
}
