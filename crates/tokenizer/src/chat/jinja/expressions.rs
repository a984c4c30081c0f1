//! Evaluates expressions: names, attributes, items, slices, calls. Operators, filters and methods are elsewhere.

use std::ops::Range;
use std::rc::Rc;

use super::budget::{collect, push, reserve_exact};
use super::builtins::{CallArguments, is_method, is_refused, iterate};
use super::evaluate::Evaluator;
use super::failure::{Failure, Outcome};
use super::operators::{arithmetic, compare, defined};
use super::print;
use super::syntax::{Arguments, Arithmetic, Expression};
use super::text::{Text, TextBuilder};
use super::value::{Dict, Sequence, Value};

impl Evaluator<'_, '_, '_> {
    pub(super) fn value(&mut self, expression: &Expression) -> Outcome<Value> {
        // The frequent leaves need no level of recursion.
        match expression {
            Expression::Text(id) => return Ok(Value::Text(self.literal(*id)?)),
            Expression::Name(symbol) => {
                return self.variable(*symbol);
            }
            _ => {}
        }
        self.budget.enter()?;
        let value = self.composite(expression);
        self.budget.leave();
        value
    }

    fn composite(&mut self, expression: &Expression) -> Outcome<Value> {
        let budget = self.budget;
        Ok(match expression {
            Expression::Text(id) => Value::Text(self.literal(*id)?),
            Expression::Name(symbol) => self.variable(*symbol)?,
            Expression::Int(number) => Value::Int(*number, true),
            Expression::Float(number) => Value::Float(*number),
            Expression::Bool(value) => Value::Bool(*value),
            Expression::None => Value::None,
            Expression::Attribute(value, name) => {
                let value = self.value(value)?;
                let program = self.program;
                self.attribute(&value, &program.strings[*name as usize])?
            }
            Expression::Item(pair) => {
                let value = self.value(&pair.0)?;
                let key = self.value(&pair.1)?;
                self.item(&value, &key)?
            }
            Expression::Slice(slice) => self.slice(&slice.0, &slice.1)?,
            Expression::Call(call) => self.call_expression(&call.0, &call.1, None)?,
            Expression::Filter(filter) => {
                let value = self.value(&filter.0)?;
                let arguments = self.arguments(&filter.1.arguments)?;
                self.filter(&filter.1.name, value, arguments)?
            }
            Expression::Test(test) => {
                let value = self.value(&test.0)?;
                let arguments = self.arguments(&test.1.arguments)?;
                Value::Bool(self.test(&test.1.name, &value, &arguments.positional)?)
            }
            Expression::Not(value) => Value::Bool(!self.value(value)?.is_true()),
            Expression::Negative(value) => {
                let value = self.value(value)?;
                arithmetic(Arithmetic::Multiply, number(value, "-")?, Value::Int(-1, true), budget)?
            }
            Expression::Positive(value) => number(self.value(value)?, "+")?,
            Expression::And(items) => self.first(items, false)?,
            Expression::Or(items) => self.first(items, true)?,
            Expression::Compare(first, rest) => {
                let mut left = self.value(first)?;
                for (comparison, expression) in rest {
                    let right = self.value(expression)?;
                    if !compare(*comparison, &left, &right, budget)? {
                        return Ok(Value::Bool(false));
                    }
                    left = right;
                }
                Value::Bool(true)
            }
            Expression::Arithmetic(first, rest) => {
                let mut left = self.value(first)?;
                for (operator, expression) in rest {
                    let right = self.value(expression)?;
                    left = arithmetic(*operator, left, right, budget)?;
                }
                left
            }
            Expression::Concat(items) => self.concatenation(items)?,
            Expression::Conditional(parts) => {
                let (condition, value, otherwise) = &**parts;
                if self.value(condition)?.is_true() {
                    self.value(value)?
                } else if let Some(otherwise) = otherwise {
                    self.value(otherwise)?
                } else {
                    let message = "the inline if-expression evaluated to false and no else section was defined";
                    Value::undefined(message.to_owned())
                }
            }
            Expression::List(items) => Value::list(self.values(items)?, budget)?,
            Expression::Tuple(items) => Value::sequence(self.values(items)?, Sequence::Tuple, budget)?,
            Expression::Dict(pairs) => {
                let mut entries = Vec::with_capacity(pairs.len());
                for (key, value) in pairs {
                    entries.push((self.value(key)?, self.value(value)?));
                }
                Value::Dict(Dict::new(entries, budget)?)
            }
        })
    }

    fn values(&mut self, items: &[Expression]) -> Outcome<Vec<Value>> {
        items.iter().map(|item| self.value(item)).collect()
    }

    /// Returns the first value whose truth is `wanted`, or the last one.
    fn first(&mut self, items: &[Expression], wanted: bool) -> Outcome<Value> {
        let mut value = Value::None;
        for item in items {
            value = self.value(item)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    fn concatenation(&mut self, items: &[Expression]) -> Outcome<Value> {
        let first = self.value(&items[0])?;
        let mut text = print::to_text(&first, self.budget)?.with_markup(false);
        for item in &items[1..] {
            let value = self.value(item)?;
            text = text.join(&print::to_text(&value, self.budget)?, self.budget)?;
        }
        Ok(Value::Text(text))
    }

    pub(super) fn arguments(&mut self, arguments: &Arguments) -> Outcome<CallArguments> {
        let mut positional = self.values(&arguments.positional)?;
        let mut named = Vec::with_capacity(arguments.named.len());
        let mut has_foreign_names = false;
        for (symbol, expression) in &arguments.named {
            let value = self.value(expression)?;
            named.push((self.program.names[*symbol as usize].clone(), value));
        }
        if let Some(more) = &arguments.more {
            let more = self.value(more)?;
            let more = iterate(&more, self.budget)?;
            reserve_exact(&mut positional, more.len())?;
            positional.extend_from_slice(more.values());
        }
        if let Some(more) = &arguments.more_named {
            let more = self.value(more)?;
            let Value::Dict(dict) = &more else {
                return Err(Failure::error(format!("argument after ** must be a mapping, not {}", more.type_name())));
            };
            self.budget.charge_items(dict.entries().len())?;
            reserve_exact(&mut named, dict.entries().len())?;
            for (key, value) in dict.entries() {
                let Value::Text(key) = key else { return Err(Failure::error("keywords must be strings")) };
                self.budget.charge_bytes(key.len())?;
                has_foreign_names |= !key.is_trusted();
                named.push((key.str().to_owned(), value.clone()));
            }
        }
        Ok(CallArguments { positional, named, has_foreign_names, caller: None })
    }

    /// Evaluates a call. A method is called without making a value of it.
    pub(super) fn call_expression(
        &mut self,
        function: &Expression,
        arguments: &Arguments,
        caller: Option<Value>,
    ) -> Outcome<Value> {
        if let Expression::Attribute(value, name) = function {
            let value = self.value(value)?;
            let program = self.program;
            let name = &program.strings[*name as usize];
            if is_method(&value, name) {
                let arguments = self.arguments(arguments)?;
                return self.call_method(&value, name, arguments);
            }
            let function = self.attribute(&value, name)?;
            let arguments = CallArguments { caller, ..self.arguments(arguments)? };
            return self.call(&function, arguments);
        }
        let function = self.value(function)?;
        let arguments = CallArguments { caller, ..self.arguments(arguments)? };
        self.call(&function, arguments)
    }

    pub(super) fn call(&mut self, function: &Value, arguments: CallArguments) -> Outcome<Value> {
        match function {
            Value::Macro(closure) => self.call_macro(closure, arguments),
            Value::Method(method) => self.call_method(&method.0, &method.1, arguments),
            Value::Function(builtin) => self.call_builtin(*builtin, arguments),
            Value::Cycle(cycle) if cycle.is_joiner => {
                let [] = arguments.bind("joiner", [])?;
                let current = cycle.current();
                cycle.position.set(1);
                Ok(current)
            }
            Value::Loop(state) => {
                let state = Rc::clone(state);
                self.call_loop(&state, arguments)
            }
            other => {
                defined(other)?;
                Err(Failure::error(format!("'{}' object is not callable", other.type_name())))
            }
        }
    }

    /// `value.name`: a method or property of the value's type before an entry of a dictionary.
    pub(super) fn attribute(&mut self, value: &Value, name: &str) -> Outcome<Value> {
        defined(value)?;
        if is_method(value, name) {
            return Value::method(value.clone(), name);
        }
        if is_refused(value, name) {
            return Ok(unsafe_attribute(value, name));
        }
        let found = match value {
            Value::Dict(dict) => {
                self.budget.charge(dict.entries().len().min(8) / 4 + 1)?;
                dict.get_text(name).cloned()
            }
            Value::Namespace(index) => self.namespaces[*index].attributes.get(name).cloned(),
            Value::Loop(state) => loop_attribute(state, name),
            Value::Cycle(cycle) if name == "current" && !cycle.is_joiner => Some(cycle.current()),
            Value::Macro(closure) if name == "name" => {
                Some(Value::text(&self.program.names[closure.node.name as usize], true, self.budget)?)
            }
            _ => None,
        };
        Ok(found.unwrap_or_else(|| no_attribute(value, name)))
    }

    /// `value[key]`: an item of a list or dictionary before a method.
    pub(super) fn item(&mut self, value: &Value, key: &Value) -> Outcome<Value> {
        defined(value)?;
        let found = match (value, key) {
            (Value::Dict(dict), _) => dict.get(key, self.budget)?.cloned(),
            (Value::List(list), _) if matches!(list.kind, Sequence::List | Sequence::Tuple) => {
                key.as_int().and_then(|index| position(index, list.len())).map(|index| list.values()[index].clone())
            }
            (Value::Text(text), _) => match key.as_int() {
                None => None,
                Some(index) => self.char_range(text, index)?.map(|range| Value::Text(text.slice(range))),
            },
            (Value::Namespace(index), Value::Text(name)) => {
                self.namespaces[*index].attributes.get(&*name.str()).cloned()
            }
            _ => None,
        };
        if let Some(found) = found {
            return Ok(found);
        }
        match key {
            Value::Text(name) => {
                let name = name.str();
                if is_method(value, &name) {
                    return Value::method(value.clone(), &name);
                }
                if is_refused(value, &name) {
                    return Ok(unsafe_attribute(value, &name));
                }
                Ok(no_attribute(value, &name))
            }
            other => {
                let key = print::to_text(other, self.budget)?;
                Ok(Value::undefined(format!("'{} object' has no element {}", value.type_name(), &*key.str())))
            }
        }
    }

    /// Returns the bytes of the character at an index that may be negative; `None` if it is out of range.
    fn char_range(&self, text: &Text, index: i128) -> Outcome<Option<Range<usize>>> {
        let chars = text.str();
        let found = if index >= 0 {
            let index = usize::try_from(index).unwrap_or(usize::MAX);
            self.budget.charge_bytes(index.min(text.len()))?;
            chars.char_indices().nth(index)
        } else {
            let index = usize::try_from(-(index + 1)).unwrap_or(usize::MAX);
            self.budget.charge_bytes(index.min(text.len()))?;
            chars.char_indices().nth_back(index)
        };
        Ok(found.map(|(at, c)| at..at + c.len_utf8()))
    }

    /// Returns the byte offset of the character at an index that may be negative, within the text.
    fn char_offset(&self, text: &Text, index: i128) -> Outcome<usize> {
        let found = self.char_range(text, index)?.map(|range| range.start);
        Ok(found.unwrap_or(if index < 0 { 0 } else { text.len() }))
    }

    fn slice(&mut self, value: &Expression, bounds: &[Option<Expression>; 3]) -> Outcome<Value> {
        let value = self.value(value)?;
        defined(&value)?;
        let mut numbers = [None; 3];
        for (number, bound) in numbers.iter_mut().zip(bounds) {
            let Some(bound) = bound else { continue };
            let bound = self.value(bound)?;
            *number = match (&bound, bound.as_int()) {
                (Value::None, _) => None,
                (_, Some(index)) => Some(index),
                _ => return Err(Failure::error("slice indices must be integers or None")),
            };
        }
        let [start, stop, step] = numbers;
        let step = step.unwrap_or(1);
        if step == 0 {
            return Err(Failure::error("slice step cannot be zero"));
        }
        match &value {
            Value::List(list) if matches!(list.kind, Sequence::List | Sequence::Tuple) => {
                let (range, picked) = slice_indexes(start, stop, step, list.len())?;
                if step == 1 {
                    return Ok(Value::List(list.slice(range)));
                }
                self.budget.charge_items(picked.len())?;
                let values = collect(picked.into_iter().map(|index| list.values()[index].clone()))?;
                Value::sequence(values, list.kind, self.budget)
            }
            Value::Text(text) => {
                if step == 1 {
                    let start = start.map_or(Ok(0), |index| self.char_offset(text, index))?;
                    let stop = stop.map_or(Ok(text.len()), |index| self.char_offset(text, index))?;
                    return Ok(Value::Text(text.slice(start..stop.max(start))));
                }
                self.budget.charge_bytes(text.len())?;
                let chars = text.str();
                let held = self.budget.hold(text.len() * size_of::<(usize, char)>())?;
                let places: Vec<(usize, char)> = collect(chars.char_indices())?;
                let (_, picked) = slice_indexes(start, stop, step, places.len())?;
                let mut out = TextBuilder::new(self.budget)?;
                for index in picked {
                    let (at, c) = places[index];
                    out.push_slice(text, at..at + c.len_utf8())?;
                }
                drop(held);
                Ok(Value::Text(out.finish()))
            }
            other => Ok(Value::undefined(format!("'{} object' has no slices", other.type_name()))),
        }
    }
}

fn number(value: Value, operator: &str) -> Outcome<Value> {
    defined(&value)?;
    match value {
        Value::Bool(value) => Ok(Value::Int(i128::from(value), false)),
        Value::Int(..) | Value::Float(_) => Ok(value),
        other => Err(Failure::error(format!("bad operand type for unary {operator}: '{}'", other.type_name()))),
    }
}

/// Returns an index that may be negative as an offset; `None` if it is out of range.
fn position(index: i128, len: usize) -> Option<usize> {
    let index = if index < 0 { index.checked_add(len as i128)? } else { index };
    usize::try_from(index).ok().filter(|index| *index < len)
}

/// Python's slice: the range for step 1, and the indexes for other steps.
fn slice_indexes(
    start: Option<i128>,
    stop: Option<i128>,
    step: i128,
    len: usize,
) -> Outcome<(Range<usize>, Vec<usize>)> {
    let len = len as i128;
    let (low, high) = if step > 0 { (0, len) } else { (-1, len - 1) };
    let clamp = |bound: i128| {
        let bound = if bound < 0 { bound.saturating_add(len) } else { bound };
        bound.clamp(low, high)
    };
    let start = start.map_or(if step > 0 { low } else { high }, clamp);
    let stop = stop.map_or(if step > 0 { high } else { low }, clamp);
    if step == 1 {
        return Ok((start as usize..stop.max(start) as usize, Vec::new()));
    }
    let mut picked = Vec::new();
    let mut at = start;
    while if step > 0 { at < stop } else { at > stop } {
        push(&mut picked, at as usize)?;
        at = at.saturating_add(step);
    }
    Ok((0..0, picked))
}

fn loop_attribute(state: &super::value::Loop, name: &str) -> Option<Value> {
    let (index, items) = (state.index0.get(), state.items.values());
    let int = |value: usize| Some(Value::Int(value as i128, true));
    match name {
        "index" => int(index + 1),
        "index0" => int(index),
        "revindex" => int(items.len() - index),
        "revindex0" => int(items.len() - index - 1),
        "length" => int(items.len()),
        "first" => Some(Value::Bool(index == 0)),
        "last" => Some(Value::Bool(index + 1 == items.len())),
        "depth" => int(state.depth0 + 1),
        "depth0" => int(state.depth0),
        "previtem" => index.checked_sub(1).map(|index| items[index].clone()),
        "nextitem" => items.get(index + 1).cloned(),
        _ => None,
    }
}

fn no_attribute(value: &Value, name: &str) -> Value {
    Value::undefined(format!("'{} object' has no attribute '{name}'", value.type_name()))
}

/// The undefined value of an attribute that the reference implementation's sandbox refuses.
fn unsafe_attribute(value: &Value, name: &str) -> Value {
    Value::undefined(format!("access to attribute '{name}' of '{}' object is unsafe", value.type_name()))
}
