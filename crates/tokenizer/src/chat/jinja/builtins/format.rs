//! Formatted text: `'%s' | format(...)`, `'%s' % ...` and `'{}'.format(...)`. Widths and precisions are charged before
//! anything is made. Text of the format and of string arguments keeps its origin.

use super::{CallArguments, named_pairs};
use crate::chat::jinja::budget::Budget;
use crate::chat::jinja::evaluate::Evaluator;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::print::{self, to_text};
use crate::chat::jinja::text::{Text, TextBuilder};
use crate::chat::jinja::value::{Dict, Sequence, Value};

/// Maximum digits after the decimal point.
const MAX_PRECISION: usize = 300;

/// Layout of one formatted value.
#[derive(Debug, Clone, Copy, Default)]
struct Spec {
    /// `<`, `>`, `^` or `=`.
    align: Option<char>,
    fill: Option<char>,
    /// `+` or a space before positive numbers.
    sign: Option<char>,
    alternative: bool,
    thousands: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: Option<char>,
}

impl Evaluator<'_, '_, '_> {
    /// The filter `format`.
    pub(super) fn printf_filter(&mut self, format: &Text, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        let arguments = if arguments.named.is_empty() {
            Value::sequence(arguments.positional, Sequence::Tuple, budget)?
        } else {
            Value::Dict(Dict::new(named_pairs(arguments, budget)?, budget)?)
        };
        Ok(Value::Text(printf(format, &arguments, budget)?))
    }

    /// The method `format` of strings.
    pub(super) fn format_text(&mut self, format: &Text, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        budget.charge_bytes(format.len())?;
        let source = format.str().to_owned();
        let mut out = TextBuilder::new(budget)?;
        let mut next_index = 0;
        let mut at = 0;
        while let Some(found) = source[at..].find(['{', '}']) {
            let brace = at + found;
            out.push_slice(format, at..brace)?;
            let rest = &source[brace..];
            if rest.starts_with("{{") || rest.starts_with("}}") {
                out.push_slice(format, brace..brace + 1)?;
                at = brace + 2;
                continue;
            }
            let end = rest.find('}').filter(|_| rest.starts_with('{'));
            let end = end.ok_or_else(|| Failure::error("format: single brace in format string"))?;
            let field = &rest[1..end];
            if field.contains('{') {
                return Err(Failure::error("format: nested fields are not supported"));
            }
            let (field, spec) = field.split_once(':').unwrap_or((field, ""));
            let (field, conversion) = field.split_once('!').unwrap_or((field, ""));
            let mut value = self.field(field, &arguments, &mut next_index)?;
            match conversion {
                "" => {}
                "s" => value = Value::Text(to_text(&value, budget)?),
                "r" => {
                    let mut quoted = TextBuilder::new(budget)?;
                    print::repr(&value, &mut quoted)?;
                    value = Value::Text(quoted.finish());
                }
                other => return Err(Failure::error(format!("format: unknown conversion '{other}'"))),
            }
            format_value(&value, parse_spec(spec)?, &mut out, budget)?;
            at = brace + end + 1;
        }
        out.push_slice(format, at..format.len())?;
        Ok(Value::Text(out.finish()))
    }

    /// Returns the value of a replacement field such as `0`, `name`, `0.key` or `name[key]`.
    fn field(&mut self, field: &str, arguments: &CallArguments, next_index: &mut usize) -> Outcome<Value> {
        let end = field.find(['.', '[']).unwrap_or(field.len());
        let (name, mut rest) = field.split_at(end);
        let missing = || Failure::error(format!("format: no argument for field '{field}'"));
        let mut value = match name.parse::<usize>() {
            Ok(index) => arguments.positional.get(index).cloned().ok_or_else(missing)?,
            Err(_) if name.is_empty() => {
                *next_index += 1;
                arguments.positional.get(*next_index - 1).cloned().ok_or_else(missing)?
            }
            Err(_) => {
                let named = arguments.named.iter().find(|(known, _)| known == name);
                named.map(|(_, value)| value.clone()).ok_or_else(missing)?
            }
        };
        while !rest.is_empty() {
            let key;
            if let Some(after) = rest.strip_prefix('.') {
                let end = after.find(['.', '[']).unwrap_or(after.len());
                (key, rest) = after.split_at(end);
                value = self.attribute(&value, key)?;
            } else {
                let end = rest.find(']').ok_or_else(missing)?;
                (key, rest) = (&rest[1..end], &rest[end + 1..]);
                let key = match key.parse::<i128>() {
                    Ok(index) => Value::Int(index, true),
                    Err(_) => Value::text(key, true, self.budget)?,
                };
                value = self.item(&value, &key)?;
            }
        }
        Ok(value)
    }
}

