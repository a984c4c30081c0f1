//! From a checked request to an HTTP response: let in, submitted, and answered whole or as a stream.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use pellucid_generate::{Delta, Generation, GenerationEvent};

use crate::account::Account;
use crate::caller::Caller;
use crate::drain::Phase;
use crate::error::ApiError;
use crate::metrics::Outcome;
use crate::reply::{Reply, Spec};
use crate::sse::SseBody;
use crate::state::{App, SharedApp};
use crate::tenants::Permit;
use crate::wire::{ChunkWriter, Envelope};

/// Charges a request that was read and submits it: the last refusals happen here, before a byte of a reply is sent.
pub(crate) fn begin(
    app: &SharedApp,
    caller: &Caller,
    permit: Permit,
    spec: Spec,
) -> Result<(Reply, Envelope), ApiError> {
    let reports = spec.logprobs.is_some() || spec.prompts.iter().any(|prompt| prompt.request.trace);
    if let Err(error) = permit.charge_prompt(spec.num_prompt_tokens(), reports) {
        app.metrics.count(&caller.tenant.config.name, Outcome::Limited);
        permit.refuse(&error);
        return Err(error);
    }
    let mut account = Account::open(app, permit, &caller.request_id, &spec);
    let envelope = Envelope::new(spec.dialect, spec.logprobs, &app.model);
    let (request, sampling) = spec.into_generation();
    match Generation::submit(&app.model, request) {
        Ok(generation) => Ok((Reply { generation, sampling, account }, envelope)),
        Err(error) => {
            let error = ApiError::from(error);
            let outcome = match error.status {
                StatusCode::TOO_MANY_REQUESTS => Some(Outcome::Limited),
                // The request was wrong, which is no failure of ours.
                StatusCode::BAD_REQUEST => None,
                _ => Some(Outcome::Failed),
            };
            account.refuse(&error, outcome);
            Err(error)
        }
    }
}

/// What a client hears when the server is made to leave at once.
pub(crate) fn cut_short() -> ApiError {
    ApiError::unavailable("shutting_down", "the server was told to end at once, before this reply was complete", 30)
}

pub(crate) async fn respond(
    app: SharedApp,
    caller: Caller,
    permit: Permit,
    spec: Spec,
) -> Result<Response<Body>, ApiError> {
    if let Some(user) = &spec.user {
        // A hash under the process's own secret: enough to count by, useless to anybody else.
        tracing::debug!(request_id = caller.request_id, user = app.tenants.pseudonym(user), "end user");
    }
    let streaming = spec.streaming;
    let (reply, envelope) = begin(&app, &caller, permit, spec)?;
    match streaming {
        Some(streaming) => {
            let body = SseBody::new(reply, ChunkWriter::new(envelope, streaming), &app);
            let mut response = Response::new(Body::new(body));
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            // Proxies that collect replies before they pass them on would undo the stream.
            headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
            Ok(response)
        }
        None => whole(&app, reply, envelope).await.map(json),
    }
}

/// A response of JSON.
pub(crate) fn json(text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn whole(app: &App, mut reply: Reply, envelope: Envelope) -> Result<String, ApiError> {
    let mut choices: Vec<Delta> = (0..reply.generation.num_choices()).map(Delta::new).collect();
    let mut ending = std::pin::pin!(app.drain.reached(Phase::Ending));
    loop {
        let event = tokio::select! {
            biased;
            event = reply.next_event() => event,
            () = &mut ending => {
                reply.fail();
                return Err(cut_short());
            }
        };
        match event.transpose()? {
            Some(GenerationEvent::Delta(delta)) => choices[delta.choice].append(delta),
            Some(_) => {}
            None => break,
        }
    }
    let summary = reply.close();
    Ok(envelope.whole(choices, &reply.sampling, &summary))
}
