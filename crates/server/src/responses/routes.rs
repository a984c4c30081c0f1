//! Handlers of `/v1/responses` and the routes below it.

use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{Request, Response, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::background;
use super::query::{Page, Query};
use super::request::{Reader, ResponseRequest};
use super::response::{ResponseForm, ResponseUsage};
use super::schemas::{CreateResponseRequest, InputTokensRequest};
use super::store::Found;
use crate::http::body::ModelChoice;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::fields::shown;
use crate::http::routes::{BodyRefusals, Refusals, receive_body};
use crate::limits::client_memory::HeldMemory;
use crate::limits::permit::Permit;
use crate::models::lease::TextLease;
use crate::reply::form::EVENT_STREAM;
use crate::reply::parts::{self, JsonParts, PIECES_IN_FLIGHT};
use crate::reply::respond::{begin, json as json_response, respond, streamed};
use crate::state::{App, SharedApp};

/// Maximum time that a cancelled response may take to end: a step of the engine.
const CANCEL_TIMEOUT: Duration = Duration::from_secs(10);

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
    /// `completed`, or `incomplete` if the reply ended for lack of tokens or time. A background response is `queued`
    /// and `in_progress` before, and may be `cancelled` or `failed`.
    status: String,
    /// Whether the response was generated without its client's connection.
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
    /// Seed, parameters and times of a response that is complete.
    #[schema(value_type = Object, required = false)]
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

/// Words of every body that names stored text: a response, or an item by its id.
const STORED_REFERENCES: [&str; 2] = ["previous_response_id", "\"id\""];

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
        let spec = paths.translate_spec(chat.spec(model, &shared.limits, &tenant))?;
        Ok((spec, repeated, paths))
    };
    let (body, permit) = receive_body(&app, &caller, request, true).await?;
    // A short body may name a long text that is stored. Without one, a thread would only cost time.
    let may_be_long = !app.responses.is_empty(&caller.tenant) && body.may_contain(&STORED_REFERENCES);
    let ((spec, repeated, paths), admission) = match may_be_long {
        false => body.parse(permit, ModelChoice::of(&app), read).await?,
        true => body.parse_blocking(permit, ModelChoice::of(&app), read).await?,
    };
    let in_background = repeated.in_background;
    let form = ResponseForm::new((&app, &admission.model), &caller, repeated, &spec);
    let form = form.inspect_err(|error| admission.permit.refuse(error))?;
    if in_background {
        let streaming = spec.streaming;
        let reply = begin(&app, &caller, admission, spec).await.map_err(|error| paths.translate(error))?;
        let running = background::start(reply, form, streaming);
        return match streaming {
            // The task has the account of the request.
            Some(_) => Ok(streamed(running.log.replay(0, ()), EVENT_STREAM)),
            None => parts::response(running.shown(), ()),
        };
    }
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
        let spec = paths.translate_spec(chat.spec(model, &shared.limits, &tenant))?;
        Ok(spec.num_prompt_tokens())
    };
    let (body, permit) = receive_body(&app, &caller, request, false).await?;
    let (input_tokens, _admission) = body.parse_blocking(permit, ModelChoice::of(&app), read).await?;
    Ok(json_response(json!(InputTokens { object: "response.input_tokens", input_tokens }).to_string()))
}

/// Show a stored response
///
/// With `stream=true`, sends the events of a background response, those that are still to come included.
#[utoipa::path(get, path = "/v1/responses/{id}", tag = "OpenAI", params(
    ("id" = String, Path, description = "The response's id"),
    ("stream" = Option<bool>, Query, description = "Send the events of a background response"),
    ("starting_after" = Option<u32>, Query, description = "Number of the event after which the stream begins")),
    responses((status = 200, description = "The response, whole or as a stream",
     content((ResponseObject = "application/json"), (String = "text/event-stream"))), (status = 404, description = "No such response", body = ErrorBody), Refusals))]
pub(crate) async fn retrieve(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let mut query = Query::read(request.uri().query())?;
    query.refuse("include", &[], "responses are stored without what it names")?;
    query.refuse("include_obfuscation", &["false", "true"], "expected a boolean")?;
    let starting_after = query.number("starting_after")?;
    let streams = query.boolean("stream")?;
    query.finish()?;
    if let (false, Some(_)) = (streams, starting_after) {
        let message = "starting_after has no effect without stream=true";
        return Err(ApiError::field("starting_after", message));
    }
    let found = find(&app, &caller, id)?;
    if streams { replay(&app, &caller, &found, starting_after) } else { send(&app, &caller, shown_response(found)) }
}