/// Parses `[[fill]align][sign][#][0][width][,][.precision][type]`.
fn parse_spec(text: &str) -> Outcome<Spec> {
    let chars: Vec<char> = text.chars().collect();
    let mut spec = Spec::default();
    let mut at = 0;
    let is_align = |c: Option<&char>| matches!(c, Some('<' | '>' | '^' | '='));
    if is_align(chars.get(1)) {
        (spec.fill, spec.align) = (Some(chars[0]), Some(chars[1]));
        at = 2;
    } else if is_align(chars.first()) {
        spec.align = Some(chars[0]);
        at = 1;
    }
    if let Some(sign @ ('+' | '-' | ' ')) = chars.get(at) {
        spec.sign = Some(*sign).filter(|sign| *sign != '-');
        at += 1;
    }
    if chars.get(at) == Some(&'#') {
        spec.alternative = true;
        at += 1;
    }
    if chars.get(at) == Some(&'0') {
        spec.fill.get_or_insert('0');
        spec.align.get_or_insert('=');
        at += 1;
    }
    spec.width = digits(&chars, &mut at)?.unwrap_or(0);
    if let Some(separator @ (',' | '_')) = chars.get(at) {
        spec.thousands = Some(*separator);
        at += 1;
    }
    if chars.get(at) == Some(&'.') {
        at += 1;
        spec.precision = Some(digits(&chars, &mut at)?.ok_or_else(|| Failure::error("format: missing precision"))?);
    }
    spec.kind = chars.get(at).copied();
    match chars.len() > at + 1 {
        true => Err(Failure::error(format!("format: invalid specifier '{text}'"))),
        false => Ok(spec),
    }
}

fn digits(chars: &[char], at: &mut usize) -> Outcome<Option<usize>> {
    let length = chars[*at..].iter().take_while(|c| c.is_ascii_digit()).count();
    if length == 0 {
        return Ok(None);
    }
    let text: String = chars[*at..*at + length].iter().collect();
    *at += length;
    text.parse().map(Some).map_err(|_| Failure::error("format: a width or precision is too large"))
}

/// Formats `%` directives of a text.
pub(in crate::chat::jinja) fn printf(format: &Text, arguments: &Value, budget: &Budget<'_>) -> Outcome<Text> {
    budget.charge_bytes(format.len())?;
    let source = format.str().to_owned();
    let mut out = TextBuilder::new(budget)?;
    let mut given = match arguments {
        Value::List(list) if list.kind == Sequence::Tuple => list.values().iter(),
        other => std::slice::from_ref(other).iter(),
    };
    let is_mapping = matches!(arguments, Value::Dict(_));
    let too_few = || Failure::error("not enough arguments for format string");
    let mut at = 0;
    while let Some(found) = source[at..].find('%') {
        let percent = at + found;
        out.push_slice(format, at..percent)?;
        let chars: Vec<char> = source[percent + 1..].chars().take(400).collect();
        let mut index = 0;
        let mut value = None;
        if chars.first() == Some(&'(') {
            let end = chars.iter().position(|c| *c == ')').ok_or_else(|| Failure::error("incomplete format key"))?;
            let key: String = chars[1..end].iter().collect();
            let Value::Dict(dict) = arguments else { return Err(Failure::error("format requires a mapping")) };
            value = Some(dict.get_text(&key).ok_or_else(|| Failure::error(format!("format: no value for '{key}'")))?);
            index = end + 1;
        }
        let mut spec = Spec { align: Some('>'), ..Spec::default() };
        while let Some(flag @ ('-' | '+' | ' ' | '#' | '0')) = chars.get(index) {
            match flag {
                '-' => spec.align = Some('<'),
                '#' => spec.alternative = true,
                '0' if spec.align == Some('>') => (spec.align, spec.fill) = (Some('='), Some('0')),
                '0' => {}
                sign => spec.sign = Some(*sign),
            }
            index += 1;
        }
        spec.width = digits(&chars, &mut index)?.unwrap_or(0);
        if chars.get(index) == Some(&'.') {
            index += 1;
            spec.precision = Some(digits(&chars, &mut index)?.unwrap_or(0));
        }
        let kind = *chars.get(index).ok_or_else(|| Failure::error("incomplete format"))?;
        let consumed: usize = chars[..=index].iter().map(|c| c.len_utf8()).sum();
        at = percent + 1 + consumed;
        if kind == '%' {
            out.push_slice(format, percent..percent + 1)?;
            continue;
        }
        let value = match value {
            Some(value) => value,
            None => given.next().ok_or_else(too_few)?,
        };
        printf_value(value, kind, spec, &mut out, budget)?;
    }
    out.push_slice(format, at..format.len())?;
    if !is_mapping && given.next().is_some() {
        return Err(Failure::error("not all arguments converted during string formatting"));
    }
    Ok(out.finish())
}

