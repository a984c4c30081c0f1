//! The parameters of a tool, for formats that write each argument by itself: which are required, and how each value is
//! written.

use serde_json::{Map, Value};

use crate::{Error, schema};

/// Maximum references that are followed to find the type of a parameter.
const MAX_REFERENCES: usize = 16;
/// Keywords of the schema of all arguments that such formats enforce; the others belong to values.
const OBJECT_KEYWORDS: [&str; 8] =
    ["type", "properties", "required", "additionalProperties", "$defs", "definitions", "$schema", "$id"];

/// One parameter.
#[derive(Debug, Clone, PartialEq)]
pub struct Parameter {
    /// Name of the parameter.
    pub name: String,
    /// Whether every call has it.
    pub is_required: bool,
    /// Schema of its value, with the definitions that it refers to.
    pub schema: Value,
    /// How its value is written between two texts.
    pub kind: ValueKind,
}

/// How a value is written between two texts.
#[derive(Debug, Clone, PartialEq)]
pub enum ValueKind {
    /// A string without quotes, with these limits on its length.
    Text {
        /// Minimum characters.
        min: u64,
        /// Maximum characters.
        max: Option<u64>,
    },
    /// One of these strings, without quotes.
    Choice(Vec<String>),
    /// A string without quotes, unless the text is a value of one of these types.
    TextOr(SimpleTypes),
    /// A JSON value.
    Json,
}

/// Types of values that cannot be confused with each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SimpleTypes {
    null: bool,
    boolean: bool,
    integer: bool,
    number: bool,
}

impl SimpleTypes {
    /// Whether a text is a value of one of the types.
    pub fn has(self, text: &str) -> bool {
        match serde_json::from_str::<Value>(text) {
            Ok(Value::Null) => self.null,
            Ok(Value::Bool(_)) => self.boolean,
            Ok(Value::Number(number)) => self.number || self.integer && !number.is_f64(),
            _ => false,
        }
    }

    fn add(&mut self, name: &str) -> bool {
        match name {
            "null" => self.null = true,
            "boolean" => self.boolean = true,
            "integer" => self.integer = true,
            "number" => self.number = true,
            _ => return false,
        }
        true
    }
}

/// Returns the parameters of a tool. A schema that says more about the arguments than which there are is refused.
pub(super) fn parameters(schema: &Value) -> Result<Vec<Parameter>, Error> {
    let empty = Map::new();
    // Generators of schemas may define the object of all arguments under a name.
    let referred = schema.get("$ref").map(|_| with_definitions(resolve(schema, schema), schema));
    let schema = referred.as_ref().unwrap_or(schema);
    let members = schema.as_object().unwrap_or(&empty);
    if let Some(name) = members.keys().find(|name| !is_known(name)) {
        let problem = "it is enforced for values in this model's format of calls, but not for all arguments together; \
                       move it into a property or remove it";
        return Err(Error::Schema { place: format!("#/{name}"), problem: problem.into() });
    }
    let required: Vec<&str> =
        members.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str).collect();
    let properties = members.get("properties").and_then(Value::as_object).unwrap_or(&empty);
    if let Some(name) = required.iter().find(|name| !properties.contains_key(**name)) {
        let problem = format!("the required property {name:?} is not among the properties");
        return Err(Error::Schema { place: "#/required".into(), problem });
    }
    let parameter = |(name, value): (&String, &Value)| {
        if !is_writable(name) {
            let problem = "the name cannot be written in this model's format of calls".to_owned();
            return Err(Error::Schema { place: format!("#/properties/{name}"), problem });
        }
        let whole = with_definitions(value, schema);
        let kind = kind_of(resolve(value, schema), schema);
        Ok(Parameter { name: name.clone(), is_required: required.contains(&name.as_str()), schema: whole, kind })
    };
    properties.iter().filter(|(_, value)| **value != Value::Bool(false)).map(parameter).collect()
}

/// Whether a keyword of an object is enforced in such formats, or only describes.
pub(super) fn is_known(name: &str) -> bool {
    OBJECT_KEYWORDS.contains(&name) || schema::is_annotation(name)
}

/// Whether the name of a parameter can be written between markers.
pub(super) fn is_writable(name: &str) -> bool {
    !name.is_empty() && !name.contains(['<', '>', '"', '=', ':', ',', '\n', '{', '}']) && name.trim() == name
}

/// Follows references within the schema.
pub(super) fn resolve<'s>(mut value: &'s Value, root: &'s Value) -> &'s Value {
    for _ in 0..MAX_REFERENCES {
        let Some(Value::String(reference)) = value.get("$ref") else { break };
        match reference.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
            Some(found) => value = found,
            None => break,
        }
    }
    value
}

/// Returns a part of a schema with the definitions of the whole.
pub(super) fn with_definitions(part: &Value, root: &Value) -> Value {
    let Value::Object(members) = part else { return part.clone() };
    let mut whole = members.clone();
    for name in ["$schema", "$defs", "definitions"] {
        if let (Some(value), false) = (root.get(name), whole.contains_key(name)) {
            whole.insert(name.to_owned(), value.clone());
        }
    }
    Value::Object(whole)
}

