//! The server's end of the engine: requests go in with a sink, events come out of a channel that an async task reads.
//!
//! The sink never blocks the engine. While its reader is more than [`MAX_BACKLOG`] events behind, it says that it is not ready, and the
//! engine leaves the request out of its steps: a slow reader costs that many events and its KV blocks, until its connection's write
//! timeout ends it. Dropping a [`Generation`] cancels all its requests.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use pellucid_engine::{Control, EngineHandle, Error, Event, EventSink, Request};
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

/// Events that a reader may be behind before its request is held up. A step adds at most two for each of a request's sequences. (The
/// held-back replies of `best_of` come at once; they are bounded by the request's own limits and were in memory before.)
const MAX_BACKLOG: usize = 64;

/// The events of some requests that belong together, each with the number of its request.
#[derive(Debug)]
pub(crate) struct Generation {
    events: UnboundedReceiver<(usize, Event)>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    is_open: AtomicBool,
    backlog: AtomicUsize,
    /// Wishes that the engine has not taken, by request; counted apart so that it need not lock to see that there are none.
    num_controls: AtomicUsize,
    controls: Mutex<Vec<VecDeque<Control>>>,
}

struct Sink {
    part: usize,
    events: UnboundedSender<(usize, Event)>,
    shared: Arc<Shared>,
}

impl EventSink for Sink {
    fn send(&mut self, event: Event) {
        // Nobody shows how far a prompt has come.
        if matches!(event, Event::PromptProgress { .. }) {
            return;
        }
        self.shared.backlog.fetch_add(1, Ordering::Relaxed);
        // A reader that has gone is noticed by `is_open`.
        let _ = self.events.send((self.part, event));
    }

    fn is_open(&self) -> bool {
        self.shared.is_open.load(Ordering::Relaxed)
    }

    fn is_ready(&self) -> bool {
        self.shared.backlog.load(Ordering::Relaxed) < MAX_BACKLOG
    }

    fn control(&mut self) -> Option<Control> {
        if self.shared.num_controls.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut controls = self.shared.controls.lock().unwrap_or_else(PoisonError::into_inner);
        let control = controls[self.part].pop_front()?;
        self.shared.num_controls.fetch_sub(1, Ordering::Release);
        Some(control)
    }
}

impl Generation {
    /// Submits all requests, or none.
    pub(crate) fn submit(engine: &EngineHandle, requests: Vec<Request>) -> Result<Generation, Error> {
        let (sender, events) = unbounded_channel();
        let shared = Arc::new(Shared {
            is_open: AtomicBool::new(true),
            backlog: AtomicUsize::new(0),
            num_controls: AtomicUsize::new(0),
            controls: Mutex::new(vec![VecDeque::new(); requests.len()]),
        });
        let generation = Generation { events, shared };
        let sink = |part| Sink { part, events: sender.clone(), shared: generation.shared.clone() };
        let requests = requests.into_iter().enumerate();
        engine.submit_all(requests.map(|(part, request)| (request, Box::new(sink(part)) as _)).collect())?;
        Ok(generation)
    }

    /// The next event; `None` when the engine has gone.
    pub(crate) fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<(usize, Event)>> {
        let event = self.events.poll_recv(context);
        if let Poll::Ready(Some(_)) = event {
            self.shared.backlog.fetch_sub(1, Ordering::Relaxed);
        }
        event
    }

    pub(crate) async fn next(&mut self) -> Option<(usize, Event)> {
        std::future::poll_fn(|context| self.poll_next(context)).await
    }

    /// Wishes something of one of the requests.
    pub(crate) fn control(&self, part: usize, control: Control) {
        let mut controls = self.shared.controls.lock().unwrap_or_else(PoisonError::into_inner);
        controls[part].push_back(control);
        self.shared.num_controls.fetch_add(1, Ordering::Release);
    }
}

impl Drop for Generation {
    fn drop(&mut self) {
        self.shared.is_open.store(false, Ordering::Relaxed);
    }
}
