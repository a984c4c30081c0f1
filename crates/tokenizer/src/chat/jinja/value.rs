//! Values of templates. They are immutable and shared, as in the reference implementation's sandbox; only namespaces
//! change. Every list and dictionary knows its depth, and depth is bounded, so that comparing, printing and dropping
//! values cannot overflow the stack.

use std::cell::Cell;
use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

use super::budget::{Budget, Held, collect, with_capacity};
use super::failure::{Failure, Outcome};
use super::syntax::{For, Macro, Symbol};
use super::text::Text;

/// Maximum nesting of lists, dictionaries and closures. Values from JSON nest at most half as deep.
const MAX_DEPTH: u32 = 256;

#[derive(Clone)]
pub(super) enum Value {
    /// With the message of the error that using it causes.
    Undefined(Option<Rc<str>>),
    None,
    Bool(bool),
    /// With its origin: whether the template wrote or counted it.
    Int(i128, bool),
    Float(f64),
    Text(Text),
    List(List),
    Dict(Rc<Dict>),
    /// An index into the evaluator's namespaces. They live as long as the rendering, so cycles leak nothing.
    Namespace(usize),
    Loop(Rc<Loop>),
    Macro(Rc<Closure>),
    Cycle(Rc<Cycle>),
    /// A method of a value, not called yet.
    Method(Rc<(Value, String)>),
    Function(Builtin),
}

/// Functions that every template can call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Builtin {
    Range,
    Dict,
    Namespace,
    Joiner,
    Cycler,
    RaiseException,
    StrftimeNow,
}

/// Python's types of sequences and iterators, as far as templates can tell them apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Sequence {
    List,
    Tuple,
    /// `dict.keys()` and the like: has a length, but no items by index.
    View,
    /// The result of `map` or `select`: is always true, and has neither length nor items by index.
    Generator,
}

struct Items {
    values: Vec<Value>,
    depth: u32,
    _held: Held,
}

/// A part of a shared list.
#[derive(Clone)]
pub(super) struct List {
    items: Rc<Items>,
    start: u32,
    end: u32,
    pub(super) kind: Sequence,
}

impl List {
    pub(super) fn new(values: Vec<Value>, kind: Sequence, budget: &Budget<'_>) -> Outcome<List> {
        budget.charge_items(values.len())?;
        let held = budget.hold(size_of::<Items>() + values.capacity() * size_of::<Value>())?;
        let depth = checked_depth(values.iter())?;
        let end = u32::try_from(values.len()).map_err(|_| Failure::error("a list is too long"))?;
        Ok(List { items: Rc::new(Items { values, depth, _held: held }), start: 0, end, kind })
    }

    pub(super) fn values(&self) -> &[Value] {
        &self.items.values[self.start as usize..self.end as usize]
    }

    pub(super) fn len(&self) -> usize {
        (self.end - self.start) as usize
    }

    /// Returns a part of the list without copying it.
    pub(super) fn slice(&self, range: std::ops::Range<usize>) -> List {
        List { start: self.start + range.start as u32, end: self.start + range.end as u32, ..self.clone() }
    }

    pub(super) fn with_kind(&self, kind: Sequence) -> List {
        List { kind, ..self.clone() }
    }
}

/// A dictionary in the order of insertion.
pub(super) struct Dict {
    entries: Vec<(Value, Value)>,
    /// Indexes of the entries whose key is text, sorted by key, if there are many.
    by_text: Vec<u32>,
    depth: u32,
    _held: Held,
}

/// Dictionaries up to this size are searched entry by entry.
const SMALL_DICT: usize = 12;

impl Dict {
    /// Makes a dictionary; of equal keys the last value counts, at the place of the first.
    pub(super) fn new(entries: Vec<(Value, Value)>, budget: &Budget<'_>) -> Outcome<Rc<Dict>> {
        budget.charge_items(entries.len() * 2)?;
        let bytes = entries.capacity() * (size_of::<(Value, Value)>() + size_of::<u32>());
        let held = budget.hold(size_of::<Dict>() + bytes)?;
        let is_hashable = |key: &Value| match key {
            Value::List(list) => list.kind == Sequence::Tuple,
            other => !matches!(other, Value::Dict(_)),
        };
        if let Some((key, _)) = entries.iter().find(|(key, _)| !is_hashable(key)) {
            return Err(Failure::error(format!("unhashable type: '{}'", key.type_name())));
        }
        let depth = checked_depth(entries.iter().flat_map(|(key, value)| [key, value]))?;
        let mut dict = Dict { entries, by_text: Vec::new(), depth, _held: held };
        dict.remove_duplicates(budget)?;
        Ok(Rc::new(dict))
    }

