//! Handlers of `/v1/messages` and `/v1/messages/count_tokens`.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::message::MessageForm;
use super::schemas::{CountTokensRequest, MessagesRequest};
use super::{headers, request};
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::routes::{BodyRefusals, Refusals, read_body};
use crate::models::lease::TextLease;
use crate::reply::respond::{json as json_response, respond};
use crate::state::SharedApp;

/// The reply of `/v1/messages`.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document; replies are written in pieces.
pub(crate) struct Message {
    id: String,
    /// `message`.
    #[serde(rename = "type")]
    kind: String,
    /// `assistant`.
    role: String,
    model: String,
    /// Blocks `thinking`, `text` and `tool_use`.
    #[schema(value_type = Vec<Object>)]
    content: Vec<Value>,
    /// `end_turn`, `max_tokens`, `stop_sequence`, `tool_use`, `refusal` or `model_context_window_exceeded`.
    stop_reason: String,
    #[schema(required)]
    stop_sequence: Option<String>,
    #[schema(value_type = Object)]
    usage: Value,
    #[schema(value_type = Object)]
    pellucid: Value,
}

/// The reply of `/v1/messages/count_tokens`.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct TokenCount {
    input_tokens: usize,
}

/// Generate a message
///
/// With `stream` the reply comes as server-sent events. Needs the header `anthropic-version`.
#[utoipa::path(post, path = "/v1/messages", tag = "Anthropic", request_body = MessagesRequest,
    params(("anthropic-version" = String, Header, description = "`2023-06-01`")), responses(
    (status = 200, description = "The message, whole or as a stream",
     content((Message = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn messages(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    headers::check(request.headers())?;
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read = move |value, model: &TextLease| {
        let (chat, paths) = request::read(value, model)?;
        paths.translate_spec(chat.spec(model, &shared.limits, &tenant))
    };
    let (spec, admission) = read_body(&app, &caller, request, true, read).await?;
    let form = MessageForm::new(&spec, &admission.model, &caller.request_id);
    respond(app, caller, admission, spec, Box::new(form)).await
}

/// Count the tokens of a prompt
#[utoipa::path(post, path = "/v1/messages/count_tokens", tag = "Anthropic", request_body = CountTokensRequest,
    params(("anthropic-version" = String, Header, description = "`2023-06-01`")), responses(
    (status = 200, body = TokenCount), Refusals, BodyRefusals))]
pub(crate) async fn count_tokens(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    headers::check(request.headers())?;
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let read = move |value, model: &TextLease| {
        let (chat, paths) = request::read_count(value, model)?;
        let spec = paths.translate_spec(chat.spec(model, &shared.limits, &tenant))?;
        Ok(spec.num_prompt_tokens())
    };
    let (input_tokens, _admission) = read_body(&app, &caller, request, false, read).await?;
    Ok(json_response(json!(TokenCount { input_tokens }).to_string()))
}
