//! Schemas of fields that no Rust type describes exactly, for the OpenAPI document: a text or several, token ids, maps.
//!
//! `crates/server/tests/server/openapi.rs` compares the document with the parser.

use pellucid_sampling::{
    MAX_VOCAB_SIZE, OPTIONS, OptionKind, Preset, SamplingOption, SamplingParams, StepKind, ValueRef,
};
use serde_json::{Map, Value, json};
use utoipa::openapi::{RefOr, Schema};

use crate::openai::client_fields::{MAX_METADATA, MAX_METADATA_VALUE};
use crate::openai::embeddings::MAX_TEXTS;
use crate::openai::sampling::number;
use crate::openai::shared_fields::{MAX_CHOICES, MAX_STOP_LEN, MAX_STOPS};

pub(crate) fn schema(value: Value) -> RefOr<Schema> {
    serde_json::from_value(value).expect("the JSON in this file is a schema")
}

/// Marks token ids; `openapi` replaces it by the maximum id of the served model.
pub(crate) const TOKEN_ID: &str = "x-token-id";

fn id() -> Value {
    json!({ "type": "integer", "minimum": 0, "maximum": u32::MAX, TOKEN_ID: true })
}

pub(crate) fn stop() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1, "maxLength": MAX_STOP_LEN / 4 });
    schema(json!({ "description": "The reply ends before the first of these texts: one text, or several", "anyOf": [
        text, { "type": "array", "maxItems": MAX_STOPS, "items": text }, { "type": "null" }] }))
}

pub(crate) fn early_stopping() -> RefOr<Schema> {
    let description = "When to stop after `n` beams have ended: true at once, false by a heuristic, \"never\" when no \
                       better beam is possible; needs `beam_width`";
    schema(json!({ "description": description,
        "anyOf": [{ "type": "boolean" }, { "type": "string", "enum": ["never"] }, { "type": "null" }] }))
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

pub(crate) fn embedding_input() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1 });
    let ids = json!({ "type": "array", "minItems": 1, "items": id() });
    schema(json!({ "description": "A text, token ids, or a list of either", "anyOf": [
        text,
        ids,
        { "type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": text },
        { "type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": ids }] }))
}

pub(crate) fn shorter_vectors() -> RefOr<Schema> {
    let description = "Values that `dimensions` of a request may ask for instead: a list, `any` number up to \
                       `dimensions`, or `none`";
    schema(json!({ "description": description, "anyOf": [
        { "type": "string", "enum": ["any", "none"] }, { "type": "array", "items": { "type": "integer" } }] }))
}

pub(crate) fn texts() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1 });
    schema(json!({ "description": "A text, or a list of texts", "anyOf": [
        text, { "type": "array", "minItems": 1, "maxItems": MAX_TEXTS, "items": text }] }))
}

pub(crate) fn empty_object() -> RefOr<Schema> {
    schema(json!({ "type": ["object", "null"], "additionalProperties": { "type": "null" } }))
}

pub(crate) fn encoding_format() -> RefOr<Schema> {
    let description = "`float` for numbers, `base64` for little-endian 32-bit floats in Base64";
    schema(json!({ "description": description, "type": ["string", "null"], "enum": ["float", "base64", null],
        "default": "float" }))
}

pub(crate) fn embedding() -> RefOr<Schema> {
    schema(json!({ "anyOf": [{ "type": "array", "items": { "type": "number" } }, { "type": "string" }] }))
}

pub(crate) fn documents() -> RefOr<Schema> {
    let text = json!({ "type": "string", "minLength": 1 });
    let object = json!({ "type": "object", "required": ["text"], "additionalProperties": false,
        "properties": { "text": text } });
    schema(json!({ "description": "Texts, or objects with a `text`", "type": "array", "minItems": 1,
        "maxItems": MAX_TEXTS - 1, "items": { "anyOf": [text, object] } }))
}