    fn remove_duplicates(&mut self, budget: &Budget<'_>) -> Outcome<()> {
        let is_text = |entry: &(Value, Value)| matches!(entry.0, Value::Text(_));
        if self.entries.len() <= SMALL_DICT || !self.entries.iter().all(is_text) {
            let mut unique: Vec<(Value, Value)> = with_capacity(self.entries.len())?;
            for (key, value) in std::mem::take(&mut self.entries) {
                let mut place = None;
                for (index, (known, _)) in unique.iter().enumerate() {
                    if known.equals(&key, budget)? {
                        place = Some(index);
                    }
                }
                match place {
                    Some(index) => unique[index].1 = value,
                    None => unique.push((key, value)),
                }
            }
            self.entries = unique;
            return Ok(());
        }
        let mut order: Vec<u32> = collect(0..self.entries.len() as u32)?;
        budget.charge_items(order.len() * order.len().ilog2() as usize)?;
        // An unstable sort allocates nothing; the index decides between equal keys.
        let compare = |a: u32, b: u32| compare_keys(&self.entries[a as usize].0, &self.entries[b as usize].0);
        order.sort_unstable_by(|&a, &b| compare(a, b).then(a.cmp(&b)));
        let is_same = |a: u32, b: u32| compare(a, b).is_eq();
        if order.windows(2).any(|pair| is_same(pair[0], pair[1])) {
            let mut last: Vec<Option<Value>> = collect(self.entries.iter().map(|_| None))?;
            for group in order.chunk_by(|a, b| is_same(*a, *b)) {
                last[group[0] as usize] = group.last().map(|&index| self.entries[index as usize].1.clone());
            }
            let entries = std::mem::take(&mut self.entries).into_iter().zip(last);
            self.entries = collect(entries.filter_map(|((key, _), value)| value.map(|value| (key, value))))?;
            order.truncate(self.entries.len());
            order.iter_mut().zip(0..).for_each(|(place, index)| *place = index);
            order.sort_unstable_by(|&a, &b| compare_keys(&self.entries[a as usize].0, &self.entries[b as usize].0));
        }
        self.by_text = order;
        Ok(())
    }

    pub(super) fn entries(&self) -> &[(Value, Value)] {
        &self.entries
    }

    pub(super) fn get_text(&self, key: &str) -> Option<&Value> {
        if self.by_text.is_empty() {
            let is_key = |found: &Value| matches!(found, Value::Text(text) if *text.str() == *key);
            return self.entries.iter().find(|(found, _)| is_key(found)).map(|(_, value)| value);
        }
        let order = |index: &u32| match &self.entries[*index as usize].0 {
            Value::Text(text) => (*text.str()).cmp(key),
            _ => Ordering::Less,
        };
        let found = self.by_text.binary_search_by(order).ok()?;
        Some(&self.entries[self.by_text[found] as usize].1)
    }

    pub(super) fn get(&self, key: &Value, budget: &Budget<'_>) -> Outcome<Option<&Value>> {
        budget.charge(self.entries.len().min(SMALL_DICT))?;
        if let Value::Text(text) = key {
            return Ok(self.get_text(&text.str()));
        }
        for (found, value) in &self.entries {
            if found.equals(key, budget)? {
                return Ok(Some(value));
            }
        }
        Ok(None)
    }
}

fn compare_keys(a: &Value, b: &Value) -> Ordering {
    match (a, b) {
        (Value::Text(a), Value::Text(b)) => (*a.str()).cmp(&b.str()),
        _ => Ordering::Equal,
    }
}

/// State of a running loop.
pub(super) struct Loop {
    pub(super) items: List,
    pub(super) index0: Cell<usize>,
    /// Depth of a recursive loop.
    pub(super) depth0: usize,
    /// The loop to call with other items, if it is recursive.
    pub(super) node: Option<Arc<For>>,
    /// The evaluator's number for the values of `loop.changed`, after its first call.
    pub(super) changed: Cell<Option<usize>>,
}

/// A `cycler`, or a `joiner`, which gives an empty text at its first call and its separator at all others.
pub(super) struct Cycle {
    pub(super) items: List,
    pub(super) position: Cell<usize>,
    pub(super) is_joiner: bool,
}

impl Cycle {
    pub(super) fn new(items: Vec<Value>, is_joiner: bool, budget: &Budget<'_>) -> Outcome<Cycle> {
        Ok(Cycle { items: List::new(items, Sequence::List, budget)?, position: Cell::new(0), is_joiner })
    }

    pub(super) fn current(&self) -> Value {
        self.items.values().get(self.position.get()).cloned().unwrap_or(Value::None)
    }
}

/// A macro with the variables of the loops and macros around its definition.
pub(super) struct Closure {
    pub(super) node: Arc<Macro>,
    pub(super) captured: Vec<(Symbol, Value)>,
    depth: u32,
    _held: Held,
}

impl Closure {
    pub(super) fn new(node: Arc<Macro>, captured: Vec<(Symbol, Value)>, budget: &Budget<'_>) -> Outcome<Closure> {
        budget.charge_items(captured.len())?;
        let held = budget.hold(size_of::<Closure>() + captured.capacity() * size_of::<(Symbol, Value)>())?;
        let depth = checked_depth(captured.iter().map(|(_, value)| value))?;
        Ok(Closure { node, captured, depth, _held: held })
    }
}

