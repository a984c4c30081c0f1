//! Leaves out parts of a tool's schema that the format of calls cannot enforce, for tools that are not `strict`.
//! Formats that write arguments as JSON enforce every keyword that a schema may have.

use serde_json::{Map, Value};

use super::format::ArgumentSyntax;
use super::parameters::{is_known, is_writable, resolve, with_definitions};
use super::quoted::{is_neutral, is_of_other_type, is_spelled};
use crate::schema::{below, for_each_part};

/// Leaves out parts of a schema and adds their places to `left_out`.
pub(crate) fn loosen(syntax: ArgumentSyntax, schema: &mut Value, left_out: &mut Vec<String>) {
    if matches!(syntax, ArgumentSyntax::Json) {
        return;
    }
    if schema.get("$ref").is_some() {
        *schema = with_definitions(resolve(schema, schema), schema);
    }
    let Value::Object(members) = schema else { return };
    loosen_object(members, "#", left_out);
    if let ArgumentSyntax::Quoted(quote) = syntax {
        for_each_part(members, "#", &mut |part, place| loosen_quoted(quote, part, place, left_out));
    }
}

/// Leaves out members for which `is_kept` is false.
fn retain(
    members: &mut Map<String, Value>,
    place: &str,
    left_out: &mut Vec<String>,
    mut is_kept: impl FnMut(&str, &Value) -> bool,
) {
    members.retain(|name, value| {
        let is_kept = is_kept(name, value);
        if !is_kept {
            left_out.push(below(place, name));
        }
        is_kept
    });
}

/// Keeps properties, and which of them are required.
fn loosen_object(members: &mut Map<String, Value>, place: &str, left_out: &mut Vec<String>) {
    retain(members, place, left_out, |name, _| is_known(name));
    let mut names = Vec::new();
    if let Some(Value::Object(properties)) = members.get_mut("properties") {
        retain(properties, &below(place, "properties"), left_out, |name, _| is_writable(name));
        names = properties.keys().cloned().collect();
    }
    if let Some(Value::Array(required)) = members.get_mut("required") {
        let num_before = required.len();
        required.retain(|name| name.as_str().is_none_or(|name| names.iter().any(|other| other == name)));
        if required.len() < num_before {
            left_out.push(below(place, "required"));
        }
    }
}

/// Keeps the keywords that `quoted.rs` enforces.
fn loosen_quoted(quote: &str, schema: &mut Value, place: &str, left_out: &mut Vec<String>) {
    let Value::Object(members) = schema else { return };
    if !members.contains_key("type") {
        // Other types would be allowed, but the keyword tells which one is meant.
        for (name, kind) in [("properties", "object"), ("items", "array")] {
            if members.contains_key(name) {
                members.insert("type".into(), kind.into());
                break;
            }
        }
    }
    let is_list = |value: &Value| value.as_array().is_some_and(|list| list.iter().all(|v| is_spelled(v, quote)));
    retain(members, place, left_out, |name, value| match name {
        "enum" => is_list(value),
        "const" => is_spelled(value, quote),
        _ => true,
    });
    let kinds: Vec<String> = match members.get("type") {
        Some(Value::String(kind)) => vec![kind.clone()],
        Some(Value::Array(kinds)) => kinds.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        _ => Vec::new(),
    };
    let has = |name: &str| members.contains_key(name);
    let list = ["anyOf", "oneOf"].into_iter().find(|name| kinds.is_empty() && has(name));
    let has_constants = has("enum") || has("const");
    retain(members, place, left_out, |name, _| match name {
        _ if is_neutral(name) => true,
        "$ref" => true,
        _ if list.is_some() => Some(name) == list,
        "type" | "enum" | "const" => true,
        // Values are written as the list has them, whatever other keywords say.
        _ if has_constants => false,
        "anyOf" | "oneOf" | "allOf" => false,
        _ => kinds.iter().any(|kind| !is_of_other_type(name, kind) && is_written(name, kind)),
    });
    if kinds.iter().any(|kind| kind == "object") {
        let mut own = Vec::new();
        loosen_object(members, place, &mut own);
        left_out.extend(own);
    }
    for_each_part(members, place, &mut |part, place| loosen_quoted(quote, part, place, left_out));
}

/// Whether a keyword about values of a type is enforced in `quoted.rs`.
fn is_written(name: &str, kind: &str) -> bool {
    match kind {
        "string" => matches!(name, "minLength" | "maxLength"),
        "array" => name == "items",
        "object" => is_known(name),
        _ => true,
    }
}
