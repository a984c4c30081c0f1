//! Tokens as tables and as JSON, for `inspect` and `tokenize`.

use crate::terminal::format::escaped;
use anyhow::{Result, bail};
use pellucid_tokenizer::{TokenKind, Tokenizer};
use serde_json::{Value, json};
use std::io::Write;

/// Maximum bytes of a token that fit beside its piece in 80 columns.
const SHOWN_BYTES: usize = 12;
/// Columns of the piece.
const PIECE_WIDTH: usize = 30;

/// Returns an array with an object for each token: id, piece as the model file spells it, bytes as numbers, kind.
pub(crate) fn to_json(tokenizer: &Tokenizer, ids: &[u32]) -> Result<Value> {
    let mut tokens = Vec::with_capacity(ids.len());
    for id in ids {
        let Some(token) = tokenizer.token(*id) else { return Err(outside(tokenizer, *id)) };
        tokens.push(json!({ "id": id, "piece": token.piece, "bytes": token.bytes, "kind": kind_text(token.kind) }));
    }
    Ok(Value::Array(tokens))
}

/// Writes a line for each token.
pub(crate) fn write_table(tokenizer: &Tokenizer, ids: &[u32], output: &mut impl Write) -> Result<()> {
    writeln!(output, "{:>8}  {:PIECE_WIDTH$}  bytes", "id", "piece")?;
    for id in ids {
        let Some(token) = tokenizer.token(*id) else { return Err(outside(tokenizer, *id)) };
        let mut bytes: Vec<_> = token.bytes.iter().take(SHOWN_BYTES).map(|byte| format!("{byte:02x}")).collect();
        if token.bytes.len() > SHOWN_BYTES {
            bytes.pop();
            bytes.push(format!(".. {}", token.bytes.len()));
        }
        writeln!(output, "{id:>8}  {:PIECE_WIDTH$}  {}", shortened(&escaped(token.piece)), bytes.join(" "))?;
    }
    Ok(())
}

/// Returns the piece of an id; `None` if the vocabulary does not have it.
pub(crate) fn piece(tokenizer: &Tokenizer, id: u64) -> Option<String> {
    let token = tokenizer.token(u32::try_from(id).ok()?)?;
    Some(escaped(token.piece))
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
                bail!("`{}` is not a token id: expected whole numbers from 0 to {}", escaped(&word), u32::MAX);
            }
        }
    }
    Ok(ids)
}

fn outside(tokenizer: &Tokenizer, id: u32) -> anyhow::Error {
    anyhow::anyhow!("the id {id} is outside the vocabulary, which has {} tokens", tokenizer.vocab_size())
}

fn shortened(text: &str) -> String {
    match text.char_indices().nth(PIECE_WIDTH) {
        Some(_) => text.chars().take(PIECE_WIDTH - 2).chain("..".chars()).collect(),
        None => text.to_owned(),
    }
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

    #[test]
    fn long_pieces_are_cut() {
        assert_eq!(shortened(&"é".repeat(30)), "é".repeat(30));
        assert_eq!(shortened(&"é".repeat(31)), "é".repeat(28) + "..");
    }
}
