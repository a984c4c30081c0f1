//! Reads JSON and text files up to a maximum number of bytes. serde_json limits nesting to 128.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use serde_json::Value;

use crate::error::Error;
use crate::file_bytes::FileReader;

/// Returns the text of a file, or `None` if the file does not exist.
pub(crate) fn read_text(path: &Path, limit: u64, reader: &FileReader<'_>) -> Result<Option<String>, Error> {
    // Checked before the file is opened, because opening a named pipe blocks until a writer opens it too.
    let about = match std::fs::metadata(path) {
        Ok(about) => about,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(e) => return Err(Error::io(path, "open the file", e)),
    };
    if !about.is_file() {
        return Err(Error::invalid(path, "the file", "a regular file", "something else"));
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open the file", e))?;
    if about.len() > limit {
        let what = "the length in bytes".into();
        return Err(Error::TooLarge { path: path.to_path_buf(), what, limit, found: about.len() });
    }
    // The limit applies to the read as well, because the file may have grown since.
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes).map_err(|e| Error::io(path, "read the file", e))?;
    reader.check(path, &bytes)?;
    String::from_utf8(bytes).map(Some).map_err(|e| Error::invalid(path, "the text", "UTF-8", e.utf8_error()))
}

pub(crate) fn read_optional(path: &Path, limit: u64, reader: &FileReader<'_>) -> Result<Option<Value>, Error> {
    let Some(text) = read_text(path, limit, reader)? else { return Ok(None) };
    let parsed = serde_json::from_str(&text).or_else(|cause| {
        // An error in what remains would have the position of another text.
        serde_json::from_str(&quote_infinities(&text)).map_err(|_| cause)
    });
    parsed.map(Some).map_err(|cause| Error::Json { path: path.to_path_buf(), cause })
}

/// Makes strings of the numbers `Infinity`, which Python writes although JSON has none.
fn quote_infinities(text: &str) -> String {
    let mut quoted = String::with_capacity(text.len() + 2);
    // Pieces between quotation marks are in turn outside and inside of strings; a mark after a backslash ends none.
    let mut is_inside = false;
    for piece in text.split_inclusive('"') {
        if is_inside {
            quoted.push_str(piece);
            let escapes = piece.trim_end_matches('"').chars().rev().take_while(|&c| c == '\\').count();
            is_inside = escapes % 2 == 1;
        } else {
            quoted.push_str(&piece.replace("Infinity", "\"Infinity\""));
            is_inside = true;
        }
    }
    quoted
}

/// Returns the type of a JSON value in words that fit "found ..." in an error.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a bool",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "a list",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn infinities_outside_of_strings_become_strings() {
        assert_eq!(quote_infinities("[0.0, Infinity]"), r#"[0.0, "Infinity"]"#);
        assert_eq!(quote_infinities(r#"{"a": Infinity, "b": 1}"#), r#"{"a": "Infinity", "b": 1}"#);
        for unchanged in [r#"{"Infinity": "an Infinity"}"#, r#"{"a\"Infinity": 1}"#, r#"["\\", "Infinity"]"#] {
            assert_eq!(quote_infinities(unchanged), unchanged);
        }
    }
}
