//! Entrances to private parts for the fuzz targets; compiled with the feature `fuzzing` only.

use crate::http::json::Json;

/// Parses a body as requests are parsed; the error is the message that the client gets.
pub fn parse_json(bytes: &[u8]) -> Result<serde_json::Value, String> {
    Json::parse(bytes).map(value).map_err(|error| error.of("body").detail.message)
}

fn value(json: Json) -> serde_json::Value {
    use serde_json::{Number, Value};
    match json {
        Json::Null => Value::Null,
        Json::Bool(value) => Value::Bool(value),
        Json::Integer(value) => Number::from_i128(value).map_or(Value::Null, Value::Number),
        Json::Float(value) => Number::from_f64(value).map_or(Value::Null, Value::Number),
        Json::String(text) => Value::String(text),
        Json::Array(values) => Value::Array(values.into_iter().map(self::value).collect()),
        Json::Object(entries) => Value::Object(entries.into_iter().map(|(name, json)| (name, value(json))).collect()),
    }
}
