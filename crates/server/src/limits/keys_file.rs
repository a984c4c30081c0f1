//! The keys file: tenants with their keys, limits and rights, as TOML or JSON.

use std::fmt;

use serde::Deserialize;

/// Maximum number of keys.
pub(super) const MAX_KEYS: usize = 10_000;

/// A keys file: a list of tenants, as TOML or JSON.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeysFile {
    /// The tenants, each with its keys and limits.
    #[serde(default)]
    pub tenant: Vec<TenantConfig>,
}

/// Keys, limits and rights of one tenant. A limit that is absent is not applied.
#[derive(Clone, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TenantConfig {
    /// Name in logs and metrics.
    pub name: String,
    /// API keys in clear text.
    #[serde(default)]
    pub keys: Vec<String>,
    /// SHA-256 hashes of API keys, as 64 hexadecimal digits each.
    #[serde(default)]
    pub keys_sha256: Vec<String>,
    /// Maximum requests per minute.
    pub requests_per_minute: Option<u32>,
    /// Maximum tokens per minute, of prompts and output together.
    pub tokens_per_minute: Option<u32>,
    /// Maximum requests at the same time.
    pub concurrent_requests: Option<u32>,
    /// Maximum tokens in KV memory, of running requests and of the tenant's prefix cache together.
    pub kv_tokens: Option<u32>,
    /// Maximum log probabilities reported per minute.
    pub logprobs_per_minute: Option<u32>,
    /// Maximum tokens probed per minute.
    pub probes_per_minute: Option<u32>,
    /// Maximum stored responses, of which the least recently used are dropped; 0 stores none. 1000 if absent.
    pub stored_responses: Option<u32>,
    /// Names of the models that exist for this tenant; all of them if absent.
    pub models: Option<Vec<String>>,
    /// Whether to allow loading and unloading models, which other tenants may use.
    #[serde(default)]
    pub manage_models: bool,
    /// Whether to allow cancelling requests of all tenants.
    #[serde(default)]
    pub manage_requests: bool,
    /// Whether requests may set `trace`, which reveals more of the model than log probabilities.
    #[serde(default)]
    pub trace: bool,
    /// Whether requests may set `probe`, which shows the inside of the model and computes a token a second time.
    #[serde(default)]
    pub probe: bool,
    /// Whether to allow `/metrics` and `/requests` although there are other tenants, whose activity they show.
    #[serde(default)]
    pub metrics: bool,
    /// Whether to allow `/api/pull`, which downloads models into the server's store.
    #[serde(default)]
    pub pull: bool,
}

impl fmt::Debug for TenantConfig {
    /// Shows the number of keys and not the keys: debug output ends up in logs.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let num_keys = self.keys.len() + self.keys_sha256.len();
        f.debug_struct("TenantConfig").field("name", &self.name).field("num_keys", &num_keys).finish_non_exhaustive()
    }
}

/// Why a keys file was refused. Contains names of tenants, but no other text of the file: any of it may be a key that
/// was typed in the wrong place.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum KeysError {
    /// The file is not TOML or JSON, or a value has the wrong type.
    #[error("the keys file is not valid at line {line}, column {column}: {reason}")]
    Syntax {
        /// Line in the file, from 1.
        line: usize,
        /// Column in characters, from 1.
        column: usize,
        /// The expected content at that position.
        reason: String,
    },
    /// A tenant's name has the wrong form.
    #[error("tenant {number} of the keys file: expected a name of 1 to 64 letters, digits and - _ .")]
    Name {
        /// Position of the tenant in the file, from 1.
        number: usize,
    },
    /// A tenant has no key, or a key has the wrong form.
    #[error("tenant {tenant:?}: {reason}")]
    Tenant {
        /// Name of the tenant.
        tenant: String,
        /// The expected value.
        reason: String,
    },
    /// Two tenants have the same name.
    #[error("two tenants have the name {0:?}")]
    NamedTwice(String),
    /// Two tenants have the same key.
    #[error("the tenants {first:?} and {second:?} have the same key")]
    KeyTwice {
        /// Name of one tenant.
        first: String,
        /// Name of the other.
        second: String,
    },
    /// The file lists no tenant.
    #[error("the keys file has no tenant")]
    NoTenant,
    /// The file has too many keys.
    #[error("expected at most {MAX_KEYS} keys")]
    TooMany,
}

