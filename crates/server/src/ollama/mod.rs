//! Ollama's API: requests become chat requests or completions, replies are lines of JSON.

pub(crate) mod embed;
mod messages;
pub(crate) mod models;
mod options;
pub(crate) mod pull;
mod reply;
mod request;
pub(crate) mod routes;
mod schemas;

use axum::http::StatusCode;

use crate::http::error::ApiError;

/// Routes of Ollama's API that this server does not have, and what takes their place.
const NOT_OFFERED: [(&str, &str); 6] = [
    ("/api/copy", "`--alias` of `pellucid serve` gives a model further names"),
    ("/api/create", "`pellucid quantize` makes models, and `--chat-template` of `pellucid serve` sets a template"),
    ("/api/delete", "`pellucid rm` removes models from the store"),
    ("/api/push", "this server uploads nothing"),
    ("/api/embeddings", "it is the older form of /api/embed"),
    ("/api/blobs", "models come from the hub with /api/pull"),
];

/// Returns the refusal of a route of Ollama's API that is known and not offered.
pub(crate) fn not_offered(path: &str) -> Option<ApiError> {
    let is_under = |route: &str| path.strip_prefix(route).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    let (route, why) = NOT_OFFERED.into_iter().find(|(route, _)| is_under(route))?;
    let message = format!("{route} is not offered: {why}");
    Some(ApiError::refused(StatusCode::NOT_IMPLEMENTED, "not_offered", message))
}
