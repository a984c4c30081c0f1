//! Handlers of the routes. Their request and response types define the OpenAPI document.

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{HeaderMap, HeaderValue, Request, Response, header};
use pellucid_engine::Liveness;
use pellucid_generate::LoadedModel;
use serde::Serialize;
use utoipa::{IntoResponses, ToSchema};

use super::accept::{self, Offer};
use super::body::{self, Admission, ModelChoice, ReadBody};
use super::caller::Caller;
use super::drain::Phase;
use super::error::{ApiError, ErrorBody};
use super::json::Json;
use crate::limits::permit::Permit;
use crate::metrics::Format;
use crate::models::lease::{Lease, Served, TextLease};
use crate::openai::chat::ChatRequest;
use crate::openai::completions::CompletionRequest;
use crate::openai::models::{ModelCard, ModelList};
use crate::openai::reply_json::{ChatCompletion, Completion, Envelope};
use crate::openai::tokenize::{
    Answer, DetokenizeRequest, Detokenized, Rendered, TemplateRequest, TokenizeRequest, Tokenized,
};
use crate::reply::parts::{self, PIECES_IN_FLIGHT};
use crate::reply::respond::{json, respond};
use crate::state::{App, SharedApp};

/// Errors that any route may return.
#[derive(IntoResponses)]
#[allow(dead_code)] // For the document.
pub(crate) enum Refusals {
    /// A header or the path is not valid.
    #[response(status = 400)]
    BadHead(ErrorBody),
    /// The key is missing or wrong.
    #[response(status = 401)]
    Unauthorized(ErrorBody),
    /// The host, the origin or the key is not allowed to do this, or an operator cancelled the request.
    #[response(status = 403)]
    Forbidden(ErrorBody),
    /// The client's address has too many connections or tried too many wrong keys.
    #[response(status = 429, headers(("Retry-After" = u64, description = "Seconds")))]
    TooManyFromAddress(ErrorBody),
    /// Internal error.
    #[response(status = 500)]
    Internal(ErrorBody),
    /// The server is shutting down or short of memory, threads or connections, or its engine has stopped.
    #[response(status = 503)]
    Unavailable(ErrorBody),
}

/// Further errors of routes that take a body.
#[derive(IntoResponses)]
#[allow(dead_code)] // For the document.
pub(crate) enum BodyRefusals {
    /// The body is not valid; `param` names the field.
    #[response(status = 400)]
    BadRequest(ErrorBody),
    /// The model does not exist.
    #[response(status = 404)]
    NotFound(ErrorBody),
    /// The body did not arrive in time.
    #[response(status = 408)]
    Timeout(ErrorBody),
    /// The body is too large.
    #[response(status = 413)]
    TooLarge(ErrorBody),
    /// The body is not `application/json`.
    #[response(status = 415)]
    WrongType(ErrorBody),
    /// The queue is full or a limit is reached; `code` names it, `Retry-After` says when to try again.
    #[response(status = 429, headers(("Retry-After" = u64, description = "Seconds")))]
    TooMany(ErrorBody),
}

/// Answer of the health checks.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct Health {
    /// `ok` or `ready`.
    status: &'static str,
}

/// Generate a reply to a conversation
///
/// With `stream` the reply comes as server-sent events: chunks, then `[DONE]`.
#[utoipa::path(post, path = "/v1/chat/completions", tag = "OpenAI", request_body = ChatRequest, responses(
    (status = 200, description = "The reply, whole or as a stream",
     content((ChatCompletion = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn chat(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read = move |value, model: &TextLease| ChatRequest::read(value, model)?.spec(model, &shared.limits, &tenant);
    let (spec, admission) = read_body(&app, &caller, request, true, read).await?;
    let form = Envelope::of(&spec, &admission.model)?;
    respond(app, caller, admission, spec, Box::new(form)).await
}

/// Continue a text
#[utoipa::path(post, path = "/v1/completions", tag = "OpenAI", request_body = CompletionRequest, responses(
    (status = 200, description = "The continuation, whole or as a stream",
     content((Completion = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn completions(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read =
        move |value, model: &TextLease| CompletionRequest::read(value, model)?.spec(model, &shared.limits, &tenant);
    let (spec, admission) = read_body(&app, &caller, request, true, read).await?;
    let form = Envelope::of(&spec, &admission.model)?;
    respond(app, caller, admission, spec, Box::new(form)).await
}

/// List the models
#[utoipa::path(get, path = "/v1/models", tag = "OpenAI", responses((status = 200, body = ModelList), Refusals))]
pub(crate) async fn models(State(app): State<SharedApp>, Extension(caller): Extension<Caller>) -> Response<Body> {
    json(text_of(&ModelList::new(&app, &caller.tenant)))
}

/// Describe a model
#[utoipa::path(get, path = "/v1/models/{id}", tag = "OpenAI",
    params(("id" = String, Path, description = "The model's id")), responses(
    (status = 200, body = ModelCard), (status = 404, description = "Unknown model", body = ErrorBody), Refusals))]
pub(crate) async fn model(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    let Path(id) = id.map_err(|_| {
        ApiError::invalid("the path is not valid: percent-encoded bytes must be UTF-8").code("invalid_path")
    })?;
    Ok(json(text_of(&ModelCard::find(&id, &app, &caller.tenant)?)))
}

/// Encode a text or a conversation to token ids
#[utoipa::path(post, path = "/tokenize", tag = "Text", request_body = TokenizeRequest, responses(
    (status = 200, body = Tokenized), Refusals, BodyRefusals))]
pub(crate) async fn tokenize(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    answer(app, caller, request, |value, model| TokenizeRequest::read(value, model)?.answer(model)).await
}

/// Decode token ids to text
#[utoipa::path(post, path = "/detokenize", tag = "Text", request_body = DetokenizeRequest, responses(
    (status = 200, body = Detokenized), Refusals, BodyRefusals))]
