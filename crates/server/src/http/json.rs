//! Request bodies as JSON values. Stricter than JSON: no duplicate names in an object, limits on depth and on the
//! number of values, only valid Unicode, only numbers within the range of f64. `json_parser` parses them.

use serde_json::Value;

use super::error::ApiError;
use super::json_parser::Parser;
use crate::limits::client_memory::out_of_memory;

/// Maximum values in one document. Without it, a body within the size limit could take twenty times its size in memory.
pub(crate) const MAX_VALUES: usize = 1 << 20;

/// A JSON value; objects keep their order.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Json {
    Null,
    Bool(bool),
    /// A number written without point or exponent, within 64 bits.
    Integer(i128),
    Float(f64),
    String(String),
    Array(Vec<Json>),
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses a whole document. Error messages give line and column and quote nothing but names.
    pub(crate) fn parse(bytes: &[u8]) -> Result<Json, JsonError> {
        Json::parse_within(bytes, &mut { MAX_VALUES })
    }

    /// Parses a whole document of at most `num_values` values, from which those of the document are deducted.
    pub(crate) fn parse_within(bytes: &[u8], num_values: &mut usize) -> Result<Json, JsonError> {
        let mut parser = Parser::new(bytes, *num_values)?;
        let value = parser.document()?;
        *num_values = parser.num_values_left();
        Ok(value)
    }

    /// Returns the value in the form of `serde_json`. Numbers are within the range of f64.
    pub(crate) fn into_value(self) -> Value {
        match self {
            Json::Null => Value::Null,
            Json::Bool(value) => value.into(),
            Json::Integer(value) => match (u64::try_from(value), i64::try_from(value)) {
                (Ok(value), _) => value.into(),
                (_, Ok(value)) => value.into(),
                _ => (value as f64).into(),
            },
            Json::Float(value) => value.into(),
            Json::String(text) => text.into(),
            Json::Array(values) => Value::Array(values.into_iter().map(Json::into_value).collect()),
            Json::Object(entries) => {
                Value::Object(entries.into_iter().map(|(name, value)| (name, value.into_value())).collect())
            }
        }
    }

    /// Returns the type for error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Json::Null => "null",
            Json::Bool(_) => "a boolean",
            Json::Integer(_) => "an integer",
            Json::Float(_) => "a number",
            Json::String(_) => "a string",
            Json::Array(_) => "an array",
            Json::Object(_) => "an object",
        }
    }
}

/// Why a document was not parsed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JsonError {
    /// The document is invalid, for the reason given.
    Invalid(String),
    /// There is no memory for its values.
    OutOfMemory,
}

impl JsonError {
    /// Returns the error for a client that sent a `body` or `message`.
    pub(crate) fn of(self, name: &str) -> ApiError {
        match self {
            JsonError::OutOfMemory => out_of_memory(),
            JsonError::Invalid(why) => {
                ApiError::invalid(format!("the {name} is not valid JSON: {why}")).code("invalid_json")
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_documents_are_refused() {
        let deep = "[".repeat(100_000);
        let many = format!("[{}0]", "0,".repeat(MAX_VALUES));
        let bad: [&[u8]; 14] = [
            b"",
            b"{",
            b"{} x",
            b"{\"a\":1,\"a\":2}",
            b"{\"a\":{\"b\":1,\"b\":1}}",
            b"\"\\ud800\"",
            b"\"\\udc00x\"",
            b"\"\xff\"",
            b"1e400",
            b"NaN",
            b"Infinity",
            b"{'a':1}",
            deep.as_bytes(),
            many.as_bytes(),
        ];
        for bytes in bad {
            let shown = String::from_utf8_lossy(&bytes[..bytes.len().min(40)]).into_owned();
            assert!(Json::parse(bytes).is_err(), "{shown:?} was accepted");
        }
    }

    #[test]
    fn values_are_parsed_exactly() {
        let value = Json::parse(b" {\"a\":[1,-2,1.5,true,null,\"\\u00e9\"],\"b\":18446744073709551615} ").unwrap();
        let array = vec![
            Json::Integer(1),
            Json::Integer(-2),
            Json::Float(1.5),
            Json::Bool(true),
            Json::Null,
            Json::String("é".into()),
        ];
        let expected = vec![("a".into(), Json::Array(array)), ("b".into(), Json::Integer(u64::MAX.into()))];
        assert_eq!(value, Json::Object(expected));
        assert_eq!(Json::parse(b"1e30").unwrap(), Json::Float(1e30));
    }
}
