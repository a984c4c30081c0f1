//! Functions for templates: those that the reference implementation adds to Jinja, and printing like Python's. None of
//! them reads a file, the environment or a clock.

use std::fmt::Write;

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, Output, State, Value};

use super::text_origin::{marked_like, unmarked};

/// Replaces `{% generation %}` and `{% endgeneration %}`, which mark the assistant's text for training. They print
/// nothing, but take part in white-space control like every block tag, so each becomes a condition with the same
/// dashes.
pub(super) fn without_generation_tags(source: &str) -> String {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let Some(end) = rest[start + 2..].find("%}").map(|end| start + 2 + end) else { break };
        let inner = &rest[start + 2..end];
        let word = inner.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let stand_in = match word {
            "generation" => Some("if true"),
            "endgeneration" => Some("endif"),
            _ => None,
        };
        out.push_str(&rest[..start + 2]);
        match stand_in {
            Some(stand_in) => out.push_str(&inner.replacen(word, stand_in, 1)),
            None => out.push_str(inner),
        }
        out.push_str("%}");
        rest = &rest[end + 2..];
    }
    out.push_str(rest);
    out
}

/// Whether Python can iterate over a value; not over `None`.
pub(super) fn is_iterable(value: &Value) -> bool {
    use ValueKind::{Iterable, Map, Seq, String, Undefined};
    matches!(value.kind(), Seq | Iterable | Map | String | Undefined)
}

/// Prints a value as Python's `str` does: `None`, `True`, lists and dictionaries with quoted strings.
pub(super) fn format_like_python(out: &mut Output<'_>, _: &mut State<'_, '_>, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined => Ok(()),
        ValueKind::String => out.write_str(value.as_str().unwrap_or_default()).map_err(Error::from),
        _ => {
            let mut text = String::new();
            python_repr(value, 0, &mut text)?;
            out.write_str(&text).map_err(Error::from)
        }
    }
}

/// Maximum nesting of printed values. Values from JSON nest at most half as deep, but a template that wraps a list in a
/// loop adds one level per iteration.
const MAX_DEPTH: usize = 256;

fn check_depth(depth: usize, function: &str) -> Result<(), Error> {
    if depth <= MAX_DEPTH {
        return Ok(());
    }
    let message = format!("{function}: lists and dictionaries nest deeper than {MAX_DEPTH} levels");
    Err(Error::new(ErrorKind::InvalidOperation, message))
}

fn python_repr(value: &Value, depth: usize, out: &mut String) -> Result<(), Error> {
    check_depth(depth, "printing")?;
    match value.kind() {
        ValueKind::None => out.push_str("None"),
        ValueKind::Bool => out.push_str(if value.is_true() { "True" } else { "False" }),
        ValueKind::String => {
            let text = value.as_str().unwrap_or_default();
            let plain = |quote: char| text.chars().any(|c| unmarked(c) == quote);
            let quote = if plain('\'') && !plain('"') { '"' } else { '\'' };
            out.push(quote);
            for c in text.chars() {
                match unmarked(c) {
                    '\n' => out.push_str("\\n"),
                    '\r' => out.push_str("\\r"),
                    '\t' => out.push_str("\\t"),
                    p if p == '\\' || p == quote => out.extend(['\\', c]),
                    _ => out.push(c),
                }
            }
            out.push(quote);
        }
        ValueKind::Seq | ValueKind::Iterable => {
            out.push('[');
            for (index, item) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                python_repr(&item, depth + 1, out)?;
            }
            out.push(']');
        }
        ValueKind::Map => {
            out.push('{');
            for (index, key) in value.try_iter()?.enumerate() {
                if index > 0 {
                    out.push_str(", ");
                }
                python_repr(&key, depth + 1, out)?;
                out.push_str(": ");
                python_repr(&value.get_item(&key)?, depth + 1, out)?;
            }
            out.push('}');
        }
        _ => {
            let _ = write!(out, "{value}");
        }
    }
    Ok(())
}

/// A change of case.
#[derive(Clone, Copy)]
enum Case {
    Upper,
    Lower,
    Title,
    Capitalize,
}

impl Case {
    fn of_name(name: &str) -> Option<Case> {
        Some(match name {
            "upper" => Case::Upper,
            "lower" => Case::Lower,
            "title" => Case::Title,
            "capitalize" => Case::Capitalize,
            _ => return None,
        })
    }

    /// Changes the case of a text. A marked letter changes like the unmarked one, and keeps its mark.
    fn apply(self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        let mut begins = true;
        for c in text.chars() {
            let plain = unmarked(c);
            let upper = match self {
                Case::Upper => true,
                Case::Lower => false,
                Case::Title | Case::Capitalize => begins,
            };
            begins = matches!(self, Case::Title) && !plain.is_alphabetic();
            if upper {
                out.extend(plain.to_uppercase().map(|changed| marked_like(c, changed)));
            } else {
                out.extend(plain.to_lowercase().map(|changed| marked_like(c, changed)));
            }
        }
        out
    }
}

/// Adds filters: `upper`, `lower`, `title`, `capitalize` and `dictsort` ignore marks; `tojson`, `string` and `pprint`
/// print like Python, to a bounded depth.
pub(super) fn add_filters(environment: &mut Environment<'_>) {
    for name in ["upper", "lower", "title", "capitalize"] {
        if let Some(case) = Case::of_name(name) {
            environment.add_filter(name, move |text: String| case.apply(&text));
        }
    }
    environment.add_filter("tojson", tojson);
    for name in ["string", "pprint"] {
        environment.add_filter(name, move |value: &Value| to_text(value, name == "pprint"));
    }
    environment.add_filter("dictsort", dictsort);
}

