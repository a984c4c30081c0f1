//! Filters for addresses and markup: `urlencode`, `striptags` and `xmlattr`.

use std::ops::Range;

use super::{CallArguments, is_set, iterate};
use crate::chat::jinja::budget::Budget;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::lexer::is_python_space;
use crate::chat::jinja::operators::escape_html;
use crate::chat::jinja::print::{push_escaped, to_text};
use crate::chat::jinja::text::{Text, TextBuilder};
use crate::chat::jinja::value::Value;

/// Quotes a text for an address, or pairs of names and values for its query.
pub(super) fn urlencode(value: &Value, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [] = arguments.bind("urlencode", [])?;
    let mut out = TextBuilder::new(budget)?;
    match value {
        Value::Dict(dict) => {
            budget.charge_items(dict.entries().len())?;
            for (index, (key, value)) in dict.entries().iter().enumerate() {
                push_query(index, key, value, &mut out, budget)?;
            }
        }
        Value::List(list) => {
            for (index, pair) in list.values().iter().enumerate() {
                match iterate(pair, budget)?.values() {
                    [key, value] => push_query(index, key, value, &mut out, budget)?,
                    other => {
                        let message = format!("urlencode: expected pairs, found a sequence of {}", other.len());
                        return Err(Failure::error(message));
                    }
                }
            }
        }
        other => push_quoted(other, false, &mut out, budget)?,
    }
    Ok(Value::Text(out.finish()))
}

fn push_query(
    index: usize,
    key: &Value,
    value: &Value,
    out: &mut TextBuilder<'_, '_>,
    budget: &Budget<'_>,
) -> Outcome<()> {
    if index > 0 {
        out.push("&", false)?;
    }
    push_quoted(key, true, out, budget)?;
    out.push("=", false)?;
    push_quoted(value, true, out, budget)
}

fn push_quoted(value: &Value, in_query: bool, out: &mut TextBuilder<'_, '_>, budget: &Budget<'_>) -> Outcome<()> {
    let text = to_text(value, budget)?;
    budget.charge_bytes(text.len().saturating_mul(3))?;
    push_escaped(&text, out, |c| match c {
        'a'..='z' | 'A'..='Z' | '0'..='9' | '_' | '.' | '-' | '~' => None,
        '/' if !in_query => None,
        ' ' if in_query => Some("+".to_owned()),
        c => Some(c.encode_utf8(&mut [0; 4]).bytes().map(|byte| format!("%{byte:02X}")).collect()),
    })
}

/// Writes the entries of a dictionary as attributes of an element. Entries that are `none` or undefined are left out.
pub(super) fn xmlattr(value: &Value, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [autospace] = arguments.bind("xmlattr", ["autospace"])?;
    let Value::Dict(dict) = value else {
        return Err(Failure::error(format!("xmlattr: expected a dictionary, found {}", value.type_name())));
    };
    let escaped = |value: &Value| {
        let text = to_text(value, budget)?;
        budget.charge_bytes(text.len())?;
        if text.is_markup { Ok(text) } else { escape_html(&text, budget) }
    };
    let mut out = TextBuilder::new(budget)?;
    let mut is_first = true;
    for (key, value) in dict.entries().iter().filter(|(_, value)| !matches!(value, Value::None | Value::Undefined(_))) {
        let name = to_text(key, budget)?;
        if name.str().contains(|c: char| is_python_space(c) || matches!(c, '/' | '>' | '=')) {
            return Err(Failure::error(format!("xmlattr: invalid character in attribute name {:?}", &*name.str())));
        }
        if !is_first || autospace.is_none() || is_set(&autospace) {
            out.push(" ", false)?;
        }
        is_first = false;
        out.push_text(&escaped(key)?)?;
        out.push("=\"", false)?;
        out.push_text(&escaped(value)?)?;
        out.push("\"", false)?;
    }
    Ok(Value::Text(out.finish()))
}

