//! Handlers of `/v1/responses` and the routes below it.

use std::sync::Arc;

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{Request, Response, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::query::{Page, Query};
use super::request::{Reader, ResponseRequest};
use super::response::{ResponseForm, ResponseUsage};
use super::schemas::{CreateResponseRequest, InputTokensRequest};
use super::store::StoredResponse;
use crate::http::body::ModelChoice;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::fields::shown;
use crate::http::routes::{BodyRefusals, Refusals, receive_body};
use crate::limits::client_memory::HeldMemory;
use crate::models::lease::TextLease;
use crate::reply::parts::{self, JsonParts, PIECES_IN_FLIGHT};
use crate::reply::respond::{json as json_response, respond};
use crate::state::{App, SharedApp};

type Id = Result<Path<String>, PathRejection>;

/// A response.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct ResponseObject {
    id: String,
    /// `response`.
    object: String,
    created_at: u64,
    #[schema(required)]
    completed_at: Option<u64>,
    /// `completed`, or `incomplete` if the reply ended for lack of tokens or time.
    status: String,
    /// Always false.
    background: bool,
    #[schema(value_type = Option<Object>, required)]
    error: Option<Value>,
    #[schema(value_type = Option<Object>, required)]
    incomplete_details: Option<Value>,
    model: String,
    /// Items `reasoning`, `message` and `function_call`.
    #[schema(value_type = Vec<Object>)]
    output: Vec<Value>,
    /// Whether the response is stored. False also if it is too large for the store.
    store: bool,
    #[schema(required)]
    usage: Option<ResponseUsage>,
    #[schema(value_type = Object)]
    pellucid: Value,
}

/// A page of input items.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct InputItems {
    /// `list`.
    object: String,
    #[schema(value_type = Vec<Object>)]
    data: Vec<Value>,
    #[schema(required)]
    first_id: Option<String>,
    #[schema(required)]
    last_id: Option<String>,
    has_more: bool,
}

/// The reply to a deletion.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct DeletedResponse {
    id: String,
    /// `response`.
    object: &'static str,
    deleted: bool,
}

/// The reply of `/v1/responses/input_tokens`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct InputTokens {
    /// `response.input_tokens`.
    object: &'static str,
    input_tokens: usize,
}

/// Generate a response
///
/// With `stream` the response comes as server-sent events.
#[utoipa::path(post, path = "/v1/responses", tag = "OpenAI", request_body = CreateResponseRequest, responses(
    (status = 200, description = "The response, whole or as a stream",
     content((ResponseObject = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn create(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read = move |value, model: &TextLease| {
        let reader = Reader { model, store: &shared.responses, tenant: &tenant };
        // The memory of stored items is held until the prompt is encoded.
        let ResponseRequest { chat, paths, repeated, memory: _held } = reader.read(value)?;
        let spec = chat.spec(model, &shared.limits, &tenant).map_err(|error| paths.translate(error))?;
        Ok((spec, repeated, paths))
    };
    let (body, permit) = receive_body(&app, &caller, request, true).await?;
    // A short body may name a long text that is stored. Without one, a thread would only cost time.
    let ((spec, repeated, paths), admission) = match app.responses.is_empty(&caller.tenant) {
        true => body.parse(permit, ModelChoice::of(&app), read).await?,
        false => body.parse_blocking(permit, ModelChoice::of(&app), read).await?,
    };
    let form = ResponseForm::new((&app, &admission.model), &caller, repeated, &spec);
    let form = form.inspect_err(|error| admission.permit.refuse(error))?;
    respond(app, caller, admission, spec, Box::new(form)).await.map_err(|error| paths.translate(error))
}

/// Count the tokens of a prompt
#[utoipa::path(post, path = "/v1/responses/input_tokens", tag = "OpenAI", request_body = InputTokensRequest, responses(
    (status = 200, body = InputTokens), Refusals, BodyRefusals))]
pub(crate) async fn input_tokens(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read = move |value, model: &TextLease| {
        let reader = Reader { model, store: &shared.responses, tenant: &tenant };
        let (chat, paths, _held) = reader.read_count(value)?;
        let spec = chat.spec(model, &shared.limits, &tenant).map_err(|error| paths.translate(error))?;
        Ok(spec.num_prompt_tokens())
    };
    let (body, permit) = receive_body(&app, &caller, request, false).await?;
    let (input_tokens, _admission) = body.parse_blocking(permit, ModelChoice::of(&app), read).await?;
    Ok(json_response(json!(InputTokens { object: "response.input_tokens", input_tokens }).to_string()))
}

/// Show a stored response
#[utoipa::path(get, path = "/v1/responses/{id}", tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id")), responses(
    (status = 200, body = ResponseObject), (status = 404, description = "No such response", body = ErrorBody), Refusals))]
