//! Reads JSON objects field by field. Each field is taken by name with its type and range; fields that nothing takes
//! are refused by name, so that no part of a request is ignored, truncated or clamped. Null means absent, as in
//! OpenAI's API.

use std::ops::RangeInclusive;

use super::error::ApiError;
use super::json::Json;
use crate::limits::client_memory::out_of_memory;

/// Maximum characters of a client's text that an error message quotes.
const SHOWN: usize = 64;

/// The fields of one object that were not taken yet.
#[derive(Debug)]
pub(crate) struct Fields {
    /// Path of the object, such as `messages[2].`; empty for the document.
    path: String,
    entries: Vec<(String, Json)>,
}

/// Returns a client's text as error messages quote it: escaped and truncated.
pub(crate) fn shown(word: &str) -> String {
    format!("{:?}", word.chars().take(SHOWN).collect::<String>())
}

impl Fields {
    /// Returns the fields of a document.
    pub(crate) fn of(value: Json) -> Result<Fields, ApiError> {
        match value {
            Json::Object(entries) => Ok(Fields { path: String::new(), entries }),
            other => {
                let message = format!("the body is {}, expected an object", other.kind());
                Err(ApiError::invalid(message).code("invalid_type"))
            }
        }
    }

    /// Returns the fields of a nested object at `path`.
    pub(crate) fn within(path: String, value: Json) -> Result<Fields, ApiError> {
        match value {
            Json::Object(entries) => Ok(Fields { path: path + ".", entries }),
            other => Err(wrong_type(&path, "an object", &other)),
        }
    }

    /// Returns the full path of a field.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.path)
    }

    /// Whether a field is present and not null.
    pub(crate) fn has(&self, name: &str) -> bool {
        self.entries.iter().any(|(key, value)| key == name && *value != Json::Null)
    }

    /// Whether all fields were taken; null counts as absent.
    pub(crate) fn is_empty(&self) -> bool {
        self.entries.iter().all(|(_, value)| *value == Json::Null)
    }

    /// Takes a field; null counts as absent.
    pub(crate) fn take(&mut self, name: &str) -> Option<Json> {
        let at = self.entries.iter().position(|(key, _)| key == name)?;
        match self.entries.swap_remove(at).1 {
            Json::Null => None,
            value => Some(value),
        }
    }

    pub(crate) fn required(&mut self, name: &str) -> Result<Json, ApiError> {
        let path = self.path(name);
        let missing = || ApiError::field(&path, format!("{path} is missing")).code("missing_required_parameter");
        self.take(name).ok_or_else(missing)
    }

    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, ApiError> {
        match self.take(name) {
            None => Ok(None),
            Some(Json::Bool(value)) => Ok(Some(value)),
            Some(other) => Err(wrong_type(&self.path(name), "a boolean", &other)),
        }
    }

    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, ApiError> {
        self.take(name).map(|value| integer(&self.path(name), value, range)).transpose()
    }

    /// Takes an integer whose `range` fits into `T`.
    pub(crate) fn whole<T: TryFrom<i64>>(
        &mut self,
        name: &str,
        range: RangeInclusive<i64>,
    ) -> Result<Option<T>, ApiError> {
        let value = self.integer(name, range)?;
        Ok(value.and_then(|value| T::try_from(value).ok()))
    }

    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f32>) -> Result<Option<f32>, ApiError> {
        self.take(name).map(|value| number(&self.path(name), value, range)).transpose()
    }

    /// Takes a text of at most `max_len` bytes.
    pub(crate) fn string(&mut self, name: &str, max_len: usize) -> Result<Option<String>, ApiError> {
        self.take(name).map(|value| string(&self.path(name), value, max_len)).transpose()
    }

    pub(crate) fn array(&mut self, name: &str, max_len: usize) -> Result<Option<Vec<Json>>, ApiError> {
        self.take(name).map(|value| array(&self.path(name), value, max_len)).transpose()
    }

    /// Takes an array of token ids.
    pub(crate) fn ids(&mut self, name: &str, max_len: usize) -> Result<Option<Vec<u32>>, ApiError> {
        let path = self.path(name);
        self.array(name, max_len)?.map(|values| ids(&path, values)).transpose()
    }

    /// Takes a string or a list of strings, each of 1 to `max_len` bytes.
    pub(crate) fn strings(&mut self, name: &str, max_count: usize, max_len: usize) -> Result<Vec<String>, ApiError> {
        let path = self.path(name);
        let values = match self.take(name) {
            None => return Ok(Vec::new()),
            Some(text @ Json::String(_)) => vec![text],
            Some(value) => array(&path, value, max_count)?,
        };
        let each = |value| {
            let text = string(&path, value, max_len)?;
            if text.is_empty() {
                return Err(ApiError::field(&path, format!("{path}: an empty string is not allowed")));
            }
            Ok(text)
        };
        values.into_iter().map(each).collect()
    }

    /// Refuses a field that is known but not supported, unless its value asks for the default behaviour.
    pub(crate) fn refuse(
        &mut self,
        name: &str,
        is_harmless: impl Fn(&Json) -> bool,
        why: &str,
    ) -> Result<(), ApiError> {
        match self.take(name) {
            Some(value) if !is_harmless(&value) => {
                let path = self.path(name);
                Err(ApiError::field(&path, format!("{path} is not supported: {why}")).code("unsupported_parameter"))
            }
            _ => Ok(()),
        }
    }

    /// Refuses fields that were not taken, unless they are null.
    pub(crate) fn finish(self) -> Result<(), ApiError> {
        match self.entries.iter().find(|(_, value)| *value != Json::Null) {
            None => Ok(()),
            Some((name, _)) => {
                let message = format!("unknown field {}", shown(&format!("{}{name}", self.path)));
                let name: String = name.chars().take(SHOWN).collect();
                Err(ApiError::field(self.path(&name), message).code("unknown_parameter"))
            }
        }
    }
}