/// Removes comments and tags, makes runs of white space one space, and decodes the most common entities. The reference
/// implementation decodes all entities of HTML.
pub(super) fn striptags(value: &Value, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [] = arguments.bind("striptags", [])?;
    let text = to_text(value, budget)?;
    budget.charge_bytes(text.len().saturating_mul(4))?;
    let chars = text.str();
    let trusted = text.is_trusted();
    let mut plain = TextBuilder::new(budget)?;
    let mut is_between = false;
    let mut at = 0;
    while let Some(c) = chars[at..].chars().next() {
        if c == '<'
            && let Some(len) = tag_len(&chars[at..])
        {
            at += len;
            continue;
        }
        if c == '<' {
            // A tag that is not closed is text, to the end.
            push_words(&text, at..text.len(), trusted, &mut is_between, &mut plain)?;
            break;
        }
        let len = chars[at..].find('<').unwrap_or(chars.len() - at);
        push_words(&text, at..at + len, trusted, &mut is_between, &mut plain)?;
        at += len;
    }
    Ok(Value::Text(unescape(&plain.finish(), budget)?))
}

/// Returns the length of the comment or tag that a text begins with; `None` if it is not closed.
fn tag_len(text: &str) -> Option<usize> {
    match text.strip_prefix("<!--") {
        Some(comment) => comment.find("-->").map(|end| 4 + end + 3),
        None => text.find('>').map(|end| end + 1),
    }
}

/// Appends the words of a part of a text, with one space where white space was. `is_between` is set if white space came
/// last.
fn push_words(
    text: &Text,
    part: Range<usize>,
    trusted: bool,
    is_between: &mut bool,
    out: &mut TextBuilder<'_, '_>,
) -> Outcome<()> {
    let chars = text.str();
    let mut start = part.start;
    for word in chars[part].split(is_python_space) {
        if !word.is_empty() {
            if std::mem::take(is_between) && out.len() > 0 {
                out.push(" ", trusted)?;
            }
            out.push_slice(text, start..start + word.len())?;
        }
        start += word.len();
        if let Some(space) = chars[start..].chars().next().filter(|c| is_python_space(*c)) {
            *is_between = true;
            start += space.len_utf8();
        }
    }
    Ok(())
}

fn unescape(text: &Text, budget: &Budget<'_>) -> Outcome<Text> {
    let chars = text.str();
    let mut out = TextBuilder::new(budget)?;
    let mut copied = 0;
    for (at, _) in chars.match_indices('&').filter(|(at, _)| *at + 1 < chars.len()) {
        if let Some((decoded, len)) = entity(&chars[at + 1..]) {
            out.push_slice(text, copied..at)?;
            copied = at + 1 + len;
            out.push_char(decoded, text.slice(at..copied).is_trusted())?;
        }
    }
    out.push_slice(text, copied..text.len())?;
    Ok(out.finish())
}

/// Returns the character of the entity that follows an ampersand, and its length.
fn entity(text: &str) -> Option<(char, usize)> {
    const NAMES: [(&str, char); 6] =
        [("lt", '<'), ("gt", '>'), ("amp", '&'), ("quot", '"'), ("apos;", '\''), ("nbsp", '\u{A0}')];
    let with_end = |len: usize| len + usize::from(text[len..].starts_with(';'));
    if let Some(number) = text.strip_prefix('#') {
        let (digits, radix) = match number.strip_prefix(['x', 'X']) {
            Some(digits) => (digits, 16),
            None => (number, 10),
        };
        let count = digits.bytes().take(32).take_while(|digit| (*digit as char).is_digit(radix)).count();
        let code = (count > 0).then(|| u32::from_str_radix(&digits[..count], radix).unwrap_or(u32::MAX))?;
        let decoded = char::from_u32(code).filter(|c| *c != '\0').unwrap_or(char::REPLACEMENT_CHARACTER);
        return Some((decoded, with_end(text.len() - digits.len() + count)));
    }
    let (name, decoded) = NAMES.into_iter().find(|(name, _)| text.starts_with(name))?;
    Some((decoded, with_end(name.len())))
}
