//! The spans of one request, from its first byte to the last of its reply.

use std::borrow::Cow;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use axum::http::HeaderMap;

use super::context::{TraceContext, text};
use super::exporter::SpanExporter;
use super::{Attribute, Kind, Span};
use crate::random;

/// Maximum spans of a request beside its own: a WebSocket may have any number of replies.
const MAX_CHILDREN: usize = 64;

/// Collects the spans of a request, and exports them when its last owner is dropped.
#[derive(Debug)]
pub(crate) struct RequestTrace {
    /// The trace, and the request's span in it or, if it is not recorded, the client's.
    own: TraceContext,
    recorder: Option<Recorder>,
}

/// State of a request that is recorded.
#[derive(Debug)]
struct Recorder {
    exporter: Arc<SpanExporter>,
    parent: Option<[u8; 8]>,
    started: (Instant, SystemTime),
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    name: Cow<'static, str>,
    attributes: Vec<(&'static str, Attribute)>,
    failure: Option<String>,
    children: Vec<Span>,
    num_left_out: u64,
}

impl RequestTrace {
    /// Begins the trace of a request; `None` if there is nothing to record and nothing to pass on. A client that does
    /// not record its trace has no spans recorded here.
    pub(crate) fn begin(exporter: Option<&Arc<SpanExporter>>, headers: &HeaderMap) -> Option<Arc<RequestTrace>> {
        let given = TraceContext::of(headers);
        let exporter = exporter.filter(|_| given.is_none_or(TraceContext::is_sampled));
        let Some(exporter) = exporter else {
            return given.map(|own| Arc::new(RequestTrace { own, recorder: None }));
        };
        let span_id = new_id();
        let own = match given {
            Some(given) => given.with_span(span_id),
            None => TraceContext::new_trace(new_id(), span_id),
        };
        let recorder = Recorder {
            exporter: exporter.clone(),
            parent: given.map(|given| given.span_id),
            started: (Instant::now(), SystemTime::now()),
            state: Mutex::default(),
        };
        Some(Arc::new(RequestTrace { own, recorder: Some(recorder) }))
    }

    /// Returns the id of the trace, for the log.
    pub(crate) fn id(&self) -> String {
        text(&self.own.trace_id)
    }

    /// Returns the header `traceparent` of requests to other services.
    pub(crate) fn header(&self) -> String {
        self.own.header()
    }

    pub(crate) fn set_name(&self, name: String) {
        self.with_state(|state| state.name = name.into());
    }

    pub(crate) fn set(&self, key: &'static str, value: impl Into<Attribute>) {
        let value = value.into();
        self.with_state(|state| match state.attributes.iter_mut().find(|(known, _)| *known == key) {
            Some(known) => known.1 = value,
            None => state.attributes.push((key, value)),
        });
    }

    /// Says why the request failed.
    pub(crate) fn fail(&self, reason: &str) {
        self.with_state(|state| state.failure = Some(reason.to_owned()));
    }

    /// Records a part of the request that began at `start` and took `time`.
    pub(crate) fn add(
        &self,
        name: &'static str,
        (start, time): (Instant, Duration),
        attributes: Vec<(&'static str, Attribute)>,
    ) {
        let Some(recorder) = &self.recorder else { return };
        let start = recorder.wall_clock(start);
        let span = Span {
            trace_id: self.own.trace_id,
            span_id: new_id(),
            parent: Some(self.own.span_id),
            name: name.into(),
            kind: Kind::Internal,
            start,
            end: start + time,
            attributes,
            failure: None,
        };
        self.with_state(|state| {
            if state.children.len() < MAX_CHILDREN {
                state.children.push(span);
            } else {
                state.num_left_out += 1;
            }
        });
    }

    fn with_state(&self, change: impl FnOnce(&mut State)) {
        if let Some(recorder) = &self.recorder {
            change(&mut recorder.state.lock().unwrap_or_else(PoisonError::into_inner));
        }
    }
}

impl Recorder {
    /// Returns the time of day at an instant of the request. One clock is used for all of its spans.
    fn wall_clock(&self, at: Instant) -> SystemTime {
        let (instant, time) = self.started;
        time + at.saturating_duration_since(instant)
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        let Some(recorder) = &mut self.recorder else { return };
        let state = std::mem::take(recorder.state.get_mut().unwrap_or_else(PoisonError::into_inner));
        let root = Span {
            trace_id: self.own.trace_id,
            span_id: self.own.span_id,
            parent: recorder.parent,
            name: state.name,
            kind: Kind::Server,
            start: recorder.started.1,
            end: recorder.wall_clock(Instant::now()),
            attributes: state.attributes,
            failure: state.failure,
        };
        let mut spans = state.children;
        spans.push(root);
        recorder.exporter.count_left_out(state.num_left_out);
        recorder.exporter.submit(spans);
    }
}

/// Returns random bytes that are not all zero, which the standard does not allow.
fn new_id<const N: usize>() -> [u8; N] {
    let mut id = [0; N];
    for chunk in id.chunks_mut(8) {
        chunk.copy_from_slice(&(random::word() | 1).to_le_bytes()[..chunk.len()]);
    }
    id
}