fn printf_value(
    value: &Value,
    kind: char,
    mut spec: Spec,
    out: &mut TextBuilder<'_, '_>,
    budget: &Budget<'_>,
) -> Outcome<()> {
    let wrong = || Failure::error(format!("%{kind} format: a number is required, not {}", value.type_name()));
    match kind {
        's' | 'r' | 'a' => {
            if spec.align == Some('=') {
                (spec.align, spec.fill) = (Some('>'), None);
            }
            let text = if kind == 's' {
                to_text(value, budget)?
            } else {
                let mut quoted = TextBuilder::new(budget)?;
                print::repr(value, &mut quoted)?;
                quoted.finish()
            };
            spec.kind = Some('s');
            format_value(&Value::Text(text), spec, out, budget)
        }
        'c' => {
            let text = match value {
                Value::Text(text) => text.clone(),
                other => {
                    let code = other.as_int().and_then(|code| u32::try_from(code).ok()).and_then(char::from_u32);
                    Text::new(code.ok_or_else(wrong)?.encode_utf8(&mut [0; 4]), false, budget)?
                }
            };
            format_value(&Value::Text(text), Spec { kind: Some('s'), precision: None, ..spec }, out, budget)
        }
        'd' | 'i' | 'u' => {
            let number = match value {
                Value::Float(number) if number.abs() < 1e38 => Value::Int(number.trunc() as i128, false),
                Value::Int(..) => value.clone(),
                other => Value::Int(other.as_int().ok_or_else(wrong)?, false),
            };
            format_value(&number, Spec { kind: Some('d'), precision: None, ..spec }, out, budget)
        }
        'x' | 'X' | 'o' => {
            value.as_int().ok_or_else(wrong)?;
            format_value(value, Spec { kind: Some(kind), precision: None, ..spec }, out, budget)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            let number = value.as_number().ok_or_else(wrong)?;
            format_value(&Value::Float(number), Spec { kind: Some(kind), ..spec }, out, budget)
        }
        other => Err(Failure::error(format!("unsupported format character '{other}'"))),
    }
}

/// Appends a value with a layout.
fn format_value(value: &Value, spec: Spec, out: &mut TextBuilder<'_, '_>, budget: &Budget<'_>) -> Outcome<()> {
    if spec.precision.is_some_and(|digits| digits > MAX_PRECISION) && !matches!(value, Value::Text(_)) {
        return Err(Failure::error(format!("format: the precision is larger than {MAX_PRECISION}")));
    }
    let is_text = !matches!(value, Value::Int(..) | Value::Float(_) | Value::Bool(_));
    if is_text || (matches!(value, Value::Bool(_)) && spec.kind.is_none_or(|kind| kind == 's')) {
        if !matches!(spec.kind, None | Some('s')) {
            let kind = spec.kind.unwrap_or('s');
            return Err(Failure::error(format!("format: unknown code '{kind}' for '{}'", value.type_name())));
        }
        let mut text = to_text(value, budget)?;
        if let Some(precision) = spec.precision {
            budget.charge_bytes(text.len())?;
            let end = text.str().char_indices().nth(precision).map_or(text.len(), |(at, _)| at);
            text = text.slice(0..end);
        }
        budget.charge_bytes(text.len())?;
        let missing = spec.width.saturating_sub(text.str().chars().count());
        let left = match spec.align {
            Some('>') => missing,
            Some('^') => missing / 2,
            _ => 0,
        };
        let fill = Text::new(spec.fill.unwrap_or(' ').encode_utf8(&mut [0; 4]), false, budget)?;
        out.push_repeated(&fill, left)?;
        out.push_text(&text)?;
        return out.push_repeated(&fill, missing - left);
    }
    let trusted = matches!(value, Value::Int(_, true));
    let (is_negative, prefix, digits) = number_parts(value, spec)?;
    let sign = if is_negative { "-".to_owned() } else { spec.sign.map(String::from).unwrap_or_default() };
    let length = sign.len() + prefix.len() + digits.chars().count();
    let missing = spec.width.saturating_sub(length);
    let fill = Text::new(spec.fill.unwrap_or(' ').encode_utf8(&mut [0; 4]), trusted, budget)?;
    let (left, inner) = match spec.align.unwrap_or('>') {
        '<' => (0, 0),
        '^' => (missing / 2, 0),
        '=' => (0, missing),
        _ => (missing, 0),
    };
    out.push_repeated(&fill, left)?;
    out.push(&sign, trusted)?;
    out.push(prefix, trusted)?;
    out.push_repeated(&fill, inner)?;
    out.push(&digits, trusted)?;
    out.push_repeated(&fill, missing - left - inner)
}

