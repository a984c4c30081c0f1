//! Parses JSON into memory that the system may refuse. The usual libraries abort the process if there is no memory for
//! a long string; here the request fails.
//!
//! The rules beyond RFC 8259 are those of `json`: no duplicate names, limits on depth and values, only valid Unicode,
//! only numbers within the range of f64.

use std::collections::{HashSet, TryReserveError};

use super::json::{Json, JsonError};

/// Maximum depth of arrays and objects within each other.
const MAX_DEPTH: usize = 127;
/// Maximum characters of a name that an error quotes.
const SHOWN_NAME: usize = 64;

impl From<TryReserveError> for JsonError {
    fn from(_: TryReserveError) -> JsonError {
        JsonError::OutOfMemory
    }
}

/// A document and the part of it that is not parsed yet.
pub(super) struct Parser<'b> {
    text: &'b str,
    /// Offset of the next byte.
    at: usize,
    max_values: usize,
    /// Values that the document may still have.
    num_values: usize,
}

impl<'b> Parser<'b> {
    /// Returns a parser of a document that may have `max_values`.
    pub(super) fn new(bytes: &'b [u8], max_values: usize) -> Result<Parser<'b>, JsonError> {
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(Parser { text, at: 0, max_values, num_values: max_values }),
            Err(error) => Err(invalid(bytes, error.valid_up_to(), "found bytes that are not UTF-8")),
        }
    }

    /// Parses the whole document.
    pub(super) fn document(&mut self) -> Result<Json, JsonError> {
        let value = self.value(0)?;
        match self.next_byte() {
            None => Ok(value),
            Some(_) => Err(self.error("expected the end after the value")),
        }
    }

    /// Values that the document could have had in addition.
    pub(super) fn num_values_left(&self) -> usize {
        self.num_values
    }

    /// Returns an error at the next byte.
    fn error(&self, reason: &str) -> JsonError {
        let reason = if self.at < self.text.len() { reason } else { &format!("{reason}, found the end") };
        invalid(self.text.as_bytes(), self.at, reason)
    }

    /// Skips spaces and returns the next byte without taking it.
    fn next_byte(&mut self) -> Option<u8> {
        let rest = &self.text.as_bytes()[self.at..];
        let spaces = rest.iter().take_while(|byte| matches!(byte, b' ' | b'\t' | b'\n' | b'\r')).count();
        self.at += spaces;
        rest.get(spaces).copied()
    }

    /// Takes the next byte if it is `byte`; returns whether it was.
    fn take(&mut self, byte: u8) -> bool {
        let is_next = self.next_byte() == Some(byte);
        self.at += usize::from(is_next);
        is_next
    }

    fn value(&mut self, depth: usize) -> Result<Json, JsonError> {
        let first = self.next_byte();
        self.num_values = self
            .num_values
            .checked_sub(1)
            .ok_or_else(|| self.error(&format!("the document has more than {} values", self.max_values)))?;
        match first {
            Some(b'{' | b'[') if depth == MAX_DEPTH => {
                Err(self.error(&format!("arrays and objects are nested deeper than {MAX_DEPTH} levels")))
            }
            Some(b'{') => self.object(depth + 1),
            Some(b'[') => self.array(depth + 1),
            Some(b'"') => self.string().map(Json::String),
            Some(b'-' | b'0'..=b'9') => self.number(),
            _ => {
                for (word, value) in [("null", Json::Null), ("true", Json::Bool(true)), ("false", Json::Bool(false))] {
                    if self.text[self.at..].starts_with(word) {
                        self.at += word.len();
                        return Ok(value);
                    }
                }
                Err(self.error("expected a value"))
            }
        }
    }

    fn array(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut values = Vec::new();
        if self.take(b']') {
            return Ok(Json::Array(values));
        }
        loop {
            let value = self.value(depth)?;
            values.try_reserve(1)?;
            values.push(value);
            match self.take(b',') {
                true => {}
                false if self.take(b']') => return Ok(Json::Array(values)),
                false => return Err(self.error("expected `,` or `]`")),
            }
        }
    }

    fn object(&mut self, depth: usize) -> Result<Json, JsonError> {
        self.at += 1;
        let mut entries: Vec<(String, Json)> = Vec::new();
        if self.take(b'}') {
            return Ok(Json::Object(entries));
        }
        // A set, because an object may have a name for every few bytes of the body.
        let mut names = HashSet::new();
        loop {
            if self.next_byte() != Some(b'"') {
                return Err(self.error("expected a name in quotation marks"));
            }
            let start = self.at;
            let name = self.string()?;
            names.try_reserve(1)?;
            if !names.insert(copy_of(&name)?) {
                self.at = start;
                let name: String = name.chars().take(SHOWN_NAME).collect();
                return Err(self.error(&format!("the name {name:?} occurs twice in one object")));
            }
            if !self.take(b':') {
                return Err(self.error("expected `:`"));
            }
            let value = self.value(depth)?;
            entries.try_reserve(1)?;
            entries.push((name, value));
            match self.take(b',') {
                true => {}
                false if self.take(b'}') => return Ok(Json::Object(entries)),
                false => return Err(self.error("expected `,` or `}`")),
            }
        }
    }

