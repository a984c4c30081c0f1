//! Methods of strings. A result that is a part of the string shares it; every copied character keeps its origin.

use std::ops::Range;

use super::case::{Case, change_case};
use super::{CallArguments, count_argument, int_argument, is_set, iterate, text_argument};
use crate::chat::jinja::budget::{Budget, collect, push};
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::lexer::is_python_space;
use crate::chat::jinja::print::is_printable;
use crate::chat::jinja::text::{Text, TextBuilder};
use crate::chat::jinja::value::{Sequence, Value};
use crate::unicode_categories::{Categories, LETTER, NUMBER};

pub(super) const TEXT_METHODS: [&str; 42] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];

pub(super) fn call(text: &Text, name: &str, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    // Every method reads the string at least once, except those that look at its ends only.
    if !matches!(name, "startswith" | "endswith" | "removeprefix" | "removesuffix" | "strip" | "lstrip" | "rstrip") {
        budget.charge_bytes(text.len())?;
    }
    match name {
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = arguments.bind(name, ["chars"])?;
            let chars = text_argument(chars, name)?;
            Ok(Value::Text(strip(text, chars.as_ref(), name != "rstrip", name != "lstrip", budget)?))
        }
        "split" | "rsplit" => {
            let [separator, limit] = arguments.bind(name, ["sep", "maxsplit"])?;
            let limit = int_argument(limit, name)?.and_then(|limit| usize::try_from(limit).ok());
            split(text, text_argument(separator, name)?, limit, name == "rsplit", budget)
        }
        "splitlines" => {
            let [keep_ends] = arguments.bind(name, ["keepends"])?;
            let ranges = lines(&text.str(), is_set(&keep_ends), budget)?;
            slices(text, ranges, Sequence::List, budget)
        }
        "partition" | "rpartition" => {
            let [separator] = arguments.bind(name, ["sep"])?;
            let separator = required(text_argument(separator, name)?, name)?;
            if separator.len() == 0 {
                return Err(Failure::error("empty separator"));
            }
            let found = if name == "partition" {
                text.str().find(&*separator.str())
            } else {
                text.str().rfind(&*separator.str())
            };
            let (whole, len) = (text.len(), separator.len());
            let ranges = match found {
                Some(at) => [0..at, at..at + len, at + len..whole],
                None if name == "partition" => [0..whole, whole..whole, whole..whole],
                None => [0..0, 0..0, 0..whole],
            };
            slices(text, ranges.to_vec(), Sequence::Tuple, budget)
        }
        "removeprefix" | "removesuffix" => {
            let [part] = arguments.bind(name, ["part"])?;
            let part = required(text_argument(part, name)?, name)?;
            budget.charge_bytes(part.len())?;
            let (chars, removed) = (text.str(), part.str());
            let range = match name {
                "removeprefix" if chars.starts_with(&*removed) => part.len()..text.len(),
                "removesuffix" if chars.ends_with(&*removed) => 0..text.len() - part.len(),
                _ => 0..text.len(),
            };
            Ok(Value::Text(text.slice(range)))
        }
        "startswith" | "endswith" => {
            let [part, start, end] = arguments.bind(name, ["part", "start", "end"])?;
            let (text, _) = bounded(text, start, end, budget)?;
            let parts = match part {
                Some(Value::List(list)) => collect(list.values().iter().cloned())?,
                Some(part) => vec![part],
                None => Vec::new(),
            };
            for part in parts {
                let part = required(text_argument(Some(part), name)?, name)?;
                budget.charge_bytes(part.len())?;
                let (chars, part) = (text.str(), part.str());
                if if name == "startswith" { chars.starts_with(&*part) } else { chars.ends_with(&*part) } {
                    return Ok(Value::Bool(true));
                }
            }
            Ok(Value::Bool(false))
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [part, start, end] = arguments.bind(name, ["sub", "start", "end"])?;
            let part = required(text_argument(part, name)?, name)?;
            let (text, skipped) = bounded(text, start, end, budget)?;
            find(&text, skipped, &part, name)
        }
        "replace" => {
            let [old, new, count] = arguments.bind(name, ["old", "new", "count"])?;
            let old = required(text_argument(old, name)?, name)?;
            let new = required(text_argument(new, name)?, name)?;
            let count = int_argument(count, name)?.and_then(|count| usize::try_from(count).ok());
            Ok(Value::Text(replace(text, &old, &new, count, budget)?))
        }
        "join" => {
            let [items] = arguments.bind(name, ["iterable"])?;
            let items = iterate(&required(items, name)?, budget)?;
            let mut out = TextBuilder::new(budget)?;
            for (index, item) in items.values().iter().enumerate() {
                let Value::Text(item) = item else {
                    let found = item.type_name();
                    return Err(Failure::error(format!("sequence item {index}: expected str instance, {found} found")));
                };
                if index > 0 {
                    out.push_text(text)?;
                }
                out.push_text(item)?;
            }
            Ok(Value::Text(out.finish()))
        }
        "upper" | "lower" | "casefold" | "title" | "capitalize" | "swapcase" => {
            let [] = arguments.bind(name, [])?;
            let case = match name {
                "upper" => Case::Upper,
                "title" => Case::Title,
                "capitalize" => Case::Capitalize,
                "swapcase" => Case::Swap,
                _ => Case::Lower,
            };
            let mut out = TextBuilder::new(budget)?;
            change_case(text, case, &mut out)?;
            Ok(Value::Text(out.finish()))
        }
        "center" | "ljust" | "rjust" => {
            let [width, fill] = arguments.bind(name, ["width", "fillchar"])?;
            let width = count_argument(width, 0, name)?;
            let fill = text_argument(fill, name)?;
            let count = text.str().chars().count();
            let missing = width.saturating_sub(count);
            let left = match name {
                "ljust" => 0,
                "rjust" => missing,
                // Python puts the odd space on the left if the width is odd.
                _ => missing / 2 + (missing & width & 1),
            };
            Ok(Value::Text(pad(text, left, missing - left, fill, budget)?))
        }
        "zfill" => {
            let [width] = arguments.bind(name, ["width"])?;
            let missing = count_argument(width, 0, name)?.saturating_sub(text.str().chars().count());
            let sign = usize::from(text.str().starts_with(['+', '-']));
            let zero = Text::new("0", text.is_trusted(), budget)?;
            let mut out = TextBuilder::new(budget)?;
            out.push_slice(text, 0..sign)?;
            out.push_repeated(&zero, missing)?;
            out.push_slice(text, sign..text.len())?;
            Ok(Value::Text(out.finish()))
        }
        "expandtabs" => {
            let [size] = arguments.bind(name, ["tabsize"])?;
            expand_tabs(text, count_argument(size, 8, name)?, budget)
        }
        other => {
            let [] = arguments.bind(other, [])?;
            Ok(Value::Bool(has_property(&text.str(), other)))
        }
    }
}