pub(crate) async fn retrieve(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let mut query = Query::read(request.uri().query())?;
    query.refuse("include", &[], "responses are stored without what it names")?;
    query.refuse("stream", &["false"], "a stored response is sent whole")?;
    query.refuse("starting_after", &[], "a stored response is sent whole")?;
    query.refuse("include_obfuscation", &["false", "true"], "expected a boolean")?;
    query.finish()?;
    let response = find(&app, &caller, id)?;
    let mut parts = JsonParts::default();
    parts.raw(Shown(response.clone(), StoredResponse::before), 0);
    let output = response.clone();
    parts.list(0..response.num_output(), move |index, out| out.push(output.output(index)));
    parts.raw(Shown(response, StoredResponse::after), 0);
    send(&app, &caller, parts)
}

/// Delete a stored response
#[utoipa::path(delete, path = "/v1/responses/{id}", tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id")), responses(
    (status = 200, body = DeletedResponse), (status = 404, description = "No such response", body = ErrorBody),
    Refusals))]
pub(crate) async fn delete(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Result<Response<Body>, ApiError> {
    let _permit = caller.admit(&app, false)?;
    let id = id_of(id)?;
    if !app.responses.remove(&caller.tenant, &id) {
        return Err(not_found(&id));
    }
    Ok(json_response(json!(DeletedResponse { id, object: "response", deleted: true }).to_string()))
}

/// List the items that a response was generated from
///
/// Items of the responses before it come first, then those of its own input.
#[utoipa::path(get, path = "/v1/responses/{id}/input_items", tag = "OpenAI", params(
    ("id" = String, Path, description = "The response's id"),
    ("limit" = Option<u32>, Query, description = "Maximum items: 1 to 100, 20 by default", minimum = 1, maximum = 100),
    ("order" = Option<String>, Query, description = "`asc`, or `desc`, the default"),
    ("after" = Option<String>, Query, description = "The item after which the page begins")), responses(
    (status = 200, body = InputItems), (status = 404, description = "No such response", body = ErrorBody), Refusals))]
pub(crate) async fn input_items(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let mut query = Query::read(request.uri().query())?;
    query.refuse("include", &[], "responses are stored without what it names")?;
    let page = Page::read(&mut query)?;
    query.finish()?;
    let response = find(&app, &caller, id)?;
    let ids: Vec<&str> = response.input().map(|item| item.id.as_str()).collect();
    let (shown, has_more) = page.of(&ids)?;
    let name = |at: Option<&usize>| json!(at.map(|&at| ids[at]));
    let (first, last) = (name(shown.first()), name(shown.last()));
    let mut parts = JsonParts::default();
    parts.literal("{\"object\":\"list\",\"data\":[");
    let items = response.clone();
    parts.list(shown.into_iter(), move |at, out| match items.input().nth(at) {
        Some(item) => out.push(&item.json),
        None => Ok(()),
    });
    parts.literal(&format!("],\"first_id\":{first},\"last_id\":{last},\"has_more\":{has_more}}}"));
    send(&app, &caller, parts)
}

/// Cancel a response
///
/// Only background responses can be cancelled, and this server has none: closing the connection ends a response.
#[utoipa::path(post, path = "/v1/responses/{id}/cancel", tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id")), responses(
    (status = 200, description = "Never: there are no background responses", body = ResponseObject),
    (status = 404, description = "No such response", body = ErrorBody), Refusals))]
pub(crate) async fn cancel(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Result<Response<Body>, ApiError> {
    let _permit = caller.admit(&app, false)?;
    find(&app, &caller, id)?;
    let message = "only responses with background: true can be cancelled; this one is complete";
    Err(ApiError::invalid(message).code("not_cancellable"))
}

/// A text of a stored response.
struct Shown(Arc<StoredResponse>, fn(&StoredResponse) -> &str);

impl AsRef<str> for Shown {
    fn as_ref(&self) -> &str {
        (self.1)(&self.0)
    }
}

fn id_of(id: Id) -> Result<String, ApiError> {
    let invalid =
        |_| ApiError::invalid("the path is not valid: percent-encoded bytes must be UTF-8").code("invalid_path");
    id.map(|Path(id)| id).map_err(invalid)
}

/// Returns a stored response of the caller.
fn find(app: &App, caller: &Caller, id: Id) -> Result<Arc<StoredResponse>, ApiError> {
    let id = id_of(id)?;
    app.responses.get(&caller.tenant, &id).ok_or_else(|| not_found(&id))
}

fn not_found(id: &str) -> ApiError {
    let message = format!("no response {} is stored", shown(id));
    ApiError::refused(StatusCode::NOT_FOUND, "response_not_found", message).param("id")
}

/// Sends JSON that is written in pieces, as one of the tenant's requests.
fn send(app: &SharedApp, caller: &Caller, parts: JsonParts) -> Result<Response<Body>, ApiError> {
    let mut permit = caller.admit(app, false)?;
    permit.keep(HeldMemory::none(&app.client_memory, &caller.tenant));
    permit.hold(PIECES_IN_FLIGHT).inspect_err(|error| permit.refuse(error))?;
    parts::response(parts, (permit, app.drain.start_request()))
}
