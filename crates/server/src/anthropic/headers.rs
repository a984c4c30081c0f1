//! The headers of Anthropic's API: `anthropic-version`, which is required, and `anthropic-beta`.

use axum::http::HeaderMap;

use crate::http::error::ApiError;
use crate::http::fields::shown;

const VERSION: &str = "anthropic-version";
const BETA: &str = "anthropic-beta";
/// The versions that clients send. What the newest one no longer documents, such as `temperature`, is still read.
const VERSIONS: [&str; 3] = ["2026-10-21", "2023-06-01", "2023-01-01"];
/// Beginnings of the names of beta features that change nothing in a request without the fields that they introduce,
/// or that ask for what this server does anyway. The names end with a date. `thinking-token-count` adds estimates where
/// thoughts are hidden; here they are sent.
const ACCEPTED_BETAS: [&str; 18] = [
    "advanced-tool-use-",
    "claude-code-",
    "context-1m-",
    "context-management-",
    "effort-",
    "extended-cache-ttl-",
    "fine-grained-tool-streaming-",
    "interleaved-thinking-",
    "max-tokens-3-5-sonnet-",
    "message-batches-",
    "mid-conversation-system-",
    "oauth-",
    "output-128k-",
    "prompt-caching-",
    "structured-outputs-",
    "thinking-token-count-",
    "token-counting-",
    "token-efficient-tools-",
];

/// Refuses a request without a known version, or with a beta feature that is not known.
pub(super) fn check(headers: &HeaderMap) -> Result<(), ApiError> {
    let text = |value: &axum::http::HeaderValue| value.to_str().unwrap_or_default().to_owned();
    match headers.get(VERSION).map(text) {
        None => {
            let message = format!("{VERSION}: header is required; send {VERSION}: {}", VERSIONS[1]);
            return Err(ApiError::invalid(message).code("missing_header"));
        }
        Some(version) if !VERSIONS.contains(&&*version) => {
            let known = VERSIONS.join(", ");
            let message = format!("{VERSION}: expected {known}, found {}", shown(&version));
            return Err(ApiError::invalid(message).code("unsupported_value"));
        }
        Some(_) => {}
    }
    let given: Vec<String> = headers.get_all(BETA).iter().map(text).collect();
    let mut names = given.iter().flat_map(|value| value.split(',')).map(str::trim).filter(|name| !name.is_empty());
    match names.find(|name| !ACCEPTED_BETAS.iter().any(|known| name.starts_with(known))) {
        None => Ok(()),
        Some(name) => {
            let message = format!("{BETA}: this server does not know the beta feature {}", shown(name));
            Err(ApiError::invalid(message).code("unsupported_value"))
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn versions_and_beta_features_are_known_or_refused() {
        let checked = |version: Option<&'static str>, betas: &[&'static str]| {
            let mut headers = HeaderMap::new();
            if let Some(version) = version {
                headers.insert(VERSION, HeaderValue::from_static(version));
            }
            betas.iter().for_each(|beta| {
                headers.append(BETA, HeaderValue::from_static(beta));
            });
            check(&headers).map_err(|error| error.detail.message)
        };
        assert!(checked(None, &[]).unwrap_err().contains("header is required"));
        assert!(checked(Some("2020-01-01"), &[]).unwrap_err().contains("\"2020-01-01\""));
        assert_eq!(checked(Some("2023-06-01"), &["prompt-caching-2024-07-31, claude-code-20250219", ""]), Ok(()));
        let refused = checked(Some("2023-06-01"), &["claude-code-20250219", "computer-use-2025-01-24"]);
        assert!(refused.unwrap_err().contains("computer-use-2025-01-24"));
    }
}
