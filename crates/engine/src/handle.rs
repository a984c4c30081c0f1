//! The loop on a thread of its own, and the two ends that others hold: a handle to submit with, a stream to read from.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, SyncSender, TrySendError, channel, sync_channel};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::{Engine, EngineStats, Error, Event, EventSink, Request};

/// Submissions that may be on their way to the loop; beyond it they are refused like those that find the queue full.
const MAILBOX: usize = 1024;

enum Message {
    Submit(Box<Request>, Box<dyn EventSink>, SyncSender<Result<(), Error>>),
    Stats(SyncSender<EngineStats>),
}

/// Submits requests to an engine that runs on its own thread. The engine stops when the last handle is dropped.
#[derive(Debug)]
pub struct EngineHandle {
    mailbox: Option<SyncSender<Message>>,
    thread: Option<JoinHandle<()>>,
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
        let (mailbox, messages) = sync_channel(MAILBOX);
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(move || serve(engine, &messages))
            .expect("the operating system gives a thread");
        EngineHandle { mailbox: Some(mailbox), thread: Some(thread) }
    }

    /// Checks and queues a request. What cannot be served is refused here.
    pub fn submit(&self, request: Request) -> Result<TokenStream, Error> {
        // The number of events is bounded by the request's own limits, so the channel needs no bound of its own.
        let (sender, events) = channel();
        let is_open = Arc::new(AtomicBool::new(true));
        let sink = StreamSink { events: sender, is_open: is_open.clone() };
        let (answer, accepted) = sync_channel(1);
        self.post(Message::Submit(Box::new(request), Box::new(sink), answer))?;
        accepted.recv().map_err(|_| Error::Stopped)??;
        Ok(TokenStream { events, is_open })
    }

    pub fn stats(&self) -> Result<EngineStats, Error> {
        let (answer, stats) = sync_channel(1);
        self.post(Message::Stats(answer))?;
        stats.recv().map_err(|_| Error::Stopped)
    }

    fn post(&self, message: Message) -> Result<(), Error> {
        let mailbox = self.mailbox.as_ref().ok_or(Error::Stopped)?;
        mailbox.try_send(message).map_err(|error| match error {
            TrySendError::Full(_) => Error::QueueFull { waiting: MAILBOX },
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

/// The thread: takes messages between steps, and sleeps when there is nothing to do.
fn serve(mut engine: Engine, messages: &Receiver<Message>) {
    let mut has_work = false;
    loop {
        let first = if has_work {
            messages.recv_timeout(Duration::ZERO)
        } else {
            messages.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match first {
            Ok(message) => {
                handle(&mut engine, message);
                messages.try_iter().for_each(|message| handle(&mut engine, message));
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return,
        }
        has_work = engine.step();
    }
}

fn handle(engine: &mut Engine, message: Message) {
    // Whoever asked may have gone; the answer is then nobody's.
    match message {
        Message::Submit(request, sink, answer) => {
            let _ = answer.send(engine.submit(*request, sink));
        }
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