/// Returns a value as Python's `str` prints it, or with `quoted`, as `repr` does.
fn to_text(value: &Value, quoted: bool) -> Result<Value, Error> {
    if value.kind() == ValueKind::String && !quoted {
        return Ok(value.clone());
    }
    let mut text = String::new();
    python_repr(value, 0, &mut text)?;
    Ok(Value::from(text))
}

/// Calls a method of Python's strings, lists and dictionaries.
pub(super) fn call_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<Value, Error> {
    match (value.as_str(), Case::of_name(method)) {
        (Some(text), Some(case)) if arguments.is_empty() => Ok(Value::from(case.apply(text))),
        _ => minijinja_contrib::pycompat::unknown_method_callback(state, value, method, arguments),
    }
}

/// Returns the pairs of a dictionary, sorted by key, or by value with `by="value"`.
fn dictsort(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let case_sensitive = options.get::<Option<bool>>("case_sensitive")?.unwrap_or(false);
    let by_value = options.get::<Option<String>>("by")?.as_deref() == Some("value");
    let reverse = options.get::<Option<bool>>("reverse")?.unwrap_or(false);
    options.assert_all_used()?;
    let mut pairs = Vec::new();
    for key in value.try_iter()? {
        let item = value.get_item(&key)?;
        let by = if by_value { &item } else { &key };
        let order = match by.as_str() {
            Some(text) => {
                let plain: String = text.chars().map(unmarked).collect();
                Value::from(if case_sensitive { plain } else { plain.to_lowercase() })
            }
            None => by.clone(),
        };
        pairs.push((order, Value::from(vec![key, item])));
    }
    pairs.sort_by(|(a, _), (b, _)| if reverse { b.cmp(a) } else { a.cmp(b) });
    Ok(pairs.into_iter().map(|(_, pair)| pair).collect())
}

/// The layout of a JSON text.
struct Layout {
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// Python's `json.dumps` as the reference implementation offers it to templates: no HTML escapes, `indent`,
/// `separators`, `sort_keys` and `ensure_ascii` as options.
fn tojson(value: &Value, options: Kwargs) -> Result<Value, Error> {
    let indent = match options.get::<Option<Value>>("indent")? {
        None => None,
        Some(value) if value.is_none() || value.is_undefined() => None,
        Some(value) => Some(match value.as_str() {
            Some(text) => text.to_owned(),
            None => " ".repeat(value.as_usize().unwrap_or(0).min(64)),
        }),
    };
    let separators: Vec<String> = match options.get::<Option<Value>>("separators")? {
        Some(pair) if !pair.is_none() => {
            pair.try_iter()?.map(|part| part.as_str().unwrap_or_default().into()).collect()
        }
        _ => vec![if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()],
    };
    let [item, key] = <[String; 2]>::try_from(separators)
        .map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two strings"))?;
    let layout = Layout {
        indent,
        item_separator: item,
        key_separator: key,
        ensure_ascii: options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
        sort_keys: options.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    options.assert_all_used()?;
    let mut out = String::new();
    write_json(value, &layout, 0, &mut out)?;
    Ok(Value::from(out))
}

fn write_json(value: &Value, layout: &Layout, depth: usize, out: &mut String) -> Result<(), Error> {
    check_depth(depth, "tojson")?;
    let new_line = |depth: usize, out: &mut String| {
        if let Some(indent) = &layout.indent {
            out.push('\n');
            out.push_str(&indent.repeat(depth));
        }
    };
    match value.kind() {
        ValueKind::None | ValueKind::Undefined => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::String => write_json_string(value.as_str().unwrap_or_default(), layout.ensure_ascii, out),
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if layout.sort_keys {
                keys.sort();
            }
            out.push('{');
            let count = keys.len();
            for (index, key) in keys.iter().enumerate() {
                new_line(depth + 1, out);
                match key.as_str() {
                    Some(text) => write_json_string(text, layout.ensure_ascii, out),
                    None => write_json_string(&key.to_string(), layout.ensure_ascii, out),
                }
                out.push_str(&layout.key_separator);
                write_json(&value.get_item(key)?, layout, depth + 1, out)?;
                if index + 1 < count {
                    out.push_str(&layout.item_separator);
                }
            }
            if count > 0 {
                new_line(depth, out);
            }
            out.push('}');
        }
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                new_line(depth + 1, out);
                write_json(item, layout, depth + 1, out)?;
                if index + 1 < items.len() {
                    out.push_str(&layout.item_separator);
                }
            }
            if !items.is_empty() {
                new_line(depth, out);
            }
            out.push(']');
        }
        ValueKind::Number => {
            let _ = write!(out, "{value}");
        }
        _ => return Err(Error::new(ErrorKind::InvalidOperation, "tojson: not a JSON value")),
    }
    Ok(())
}

/// Writes a JSON string. A marked character is escaped like the unmarked one, and keeps its mark.
fn write_json_string(text: &str, ensure_ascii: bool, out: &mut String) {
    out.push('"');
    for c in text.chars() {
        match unmarked(c) {
            '"' | '\\' => out.extend(['\\', c]),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            plain if plain < ' ' => {
                let _ = write!(out, "\\u{:04x}", plain as u32);
            }
            plain if ensure_ascii && !plain.is_ascii() => {
                for unit in plain.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            _ => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_empty_conditions() {
        let source = "{%- generation -%}a{% endgeneration %}\n{% if generation %}b{% endif %}";
        assert_eq!(without_generation_tags(source), "{%- if true -%}a{% endif %}\n{% if generation %}b{% endif %}");
    }
}
