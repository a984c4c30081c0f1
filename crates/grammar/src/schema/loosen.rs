//! Leaves out the keywords of a schema that are not enforced. The arguments of a tool that is not `strict` need not
//! satisfy them; the reply names each of them.
//!
//! A schema without such a keyword allows more values than before: none of the keywords that remain excludes values
//! because a part allows others. The exceptions are `oneOf`, which becomes `anyOf` where its alternatives may overlap,
//! and `patternProperties`, without which `additionalProperties` has nothing to refer to.

use serde_json::{Map, Value, json};

use super::keywords::{Keyword, Shape};
use super::{MAX_COUNT, MAX_STRING_COUNT, allows_every_text, below, check_size, rewrite};
use crate::Error;

/// Formats of strings that are enforced.
const FORMATS: [&str; 10] =
    ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"];

/// Keywords that the parser may refuse although it knows them, those that say least about a value first.
const DOUBTFUL: [&str; 12] = [
    "oneOf",
    "pattern",
    "patternProperties",
    "minProperties",
    "maxProperties",
    "multipleOf",
    "format",
    "$ref",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
];

/// Leaves out the keywords that are never enforced and adds their places to `left_out`.
pub(crate) fn loosen(schema: &mut Value, left_out: &mut Vec<String>) -> Result<(), Error> {
    check_size(schema, 1, &mut 0)?;
    loosen_part(schema, "#", left_out);
    Ok(())
}

fn loosen_part(schema: &mut Value, place: &str, left_out: &mut Vec<String>) {
    let Value::Object(members) = schema else { return };
    let has_text = match members.get("type") {
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        _ => true,
    };
    members.retain(|name, value| {
        // Formats are those of strings; elsewhere, such as `int32` of an integer, they describe.
        let is_kept = may_be_enforced(name, value) || name == "format" && !has_text;
        if !is_kept {
            left_out.push(below(place, name));
        }
        is_kept
    });
    for_each_part(members, place, &mut |part, place| loosen_part(part, place, left_out));
}

/// Calls a function with the schemas directly below a schema and their places.
pub(crate) fn for_each_part(members: &mut Map<String, Value>, place: &str, visit: &mut impl FnMut(&mut Value, &str)) {
    for (name, value) in members {
        let Keyword::Enforced(shape) = Keyword::of(name) else { continue };
        let place = below(place, name);
        match (shape, value) {
            (Shape::Schema | Shape::SchemaOrList, value @ Value::Object(_)) => visit(value, &place),
            (Shape::SchemaOrList | Shape::SchemaList, Value::Array(parts)) => {
                parts.iter_mut().enumerate().for_each(|(i, part)| visit(part, &below(&place, &i.to_string())));
            }
            (Shape::SchemaMap, Value::Object(parts)) => {
                parts.iter_mut().for_each(|(name, part)| visit(part, &below(&place, name)));
            }
            _ => {}
        }
    }
}

/// Whether a keyword is enforced or only describes. Values of the wrong type are left to the check.
fn may_be_enforced(name: &str, value: &Value) -> bool {
    let is_within = |max: u64| rewrite::integer(value).is_none_or(|count| count <= max);
    match Keyword::of(name) {
        Keyword::Annotation => true,
        Keyword::Refused(_) => false,
        Keyword::Enforced(Shape::AnyName) => allows_every_text(value),
        Keyword::Enforced(Shape::Count) => is_within(MAX_COUNT),
        Keyword::Enforced(Shape::StringCount) => is_within(MAX_STRING_COUNT),
        // Draft 4 has booleans here.
        Keyword::Enforced(Shape::Number) => !value.is_boolean() || !name.starts_with("exclusive"),
        Keyword::Enforced(_) if name == "format" => value.as_str().is_none_or(|format| FORMATS.contains(&format)),
        Keyword::Enforced(_) => true,
    }
}

