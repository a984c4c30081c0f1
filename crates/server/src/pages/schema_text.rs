//! A JSON schema in words: the type of a field, its limits and its default.

use serde_json::Value;

use super::html::escape;

/// Maximum words of an enumeration that are listed.
const MAX_WORDS: usize = 24;

/// Returns the name of the schema that `schema` refers to.
pub(super) fn reference(schema: &Value) -> Option<&str> {
    schema["$ref"].as_str()?.rsplit('/').next()
}

/// Returns the type of a value as HTML, such as "list of ChatMessage".
pub(super) fn kind(schema: &Value) -> String {
    if let Some(name) = reference(schema) {
        let name = escape(name);
        return format!("<a href=\"#schema-{name}\">{name}</a>");
    }
    if let Some(words) = schema["enum"].as_array() {
        let words: Vec<&Value> = words.iter().filter(|word| !word.is_null()).collect();
        let shown: Vec<String> =
            words.iter().take(MAX_WORDS).map(|word| format!("<code>{}</code>", escape(&word.to_string()))).collect();
        let rest = if words.len() > MAX_WORDS { " …" } else { "" };
        return shown.join(" or ") + rest;
    }
    for key in ["anyOf", "oneOf"] {
        if let Some(options) = schema[key].as_array().filter(|_| schema["properties"].is_null()) {
            let mut kinds: Vec<String> =
                options.iter().filter(|option| option["type"] != "null").map(with_limits).collect();
            kinds.dedup();
            return kinds.join(" or ");
        }
    }
    let names: Vec<&str> = match &schema["type"] {
        Value::String(name) => vec![name],
        Value::Array(names) => names.iter().filter_map(Value::as_str).filter(|name| *name != "null").collect(),
        _ => vec!["any value"],
    };
    let name = |name: &&str| match *name {
        "array" => format!("list of {}", kind(&schema["items"])),
        "integer" => "whole number".to_owned(),
        other => escape(other),
    };
    names.iter().map(name).collect::<Vec<_>>().join(" or ")
}

/// Returns the type with its limits.
fn with_limits(schema: &Value) -> String {
    let limits = limits(schema);
    if limits.is_empty() { kind(schema) } else { format!("{} ({})", kind(schema), limits.join(", ")) }
}

/// Returns limits and default of a field, as HTML.
pub(super) fn limits(schema: &Value) -> Vec<String> {
    let mut limits = Vec::new();
    if let Some(limit) = range(&schema["minimum"], &schema["maximum"]) {
        limits.push(limit);
    }
    for (low, high, unit) in [
        ("minLength", "maxLength", "characters"),
        ("minItems", "maxItems", "items"),
        ("minProperties", "maxProperties", "entries"),
    ] {
        if let Some(limit) = range(&schema[low], &schema[high]) {
            limits.push(format!("{limit} {unit}"));
        }
    }
    if !schema["default"].is_null() {
        limits.push(format!("default <code>{}</code>", escape(&schema["default"].to_string())));
    }
    limits
}

fn range(low: &Value, high: &Value) -> Option<String> {
    match (low.is_null(), high.is_null()) {
        (true, true) => None,
        (false, true) => Some(format!("at least {}", escape(&low.to_string()))),
        (true, false) => Some(format!("at most {}", escape(&high.to_string()))),
        (false, false) => Some(format!("{} to {}", escape(&low.to_string()), escape(&high.to_string()))),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn schemas_in_words() {
        let list = json!({ "type": "array", "items": { "$ref": "#/components/schemas/ChatMessage" }, "maxItems": 9 });
        assert_eq!(kind(&list), "list of <a href=\"#schema-ChatMessage\">ChatMessage</a>");
        assert_eq!(limits(&list), ["at most 9 items"]);
        let number = json!({ "type": ["number", "null"], "minimum": 0, "maximum": 2, "default": 1.0 });
        assert_eq!(
            (kind(&number).as_str(), limits(&number).join(", ")),
            ("number", "0 to 2, default <code>1.0</code>".into())
        );
        let either =
            json!({ "anyOf": [{ "type": "string", "minLength": 1 }, { "type": "null" }, { "type": "boolean" }] });
        assert_eq!(kind(&either), "string (at least 1 characters) or boolean");
        assert_eq!(kind(&json!({ "enum": ["<b>", null] })), "<code>&quot;&lt;b&gt;&quot;</code>");
        assert_eq!(kind(&json!({})), "any value");
    }
}
