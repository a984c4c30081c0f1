//! Arguments of formats that write JSON without quotes around keys and with markers of their own around texts.

use serde_json::{Map, Value, json};

use super::calls::{Writer, json_rule, quoted};
use super::parameters::{ValueKind, parameters, resolve, with_definitions};
use crate::{Error, schema};

/// Maximum depth of values that are not JSON.
const MAX_DEPTH: usize = 16;
/// Maximum rules of all tools. References to an object from several of its properties would double them at each level.
const MAX_RULES: usize = 20_000;
/// Name of the rule for any value, of that for a key of any object, and of that for a text.
const ANY_VALUE: &str = "any_value";
/// Keywords about values of each type. Those of other types do not matter for a value.
const OF_TYPE: [(&[&str], &[&str]); 4] = [
    (&["string"], &["minLength", "maxLength", "pattern", "format"]),
    (&["integer", "number"], &["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"]),
    (&["array"], &["items", "prefixItems", "additionalItems", "minItems", "maxItems"]),
    (
        &["object"],
        &["properties", "required", "additionalProperties", "patternProperties", "minProperties", "maxProperties"],
    ),
];

/// Whether a keyword is about values of other types than `kind`.
pub(super) fn is_of_other_type(name: &str, kind: &str) -> bool {
    OF_TYPE.iter().any(|(types, names)| names.contains(&name) && !types.contains(&kind))
}

/// Whether a keyword says nothing about a value by itself.
pub(super) fn is_neutral(name: &str) -> bool {
    matches!(name, "$defs" | "definitions" | "$schema" | "$id") || schema::is_annotation(name)
}

/// Whether a value of an `enum` can be written between markers.
pub(super) fn is_spelled(value: &Value, quote: &str) -> bool {
    match value {
        Value::String(text) => !text.contains(quote),
        Value::Null | Value::Bool(_) | Value::Number(_) => true,
        Value::Array(_) | Value::Object(_) => false,
    }
}

/// A part of the arguments' schema.
#[derive(Clone, Copy)]
struct Part<'s> {
    schema: &'s Value,
    root: &'s Value,
    place: &'s str,
    /// Levels that may follow.
    depth: usize,
}

impl<'s> Part<'s> {
    fn child(self, schema: &'s Value, place: &'s str) -> Part<'s> {
        Part { schema, place, depth: self.depth.saturating_sub(1), ..self }
    }
}

