//! What a client is told when something is refused or fails: OpenAI's error object, with the right status.
//!
//! A message names fields, limits and what was found. It holds no path, no address and no backtrace: faults of our own are logged, and
//! the client hears that there was one.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use pellucid_engine::Error as EngineError;
use pellucid_sampling::{Error as SamplingError, SamplingOption};
use serde::Serialize;
use utoipa::ToSchema;

/// Seconds after which a client may try again, where nothing better is known.
pub(crate) const RETRY_SOON_S: u64 = 1;

/// A refusal or a failure.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ApiError {
    pub(crate) status: StatusCode,
    pub(crate) detail: ErrorDetail,
    pub(crate) retry_after_s: Option<u64>,
    /// Methods that the route has, where the method was wrong.
    pub(crate) allow: Option<&'static str>,
}

/// The body of every reply that is an error.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ErrorBody {
    pub(crate) error: ErrorDetail,
}

/// What went wrong.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub(crate) struct ErrorDetail {
    /// A sentence for people.
    pub(crate) message: String,
    /// The kind of error: `invalid_request_error`, `rate_limit_error`, `server_error`, `service_unavailable`.
    #[serde(rename = "type")]
    pub(crate) kind: &'static str,
    /// The field that was refused, where it was one.
    #[schema(required)]
    pub(crate) param: Option<String>,
    /// A word for programs.
    #[schema(required)]
    pub(crate) code: Option<&'static str>,
}

impl ApiError {
    fn new(status: StatusCode, kind: &'static str, code: Option<&'static str>, message: impl Into<String>) -> ApiError {
        let detail = ErrorDetail { message: message.into(), kind, param: None, code };
        ApiError { status, detail, retry_after_s: None, allow: None }
    }

    /// 400.
    pub(crate) fn invalid(message: impl Into<String>) -> ApiError {
        ApiError::new(StatusCode::BAD_REQUEST, "invalid_request_error", None, message)
    }

    /// 400 for one field; `code` may say more than that its value will not do.
    pub(crate) fn field(param: impl Into<String>, message: impl Into<String>) -> ApiError {
        ApiError::invalid(message).param(param).code("invalid_value")
    }

    /// A refusal with a status of its own.
    pub(crate) fn refused(status: StatusCode, code: &'static str, message: impl Into<String>) -> ApiError {
        ApiError::new(status, "invalid_request_error", Some(code), message)
    }

    /// 401.
    pub(crate) fn unauthorized(message: &str) -> ApiError {
        ApiError::refused(StatusCode::UNAUTHORIZED, "invalid_api_key", message)
    }

    /// 429: which limit, and when to try again.
    pub(crate) fn too_many(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> ApiError {
        let error = ApiError::new(StatusCode::TOO_MANY_REQUESTS, "rate_limit_error", Some(code), message);
        ApiError { retry_after_s: Some(retry_after_s.max(1)), ..error }
    }

    /// 503.
    pub(crate) fn unavailable(code: &'static str, message: impl Into<String>, retry_after_s: u64) -> ApiError {
        let error = ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "service_unavailable", Some(code), message);
        ApiError { retry_after_s: Some(retry_after_s.max(1)), ..error }
    }

    /// 500. What happened is in the log, under the request's id.
    pub(crate) fn fault() -> ApiError {
        let message = "the server met a fault of its own while it served this request; its log says more";
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

    /// The error as JSON, for a stream that has begun.
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
        response
    }
}

impl axum::response::IntoResponse for ApiError {
    fn into_response(self) -> Response<Body> {
        self.into()
    }
}

/// Returns the name that a parameter has in JSON requests.
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
            | SamplingError::OutsideVocabulary { name, .. } => name,
            SamplingError::UnknownStep { .. }
            | SamplingError::StepTwice { .. }
            | SamplingError::StepFixed { .. }
            | SamplingError::StepLeftOut { .. } => "samplers",
            SamplingError::MirostatTruncates { step } => step,
            SamplingError::UnknownPreset { .. } => "preset",
            SamplingError::NothingLeft => {
                return ApiError::field("allowed_token_ids", "every token is ruled out, so no reply is possible");
            }
            SamplingError::VocabularySize { .. }
            | SamplingError::NumLogits { .. }
            | SamplingError::MaskLength { .. }
            | SamplingError::NotANumber { .. } => {
                tracing::error!(%error, "a request failed in the sampler");
                return ApiError::fault();
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
            EngineError::IdOutsideVocabulary { .. } => {
                ApiError::field("prompt", error.to_string()).code("out_of_range")
            }
            EngineError::OutOfRange { name, .. } | EngineError::NotWithBeams { name } => {
                ApiError::field(api_name(name), error.to_string())
            }
            EngineError::ExceedsKvMemory { .. } | EngineError::ExceedsQuota { .. } => {
                ApiError::field("max_tokens", format!("{error}; ask for fewer tokens or choices"))
            }
            EngineError::QueueFull { waiting } => {
                let message = format!("{waiting} requests wait already; try again later");
                ApiError::too_many("queue_full", message, RETRY_SOON_S)
            }
            EngineError::Stopped => ApiError::unavailable("engine_stopped", "the engine has stopped", 30),
            EngineError::OutOfMemory(_) => {
                tracing::error!(%error, "a step had no memory");
                ApiError::unavailable("out_of_memory", error.to_string(), RETRY_SOON_S)
            }
            EngineError::DeviceLost(_) => {
                tracing::error!(%error, "the device is gone");
                ApiError::unavailable("device_lost", error.to_string(), 30)
            }
            EngineError::Sampling(error) => error.into(),
            EngineError::Model(_) | EngineError::Internal(_) => {
                tracing::error!(%error, "a request failed in the engine");
                ApiError::fault()
            }
        }
    }
}
