//! From a checked request to an HTTP response: let in, submitted, and answered whole or as a stream.

use axum::body::Body;
use axum::http::{HeaderValue, Response, StatusCode, header};
use pellucid_engine::Event;
use pellucid_tokenizer::Tokenizer;

use crate::account::Account;
use crate::caller::Caller;
use crate::choice::{Delta, Ending};
use crate::drain::Phase;
use crate::error::ApiError;
use crate::generation::Generation;
use crate::metrics::Outcome;
use crate::reply::{Reply, Spec, Summary};
use crate::sse::SseBody;
use crate::state::{App, SharedApp};
use crate::tenants::Permit;
use crate::wire::{ChunkWriter, Envelope};

/// A reply under way. Dropping it cancels it.
#[derive(Debug)]
pub(crate) struct Underway {
    pub(crate) reply: Reply,
    pub(crate) generation: Generation,
    pub(crate) account: Account,
}

impl Underway {
    /// Takes the next event and gives the pieces that it lets be shown. `None` says that the engine has gone.
    pub(crate) fn take(
        &mut self,
        event: Option<(usize, Event)>,
        tokenizer: &Tokenizer,
    ) -> Result<Vec<Delta>, ApiError> {
        let taken = match event {
            Some((part, event)) => self.reply.take(part, event, &self.generation, tokenizer),
            None => Err(pellucid_engine::Error::Stopped.into()),
        };
        self.account.charge(&self.reply);
        taken.inspect_err(|_| self.fail())
    }

    /// The end of a reply that is over.
    pub(crate) fn close(&mut self) -> Summary {
        let summary = self.reply.summary();
        let is_late = summary.endings.iter().any(|ending| matches!(ending, Some(Ending::Deadline)));
        self.account.close(if is_late { Outcome::TimedOut } else { Outcome::Completed }, &summary);
        summary
    }

    /// The end of one that is not.
    pub(crate) fn fail(&mut self) {
        self.account.close(Outcome::Failed, &self.reply.summary());
    }
}

/// Charges a request that was read and submits it: the last refusals happen here, before a byte of a reply is sent.
pub(crate) fn begin(
    app: &SharedApp,
    caller: &Caller,
    permit: Permit,
    spec: Spec,
) -> Result<(Underway, Envelope), ApiError> {
    let reports = spec.logprobs.is_some() || spec.prompts.iter().any(|prompt| prompt.request.trace);
    if let Err(error) = permit.charge_prompt(spec.num_prompt_tokens(), reports) {
        app.metrics.count(&caller.tenant.config.name, Outcome::Limited);
        permit.refuse(&error);
        return Err(error);
    }
    let mut account = Account::open(app, permit, &caller.request_id, &spec);
    let envelope = Envelope::new(spec.dialect, spec.logprobs, &app.model);
    let (reply, requests) = Reply::new(spec, &app.model.tokenizer);
    match Generation::submit(&app.model.engine, requests) {
        Ok(generation) => Ok((Underway { reply, generation, account }, envelope)),
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
    let (underway, envelope) = begin(&app, &caller, permit, spec)?;
    match streaming {
        Some(streaming) => {
            let body = SseBody::new(underway, ChunkWriter::new(envelope, streaming), &app);
            let mut response = Response::new(Body::new(body));
            let headers = response.headers_mut();
            headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
            headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
            // Proxies that collect replies before they pass them on would undo the stream.
            headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
            Ok(response)
        }
        None => whole(&app, underway, envelope).await.map(json),
    }
}

/// A response of JSON.
pub(crate) fn json(text: String) -> Response<Body> {
    let mut response = Response::new(Body::from(text));
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

async fn whole(app: &App, mut underway: Underway, envelope: Envelope) -> Result<String, ApiError> {
    let tokenizer = &app.model.tokenizer;
    let mut deltas = underway.reply.opening(tokenizer);
    let mut ending = std::pin::pin!(app.drain.reached(Phase::Ending));
    while !underway.reply.is_over() {
        let event = tokio::select! {
            biased;
            event = underway.generation.next() => event,
            () = &mut ending => {
                underway.fail();
                return Err(cut_short());
            }
        };
        deltas.extend(underway.take(event, tokenizer)?);
    }
    let summary = underway.close();
    Ok(envelope.whole(deltas, &underway.reply, &summary))
}