/// Returns the JSON of a response.
fn shown_response(found: Found) -> JsonParts {
    let response = match found {
        Found::Running(running) => return running.shown(),
        Found::Stored(response) => response,
    };
    let mut parts = JsonParts::default();
    response.write(&mut parts);
    parts
}

/// Sends the events of a background response after the one with the number `starting_after`.
fn replay(
    app: &SharedApp,
    caller: &Caller,
    found: &Found,
    starting_after: Option<usize>,
) -> Result<Response<Body>, ApiError> {
    let log = match found {
        Found::Running(running) => Some(&running.log),
        Found::Stored(response) => response.events(),
    };
    let unsupported = |why: &str| {
        let message = format!("stream is not supported for this response: {why}; GET it without stream");
        ApiError::field("stream", message).code("unsupported_parameter")
    };
    let log = match (log, found) {
        (Some(log), _) => log,
        (None, Found::Stored(response)) if response.is_background() => {
            return Err(unsupported("its events ended with the process that generated it"));
        }
        (None, _) => return Err(unsupported("only events of responses with background: true are kept")),
    };
    if log.is_lost() {
        return Err(unsupported("its events were dropped for lack of memory"));
    }
    let start = match starting_after {
        None => 0,
        Some(number) => log.offset_after(number).ok_or_else(|| {
            let message = format!("starting_after: the response has no event {number} yet");
            ApiError::field("starting_after", message).code("out_of_range")
        })?,
    };
    let permit = permit(app, caller)?;
    Ok(streamed(log.replay(start, (permit, app.drain.start_request())), EVENT_STREAM))
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
    let Found::Stored(response) = find(&app, &caller, id)? else {
        let message = "the response is not complete yet";
        return Err(ApiError::refused(StatusCode::CONFLICT, "response_in_progress", message).param("id"));
    };
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

/// Cancel a background response
///
/// Returns the response with what was generated. A response that has ended stays as it is. Closing the connection ends
/// any other response.
#[utoipa::path(post, path = "/v1/responses/{id}/cancel", tag = "OpenAI",
    params(("id" = String, Path, description = "The response's id")), responses(
    (status = 200, description = "The response, which has ended", body = ResponseObject),
    (status = 404, description = "No such response", body = ErrorBody), Refusals))]
pub(crate) async fn cancel(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Id,
) -> Result<Response<Body>, ApiError> {
    let id = id_of(id)?;
    let find = || app.responses.find(&caller.tenant, &id).ok_or_else(|| not_found(&id));
    match find()? {
        Found::Running(running) => {
            running.cancel();
            running.log.completed(CANCEL_TIMEOUT).await;
        }
        Found::Stored(response) if response.is_background() => {}
        Found::Stored(_) => {
            let message = "only responses with background: true can be cancelled; this one is complete";
            return Err(ApiError::invalid(message).code("not_cancellable"));
        }
    }
    send(&app, &caller, shown_response(find()?))
}

fn id_of(id: Id) -> Result<String, ApiError> {
    let invalid =
        |_| ApiError::invalid("the path is not valid: percent-encoded bytes must be UTF-8").code("invalid_path");
    id.map(|Path(id)| id).map_err(invalid)
}

/// Returns a response of the caller.
fn find(app: &App, caller: &Caller, id: Id) -> Result<Found, ApiError> {
    let id = id_of(id)?;
    app.responses.find(&caller.tenant, &id).ok_or_else(|| not_found(&id))
}

fn not_found(id: &str) -> ApiError {
    let message = format!("no response {} is stored", shown(id));
    ApiError::refused(StatusCode::NOT_FOUND, "response_not_found", message).param("id")
}

/// Sends JSON that is written in pieces, as one of the tenant's requests.
fn send(app: &SharedApp, caller: &Caller, parts: JsonParts) -> Result<Response<Body>, ApiError> {
    let permit = permit(app, caller)?;
    parts::response(parts, (permit, app.drain.start_request()))
}

/// Admits a request that reads stored responses, with memory for the pieces of its reply.
fn permit(app: &SharedApp, caller: &Caller) -> Result<Permit, ApiError> {
    let mut permit = caller.admit(app, false)?;
    permit.keep(HeldMemory::none(&app.client_memory, &caller.tenant));
    permit.hold(PIECES_IN_FLIGHT).inspect_err(|error| permit.refuse(error))?;
    Ok(permit)
}