impl KeysFile {
    /// Parses TOML, or JSON if the text begins with `{`.
    pub fn parse(text: &str) -> Result<KeysFile, KeysError> {
        let file = if text.trim_start().starts_with('{') { from_json(text)? } else { from_toml(text)? };
        if file.tenant.is_empty() {
            return Err(KeysError::NoTenant);
        }
        Ok(file)
    }
}

/// Advice for a file that is not in the format at all.
const EXAMPLE: &str = "expected lines such as `[[tenant]]`, `name = \"a\"` and `keys = [\"...\"]`";

fn from_json(text: &str) -> Result<KeysFile, KeysError> {
    serde_json::from_str(text).map_err(|error| {
        let (line, column) = (error.line(), error.column());
        let reason = if error.is_data() {
            let lines = text.split_inclusive('\n');
            let start: usize = lines.take(line.saturating_sub(1)).map(str::len).sum();
            expected(&error.to_string(), text.get(..start + column).unwrap_or(text))
        } else {
            "this is not JSON: expected {\"tenant\": [{\"name\": \"a\", \"keys\": [\"...\"]}]}".into()
        };
        KeysError::Syntax { line, column, reason }
    })
}

fn from_toml(text: &str) -> Result<KeysFile, KeysError> {
    let before = |error: &toml::de::Error| {
        let start = error.span().map_or(0, |span| span.start);
        text.get(..start).unwrap_or_default()
    };
    let refused = |error: &toml::de::Error, reason: String| {
        let before = before(error);
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        KeysError::Syntax { line: before.matches('\n').count() + 1, column, reason }
    };
    // The first pass finds syntax errors, whose messages are dropped because they quote the text; the second finds
    // wrong types, whose messages `expected` replaces.
    let read: Result<toml::Table, _> = toml::from_str(text);
    read.map_err(|error| {
        let is_twice = error.message().starts_with("duplicate key");
        let reason = if is_twice { "this name is set twice".into() } else { format!("this is not TOML: {EXAMPLE}") };
        refused(&error, reason)
    })?;
    toml::from_str(text).map_err(|error| {
        // The line up to the value has the name of the field.
        let reason = expected(error.message(), before(&error));
        refused(&error, reason)
    })
}

/// Names of the fields of a tenant.
const FIELDS: [&str; 17] = [
    "name",
    "keys",
    "keys_sha256",
    "requests_per_minute",
    "tokens_per_minute",
    "concurrent_requests",
    "kv_tokens",
    "logprobs_per_minute",
    "probes_per_minute",
    "stored_responses",
    "models",
    "manage_models",
    "manage_requests",
    "trace",
    "probe",
    "metrics",
    "pull",
];

