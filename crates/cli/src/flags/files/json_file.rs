//! JSON files that flags name.

use std::path::Path;

use anyhow::{Result, anyhow};
use serde_json::Value;

use super::text_file;
use crate::flags::usage_error::OrUsage;

/// Reads a JSON file. An error names the file and the line and column in it.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let text = text_file::read(path)?;
    parse(&text).map_err(|error| anyhow!("{}, {error}", path.display())).or_usage()
}

fn parse(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = if error.is_eof() { end_of(text) } else { (error.line(), error.column()) };
        let message = error.to_string();
        let reason = message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
        anyhow!("line {line}, column {column}: this is not JSON: {}", reworded(reason))
    })
}

/// Returns line and column of the last character that is not white space.
fn end_of(text: &str) -> (usize, usize) {
    let text = text.trim_end();
    let last_line = text.rsplit('\n').next().unwrap_or_default();
    (text.matches('\n').count() + 1, last_line.chars().count().max(1))
}

/// Replaces the parser's shortest messages, which leave open what to change.
fn reworded(reason: &str) -> &str {
    match reason {
        "expected value" | "expected ident" => "expected a value: an object, a list, a number or a text in quotes",
        "key must be a string" => "expected a name in double quotes",
        "trailing characters" => "there is more text after the value",
        "trailing comma" => "there is no value after a comma",
        _ if reason.starts_with("EOF") => "the text ends here, before the value does",
        _ => reason,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_line_and_column() {
        assert_eq!(parse("[1]").unwrap(), serde_json::json!([1]));
        let error = parse("[\n1,\n x]").unwrap_err().to_string();
        let expected = "expected a value: an object, a list, a number or a text in quotes";
        assert_eq!(error, format!("line 3, column 2: this is not JSON: {expected}"));
        for (text, reason) in [
            ("", "line 1, column 1: this is not JSON: the text ends here, before the value does"),
            ("[1", "line 1, column 2: this is not JSON: the text ends here, before the value does"),
            ("{\n\"é\":\n\n", "line 2, column 4: this is not JSON: the text ends here, before the value does"),
            ("{a: 1}", "expected a name in double quotes"),
            ("{} x", "there is more text after the value"),
            ("[1,]", "there is no value after a comma"),
        ] {
            assert!(parse(text).unwrap_err().to_string().ends_with(reason), "{text}");
        }
    }
}
