//! Checks a JSON schema before it is compiled: every keyword is enforced or only describes, and has a value of the
//! right type.
//!
//! JSON Schema tells implementations to ignore keywords that they do not know. A reply would then break a rule that its
//! client wrote down, so an unknown keyword is refused by name here, with its place in the schema. For tools that are
//! not `strict`, `loosen.rs` leaves out such keywords instead, and the reply names them.

mod keywords;
mod locate;
mod loosen;
mod rewrite;

use serde_json::Value;

use crate::Error;

pub(crate) use locate::{locate, with_definitions};
pub(crate) use loosen::{for_each_part, leave_out, loosen};
pub(crate) use rewrite::rewrite;

use keywords::{Keyword, Shape};

/// Maximum depth of a schema, each object and array counted.
const MAX_DEPTH: usize = 64;
/// Maximum number of values in a schema: objects, arrays, texts, numbers.
const MAX_VALUES: usize = 50_000;
/// Maximum of `minItems`, `minProperties` and other counts that the grammar spells out. Those of strings are cheap.
const MAX_COUNT: u64 = 4096;
const MAX_STRING_COUNT: u64 = 1 << 20;

/// Refuses a schema that has a keyword which is not enforced, or a value of the wrong type.
pub(crate) fn check(document: &Value) -> Result<(), Error> {
    let mut num_values = 0;
    check_size(document, 1, &mut num_values)?;
    check_schema(document, "#")
}

fn check_size(value: &Value, depth: usize, num_values: &mut usize) -> Result<(), Error> {
    let too_large = |what, limit, found| {
        if found > limit { Err(Error::TooLarge { kind: "schema", what, limit, found }) } else { Ok(()) }
    };
    *num_values += 1;
    too_large("levels", MAX_DEPTH, depth)?;
    too_large("values", MAX_VALUES, *num_values)?;
    match value {
        Value::Array(values) => values.iter().try_for_each(|value| check_size(value, depth + 1, num_values)),
        Value::Object(members) => members.values().try_for_each(|value| check_size(value, depth + 1, num_values)),
        _ => Ok(()),
    }
}

fn check_schema(schema: &Value, place: &str) -> Result<(), Error> {
    let members = match schema {
        Value::Bool(_) => return Ok(()),
        Value::Object(members) => members,
        other => return Err(wrong(place, "an object or a boolean", other)),
    };
    for (name, value) in members {
        let place = below(place, name);
        match Keyword::of(name) {
            Keyword::Annotation => {}
            Keyword::Enforced(shape) => check_value(shape, value, &place)?,
            Keyword::Refused(problem) => return Err(Error::Schema { place, problem }),
        }
    }
    Ok(())
}

fn check_value(shape: Shape, value: &Value, place: &str) -> Result<(), Error> {
    let each = |values: &[Value]| {
        values.iter().enumerate().try_for_each(|(i, value)| check_schema(value, &below(place, &i.to_string())))
    };
    match (shape, value) {
        (Shape::Schema | Shape::SchemaOrList, Value::Bool(_) | Value::Object(_)) => check_schema(value, place),
        (Shape::SchemaOrList | Shape::SchemaList, Value::Array(values)) => each(values),
        (Shape::SchemaMap, Value::Object(members)) => {
            members.iter().try_for_each(|(name, value)| check_schema(value, &below(place, name)))
        }
        (Shape::Anything, _) | (Shape::Number, Value::Number(_)) | (Shape::Text, Value::String(_)) => Ok(()),
        (Shape::TypeName, Value::String(name)) => check_type(name, place),
        (Shape::TypeName, Value::Array(names)) => names.iter().try_for_each(|name| match name {
            Value::String(name) => check_type(name, place),
            other => Err(wrong(place, "names of types", other)),
        }),
        (Shape::AnyName, value) if allows_every_text(value) => Ok(()),
        (Shape::List, Value::Array(values)) if !values.is_empty() => Ok(()),
        (Shape::Texts, Value::Array(values)) if values.iter().all(Value::is_string) => Ok(()),
        (Shape::Count | Shape::StringCount, Value::Number(_)) => {
            let max = if shape == Shape::Count { MAX_COUNT } else { MAX_STRING_COUNT };
            match rewrite::integer(value) {
                Some(count) if count <= max => Ok(()),
                _ => Err(wrong(place, &format!("an integer from 0 to {max}"), value)),
            }
        }
        (shape, value) => Err(wrong(place, shape.name(), value)),
    }
}

