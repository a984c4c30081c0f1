//! Finds the place of a problem that the parser reports without one.
//!
//! The parser compiles a schema as a whole and names no place. Each part of a schema is a schema, so compiling parts
//! alone finds the smallest one that fails in the same way.

use serde_json::{Map, Value};

use super::below;
use super::keywords::Keyword;
use crate::Error;

/// Maximum number of parts that are compiled to find the place.
const MAX_ATTEMPTS: usize = 64;

/// Returns the error of a schema that does not compile. `problem_of` compiles a schema and returns its problem.
pub(crate) fn locate(document: &Value, problem: String, mut problem_of: impl FnMut(&Value) -> Option<String>) -> Error {
    let (mut place, mut problem, mut part) = ("#".to_owned(), problem, document);
    let mut num_attempts = 0;
    'descend: loop {
        for (child_place, child) in children(part, &place) {
            num_attempts += 1;
            if num_attempts > MAX_ATTEMPTS {
                break 'descend;
            }
            if let Some(found) = problem_of(&with_definitions(child, document)) {
                (place, problem, part) = (child_place, found, child);
                continue 'descend;
            }
        }
        break;
    }
    Error::Schema { place, problem }
}

/// Returns the schemas directly below a schema, with their places.
fn children<'s>(schema: &'s Value, place: &str) -> Vec<(String, &'s Value)> {
    let mut found = Vec::new();
    for (name, value) in Keyword::holders().filter_map(|name| Some((name, schema.get(name)?))) {
        let place = below(place, name);
        match (name, value) {
            ("properties" | "patternProperties" | "$defs" | "definitions", Value::Object(members)) => {
                found.extend(members.iter().map(|(name, schema)| (below(&place, name), schema)));
            }
            (_, Value::Array(schemas)) => {
                found.extend(schemas.iter().enumerate().map(|(i, schema)| (below(&place, &i.to_string()), schema)));
            }
            // A property may be forbidden by `false`, which allows no value on its own.
            (_, Value::Bool(_)) => {}
            _ => found.push((place, value)),
        }
    }
    found.retain(|(_, schema)| !schema.is_boolean());
    found
}

/// Returns a part as a schema of its own, with the definitions that it may refer to.
pub(crate) fn with_definitions(part: &Value, document: &Value) -> Value {
    let mut whole: Map<String, Value> = part.as_object().cloned().unwrap_or_default();
    for name in ["$schema", "$defs", "definitions"] {
        if let (Some(value), false) = (document.get(name), whole.contains_key(name)) {
            whole.insert(name.to_owned(), value.clone());
        }
    }
    Value::Object(whole)
}
