//! Values as text: Python's `str` and `repr`, and `json.dumps` as the reference implementation offers it. Characters
//! that are copied keep their origin. Punctuation, escapes and the text of numbers from the request are untrusted.

use super::budget::Budget;
use super::failure::{Failure, Outcome};
use super::text::{Text, TextBuilder};
use super::value::{List, Sequence, Value};
use crate::unicode_categories::{Categories, LETTER, MARK, NUMBER, PUNCTUATION, SYMBOL};

/// Returns a value as Python's `str` prints it.
pub(super) fn to_text(value: &Value, budget: &Budget<'_>) -> Outcome<Text> {
    if let Value::Text(text) = value {
        return Ok(text.clone());
    }
    let mut out = TextBuilder::new(budget)?;
    print(value, &mut out)?;
    Ok(out.finish())
}

/// Appends a value as Python's `str` prints it.
pub(super) fn print(value: &Value, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    match value {
        Value::Undefined(_) => Ok(()),
        Value::Text(text) => out.push_text(text),
        other => repr(other, out),
    }
}

/// Appends a value as Python's `repr` prints it.
pub(super) fn repr(value: &Value, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    match value {
        Value::Undefined(_) => out.push("Undefined", false),
        Value::None => out.push("None", false),
        Value::Bool(value) => out.push(if *value { "True" } else { "False" }, false),
        Value::Int(value, trusted) => out.push(&value.to_string(), *trusted),
        Value::Float(value) => out.push(&float(*value), false),
        Value::Text(text) => repr_text(text, out),
        Value::List(list) => repr_list(list, out),
        Value::Dict(dict) => {
            out.push("{", false)?;
            for (index, (key, value)) in dict.entries().iter().enumerate() {
                out.push(if index > 0 { ", " } else { "" }, false)?;
                repr(key, out)?;
                out.push(": ", false)?;
                repr(value, out)?;
            }
            out.push("}", false)
        }
        other => out.push(&format!("<{}>", other.type_name()), false),
    }
}

fn repr_list(list: &List, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    let (open, close) = match list.kind {
        Sequence::List => ("[", "]"),
        Sequence::Tuple => ("(", if list.len() == 1 { ",)" } else { ")" }),
        Sequence::View => ("dict_items([", "])"),
        Sequence::Generator => return out.push("<generator object>", false),
    };
    out.push(open, false)?;
    for (index, item) in list.values().iter().enumerate() {
        out.push(if index > 0 { ", " } else { "" }, false)?;
        repr(item, out)?;
    }
    out.push(close, false)
}

/// Appends text with some characters replaced: `escape` returns the escape of a character that needs one.
pub(super) fn push_escaped(
    text: &Text,
    out: &mut TextBuilder<'_, '_>,
    escape: impl Fn(char) -> Option<String>,
) -> Outcome<()> {
    let chars = text.str();
    let mut copied = 0;
    for (at, c) in chars.char_indices() {
        if let Some(escaped) = escape(c) {
            out.push_slice(text, copied..at)?;
            out.push(&escaped, false)?;
            copied = at + c.len_utf8();
        }
    }
    out.push_slice(text, copied..text.len())
}

fn repr_text(text: &Text, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    let quote = if text.str().contains('\'') && !text.str().contains('"') { '"' } else { '\'' };
    out.push_char(quote, false)?;
    push_escaped(text, out, |c| match c {
        '\n' => Some("\\n".into()),
        '\r' => Some("\\r".into()),
        '\t' => Some("\\t".into()),
        c if c == '\\' || c == quote => Some(format!("\\{c}")),
        ' '..='~' => None,
        c if is_printable(c) => None,
        c => Some(match c as u32 {
            code @ 0..=0xFF => format!("\\x{code:02x}"),
            code @ 0x100..=0xFFFF => format!("\\u{code:04x}"),
            code => format!("\\U{code:08x}"),
        }),
    })?;
    out.push_char(quote, false)
}

/// Python's `str.isprintable` for one character.
pub(super) fn is_printable(c: char) -> bool {
    c == ' ' || Categories::get().of(c) & (LETTER | NUMBER | MARK | PUNCTUATION | SYMBOL) != 0
}

