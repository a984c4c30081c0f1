//! Tokens as tables and as JSON, for `inspect` and `tokenize`.

use crate::flags::usage_error::{UsageError, bail_usage};
use crate::terminal::cells::{beginning, left_aligned, visible};
use crate::terminal::format::escaped;
use anyhow::Result;
use pellucid_tokenizer::{TokenInfo, TokenKind, Tokenizer};
use serde_json::{Value, json};
use std::io::Write;

/// Maximum bytes of a token that fit beside its text in 80 columns.
const SHOWN_BYTES: usize = 12;
/// Columns of the text.
const TEXT_WIDTH: usize = 30;

/// Returns an array with an object for each token: id, text (U+FFFD for a part of a character), piece as the model file
/// spells it, bytes as numbers, kind.
pub(crate) fn to_json(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Value> {
    let mut tokens = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(token) = tokenizer.token(*id) else { return Err(outside(tokenizer, *id)) };
        let text = String::from_utf8_lossy(&token.bytes);
        tokens.push(json!({
            "id": id, "text": text, "piece": token.piece, "bytes": token.bytes, "kind": kind_text(token.kind),
        }));
    }
    Ok(Value::Array(tokens))
}

/// Writes a line for each token: `␣` is a space, `⏎` a line end, `\xe2` a byte that is a part of a character.
pub(crate) fn write_table(tokenizer: &Tokenizer, ids: &[u32], output: &mut impl Write) -> Result<()> {
    writeln!(output, "{:>8}  {:TEXT_WIDTH$}  bytes", "id", "text")?;
    for id in ids {
        let Some(token) = tokenizer.token(*id) else { return Err(outside(tokenizer, *id)) };
        let mut bytes: Vec<_> = token.bytes.iter().take(SHOWN_BYTES).map(|byte| format!("{byte:02x}")).collect();
        if token.bytes.len() > SHOWN_BYTES {
            bytes.pop();
            bytes.push(format!(".. {}", token.bytes.len()));
        }
        let text = left_aligned(&beginning(&text_of(&token), TEXT_WIDTH), TEXT_WIDTH);
        writeln!(output, "{id:>8}  {text}  {}", bytes.join(" "))?;
    }
    Ok(())
}

/// Returns the text of an id; `None` if the vocabulary does not have it.
pub(crate) fn text(tokenizer: &Tokenizer, id: u64) -> Option<String> {
    let token = tokenizer.token(u32::try_from(id).ok()?)?;
    Some(text_of(&token))
}

/// Rejects ids that the vocabulary does not have.
pub(crate) fn check_ids(tokenizer: &Tokenizer, ids: &[u32]) -> Result<()> {
    match ids.iter().find(|id| tokenizer.token(**id).is_none()) {
        Some(id) => Err(outside(tokenizer, *id)),
        None => Ok(()),
    }
}

/// Parses ids: whole numbers separated by white space, commas or the brackets of JSON.
pub(crate) fn parse_ids(text: &str) -> Result<Vec<u32>> {
    let mut ids = Vec::new();
    let separates = |c: char| c.is_whitespace() || matches!(c, ',' | '[' | ']');
    for word in text.split(separates).filter(|word| !word.is_empty()) {
        match word.parse() {
            Ok(id) => ids.push(id),
            Err(_) => {
                let word: String = word.chars().take(40).collect();
                bail_usage!("`{}` is not a token id: expected whole numbers from 0 to {}", escaped(&word), u32::MAX);
            }
        }
    }
    Ok(ids)
}

fn outside(tokenizer: &Tokenizer, id: u32) -> anyhow::Error {
    UsageError::because(format!("the id {id} is outside the vocabulary, which has {} tokens", tokenizer.vocab_size()))
}

/// Returns the text of a token, made visible; a token without bytes has its piece.
fn text_of(token: &TokenInfo<'_>) -> String {
    if token.bytes.is_empty() { escaped(token.piece) } else { visible(&token.bytes) }
}

fn kind_text(kind: TokenKind) -> &'static str {
    match kind {
        TokenKind::Normal => "normal",
        TokenKind::Control => "control",
        TokenKind::UserDefined => "user-defined",
        TokenKind::Byte => "byte",
        TokenKind::Unknown => "unknown",
        TokenKind::Unused => "unused",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_come_in_any_dress() {
        assert_eq!(parse_ids("[1, 2,3]\n4\t5").unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(parse_ids(" \n").unwrap(), [0; 0]);
        for text in ["-1", "1.5", "4294967296", "{\"id\": 1}", "a", "1e3"] {
            assert!(parse_ids(text).is_err(), "{text:?} was taken");
        }
    }
}
