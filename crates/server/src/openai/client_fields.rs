//! Fields of OpenAI's API that concern its platform: storage, tiers, routing to a cache, the end user. Its clients and
//! the frameworks above them send these by default.
//!
//! Each is checked by type and by OpenAI's limits. Those accepted here have no effect on a reply by definition; values
//! that would have one (`store: true`, another tier) are refused by name.

use serde_json::{Map, Value};
use utoipa::ToSchema;

use super::openapi::schemas;
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;

/// OpenAI's limits on `metadata`: pairs, and characters of a name and of a value.
pub(crate) const MAX_METADATA: usize = 16;
const MAX_METADATA_NAME: usize = 64;
pub(crate) const MAX_METADATA_VALUE: usize = 512;
/// OpenAI's limit on the characters of `safety_identifier` and `prompt_cache_key`.
const MAX_IDENTIFIER: usize = 64;

/// Fields that concern OpenAI's platform.
#[derive(Debug, Clone, Default, PartialEq, ToSchema)]
pub(crate) struct ClientFields {
    /// Identifies the end user. Appears in the log as a hash, in place of `user`.
    #[schema(max_length = 64)]
    pub(crate) safety_identifier: Option<String>,
    /// Names and texts for stored replies. This server stores none, so they have no effect.
    #[schema(schema_with = schemas::metadata)]
    pub(crate) metadata: Option<Map<String, Value>>,
    /// Only false: this server stores no requests.
    #[schema(schema_with = schemas::store)]
    pub(crate) store: Option<bool>,
    /// Only `auto` and `default`. There is one tier, `default`, which the reply names then.
    #[schema(schema_with = schemas::service_tier)]
    pub(crate) service_tier: Option<String>,
    /// A hint for routing between servers. It has no effect: prefixes are cached for the tenant with or without it.
    #[schema(max_length = 64)]
    pub(crate) prompt_cache_key: Option<String>,
    /// Only `in_memory`, which has no effect: prefixes are kept while there is memory.
    #[schema(schema_with = schemas::prompt_cache_retention)]
    pub(crate) prompt_cache_retention: Option<String>,
}

impl ClientFields {
    pub(crate) fn read(fields: &mut Fields) -> Result<ClientFields, ApiError> {
        let no_storage = "this server does not store requests";
        Ok(ClientFields {
            safety_identifier: characters(fields, "safety_identifier", MAX_IDENTIFIER)?,
            metadata: read_metadata(fields)?,
            store: match fields.boolean("store")? {
                Some(true) => return Err(unsupported("store", no_storage)),
                store => store,
            },
            service_tier: one_of(
                fields,
                "service_tier",
                &["auto", "default"],
                "expected auto or default, there is one tier",
            )?,
            prompt_cache_key: characters(fields, "prompt_cache_key", MAX_IDENTIFIER)?,
            // OpenAI's documentation has both spellings.
            prompt_cache_retention: one_of(
                fields,
                "prompt_cache_retention",
                &["in_memory", "in-memory"],
                "prefixes are kept while there is memory",
            )?,
        })
    }

    /// Returns the tier that the reply names: as in OpenAI's API the one used, if the request names one.
    pub(crate) fn tier_used(&self) -> Option<&'static str> {
        self.service_tier.as_ref().map(|_| "default")
    }
}

fn unsupported(name: &str, why: &str) -> ApiError {
    ApiError::field(name, format!("{name} is not supported: {why}")).code("unsupported_parameter")
}

/// Takes one of the words that have no effect; other words are refused because of `why`.
fn one_of(fields: &mut Fields, name: &str, words: &[&str], why: &str) -> Result<Option<String>, ApiError> {
    match characters(fields, name, MAX_IDENTIFIER)? {
        Some(word) if !words.contains(&word.as_str()) => Err(unsupported(name, why)),
        word => Ok(word),
    }
}

/// Takes a text of at most `max_len` characters.
fn characters(fields: &mut Fields, name: &str, max_len: usize) -> Result<Option<String>, ApiError> {
    let path = fields.path(name);
    fields.take(name).map(|value| read_characters(&path, value, max_len)).transpose()
}

fn read_characters(path: &str, value: Json, max_len: usize) -> Result<String, ApiError> {
    let text = fields::string(path, value, usize::MAX)?;
    let count = text.chars().count();
    if count > max_len {
        let message = format!("{path}: expected at most {max_len} characters, found {count}");
        return Err(ApiError::field(path, message).code("string_above_max_length"));
    }
    Ok(text)
}

fn read_metadata(fields: &mut Fields) -> Result<Option<Map<String, Value>>, ApiError> {
    let path = fields.path("metadata");
    let entries = match fields.take("metadata") {
        None => return Ok(None),
        Some(Json::Object(entries)) => entries,
        Some(other) => return Err(fields::wrong_type(&path, "an object", &other)),
    };
    if entries.len() > MAX_METADATA {
        let message = format!("{path}: expected at most {MAX_METADATA} pairs, found {}", entries.len());
        return Err(ApiError::field(path, message).code("array_above_max_length"));
    }
    let mut metadata = Map::new();
    for (name, value) in entries {
        let count = name.chars().count();
        if count > MAX_METADATA_NAME {
            let message = format!("{path}: expected names of at most {MAX_METADATA_NAME} characters, found {count}");
            return Err(ApiError::field(path, message).code("string_above_max_length"));
        }
        let place = format!("{path}.{name}");
        metadata.insert(name, read_characters(&place, value, MAX_METADATA_VALUE)?.into());
    }
    Ok(Some(metadata))
}