fn content_parts() -> Value {
    let part = json!({ "type": "object", "required": ["type", "text"], "additionalProperties": false, "properties": {
        "type": { "type": "string", "enum": ["text"] }, "text": { "type": "string" } } });
    json!({ "type": "array", "minItems": 1, "maxItems": 1024, "items": part })
}

pub(crate) fn content() -> RefOr<Schema> {
    schema(json!({ "description": "Text, or parts of text, which are joined by line ends",
        "anyOf": [{ "type": "string" }, content_parts()] }))
}

pub(crate) fn optional_content() -> RefOr<Schema> {
    schema(json!({ "description": "Text, or parts of text, which are joined by line ends. Only an assistant's message \
        with `tool_calls` may have none", "anyOf": [{ "type": "string" }, content_parts(), { "type": "null" }] }))
}

pub(crate) fn prediction() -> RefOr<Schema> {
    let description = "The text that the reply is expected to contain, such as a file that is to be edited: a drafter \
                       proposes from it. The reply is the same without it";
    let object = json!({ "type": "object", "required": ["type", "content"], "additionalProperties": false,
        "properties": { "type": { "type": "string", "enum": ["content"] }, "content": content() } });
    schema(json!({ "description": description, "anyOf": [object, { "type": "null" }] }))
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
    let mut schema = match option.kind() {
        OptionKind::Number { low, json_high, .. } => {
            json!({ "type": ["number", "null"], "format": "float", "minimum": bound(low), "maximum": bound(json_high) })
        }
        OptionKind::Count { low } => {
            json!({ "type": ["integer", "null"], "format": "int32", "minimum": low, "maximum": u32::MAX })
        }
        OptionKind::Seed => {
            json!({ "type": ["integer", "null"], "format": "int64", "minimum": -1, "maximum": i64::MAX })
        }
        OptionKind::TokenBias { low, high, max_len } => json!({
            "type": ["object", "null"], "maxProperties": max_len,
            "propertyNames": { "type": "string", "pattern": "^(0|[1-9][0-9]{0,8})$" },
            "additionalProperties": { "type": "number", "minimum": bound(low), "maximum": bound(high) } }),
        OptionKind::Tokens { min_len, max_len } => {
            let mut schema = json!({ "type": ["array", "null"], "items": id() });
            if min_len > 0 {
                schema["minItems"] = json!(min_len);
            }
            // A list that may hold the whole vocabulary has no limit that a client could exceed by accident.
            if max_len < MAX_VOCAB_SIZE {
                schema["maxItems"] = json!(max_len);
            }
            schema
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
    schema["description"] = match option.kind() {
        OptionKind::Seed => json!(format!("{} -1 stands for a random seed, as in llama.cpp.", option.doc())),
        _ => json!(option.doc()),
    };
    match option.effective(&SamplingParams::default()) {
        Some(ValueRef::Number(value)) => schema["default"] = number(value),
        Some(ValueRef::Count(value)) => schema["default"] = json!(value),
        _ => {}
    }
    schema
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
    let description = "Variables of the model's chat template, such as `enable_thinking`; other names are refused";
    schema(json!({ "description": description, "type": ["object", "null"], "maxProperties": 16 }))
}

pub(crate) fn metadata() -> RefOr<Schema> {
    let description = "Names and texts for stored replies. This server stores none, so they have no effect";
    schema(json!({ "description": description, "type": ["object", "null"], "maxProperties": MAX_METADATA,
        "additionalProperties": { "type": "string", "maxLength": MAX_METADATA_VALUE } }))
}

pub(crate) fn store() -> RefOr<Schema> {
    schema(json!({ "description": "Only false: this server stores no requests",
        "anyOf": [{ "type": "boolean", "enum": [false] }, { "type": "null" }] }))
}

pub(crate) fn service_tier() -> RefOr<Schema> {
    words("Has no effect: there is one tier", &["auto", "default"])
}

pub(crate) fn prompt_cache_retention() -> RefOr<Schema> {
    words("Has no effect: prefixes are kept while there is memory", &["in_memory", "in-memory"])
}

fn words(description: &str, words: &[&str]) -> RefOr<Schema> {
    schema(json!({ "description": description, "anyOf": [{ "type": "string", "enum": words }, { "type": "null" }] }))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a schema accepts a value. Panics at keywords that it does not know, so that none is written in vain.
    fn accepts(schema: &Value, value: &Value) -> bool {
        let length = |bound: &Value| bound.as_u64().expect("lengths are integers") as usize;
        schema.as_object().expect("schemas are objects").iter().all(|(keyword, bound)| match keyword.as_str() {
            "description" | "default" | "format" | TOKEN_ID => true,
            "type" => match bound {
                Value::Array(kinds) => kinds.iter().any(|kind| has_type(value, kind)),
                kind => has_type(value, kind),
            },
            "enum" => bound.as_array().expect("enums are arrays").contains(value),
            "anyOf" => bound.as_array().expect("anyOf is an array").iter().any(|schema| accepts(schema, value)),
            "minimum" => value.as_f64().is_none_or(|number| number >= bound.as_f64().expect("a number")),
            "maximum" => value.as_f64().is_none_or(|number| number <= bound.as_f64().expect("a number")),
            "minLength" => value.as_str().is_none_or(|text| text.chars().count() >= length(bound)),
            "maxLength" => value.as_str().is_none_or(|text| text.chars().count() <= length(bound)),
            "minItems" => value.as_array().is_none_or(|items| items.len() >= length(bound)),
            "maxItems" => value.as_array().is_none_or(|items| items.len() <= length(bound)),
            "uniqueItems" => {
                value.as_array().is_none_or(|items| (1..items.len()).all(|i| !items[..i].contains(&items[i])))
            }
            "items" => value.as_array().is_none_or(|items| items.iter().all(|item| accepts(bound, item))),
            "maxProperties" => value.as_object().is_none_or(|fields| fields.len() <= length(bound)),
            "required" => value.as_object().is_none_or(|fields| {
                bound
                    .as_array()
                    .expect("a list of names")
                    .iter()
                    .all(|name| fields.contains_key(name.as_str().unwrap()))
            }),
            "properties" => value.as_object().is_none_or(|fields| {
                fields.iter().all(|(name, value)| bound.get(name).is_none_or(|schema| accepts(schema, value)))
            }),
            "additionalProperties" => value.as_object().is_none_or(|fields| {
                let is_known = |name: &str| schema["properties"].get(name).is_some();
                let mut others = fields.iter().filter(|(name, _)| !is_known(name));
                if *bound == json!(false) {
                    others.next().is_none()
                } else {
                    others.all(|(_, value)| accepts(bound, value))
                }
            }),
            "propertyNames" => value.as_object().is_none_or(|fields| {
                assert_eq!(bound["pattern"], "^(0|[1-9][0-9]{0,8})$", "the only pattern that this test knows");
                fields
                    .keys()
                    .all(|name| name.parse::<u32>().is_ok_and(|id| id < 1_000_000_000 && id.to_string() == *name))
            }),
            other => panic!("unknown keyword {other}"),
        })
    }

    fn has_type(value: &Value, kind: &Value) -> bool {
        match kind.as_str() {
            Some("null") => value.is_null(),
            Some("boolean") => value.is_boolean(),
            Some("integer") => value.is_i64() || value.is_u64(),
            Some("number") => value.is_number(),
            Some("string") => value.is_string(),
            Some("array") => value.is_array(),
            Some("object") => value.is_object(),
            _ => panic!("unknown type {kind}"),
        }
    }

    #[track_caller]
    fn check(schema: fn() -> RefOr<Schema>, accepted: &[Value], refused: &[Value]) {
        // As the OpenAPI document contains it: parsed and written by `utoipa`, which drops keywords that it does not
        // know.
        let schema = json!(schema());
        assert!(accepted.len() > 1 && refused.len() > 1);
        accepted.iter().for_each(|value| assert!(accepts(&schema, value), "{value} is refused by {schema}"));
        refused.iter().for_each(|value| assert!(!accepts(&schema, value), "{value} is accepted by {schema}"));
    }

    #[test]
    fn every_schema_accepts_valid_values_and_no_others() {
        let texts = |count: usize| Value::from(vec!["a"; count]);
        let object = |count: usize| Value::Object((0..count).map(|i| (format!("v{i}"), json!(true))).collect());
        check(
            stop,
            &[json!("a"), json!(["a", "b"]), texts(MAX_STOPS), json!(null)],
            &[json!(""), json!([""]), texts(MAX_STOPS + 1), json!(5), json!("a".repeat(MAX_STOP_LEN))],
        );
        check(early_stopping, &[json!(true), json!("never"), json!(null)], &[json!("always"), json!(1)]);
        check(
            prompt,
            &[json!("a"), json!([1, 2]), json!(["a", "b"]), json!([[1], [2]]), texts(MAX_CHOICES)],
            &[json!(""), json!([]), json!([[]]), json!([-1]), json!(["a", 1]), json!(null), texts(MAX_CHOICES + 1)],
        );
        let part = json!({ "type": "text", "text": "a" });
        check(
            content,
            &[json!(""), json!([part])],
            &[
                json!([]),
                json!([{ "type": "text" }]),
                json!([{ "type": "image", "text": "a" }]),
                json!(null),
                json!([{ "type": "text", "text": "a", "more": 1 }]),
            ],
        );
        check(
            prediction,
            &[
                json!(null),
                json!({ "type": "content", "content": "a" }),
                json!({ "type": "content", "content": [part] }),
            ],
            &[
                json!({}),
                json!("a"),
                json!({ "type": "text", "content": "a" }),
                json!({ "type": "content", "content": 5 }),
                json!({ "type": "content", "content": "a", "more": 1 }),
            ],
        );
        check(all_ids, &[json!([]), json!([0, 5])], &[json!(["a"]), json!([-1]), json!([0.5]), json!(null)]);
        let presets: Vec<Value> = Preset::ALL.map(|preset| json!(preset.name())).to_vec();
        check(preset, &[presets, vec![json!(null)]].concat(), &[json!("none"), json!(1)]);
        let pairs = |count: usize| Value::Object((0..count).map(|i| (format!("v{i}"), json!("a"))).collect());
        check(metadata, &[pairs(0), pairs(16), json!(null)], &[pairs(17), object(1), json!([])]);
        check(store, &[json!(false), json!(null)], &[json!(true), json!(0)]);
        check(service_tier, &[json!("auto"), json!("default"), json!(null)], &[json!("flex"), json!(1)]);
        check(prompt_cache_retention, &[json!("in_memory"), json!(null)], &[json!("24h"), json!(1)]);
        check(variables, &[object(0), object(16), json!(null)], &[object(17), json!([])]);
        let step = StepKind::movable().next().expect("some steps can be moved").name();
        check(
            sampling,
            &[
                json!({}),
                json!({ "temperature": 0.7, "top_k": 5, "seed": -1, "ignore_eos": true, "preset": "chat" }),
                json!({ "logit_bias": { "5": -1.5 }, "samplers": [step], "stop_token_ids": [1] }),
                json!({ "temperature": null, "logit_bias": null, "samplers": null }),
            ],
            &[
                json!({ "temperature": 2.5 }),
                json!({ "temperature": "1" }),
                json!({ "top_k": 0.5 }),
                json!({ "seed": -2 }),
                json!({ "logit_bias": { "05": 1 } }),
                json!({ "logit_bias": { "5": 101 } }),
                json!({ "samplers": [step, step] }),
                json!({ "samplers": ["none"] }),
                json!({ "preset": "none" }),
            ],
        );
    }
}
