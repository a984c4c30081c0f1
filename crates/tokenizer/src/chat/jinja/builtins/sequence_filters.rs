//! Filters of lists and dictionaries.

use std::cmp::Ordering;

use super::filters::length;
use super::text_methods::required;
use super::{CallArguments, count_argument, is_set, iterate, iterate_true, text_argument};
use crate::chat::jinja::budget::{Budget, collect, push, reserve_exact, with_capacity};
use crate::chat::jinja::evaluate::Evaluator;
use crate::chat::jinja::failure::{Failure, Outcome};
use crate::chat::jinja::operators::{arithmetic, order};
use crate::chat::jinja::print::to_text;
use crate::chat::jinja::syntax::Arithmetic;
use crate::chat::jinja::text::TextBuilder;
use crate::chat::jinja::value::{List, Sequence, Value};

impl Evaluator<'_, '_, '_> {
    pub(super) fn sequence_filter(&mut self, name: &str, value: Value, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        match name {
            "length" | "count" => {
                let [] = arguments.bind(name, [])?;
                length(&value, budget)
            }
            "list" => {
                let [] = arguments.bind(name, [])?;
                Ok(Value::List(iterate(&value, budget)?.with_kind(Sequence::List)))
            }
            "first" | "last" => {
                let [] = arguments.bind(name, [])?;
                let items = iterate(&value, budget)?;
                let found = if name == "first" { items.values().first() } else { items.values().last() };
                let empty = || Value::undefined(format!("No {name} item, sequence was empty."));
                Ok(found.cloned().unwrap_or_else(empty))
            }
            "join" => {
                let [separator, attribute] = arguments.bind(name, ["d", "attribute"])?;
                self.join(&value, separator, attribute)
            }
            "items" => {
                let [] = arguments.bind(name, [])?;
                match &value {
                    Value::Undefined(_) => Value::sequence(Vec::new(), Sequence::Generator, budget),
                    Value::Dict(_) => match self.call_method(&value, "items", CallArguments::default())? {
                        Value::List(list) => Ok(Value::List(list.with_kind(Sequence::Generator))),
                        other => Ok(other),
                    },
                    other => {
                        let found = other.type_name();
                        Err(Failure::error(format!("Can only get item pairs from a mapping, not {found}")))
                    }
                }
            }
            "reverse" => {
                let [] = arguments.bind(name, [])?;
                if let Value::Text(text) = &value {
                    let mut out = TextBuilder::new(budget)?;
                    for (at, c) in text.str().char_indices().rev() {
                        out.push_slice(text, at..at + c.len_utf8())?;
                    }
                    return Ok(Value::Text(out.finish()));
                }
                let items = iterate(&value, budget)?;
                budget.charge_items(items.len())?;
                Value::sequence(collect(items.values().iter().rev().cloned())?, Sequence::Generator, budget)
            }
            "map" => self.map(&value, arguments),
            "select" | "reject" => self.select(&value, None, &arguments.positional, name == "select"),
            "selectattr" | "rejectattr" => match &arguments.positional[..] {
                [attribute, rest @ ..] => self.select(&value, Some(attribute), rest, name == "selectattr"),
                [] => Err(Failure::error(format!("{name}: missing attribute"))),
            },
            "sort" => {
                let [reverse, case_sensitive, attribute] =
                    arguments.bind(name, ["reverse", "case_sensitive", "attribute"])?;
                let items = iterate(&value, budget)?;
                let keys = self.sort_keys(&items, attribute.as_ref(), is_set(&case_sensitive))?;
                let sorted = sort(&keys, is_set(&reverse), budget)?;
                Value::list(collect(sorted.into_iter().map(|index| items.values()[index].clone()))?, budget)
            }
            "unique" => {
                let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"])?;
                let items = iterate(&value, budget)?;
                let keys = self.sort_keys(&items, attribute.as_ref(), is_set(&case_sensitive))?;
                let mut kept: Vec<usize> = Vec::new();
                for (index, key) in keys.iter().enumerate() {
                    let mut is_new = true;
                    for known in &kept {
                        is_new = is_new && !keys[*known].equals(key, budget)?;
                    }
                    if is_new {
                        push(&mut kept, index)?;
                    }
                }
                let values = collect(kept.into_iter().map(|index| items.values()[index].clone()))?;
                Value::sequence(values, Sequence::Generator, budget)
            }
            "min" | "max" => {
                let [case_sensitive, attribute] = arguments.bind(name, ["case_sensitive", "attribute"])?;
                let items = iterate(&value, budget)?;
                let keys = self.sort_keys(&items, attribute.as_ref(), is_set(&case_sensitive))?;
                let wanted = if name == "min" { Ordering::Less } else { Ordering::Greater };
                let mut best = 0;
                for index in 1..keys.len() {
                    if order(&keys[index], &keys[best], "<", budget)? == Some(wanted) {
                        best = index;
                    }
                }
                let empty = || Value::undefined("No aggregated item, sequence was empty.".to_owned());
                Ok(items.values().get(best).cloned().unwrap_or_else(empty))
            }
            "sum" => {
                let [attribute, start] = arguments.bind(name, ["attribute", "start"])?;
                let mut sum = start.unwrap_or(Value::Int(0, true));
                for item in iterate(&value, budget)?.values() {
                    let item = self.attribute_of(item, attribute.as_ref())?;
                    sum = arithmetic(Arithmetic::Add, sum, item, budget)?;
                }
                Ok(sum)
            }
            "dictsort" => self.dictsort(&value, arguments),
            "groupby" => self.groupby(&value, arguments),
            "batch" => {
                let [count, fill] = arguments.bind(name, ["linecount", "fill_with"])?;
                batch(&iterate(&value, budget)?, count_argument(count, 0, name)?, fill, budget)
            }
            "slice" => {
                let [count, fill] = arguments.bind(name, ["slices", "fill_with"])?;
                divide(&iterate(&value, budget)?, count_argument(count, 0, name)?, fill, budget)
            }
            other => Err(Failure::error(format!("no filter named '{other}'"))),
        }
    }

    fn join(&mut self, value: &Value, separator: Option<Value>, attribute: Option<Value>) -> Outcome<Value> {
        let budget = self.budget;
        let separator = separator.map(|separator| to_text(&separator, budget)).transpose()?;
        let mut out = TextBuilder::new(budget)?;
        for (index, item) in iterate(value, budget)?.values().iter().enumerate() {
            budget.charge(1)?;
            if let (true, Some(separator)) = (index > 0, &separator) {
                out.push_text(separator)?;
            }
            let item = self.attribute_of(item, attribute.as_ref())?;
            out.push_text(&to_text(&item, budget)?)?;
        }
        Ok(Value::Text(out.finish()))
    }

    fn map(&mut self, value: &Value, mut arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        let items = iterate_true(value, budget)?;
        let mut mapped = Vec::new();
        if arguments.positional.is_empty() {
            let [attribute, default] = arguments.bind("map", ["attribute", "default"])?;
            let attribute = required(attribute, "map")?;
            for item in items.values() {
                let value = self.path(item, &attribute)?;
                let value = match &default {
                    Some(default) if value.is_undefined() => default.clone(),
                    _ => value,
                };
                push(&mut mapped, value)?;
            }
        } else {
            let filter = required(text_argument(Some(arguments.positional.remove(0)), "map")?, "map")?;
            let filter = filter.str().to_owned();
            for item in items.values() {
                budget.charge(arguments.positional.len() + arguments.named.len() + 1)?;
                let (positional, named) = (arguments.positional.clone(), arguments.named.clone());
                let given = CallArguments { positional, named, ..CallArguments::default() };
                push(&mut mapped, self.filter(&filter, item.clone(), given)?)?;
            }
        }
        Value::sequence(mapped, Sequence::Generator, budget)
    }

    /// Returns an item, or the attribute of it that the filter names.
    fn attribute_of(&mut self, item: &Value, attribute: Option<&Value>) -> Outcome<Value> {
        match attribute {
            None | Some(Value::None) => Ok(item.clone()),
            Some(attribute) => self.path(item, attribute),
        }
    }

    /// Follows a path such as `function.name` or `0` from a value.
    pub(super) fn path(&mut self, value: &Value, path: &Value) -> Outcome<Value> {
        let Value::Text(names) = path else { return self.item(value, path) };
        let mut value = value.clone();
        let names = names.str().to_owned();
        for name in names.split('.') {
            let key = match name.parse::<i128>() {
                Ok(index) => Value::Int(index, true),
                Err(_) => Value::text(name, true, self.budget)?,
            };
            value = self.item(&value, &key)?;
        }
        Ok(value)
    }

    /// Returns the keys to sort items by: text in lower case unless `case_sensitive`.
    fn sort_keys(&mut self, items: &List, attribute: Option<&Value>, case_sensitive: bool) -> Outcome<Vec<Value>> {
        let mut keys = with_capacity(items.len())?;
        for item in items.values() {
            self.budget.charge(1)?;
            let key = self.attribute_of(item, attribute)?;
            keys.push(match &key {
                Value::Text(text) if !case_sensitive => {
                    let lower = text.str().to_lowercase();
                    Value::text(&lower, false, self.budget)?
                }
                _ => key,
            });
        }
        Ok(keys)
    }

    fn dictsort(&mut self, value: &Value, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        let [case_sensitive, by, reverse] = arguments.bind("dictsort", ["case_sensitive", "by", "reverse"])?;
        let by = text_argument(by, "dictsort")?.map_or("key".to_owned(), |by| by.str().to_owned());
        let index = match by.as_str() {
            "key" => 0,
            "value" => 1,
            _ => return Err(Failure::error("You can only sort by either \"key\" or \"value\"")),
        };
        if !matches!(value, Value::Dict(_)) {
            return Err(Failure::error(format!("dictsort: expected a mapping, found {}", value.type_name())));
        }
        let Value::List(pairs) = self.call_method(value, "items", CallArguments::default())? else {
            return Err(Failure::error("dictsort: expected a mapping"));
        };
        let keys = self.sort_keys(&pairs, Some(&Value::Int(index, true)), is_set(&case_sensitive))?;
        let sorted = sort(&keys, is_set(&reverse), budget)?;
        Value::list(collect(sorted.into_iter().map(|index| pairs.values()[index].clone()))?, budget)
    }

    fn groupby(&mut self, value: &Value, arguments: CallArguments) -> Outcome<Value> {
        let budget = self.budget;
        let [attribute, default, case_sensitive] =
            arguments.bind("groupby", ["attribute", "default", "case_sensitive"])?;
        let attribute = required(attribute, "groupby")?;
        let items = iterate(value, budget)?;
        let mut keys = self.sort_keys(&items, Some(&attribute), is_set(&case_sensitive))?;
        for key in keys.iter_mut().filter(|key| key.is_undefined()) {
            *key = default.clone().unwrap_or(Value::Undefined(None));
        }
        let sorted = sort(&keys, false, budget)?;
        let mut groups: Vec<(usize, Vec<Value>)> = Vec::new();
        for index in sorted {
            let item = items.values()[index].clone();
            match groups.last_mut() {
                Some((first, group)) if keys[*first].equals(&keys[index], budget)? => push(group, item)?,
                _ => push(&mut groups, (index, collect(std::iter::once(item))?))?,
            }
        }
        let mut pairs = with_capacity(groups.len())?;
        for (first, group) in groups {
            let key = self.path(&items.values()[first], &attribute)?;
            let key = if key.is_undefined() { keys[first].clone() } else { key };
            pairs.push(Value::sequence(vec![key, Value::list(group, budget)?], Sequence::Tuple, budget)?);
        }
        Value::list(pairs, budget)
    }
}