pub(crate) fn wrong_type(path: &str, expected: &str, found: &Json) -> ApiError {
    ApiError::field(path, format!("{path}: expected {expected}, found {}", found.kind())).code("invalid_type")
}

pub(crate) fn integer(path: &str, value: Json, range: RangeInclusive<i64>) -> Result<i64, ApiError> {
    let found = match value {
        Json::Integer(found) => found,
        // JSON does not distinguish 1.0 or 1e2 from integers; beyond 2^53 a float does not identify one integer.
        Json::Float(found) if found.fract() == 0.0 && found.abs() <= 9_007_199_254_740_992.0 => found as i128,
        Json::Float(found) if found.fract() == 0.0 => return Err(out_of_range(path, &range, &format!("{found:e}"))),
        other => return Err(wrong_type(path, "an integer", &other)),
    };
    match i64::try_from(found) {
        Ok(found) if range.contains(&found) => Ok(found),
        _ => Err(out_of_range(path, &range, &found.to_string())),
    }
}

fn out_of_range<T: std::fmt::Display>(path: &str, range: &RangeInclusive<T>, found: &str) -> ApiError {
    let (low, high) = (range.start(), range.end());
    ApiError::field(path, format!("{path}: expected {low} to {high}, found {found}")).code("out_of_range")
}

pub(crate) fn number(path: &str, value: Json, range: RangeInclusive<f32>) -> Result<f32, ApiError> {
    let found = match value {
        Json::Integer(found) => found as f64,
        Json::Float(found) => found,
        other => return Err(wrong_type(path, "a number", &other)),
    };
    let (low, high) = (f64::from(*range.start()), f64::from(*range.end()));
    if !(low..=high).contains(&found) {
        return Err(out_of_range(path, &range, &found.to_string()));
    }
    let value = found as f32;
    // Subnormal values lose precision or become 0, and 0 often switches a parameter off.
    if value.abs() < f32::MIN_POSITIVE && found != 0.0 {
        let least = f32::MIN_POSITIVE;
        let message = format!("{path}: expected 0 or at least {least:e}, found a number between them");
        return Err(ApiError::field(path, message).code("out_of_range"));
    }
    Ok(value)
}