pub(super) fn required<T>(value: Option<T>, function: &str) -> Outcome<T> {
    value.ok_or_else(|| Failure::error(format!("{function}: an argument is missing")))
}

fn slices(text: &Text, ranges: Vec<Range<usize>>, kind: Sequence, budget: &Budget<'_>) -> Outcome<Value> {
    budget.charge_items(ranges.len())?;
    let held = budget.hold(ranges.len() * size_of::<Value>())?;
    let values = collect(ranges.into_iter().map(|range| Value::Text(text.slice(range))))?;
    drop(held);
    Value::sequence(values, kind, budget)
}

/// Strips white space, or the given characters, from the ends of a string.
pub(super) fn strip(
    text: &Text,
    chars: Option<&Text>,
    at_start: bool,
    at_end: bool,
    budget: &Budget<'_>,
) -> Outcome<Text> {
    let set = chars.map(|chars| collect(chars.str().chars())).transpose()?;
    let is_stripped = |c: char| match &set {
        Some(set) => set.contains(&c),
        None => is_python_space(c),
    };
    let content = text.str();
    let kept = if at_end { content.trim_end_matches(is_stripped) } else { &content };
    let start = if at_start { kept.len() - kept.trim_start_matches(is_stripped).len() } else { 0 };
    let cost = set.as_ref().map_or(1, |set| set.len() / 8 + 1);
    budget.charge_bytes((text.len() - kept.len() + start).saturating_mul(cost))?;
    Ok(text.slice(start..kept.len()))
}

