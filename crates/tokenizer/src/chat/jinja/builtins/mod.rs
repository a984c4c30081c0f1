//! Functions, filters, tests and methods that templates can call: those of Jinja and of Python's strings, lists and
//! dictionaries, and those that the reference implementation adds. None of them reads a file, the environment or a
//! clock.

mod case;
mod filters;
pub(super) mod format;
mod methods;
mod sequence_filters;
mod tests;
mod text_methods;
mod web_filters;
mod wordwrap;

use std::rc::Rc;

use super::budget::{Budget, collect, reserve_exact, try_collect};
use super::evaluate::Evaluator;
use super::failure::{Failure, Kind, Outcome};
use super::print::to_text;
use super::text::Text;
use super::value::{Builtin, Cycle, Dict, List, Sequence, Value};

pub(super) use methods::{is_method, is_refused};

/// Maximum length of a `range`, as in the reference implementation's sandbox.
const MAX_RANGE: usize = 100_000;

/// Arguments of a call.
#[derive(Default)]
pub(super) struct CallArguments {
    pub(super) positional: Vec<Value>,
    pub(super) named: Vec<(String, Value)>,
    /// Whether a name comes from the request, by `**arguments`.
    pub(super) has_foreign_names: bool,
    /// The body of a `call` block.
    pub(super) caller: Option<Value>,
}

impl CallArguments {
    /// Binds the arguments to parameters in order; those that are not given are `None`.
    pub(super) fn bind<const N: usize>(self, function: &str, parameters: [&str; N]) -> Outcome<[Option<Value>; N]> {
        let mut bound = [const { None }; N];
        if self.positional.len() > N {
            let given = self.positional.len();
            return Err(Failure::error(format!("{function} takes at most {N} arguments, {given} were given")));
        }
        for (slot, value) in bound.iter_mut().zip(self.positional) {
            *slot = Some(value);
        }
        for (name, value) in self.named {
            match parameters.iter().position(|parameter| *parameter == name) {
                Some(index) if bound[index].is_none() => bound[index] = Some(value),
                Some(_) => return Err(Failure::error(format!("{function} got two values for argument '{name}'"))),
                None => return Err(Failure::error(format!("{function} has no argument '{name}'"))),
            }
        }
        Ok(bound)
    }
}

/// Returns a given argument as text.
pub(super) fn text_argument(value: Option<Value>, function: &str) -> Outcome<Option<Text>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(Value::Text(text)) => Ok(Some(text)),
        Some(other) => Err(Failure::error(format!("{function}: expected a string, found {}", other.type_name()))),
    }
}

/// Returns a given argument as an integer.
pub(super) fn int_argument(value: Option<Value>, function: &str) -> Outcome<Option<i128>> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(value) => match value.as_int() {
            Some(int) => Ok(Some(int)),
            None => Err(Failure::error(format!("{function}: expected an integer, found {}", value.type_name()))),
        },
    }
}

/// Returns a given argument as a count: negative numbers are zero.
pub(super) fn count_argument(value: Option<Value>, default: usize, function: &str) -> Outcome<usize> {
    Ok(int_argument(value, function)?.map_or(default, |count| usize::try_from(count.max(0)).unwrap_or(usize::MAX)))
}

pub(super) fn is_set(value: &Option<Value>) -> bool {
    value.as_ref().is_some_and(Value::is_true)
}

/// Returns the items that a loop over the value visits. `None` has no items: the reference implementation fails on it
/// in most places, but templates for tools loop over `tools` without a check.
pub(super) fn iterate(value: &Value, budget: &Budget<'_>) -> Outcome<List> {
    match value {
        Value::List(list) => Ok(list.clone()),
        Value::Undefined(_) | Value::None => List::new(Vec::new(), Sequence::List, budget),
        Value::Dict(dict) => {
            budget.charge_items(dict.entries().len())?;
            List::new(collect(dict.entries().iter().map(|(key, _)| key.clone()))?, Sequence::List, budget)
        }
        Value::Text(text) => {
            let chars = text.str();
            let count = chars.chars().count();
            budget.charge_items(count)?;
            let held = budget.hold(count * size_of::<Value>())?;
            let one = |(at, c): (usize, char)| Value::Text(text.slice(at..at + c.len_utf8()));
            let values = collect(chars.char_indices().map(one))?;
            drop(held);
            List::new(values, Sequence::List, budget)
        }
        other => Err(Failure::error(format!("'{}' object is not iterable", other.type_name()))),
    }
}

/// Returns the items for `map`, `select` and the like, which take every false value for an empty list.
pub(super) fn iterate_true(value: &Value, budget: &Budget<'_>) -> Outcome<List> {
    if value.is_true() { iterate(value, budget) } else { List::new(Vec::new(), Sequence::List, budget) }
}

