//! Handlers of Ollama's routes.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response};
use pellucid_generate::{LoadedEmbedder, LoadedModel};
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::models::{self, API_VERSION};
use super::options;
use super::reply::{ReplyLines, Route, now};
use super::request::{self, Task};
use super::schemas::{OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest};
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::json::Json;
use crate::http::routes::{BodyRefusals, Refusals, read_body, receive_body};
use crate::limits::tenants::Tenant;
use crate::models::lease::TextLease;
use crate::models::{KeepAlive, Purpose};
use crate::reply::respond::{json as json_response, respond};
use crate::state::{App, SharedApp};

/// A reply of Ollama's API.
#[derive(Debug, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct OllamaReply {
    model: String,
    created_at: String,
    done: bool,
}

/// A list of models.
#[derive(Debug, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct OllamaModels {
    #[schema(value_type = Vec<Object>)]
    models: Vec<Value>,
}

/// Generate a reply to a conversation
///
/// Streams lines of JSON unless `stream` is false.
#[utoipa::path(post, path = "/api/chat", tag = "Ollama", request_body = OllamaChatRequest, responses(
    (status = 200, description = "The reply, as lines of JSON or whole",
     content((OllamaReply = "application/json"), (String = "application/x-ndjson"))),
    Refusals, BodyRefusals))]
pub(crate) async fn chat(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read = |value, model: &TextLease, app: &App, tenant: &Tenant| request::chat(value, model, &app.limits, tenant);
    answer(app, caller, request, Route::Chat, read).await
}

/// Continue a text, or answer one prompt
///
/// Streams lines of JSON unless `stream` is false.
#[utoipa::path(post, path = "/api/generate", tag = "Ollama", request_body = OllamaGenerateRequest, responses(
    (status = 200, description = "The reply, as lines of JSON or whole",
     content((OllamaReply = "application/json"), (String = "application/x-ndjson"))),
    Refusals, BodyRefusals))]
pub(crate) async fn generate(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let read =
        |value, model: &TextLease, app: &App, tenant: &Tenant| request::generate(value, model, &app.limits, tenant);
    answer(app, caller, request, Route::Generate, read).await
}

/// List the models
#[utoipa::path(get, path = "/api/tags", tag = "Ollama", responses((status = 200, body = OllamaModels), Refusals))]
pub(crate) async fn tags(State(app): State<SharedApp>, Extension(caller): Extension<Caller>) -> Response<Body> {
    json_response(models::tags(&app.models, &caller.tenant).to_string())
}

/// List the models that are loaded
#[utoipa::path(get, path = "/api/ps", tag = "Ollama", responses((status = 200, body = OllamaModels), Refusals))]
pub(crate) async fn ps(State(app): State<SharedApp>, Extension(caller): Extension<Caller>) -> Response<Body> {
    let is_on_gpu = app.device.contains("CUDA") || app.device.contains("NVIDIA");
    json_response(models::running(&app.models, &caller.tenant, is_on_gpu).to_string())
}

/// Describe a model
#[utoipa::path(post, path = "/api/show", tag = "Ollama", request_body = OllamaShowRequest, responses(
    (status = 200, description = "Template, details and capabilities"), Refusals, BodyRefusals))]
pub(crate) async fn show(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (body, _permit) = receive_body(&app, &caller, request, false).await?;
    let name = body.parse_apart(caller.tenant.clone(), models::read_show).await?;
    let index = app.models.find_or_refuse(&name, &caller.tenant)?;
    let (entry, tenant, timeout) = (&app.models.entries()[index], caller.tenant.id, app.limits.request_timeout);
    let shown = match entry.purpose {
        Purpose::Text => models::show_text(&*app.models.acquire::<LoadedModel>(index, tenant, timeout).await?),
        Purpose::Vectors => {
            models::show_vectors(&*app.models.acquire::<LoadedEmbedder>(index, tenant, timeout).await?, &entry.details)
        }
    };
    Ok(json_response(shown.to_string()))
}

/// Tell the version of Ollama whose API this is
#[utoipa::path(get, path = "/api/version", tag = "Ollama", responses(
    (status = 200, description = "`version`"), Refusals))]
pub(crate) async fn version() -> Response<Body> {
    json_response(json!({ "version": API_VERSION, "pellucid": env!("CARGO_PKG_VERSION") }).to_string())
}

/// Answers a request that `read` reads.
async fn answer(
    app: SharedApp,
    caller: Caller,
    request: Request<Body>,
    route: Route,
    read: impl FnOnce(Json, &TextLease, &App, &Tenant) -> Result<Task, ApiError> + Send + 'static,
) -> Result<Response<Body>, ApiError> {
    let (shared, tenant) = (app.clone(), caller.tenant.clone());
    let work = move |value, model: &TextLease| read(value, model, &shared, &tenant);
    let (task, admission) = read_body(&app, &caller, request, true, work).await?;
    match task {
        Task::Reply(spec) => {
            let form = ReplyLines::new(route, &admission.model);
            respond(app, caller, admission, *spec, Box::new(form)).await
        }
        Task::Load { keep_alive } => {
            options::check_unload(keep_alive, &admission.model)?;
            let reason = if keep_alive == Some(KeepAlive::UNLOAD) { "unload" } else { "load" };
            let text = match route {
                Route::Chat => json!({ "message": { "role": "assistant", "content": "" } }),
                Route::Generate => json!({ "response": "" }),
            };
            let id = &admission.model.id;
            let mut reply = json!({ "model": id, "created_at": now(), "done": true, "done_reason": reason });
            if let (Value::Object(reply), Value::Object(text)) = (&mut reply, text) {
                reply.extend(text);
            }
            Ok(json_response(reply.to_string()))
        }
    }
}