pub(crate) fn string(path: &str, value: Json, max_len: usize) -> Result<String, ApiError> {
    match value {
        Json::String(text) if text.len() <= max_len => Ok(text),
        Json::String(text) => {
            let message = format!("{path}: expected at most {max_len} bytes, found {}", text.len());
            Err(ApiError::field(path, message).code("string_above_max_length"))
        }
        other => Err(wrong_type(path, "a string", &other)),
    }
}

pub(crate) fn array(path: &str, value: Json, max_len: usize) -> Result<Vec<Json>, ApiError> {
    match value {
        Json::Array(values) if values.len() <= max_len => Ok(values),
        Json::Array(values) => {
            let message = format!("{path}: expected at most {max_len} entries, found {}", values.len());
            Err(ApiError::field(path, message).code("array_above_max_length"))
        }
        other => Err(wrong_type(path, "an array", &other)),
    }
}

pub(crate) fn ids(path: &str, values: Vec<Json>) -> Result<Vec<u32>, ApiError> {
    let mut ids = Vec::new();
    ids.try_reserve_exact(values.len()).map_err(|_| out_of_memory())?;
    for value in values {
        ids.push(integer(path, value, 0..=i64::from(u32::MAX))? as u32);
    }
    Ok(ids)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fields(text: &str) -> Fields {
        Fields::of(Json::parse(text.as_bytes()).unwrap()).unwrap()
    }

    #[test]
    fn integers_are_within_their_range_or_refused() {
        let refused = [
            "-1",
            "-9223372036854775808",
            "9223372036854775807",
            "9223372036854775808",
            "2147483648",
            "1e30",
            "1e300",
            "1.5",
            "\"1\"",
            "true",
            "[1]",
            "{}",
            "129",
        ];
        for value in refused {
            let error = fields(&format!("{{\"n\":{value}}}")).integer("n", 0..=128).unwrap_err();
            assert_eq!(error.detail.param.as_deref(), Some("n"), "{value}");
            assert_eq!(error.status.as_u16(), 400);
        }
        for (value, expected) in
            [("0", Some(0)), ("128", Some(128)), ("1.0", Some(1)), ("1e2", Some(100)), ("null", None)]
        {
            assert_eq!(fields(&format!("{{\"n\":{value}}}")).integer("n", 0..=128).unwrap(), expected);
        }
    }

    #[test]
    fn numbers_are_within_their_range_or_refused() {
        for value in ["-0.1", "2.1", "1e300", "-1e300", "1e-46", "1e-38", "\"1\"", "false", "[]"] {
            assert!(fields(&format!("{{\"t\":{value}}}")).number("t", 0.0..=2.0).is_err(), "{value}");
        }
        for (value, expected) in [("0", 0.0), ("2", 2.0), ("0.7", 0.7), ("-0.0", 0.0), ("1.2e-38", 1.2e-38)] {
            assert_eq!(fields(&format!("{{\"t\":{value}}}")).number("t", 0.0..=2.0).unwrap(), Some(expected));
        }
    }

    #[test]
    fn fields_that_nothing_takes_are_refused_by_name() {
        let mut read = fields("{\"a\":1,\"b\":{\"c\":2}}");
        assert_eq!(read.integer("a", 0..=9).unwrap(), Some(1));
        let mut inner = Fields::within("b".into(), read.take("b").unwrap()).unwrap();
        assert_eq!(inner.take("d"), None);
        assert_eq!(inner.finish().unwrap_err().detail.param.as_deref(), Some("b.c"));
        assert_eq!(read.finish(), Ok(()));
        assert_eq!(fields("{\"a\":null}").finish(), Ok(()));
        assert_eq!(fields("{\"a\":null,\"b\":0}").finish().unwrap_err().detail.param.as_deref(), Some("b"));
    }
}
