//! Rewrites parts of a schema that the parser reads less strictly than their definition.
//!
//! - `date`, `time` and `date-time`: the parser allows February 29 in every year and a 60th second in every minute. RFC
//!   3339 has leap days in leap years only; a leap second depends on the time zone, so none is allowed here.
//! - Formats of integers, `int8` to `int64` and `uint8` to `uint64`, which generators of schemas write: the parser
//!   ignores them, so they become bounds.
//! - Counts such as `2.0` are written as integers.
//! - `propertyNames` that every name satisfies is removed, and so are annotations that the parser refuses.

use serde_json::{Value, json};

use super::keywords::{Keyword, Shape, UNKNOWN_TO_PARSER};

/// A year other than 0000, which many libraries refuse.
const YEAR: &str = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)";
const LEAP_YEAR: &str = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)";
const DAY: &str = "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)\
                   |02-(?:0[1-9]|1[0-9]|2[0-8]))";
const TIME: &str =
    "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?(?:Z|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])";

/// Returns the expression of a format that the parser reads less strictly.
fn pattern(format: &str) -> Option<String> {
    let date = format!("(?:{YEAR}-{DAY}|{LEAP_YEAR}-02-29)");
    match format {
        "date" => Some(format!("^{date}$")),
        "time" => Some(format!("^{TIME}$")),
        "date-time" => Some(format!("^{date}T{TIME}$")),
        _ => None,
    }
}

/// Returns the condition of a format of integers. The parser's bounds are numbers that are both f64 and i64, so those
/// of `int64` are the next ones within the format, and `uint64` has only one.
fn bounds(format: &str) -> Option<Value> {
    let between = |minimum: i64, maximum: i64| Some(json!({ "minimum": minimum, "maximum": maximum }));
    const MOST: i64 = i64::MAX - 1023;
    match format {
        "int8" => between(i8::MIN.into(), i8::MAX.into()),
        "int16" => between(i16::MIN.into(), i16::MAX.into()),
        "int32" => between(i32::MIN.into(), i32::MAX.into()),
        "int64" => between(-MOST, MOST),
        "uint8" => between(0, u8::MAX.into()),
        "uint16" => between(0, u16::MAX.into()),
        "uint32" => between(0, u32::MAX.into()),
        "uint64" => Some(json!({ "minimum": 0 })),
        _ => None,
    }
}

/// Returns the condition that a format stands for, where the parser would ignore a part of it.
fn condition(format: &str) -> Option<Value> {
    pattern(format).map(|pattern| json!({ "pattern": pattern })).or_else(|| bounds(format))
}

/// Returns the integer that a number such as `2.0` stands for.
pub(super) fn integer(value: &Value) -> Option<u64> {
    let whole = |number: f64| (number.fract() == 0.0 && (0.0..1e15).contains(&number)).then_some(number as u64);
    value.as_u64().or_else(|| value.as_f64().and_then(whole))
}

/// Rewrites a schema that passed the check.
pub(crate) fn rewrite(schema: &mut Value) {
    let Value::Object(members) = schema else { return };
    // The check lets it pass only if every name satisfies it. The parser does not know it.
    members.shift_remove("propertyNames");
    UNKNOWN_TO_PARSER.iter().for_each(|name| drop(members.shift_remove(*name)));
    for (name, value) in members.iter_mut() {
        let Keyword::Enforced(shape) = Keyword::of(name) else { continue };
        match (shape, value) {
            (Shape::Schema | Shape::SchemaOrList, value @ Value::Object(_)) => rewrite(value),
            (Shape::SchemaOrList | Shape::SchemaList, Value::Array(schemas)) => schemas.iter_mut().for_each(rewrite),
            (Shape::SchemaMap, Value::Object(schemas)) => schemas.values_mut().for_each(rewrite),
            (Shape::Count | Shape::StringCount, value) => {
                if let Some(count) = integer(value) {
                    *value = count.into();
                }
            }
            _ => {}
        }
    }
    let Some(condition) = members.get("format").and_then(Value::as_str).and_then(condition) else { return };
    members.shift_remove("format");
    match members.get_mut("allOf") {
        Some(Value::Array(parts)) => parts.push(condition),
        _ => drop(members.insert("allOf".to_owned(), json!([condition]))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_schemas_are_rewritten() {
        let mut schema = json!({
            "properties": { "format": { "format": "time" }, "minItems": { "minItems": 2.0 } },
            "const": { "format": "time" },
            "format": "uuid"
        });
        rewrite(&mut schema);
        assert!(schema["properties"]["format"]["allOf"][0]["pattern"].is_string());
        assert_eq!(schema["properties"]["minItems"], json!({ "minItems": 2 }));
        assert_eq!((&schema["const"]["format"], &schema["format"]), (&json!("time"), &json!("uuid")));
    }
}