fn split(
    text: &Text,
    separator: Option<Text>,
    limit: Option<usize>,
    from_end: bool,
    budget: &Budget<'_>,
) -> Outcome<Value> {
    let content = text.str();
    let limit = limit.unwrap_or(usize::MAX);
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let Some(separator) = separator else {
        let count = content.chars().filter(|c| is_python_space(*c)).count();
        let _held = budget.hold((count + 1) * size_of::<Range<usize>>())?;
        return slices(text, words(&content, limit, from_end)?, Sequence::List, budget);
    };
    if separator.len() == 0 {
        return Err(Failure::error("empty separator"));
    }
    let separator = separator.str();
    let count = content.matches(&*separator).count();
    let held = budget.hold(count.saturating_mul(size_of::<Range<usize>>()))?;
    if from_end {
        let mut end = content.len();
        for (at, found) in content.rmatch_indices(&*separator).take(limit) {
            push(&mut ranges, at + found.len()..end)?;
            end = at;
        }
        push(&mut ranges, 0..end)?;
        ranges.reverse();
    } else {
        let mut start = 0;
        for (at, found) in content.match_indices(&*separator).take(limit) {
            push(&mut ranges, start..at)?;
            start = at + found.len();
        }
        push(&mut ranges, start..content.len())?;
    }
    drop(held);
    slices(text, ranges, Sequence::List, budget)
}

/// Returns the words between white space; after `limit` splits the rest is one piece.
fn words(text: &str, limit: usize, from_end: bool) -> Outcome<Vec<Range<usize>>> {
    let mut ranges: Vec<Range<usize>> = Vec::new();
    let (mut start, mut end) = (0, text.len());
    loop {
        start = text.len() - text[start..].trim_start_matches(is_python_space).len();
        start = start.min(end);
        end = start + text[start..end].trim_end_matches(is_python_space).len();
        if start == end {
            break;
        }
        let rest = &text[start..end];
        let space = if from_end {
            rest.char_indices().rfind(|(_, c)| is_python_space(*c)).map(|(at, c)| at + c.len_utf8())
        } else {
            rest.find(is_python_space)
        };
        match space {
            Some(at) if ranges.len() < limit && from_end => {
                push(&mut ranges, start + at..end)?;
                end = start + at;
            }
            Some(at) if ranges.len() < limit => {
                push(&mut ranges, start..start + at)?;
                start += at;
                // The end stays stripped, because Python strips it only for the last word.
            }
            _ => {
                let whole_end = if from_end || ranges.len() < limit { end } else { text.len() };
                push(&mut ranges, start..whole_end)?;
                break;
            }
        }
    }
    if from_end {
        ranges.reverse();
    }
    Ok(ranges)
}

/// Returns the lines as Python's `splitlines` divides a text.
pub(super) fn lines(text: &str, keep_ends: bool, budget: &Budget<'_>) -> Outcome<Vec<Range<usize>>> {
    let is_end = |c: char| {
        matches!(c, '\n' | '\r' | '\u{b}' | '\u{c}' | '\u{1c}'..='\u{1e}' | '\u{85}' | '\u{2028}' | '\u{2029}')
    };
    let count = text.chars().filter(|c| is_end(*c)).count();
    budget.charge_items(count)?;
    let _held = budget.hold((count + 1) * size_of::<Range<usize>>())?;
    let mut ranges = Vec::new();
    let mut start = 0;
    while start < text.len() {
        let Some((at, end)) = text[start..].char_indices().find(|(_, c)| is_end(*c)) else {
            push(&mut ranges, start..text.len())?;
            break;
        };
        let at = start + at;
        let length = if text[at..].starts_with("\r\n") { 2 } else { end.len_utf8() };
        push(&mut ranges, start..if keep_ends { at + length } else { at })?;
        start = at + length;
    }
    Ok(ranges)
}

/// Returns the part of a string between two character indexes, and the number of characters before it.
fn bounded(text: &Text, start: Option<Value>, end: Option<Value>, budget: &Budget<'_>) -> Outcome<(Text, usize)> {
    if start.is_none() && end.is_none() {
        return Ok((text.clone(), 0));
    }
    budget.charge_bytes(text.len())?;
    let chars = text.str();
    let count = chars.chars().count() as i128;
    let place = |bound: Option<i128>, default: i128| {
        let bound = bound.unwrap_or(default);
        let index = (if bound < 0 { bound.saturating_add(count) } else { bound }).clamp(0, count) as usize;
        chars.char_indices().nth(index).map_or(text.len(), |(at, _)| at)
    };
    let start = place(int_argument(start, "start")?, 0);
    let end = place(int_argument(end, "end")?, count);
    Ok((text.slice(start..end.max(start)), chars[..start].chars().count()))
}

