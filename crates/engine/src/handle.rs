//! The loop on a thread of its own, and the two ends that others hold: a handle to submit with, a stream to read from.
//!
//! Nobody waits for the loop to be told no: requests are checked on the thread that submits them, and the length of the queue is known
//! here. So a full queue is refused at once, even while a long step runs.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pellucid_sampling::SamplingParams;

use crate::request_limits::{CheckedRequest, RequestLimits};
use crate::{Engine, EngineStats, Error, Event, EventSink, Request};

/// Questions that may be on their way to the loop, beside submissions.
const QUESTIONS: usize = 64;
/// How long the loop sleeps when everyone it serves is paused or reads slowly.
const STALL: Duration = Duration::from_millis(2);

enum Message {
    Submit(Box<CheckedRequest>, Box<dyn EventSink>),
    Stats(SyncSender<EngineStats>),
}

/// Submits requests to an engine that runs on its own thread. The engine stops when the last handle is dropped.
#[derive(Debug)]
pub struct EngineHandle {
    mailbox: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
    limits: RequestLimits,
    shared: Arc<Shared>,
}

/// What the loop lets others see of itself.
#[derive(Debug)]
struct Shared {
    /// Submissions that the loop has not taken yet, and requests that wait in its queue.
    num_posted: AtomicUsize,
    num_waiting: AtomicUsize,
    started: Instant,
    /// When the loop last took up work, in milliseconds after `started`, plus 1; 0 while it sleeps.
    busy_since_ms: AtomicU64,
    is_alive: AtomicBool,
    stats: Mutex<EngineStats>,
}

/// State of the engine's thread, for health checks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Liveness {
    /// The loop waits for requests.
    Idle,
    /// A step is running; it began this long ago.
    Stepping(Duration),
    /// The loop has ended and serves nothing any more.
    Stopped,
}

/// The events of one request. Dropping it cancels the request; its blocks are free by the end of the next step.
#[derive(Debug)]
pub struct TokenStream {
    events: Receiver<Event>,
    is_open: Arc<AtomicBool>,
}

struct StreamSink {
    events: Sender<Event>,
    is_open: Arc<AtomicBool>,
}

impl EventSink for StreamSink {
    fn send(&mut self, event: Event) {
        // A reader that has gone is noticed by `is_open`.
        let _ = self.events.send(event);
    }

    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }
}

impl EngineHandle {
    /// Starts the loop.
    pub fn start(engine: Engine) -> EngineHandle {
        let limits = engine.limits();
        let (mailbox, messages) = sync_channel(limits.options.max_waiting.saturating_add(QUESTIONS));
        let shared = Arc::new(Shared {
            num_posted: AtomicUsize::new(0),
            num_waiting: AtomicUsize::new(0),
            started: Instant::now(),
            busy_since_ms: AtomicU64::new(0),
            is_alive: AtomicBool::new(true),
            stats: Mutex::new(engine.stats()),
        });
        let seen = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || serve(engine, &messages, &Life(seen)))
            .expect("the operating system gives a thread");
        EngineHandle { mailbox: Some(mailbox), thread: Some(thread), limits, shared }
    }

    /// Checks and queues a request. What cannot be served is refused here.
    pub fn submit(&self, request: Request) -> Result<TokenStream, Error> {
        // The number of events is bounded by the request's own limits, so the channel needs no bound of its own.
        let (sender, events) = channel();
        let is_open = Arc::new(AtomicBool::new(true));
        self.submit_to(request, Box::new(StreamSink { events: sender, is_open: is_open.clone() }))?;
        Ok(TokenStream { events, is_open })
    }

    /// As `submit`, with a sink of the caller's. Never waits for the loop.
    pub fn submit_to(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), Error> {
        self.submit_all(vec![(request, sink)])
    }

    /// Checks and queues requests that belong together: all of them, or none.
    pub fn submit_all(&self, requests: Vec<(Request, Box<dyn EventSink>)>) -> Result<(), Error> {
        let (num_requests, most) = (requests.len(), self.limits.options.max_waiting);
        let mut checked = Vec::with_capacity(num_requests);
        for (request, sink) in requests {
            checked.push((self.limits.check(request)?, sink));
        }
        // Nobody else can make room for so many.
        if num_requests > most {
            let expected = format!("at most {most}, which is how many may wait");
            return Err(Error::OutOfRange { name: "prompts", expected, found: num_requests.to_string() });
        }
        let posted = self.shared.num_posted.fetch_add(num_requests, Ordering::SeqCst);
        let waiting = posted + self.shared.num_waiting.load(Ordering::SeqCst);
        let mut num_left = num_requests;
        let outcome = if waiting + num_requests > most {
            Err(Error::QueueFull { waiting })
        } else {
            checked.into_iter().try_for_each(|(checked, sink)| {
                self.post(Message::Submit(Box::new(checked), sink))?;
                num_left -= 1;
                Ok(())
            })
        };
        if outcome.is_err() {
            self.shared.num_posted.fetch_sub(num_left, Ordering::SeqCst);
        }
        outcome
    }

    /// Whether these parameters could be those of a request; for [`Control::Update`](crate::Control::Update).
    pub fn check_sampling(&self, params: &SamplingParams) -> Result<(), Error> {
        self.limits.check_sampling(params).map(drop)
    }

    /// The numbers as they are now; waits for the step that is under way.
    pub fn stats(&self) -> Result<EngineStats, Error> {
        let (answer, stats) = sync_channel(1);
        self.post(Message::Stats(answer))?;
        stats.recv().map_err(|_| Error::Stopped)
    }

    /// The numbers as they were after the last step; never waits.
    pub fn last_stats(&self) -> EngineStats {
        let waiting = self.shared.num_posted.load(Ordering::SeqCst) + self.shared.num_waiting.load(Ordering::SeqCst);
        let stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        EngineStats { num_waiting: waiting, ..stats }
    }

    pub fn liveness(&self) -> Liveness {
        if !self.shared.is_alive.load(Ordering::SeqCst) {
            return Liveness::Stopped;
        }
        match self.shared.busy_since_ms.load(Ordering::SeqCst) {
            0 => Liveness::Idle,
            since => Liveness::Stepping(self.shared.started.elapsed().saturating_sub(Duration::from_millis(since - 1))),
        }
    }

    fn post(&self, message: Message) -> Result<(), Error> {
        let mailbox = self.mailbox.as_ref().ok_or(Error::Stopped)?;
        mailbox.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => Error::QueueFull { waiting: self.limits.options.max_waiting },
            TrySendError::Disconnected(_) => Error::Stopped,
        })
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        drop(self.mailbox.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the loop has been printed; there is nobody left to tell.
            let _ = thread.join();
        }
    }
}

