//! JSON files that flags name.

use std::path::Path;

use anyhow::{Context, Result, anyhow};
use serde_json::Value;

use super::usage_error::OrUsage;

/// Reads a JSON file. An error names the file and the place in it.
pub(crate) fn read(path: &Path) -> Result<Value> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("could not read {}", path.display())).or_usage()?;
    parse(&text).map_err(|error| anyhow!("{}, {error}", path.display())).or_usage()
}

fn parse(text: &str) -> Result<Value> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let message = error.to_string();
        let reason = message.rsplit_once(" at line ").map_or(message.as_str(), |(reason, _)| reason);
        anyhow!("line {line}, column {column}: this is not JSON: {reason}")
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_names_line_and_column() {
        assert_eq!(parse("[1]").unwrap(), serde_json::json!([1]));
        let error = parse("[\n1,\n x]").unwrap_err().to_string();
        assert_eq!(error, "line 3, column 2: this is not JSON: expected value");
    }
}
