//! Operators on values, with Python's rules.

use std::cmp::Ordering;

use super::budget::{Budget, with_capacity};
use super::builtins::format::printf;
use super::failure::{Failure, Outcome};
use super::print::push_escaped;
use super::syntax::{Arithmetic, Comparison};
use super::text::{Text, TextBuilder};
use super::value::{List, Sequence, Value};

impl Arithmetic {
    fn symbol(self) -> &'static str {
        match self {
            Arithmetic::Add => "+",
            Arithmetic::Subtract => "-",
            Arithmetic::Multiply => "*",
            Arithmetic::Divide => "/",
            Arithmetic::FloorDivide => "//",
            Arithmetic::Modulo => "%",
            Arithmetic::Power => "** or pow()",
        }
    }
}

/// Returns an error if the value is undefined.
pub(super) fn defined(value: &Value) -> Outcome<()> {
    match value {
        Value::Undefined(message) => Err(Failure::error(message.as_deref().unwrap_or("a value is undefined"))),
        _ => Ok(()),
    }
}

pub(super) fn arithmetic(operator: Arithmetic, a: Value, b: Value, budget: &Budget<'_>) -> Outcome<Value> {
    use Arithmetic::{Add, Modulo, Multiply};
    defined(&a)?;
    defined(&b)?;
    match (operator, &a, &b) {
        (Add, Value::Text(left), Value::Text(right)) => add_texts(left, right, budget),
        (Add, Value::List(left), Value::List(right)) if left.kind == right.kind => {
            if !matches!(left.kind, Sequence::List | Sequence::Tuple) {
                return Err(unsupported(operator, &a, &b));
            }
            budget.charge_items(left.len() + right.len())?;
            let held = budget.hold((left.len() + right.len()) * size_of::<Value>())?;
            let values = [left.values(), right.values()].concat();
            drop(held);
            Value::sequence(values, left.kind, budget)
        }
        (Multiply, Value::Text(text), count) | (Multiply, count, Value::Text(text)) if count.as_int().is_some() => {
            let mut out = TextBuilder::new(budget)?;
            out.push_repeated(text, repetitions(count))?;
            Ok(Value::Text(out.finish().with_markup(text.is_markup)))
        }
        (Multiply, Value::List(list), count) | (Multiply, count, Value::List(list)) if count.as_int().is_some() => {
            repeat_list(list, repetitions(count), budget)
        }
        (Modulo, Value::Text(format), arguments) => Ok(Value::Text(printf(format, arguments, budget)?)),
        _ => match (a.as_int(), b.as_int()) {
            (Some(left), Some(right)) => {
                let trusted = matches!(a, Value::Int(_, true)) && matches!(b, Value::Int(_, true));
                integers(operator, left, right, trusted)
            }
            _ => match (a.as_number(), b.as_number()) {
                (Some(left), Some(right)) => floats(operator, left, right),
                _ => Err(unsupported(operator, &a, &b)),
            },
        },
    }
}

fn unsupported(operator: Arithmetic, a: &Value, b: &Value) -> Failure {
    let (a, b, symbol) = (a.type_name(), b.type_name(), operator.symbol());
    Failure::error(format!("unsupported operand type(s) for {symbol}: '{a}' and '{b}'"))
}

fn repetitions(count: &Value) -> usize {
    usize::try_from(count.as_int().unwrap_or(0).max(0)).unwrap_or(usize::MAX)
}

fn repeat_list(list: &List, count: usize, budget: &Budget<'_>) -> Outcome<Value> {
    let total = list.len().saturating_mul(count);
    budget.charge_items(total)?;
    let held = budget.hold(total.saturating_mul(size_of::<Value>()))?;
    let mut values = with_capacity(total)?;
    if total > 0 {
        (0..count).for_each(|_| values.extend_from_slice(list.values()));
    }
    drop(held);
    Value::sequence(values, list.kind, budget)
}

/// Joins texts; text that is added to `Markup` is escaped for HTML.
fn add_texts(left: &Text, right: &Text, budget: &Budget<'_>) -> Outcome<Value> {
    if left.is_markup == right.is_markup {
        return Ok(Value::Text(left.join(right, budget)?));
    }
    let left = if left.is_markup { left.clone() } else { escape_html(left, budget)? };
    let right = if right.is_markup { right.clone() } else { escape_html(right, budget)? };
    Ok(Value::Text(left.join(&right, budget)?.with_markup(true)))
}

pub(super) fn escape_html(text: &Text, budget: &Budget<'_>) -> Outcome<Text> {
    let mut out = TextBuilder::new(budget)?;
    push_escaped(text, &mut out, |c| {
        let escape = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '\'' => "&#39;",
            '"' => "&#34;",
            _ => return None,
        };
        Some(escape.to_owned())
    })?;
    Ok(out.finish())
}