/// Returns one more than the maximum depth of the values.
fn checked_depth<'v>(values: impl Iterator<Item = &'v Value>) -> Outcome<u32> {
    let depth = values.map(Value::depth).max().unwrap_or(0) + 1;
    if depth > MAX_DEPTH {
        return Err(Failure::error(format!("lists and dictionaries nest deeper than {MAX_DEPTH} levels")));
    }
    Ok(depth)
}

impl Value {
    /// Returns the undefined value of a variable or attribute.
    pub(super) fn undefined(message: String) -> Value {
        Value::Undefined(Some(message.into()))
    }

    pub(super) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub(super) fn method(value: Value, name: &str) -> Outcome<Value> {
        checked_depth([&value].into_iter())?;
        Ok(Value::Method(Rc::new((value, name.to_owned()))))
    }

    pub(super) fn text(text: &str, trusted: bool, budget: &Budget<'_>) -> Outcome<Value> {
        Ok(Value::Text(Text::new(text, trusted, budget)?))
    }

    pub(super) fn list(values: Vec<Value>, budget: &Budget<'_>) -> Outcome<Value> {
        Ok(Value::List(List::new(values, Sequence::List, budget)?))
    }

    pub(super) fn sequence(values: Vec<Value>, kind: Sequence, budget: &Budget<'_>) -> Outcome<Value> {
        Ok(Value::List(List::new(values, kind, budget)?))
    }

    fn depth(&self) -> u32 {
        match self {
            Value::List(list) => list.items.depth,
            Value::Dict(dict) => dict.depth,
            Value::Macro(closure) => closure.depth,
            Value::Loop(state) => state.items.items.depth + 1,
            Value::Cycle(cycle) => cycle.items.items.depth + 1,
            Value::Method(method) => method.0.depth() + 1,
            _ => 0,
        }
    }

    /// Returns the name of the value's type in Python.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(..) => "int",
            Value::Float(_) => "float",
            Value::Text(text) if text.is_markup => "Markup",
            Value::Text(_) => "str",
            Value::List(list) => match list.kind {
                Sequence::List => "list",
                Sequence::Tuple => "tuple",
                Sequence::View => "dict_view",
                Sequence::Generator => "generator",
            },
            Value::Dict(_) => "dict",
            Value::Namespace(_) => "Namespace",
            Value::Loop(_) => "LoopContext",
            Value::Cycle(cycle) => {
                if cycle.is_joiner {
                    "Joiner"
                } else {
                    "Cycler"
                }
            }
            Value::Macro(_) => "Macro",
            Value::Method(_) | Value::Function(_) => "function",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value, _) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Text(text) => text.len() > 0,
            Value::List(list) => list.kind == Sequence::Generator || list.len() > 0,
            Value::Dict(dict) => !dict.entries.is_empty(),
            _ => true,
        }
    }

    /// Python's `==`. Charges for every part: shared lists can have exponentially many.
    pub(super) fn equals(&self, other: &Value, budget: &Budget<'_>) -> Outcome<bool> {
        budget.charge(1)?;
        Ok(match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Text(a), Value::Text(b)) => {
                let is_long = a.len() == b.len() && a.len() >= 64;
                budget.charge_bytes(if is_long { a.len() } else { 0 })?;
                *a.str() == *b.str()
            }
            (Value::List(a), Value::List(b)) => {
                let mut same = a.kind == b.kind && a.len() == b.len();
                for (a, b) in a.values().iter().zip(b.values()) {
                    same = same && a.equals(b, budget)?;
                }
                same
            }
            (Value::Dict(a), Value::Dict(b)) => {
                let mut same = a.entries.len() == b.entries.len();
                for (key, value) in &a.entries {
                    same = same
                        && match b.get(key, budget)? {
                            Some(other) => value.equals(other, budget)?,
                            None => false,
                        };
                }
                same
            }
            (Value::Namespace(a), Value::Namespace(b)) => a == b,
            (Value::Loop(a), Value::Loop(b)) => Rc::ptr_eq(a, b),
            (Value::Cycle(a), Value::Cycle(b)) => Rc::ptr_eq(a, b),
            (Value::Macro(a), Value::Macro(b)) => Rc::ptr_eq(a, b),
            (Value::Method(a), Value::Method(b)) => a.1 == b.1 && a.0.equals(&b.0, budget)?,
            (Value::Function(a), Value::Function(b)) => a == b,
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.as_number(), other.as_number()), (Some(a), Some(b)) if a == b),
            },
        })
    }

    /// Returns an integer or a boolean as a number.
    pub(super) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Bool(value) => Some(i128::from(*value)),
            Value::Int(value, _) => Some(*value),
            _ => None,
        }
    }

    /// Returns any number, booleans included.
    pub(super) fn as_number(&self) -> Option<f64> {
        match self {
            Value::Float(value) => Some(*value),
            other => other.as_int().map(|value| value as f64),
        }
    }
}