fn find(text: &Text, skipped: usize, part: &Text, name: &str) -> Outcome<Value> {
    let (chars, part) = (text.str(), part.str());
    if name == "count" {
        let count = if part.is_empty() { chars.chars().count() + 1 } else { chars.matches(&*part).count() };
        return Ok(Value::Int(count as i128, false));
    }
    let found = if name.starts_with('r') { chars.rfind(&*part) } else { chars.find(&*part) };
    match found {
        Some(at) => Ok(Value::Int((skipped + chars[..at].chars().count()) as i128, false)),
        None if name.ends_with("index") => Err(Failure::error("substring not found")),
        None => Ok(Value::Int(-1, true)),
    }
}

pub(super) fn replace(text: &Text, old: &Text, new: &Text, count: Option<usize>, budget: &Budget<'_>) -> Outcome<Text> {
    budget.charge_bytes(text.len())?;
    let (content, old) = (text.str(), old.str());
    if !content.contains(&*old) {
        return Ok(text.clone());
    }
    let mut out = TextBuilder::new(budget)?;
    let mut copied = 0;
    for (at, found) in content.match_indices(&*old).take(count.unwrap_or(usize::MAX)) {
        out.push_slice(text, copied..at)?;
        out.push_text(new)?;
        copied = at + found.len();
    }
    out.push_slice(text, copied..text.len())?;
    Ok(out.finish())
}

/// Pads a string at both ends.
pub(super) fn pad(text: &Text, left: usize, right: usize, fill: Option<Text>, budget: &Budget<'_>) -> Outcome<Text> {
    let fill = match fill {
        Some(fill) => fill,
        None => Text::new(" ", text.is_trusted(), budget)?,
    };
    let mut out = TextBuilder::new(budget)?;
    out.push_repeated(&fill, left)?;
    out.push_text(text)?;
    out.push_repeated(&fill, right)?;
    Ok(out.finish())
}

fn expand_tabs(text: &Text, size: usize, budget: &Budget<'_>) -> Outcome<Value> {
    let space = Text::new(" ", text.is_trusted(), budget)?;
    let mut out = TextBuilder::new(budget)?;
    let mut column = 0;
    for (at, c) in text.str().char_indices() {
        if c == '\t' {
            let count = if size == 0 { 0 } else { size - column % size };
            out.push_repeated(&space, count)?;
            column += count;
        } else {
            out.push_slice(text, at..at + c.len_utf8())?;
            column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
        }
    }
    Ok(Value::Text(out.finish()))
}

/// Python's `isalpha` and the like: whether the string has characters, and all have the property.
fn has_property(text: &str, name: &str) -> bool {
    let categories = Categories::get();
    let is = |c: char, flags: u8| categories.of(c) & flags != 0;
    let all = |property: &dyn Fn(char) -> bool| !text.is_empty() && text.chars().all(property);
    match name {
        "isalpha" => all(&|c| is(c, LETTER)),
        "isalnum" => all(&|c| is(c, LETTER | NUMBER)),
        "isdecimal" | "isdigit" => all(&|c| c.is_ascii_digit() || (!c.is_ascii() && c.is_numeric() && is(c, NUMBER))),
        "isnumeric" => all(&char::is_numeric),
        "isspace" => all(&is_python_space),
        "isascii" => text.is_ascii(),
        "isprintable" => text.chars().all(is_printable),
        "islower" => text.chars().any(char::is_lowercase) && !text.chars().any(char::is_uppercase),
        "isupper" => text.chars().any(char::is_uppercase) && !text.chars().any(char::is_lowercase),
        // istitle: an upper-case letter begins each run of letters.
        _ => {
            let mut begins = true;
            let mut found = false;
            for c in text.chars() {
                if c.is_uppercase() != (begins && c.is_alphabetic()) && c.is_alphabetic() {
                    return false;
                }
                found |= c.is_uppercase();
                begins = !c.is_alphabetic();
            }
            found
        }
    }
}
