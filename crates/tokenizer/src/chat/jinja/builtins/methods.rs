//! Methods of Python's strings, lists and dictionaries. Those that would change a list or a dictionary are refused, as
//! in the reference implementation's sandbox.

use super::CallArguments;
use super::text_methods::{self, TEXT_METHODS};
use crate::chat::jinja::budget::try_collect;
use crate::chat::jinja::evaluate::Evaluator;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::value::{Dict, List, Sequence, Value};

/// Whether a value's type has a method that templates may call.
pub(in crate::chat::jinja) fn is_method(value: &Value, name: &str) -> bool {
    match value {
        Value::Text(_) => TEXT_METHODS.contains(&name),
        Value::Dict(_) => matches!(name, "get" | "items" | "keys" | "values" | "copy"),
        Value::List(list) if list.kind == Sequence::List => matches!(name, "index" | "count" | "copy"),
        Value::List(list) if list.kind == Sequence::Tuple => matches!(name, "index" | "count"),
        Value::Loop(_) => matches!(name, "cycle" | "changed"),
        Value::Cycle(cycle) => !cycle.is_joiner && matches!(name, "next" | "reset"),
        Value::Float(_) => name == "is_integer",
        _ => false,
    }
}

/// Whether a value's type has a method of this name that the sandbox refuses.
pub(in crate::chat::jinja) fn is_refused(value: &Value, name: &str) -> bool {
    match value {
        Value::Dict(_) => matches!(name, "clear" | "pop" | "popitem" | "setdefault" | "update"),
        Value::List(list) if list.kind == Sequence::List => {
            matches!(name, "append" | "clear" | "extend" | "insert" | "pop" | "remove" | "reverse" | "sort")
        }
        _ => name.starts_with("__"),
    }
}

impl Evaluator<'_, '_, '_> {
    pub(in crate::chat::jinja) fn call_method(
        &mut self,
        value: &Value,
        name: &str,
        arguments: CallArguments,
    ) -> Outcome<Value> {
        let budget = self.budget;
        match value {
            Value::Text(text) if name == "format" => self.format_text(text, arguments),
            Value::Text(text) => text_methods::call(text, name, arguments, budget),
            Value::Dict(dict) => match name {
                "get" => {
                    let [key, default] = arguments.bind("get", ["key", "default"])?;
                    let key = key.ok_or_else(|| Failure::error("get expected at least 1 argument, got 0"))?;
                    Ok(dict.get(&key, budget)?.cloned().or(default).unwrap_or(Value::None))
                }
                "copy" => Ok(value.clone()),
                _ => entries(dict, name, arguments, self),
            },
            Value::List(list) => {
                if name == "copy" {
                    return Ok(value.clone());
                }
                let [item] = arguments.bind(name, ["value"])?;
                let item = item.ok_or_else(|| Failure::error(format!("{name}() takes exactly one argument")))?;
                let mut count = 0;
                for (index, found) in list.values().iter().enumerate() {
                    if found.equals(&item, budget)? {
                        if name == "index" {
                            return Ok(Value::Int(index as i128, false));
                        }
                        count += 1;
                    }
                }
                match name {
                    "count" => Ok(Value::Int(count, false)),
                    _ => Err(Failure::error("index: the value is not in the list")),
                }
            }
            Value::Loop(state) if name == "changed" => {
                let values = List::new(arguments.positional, Sequence::Tuple, budget)?;
                self.has_changed(state, values).map(Value::Bool)
            }
            Value::Cycle(cycle) => {
                let [] = arguments.bind(name, [])?;
                let current = cycle.current();
                let is_next = name == "next";
                cycle.position.set(if is_next { (cycle.position.get() + 1) % cycle.items.len() } else { 0 });
                Ok(if is_next { current } else { Value::None })
            }
            Value::Loop(state) => match &arguments.positional[..] {
                [] => Err(Failure::error("no items for cycling given")),
                items => Ok(items[state.index0.get() % items.len()].clone()),
            },
            Value::Float(number) => Ok(Value::Bool(number.fract() == 0.0)),
            other => Err(Failure::error(format!("'{} object' has no attribute '{name}'", other.type_name()))),
        }
    }
}

/// Returns the keys, the values or the pairs of a dictionary.
fn entries(dict: &Dict, name: &str, arguments: CallArguments, evaluator: &Evaluator<'_, '_, '_>) -> Outcome<Value> {
    let budget = evaluator.budget;
    let [] = arguments.bind(name, [])?;
    budget.charge_items(dict.entries().len())?;
    let one = |(key, value): &(Value, Value)| match name {
        "keys" => Ok(key.clone()),
        "values" => Ok(value.clone()),
        _ => Value::sequence(vec![key.clone(), value.clone()], Sequence::Tuple, budget),
    };
    let values = try_collect(dict.entries().iter().map(one))?;
    Value::sequence(values, Sequence::View, budget)
}
