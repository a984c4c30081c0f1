//! Errors as clients see them: OpenAI's error object with an HTTP status.
//!
//! Messages name fields, limits and what was found. They contain no file path, address or backtrace: internal errors
//! are logged, and the client is only told that there was one.

pub(crate) mod form;

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use pellucid_engine::Error as EngineError;
use pellucid_sampling::{Error as SamplingError, SamplingOption};
use serde::Serialize;
use utoipa::ToSchema;

/// `Retry-After` in seconds, where nothing better is known.
pub(crate) const RETRY_SOON_S: u64 = 1;

/// An error with its HTTP status.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) detail: ErrorDetail,
    pub(crate) retry_after_s: Option<u64>,
    /// Value of the `Allow` header of a 405.
    pub(crate) allow: Option<&'static str>,
}

/// The body of every error response.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorDetail,
}

/// Details of an error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// Explanation for people.
    pub(crate) message: String,
    /// The kind of error: `invalid_request_error`, `rate_limit_error`, `server_error`, `service_unavailable`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// Name of the field that was refused, if any.
    #[schema(required)]
    pub(crate) param: Option<String>,
    /// Identifier for programs.
    #[schema(required)]
    pub(crate) code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> ApiError {
        let detail = ErrorDetail { message: message.into(), kind, param: None, code };
        ApiError { status, detail, retry_after_s: None, allow: None }
    }

    /// Returns a 400.
    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message)
    }

    /// Returns a 400 for one field, with the code `invalid_value` until [`ApiError::code`] sets a more specific one.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::invalid(message).param(param).code("invalid_value")
    }

    /// Returns a refusal with a given status.
    pub(crate) fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", Some(code), message)
    }

    /// Returns a 401.
    pub(crate) fn unauthorized(message: &str) -> ApiError {
        ApiError::refused(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// Returns a 429 for the limit `code`.
    pub(crate) fn too_many(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some(code), message);
        ApiError { retry_after_s: Some(retry_after_s.max(1)), ..error }
    }

    /// Returns a 503.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", Some(code), message);
        ApiError { retry_after_s: Some(retry_after_s.max(1)), ..error }
    }

    /// Returns a 500. The caller logs the cause.
    pub(crate) fn internal() -> ApiError {
        let message = "internal error while serving this request; the server's log has the cause";
        ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "server_error", Some("internal_error"), message)
    }

    pub(crate) fn param(mut self, param: impl Into<String>) -> ApiError {
        self.detail.param = Some(param.into());
        self
    }

    pub(crate) fn code(mut self, code: &'static str) -> ApiError {
        self.detail.code = Some(code);
        self
    }

    pub(crate) fn body(&self) -> ErrorBody {
        ErrorBody { error: self.detail.clone() }
    }

    /// Returns the JSON body, which is also the last event of a stream that fails.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string(&self.body()).unwrap_or_default()
    }
}

impl From<ApiError> for Response<Body> {
    fn from(error: ApiError) -> Response<Body> {
        let mut response = Response::new(Body::from(error.to_json()));
        *response.status_mut() = error.status;
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if let Some(seconds) = error.retry_after_s {
            headers.insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        if error.status == StatusCode::UNAUTHORIZED {
            headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        if let Some(methods) = error.allow {
            headers.insert(header::ALLOW, HeaderValue::from_static(methods));
        }
        // For `ErrorForm`, which writes it anew on the routes of other APIs.
        response.extensions_mut().insert(error);
        response
    }
}

impl axum::response::IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        self.into()
    }
}

