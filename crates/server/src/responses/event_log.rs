//! Events of a background response, kept so that clients can read them while it is generated, and again later.
//!
//! The log takes memory of the budget for stored responses. If that is used up, the events are dropped and the response
//! goes on: clients can still ask for its state and its result.

use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use http_body::Frame;
use tokio::sync::watch;
use tokio::time::{Instant, Sleep, sleep};

use crate::limits::client_memory::HeldMemory;
use crate::reply::buffer::OutOfMemory;

/// Maximum bytes of a frame.
const FRAME_BYTES: usize = 16 << 10;
/// Time after which something that clients ignore is sent, so that proxies do not close the connection.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The end of an event. JSON has no line ends within strings, so it occurs nowhere else.
const EVENT_END: &[u8] = b"\n\n";
/// Last bytes of a stream whose events were dropped.
const LOST: &str = "event: error\ndata: {\"type\":\"error\",\"code\":\"events_dropped\",\"message\":\"the server has no \
                    memory for more events of this response; GET it without stream\",\"param\":null}\n\n";

/// The events of one response.
#[derive(Debug)]
pub(super) struct EventLog {
    events: Mutex<Events>,
    /// Notified after every change.
    changed: watch::Sender<()>,
}

#[derive(Debug)]
struct Events {
    bytes: Vec<u8>,
    /// Offset of the end of each event; its index is the event's `sequence_number`.
    ends: Vec<usize>,
    is_complete: bool,
    is_lost: bool,
    held: HeldMemory,
}

/// A part of the log, from an offset on.
enum Part {
    Bytes(Bytes),
    /// Nothing yet.
    Wait,
    End,
    Lost,
}

impl EventLog {
    /// Returns an empty log that takes its memory from `held`.
    pub(super) fn new(held: HeldMemory) -> EventLog {
        let events = Events { bytes: Vec::new(), ends: Vec::new(), is_complete: false, is_lost: false, held };
        EventLog { events: Mutex::new(events), changed: watch::Sender::new(()) }
    }

    fn lock(&self) -> MutexGuard<'_, Events> {
        self.events.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds whole events.
    pub(super) fn append(&self, text: &[u8]) {
        self.lock().append(text);
        self.changed.send_replace(());
    }

    /// Records that no event follows, and that the response is stored.
    pub(super) fn complete(&self) {
        self.lock().is_complete = true;
        self.changed.send_replace(());
    }

    /// Drops all events.
    pub(super) fn lose(&self) {
        self.lock().lose();
        self.changed.send_replace(());
    }

    /// Whether the events were dropped.
    pub(super) fn is_lost(&self) -> bool {
        self.lock().is_lost
    }

    /// Waits until the response is complete, at most `timeout`.
    pub(super) async fn completed(&self, timeout: Duration) {
        let mut changed = self.changed.subscribe();
        let complete = async {
            while !self.lock().is_complete {
                // The sender lives as long as `self`.
                let _ = changed.changed().await;
            }
        };
        // The caller shows the state that it finds then.
        let _ = tokio::time::timeout(timeout, complete).await;
    }

    /// Returns the offset of the event after the one numbered `number`; `None` if there is no such event yet.
    pub(super) fn offset_after(&self, number: usize) -> Option<usize> {
        self.lock().ends.get(number).copied()
    }

    fn read(&self, start: usize) -> Part {
        let events = self.lock();
        if events.is_lost {
            return Part::Lost;
        }
        match events.bytes.get(start..) {
            Some(rest) if !rest.is_empty() => Part::Bytes(Bytes::copy_from_slice(&rest[..rest.len().min(FRAME_BYTES)])),
            _ if events.is_complete => Part::End,
            _ => Part::Wait,
        }
    }

    /// Returns a body that sends the events from an offset on, and those that follow. It owns `account` until its end.
    pub(super) fn replay(self: &Arc<EventLog>, start: usize, account: impl Send + 'static) -> Body {
        let changed = Box::pin(next_change(self.changed.subscribe()));
        let keep_alive = Box::pin(sleep(KEEP_ALIVE));
        Body::new(Replay { log: self.clone(), start, is_over: false, changed, keep_alive, _account: Box::new(account) })
    }
}

impl Events {
    fn append(&mut self, text: &[u8]) {
        if self.is_lost {
            return;
        }
        let offset = self.bytes.len();
        let mut at = 0;
        while let Some(found) = text[at..].windows(EVENT_END.len()).position(|window| window == EVENT_END) {
            at += found + EVENT_END.len();
            self.ends.push(offset + at);
        }
        let needed = offset + text.len() + size_of_val(self.ends.as_slice());
        if self.held.grow_to(needed).is_err() || self.bytes.try_reserve(text.len()).is_err() {
            self.lose();
            return;
        }
        self.bytes.extend_from_slice(text);
    }

    fn lose(&mut self) {
        self.is_lost = true;
        self.bytes = Vec::new();
        self.ends = Vec::new();
        self.held.shrink_to(0);
    }
}

async fn next_change(mut changed: watch::Receiver<()>) -> watch::Receiver<()> {
    // An error means that the log is gone, which `Replay` owns.
    let _ = changed.changed().await;
    changed
}

/// Sends the events of a log.
struct Replay {
    log: Arc<EventLog>,
    /// Offset of the next byte.
    start: usize,
    is_over: bool,
    changed: Pin<Box<dyn Future<Output = watch::Receiver<()>> + Send>>,
    keep_alive: Pin<Box<Sleep>>,
    _account: Box<dyn Send>,
}

impl http_body::Body for Replay {
    type Data = Bytes;
    type Error = OutOfMemory;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        let this = &mut *self;
        if this.is_over {
            return Poll::Ready(None);
        }
        loop {
            let bytes = match this.log.read(this.start) {
                Part::Bytes(bytes) => {
                    this.start += bytes.len();
                    bytes
                }
                Part::End => return Poll::Ready(None),
                Part::Lost => {
                    this.is_over = true;
                    Bytes::from_static(LOST.as_bytes())
                }
                Part::Wait => match this.changed.as_mut().poll(context) {
                    Poll::Ready(changed) => {
                        this.changed = Box::pin(next_change(changed));
                        continue;
                    }
                    Poll::Pending if this.keep_alive.as_mut().poll(context).is_ready() => {
                        Bytes::from_static(b": still at work\n\n")
                    }
                    Poll::Pending => return Poll::Pending,
                },
            };
            this.keep_alive.as_mut().reset(Instant::now() + KEEP_ALIVE);
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        }
    }
}