pub(crate) async fn detokenize(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    answer(app, caller, request, |value, model| DetokenizeRequest::read(value, model)?.answer(model)).await
}

/// Render a conversation with the model's chat template
#[utoipa::path(post, path = "/apply-template", tag = "Text", request_body = TemplateRequest, responses(
    (status = 200, body = Rendered), Refusals, BodyRefusals))]
pub(crate) async fn apply_template(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    answer(app, caller, request, |value, model| TemplateRequest::read(value, model)?.answer(model)).await
}

/// Admits a request, reads its body and passes it to `work` with the model that it names. Nothing is parsed for a
/// tenant that is beyond its limits.
pub(crate) async fn read_body<T: Send + 'static, M: Served>(
    app: &App,
    caller: &Caller,
    request: Request<Body>,
    uses_model: bool,
    work: impl FnOnce(Json, &Lease<M>) -> Result<T, ApiError> + Send + 'static,
) -> Result<(T, Admission<M>), ApiError> {
    let (body, permit) = receive_body(app, caller, request, uses_model).await?;
    body.parse(permit, ModelChoice::of(app), work).await
}

/// Admits a request and reads its body.
pub(crate) async fn receive_body(
    app: &App,
    caller: &Caller,
    request: Request<Body>,
    uses_model: bool,
) -> Result<(ReadBody, Permit), ApiError> {
    let permit = match caller.admit(app, uses_model) {
        Ok(permit) => permit,
        Err(error) => {
            body::discard(app, request).await;
            return Err(error);
        }
    };
    match body::read(app, &caller.tenant, request).await {
        Ok(body) => Ok((body, permit)),
        Err(error) => {
            permit.refuse(&error);
            Err(error)
        }
    }
}

/// Answers a request with the JSON that `work` makes of its body.
async fn answer(
    app: SharedApp,
    caller: Caller,
    request: Request<Body>,
    work: impl FnOnce(Json, &LoadedModel) -> Result<Answer, ApiError> + Send + 'static,
) -> Result<Response<Body>, ApiError> {
    let read = read_body(&app, &caller, request, false, move |value, model: &TextLease| work(value, model)).await?;
    let (Answer { parts, held }, Admission { mut permit, model: _ }) = read;
    // The permit, its memory and the count of requests in flight last until the reply is written.
    permit.hold(held + PIECES_IN_FLIGHT).inspect_err(|error| permit.refuse(error))?;
    parts::response(parts, (permit, app.drain.start_request()))
}

/// Returns the JSON of a value that can always be written.
pub(crate) fn text_of(value: &impl Serialize) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// Check whether the process is alive
///
/// The only route that needs no key.
#[utoipa::path(get, path = "/health", tag = "Operations", security(()), responses(
    (status = 200, body = Health), (status = 400, description = "A header is repeated", body = ErrorBody),
    (status = 403, description = "The host is not allowed", body = ErrorBody),
    (status = 503, description = "The engine has stopped", body = ErrorBody)))]
pub(crate) async fn health(State(app): State<SharedApp>) -> Result<Response<Body>, ApiError> {
    match app.liveness() {
        Liveness::Stopped => Err(pellucid_engine::Error::Stopped.into()),
        Liveness::Idle | Liveness::Stepping(_) => Ok(json(text_of(&Health { status: "ok" }))),
    }
}

/// Check whether requests make progress
///
/// Fails during shutdown, and when a step of the engine hangs.
#[utoipa::path(get, path = "/ready", tag = "Operations", responses((status = 200, body = Health), Refusals))]
pub(crate) async fn ready(State(app): State<SharedApp>) -> Result<Response<Body>, ApiError> {
    if app.drain.phase() != Phase::Serving {
        return Err(ApiError::unavailable("draining", "the server is shutting down", 10));
    }
    match app.liveness() {
        Liveness::Stopped => Err(pellucid_engine::Error::Stopped.into()),
        Liveness::Stepping(time) if time > app.limits.watchdog => {
            let message = format!("the engine's current step has run for {} s", time.as_secs());
            Err(ApiError::unavailable("engine_stalled", message, 10))
        }
        Liveness::Idle | Liveness::Stepping(_) => Ok(json(text_of(&Health { status: "ready" }))),
    }
}

/// Export metrics for Prometheus
///
/// In the text format 0.0.4, or as OpenMetrics if `Accept` prefers that. With several tenants, only keys with the
/// right to metrics may read them.
#[utoipa::path(get, path = "/metrics", tag = "Operations", responses(
    (status = 200, description = "Metrics, in the format that `Accept` prefers",
     content((String = "text/plain"), (String = "application/openmetrics-text"))), Refusals))]
pub(crate) async fn metrics(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: HeaderMap,
) -> Result<Response<Body>, ApiError> {
    app.tenants.current().check_metrics(&caller.tenant)?;
    let offers = [
        Offer { kind: "text/plain", version: Some("0.0.4") },
        Offer { kind: "application/openmetrics-text", version: Some("1.0.0") },
    ];
    let format = [Format::Text, Format::OpenMetrics][accept::preferred(&request, &offers)];
    let tenants = app.tenants.current();
    let memory = app.models.tenant_memory(|id| tenants.name_of(id));
    let text = app.metrics.render(&app.models.engine_stats(), &app.models.guard_counts(), &memory, format);
    let mut response = Response::new(Body::from(text));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(format.content_type()));
    headers.insert(header::VARY, HeaderValue::from_static("accept"));
    Ok(response)
}
