//! Handlers of `/models/load` and `/models/unload`, which llama.cpp has too.

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::{Request, Response, StatusCode};
use pellucid_generate::{LoadedEmbedder, LoadedModel};
use utoipa::ToSchema;

use super::Purpose;
use crate::http::body::ReadBody;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::fields::{self, Fields};
use crate::http::routes::{BodyRefusals, Refusals, receive_body};
use crate::openai::models::ModelCard;
use crate::reply::respond::json;
use crate::state::SharedApp;

const MAX_WORD_LEN: usize = 512;

/// Names a model.
#[derive(Debug, ToSchema)]
#[allow(dead_code)] // For the document.
pub(crate) struct ModelRequest {
    /// A name of the model, as `/v1/models` lists it.
    #[schema(max_length = 512)]
    model: String,
}

/// Load a model
///
/// Answers when the model is loaded. Needs the right `manage_models` where keys are used.
#[utoipa::path(post, path = "/models/load", tag = "Operations", request_body = ModelRequest, responses(
    (status = 200, body = ModelCard), Refusals, BodyRefusals))]
pub(crate) async fn load(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (index, name) = read(&app, &caller, request).await?;
    let (tenant, timeout) = (caller.tenant.id, app.limits.request_timeout);
    match app.models.entries()[index].purpose {
        Purpose::Text => drop(app.models.acquire::<LoadedModel>(index, tenant, timeout).await?),
        Purpose::Vectors => drop(app.models.acquire::<LoadedEmbedder>(index, tenant, timeout).await?),
    }
    card(&app, &caller, &name)
}

/// Unload a model
///
/// A model with requests in flight is unloaded when they have ended, and the reply says `ready`. Needs the right
/// `manage_models` where keys are used.
#[utoipa::path(post, path = "/models/unload", tag = "Operations", request_body = ModelRequest, responses(
    (status = 200, body = ModelCard), (status = 409, body = ErrorBody, description = "Loaded as long as the server runs"),
    Refusals, BodyRefusals))]
pub(crate) async fn unload(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (index, name) = read(&app, &caller, request).await?;
    if app.models.entries()[index].is_fixed() {
        let message = format!("the model {name:?} is loaded as long as the server runs");
        return Err(ApiError::refused(StatusCode::CONFLICT, "model_not_on_demand", message).param("model"));
    }
    app.models.unload(index, app.limits.request_timeout).await;
    card(&app, &caller, &name)
}

/// Reads the name of a model, and finds the model.
async fn read(app: &SharedApp, caller: &Caller, request: Request<Body>) -> Result<(usize, String), ApiError> {
    app.tenants.current().check_manage_models(&caller.tenant)?;
    let (body, _permit): (ReadBody, _) = receive_body(app, caller, request, false).await?;
    let name = body.parse_apart(caller.tenant.clone(), |value| {
        let mut fields = Fields::of(value)?;
        let name = fields::string("model", fields.required("model")?, MAX_WORD_LEN)?;
        fields.finish()?;
        Ok(name)
    });
    let name = name.await?;
    Ok((app.models.find_or_refuse(&name, &caller.tenant)?, name))
}

fn card(app: &SharedApp, caller: &Caller, name: &str) -> Result<Response<Body>, ApiError> {
    let name = app.models.entries()[app.models.find_or_refuse(name, &caller.tenant)?].id.as_str();
    let card = ModelCard::find(name, app, &caller.tenant)?;
    Ok(json(serde_json::to_string(&card).unwrap_or_default()))
}