/// Returns the indexes of the keys in ascending order, equal keys in their order. A merge sort, because the order of
/// values can fail and, with numbers that are not numbers, need not be a total one.
fn sort(keys: &[Value], reverse: bool, budget: &Budget<'_>) -> Outcome<Vec<usize>> {
    let goes_first = if reverse { Ordering::Greater } else { Ordering::Less };
    let mut from: Vec<usize> = collect(0..keys.len())?;
    let mut width = 1;
    while width < keys.len() {
        let mut to = with_capacity(keys.len())?;
        for run in from.chunks(2 * width) {
            let (mut left, mut right) = run.split_at(width.min(run.len()));
            while let (Some(a), Some(b)) = (left.first(), right.first()) {
                let from_right = order(&keys[*b], &keys[*a], "<", budget)? == Some(goes_first);
                let side = if from_right { &mut right } else { &mut left };
                to.push(side[0]);
                *side = &side[1..];
            }
            to.extend_from_slice(left);
            to.extend_from_slice(right);
        }
        from = to;
        width *= 2;
    }
    Ok(from)
}

/// Jinja's `batch`: lists of `count` items, the last one filled up.
fn batch(items: &List, count: usize, fill: Option<Value>, budget: &Budget<'_>) -> Outcome<Value> {
    if count == 0 {
        return Err(Failure::error("batch: the number of items must be positive"));
    }
    let mut batches = with_capacity(items.len().div_ceil(count))?;
    for chunk in items.values().chunks(count) {
        budget.charge_items(chunk.len())?;
        let mut values = collect(chunk.iter().cloned())?;
        if let Some(fill) = fill.as_ref().filter(|fill| !matches!(fill, Value::None)) {
            fill_up(&mut values, count, fill, budget)?;
        }
        batches.push(Value::list(values, budget)?);
    }
    Value::sequence(batches, Sequence::Generator, budget)
}

