//! `/api/pull`: downloads a model into the operator's store, with its progress as lines of JSON. Keys need the right to
//! it, because a download takes disk space and opens connections to the hub.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::Extension;
use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::{HeaderValue, Request, Response, StatusCode, header};
use http_body::Frame;
use serde_json::{Value, json};
use tokio::sync::mpsc::{self, Receiver};

use super::schemas::OllamaPullRequest;
use crate::http::caller::Caller;
use crate::http::drain::{InFlight, Phase};
use crate::http::error::{ApiError, ErrorBody, RETRY_SOON_S};
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::http::routes::{BodyRefusals, Refusals, receive_body};
use crate::limits::permit::Permit;
use crate::reply::respond::{json as json_response, shutting_down};
use crate::state::SharedApp;

const MAX_NAME_LEN: usize = 512;
/// Minimum time between two lines about one file.
const LINE_INTERVAL: Duration = Duration::from_millis(100);
/// Lines that wait for the client. More are left out, because a later line says more than an earlier one.
const MAX_WAITING_LINES: usize = 16;

/// Downloads models. The program implements it: this crate knows neither the hub nor the store.
pub trait ModelPuller: fmt::Debug + Send + Sync {
    /// Checks the form of a model's name; an error says what was expected.
    fn check(&self, name: &str) -> Result<(), String>;

    /// Downloads a model and blocks until it is complete. Ends early if `report` returns false.
    fn pull(&self, name: &str, report: PullReport) -> Result<(), String>;
}

/// Takes the progress of a download. Returns false if nobody waits for it any more.
pub type PullReport = Arc<dyn Fn(PullProgress) -> bool + Send + Sync>;

/// Bytes of one file of a download.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PullProgress {
    /// Name of the file.
    pub file: String,
    /// Bytes of the file that are here.
    pub completed: u64,
    /// Bytes of the whole file.
    pub total: u64,
}

/// A line of progress, or the reason why the download failed.
type Line = Result<Value, String>;

/// Download a model into the server's store
///
/// Streams lines of JSON unless `stream` is false. Needs a key with the right `pull`. A server of several
/// models, or of a folder, serves the model from then on.
#[utoipa::path(post, path = "/api/pull", tag = "Ollama", request_body = OllamaPullRequest, responses(
    (status = 200, description = "Lines of progress, of which the last has the status `success`, or that line alone",
     content((Object = "application/json"), (String = "application/x-ndjson"))),
    (status = 502, description = "The download failed", body = ErrorBody), Refusals, BodyRefusals))]
pub(crate) async fn pull(
    State(app): State<SharedApp>,
    Extension(caller): Extension<Caller>,
    request: Request<Body>,
) -> Result<Response<Body>, ApiError> {
    let (body, permit) = receive_body(&app, &caller, request, false).await?;
    if !caller.tenant.config.pull {
        let message = match app.tenants.current().has_keys() {
            true => "this key may not pull models; `pull = true` in the keys file allows it",
            false => "a server without keys pulls no models for clients; a keys file can allow it with `pull = true`",
        };
        return Err(ApiError::refused(StatusCode::FORBIDDEN, "pull_not_allowed", message));
    }
    let PullRequest { name, streams } = body.parse_apart(caller.tenant.clone(), PullRequest::read).await?;
    let Some(puller) = app.puller.clone() else {
        let message = "this server has no store to pull models into";
        return Err(ApiError::refused(StatusCode::NOT_IMPLEMENTED, "not_offered", message));
    };
    puller.check(&name).map_err(|message| ApiError::field("model", format!("model: {message}")))?;
    let Ok(only) = app.pulling.clone().try_lock_owned() else {
        let message = "a model is being pulled already; try again when that has ended";
        return Err(ApiError::unavailable("pull_in_progress", message, RETRY_SOON_S));
    };
    let (sender, mut lines) = mpsc::channel::<Line>(MAX_WAITING_LINES);
    let models = app.models.clone();
    let work = move || {
        let result = puller.pull(&name, report_to(sender.clone()));
        if result.is_ok() {
            models.look_for_models();
        }
        drop(only);
        // Nobody waits if this fails.
        let _ = sender.blocking_send(result.map(|()| json!({ "status": "success" })));
    };
    let thread = std::thread::Builder::new().name("pull".into()).spawn(work);
    thread.map_err(|_| ApiError::unavailable("no_thread", "the system has no thread for a download", RETRY_SOON_S))?;
    let in_flight = app.drain.start_request();
    let mut stopping: Stopping = Box::pin(app.drain.reached(Phase::Stopping));
    if streams {
        return Ok(stream(PullBody { lines: Some(lines), has_begun: false, stopping, _held: (permit, in_flight) }));
    }
    loop {
        let line = tokio::select! {
            line = lines.recv() => line,
            () = &mut stopping => return Err(shutting_down()),
        };
        match line {
            Some(Ok(line)) if line["status"] == "success" => return Ok(json_response(line.to_string())),
            Some(Ok(_)) => {}
            Some(Err(message)) => return Err(ApiError::refused(StatusCode::BAD_GATEWAY, "pull_failed", message)),
            None => return Err(ApiError::internal()),
        }
    }
}

