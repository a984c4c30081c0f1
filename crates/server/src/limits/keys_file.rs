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
    /// Whether requests may set `trace`, which reveals more of the model than log probabilities.
    #[serde(default)]
    pub trace: bool,
    /// Whether to allow `/metrics` although there are other tenants, whose activity it shows.
    #[serde(default)]
    pub metrics: bool,
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

fn from_json(text: &str) -> Result<KeysFile, KeysError> {
    serde_json::from_str(text).map_err(|error| {
        let reason = if error.is_data() { expected(&error.to_string()) } else { "this is not JSON".into() };
        KeysError::Syntax { line: error.line(), column: error.column(), reason }
    })
}

fn from_toml(text: &str) -> Result<KeysFile, KeysError> {
    let refused = |error: toml::de::Error, reason: String| {
        let start = error.span().map_or(0, |span| span.start);
        let before = text.get(..start).unwrap_or_default();
        let column = before.chars().rev().take_while(|c| *c != '\n').count() + 1;
        KeysError::Syntax { line: before.matches('\n').count() + 1, column, reason }
    };
    // The first pass finds syntax errors, whose messages are dropped because they quote the text; the second finds
    // wrong types, whose messages `expected` can shorten.
    let read: Result<toml::Table, _> = toml::from_str(text);
    read.map_err(|error| refused(error, "this is not TOML".into()))?;
    toml::from_str(text).map_err(|error| {
        let reason = expected(error.message());
        refused(error, reason)
    })
}

/// Returns the part of a parser's message that says what was expected. The part that quotes what was found may hold a
/// key.
fn expected(message: &str) -> String {
    match message.rsplit_once(", expected ") {
        // `serde_json` appends line and column, which the error has already.
        Some((_, wanted)) => format!("expected {}", wanted.split(" at line ").next().unwrap_or_default()),
        None if message.starts_with("missing field `name`") => "a tenant without a name".into(),
        None => "unexpected value".into(),
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
        for (text, reason) in [
            ("[[tenant]]\nname = \"a\"\nkeys = [\"secret-key\" x]", "line 3, column 22: this is not TOML"),
            ("[[tenant]]\nname = \"a\"\nsecret-key = 1\nsecret-key = 1", "line 4, column 1: this is not TOML"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret-key\"", "line 3, column 8: expected a sequence"),
            ("[[tenant]]\nname = \"a\"\nkeys = \"secret, expected this-key\"", "line 3, column 8: expected a sequence"),
            ("[[tenant]]\nname = \"a\"\nkeys = [\"b\", 1234]", "line 3, column 14: expected a string"),
            ("[[tenant]]\nname = \"a\"\nkv_tokens = \"secret-key\"", "line 3, column 13: expected u32"),
            ("[[tenant]]\nkeys = [\"secret-key\"]", "line 1, column 1: a tenant without a name"),
            ("{\"tenant\": [{\"name\": \"a\", \"keys\": \"secret-key\"}]}", "line 1, column 46: expected a sequence"),
            ("{\"tenant\": [{\"name\": \"a\",\n\"kv_tokens\": \"secret-key\"}]}", "line 2, column 25: expected u32"),
            ("{\"tenant\": [{\"name\": secret-key}]}", "line 1, column 22: this is not JSON"),
            ("{\"tenant\": [{\"keys\": [\"secret-key\"]}]}", "line 1, column 36: a tenant without a name"),
        ] {
            assert_eq!(refused(text), format!("{place}{reason}"), "{text}");
        }
        for text in ["[[tenant]]\nname = \"a\"\nsecret-key = 1", "{\"tenant\": [{\"secret-key\": 1}]}"] {
            let message = refused(text);
            assert!(!message.contains("secret") && message.contains("expected one of `name`, `keys`"), "{message}");
        }
        assert!(refused("secret-key = 1").ends_with("line 1, column 1: expected `tenant`"));
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