impl Writer<'_> {
    /// Returns the arguments of a call.
    pub(super) fn quoted_arguments(&mut self, quote: &str, schema: &Value) -> Result<String, Error> {
        self.quoted_object(quote, Part { schema, root: schema, place: "#", depth: MAX_DEPTH })
    }

    fn quoted_object(&mut self, quote: &str, part: Part<'_>) -> Result<String, Error> {
        let Part { schema, root, place, .. } = part;
        let whole = with_definitions(schema, root);
        let found = parameters(&whole).map_err(|error| error.below(place))?;
        if found.is_empty() && place != "#" {
            return self.quoted_map(quote, part);
        }
        let mut members = Vec::new();
        for parameter in found {
            let place = format!("{place}/properties/{}", parameter.name);
            let value = self.quoted_value(quote, part.child(&parameter.schema, &place))?;
            let value = self.add(&value);
            members.push((format!("{} {value}", quoted(&format!("{}:", parameter.name))), parameter.is_required));
        }
        let list = self.list(&members, "\",\"");
        Ok(format!("\"{{\" {list} \"}}\""))
    }

    /// Returns an object that names no properties: one with any keys, unless it must be empty.
    fn quoted_map(&mut self, quote: &str, part: Part<'_>) -> Result<String, Error> {
        let values = part.schema.get("additionalProperties").unwrap_or(&Value::Bool(true));
        if *values == Value::Bool(false) {
            return Ok("\"{\" \"}\"".into());
        }
        let place = format!("{}/additionalProperties", part.place);
        let value = self.quoted_value(quote, part.child(values, &place))?;
        let value = self.add(&value);
        let member = self.add(&format!("/[A-Za-z0-9_.\\-]{{1,64}}/ \":\" {value}"));
        Ok(format!("\"{{\" ({member} (\",\" {member})*)? \"}}\""))
    }

    /// Returns a value whose texts stand between quotation marks of the format.
    fn quoted_value(&mut self, quote: &str, part: Part<'_>) -> Result<String, Error> {
        if part.depth == 0 || self.num_rules > MAX_RULES {
            return self.refuse(quote, part, "a value of this depth");
        }
        let schema = resolve(part.schema, part.root);
        let part = Part { schema, ..part };
        let members = match schema {
            Value::Object(members) => members,
            Value::Bool(true) => return Ok(self.any_value(quote)),
            _ => return self.refuse(quote, part, "this value"),
        };
        if members.keys().all(|name| is_neutral(name)) {
            return Ok(self.any_value(quote));
        }
        for list in ["anyOf", "oneOf"] {
            let Some(Value::Array(schemas)) = members.get(list) else { continue };
            if let Some(name) = members.keys().find(|name| *name != list && !is_neutral(name)) {
                return self.refuse(quote, part, &format!("{name:?} beside {list:?}"));
            }
            let mut parts = Vec::new();
            for (index, schema) in schemas.iter().enumerate() {
                let place = format!("{}/{list}/{index}", part.place);
                let value = self.quoted_value(quote, part.child(schema, &place))?;
                parts.push(self.add(&value));
            }
            return Ok(parts.join(" | "));
        }
        if members.contains_key("enum") || members.contains_key("const") {
            return self.quoted_constants(quote, part, members);
        }
        match members.get("type") {
            Some(Value::String(kind)) => self.quoted_typed(quote, part, members, kind),
            Some(Value::Array(kinds)) => {
                let mut parts = Vec::new();
                for kind in kinds.iter().filter_map(Value::as_str) {
                    let mut only = members.clone();
                    only.retain(|name, _| !is_of_other_type(name, kind));
                    only.insert("type".into(), kind.into());
                    let only = Value::Object(only);
                    let value = self.quoted_value(quote, part.child(&only, part.place))?;
                    parts.push(self.add(&value));
                }
                Ok(parts.join(" | "))
            }
            _ => self.refuse(quote, part, "a value without a type"),
        }
    }

    /// Returns one of the values of `enum` or `const`.
    fn quoted_constants(&mut self, quote: &str, part: Part<'_>, members: &Map<String, Value>) -> Result<String, Error> {
        let values = match (members.get("enum"), members.get("const")) {
            (Some(Value::Array(values)), _) => values.as_slice(),
            (_, Some(value)) => std::slice::from_ref(value),
            _ => &[],
        };
        if !values.iter().all(|value| is_spelled(value, quote)) {
            return self.refuse(quote, part, "this enum");
        }
        let mark = self.text(quote);
        let spelled = |value: &Value| match value {
            Value::String(text) if text.is_empty() => format!("{mark} {mark}"),
            Value::String(text) => format!("{mark} {} {mark}", quoted(text)),
            other => quoted(&other.to_string()),
        };
        Ok(values.iter().map(spelled).collect::<Vec<_>>().join(" | "))
    }

    fn quoted_typed(
        &mut self,
        quote: &str,
        part: Part<'_>,
        members: &Map<String, Value>,
        kind: &str,
    ) -> Result<String, Error> {
        match kind {
            "string" => {
                let found = parameters(&json!({ "properties": { "x": part.schema } }))?;
                let Some(ValueKind::Text { min, max }) = found.first().map(|parameter| &parameter.kind) else {
                    return self.refuse(quote, part, "a string with a pattern or a format");
                };
                Ok(self.quoted_text(quote, *min, *max))
            }
            "integer" | "number" | "boolean" | "null" => Ok(json_rule(&with_definitions(part.schema, part.root))),
            "object" => self.quoted_object(quote, part),
            "array" => {
                let is_plain = |name: &str| matches!(name, "type" | "items") || is_neutral(name);
                if let Some(name) = members.keys().find(|name| !is_plain(name)) {
                    return self.refuse(quote, part, &format!("an array with {name:?}"));
                }
                let item = members.get("items").unwrap_or(&Value::Bool(true));
                let place = format!("{}/items", part.place);
                let item = self.quoted_value(quote, part.child(item, &place))?;
                let item = self.add(&item);
                Ok(format!("\"[\" ({item} (\",\" {item})*)? \"]\""))
            }
            _ => self.refuse(quote, part, "a value without a type"),
        }
    }

    fn quoted_text(&mut self, quote: &str, min: u64, max: Option<u64>) -> String {
        let body = self.text_until(quote, min, max);
        let body = self.add(&body);
        format!("{} {body}", self.text(quote))
    }

    /// Refuses a value that cannot be written; without `strict`, it may be anything.
    fn refuse(&mut self, quote: &str, part: Part<'_>, what: &str) -> Result<String, Error> {
        if !self.is_strict {
            self.left_out.push(part.place.to_owned());
            return Ok(self.any_value(quote));
        }
        let problem = format!("{what} cannot be written in this model's format of calls");
        Err(Error::Schema { place: part.place.to_owned(), problem })
    }

    /// Returns the rule for any value.
    fn any_value(&mut self, quote: &str) -> String {
        if !std::mem::replace(&mut self.has_any_value, true) {
            let text = self.quoted_text(quote, 0, None);
            let text = self.add(&text);
            let simple = self.add(&json_rule(&json!({ "type": ["number", "boolean", "null"] })));
            let member = self.add(&format!("/[A-Za-z0-9_.\\-]{{1,64}}/ \":\" {ANY_VALUE}"));
            let object = self.add(&format!("\"{{\" ({member} (\",\" {member})*)? \"}}\""));
            let array = self.add(&format!("\"[\" ({ANY_VALUE} (\",\" {ANY_VALUE})*)? \"]\""));
            self.rule(ANY_VALUE, &format!("{text} | {simple} | {object} | {array}"));
        }
        ANY_VALUE.into()
    }
}