/// Returns the name of the request field for a parameter of the engine or the sampler.
fn api_name(name: &'static str) -> &'static str {
    match name {
        "beam width" => "beam_width",
        "beams returned" => "n",
        "prompts" => "prompt",
        "dry_sequence_breakers, tokens of one" => "dry_sequence_breakers",
        name => SamplingOption::by_param(name).map_or(name, SamplingOption::json_name),
    }
}

impl From<SamplingError> for ApiError {
    fn from(error: SamplingError) -> ApiError {
        let code = match &error {
            SamplingError::OutOfRange { .. } | SamplingError::OutsideVocabulary { .. } => "out_of_range",
            SamplingError::TooMany { .. } => "array_above_max_length",
            _ => "invalid_value",
        };
        let name = match &error {
            SamplingError::OutOfRange { name, .. }
            | SamplingError::TooMany { name, .. }
            | SamplingError::Empty { name }
            | SamplingError::NoEffect { name, .. }
            | SamplingError::NothingToMove { name }
            | SamplingError::ListedTwice { name, .. }
            | SamplingError::AllExcluded { name }
            | SamplingError::OutsideVocabulary { name, .. } => name,
            SamplingError::UnknownStep { .. }
            | SamplingError::StepTwice { .. }
            | SamplingError::StepFixed { .. }
            | SamplingError::StepLeftOut { .. } => "samplers",
            SamplingError::MirostatTruncates { step } => step,
            SamplingError::UnknownPreset { .. } => "preset",
            SamplingError::NothingLeft => {
                return ApiError::field(
                    "allowed_token_ids",
                    "the sampling parameters exclude every token, so no reply is possible",
                );
            }
            SamplingError::Grammar(_) => {
                return ApiError::invalid(error.to_string()).code("grammar_too_complex");
            }
            SamplingError::VocabularySize { .. }
            | SamplingError::NumLogits { .. }
            | SamplingError::MaskLength { .. }
            | SamplingError::NotANumber { .. } => {
                tracing::error!(%error, "a request failed in the sampler");
                return ApiError::internal();
            }
        };
        ApiError::field(api_name(name), error.to_string()).code(code)
    }
}

impl From<EngineError> for ApiError {
    fn from(error: EngineError) -> ApiError {
        match error {
            EngineError::EmptyPrompt => ApiError::field("prompt", error.to_string()),
            EngineError::PromptTooLong { .. } => {
                ApiError::field("prompt", error.to_string()).code("context_length_exceeded")
            }
            EngineError::TextTooLong { .. } => {
                ApiError::field("input", error.to_string()).code("context_length_exceeded")
            }
            EngineError::IdOutsideVocabulary { .. } => {
                ApiError::field("prompt", error.to_string()).code("out_of_range")
            }
            EngineError::OutOfRange { name, .. } | EngineError::NotWithBeams { name } => {
                ApiError::field(api_name(name), error.to_string())
            }
            EngineError::ExceedsKvMemory { .. } | EngineError::ExceedsQuota { .. } => {
                ApiError::field("max_tokens", format!("{error}; ask for fewer tokens or choices"))
            }
            // Without the number of waiting requests, which would show the activity of other tenants.
            EngineError::QueueFull => ApiError::too_many("queue_full", error.to_string(), RETRY_SOON_S),
            // Clients repeat a 408, 409, 429 or 5xx on their own, which would undo the cancellation.
            EngineError::Cancelled => ApiError::refused(
                StatusCode::FORBIDDEN,
                "cancelled_by_operator",
                "an operator of this server cancelled the request before its reply was complete",
            ),
            EngineError::Stopped => ApiError::unavailable("engine_stopped", "the engine has stopped", 30),
            EngineError::OutOfMemory(_) => {
                tracing::error!(%error, "a step ran out of device memory");
                ApiError::unavailable("out_of_memory", error.to_string(), RETRY_SOON_S)
            }
            EngineError::DeviceLost(_) => {
                tracing::error!(%error, "the device was lost");
                ApiError::unavailable("device_lost", error.to_string(), 30)
            }
            EngineError::Sampling(error) => error.into(),
            EngineError::Model(_) | EngineError::StatefulDraftModel { .. } | EngineError::Internal(_) => {
                tracing::error!(%error, "a request failed in the engine");
                ApiError::internal()
            }
        }
    }
}
