//! Parses request bodies. Stricter than JSON: no duplicate names in an object, limits on depth and on the number of
//! values, only valid Unicode, only numbers within the range of f64.

use std::collections::TryReserveError;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};

use super::error::ApiError;
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
        let mut reader = serde_json::Deserializer::from_slice(bytes);
        let mut limits = Limits { num_values: MAX_VALUES, is_out_of_memory: false };
        let value = Seed(&mut limits).deserialize(&mut reader).and_then(|value| reader.end().map(|()| value));
        value.map_err(|error| match limits.is_out_of_memory {
            true => JsonError::OutOfMemory,
            false => JsonError::Invalid(error.to_string()),
        })
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

/// Limits of the document that is being parsed.
struct Limits {
    /// Values that it may still have.
    num_values: usize,
    is_out_of_memory: bool,
}

impl Limits {
    /// Notes an allocation that failed; the error only ends the parsing.
    fn note<T, E: serde::de::Error>(&mut self, allocated: Result<T, TryReserveError>) -> Result<T, E> {
        allocated.map_err(|_| {
            self.is_out_of_memory = true;
            E::custom("out of memory")
        })
    }

    fn copy<E: serde::de::Error>(&mut self, text: &str) -> Result<String, E> {
        let mut copy = String::new();
        self.note(copy.try_reserve_exact(text.len()))?;
        copy.push_str(text);
        Ok(copy)
    }
}

struct Seed<'b>(&'b mut Limits);

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Json;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Json, D::Error> {
        let Some(left) = self.0.num_values.checked_sub(1) else {
            return Err(D::Error::custom(format_args!("more than {MAX_VALUES} values")));
        };
        self.0.num_values = left;
        deserializer.deserialize_any(ValueVisitor(self.0))
    }
}

/// Reads the name of an entry.
struct NameSeed<'b>(&'b mut Limits);

impl<'de> DeserializeSeed<'de> for NameSeed<'_> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for NameSeed<'_> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: serde::de::Error>(self, name: &str) -> Result<String, E> {
        self.0.copy(name)
    }
}

struct ValueVisitor<'b>(&'b mut Limits);

impl<'de> Visitor<'de> for ValueVisitor<'_> {
    type Value = Json;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Json, E> {
        Ok(Json::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
        Ok(Json::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
        Ok(Json::Integer(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
        Ok(Json::Float(value))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Json, E> {
        self.0.copy(value).map(Json::String)
    }

    fn visit_string<E>(self, value: String) -> Result<Json, E> {
        Ok(Json::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Json, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = sequence.next_element_seed(Seed(self.0))? {
            self.0.note(values.try_reserve(1))?;
            values.push(value);
        }
        Ok(Json::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
        let mut entries: Vec<(String, Json)> = Vec::new();
        // A set, because an object may have a name for every few bytes of the body.
        let mut names = std::collections::HashSet::new();
        while let Some(name) = map.next_key_seed(NameSeed(self.0))? {
            self.0.note(names.try_reserve(1))?;
            if !names.insert(self.0.copy::<A::Error>(&name)?) {
                let name: String = name.chars().take(64).collect();
                return Err(A::Error::custom(format_args!("the name {name:?} occurs twice in one object")));
            }
            let value = map.next_value_seed(Seed(self.0))?;
            self.0.note(entries.try_reserve(1))?;
            entries.push((name, value));
        }
        Ok(Json::Object(entries))
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