fn integers(operator: Arithmetic, a: i128, b: i128, trusted: bool) -> Outcome<Value> {
    let overflow = || Failure::error("an integer is too large");
    let by_zero = || Failure::error("integer division or modulo by zero");
    let floor_divide = || {
        let quotient = a.checked_div(b)?;
        Some(if a % b != 0 && (a < 0) != (b < 0) { quotient - 1 } else { quotient })
    };
    let value = match operator {
        Arithmetic::Add => a.checked_add(b),
        Arithmetic::Subtract => a.checked_sub(b),
        Arithmetic::Multiply => a.checked_mul(b),
        Arithmetic::Divide => {
            if b == 0 {
                return Err(Failure::error("division by zero"));
            }
            return Ok(Value::Float(a as f64 / b as f64));
        }
        Arithmetic::FloorDivide | Arithmetic::Modulo if b == 0 => return Err(by_zero()),
        Arithmetic::FloorDivide => floor_divide(),
        Arithmetic::Modulo => floor_divide().and_then(|quotient| a.checked_sub(quotient.checked_mul(b)?)),
        Arithmetic::Power if b < 0 => return floats(operator, a as f64, b as f64),
        Arithmetic::Power => match u32::try_from(b) {
            Ok(exponent) => a.checked_pow(exponent),
            Err(_) => matches!(a, 0 | 1).then_some(a),
        },
    };
    Ok(Value::Int(value.ok_or_else(overflow)?, trusted))
}

fn floats(operator: Arithmetic, a: f64, b: f64) -> Outcome<Value> {
    if b == 0.0 && matches!(operator, Arithmetic::Divide | Arithmetic::FloorDivide | Arithmetic::Modulo) {
        return Err(Failure::error("float division by zero"));
    }
    let modulo = || {
        let remainder = a % b;
        match remainder {
            0.0 => 0f64.copysign(b),
            _ if (remainder < 0.0) != (b < 0.0) => remainder + b,
            _ => remainder,
        }
    };
    Ok(Value::Float(match operator {
        Arithmetic::Add => a + b,
        Arithmetic::Subtract => a - b,
        Arithmetic::Multiply => a * b,
        Arithmetic::Divide => a / b,
        Arithmetic::FloorDivide => ((a - modulo()) / b).round(),
        Arithmetic::Modulo => modulo(),
        Arithmetic::Power => a.powf(b),
    }))
}

pub(super) fn compare(comparison: Comparison, a: &Value, b: &Value, budget: &Budget<'_>) -> Outcome<bool> {
    Ok(match comparison {
        Comparison::Equal => a.equals(b, budget)?,
        Comparison::NotEqual => !a.equals(b, budget)?,
        Comparison::In => contains(b, a, budget)?,
        Comparison::NotIn => !contains(b, a, budget)?,
        ordered => {
            let symbol = match ordered {
                Comparison::Less => "<",
                Comparison::LessEqual => "<=",
                Comparison::Greater => ">",
                _ => ">=",
            };
            let order = order(a, b, symbol, budget)?;
            match ordered {
                Comparison::Less => order == Some(Ordering::Less),
                Comparison::LessEqual => matches!(order, Some(Ordering::Less | Ordering::Equal)),
                Comparison::Greater => order == Some(Ordering::Greater),
                _ => matches!(order, Some(Ordering::Greater | Ordering::Equal)),
            }
        }
    })
}

/// Returns the order of two values; `None` if one is not a number.
pub(super) fn order(a: &Value, b: &Value, symbol: &str, budget: &Budget<'_>) -> Outcome<Option<Ordering>> {
    defined(a)?;
    defined(b)?;
    budget.charge(1)?;
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => {
            budget.charge_bytes(a.len().min(b.len()))?;
            Ok(Some((*a.str()).cmp(&b.str())))
        }
        (Value::List(a), Value::List(b)) if a.kind == b.kind => {
            for (x, y) in a.values().iter().zip(b.values()) {
                if !x.equals(y, budget)? {
                    return order(x, y, symbol, budget);
                }
            }
            Ok(Some(a.len().cmp(&b.len())))
        }
        _ => match (a.as_int(), b.as_int(), a.as_number(), b.as_number()) {
            (Some(a), Some(b), _, _) => Ok(Some(a.cmp(&b))),
            (_, _, Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
            _ => {
                let (a, b) = (a.type_name(), b.type_name());
                Err(Failure::error(format!("'{symbol}' not supported between instances of '{a}' and '{b}'")))
            }
        },
    }
}

/// Python's `in`.
pub(super) fn contains(container: &Value, item: &Value, budget: &Budget<'_>) -> Outcome<bool> {
    match (container, item) {
        (Value::Text(text), Value::Text(part)) => {
            budget.charge_bytes(text.len())?;
            Ok(text.str().contains(&*part.str()))
        }
        (Value::Text(_), other) => {
            defined(other)?;
            let found = other.type_name();
            Err(Failure::error(format!("'in <string>' requires string as left operand, not {found}")))
        }
        (Value::List(list), _) => {
            for value in list.values() {
                if value.equals(item, budget)? {
                    return Ok(true);
                }
            }
            Ok(false)
        }
        (Value::Dict(dict), _) => Ok(dict.get(item, budget)?.is_some()),
        (Value::Undefined(_), _) => Ok(false),
        (other, _) => Err(Failure::error(format!("argument of type '{}' is not iterable", other.type_name()))),
    }
}
