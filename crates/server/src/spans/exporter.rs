//! The queue of spans, and the thread that sends them. A collector that is slow or gone costs spans, and never time or
//! memory of requests: the queue is bounded, and what is lost is counted.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;

use super::Span;
use super::otlp;

/// Maximum spans in the queue: some megabytes.
const MAX_QUEUED: usize = 8192;
/// Maximum spans of one message.
const MAX_SENT: usize = 512;
/// Maximum time that a span waits for others to be sent with.
const INTERVAL: Duration = Duration::from_secs(1);
/// Times between the tries to send a message.
const RETRIES: [Duration; 3] = [Duration::from_millis(500), Duration::from_secs(2), Duration::from_secs(5)];

/// Sends messages to a collector. Called from one thread, which it may block.
pub trait SpanSink: fmt::Debug + Send {
    /// Sends an `ExportTraceServiceRequest` of OTLP in protocol buffers.
    fn send(&self, message: &[u8]) -> Result<(), SinkError>;
}

/// Why a message was not taken.
#[derive(Debug)]
pub struct SinkError {
    /// The reason, for the log.
    pub reason: String,
    /// Whether another try may succeed.
    pub is_temporary: bool,
}

/// Exports spans of requests.
#[derive(Debug)]
pub struct SpanExporter {
    queue: Mutex<Queue>,
    changed: Condvar,
    exported: AtomicU64,
    queue_full: AtomicU64,
    not_taken: AtomicU64,
    left_out: AtomicU64,
}

#[derive(Debug, Default)]
struct Queue {
    spans: VecDeque<Span>,
    /// When to give up, if the program ends.
    ends: Option<Instant>,
    is_sending: bool,
}

impl SpanExporter {
    /// Starts the thread that sends spans to `sink`, as those of the service of this name.
    pub fn start(sink: Box<dyn SpanSink>, service: String) -> std::io::Result<Arc<SpanExporter>> {
        let exporter = Arc::new(SpanExporter {
            queue: Mutex::default(),
            changed: Condvar::new(),
            exported: AtomicU64::new(0),
            queue_full: AtomicU64::new(0),
            not_taken: AtomicU64::new(0),
            left_out: AtomicU64::new(0),
        });
        let own = exporter.clone();
        thread::Builder::new().name("spans".into()).spawn(move || own.run(&*sink, &service))?;
        Ok(exporter)
    }

    /// Queues the spans of a request.
    pub(crate) fn submit(&self, spans: Vec<Span>) {
        let mut queue = self.lock();
        if queue.spans.len() + spans.len() > MAX_QUEUED {
            self.queue_full.fetch_add(spans.len() as u64, Ordering::Relaxed);
            return;
        }
        queue.spans.extend(spans);
        self.changed.notify_all();
    }

    /// Counts spans that their request had no room for.
    pub(crate) fn count_left_out(&self, num_spans: u64) {
        self.left_out.fetch_add(num_spans, Ordering::Relaxed);
    }