/// Returns a floating-point number as Python prints it: the shortest digits that give the same number.
pub(super) fn float(value: f64) -> String {
    if value.is_nan() {
        return "nan".into();
    }
    if value.is_infinite() {
        return if value > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let scientific = format!("{value:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{value}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

/// Layout of a JSON text.
pub(super) struct JsonLayout {
    pub(super) indent: Option<Text>,
    pub(super) item_separator: Text,
    pub(super) key_separator: Text,
    pub(super) ensure_ascii: bool,
    pub(super) sort_keys: bool,
}

/// Appends a value as Python's `json.dumps` writes it.
pub(super) fn json(value: &Value, layout: &JsonLayout, depth: usize, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    match value {
        Value::None => out.push("null", false),
        Value::Bool(value) => out.push(if *value { "true" } else { "false" }, false),
        Value::Float(value) if value.is_nan() => out.push("NaN", false),
        Value::Float(value) if value.is_infinite() => {
            out.push(if *value > 0.0 { "Infinity" } else { "-Infinity" }, false)
        }
        Value::Int(..) | Value::Float(_) => repr(value, out),
        Value::Text(text) => json_text(text, layout.ensure_ascii, out),
        Value::List(list) if matches!(list.kind, Sequence::List | Sequence::Tuple) => {
            out.push("[", false)?;
            for (index, item) in list.values().iter().enumerate() {
                if index > 0 {
                    out.push_text(&layout.item_separator)?;
                }
                new_line(layout, depth + 1, out)?;
                json(item, layout, depth + 1, out)?;
            }
            if list.len() > 0 {
                new_line(layout, depth, out)?;
            }
            out.push("]", false)
        }
        Value::Dict(dict) => {
            let mut entries: Vec<&(Value, Value)> = dict.entries().iter().collect();
            if layout.sort_keys {
                let key = |value: &Value| match value {
                    Value::Text(text) => Some(text.str().to_owned()),
                    _ => None,
                };
                entries.sort_by_cached_key(|(name, _)| key(name));
            }
            out.push("{", false)?;
            for (index, (name, value)) in entries.iter().enumerate() {
                if index > 0 {
                    out.push_text(&layout.item_separator)?;
                }
                new_line(layout, depth + 1, out)?;
                match name {
                    Value::Text(text) => json_text(text, layout.ensure_ascii, out)?,
                    Value::None | Value::Bool(_) | Value::Int(..) | Value::Float(_) => {
                        out.push("\"", false)?;
                        json(name, layout, depth, out)?;
                        out.push("\"", false)?;
                    }
                    other => {
                        let message = "keys must be str, int, float, bool or None, not";
                        return Err(Failure::error(format!("tojson: {message} {}", other.type_name())));
                    }
                }
                out.push_text(&layout.key_separator)?;
                json(value, layout, depth + 1, out)?;
            }
            if !entries.is_empty() {
                new_line(layout, depth, out)?;
            }
            out.push("}", false)
        }
        other => Err(Failure::error(format!("tojson: Object of type {} is not JSON serializable", other.type_name()))),
    }
}

fn new_line(layout: &JsonLayout, depth: usize, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    if let Some(indent) = &layout.indent {
        out.push("\n", false)?;
        out.push_repeated(indent, depth)?;
    }
    Ok(())
}

fn json_text(text: &Text, ensure_ascii: bool, out: &mut TextBuilder<'_, '_>) -> Outcome<()> {
    out.push("\"", false)?;
    push_escaped(text, out, |c| match c {
        '"' => Some("\\\"".into()),
        '\\' => Some("\\\\".into()),
        ' '..='~' => None,
        '\n' => Some("\\n".into()),
        '\r' => Some("\\r".into()),
        '\t' => Some("\\t".into()),
        '\u{8}' => Some("\\b".into()),
        '\u{c}' => Some("\\f".into()),
        c if c < ' ' => Some(format!("\\u{:04x}", c as u32)),
        c if ensure_ascii && c >= '\u{7f}' => {
            Some(c.encode_utf16(&mut [0; 2]).iter().map(|unit| format!("\\u{unit:04x}")).collect())
        }
        _ => None,
    })?;
    out.push("\"", false)
}