    fn string(&mut self) -> Result<String, JsonError> {
        self.at += 1;
        let bytes = self.text.as_bytes();
        // Offset of the quotation mark that ends the string. An escape takes one byte or more after its backslash.
        let mut end = self.at;
        while bytes.get(end).is_some_and(|&byte| byte != b'"') {
            end += if bytes[end] == b'\\' { 2 } else { 1 };
        }
        let mut text = String::new();
        // No escape is shorter than the character that it means.
        text.try_reserve_exact(end.min(bytes.len()) - self.at)?;
        loop {
            let rest = &self.text[self.at..];
            let is_special = |byte: u8| byte == b'"' || byte == b'\\' || byte < b' ';
            let plain = rest.bytes().position(is_special).unwrap_or(rest.len());
            text.push_str(&rest[..plain]);
            self.at += plain;
            match rest.as_bytes().get(plain) {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(text);
                }
                Some(b'\\') => text.push(self.escape()?),
                Some(_) => return Err(self.error("expected control characters in strings to be escaped")),
                None => return Err(self.error("expected the end of a string")),
            }
        }
    }

    /// Takes an escape and returns the character that it means.
    fn escape(&mut self) -> Result<char, JsonError> {
        let start = self.at;
        let kind = self.text.as_bytes().get(start + 1).copied();
        let simple = match kind {
            Some(b'"') => '"',
            Some(b'\\') => '\\',
            Some(b'/') => '/',
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(),
            _ => return Err(self.error("found an unknown escape in a string")),
        };
        self.at += 2;
        Ok(simple)
    }

    /// Takes an escape of four hexadecimal digits, or two of them that are a surrogate pair.
    fn unicode_escape(&mut self) -> Result<char, JsonError> {
        let start = self.at;
        let first = self.code_unit()?;
        let is_pair = (0xd800..0xdc00).contains(&first) && self.text[self.at..].starts_with("\\u");
        let second = if is_pair { Some(self.code_unit()?) } else { None };
        let mut characters = char::decode_utf16([first].into_iter().chain(second));
        match (characters.next(), characters.next()) {
            (Some(Ok(character)), None) => Ok(character),
            _ => {
                self.at = start;
                Err(self.error("found an escape that is not a Unicode character: a lone surrogate"))
            }
        }
    }

    fn code_unit(&mut self) -> Result<u16, JsonError> {
        let digits = self.text.get(self.at + 2..self.at + 6);
        let digits = digits.filter(|digits| digits.bytes().all(|digit| digit.is_ascii_hexdigit()));
        let unit = digits.and_then(|digits| u16::from_str_radix(digits, 16).ok());
        let unit = unit.ok_or_else(|| self.error("expected four hexadecimal digits after `\\u`"))?;
        self.at += 6;
        Ok(unit)
    }

    fn number(&mut self) -> Result<Json, JsonError> {
        let start = self.at;
        let is_negative = self.take(b'-');
        if !matches!(self.text.as_bytes().get(self.at), Some(b'0')) {
            self.digits()?;
        } else {
            self.at += 1;
        }
        let mut is_integer = true;
        if self.text[self.at..].starts_with('.') {
            is_integer = false;
            self.at += 1;
            self.digits()?;
        }
        if self.text[self.at..].starts_with(['e', 'E']) {
            is_integer = false;
            self.at += 1;
            self.at += usize::from(self.text[self.at..].starts_with(['+', '-']));
            self.digits()?;
        }
        let number = &self.text[start..self.at];
        let integer = match is_negative {
            true => number.parse::<i64>().ok().filter(|&value| value != 0).map(i128::from),
            false => number.parse::<u64>().ok().map(i128::from),
        };
        if let Some(integer) = integer.filter(|_| is_integer) {
            return Ok(Json::Integer(integer));
        }
        // Integers beyond 64 bits, and minus zero, are floating-point numbers.
        match number.parse::<f64>() {
            Ok(value) if value.is_finite() => Ok(Json::Float(value)),
            _ => {
                self.at = start;
                Err(self.error("a number is out of range"))
            }
        }
    }

    /// Takes one digit or more.
    fn digits(&mut self) -> Result<(), JsonError> {
        let count = self.text[self.at..].bytes().take_while(u8::is_ascii_digit).count();
        if count == 0 {
            return Err(self.error("expected a digit"));
        }
        self.at += count;
        Ok(())
    }
}

fn copy_of(text: &str) -> Result<String, JsonError> {
    let mut copy = String::new();
    copy.try_reserve_exact(text.len())?;
    copy.push_str(text);
    Ok(copy)
}