fn kind_of(schema: &Value, root: &Value) -> ValueKind {
    let Value::Object(members) = schema else { return ValueKind::Json };
    if let Some(choices) = choices(members) {
        return ValueKind::Choice(choices);
    }
    if let Some(types) = text_or_simple(members, root) {
        return ValueKind::TextOr(types);
    }
    let is_text = members.get("type").is_some_and(|name| name == "string")
        && members.keys().all(|name| is_known(name) || matches!(name.as_str(), "minLength" | "maxLength"));
    if !is_text {
        return ValueKind::Json;
    }
    let limit = |name: &str| members.get(name).and_then(Value::as_u64);
    ValueKind::Text { min: limit("minLength").unwrap_or(0), max: limit("maxLength") }
}

/// Returns the strings of an `enum` or `const`; `None` if there are other values or conditions.
fn choices(members: &Map<String, Value>) -> Option<Vec<String>> {
    let values = match (members.get("enum"), members.get("const")) {
        (Some(Value::Array(values)), None) => values.clone(),
        (None, Some(value)) => vec![value.clone()],
        _ => return None,
    };
    let is_type = |name: &String| name == "type" && members["type"] == "string";
    let is_plain =
        members.keys().all(|name| matches!(name.as_str(), "enum" | "const") || is_type(name) || is_known(name));
    // A choice with a line break could be confused with the text that follows it.
    let text =
        |value: &Value| value.as_str().filter(|text| !text.contains('\n') && !text.is_empty()).map(str::to_owned);
    is_plain.then(|| values.iter().map(text).collect()).flatten()
}

/// Returns the other types of a schema that allows every string and values of simple types.
fn text_or_simple(members: &Map<String, Value>, root: &Value) -> Option<SimpleTypes> {
    let only = |name: &str| members.keys().all(|key| key == name || (is_known(key) && key != "type"));
    let mut types = SimpleTypes::default();
    let mut has_text = false;
    let mut add = |name: &str| {
        has_text |= name == "string";
        name == "string" || types.add(name)
    };
    if let Some(Value::Array(names)) = members.get("type") {
        let is_simple =
            members.keys().all(|key| is_known(key)) && names.iter().all(|name| name.as_str().is_some_and(&mut add));
        return (is_simple && has_text).then_some(types);
    }
    for list in ["anyOf", "oneOf"] {
        let Some(Value::Array(alternatives)) = members.get(list) else { continue };
        let is_simple = only(list)
            && alternatives.iter().all(|alternative| {
                let alternative = resolve(alternative, root);
                let members = alternative.as_object();
                members.is_some_and(|members| members.keys().all(|key| is_known(key)))
                    && alternative["type"].as_str().is_some_and(&mut add)
            });
        return (is_simple && has_text).then_some(types);
    }
    None
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn kinds_of_values() {
        let kinds = |schema: Value| parameters(&schema).unwrap().into_iter().map(|p| p.kind).collect::<Vec<_>>();
        let schema = json!({ "type": "object", "$defs": { "t": { "type": "string", "maxLength": 3 } }, "properties": {
            "a": { "$ref": "#/$defs/t" },
            "b": { "type": "string", "enum": ["x", "y"] },
            "c": { "anyOf": [{ "type": "string" }, { "type": "null" }], "default": null },
            "d": { "type": ["string", "integer"] },
            "e": { "type": "string", "pattern": "a+" },
            "f": { "type": "integer" },
            "g": { "anyOf": [{ "type": "string", "format": "date" }, { "type": "null" }] },
            "h": { "enum": ["x", 1] }
        } });
        let null = SimpleTypes { null: true, ..SimpleTypes::default() };
        let integer = SimpleTypes { integer: true, ..SimpleTypes::default() };
        assert_eq!(
            kinds(schema),
            [
                ValueKind::Text { min: 0, max: Some(3) },
                ValueKind::Choice(vec!["x".into(), "y".into()]),
                ValueKind::TextOr(null),
                ValueKind::TextOr(integer),
                ValueKind::Json,
                ValueKind::Json,
                ValueKind::Json,
                ValueKind::Json,
            ]
        );
        assert!(null.has("null") && !null.has("5") && integer.has("5") && !integer.has("5.5") && !integer.has("x"));
    }

    #[test]
    fn conditions_on_all_arguments_are_refused() {
        let error = parameters(&json!({ "type": "object", "minProperties": 1 })).unwrap_err().to_string();
        assert!(error.starts_with("the schema at #/minProperties: "), "{error}");
        let error = parameters(&json!({ "required": ["a"] })).unwrap_err().to_string();
        assert!(error.contains("\"a\""), "{error}");
        let error = parameters(&json!({ "properties": { "a>": {} } })).unwrap_err().to_string();
        assert!(error.contains("a>"), "{error}");
    }
}
