//! Runs the loop on its own thread: [`EngineHandle`] submits requests, [`TokenStream`] receives their events.
//!
//! A refusal never waits for the loop. The submitting thread checks the request and knows the length of the queue, so a
//! full queue is refused at once, even while a long step runs.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use pellucid_sampling::{Sampler, SamplingParams};

use crate::queue::Queue;
use crate::request_limits::{CheckedRequest, RequestLimits};
use crate::{Engine, EngineStats, Error, Event, EventSink, Request, TenantId, TenantUsage};

/// Maximum messages to the loop that are not submissions.
const MAX_QUERIES: usize = 64;
/// Time that the loop sleeps when every running request is paused or has a slow reader.
const STALL_SLEEP: Duration = Duration::from_millis(2);

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
    queue: Arc<Queue>,
    shared: Arc<Shared>,
}

/// State of the loop that other threads read.
#[derive(Debug)]
struct Shared {
    /// Requests that were preempted and wait to start again. All others that wait hold a place in the queue.
    num_preempted: AtomicUsize,
    started: Instant,
    /// When the loop last began to work, in milliseconds after `started`, plus 1; 0 while it is idle.
    busy_since_ms: AtomicU64,
    is_alive: AtomicBool,
    stats: Mutex<EngineStats>,
    usages: Mutex<Vec<(TenantId, TenantUsage)>>,
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

/// The events of one request. Dropping it cancels the request; its blocks are released before the next step.
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
        // An error means that the reader is gone, which the loop notices by `is_open`.
        let _ = self.events.send(event);
    }

    fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Relaxed)
    }
}

impl EngineHandle {
    /// Starts the loop on a new thread.
    pub fn start(engine: Engine) -> EngineHandle {
        let (limits, queue) = (engine.limits(), engine.queue().clone());
        let (mailbox, messages) = sync_channel(limits.options.max_waiting.saturating_add(MAX_QUERIES));
        let shared = Arc::new(Shared {
            num_preempted: AtomicUsize::new(0),
            started: Instant::now(),
            busy_since_ms: AtomicU64::new(0),
            is_alive: AtomicBool::new(true),
            stats: Mutex::new(engine.stats()),
            usages: Mutex::default(),
        });
        let seen = shared.clone();
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || serve(engine, &messages, &Reporter(seen)))
            .expect("the operating system gives a thread");
        EngineHandle { mailbox: Some(mailbox), thread: Some(thread), limits, queue, shared }
    }

    /// Checks and queues a request. Returns an error if it can never be served or the queue is full.
    pub fn submit(&self, request: Request) -> Result<TokenStream, Error> {
        // The request's limits bound the number of events, so the channel needs no bound.
        let (sender, events) = channel();
        let is_open = Arc::new(AtomicBool::new(true));
        self.submit_to(request, Box::new(StreamSink { events: sender, is_open: is_open.clone() }))?;
        Ok(TokenStream { events, is_open })
    }

    /// Checks and queues a request whose events go to `sink`. Never waits for the loop.
    pub fn submit_to(&self, request: Request, sink: Box<dyn EventSink>) -> Result<(), Error> {
        self.submit_all(vec![(request, sink)])
    }

    /// Checks and queues several requests: all of them, or none.
    pub fn submit_all(&self, requests: Vec<(Request, Box<dyn EventSink>)>) -> Result<(), Error> {
        let samplers: Vec<Sampler> =
            requests.iter().map(|(request, _)| self.limits.check(request)).collect::<Result<_, _>>()?;
        let tenants: Vec<TenantId> = requests.iter().map(|(request, _)| request.scope.tenant).collect();
        let places = self.queue.take(&tenants)?;
        let arrived = Instant::now();
        for (((request, sink), sampler), place) in requests.into_iter().zip(samplers).zip(places) {
            let checked = CheckedRequest { request, sampler, place, arrived };
            self.post(Message::Submit(Box::new(checked), sink))?;
        }
        Ok(())
    }

    /// Returns a function that sets the number of tenants that may submit requests. With more than one, no tenant can
    /// fill the queue. It may be called at any time; requests that wait are not affected.
    pub fn num_tenants_setter(&self) -> impl Fn(usize) + Send + Sync + 'static {
        let queue = self.queue.clone();
        move |num_tenants| queue.set_num_tenants(num_tenants)
    }

    /// Checks sampling parameters for [`Control::Update`](crate::Control::Update).
    pub fn check_sampling(&self, params: &SamplingParams) -> Result<(), Error> {
        self.limits.check_sampling(params).map(drop)
    }

    /// Maximum sequences that run at the same time.
    pub fn max_sequences(&self) -> usize {
        self.limits.options.max_sequences
    }

    /// Returns the current statistics. Waits for the step that is running.
    pub fn stats(&self) -> Result<EngineStats, Error> {
        let (answer, stats) = sync_channel(1);
        self.post(Message::Stats(answer))?;
        stats.recv().map_err(|_| Error::Stopped)
    }

    /// Returns the statistics after the last step. Never waits.
    pub fn last_stats(&self) -> EngineStats {
        let waiting = self.queue.num_taken() + self.shared.num_preempted.load(Ordering::SeqCst);
        let stats = *self.shared.stats.lock().unwrap_or_else(PoisonError::into_inner);
        EngineStats { num_waiting: waiting, ..stats }
    }

    /// Returns the KV blocks of each tenant after the last step. Never waits.
    pub fn last_usages(&self) -> Vec<(TenantId, TenantUsage)> {
        self.shared.usages.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns the positions of a KV block.
    pub fn block_len(&self) -> usize {
        self.limits.options.block_len
    }

    /// Returns the bytes of a KV block in all layers; on average, if layers with windows have fewer blocks.
    pub fn bytes_per_block(&self) -> usize {
        self.limits.bytes_per_block
    }

    /// Returns what the engine's thread is doing. Never waits.
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
            TrySendError::Full(_) => Error::QueueFull,
            TrySendError::Disconnected(_) => Error::Stopped,
        })
    }
}

