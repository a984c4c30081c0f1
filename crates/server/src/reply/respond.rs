//! From a checked request to an HTTP response: charged, submitted, and answered whole or as a stream.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use pellucid_generate::{Delta, Generation, GenerationEvent, LoadedModel};

use crate::http::body::Admission;
use crate::http::caller::Caller;
use crate::http::drain::Phase;
use crate::http::error::ApiError;
use crate::http::long_text::with_capacity;
use crate::limits::account::Account;
use crate::metrics::Outcome;
use crate::openai::whole_reply::delta_bytes;
use crate::reply::form::ReplyForm;
use crate::reply::parts::{self, PIECES_IN_FLIGHT};
use crate::reply::stream::StreamBody;
use crate::reply::{Reply, Spec, guard};
use crate::state::{App, SharedApp};

/// Charges a request and submits it. All refusals happen here or earlier, before a byte of the reply is sent.
pub(crate) fn submit(
    app: &SharedApp,
    caller: &Caller,
    admission: Admission<LoadedModel>,
    spec: Spec,
) -> Result<Reply, ApiError> {
    let Admission { mut permit, model } = admission;
    let requests = || spec.prompts.iter().map(|prompt| &prompt.request);
    let num_probes = requests().filter(|request| request.probe.is_some()).count();
    let reports = spec.logprobs.is_some() || num_probes > 0 || requests().any(|request| request.trace);
    let charged = permit
        .hold(spec.held_bytes())
        .and_then(|()| permit.charge_prompt(spec.num_prompt_tokens(), reports, num_probes));
    if let Err(error) = charged {
        app.metrics.count(&caller.tenant.config.name, Some(model.index()), Outcome::Limited);
        permit.refuse(&error);
        return Err(error);
    }
    let mut account = Account::open(app, permit, model.index(), caller, &spec);
    let num_prompt_tokens = spec.num_prompt_tokens();
    let (request, sampling) = spec.into_generation();
    match Generation::submit(&model, request) {
        Ok(generation) => {
            let names = (caller.tenant.config.name.as_str(), model.id.as_str());
            let listed = app.running.add(&caller.request_id, names, num_prompt_tokens, generation.monitor());
            Ok(Reply { generation, sampling, account, model, listed })
        }
        Err(error) => {
            let error = ApiError::from(error);
            let outcome = match error.status {
                StatusCode::TOO_MANY_REQUESTS => Some(Outcome::Limited),
                // The request was wrong, which does not count as a failure of the server.
                StatusCode::BAD_REQUEST => None,
                _ => Some(Outcome::Failed),
            };
            account.refuse(&error, outcome);
            Err(error)
        }
    }
}

/// The error of replies that a second shutdown signal ends.
pub(crate) fn shutting_down() -> ApiError {
    ApiError::unavailable("shutting_down", "the server was stopped before this reply was complete", 30)
}

/// Answers a checked request in the given form, whole or as a stream.
pub(crate) async fn respond(
    app: SharedApp,
    caller: Caller,
    admission: Admission<LoadedModel>,
    spec: Spec,
    form: Box<dyn ReplyForm>,
) -> Result<Response<Body>, ApiError> {
    let streaming = spec.streaming;
    let reply = begin(&app, &caller, admission, spec).await?;
    match streaming {
        Some(streaming) => {
            let writer = form.stream(streaming);
            let content_type = writer.content_type();
            Ok(streamed(Body::new(StreamBody::new(reply, writer, &app)), content_type))
        }
        None => whole(&app, reply, &*form).await,
    }
}

/// Submits a checked request if no guard blocks its prompt.
pub(crate) async fn begin(
    app: &SharedApp,
    caller: &Caller,
    admission: Admission<LoadedModel>,
    spec: Spec,
) -> Result<Reply, ApiError> {
    if let Some(user) = &spec.user {
        // A hash keyed with a secret of the process: it tells users apart without naming them.
        tracing::debug!(request_id = caller.request_id, user = app.tenants.current().pseudonym(user), "end user");
    }
    if !spec.not_enforced.is_empty() {
        // Names of a client's schema may have any characters, so they are escaped.
        let parts = &spec.not_enforced;
        tracing::info!(request_id = caller.request_id, ?parts, "schemas of tools are not enforced in these parts");
    }
    let spec = guard::judge(caller, &admission, spec).await?;
    submit(app, caller, admission, spec)
}

/// Returns a response whose body is sent while it is generated.
pub(crate) fn streamed(body: Body, content_type: &'static str) -> Response<Body> {
    let mut response = Response::new(body);
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(content_type));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Tells proxies not to buffer the response, which would undo the streaming.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// Returns a JSON response.
pub(crate) fn json(text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

/// Waits for the whole reply and returns its JSON. The response owns the account until it is written.
async fn whole(app: &App, mut reply: Reply, form: &dyn ReplyForm) -> Result<Response<Body>, ApiError> {
    let mut held = 0;
    let num_choices = reply.generation.num_choices();
    let mut choices: Vec<Delta> = with_capacity(num_choices).inspect_err(|_| reply.fail())?;
    choices.extend((0..num_choices).map(Delta::new));
    let mut stopping = std::pin::pin!(app.drain.reached(Phase::Stopping));
    loop {
        let event = tokio::select! {
            biased;
            event = reply.next_event() => event,
            () = &mut stopping => {
                reply.fail();
                return Err(shutting_down());
            }
        };
        match event.transpose()? {
            Some(GenerationEvent::Delta(delta)) => {
                held += delta_bytes(&delta);
                reply.hold_at_least(PIECES_IN_FLIGHT + held)?;
                choices[delta.choice].append(delta).map_err(|error| reply.fail_with(error))?;
            }
            Some(_) => {}
            None => break,
        }
    }
    let summary = reply.close();
    let Reply { generation, sampling, account, model, listed } = reply;
    drop((generation, model, listed));
    parts::response(form.whole(choices, &sampling, &summary), account)
}
