//! Spans of requests for OpenTelemetry: when a request waited, was judged by guards, read its prompt and generated.
//!
//! `context` reads and writes `traceparent`, `request_trace` collects the spans of a request, `exporter` queues them
//! and sends them from a thread of its own, `otlp` writes them in the protocol of OpenTelemetry. Spans hold times,
//! counts and names, and no text of prompts or replies.

pub(crate) mod context;
pub(crate) mod exporter;
mod otlp;
pub(crate) mod request_trace;

use std::borrow::Cow;
use std::time::SystemTime;

/// A span that has ended.
#[derive(Debug, Clone)]
pub(crate) struct Span {
    trace_id: [u8; 16],
    span_id: [u8; 8],
    parent: Option<[u8; 8]>,
    name: Cow<'static, str>,
    kind: Kind,
    start: SystemTime,
    end: SystemTime,
    attributes: Vec<(&'static str, Attribute)>,
    /// Reason why the operation failed.
    failure: Option<String>,
}

/// The relation of a span to other programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Internal,
    Server,
}

/// The value of an attribute.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Attribute {
    Text(String),
    Count(i64),
}

impl From<&str> for Attribute {
    fn from(text: &str) -> Attribute {
        Attribute::Text(text.to_owned())
    }
}

impl From<usize> for Attribute {
    fn from(count: usize) -> Attribute {
        Attribute::Count(i64::try_from(count).unwrap_or(i64::MAX))
    }
}
