//! Requests that are being generated, for operators: who waits for what and for how long, and a way to cancel one.
//! Holds counts, times and names of tenants and models; never text of a prompt or a reply.

pub(crate) mod routes;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use pellucid_generate::{Monitor, Phase};
use serde::Serialize;
use utoipa::ToSchema;

use crate::random;

/// All requests of a server that are being generated.
#[derive(Debug, Clone, Default)]
pub(crate) struct RunningRequests(Arc<Mutex<HashMap<String, Entry>>>);

#[derive(Debug)]
struct Entry {
    /// Id of the request in the log. Clients may choose it, so it is not shown.
    request_id: String,
    tenant: String,
    model: String,
    started: Instant,
    prompt_tokens: usize,
    monitor: Monitor,
}

/// A request in the list. Dropping it takes the request out.
#[derive(Debug)]
pub(crate) struct Listed {
    id: String,
    requests: RunningRequests,
}

/// A request that is being generated.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RunningRequest {
    /// Id for `DELETE /requests/{id}`. It is made by the server and says nothing about the request.
    id: String,
    /// Name of the tenant.
    tenant: String,
    /// Name of the model.
    model: String,
    /// Part of the work that is being done. A beam search and `best_of` report tokens at their end and are in `prefill`
    /// until then. A cancelled request is listed until its client has been told.
    state: RequestState,
    /// Milliseconds since the request was submitted.
    age_ms: u64,
    /// Tokens of the prompt.
    prompt_tokens: usize,
    /// Tokens generated so far.
    tokens: usize,
    /// Milliseconds since the last token; null before the first.
    #[schema(required)]
    since_last_token_ms: Option<u64>,
    /// Whether the request waits because its client reads too slowly.
    waits_for_client: bool,
}

/// State of a request that is being generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RequestState {
    Queued,
    Prefill,
    Decode,
    Cancelled,
}

impl RunningRequests {
    /// Adds a request that was submitted now.
    pub(crate) fn add(
        &self,
        request_id: &str,
        (tenant, model): (&str, &str),
        prompt_tokens: usize,
        monitor: Monitor,
    ) -> Listed {
        let (request_id, tenant, model) = (request_id.to_owned(), tenant.to_owned(), model.to_owned());
        let entry = Entry { request_id, tenant, model, started: Instant::now(), prompt_tokens, monitor };
        let id = random::id("run-");
        self.lock().insert(id.clone(), entry);
        Listed { id, requests: self.clone() }
    }

    /// Returns the number of all requests and the `max` oldest of them, oldest first.
    fn oldest(&self, max: usize) -> (usize, Vec<RunningRequest>) {
        let entries = self.lock();
        let mut sorted: Vec<(&String, &Entry)> = entries.iter().collect();
        sorted.sort_unstable_by_key(|(_, entry)| entry.started);
        (sorted.len(), sorted.into_iter().take(max).map(|(id, entry)| entry.shown(id)).collect())
    }

    /// Cancels a request and returns it; `None` if it has ended or never was.
    fn cancel(&self, id: &str) -> Option<RunningRequest> {
        let entries = self.lock();
        let entry = entries.get(id)?;
        entry.monitor.cancel();
        tracing::warn!(request_id = entry.request_id, tenant = entry.tenant, "an operator cancelled the request");
        Some(entry.shown(id))
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Entry>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn shown(&self, id: &str) -> RunningRequest {
        let progress = self.monitor.progress();
        RunningRequest {
            id: id.to_owned(),
            tenant: self.tenant.clone(),
            model: self.model.clone(),
            state: match progress.phase {
                _ if progress.is_cancelled => RequestState::Cancelled,
                Phase::Queued => RequestState::Queued,
                Phase::Prefill => RequestState::Prefill,
                Phase::Decode => RequestState::Decode,
            },
            age_ms: self.started.elapsed().as_millis() as u64,
            prompt_tokens: self.prompt_tokens,
            tokens: progress.num_tokens,
            since_last_token_ms: progress.since_last_token().map(|time| time.as_millis() as u64),
            waits_for_client: progress.waits_for_reader,
        }
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        // The entry is dropped after the lock is free: it may be the last owner of the reply's events.
        let entry = self.requests.lock().remove(&self.id);
        drop(entry);
    }
}