/// Says what was expected, from the message of a parser and the text before the place that it names. The part of the
/// message that quotes what was found may hold a key, and so may any other text of the file.
fn expected(message: &str, before: &str) -> String {
    if message.starts_with("missing field") {
        return "a tenant without a name: expected `name = \"...\"`".into();
    }
    let wanted = message.rsplit_once(", expected ").map_or("", |(_, wanted)| wanted);
    // `serde_json` appends line and column, which the error has already.
    let wanted = match wanted.split(" at line ").next().unwrap_or_default() {
        "`tenant`" => return format!("unknown name: {EXAMPLE}"),
        names if names.starts_with("one of `") => return format!("unknown name: expected {names}"),
        "struct TenantConfig" | "struct KeysFile" => return format!("wrong type of value: {EXAMPLE}"),
        "a sequence" => "a list of texts, as in [\"...\"]",
        "a string" => "a text in quotes",
        "a boolean" => "true or false",
        "u32" => "a whole number from 0 to 4294967295",
        _ => "another value",
    };
    let words = before.rsplit(|c: char| !c.is_ascii_alphanumeric() && c != '_');
    let field = words.filter_map(|word| FIELDS.iter().find(|field| **field == word)).next();
    match field {
        Some(field) => format!("{field}: expected {wanted}"),
        None => format!("expected {wanted}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::limits::tenants::Tenants;

    #[test]
    fn errors_of_a_keys_file_quote_no_key() {
        let refused =
            |text: &str| KeysFile::parse(text).and_then(|file| Tenants::new(file.tenant)).unwrap_err().to_string();
        assert_eq!(refused(""), "the keys file has no tenant");
        let place = "the keys file is not valid at ";
        let list = "keys: expected a list of texts, as in [\"...\"]";
        let number = "kv_tokens: expected a whole number from 0 to 4294967295";
        let nameless = "a tenant without a name: expected `name = \"...\"`";
        for (text, at, reason) in [
            ("[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\" x]", "3, column 22", "this is not TOML: expected lines"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret-key", "3, column 19", "this is not TOML: expected lines"),
            ("secret-key", "1, column 11", "this is not TOML: expected lines"),
            ("[[tenant]]\nname = \"a\"\nsecret-key = 1\nsecret-key = 1", "4, column 1", "this name is set twice"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret-key\"", "3, column 8", list),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret, expected this-key\"", "3, column 8", list),
            ("[[tenant]]\nname = \"a\"\nkeys = [\"b\", 1234]", "3, column 14", "keys: expected a text in quotes"),
            ("[[tenant]]\nname = 1", "2, column 8", "name: expected a text in quotes"),
            ("[[tenant]]\nname = \"a\"\ntrace = 1", "3, column 9", "trace: expected true or false"),
            ("[[tenant]]\nname = \"a\"\nkv_tokens = \"secret-key\"", "3, column 13", number),
            ("[[tenant]]\nname = \"a\"\nkv_tokens = -1", "3, column 13", number),
            ("[[tenant]]\nname = \"a\"\nkv_tokens = 5000000000", "3, column 13", number),
            ("[[tenant]]\nkeys = [\"secret-key\"]", "1, column 1", nameless),
            ("tenant = [\"secret-key\"]", "1, column 11", "wrong type of value: expected lines"),
            ("secret-key = 1", "1, column 1", "unknown name: expected lines such as `[[tenant]]`"),
            ("{\"tenant\": [{\"name\": \"a\", \"keys\": \"secret-key\"}]}", "1, column 46", list),
            ("{\"tenant\": [{\"name\": \"a\",\n\"kv_tokens\": \"secret-key\"}]}", "2, column 25", number),
            ("{\"tenant\": [{\"name\": secret-key}]}", "1, column 22", "this is not JSON: expected {\"tenant\""),
            ("{\"tenant\": [{\"keys\": [\"secret-key\"]}]}", "1, column 36", nameless),
        ] {
            let message = refused(text);
            assert!(message.starts_with(&format!("{place}line {at}: {reason}")), "{text}: {message}");
            assert!(!message.contains("secret"), "{message}");
        }
        for text in ["[[tenant]]\nname = \"a\"\nsecret-key = 1", "{\"tenant\": [{\"secret-key\": 1}]}"] {
            let message = refused(text);
            assert!(!message.contains("secret") && message.contains("expected one of `name`, `keys`"), "{message}");
            assert!(FIELDS.iter().all(|field| message.contains(&format!("`{field}`"))), "{message}");
        }
        assert!(refused("[[tenant]]\nname = \"a\"").contains("no key"));
        assert!(
            refused("[[tenant]]\nname = \"secret key\"\nkeys = [\"b\"]")
                .starts_with("tenant 1 of the keys file: expected a name")
        );
        assert!(refused("[[tenant]]\nname = \"a\"\nkeys = [\"short\"]").contains("8 to 512"));
        let twice =
            "[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\"]\n[[tenant]]\nname = \"b\"\nkeys = [\"secret-key\"]";
        assert_eq!(refused(twice), "the tenants \"a\" and \"b\" have the same key");
        let json = "{\"tenant\": [{\"name\": \"a\", \"keys\": [\"secret-key\"], \"requests_per_minute\": 5}]}";
        assert_eq!(KeysFile::parse(json).unwrap().tenant[0].requests_per_minute, Some(5));
    }

    #[test]
    fn debug_output_shows_no_key() {
        let file = KeysFile::parse("[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\"]").unwrap();
        assert_eq!(format!("{:?}", file.tenant[0]), "TenantConfig { name: \"a\", num_keys: 1, .. }");
        assert!(!format!("{file:?} {:?}", Tenants::new(file.tenant.clone())).contains("secret-key"));
    }
}
