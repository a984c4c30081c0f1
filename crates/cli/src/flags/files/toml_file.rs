//! TOML files that flags name: reading them, and errors that say line, column and what was expected.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail};
use serde::de::DeserializeOwned;

use crate::flags::usage_error::OrUsage;

/// Maximum bytes of a file: far more than anyone writes by hand, so that a wrong path costs no memory.
const MAX_BYTES: u64 = 4 << 20;

/// Reads a TOML file. An error names the file and the place in it, and ends with `example` if the file is not TOML.
pub(crate) fn read<T: DeserializeOwned>(path: &Path, example: &str) -> Result<T> {
    let text = text_of(path).with_context(|| format!("could not read {}", path.display())).or_usage()?;
    parse(&text, example).map_err(|error| anyhow!("{}, {error}", path.display())).or_usage()
}

fn text_of(path: &Path) -> Result<String> {
    let mut bytes = Vec::new();
    File::open(path)?.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_BYTES {
        bail!("it has more than {MAX_BYTES} bytes");
    }
    String::from_utf8(bytes)
        .map_err(|error| anyhow!("byte {} is not UTF-8, so this is not a TOML file", error.utf8_error().valid_up_to()))
}

/// Parses the text of a TOML file.
///
/// The first pass finds errors of syntax, the second, values of a wrong type. The parser's own message about syntax is
/// dropped: it quotes the file, which may hold a key, in its own words.
pub(crate) fn parse<T: DeserializeOwned>(text: &str, example: &str) -> Result<T> {
    let refused = |error: &toml::de::Error, reason: String| {
        let before = text.get(..error.span().map_or(0, |span| span.start)).unwrap_or(text);
        let line = before.matches('\n').count() + 1;
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        anyhow!("line {line}, column {column}: {reason}")
    };
    let syntax: Result<toml::Table, _> = toml::from_str(text);
    syntax.map_err(|error| {
        let is_twice = error.message().starts_with("duplicate key");
        let reason = if is_twice { "this name is set twice".into() } else { format!("this is not TOML; {example}") };
        refused(&error, reason)
    })?;
    toml::from_str(text).map_err(|error| refused(&error, reworded(error.message())))
}

/// Words of the parser for types, and ours.
const TYPES: [(&str, &str); 6] = [
    ("sequence", "list"),
    ("a string", "a text in quotes"),
    ("string \"", "the text \""),
    ("a boolean", "true or false"),
    ("boolean `", "`"),
    ("a map", "a table"),
];

/// Turns `invalid type: integer `1`, expected a string` into `expected a text in quotes, found integer `1``.
fn reworded(message: &str) -> String {
    if let Some(name) = message.strip_prefix("missing field ") {
        return format!("{name} is missing");
    }
    if let Some(name) = message.strip_prefix("unknown field ") {
        return format!("there is no {name}");
    }
    let parts = message.strip_prefix("invalid type: ").or_else(|| message.strip_prefix("invalid value: "));
    let Some((found, expected)) = parts.and_then(|parts| parts.rsplit_once(", expected ")) else {
        return message.to_owned();
    };
    let ours = |text: &str| TYPES.iter().fold(text.to_owned(), |text, (theirs, ours)| text.replace(theirs, ours));
    // A struct is a table with certain names, which the example shows.
    let expected = if expected.starts_with("struct ") { "a table".into() } else { ours(expected) };
    format!("expected {expected}, found {}", ours(found))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only read by the parser")]
    struct Items {
        item: Vec<Item>,
    }

    #[derive(Debug, serde::Deserialize)]
    #[serde(deny_unknown_fields)]
    #[allow(dead_code, reason = "only read by the parser")]
    struct Item {
        name: String,
        texts: Vec<String>,
    }

    #[test]
    fn errors_name_the_place_in_our_words() {
        for (text, expected) in [
            ("[[item]\nname = 1", "line 1, column 8: this is not TOML; expected [[item]]"),
            ("[[item]]\nname = secret", "line 2, column 8: this is not TOML; expected [[item]]"),
            ("[[item]]\nname = \"a\"\nname = \"b\"", "line 3, column 1: this name is set twice"),
            ("[[item]]\nname = 1\ntexts = []", "line 2, column 8: expected a text in quotes, found integer `1`"),
            ("[[item]]\nname = \"a\"", "line 1, column 1: `texts` is missing"),
            ("[[item]]\nname = \"a\"\ntexts = \"b\"", "line 3, column 9: expected a list, found the text \"b\""),
            ("[[item]]\nnome = \"a\"", "line 2, column 1: there is no `nome`, expected `name` or `texts`"),
            ("item = [1]", "line 1, column 9: expected a table, found integer `1`"),
            ("", "line 1, column 1: `item` is missing"),
        ] {
            let error = parse::<Items>(text, "expected [[item]]").unwrap_err().to_string();
            assert_eq!(error, expected, "{text}");
        }
        assert_eq!(parse::<Items>("[[item]]\nname = \"a\"\ntexts = [\"b\"]", "").unwrap().item[0].texts, ["b"]);
    }

    #[test]
    fn files_that_are_no_text_are_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        let refused = || format!("{:#}", read::<Items>(&path, "").unwrap_err());
        assert!(refused().contains("could not read"), "{}", refused());
        std::fs::write(&path, b"item = \"\xff").unwrap();
        assert!(refused().contains("byte 8 is not UTF-8"), "{}", refused());
        std::fs::write(&path, "#".repeat(MAX_BYTES as usize + 1)).unwrap();
        assert!(refused().contains("more than 4194304 bytes"), "{}", refused());
    }
}