/// Whether a schema allows every string, for its form alone.
fn allows_every_text(schema: &Value) -> bool {
    match schema {
        Value::Bool(allows) => *allows,
        Value::Object(members) => members.iter().all(|(name, value)| match Keyword::of(name) {
            Keyword::Annotation => true,
            _ => name == "type" && value == "string",
        }),
        _ => false,
    }
}

/// Whether a keyword only describes.
pub(crate) fn is_annotation(name: &str) -> bool {
    Keyword::of(name) == Keyword::Annotation
}

fn check_type(name: &str, place: &str) -> Result<(), Error> {
    const TYPES: [&str; 7] = ["array", "boolean", "integer", "null", "number", "object", "string"];
    if TYPES.contains(&name) {
        return Ok(());
    }
    let problem = format!("expected one of {}, found {name:?}", TYPES.join(", "));
    Err(Error::Schema { place: place.to_owned(), problem })
}

/// Returns the JSON pointer of a member.
pub(crate) fn below(place: &str, name: &str) -> String {
    format!("{place}/{}", name.replace('~', "~0").replace('/', "~1"))
}

fn wrong(place: &str, expected: &str, found: &Value) -> Error {
    let found = match found {
        Value::Null => "null".into(),
        Value::Array(values) if values.is_empty() => "an empty array".into(),
        Value::Array(_) => "an array".into(),
        Value::Object(_) => "an object".into(),
        Value::String(_) => "a string".into(),
        Value::Bool(_) | Value::Number(_) => found.to_string(),
    };
    Error::Schema { place: place.to_owned(), problem: format!("expected {expected}, found {found}") }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn refusal(schema: Value) -> String {
        check(&schema).unwrap_err().to_string()
    }

    #[test]
    fn keywords_that_are_not_enforced_are_refused_by_name_and_place() {
        let schema = json!({ "properties": { "a/b": { "items": { "uniqueItems": true } } } });
        let text = refusal(schema);
        assert!(text.starts_with("the schema at #/properties/a~1b/items/uniqueItems: "), "{text}");
        for name in ["not", "if", "contains", "dependentRequired", "$dynamicRef", "minLenght", "x-guidance"] {
            let text = refusal(json!({ name: {} }));
            assert!(text.starts_with(&format!("the schema at #/{name}: ")), "{text}");
        }
    }

    #[test]
    fn keywords_that_only_describe_are_accepted() {
        let schema = json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema", "title": 1, "description": "a", "default": {},
            "examples": [], "deprecated": true, "readOnly": true, "$comment": "c", "x-order": 3, "type": "string"
        });
        assert_eq!(check(&schema), Ok(()));
    }

    #[test]
    fn a_rule_for_names_is_accepted_if_every_name_satisfies_it() {
        let of = |names: Value| check(&json!({ "type": "object", "propertyNames": names }));
        for names in [json!(true), json!({}), json!({ "type": "string", "description": "a" })] {
            assert_eq!(of(names), Ok(()));
        }
        for names in [json!(false), json!({ "maxLength": 3 }), json!({ "type": "number" }), json!(1)] {
            let text = of(names).unwrap_err().to_string();
            assert!(text.starts_with("the schema at #/propertyNames: expected {\"type\": \"string\"}"), "{text}");
        }
    }

    #[test]
    fn values_of_the_wrong_type_are_refused() {
        let wrong = [
            json!({ "type": "text" }),
            json!({ "type": 1 }),
            json!({ "properties": [] }),
            json!({ "properties": { "a": 1 } }),
            json!({ "required": "a" }),
            json!({ "required": [1] }),
            json!({ "enum": [] }),
            json!({ "enum": "a" }),
            json!({ "minLength": -1 }),
            json!({ "minLength": 1.5 }),
            json!({ "maxItems": 1_000_000_000 }),
            json!({ "minimum": "1" }),
            json!({ "pattern": 1 }),
            json!({ "anyOf": {} }),
            json!({ "anyOf": [1] }),
            json!([]),
        ];
        for schema in wrong {
            assert!(matches!(check(&schema), Err(Error::Schema { .. })), "{schema}");
        }
    }

    #[test]
    fn size_and_depth_are_bounded() {
        let mut deep = json!({});
        (0..70).for_each(|_| deep = json!({ "items": deep }));
        assert!(matches!(check(&deep), Err(Error::TooLarge { what: "levels", .. })));
        let wide: Vec<usize> = (0..60_000).collect();
        assert!(matches!(check(&json!({ "enum": wide })), Err(Error::TooLarge { what: "values", .. })));
    }
}