    /// Sends what is queued, for at most `time`, and ends the thread. Returns the number of spans that were not sent.
    pub fn finish(&self, time: Duration) -> usize {
        let ends = Instant::now() + time;
        let mut queue = self.lock();
        queue.ends = Some(ends);
        self.changed.notify_all();
        while !queue.spans.is_empty() || queue.is_sending {
            let Some(left) = ends.checked_duration_since(Instant::now()) else { break };
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.spans.len()
    }

    fn run(&self, sink: &dyn SpanSink, service: &str) {
        let mut is_failing = false;
        while let Some(spans) = self.next() {
            let sent = self.send(sink, &otlp::request(service, &spans));
            let count = if sent.is_ok() { &self.exported } else { &self.not_taken };
            count.fetch_add(spans.len() as u64, Ordering::Relaxed);
            match &sent {
                Ok(()) if is_failing => tracing::info!("spans are exported again"),
                Err(error) if !is_failing => tracing::warn!("spans are not exported: {}", error.reason),
                _ => {}
            }
            is_failing = sent.is_err();
            self.lock().is_sending = false;
            self.changed.notify_all();
        }
    }

    /// Waits for spans. Returns `None` when the program ends and none is left.
    fn next(&self) -> Option<Vec<Span>> {
        let mut queue = self.lock();
        while queue.spans.is_empty() {
            if queue.ends.is_some() {
                return None;
            }
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
        // Others may follow.
        let until = Instant::now() + INTERVAL;
        while queue.spans.len() < MAX_SENT && queue.ends.is_none() {
            let Some(left) = until.checked_duration_since(Instant::now()) else { break };
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        queue.is_sending = true;
        let count = queue.spans.len().min(MAX_SENT);
        Some(queue.spans.drain(..count).collect())
    }

    fn send(&self, sink: &dyn SpanSink, message: &[u8]) -> Result<(), SinkError> {
        for pause in RETRIES {
            match sink.send(message) {
                Err(error) if error.is_temporary && self.pause(pause) => {}
                result => return result,
            }
        }
        sink.send(message)
    }

    /// Waits before another try. Returns whether there is time for one.
    fn pause(&self, time: Duration) -> bool {
        let until = Instant::now() + time;
        let mut queue = self.lock();
        loop {
            if queue.ends.is_some_and(|ends| ends <= until) {
                return false;
            }
            let Some(left) = until.checked_duration_since(Instant::now()) else { return true };
            queue = self.changed.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

/// Exports the counts at the time of a scrape.
#[derive(Debug)]
pub(crate) struct SpanCollector(pub(crate) Arc<SpanExporter>);

impl Collector for SpanCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let count = |counter: &AtomicU64| ConstCounter::new(counter.load(Ordering::Relaxed));
        let SpanExporter { exported, queue_full, not_taken, left_out, .. } = &*self.0;
        let exported = count(exported);
        let help = "Spans of requests that the collector of traces took";
        exported.encode(encoder.encode_descriptor("pellucid_spans_exported", help, None, exported.metric_type())?)?;
        let lost = [("queue_full", queue_full), ("not_taken", not_taken), ("request_full", left_out)];
        let lost = lost.map(|(reason, counter)| (reason, count(counter)));
        let help = "Spans of requests that were lost, by reason";
        let mut family = encoder.encode_descriptor("pellucid_spans_dropped", help, None, lost[0].1.metric_type())?;
        for (reason, counter) in lost {
            counter.encode(family.encode_family(&ReasonLabels { reason })?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::{Receiver, Sender, channel};

    use axum::http::HeaderMap;

    use super::super::request_trace::RequestTrace;
    use super::*;

    /// Gives each message to the test, which answers.
    #[derive(Debug)]
    struct TestSink {
        messages: Sender<Vec<u8>>,
        answers: Receiver<Result<(), SinkError>>,
    }

    impl SpanSink for TestSink {
        fn send(&self, message: &[u8]) -> Result<(), SinkError> {
            _ = self.messages.send(message.to_vec());
            self.answers.recv().unwrap_or(Ok(()))
        }
    }

    type Answer = Result<(), SinkError>;

    fn start() -> (Arc<SpanExporter>, Receiver<Vec<u8>>, Sender<Answer>) {
        let ((messages, sent), (answer, answers)) = (channel(), channel());
        let sink = Box::new(TestSink { messages, answers });
        (SpanExporter::start(sink, "test".into()).unwrap(), sent, answer)
    }

    fn count(counter: &AtomicU64) -> u64 {
        counter.load(Ordering::Relaxed)
    }

    fn trace(exporter: &Arc<SpanExporter>) -> Arc<RequestTrace> {
        RequestTrace::begin(Some(exporter), &HeaderMap::new()).unwrap()
    }

    fn contains(message: &[u8], text: &str) -> bool {
        message.windows(text.len()).any(|window| window == text.as_bytes())
    }

    #[test]
    fn a_request_is_exported_when_its_last_owner_is_gone() {
        let (exporter, sent, answer) = start();
        answer.send(Ok(())).unwrap();
        let first = trace(&exporter);
        let second = first.clone();
        first.set_name("POST /v1/x".into());
        second.add("decode", (Instant::now(), Duration::from_millis(5)), vec![("tokens", 3.into())]);
        drop(first);
        assert!(sent.try_recv().is_err());
        drop(second);
        let message = sent.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(contains(&message, "POST /v1/x") && contains(&message, "decode") && contains(&message, "tokens"));
        assert_eq!(exporter.finish(Duration::from_secs(20)), 0);
        assert_eq!(count(&exporter.exported), 2);
    }

    #[test]
    fn what_a_collector_does_not_take_is_bounded_and_counted() {
        let (exporter, sent, answer) = start();
        drop(trace(&exporter));
        let first = sent.recv_timeout(Duration::from_secs(20)).unwrap();
        // The collector does not answer, and requests go on.
        for _ in 0..MAX_QUEUED + 10 {
            drop(trace(&exporter));
        }
        assert_eq!(count(&exporter.queue_full), 10);
        // A temporary error is tried again with the same bytes; a permanent one is not.
        answer.send(Err(SinkError { reason: "busy".into(), is_temporary: true })).unwrap();
        assert!(sent.recv_timeout(Duration::from_secs(20)).unwrap() == first);
        answer.send(Err(SinkError { reason: "no".into(), is_temporary: false })).unwrap();
        assert!(sent.recv_timeout(Duration::from_secs(20)).unwrap() != first);
        assert_eq!((count(&exporter.exported), count(&exporter.not_taken)), (0, 1));
        // The end does not wait for a collector that hangs.
        let left = exporter.finish(Duration::from_millis(50));
        assert_eq!(left, MAX_QUEUED - MAX_SENT);
    }

    #[test]
    fn a_request_has_a_bounded_number_of_spans() {
        let (exporter, sent, _answer) = start();
        let one = trace(&exporter);
        for _ in 0..100 {
            one.add("decode", (Instant::now(), Duration::ZERO), Vec::new());
        }
        drop(one);
        let message = sent.recv_timeout(Duration::from_secs(20)).unwrap();
        let decodes = message.windows(6).filter(|window| *window == b"decode").count();
        assert_eq!((decodes as u64, count(&exporter.left_out)), (64, 36));
    }

    #[test]
    fn a_client_that_does_not_record_is_passed_on_and_not_recorded() {
        let (exporter, sent, _answer) = start();
        let header = |flags: &str| format!("00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flags}");
        let headers = |flags: &str| {
            let mut headers = HeaderMap::new();
            headers.insert("traceparent", header(flags).parse().unwrap());
            headers
        };
        let unsampled = RequestTrace::begin(Some(&exporter), &headers("00")).unwrap();
        assert_eq!(unsampled.header(), header("00"), "the client's own span calls");
        drop(unsampled);
        assert!(RequestTrace::begin(None, &HeaderMap::new()).is_none());
        assert_eq!(RequestTrace::begin(None, &headers("01")).unwrap().header(), header("01"));
        assert_eq!(exporter.finish(Duration::from_secs(20)), 0);
        assert!(sent.try_recv().is_err());
        let sampled = RequestTrace::begin(Some(&exporter), &headers("01")).unwrap();
        let own = sampled.header();
        assert!(own.starts_with("00-0af7651916cd43dd8448eb211c80319c-") && own != header("01"), "{own}");
    }
}