impl Drop for EngineHandle {
    fn drop(&mut self) {
        drop(self.mailbox.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the loop has been printed already.
            let _ = thread.join();
        }
    }
}

/// The loop's access to the shared state. Dropping it, also by a panic, marks the loop as stopped.
struct Reporter(Arc<Shared>);

impl Drop for Reporter {
    fn drop(&mut self) {
        self.0.is_alive.store(false, Ordering::SeqCst);
    }
}

impl Reporter {
    fn set_busy(&self) {
        let now = self.0.started.elapsed().as_millis() as u64;
        self.0.busy_since_ms.store(now + 1, Ordering::SeqCst);
    }

    fn set_idle(&self) {
        self.0.busy_since_ms.store(0, Ordering::SeqCst);
    }

    fn publish(&self, engine: &Engine) {
        self.0.num_preempted.store(engine.num_preempted(), Ordering::SeqCst);
        *self.0.stats.lock().unwrap_or_else(PoisonError::into_inner) = engine.stats();
        let mut usages = self.0.usages.lock().unwrap_or_else(PoisonError::into_inner);
        usages.clear();
        usages.extend(engine.cache().usages());
    }
}

/// The engine's thread: receives messages between steps, and sleeps when there is nothing to do.
fn serve(mut engine: Engine, messages: &Receiver<Message>, reporter: &Reporter) {
    let mut has_work = false;
    loop {
        let first = match (has_work, engine.is_stalled()) {
            (true, false) => messages.recv_timeout(Duration::ZERO),
            (true, true) => messages.recv_timeout(STALL_SLEEP),
            (false, _) => {
                reporter.set_idle();
                messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
            }
        };
        reporter.set_busy();
        match first {
            Ok(message) => {
                handle(&mut engine, message);
                messages.try_iter().for_each(|message| handle(&mut engine, message));
                // Requests that start now no longer wait. Publish that before the step, which may be long.
                engine.admit();
                reporter.publish(&engine);
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        has_work = engine.step();
        reporter.publish(&engine);
        if engine.is_lost() {
            return refuse(messages);
        }
    }
}

/// Fails the requests that arrived while the loop was ending.
fn refuse(messages: &Receiver<Message>) {
    for message in messages.try_iter() {
        if let Message::Submit(_, mut sink) = message {
            sink.send(Event::Failed(Error::Stopped));
        }
    }
}

fn handle(engine: &mut Engine, message: Message) {
    match message {
        Message::Submit(checked, sink) => engine.accept(*checked, sink),
        // The caller may be gone; then the answer is dropped.
        Message::Stats(answer) => {
            let _ = answer.send(engine.stats());
        }
    }
}

impl TokenStream {
    /// Waits for the next event; `None` after the last.
    pub fn next_event(&self) -> Option<Event> {
        self.events.recv().ok()
    }

    /// Waits for the next event for at most `timeout`; `Ok(None)` after the last, `Err` if none arrived in time.
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