/// Jinja's `slice`: `count` lists of nearly equal length.
fn divide(items: &List, count: usize, fill: Option<Value>, budget: &Budget<'_>) -> Outcome<Value> {
    if count == 0 {
        return Err(Failure::error("slice: the number of lists must be positive"));
    }
    budget.charge_items(count)?;
    let held = budget.hold(count.saturating_mul(size_of::<Value>()))?;
    let (each, longer) = (items.len() / count, items.len() % count);
    let mut lists = with_capacity(count)?;
    let mut start = 0;
    for index in 0..count {
        let length = each + usize::from(index < longer);
        let mut values = collect(items.values()[start..start + length].iter().cloned())?;
        start += length;
        if let Some(fill) = fill.as_ref().filter(|fill| index >= longer && !matches!(fill, Value::None)) {
            push(&mut values, fill.clone())?;
        }
        lists.push(Value::list(values, budget)?);
    }
    drop(held);
    Value::sequence(lists, Sequence::Generator, budget)
}

fn fill_up(values: &mut Vec<Value>, count: usize, fill: &Value, budget: &Budget<'_>) -> Outcome<()> {
    let missing = count.saturating_sub(values.len());
    budget.charge_items(missing)?;
    let held = budget.hold(missing.saturating_mul(size_of::<Value>()))?;
    reserve_exact(values, missing)?;
    values.resize(values.len() + missing, fill.clone());
    drop(held);
    Ok(())
}
