//! Handlers of llama.cpp's routes, and of OpenAI's routes without `/v1`.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use serde_json::{Value, json};

use super::reply::ContentForm;
use super::request;
use super::schemas::{ContentRequest, InfillRequest};
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::json::Json;
use crate::http::routes::{self, BodyRefusals, Refusals, read_body};
use crate::limits::tenants::Tenant;
use crate::models::lease::TextLease;
use crate::openai::chat::ChatRequest;
use crate::openai::completions::CompletionRequest;
use crate::openai::sampling::default_parameters;
use crate::reply::Spec;
use crate::reply::respond::{json as json_response, respond};
use crate::state::{App, SharedApp};

/// Continue a text, with llama.cpp's fields
#[utoipa::path(post, path = "/completion", tag = "llama.cpp", request_body = ContentRequest, responses(
    (status = 200, description = "The continuation, whole or as a stream",
     content((Value = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn completion(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read =
        |value, model: &TextLease, app: &App, tenant: &Tenant| request::completion(value, model, &app.limits, tenant);
    answer(app, caller, request, read).await
}

/// Fill the gap between two texts
#[utoipa::path(post, path = "/infill", tag = "llama.cpp", request_body = InfillRequest, responses(
    (status = 200, description = "The text of the gap, whole or as a stream",
     content((Value = "application/json"), (String = "text/event-stream"))),
    Refusals, BodyRefusals))]
pub(crate) async fn infill(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read =
        |value, model: &TextLease, app: &App, tenant: &Tenant| request::infill(value, model, &app.limits, tenant);
    answer(app, caller, request, read).await
}

/// Describe the server and its model
#[utoipa::path(get, path = "/props", tag = "llama.cpp", responses(
    (status = 200, description = "Model, chat template and defaults"), Refusals))]
pub(crate) async fn props(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
) -> Result<Response<Body>, ApiError> {
    let model = app.first_text(&caller.tenant).await?;
    let text = |id: Option<u32>| id.map(|id| model.tokenizer.decode(&[id], false));
    // Clients read plain values here; `/v1/models` has the source of each.
    let mut params = default_parameters(&model);
    for (_, option) in params.as_object_mut().into_iter().flatten() {
        *option = option["value"].take();
    }
    let defaults = json!({ "n_ctx": model.context_len, "params": params });
    let props = json!({
        "default_generation_settings": defaults,
        "total_slots": model.engine.max_sequences(),
        "model_alias": model.id,
        "model_path": model.id,
        "chat_template": model.template.as_ref().map_or("", |template| template.source()),
        "bos_token": text(model.tokenizer.bos()),
        "eos_token": text(model.tokenizer.eos()),
        "modalities": { "vision": false, "audio": false },
        "build_info": format!("pellucid {}", env!("CARGO_PKG_VERSION")),
        "is_sleeping": false,
    });
    Ok(json_response(props.to_string()))
}

/// Show how many requests run
///
/// For keys with the right to metrics. Sequences have no fixed slots here, so a slot is one that could run.
#[utoipa::path(get, path = "/slots", tag = "llama.cpp", responses(
    (status = 200, description = "One object for each sequence that can run"), Refusals))]
pub(crate) async fn slots(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
) -> Result<Response<Body>, ApiError> {
    app.tenants.current().check_metrics(&caller.tenant)?;
    let model = app.first_text(&caller.tenant).await?;
    let num_running = model.engine.last_stats().num_running;
    let slot = |id: usize| json!({ "id": id, "n_ctx": model.context_len, "is_processing": id < num_running });
    let slots: Vec<Value> = (0..model.engine.max_sequences()).map(slot).collect();
    Ok(json_response(Value::from(slots).to_string()))
}

/// `/v1/chat/completions` for clients whose base URL lacks `/v1`
#[utoipa::path(post, path = "/chat/completions", tag = "llama.cpp", request_body = ChatRequest, responses(
    (status = 200, description = "As `/v1/chat/completions`"), Refusals, BodyRefusals))]
pub(crate) async fn chat_alias(
    state: State<SharedApp>,
    caller: Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    routes::chat(state, caller, request).await
}

/// `/v1/completions` for clients whose base URL lacks `/v1`
#[utoipa::path(post, path = "/completions", tag = "llama.cpp", request_body = CompletionRequest, responses(
    (status = 200, description = "As `/v1/completions`"), Refusals, BodyRefusals))]
pub(crate) async fn completions_alias(
    state: State<SharedApp>,
    caller: Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    routes::completions(state, caller, request).await
}

/// `/v1/models` for clients whose base URL lacks `/v1`
#[utoipa::path(get, path = "/models", tag = "llama.cpp", responses(
    (status = 200, description = "As `/v1/models`"), Refusals))]
pub(crate) async fn models_alias(state: State<SharedApp>, caller: Extension<Caller>) -> Response<Body> {
    routes::models(state, caller).await
}

/// Answers a request that `read` reads.
async fn answer(
    app: SharedApp,
    caller: Caller,
    request: Request<Body>,
    read: impl FnOnce(Json, &TextLease, &App, &Tenant) -> Result<Spec, ApiError> + Send + 'static,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let work = move |value, model: &TextLease| read(value, model, &shared, &tenant);
    let (spec, admission) = read_body(&app, &caller, request, true, work).await?;
    let form = ContentForm::new(&admission.model);
    respond(app, caller, admission, spec, Box::new(form)).await
}
