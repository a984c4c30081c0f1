//! Filters: `value | name(arguments)`. This file has the table and the filters of text and numbers.

use super::case::{Case, change_case};
use super::text_methods::{lines, pad, replace, required, strip};
use super::wordwrap::wordwrap;
use super::{CallArguments, count_argument, int_argument, is_set, text_argument, web_filters};
use crate::chat::jinja::budget::Budget;
use crate::chat::jinja::evaluate::Evaluator;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::operators::{defined, escape_html};
use crate::chat::jinja::print::{self, JsonLayout, to_text};
use crate::chat::jinja::text::{Text, TextBuilder};
use crate::chat::jinja::value::{Sequence, Value};

const FILTERS: [&str; 51] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub(super) fn is_filter(name: &str) -> bool {
    FILTERS.contains(&name)
}

impl Evaluator<'_, '_, '_> {
    pub(in crate::chat::jinja) fn filter(
        &mut self,
        name: &str,
        value: Value,
        arguments: CallArguments,
    ) -> Outcome<Value> {
        let budget = self.budget;
        match name {
            "default" | "d" => {
                let [default, for_false] = arguments.bind(name, ["default_value", "boolean"])?;
                if value.is_undefined() || (is_set(&for_false) && !value.is_true()) {
                    return match default {
                        Some(default) => Ok(default),
                        None => Value::text("", true, budget),
                    };
                }
                Ok(value)
            }
            "string" => {
                let [] = arguments.bind(name, [])?;
                Ok(Value::Text(to_text(&value, budget)?))
            }
            "safe" => {
                let [] = arguments.bind(name, [])?;
                Ok(Value::Text(to_text(&value, budget)?.with_markup(true)))
            }
            "escape" | "e" | "forceescape" => {
                let [] = arguments.bind(name, [])?;
                let text = to_text(&value, budget)?;
                if text.is_markup && name != "forceescape" {
                    return Ok(Value::Text(text));
                }
                Ok(Value::Text(escape_html(&text, budget)?.with_markup(true)))
            }
            "pprint" => {
                let [] = arguments.bind(name, [])?;
                let mut out = TextBuilder::new(budget)?;
                print::repr(&value, &mut out)?;
                Ok(Value::Text(out.finish()))
            }
            "upper" | "lower" | "title" | "capitalize" => {
                let [] = arguments.bind(name, [])?;
                let case = match name {
                    "upper" => Case::Upper,
                    "lower" => Case::Lower,
                    "title" => Case::Words,
                    _ => Case::Capitalize,
                };
                let text = to_text(&value, budget)?;
                budget.charge_bytes(text.len())?;
                let mut out = TextBuilder::new(budget)?;
                change_case(&text, case, &mut out)?;
                Ok(Value::Text(out.finish()))
            }
            "trim" => {
                let [chars] = arguments.bind(name, ["chars"])?;
                let chars = text_argument(chars, name)?;
                Ok(Value::Text(strip(&to_text(&value, budget)?, chars.as_ref(), true, true, budget)?))
            }
            "replace" => {
                let [old, new, count] = arguments.bind(name, ["old", "new", "count"])?;
                let old = to_text(&required(old, name)?, budget)?;
                let new = to_text(&required(new, name)?, budget)?;
                let count = int_argument(count, name)?.and_then(|count| usize::try_from(count).ok());
                Ok(Value::Text(replace(&to_text(&value, budget)?, &old, &new, count, budget)?.with_markup(false)))
            }
            "indent" => {
                let [width, first, blank] = arguments.bind(name, ["width", "first", "blank"])?;
                let text = to_text(&value, budget)?;
                indent(&text, width, is_set(&first), is_set(&blank), budget)
            }
            "center" => {
                let [width] = arguments.bind(name, ["width"])?;
                let text = to_text(&value, budget)?;
                budget.charge_bytes(text.len())?;
                let width = count_argument(width, 80, name)?;
                let missing = width.saturating_sub(text.str().chars().count());
                let left = missing / 2 + (missing & width & 1);
                Ok(Value::Text(pad(&text, left, missing - left, None, budget)?))
            }
            "truncate" => truncate(&to_text(&value, budget)?, arguments, budget),
            "wordcount" => {
                let [] = arguments.bind(name, [])?;
                let text = to_text(&value, budget)?;
                budget.charge_bytes(text.len())?;
                let is_word = |c: char| c.is_alphanumeric() || c == '_';
                let count = text.str().split(|c: char| !is_word(c)).filter(|word| !word.is_empty()).count();
                Ok(Value::Int(count as i128, false))
            }
            "wordwrap" => wordwrap(&to_text(&value, budget)?, arguments, budget),
            "urlencode" => web_filters::urlencode(&value, arguments, budget),
            "striptags" => web_filters::striptags(&value, arguments, budget),
            "xmlattr" => web_filters::xmlattr(&value, arguments, budget),
            "tojson" => tojson(&value, arguments, budget),
            "format" => self.printf_filter(&to_text(&value, budget)?, arguments),
            "abs" => match &value {
                Value::Float(number) => Ok(Value::Float(number.abs())),
                other => match (other.as_int().and_then(i128::checked_abs), other) {
                    (Some(number), Value::Int(_, trusted)) => Ok(Value::Int(number, *trusted)),
                    (Some(number), _) => Ok(Value::Int(number, false)),
                    _ => Err(Failure::error(format!("abs: expected a number, found {}", other.type_name()))),
                },
            },
            "int" => int(&value, arguments, budget),
            "float" => {
                let [default] = arguments.bind(name, ["default"])?;
                let number = match &value {
                    Value::Text(text) => parse_float(&text.str()),
                    other => other.as_number(),
                };
                Ok(number.map(Value::Float).or(default).unwrap_or(Value::Float(0.0)))
            }
            "round" => round(&value, arguments),
            "attr" => {
                let [attribute] = arguments.bind(name, ["name"])?;
                let attribute = required(text_argument(attribute, name)?, name)?;
                let attribute = attribute.str();
                match &value {
                    Value::Dict(_) => Ok(Value::undefined(format!("'dict object' has no attribute '{}'", &*attribute))),
                    _ => self.attribute(&value, &attribute),
                }
            }
            _ => self.sequence_filter(name, value, arguments),
        }
    }
}

