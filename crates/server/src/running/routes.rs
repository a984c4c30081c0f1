//! Handlers of `/requests`: the list of running requests, and the end of one.

use axum::Extension;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, State};
use axum::http::{Response, StatusCode};
use serde::Serialize;
use utoipa::ToSchema;

use super::RunningRequest;
use crate::http::caller::Caller;
use crate::http::error::{ApiError, ErrorBody};
use crate::http::fields::shown;
use crate::http::routes::Refusals;
use crate::reply::respond::json;
use crate::state::SharedApp;

/// Maximum requests in the list.
const MAX_LISTED: usize = 1000;

/// The requests that are being generated.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RunningRequestList {
    /// `list`.
    object: &'static str,
    /// The oldest requests, oldest first; at most 1000.
    data: Vec<RunningRequest>,
    /// Number of all requests that are being generated.
    total: usize,
    /// Whether the key may cancel requests.
    may_cancel: bool,
}

/// List the requests that are being generated
///
/// For keys with the right to metrics: it covers all tenants. It holds no text of any request. Requests for vectors,
/// and those that wait until their model is loaded, are not listed.
#[utoipa::path(get, path = "/requests", tag = "Operations", responses(
    (status = 200, body = RunningRequestList), Refusals))]
pub(crate) async fn list(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
) -> Result<Response<Body>, ApiError> {
    let tenants = app.tenants.current();
    tenants.check_metrics(&caller.tenant)?;
    let (total, data) = app.running.oldest(MAX_LISTED);
    let may_cancel = tenants.check_manage_requests(&caller.tenant).is_ok();
    let list = RunningRequestList { object: "list", data, total, may_cancel };
    Ok(json(serde_json::to_string(&list).unwrap_or_default()))
}

/// Cancel a request
///
/// Its client gets the error `cancelled_by_operator` (403), in the stream if that has begun. Its memory is free before
/// the next step, also if the client reads nothing. Needs the right `manage_requests` where keys are used.
// Browsers ask a server before they send DELETE from a page of another origin, which they do not for POST.
#[utoipa::path(delete, path = "/requests/{id}", tag = "Operations",
    params(("id" = String, Path, description = "`id` of an entry of `/requests`")), responses(
    (status = 200, body = RunningRequest), (status = 404, description = "No such request runs", body = ErrorBody),
    Refusals))]
pub(crate) async fn cancel(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Response<Body>, ApiError> {
    app.tenants.current().check_manage_requests(&caller.tenant)?;
    let Path(id) = id.map_err(|_| ApiError::invalid("the path is not valid UTF-8").code("invalid_path"))?;
    let cancelled = app.running.cancel(&id).ok_or_else(|| {
        let message = format!("no request {} is being generated; it may have ended", shown(&id));
        ApiError::refused(StatusCode::NOT_FOUND, "request_not_found", message)
    })?;
    Ok(json(serde_json::to_string(&cancelled).unwrap_or_default()))
}