type Stopping = Pin<Box<dyn Future<Output = ()> + Send>>;

/// A request to pull a model.
struct PullRequest {
    name: String,
    streams: bool,
}

impl PullRequest {
    fn read(value: Json) -> Result<PullRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let name = match fields.take("name") {
            Some(name) if !fields.has("model") => name,
            Some(_) => return Err(ApiError::field("name", "name is the older form of model: give one of them")),
            None => fields.required("model")?,
        };
        let name = fields::string("model", name, MAX_NAME_LEN)?;
        let streams = fields.boolean("stream")?.unwrap_or(true);
        let is_false = |value: &Json| *value == Json::Bool(false);
        fields.refuse("insecure", is_false, "the operator chooses the hub and how to reach it")?;
        fields.finish()?;
        // Ollama's clients name the newest version of a model so.
        let name = name.strip_suffix(":latest").map_or(name.clone(), str::to_owned);
        Ok(PullRequest { name, streams })
    }
}

/// Returns a report that sends lines, at most one in [`LINE_INTERVAL`] about a file that is not complete.
fn report_to(sender: mpsc::Sender<Line>) -> PullReport {
    let last = std::sync::Mutex::new(None::<Instant>);
    Arc::new(move |progress: PullProgress| {
        let mut last = last.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        let is_soon = last.is_some_and(|last| last.elapsed() < LINE_INTERVAL);
        if is_soon && progress.completed < progress.total {
            return !sender.is_closed();
        }
        *last = Some(Instant::now());
        let PullProgress { file, completed, total } = progress;
        let line = json!({ "status": format!("pulling {file}"), "digest": file, "total": total,
            "completed": completed });
        !matches!(sender.try_send(Ok(line)), Err(mpsc::error::TrySendError::Closed(_)))
    })
}

fn stream(body: PullBody) -> Response<Body> {
    let mut response = Response::new(Body::new(body));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

/// The lines of a download. Dropping it, because the client has disconnected, ends the download.
struct PullBody {
    /// `None` after the last line.
    lines: Option<Receiver<Line>>,
    has_begun: bool,
    stopping: Stopping,
    _held: (Permit, InFlight),
}

impl http_body::Body for PullBody {
    type Data = Bytes;
    type Error = std::convert::Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        let Some(lines) = &mut this.lines else { return Poll::Ready(None) };
        let line = if !this.has_begun {
            this.has_begun = true;
            Ok(json!({ "status": "pulling manifest" }))
        } else {
            match lines.poll_recv(context) {
                Poll::Ready(line) => line.unwrap_or_else(|| Err("the download ended without a result".into())),
                Poll::Pending if this.stopping.as_mut().poll(context).is_ready() => Err(shutting_down().detail.message),
                Poll::Pending => return Poll::Pending,
            }
        };
        let line = line.unwrap_or_else(|message| json!({ "error": message }));
        if line.get("error").is_some() || line["status"] == "success" {
            this.lines = None;
        }
        Poll::Ready(Some(Ok(Frame::data(format!("{line}\n").into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.lines.is_none()
    }
}