fn indent(text: &Text, width: Option<Value>, first: bool, blank: bool, budget: &Budget<'_>) -> Outcome<Value> {
    let trusted = text.is_trusted();
    let space = Text::new(" ", trusted, budget)?;
    let indentation = match width {
        Some(Value::Text(text)) => text,
        width => {
            let mut out = TextBuilder::new(budget)?;
            out.push_repeated(&space, count_argument(width, 4, "indent")?)?;
            out.finish()
        }
    };
    budget.charge_bytes(text.len())?;
    let content = text.str();
    let mut ranges = lines(&content, false, budget)?;
    // Jinja appends a line end before it splits, which keeps an empty last line.
    if content.is_empty()
        || lines(&content[content.len() - last_char_len(&content)..], false, budget)?.first() == Some(&(0..0))
    {
        ranges.push(content.len()..content.len());
    }
    let mut out = TextBuilder::new(budget)?;
    for (index, range) in ranges.into_iter().enumerate() {
        if index > 0 {
            out.push("\n", trusted)?;
        }
        if if index == 0 { first } else { blank || !range.is_empty() } {
            out.push_text(&indentation)?;
        }
        out.push_slice(text, range)?;
    }
    Ok(Value::Text(out.finish()))
}

fn last_char_len(text: &str) -> usize {
    text.chars().next_back().map_or(0, char::len_utf8)
}

fn truncate(text: &Text, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [length, kill_words, end, leeway] = arguments.bind("truncate", ["length", "killwords", "end", "leeway"])?;
    let length = count_argument(length, 255, "truncate")?;
    let leeway = count_argument(leeway, 5, "truncate")?;
    let end = match text_argument(end, "truncate")? {
        Some(end) => end,
        None => Text::new("...", true, budget)?,
    };
    budget.charge_bytes(text.len())?;
    let content = text.str();
    if content.chars().count() <= length.saturating_add(leeway) {
        return Ok(Value::Text(text.clone()));
    }
    let end_length = end.str().chars().count();
    let Some(kept) = length.checked_sub(end_length) else {
        return Err(Failure::error(format!("truncate: expected length >= {end_length}, got {length}")));
    };
    let bytes = content.char_indices().nth(kept).map_or(text.len(), |(at, _)| at);
    let bytes = if is_set(&kill_words) { bytes } else { content[..bytes].rfind(' ').unwrap_or(bytes) };
    Ok(Value::Text(text.slice(0..bytes).join(&end, budget)?))
}

fn tojson(value: &Value, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [ensure_ascii, indent, separators, sort_keys] =
        arguments.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(text)) => Some(text),
        Some(width) => {
            let mut out = TextBuilder::new(budget)?;
            out.push_repeated(&Text::new(" ", false, budget)?, count_argument(Some(width), 0, "tojson")?)?;
            Some(out.finish())
        }
    };
    let separators = match separators {
        None | Some(Value::None) => None,
        Some(Value::List(list)) => match list.values() {
            [Value::Text(item), Value::Text(key)] => Some((item.clone(), key.clone())),
            _ => return Err(Failure::error("tojson: separators must be two strings")),
        },
        Some(_) => return Err(Failure::error("tojson: separators must be two strings")),
    };
    let (item_separator, key_separator) = match separators {
        Some(pair) => pair,
        None => {
            let item = if indent.is_some() { "," } else { ", " };
            (Text::new(item, false, budget)?, Text::new(": ", false, budget)?)
        }
    };
    let layout = JsonLayout {
        indent,
        item_separator,
        key_separator,
        ensure_ascii: is_set(&ensure_ascii),
        sort_keys: is_set(&sort_keys),
    };
    let mut out = TextBuilder::new(budget)?;
    print::json(value, &layout, 0, &mut out)?;
    Ok(Value::Text(out.finish()))
}