/// The loop's side of what is shared; when it goes, however it goes, that shows.
struct Life(Arc<Shared>);

impl Drop for Life {
    fn drop(&mut self) {
        self.0.is_alive.store(false, Ordering::SeqCst);
    }
}

impl Life {
    fn works(&self) {
        let now = self.0.started.elapsed().as_millis() as u64;
        self.0.busy_since_ms.store(now + 1, Ordering::SeqCst);
    }

    fn sleeps(&self) {
        self.0.busy_since_ms.store(0, Ordering::SeqCst);
    }

    fn show(&self, engine: &Engine) {
        self.0.num_waiting.store(engine.num_waiting(), Ordering::SeqCst);
        *self.0.stats.lock().unwrap_or_else(PoisonError::into_inner) = engine.stats();
    }
}

/// The thread: takes messages between steps, and sleeps when there is nothing to do.
fn serve(mut engine: Engine, messages: &Receiver<Message>, life: &Life) {
    let mut has_work = false;
    loop {
        let first = match (has_work, engine.is_stalled()) {
            (true, false) => messages.recv_timeout(Duration::ZERO),
            (true, true) => messages.recv_timeout(STALL),
            (false, _) => {
                life.sleeps();
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            }
        };
        life.works();
        match first {
            Ok(message) => {
                handle(&mut engine, message, life);
                messages.try_iter().for_each(|message| handle(&mut engine, message, life));
                // Whoever comes in now no longer waits, and others may know before the step is over.
                engine.admit();
                life.show(&engine);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        has_work = engine.step();
        life.show(&engine);
        if engine.is_lost() {
            return refuse(messages);
        }
    }
}

/// The loop ends, and whoever has just come in hears of it.
fn refuse(messages: &Receiver<Message>) {
    for message in messages.try_iter() {
        if let Message::Submit(_, mut sink) = message {
            sink.send(Event::Failed(Error::Stopped));
        }
    }
}

fn handle(engine: &mut Engine, message: Message, life: &Life) {
    match message {
        Message::Submit(checked, sink) => {
            engine.accept(*checked, sink);
            // In this order a request may be counted twice for a moment, but never not at all.
            life.0.num_waiting.store(engine.num_waiting(), Ordering::SeqCst);
            life.0.num_posted.fetch_sub(1, Ordering::SeqCst);
        }
        // Whoever asked may have gone; the answer is then nobody's.
        Message::Stats(answer) => {
            let _ = answer.send(engine.stats());
        }
    }
}

impl TokenStream {
    /// The next event; `None` after the last.
    pub fn next_event(&self) -> Option<Event> {
        self.events.recv().ok()
    }

    /// As `next_event`, waiting no longer than `timeout`: `Err` when nothing came.
    pub fn next_within(&self, timeout: Duration) -> Result<Option<Event>, RecvTimeoutError> {
        match self.events.recv_timeout(timeout) {
            Ok(event) => Ok(Some(event)),
            Err(RecvTimeoutError::Disconnected) => Ok(None),
            Err(timeout) => Err(timeout),
        }
    }
}

impl Drop for TokenStream {
    fn drop(&mut self) {
        self.is_open.store(false, Ordering::Relaxed);
    }
}
