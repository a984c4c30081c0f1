//! Sources that become a grammar in Lark syntax: a client's own grammar, a regular expression, a list of choices.

use serde_json::Value;

use crate::{Error, schema};

/// Maximum depth of brackets in a grammar. The parser is recursive.
pub(crate) const MAX_NESTING: usize = 200;

/// Refuses a Lark grammar that names tokens by id, sets options of the parser, or nests too deeply. Its syntax is
/// checked by the parser.
pub(crate) fn check(text: &str) -> Result<(), Error> {
    let refuse = |line: usize, problem: &str| Err(Error::source("grammar", format!("line {line}: {problem}")));
    let bytes = text.as_bytes();
    let (mut index, mut line, mut depth) = (0, 1, 0usize);
    while index < bytes.len() {
        let rest = &text[index..];
        match bytes[index] {
            b'\n' => line += 1,
            quote @ (b'"' | b'/') if quote == b'"' || !rest.starts_with("//") => {
                let len = delimited(&bytes[index..], quote);
                line += rest[..len].matches('\n').count();
                index += len;
                continue;
            }
            b'#' | b'/' => {
                index += rest.find('\n').unwrap_or(rest.len());
                continue;
            }
            b'<' => {
                return refuse(line, "special tokens such as <[1]> or <|name|> cannot be used; write text in quotes");
            }
            b'%' if rest.starts_with("%llguidance") => {
                return refuse(line, "%llguidance cannot be used, because the server sets its options");
            }
            b'%' if rest.starts_with("%json") => {
                let start = index + "%json".len();
                let mut values = serde_json::Deserializer::from_str(&text[start..]).into_iter::<Value>();
                let Some(Ok(document)) = values.next() else {
                    return refuse(line, "%json: expected a JSON schema after it");
                };
                schema::check(&document)?;
                let end = start + values.byte_offset();
                line += text[index..end].matches('\n').count();
                index = end;
                continue;
            }
            b'(' | b'[' => {
                depth += 1;
                if depth > MAX_NESTING {
                    let (kind, what) = ("grammar", "levels of brackets");
                    return Err(Error::TooLarge { kind, what, limit: MAX_NESTING, found: depth });
                }
            }
            b')' | b']' => depth = depth.saturating_sub(1),
            _ => {}
        }
        index += rest.chars().next().map_or(1, char::len_utf8);
    }
    Ok(())
}

/// Returns a problem of the Lark parser with its place in the words of this crate: `at 1(8): unknown name: "foo"` is
/// `line 1, column 8: no rule or token is called foo`.
pub(crate) fn reworded(problem: &str) -> String {
    if let Some(reason) = problem.strip_prefix("at EOF: ") {
        return format!("at the end: {}", reason_in_words(reason));
    }
    let place = problem.strip_prefix("at ").unwrap_or(problem).split_once("): ");
    let place = place.and_then(|(place, reason)| {
        let (line, column) = place.split_once('(')?;
        let (line, column): (usize, usize) = (line.parse().ok()?, column.parse().ok()?);
        Some((line, column, reason))
    });
    match place {
        Some((line, column, reason)) => format!("line {line}, column {column}: {}", reason_in_words(reason)),
        None => problem.to_owned(),
    }
}

fn reason_in_words(reason: &str) -> String {
    let unknown = reason.strip_prefix("unknown name: ");
    let unknown = unknown.or_else(|| reason.strip_prefix("rule ").and_then(|rest| rest.strip_suffix(" not found")));
    if let Some(name) = unknown {
        return format!("no rule or token is called {}", name.trim_matches('"'));
    }
    if reason == "lexer error" {
        return "expected a name, a text in quotes, an expression between slashes, or an operator".into();
    }
    // The parser repeats the token at which it stopped.
    let reason = reason.split_once(" (at ").map_or(reason, |(reason, _)| reason);
    let mut characters = reason.chars();
    let first = characters.next().map(|first| first.to_ascii_lowercase());
    first.into_iter().chain(characters).collect()
}

/// Returns the length of a quoted text with its quotes; to the end if it is not closed.
fn delimited(bytes: &[u8], quote: u8) -> usize {
    let mut index = 1;
    while index < bytes.len() {
        match bytes[index] {
            b'\\' => index += 2,
            byte if byte == quote => return index + 1,
            _ => index += 1,
        }
    }
    bytes.len()
}

/// Returns the grammar of a regular expression. `\d`, `\w` and `\s` stand for ASCII characters, as in JSON Schema.
pub(crate) fn regex(text: &str) -> Result<String, Error> {
    match without_anchors(text) {
        "" => Err(Error::source("regex", "expected an expression that matches some text, found none")),
        text => Ok(format!("start: /{}/\n", llguidance::regex_to_lark(text, "dws"))),
    }
}

/// Removes `^` at the beginning and `$` at the end: the expression matches the whole reply anyway.
fn without_anchors(text: &str) -> &str {
    let text = text.strip_prefix('^').unwrap_or(text);
    match text.strip_suffix('$') {
        Some(rest) if (rest.len() - rest.trim_end_matches('\\').len()).is_multiple_of(2) => rest,
        _ => text,
    }
}

/// Returns the grammar of a list of choices.
pub(crate) fn choice(choices: &[String]) -> Result<String, Error> {
    if choices.is_empty() || choices.iter().any(String::is_empty) {
        let found = if choices.is_empty() { "none" } else { "an empty text" };
        return Err(Error::source("choice", format!("expected one or more texts, found {found}")));
    }
    let quoted: Vec<String> = choices.iter().map(|choice| Value::from(choice.as_str()).to_string()).collect();
    Ok(format!("start: CHOICE\nCHOICE: {}\n", quoted.join(" | ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn special_tokens_options_and_deep_brackets_are_refused() {
        let problem = |text: &str| check(text).unwrap_err().to_string();
        assert!(problem("start: \"a\"\nb: <[5]>").starts_with("the grammar: line 2: special tokens"));
        assert!(problem("start: <|im_start|>").contains("special tokens"));
        assert!(problem("%llguidance {}\nstart: \"a\"").contains("%llguidance"));
        assert!(problem("start: %json { \"not\": {} }").contains("#/not"));
        assert!(problem(&"(".repeat(300)).contains("levels of brackets"));
        for fine in ["start: \"<[5]>\" /<a>\\/<b>/ // <c>", "# <d>\nstart: %json { \"const\": \"<e>\" } \"é<\""] {
            assert_eq!(check(fine), Ok(()), "{fine}");
        }
    }

    #[test]
    fn problems_of_the_parser_name_line_and_column() {
        let no_rule = "line 1, column 8: no rule or token is called foo";
        assert_eq!(reworded("at 1(8): unknown name: \"foo\""), no_rule);
        assert_eq!(reworded("at 1(8): rule \"foo\" not found"), no_rule);
        assert_eq!(reworded("2(3): Expected value (at : (:))"), "line 2, column 3: expected value");
        assert_eq!(reworded("at EOF: Expected value"), "at the end: expected value");
        assert_eq!(reworded("no text (of 3): is allowed"), "no text (of 3): is allowed");
    }

    #[test]
    fn anchors_are_removed_unless_escaped() {
        assert_eq!(without_anchors("^ab$"), "ab");
        assert_eq!(without_anchors(r"ab\$"), r"ab\$");
        assert_eq!(without_anchors(r"ab\\$"), r"ab\\");
    }
}
