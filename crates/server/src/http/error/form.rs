//! Errors in the form of the API that was called. Whatever refuses a request makes an [`ApiError`] in OpenAI's form;
//! the outermost middleware writes it anew for the routes of other APIs, so that no refusal can miss.

use axum::body::Body;
use axum::http::{Response, StatusCode};
use serde_json::json;

use super::ApiError;

/// The API whose error object a route returns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    OpenAi,
    Anthropic,
    Ollama,
}

impl ErrorForm {
    /// Returns the form for the path of a request, known route or not.
    pub(crate) fn of(path: &str) -> ErrorForm {
        let is_under =
            |prefix: &str| path.strip_prefix(prefix).is_some_and(|rest| matches!(rest, "") || rest.starts_with('/'));
        if is_under("/v1/messages") {
            ErrorForm::Anthropic
        } else if is_under("/api") {
            ErrorForm::Ollama
        } else {
            ErrorForm::OpenAi
        }
    }

    /// Returns the JSON of an error.
    pub(crate) fn json(self, error: &ApiError, request_id: &str) -> String {
        match self {
            ErrorForm::OpenAi => error.to_json(),
            ErrorForm::Anthropic => {
                let detail = json!({ "type": anthropic_type(error.status), "message": error.detail.message });
                json!({ "type": "error", "error": detail, "request_id": request_id }).to_string()
            }
            ErrorForm::Ollama => json!({ "error": error.detail.message }).to_string(),
        }
    }

    /// Writes a response anew if it is an error.
    pub(crate) fn apply(self, response: &mut Response<Body>, request_id: &str) {
        if let Some(error) = response.extensions_mut().remove::<ApiError>()
            && self != ErrorForm::OpenAi
        {
            *response.body_mut() = Body::from(self.json(&error, request_id));
        }
    }
}

/// Returns the name that Anthropic's API documents for a status.
pub(crate) fn anthropic_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}
