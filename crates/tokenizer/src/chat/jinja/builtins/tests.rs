//! Jinja's tests: `value is name(arguments)`.

use super::iterate_true;
use crate::chat::jinja::budget::push;
use crate::chat::jinja::evaluate::Evaluator;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::operators::{compare, contains};
use crate::chat::jinja::print::to_text;
use crate::chat::jinja::syntax::Comparison;
use crate::chat::jinja::value::{Sequence, Value};

impl Evaluator<'_, '_, '_> {
    pub(in crate::chat::jinja) fn test(&mut self, name: &str, value: &Value, arguments: &[Value]) -> Outcome<bool> {
        let budget = self.budget;
        let argument = || arguments.first().ok_or_else(|| Failure::error(format!("test '{name}' needs an argument")));
        let integer = || value.as_int().ok_or_else(|| Failure::error(format!("test '{name}' needs an integer")));
        let comparison = match name {
            "eq" | "equalto" | "==" => Some(Comparison::Equal),
            "ne" | "!=" => Some(Comparison::NotEqual),
            "lt" | "lessthan" | "<" => Some(Comparison::Less),
            "le" | "<=" => Some(Comparison::LessEqual),
            "gt" | "greaterthan" | ">" => Some(Comparison::Greater),
            "ge" | ">=" => Some(Comparison::GreaterEqual),
            _ => None,
        };
        if let Some(comparison) = comparison {
            return compare(comparison, value, argument()?, budget);
        }
        Ok(match name {
            "defined" => !value.is_undefined(),
            "undefined" => value.is_undefined(),
            "none" => matches!(value, Value::None),
            "boolean" => matches!(value, Value::Bool(_)),
            "true" => matches!(value, Value::Bool(true)),
            "false" => matches!(value, Value::Bool(false)),
            "integer" => matches!(value, Value::Int(..)),
            "float" => matches!(value, Value::Float(_)),
            "number" => value.as_number().is_some(),
            "string" => matches!(value, Value::Text(_)),
            "escaped" => matches!(value, Value::Text(text) if text.is_markup),
            "mapping" => matches!(value, Value::Dict(_)),
            "iterable" => matches!(value, Value::Text(_) | Value::List(_) | Value::Dict(_) | Value::Undefined(_)),
            "sequence" => match value {
                Value::List(list) => matches!(list.kind, Sequence::List | Sequence::Tuple),
                other => matches!(other, Value::Text(_) | Value::Dict(_) | Value::Undefined(_)),
            },
            "callable" => {
                matches!(value, Value::Macro(_) | Value::Method(_) | Value::Function(_) | Value::Undefined(_))
                    || matches!(value, Value::Loop(_))
                    || matches!(value, Value::Cycle(cycle) if cycle.is_joiner)
            }
            "sameas" => match (value, argument()?) {
                (Value::Bool(a), Value::Bool(b)) => a == b,
                (Value::Bool(_), _) | (_, Value::Bool(_)) => false,
                (a, b) => a.type_name() == b.type_name() && a.equals(b, budget)?,
            },
            "in" => contains(argument()?, value, budget)?,
            "even" => integer()? % 2 == 0,
            "odd" => integer()? % 2 != 0,
            "divisibleby" => {
                let divisor = argument()?.as_int().filter(|divisor| *divisor != 0);
                let divisor =
                    divisor.ok_or_else(|| Failure::error("test 'divisibleby' needs a number other than 0"))?;
                integer()?.checked_rem(divisor).unwrap_or(0) == 0
            }
            "lower" | "upper" => {
                let text = to_text(value, budget)?;
                budget.charge_bytes(text.len())?;
                let text = text.str();
                let other = |c: char| if name == "lower" { c.is_uppercase() } else { c.is_lowercase() };
                let wanted = |c: char| if name == "lower" { c.is_lowercase() } else { c.is_uppercase() };
                !text.chars().any(other) && text.chars().any(wanted)
            }
            "filter" => super::filters::is_filter(&to_text(value, budget)?.str()),
            "test" => is_test(&to_text(value, budget)?.str()),
            other => return Err(Failure::error(format!("no test named '{other}'"))),
        })
    }

    /// Returns the items of a value for which a test holds; without a test, the true ones.
    pub(super) fn select(
        &mut self,
        value: &Value,
        attribute: Option<&Value>,
        arguments: &[Value],
        wanted: bool,
    ) -> Outcome<Value> {
        let budget = self.budget;
        let items = iterate_true(value, budget)?;
        let test = match arguments.first() {
            None => None,
            Some(Value::Text(name)) => Some(name.str().to_owned()),
            Some(other) => return Err(Failure::error(format!("no test named '{}'", other.type_name()))),
        };
        let mut kept = Vec::new();
        for item in items.values() {
            budget.charge(1)?;
            let subject = match attribute {
                Some(attribute) => self.path(item, attribute)?,
                None => item.clone(),
            };
            let holds = match &test {
                Some(test) => self.test(test, &subject, &arguments[1..])?,
                None => subject.is_true(),
            };
            if holds == wanted {
                push(&mut kept, item.clone())?;
            }
        }
        Value::sequence(kept, Sequence::Generator, budget)
    }
}

fn is_test(name: &str) -> bool {
    const NAMES: [&str; 26] = [
        "boolean",
        "callable",
        "defined",
        "divisibleby",
        "eq",
        "equalto",
        "escaped",
        "even",
        "false",
        "filter",
        "float",
        "ge",
        "gt",
        "in",
        "integer",
        "iterable",
        "le",
        "lower",
        "lt",
        "mapping",
        "ne",
        "none",
        "number",
        "odd",
        "sequence",
        "string",
    ];
    NAMES.contains(&name) || matches!(name, "sameas" | "test" | "true" | "undefined" | "upper")
}