/// Parses a number as Python's `float` does.
fn parse_float(text: &str) -> Option<f64> {
    let text = text.trim();
    let is_plain = text.chars().all(|c| c.is_ascii_digit() || matches!(c, '+' | '-' | '.' | 'e' | 'E'));
    let named = matches!(text.trim_start_matches(['+', '-']).to_lowercase().as_str(), "inf" | "infinity" | "nan");
    if is_plain || named { text.parse().ok() } else { None }
}

fn int(value: &Value, arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let [default, base] = arguments.bind("int", ["default", "base"])?;
    let base = int_argument(base, "int")?.and_then(|base| u32::try_from(base).ok()).unwrap_or(10);
    if !(2..=36).contains(&base) {
        return Err(Failure::error("int: base must be from 2 to 36"));
    }
    let from_float = |number: f64| (number.is_finite() && number.abs() < 1e38).then_some(number.trunc() as i128);
    let (number, trusted) = match value {
        Value::Text(text) => {
            budget.charge_bytes(text.len())?;
            let chars = text.str();
            let digits = chars.trim_matches(crate::chat::jinja::lexer::is_python_space);
            let prefix = match base {
                16 => "0x",
                8 => "0o",
                2 => "0b",
                _ => "",
            };
            let parsed = i128::from_str_radix(digits.strip_prefix(prefix).unwrap_or(digits), base).ok();
            let parsed = parsed.or_else(|| if base == 10 { parse_float(digits).and_then(from_float) } else { None });
            (parsed, text.is_trusted())
        }
        Value::Float(number) => (from_float(*number), false),
        Value::Int(number, trusted) => (Some(*number), *trusted),
        other => (other.as_int(), false),
    };
    Ok(match number {
        Some(number) => Value::Int(number, trusted),
        None => default.unwrap_or(Value::Int(0, true)),
    })
}

fn round(value: &Value, arguments: CallArguments) -> Outcome<Value> {
    let [precision, method] = arguments.bind("round", ["precision", "method"])?;
    let precision = int_argument(precision, "round")?.unwrap_or(0);
    let method = text_argument(method, "round")?.map_or("common".to_owned(), |method| method.str().to_owned());
    defined(value)?;
    let Some(number) = value.as_number() else {
        return Err(Failure::error(format!("round: expected a number, found {}", value.type_name())));
    };
    let digits = usize::try_from(precision).ok().filter(|digits| *digits <= 300);
    match (method.as_str(), digits) {
        ("common", Some(_)) if matches!(value, Value::Int(..)) => Ok(value.clone()),
        ("common", Some(_)) if matches!(value, Value::Bool(_)) => Ok(Value::Int(number as i128, false)),
        // Printing rounds the exact value, half to even, as Python's `round` does.
        ("common", Some(digits)) => Ok(Value::Float(format!("{number:.digits$}").parse().unwrap_or(number))),
        ("ceil" | "floor", _) => {
            let factor = 10f64.powi(precision.clamp(-300, 300) as i32);
            let scaled = if method == "ceil" { (number * factor).ceil() } else { (number * factor).floor() };
            Ok(Value::Float(scaled / factor))
        }
        ("common", None) => {
            let factor = 10f64.powi(precision.clamp(-300, 300) as i32);
            let rounded = (number * factor).round_ties_even() / factor;
            Ok(if value.as_int().is_some() { Value::Int(rounded as i128, false) } else { Value::Float(rounded) })
        }
        _ => Err(Failure::error("round: method must be common, ceil or floor")),
    }
}

/// Returns the length of a value, as `length` gives it. It is untrusted: the request decides about it.
pub(super) fn length(value: &Value, budget: &Budget<'_>) -> Outcome<Value> {
    let length = match value {
        Value::Text(text) => {
            budget.charge_bytes(text.len())?;
            text.str().chars().count()
        }
        Value::List(list) if list.kind != Sequence::Generator => list.len(),
        Value::Dict(dict) => dict.entries().len(),
        Value::Undefined(_) => 0,
        Value::Loop(state) => state.items.len(),
        other => return Err(Failure::error(format!("object of type '{}' has no len()", other.type_name()))),
    };
    Ok(Value::Int(length as i128, false))
}