impl Evaluator<'_, '_, '_> {
    pub(super) fn call_builtin(&mut self, builtin: Builtin, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        match builtin {
            Builtin::Range => range(arguments, budget),
            Builtin::Dict => {
                let mut entries = Vec::new();
                for value in &arguments.positional {
                    let mut more = pairs(value, budget)?;
                    reserve_exact(&mut entries, more.len())?;
                    entries.append(&mut more);
                }
                let mut named = named_pairs(arguments, budget)?;
                reserve_exact(&mut entries, named.len())?;
                entries.append(&mut named);
                Ok(Value::Dict(Dict::new(entries, budget)?))
            }
            Builtin::Namespace => {
                let namespace = self.new_namespace()?;
                for value in &arguments.positional {
                    for (key, value) in pairs(value, budget)? {
                        let name = to_text(&key, budget)?.str().to_owned();
                        self.set_attribute(namespace, &name, value)?;
                    }
                }
                for (name, value) in arguments.named {
                    self.set_attribute(namespace, &name, value)?;
                }
                Ok(Value::Namespace(namespace))
            }
            Builtin::Joiner => {
                let [separator] = arguments.bind("joiner", ["sep"])?;
                let separator = separator.map_or_else(|| Value::text(", ", true, budget), Ok)?;
                let items = vec![Value::text("", true, budget)?, separator];
                Ok(Value::Cycle(Rc::new(Cycle::new(items, true, budget)?)))
            }
            Builtin::Cycler => {
                if arguments.positional.is_empty() {
                    return Err(Failure::error("cycler: at least one item has to be provided"));
                }
                Ok(Value::Cycle(Rc::new(Cycle::new(arguments.positional, false, budget)?)))
            }
            Builtin::RaiseException => {
                let [message] = arguments.bind("raise_exception", ["message"])?;
                let message = to_text(&message.unwrap_or(Value::None), budget)?;
                Err(Failure::new(Kind::Refused(message.str().to_owned())))
            }
            Builtin::StrftimeNow => {
                let [format] = arguments.bind("strftime_now", ["format"])?;
                let Some(format) = text_argument(format, "strftime_now")? else {
                    return Err(Failure::error("strftime_now: expected a format"));
                };
                let Some(now) = self.now else {
                    let message = "the template calls strftime_now, but the conversation has no date";
                    return Err(Failure::error(message));
                };
                budget.charge_bytes(format.len().saturating_mul(8))?;
                let text = now.format(&format.str()).map_err(Failure::error)?;
                Value::text(&text, format.is_trusted(), budget)
            }
        }
    }
}

/// Returns arguments with names as entries of a dictionary.
pub(super) fn named_pairs(arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Vec<(Value, Value)>> {
    let trusted = !arguments.has_foreign_names;
    let pair = |(name, value): (String, Value)| Ok((Value::text(&name, trusted, budget)?, value));
    try_collect(arguments.named.into_iter().map(pair))
}

/// Returns the entries of a dictionary, or pairs of a list.
fn pairs(value: &Value, budget: &Budget<'_>) -> Outcome<Vec<(Value, Value)>> {
    if let Value::Dict(dict) = value {
        budget.charge_items(dict.entries().len())?;
        return collect(dict.entries().iter().cloned());
    }
    let list = iterate(value, budget)?;
    budget.charge_items(list.len())?;
    let pair = |value: &Value| match iterate(value, budget)?.values() {
        [key, value] => Ok((key.clone(), value.clone())),
        other => Err(Failure::error(format!("expected pairs, found a sequence of {}", other.len()))),
    };
    try_collect(list.values().iter().map(pair))
}

fn range(arguments: CallArguments, budget: &Budget<'_>) -> Outcome<Value> {
    let trusted = arguments.positional.iter().all(|value| matches!(value, Value::Int(_, true)));
    let [first, second, step] = arguments.bind("range", ["start", "stop", "step"])?;
    let Some(first) = int_argument(first, "range")? else { return Err(Failure::error("range: expected an integer")) };
    let (start, stop) = match int_argument(second, "range")? {
        Some(second) => (first, second),
        None => (0, first),
    };
    let step = int_argument(step, "range")?.unwrap_or(1);
    if step == 0 {
        return Err(Failure::error("range() arg 3 must not be zero"));
    }
    let too_big = || Failure::error(format!("range too big: more than {MAX_RANGE} numbers"));
    let distance = if step > 0 { stop.checked_sub(start) } else { start.checked_sub(stop) };
    let count = distance.ok_or_else(too_big)?.max(0).checked_add(step.checked_abs().ok_or_else(too_big)? - 1);
    let count = count.ok_or_else(too_big)? / step.abs();
    if count > MAX_RANGE as i128 {
        return Err(too_big());
    }
    budget.charge_items(count as usize)?;
    Value::list(collect((0..count).map(|index| Value::Int(start + index * step, trusted)))?, budget)
}