/// Returns an error at the byte `at`, with its line and column.
fn invalid(bytes: &[u8], at: usize, reason: &str) -> JsonError {
    let before = &bytes[..at.min(bytes.len())];
    let line = 1 + before.iter().filter(|byte| **byte == b'\n').count();
    let column = 1 + before.iter().rev().take_while(|byte| **byte != b'\n').count();
    JsonError::Invalid(format!("{reason} at line {line} column {column}"))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::Value;

    use super::*;

    /// Returns the value as the reference library represents it.
    fn reference(json: &Json) -> Value {
        match json {
            Json::Null => Value::Null,
            Json::Bool(value) => Value::Bool(*value),
            Json::Integer(value) => i64::try_from(*value).map_or_else(|_| Value::from(*value as u64), Value::from),
            Json::Float(value) => Value::from(*value),
            Json::String(text) => Value::String(text.clone()),
            Json::Array(values) => Value::Array(values.iter().map(reference).collect()),
            Json::Object(entries) => {
                Value::Object(entries.iter().map(|(name, value)| (name.clone(), reference(value))).collect())
            }
        }
    }

    /// Compares with the reference library, which rounds some numbers differently: 15 digits must agree.
    fn is_same(a: &Value, b: &Value) -> bool {
        match (a, b) {
            (Value::Number(a), Value::Number(b)) if a.is_f64() && b.is_f64() => {
                let (a, b) = (a.as_f64().unwrap(), b.as_f64().unwrap());
                (a - b).abs() <= 1e-15 * a.abs()
            }
            (Value::Array(a), Value::Array(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| is_same(a, b)),
            (Value::Object(a), Value::Object(b)) => {
                a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.0 == b.0 && is_same(a.1, b.1))
            }
            _ => a == b,
        }
    }

    /// Accepts what the reference library accepts, with the same value, apart from duplicate names.
    fn compare(bytes: &[u8]) {
        let shown = String::from_utf8_lossy(bytes);
        match (Json::parse(bytes), serde_json::from_slice::<Value>(bytes)) {
            (Ok(own), Ok(expected)) => assert!(is_same(&reference(&own), &expected), "{shown:?}: {own:?}"),
            (Err(_), Err(_)) => {}
            (Err(JsonError::Invalid(why)), Ok(_)) => assert!(why.contains("occurs twice"), "{shown:?}: {why}"),
            (own, expected) => panic!("{shown:?}: {own:?}, expected {expected:?}"),
        }
    }

    #[test]
    fn special_documents_are_parsed_like_the_reference() {
        let deep = |depth: usize| [b"[".repeat(depth), b"]".repeat(depth)].concat();
        for document in [
            &b"[0, -0, 00, -1, 1.5, 1., .5, 1e5, 1E+5, 1e-5, 1e, -, +1]"[..],
            b"-0",
            b"-",
            b"00",
            b"01",
            b"1.",
            b"1.5e",
            b"1e400",
            b"-1e400",
            b"1e-400",
            b"18446744073709551615",
            b"18446744073709551616",
            b"-9223372036854775808",
            b"-9223372036854775809",
            b"\"\\u0000\\uD83D\\uDE00\\ud83d\"",
            b"\"\\uD83D\\uDE00\"",
            b"\"\\uD83D\\u0041\"",
            b"\"\\uDE00\"",
            b"\"\\u00e\"",
            b"\"\\u00\xc3\xa9e\"",
            b"\"\\u+123\"",
            b"\"\\",
            b"\"\\\"",
            b"\"\\x\"",
            b"\"a\nb\"",
            b"\"a\x7fb\"",
            b"\"",
            b"\xef\xbb\xbf{}",
            b"nul",
            b"nulll",
            b"truefalse",
            b"[1,]",
            b"[,1]",
            b"{\"a\":1,}",
            b"{\"a\" 1}",
            b"{a:1}",
            b"{1:1}",
            b"{\"a\":1 \"b\":2}",
            b"[1 2]",
            b"[1}",
            b" \t\r\n[ ] \n",
            b"\x0c[]",
            b"{\"\":{},\"a\\n\":[[],{}]}",
            &deep(127),
            &deep(128),
            &deep(100_000),
        ] {
            compare(document);
        }
    }

    proptest! {
        #[test]
        fn documents_are_parsed_like_the_reference(pieces in prop::collection::vec(
            prop::sample::select(vec!["{", "}", "[", "]", ",", ":", "\"", "\\", "\\u00e9", "\\ud83d", "\\ude00", "\\n",
                                      "a", "é", "0", "-1", "2.5", "e9", ".", "null", "true", " ", "\n", "\"a\":", "1,"]),
            0..24)) {
            compare(pieces.concat().as_bytes());
        }

        #[test]
        fn values_survive_writing_and_parsing(text in ".{0,40}", number in any::<f64>(), integer in any::<i64>()) {
            let value = serde_json::json!({ "text": [text, { text.as_str(): integer }], "number": number });
            let parsed = Json::parse(value.to_string().as_bytes()).unwrap();
            // Numbers are rounded correctly, so the shortest digits return the same one.
            let written = serde_json::to_string(&reference(&parsed)).unwrap();
            prop_assert_eq!(written, value.to_string());
        }
    }
}