/// Returns whether a number is negative, the prefix of its base, and its digits.
fn number_parts(value: &Value, spec: Spec) -> Outcome<(bool, &'static str, String)> {
    let kind = spec.kind;
    if let (Some(number), None | Some('d' | 'n' | 'x' | 'X' | 'o' | 'b')) = (value.as_int(), kind) {
        let size = number.unsigned_abs();
        let (prefix, digits) = match kind {
            Some('x') => ("0x", format!("{size:x}")),
            Some('X') => ("0X", format!("{size:X}")),
            Some('o') => ("0o", format!("{size:o}")),
            Some('b') => ("0b", format!("{size:b}")),
            _ => ("", grouped(&size.to_string(), spec.thousands)),
        };
        return Ok((number < 0, if spec.alternative { prefix } else { "" }, digits));
    }
    let number = value.as_number().unwrap_or(0.0);
    let (is_negative, size) = (number.is_sign_negative() && !number.is_nan(), number.abs());
    if !size.is_finite() {
        return Ok((is_negative, "", if size.is_nan() { "nan".into() } else { "inf".into() }));
    }
    let digits = match kind {
        Some('f' | 'F') => format!("{size:.*}", spec.precision.unwrap_or(6)),
        Some('%') => format!("{:.*}%", spec.precision.unwrap_or(6), size * 100.0),
        Some('e' | 'E') => exponent(size, spec.precision.unwrap_or(6), kind == Some('E')),
        Some('g' | 'G') => general(size, spec.precision.unwrap_or(6).max(1), kind == Some('G'), false),
        None | Some('n') => match spec.precision {
            Some(precision) => general(size, precision.max(1), false, true),
            None => print::float(size),
        },
        Some(other) => {
            return Err(Failure::error(format!("format: unknown code '{other}' for '{}'", value.type_name())));
        }
    };
    let (whole, rest) = digits.split_at(digits.find(['.', 'e', 'E', '%']).unwrap_or(digits.len()));
    Ok((is_negative, "", grouped(whole, spec.thousands) + rest))
}

fn grouped(digits: &str, separator: Option<char>) -> String {
    let Some(separator) = separator else { return digits.to_owned() };
    let mut out = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            out.push(separator);
        }
        out.push(digit);
    }
    out
}

/// Formats like C's `%e`: an exponent of at least two digits.
fn exponent(number: f64, precision: usize, upper: bool) -> String {
    let text = format!("{number:.precision$e}");
    let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    let (letter, sign) = (if upper { 'E' } else { 'e' }, if exponent < 0 { '-' } else { '+' });
    format!("{digits}{letter}{sign}{:02}", exponent.abs())
}

/// Formats like C's `%g`: without trailing zeros; with `keep_point`, a whole number keeps one, as in Python's `str`.
fn general(number: f64, precision: usize, upper: bool, keep_point: bool) -> String {
    let scientific = format!("{number:.*e}", precision - 1);
    let power: i32 = scientific.split_once('e').and_then(|(_, power)| power.parse().ok()).unwrap_or(0);
    let limit = precision as i32 - i32::from(keep_point);
    let strip = |text: &str| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text.to_owned(),
    };
    if power < -4 || power >= limit.max(1) {
        let text = exponent(number, precision - 1, upper);
        let at = text.find(['e', 'E']).unwrap_or(text.len());
        return strip(&text[..at]) + &text[at..];
    }
    let text = strip(&format!("{number:.*}", usize::try_from(precision as i32 - 1 - power).unwrap_or(0)));
    if keep_point && !text.contains('.') { text + ".0" } else { text }
}