/// Returns the places of the keywords at `place` that are left out to make a schema compile, or `None` if that does not
/// help. `compiles` tells whether the part at `place` compiles; it is called up to 14 times.
pub(crate) fn leave_out(
    schema: &mut Value,
    place: &str,
    mut compiles: impl FnMut(&Value) -> bool,
) -> Option<Vec<String>> {
    let part = schema.pointer_mut(place.strip_prefix('#')?)?;
    let present: Vec<&str> = DOUBTFUL.into_iter().filter(|name| part.get(name).is_some()).collect();
    let one_each = present.iter().map(std::slice::from_ref);
    for names in one_each.chain([present.as_slice()]) {
        let mut changed = part.clone();
        let members = changed.as_object_mut()?;
        let removed: Vec<&str> = names.iter().flat_map(|name| without(members, name)).collect();
        if !removed.is_empty() && compiles(&changed) {
            *part = changed;
            return Some(removed.into_iter().map(|name| below(place, name)).collect());
        }
    }
    None
}

/// Removes a keyword and returns the keywords that are no longer enforced as they are.
fn without<'n>(members: &mut Map<String, Value>, name: &'n str) -> Vec<&'n str> {
    let Some(value) = members.shift_remove(name) else { return Vec::new() };
    let mut removed = vec![name];
    if name == "oneOf" {
        let condition = json!({ "anyOf": value });
        match members.get_mut("allOf") {
            Some(Value::Array(parts)) => parts.push(condition),
            _ => drop(members.insert("allOf".to_owned(), json!([condition]))),
        }
    }
    if name == "patternProperties" && members.shift_remove("additionalProperties").is_some() {
        removed.push("additionalProperties");
    }
    removed
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_keywords_that_are_not_enforced_are_left_out() {
        let mut schema = json!({
            "type": "object",
            "properties": {
                "tags": { "type": "array", "items": { "type": "string", "format": "color" }, "uniqueItems": true },
                "not": { "type": "string", "format": "date", "not": { "const": "x" }, "description": "d" },
                "size": { "type": "integer", "minimum": 0, "exclusiveMinimum": true },
                "list": { "type": "array", "maxItems": 1_000_000, "minItems": 1 },
                "map": { "type": "object", "propertyNames": { "pattern": "^a" }, "additionalProperties": { "if": {} } }
            },
            "required": ["tags"],
            "dependentRequired": { "tags": ["size"] },
            "default": { "uniqueItems": true }
        });
        let mut left_out = Vec::new();
        loosen(&mut schema, &mut left_out).unwrap();
        assert_eq!(
            schema,
            json!({
                "type": "object",
                "properties": {
                    "tags": { "type": "array", "items": { "type": "string" } },
                    "not": { "type": "string", "format": "date", "description": "d" },
                    "size": { "type": "integer", "minimum": 0 },
                    "list": { "type": "array", "minItems": 1 },
                    "map": { "type": "object", "additionalProperties": {} }
                },
                "required": ["tags"],
                "default": { "uniqueItems": true }
            })
        );
        left_out.sort();
        assert_eq!(
            left_out,
            [
                "#/dependentRequired",
                "#/properties/list/maxItems",
                "#/properties/map/additionalProperties/if",
                "#/properties/map/propertyNames",
                "#/properties/not/not",
                "#/properties/size/exclusiveMinimum",
                "#/properties/tags/items/format",
                "#/properties/tags/uniqueItems",
            ]
        );
        assert_eq!(super::super::check(&schema), Ok(()));
    }

    #[test]
    fn the_keyword_that_does_not_compile_is_left_out() {
        let schema = json!({ "properties": { "a": { "type": "string", "minLength": 2, "pattern": "(?=x)" } } });
        let has_no_pattern = |part: &Value| part.get("pattern").is_none();
        let mut changed = schema.clone();
        let removed = leave_out(&mut changed, "#/properties/a", has_no_pattern);
        assert_eq!(removed, Some(vec!["#/properties/a/pattern".to_owned()]));
        assert_eq!(changed["properties"]["a"], json!({ "type": "string", "minLength": 2 }));
        let mut other = schema.clone();
        assert_eq!(leave_out(&mut other, "#/properties/a", |_| false), None);
        assert_eq!(other, schema, "a schema that still does not compile stays as it is");
        let mut choice = json!({ "oneOf": [{}, {}] });
        assert_eq!(leave_out(&mut choice, "#", |_| true), Some(vec!["#/oneOf".to_owned()]));
        assert_eq!(choice, json!({ "allOf": [{ "anyOf": [{}, {}] }] }));
    }
}
