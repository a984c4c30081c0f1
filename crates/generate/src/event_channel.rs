//! The channel between the engine's thread and the reader of a generation, who may block or be an async task.
//!
//! The engine must never wait, so its end does not block when the channel is full. Instead it reports that it is not
//! ready while the reader is [`MAX_BACKLOG`] events behind, and the engine leaves the request out of its steps. A slow
//! reader therefore costs at most these events and its KV blocks. Control messages travel the other way. Verdicts of
//! guards arrive through the same channel, from the threads on which guards judge.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use std::time::Instant;

use pellucid_engine::{Control, Error, Event, EventSink, fallible};

use crate::progress::Progress;
use crate::{GuardError, Verdict};

/// Events that a reader may be behind before its requests are held up. A step adds at most two for each sequence of a
/// request, and one for each drafted token that it accepts. (The replies of `best_of` arrive all at once; the request's
/// own limits bound them.)
pub(crate) const MAX_BACKLOG: usize = 64;

/// An event of the engine.
#[derive(Debug)]
pub(crate) struct PromptEvent {
    /// Number of the prompt.
    pub(crate) prompt: usize,
    pub(crate) event: Event,
    /// When the engine sent it. The reader may take it much later.
    pub(crate) sent: Instant,
}

/// Something that the reader has to process.
#[derive(Debug)]
pub(crate) enum ChannelEvent {
    /// An event of the engine.
    Engine(PromptEvent),
    /// Guard number `guard` has judged a segment of a choice, counted over all prompts.
    Verdict { choice: usize, guard: usize, verdict: Result<Verdict, GuardError> },
}

#[derive(Debug)]
struct Shared {
    /// Whether the reader is still there.
    is_open: AtomicBool,
    backlog: AtomicUsize,
    /// Control messages that the engine has not taken. It reads this before each step, which must not lock.
    num_controls: AtomicUsize,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug)]
struct State {
    events: VecDeque<PromptEvent>,
    /// Verdicts that were not taken. Each choice has at most one for each guard.
    verdicts: VecDeque<(usize, usize, Result<Verdict, GuardError>)>,
    /// Prompt of the first event for which there was no memory. It and later ones are lost, and the generation fails.
    lost: Option<usize>,
    /// Sinks that the engine still holds, and verdicts that guards still owe.
    num_sinks: usize,
    /// The async task that waits for an event.
    waker: Option<Waker>,
    /// Control messages, by prompt.
    controls: Vec<VecDeque<Control>>,
    /// The engine's work so far, for those who watch the generation.
    progress: Progress,
    /// Whether someone else than the reader has cancelled the generation.
    is_cancelled: bool,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state and wakes the reader.
    fn notify(&self, change: impl FnOnce(&mut State)) {
        let waker = {
            let mut state = self.lock();
            change(&mut state);
            state.waker.take()
        };
        self.changed.notify_one();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// Creates a channel with one sink for each prompt. `reports_progress` keeps the events of prompts being prefilled.
pub(crate) fn channel(num_prompts: usize, reports_progress: bool) -> (Vec<Sink>, EventReceiver) {
    let state = State {
        events: VecDeque::new(),
        verdicts: VecDeque::new(),
        lost: None,
        num_sinks: num_prompts,
        waker: None,
        controls: vec![VecDeque::new(); num_prompts],
        progress: Progress::default(),
        is_cancelled: false,
    };
    let shared = Arc::new(Shared {
        is_open: AtomicBool::new(true),
        backlog: AtomicUsize::new(0),
        num_controls: AtomicUsize::new(0),
        state: Mutex::new(state),
        changed: Condvar::new(),
    });
    let sink = |prompt| Sink { prompt, reports_progress, shared: shared.clone() };
    ((0..num_prompts).map(sink).collect(), EventReceiver { shared })
}

/// The engine's end, for one prompt.
pub(crate) struct Sink {
    prompt: usize,
    reports_progress: bool,
    shared: Arc<Shared>,
}

impl EventSink for Sink {
    fn send(&mut self, event: Event) {
        if !self.reports_progress && matches!(event, Event::PromptProgress { .. }) {
            return;
        }
        let sent = Instant::now();
        self.shared.notify(|state| {
            state.progress.observe(&event);
            // The replies of `best_of` arrive all at once, so this may grow with the request.
            if state.lost.is_none() && state.events.try_reserve(1).is_ok() {
                self.shared.backlog.fetch_add(1, Ordering::Relaxed);
                state.events.push_back(PromptEvent { prompt: self.prompt, event, sent });
            } else {
                state.lost.get_or_insert(self.prompt);
            }
        });
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
        let control = self.shared.lock().controls[self.prompt].pop_front()?;
        self.shared.num_controls.fetch_sub(1, Ordering::Release);
        Some(control)
    }
}

impl Drop for Sink {
    fn drop(&mut self) {
        self.shared.notify(|state| state.num_sinks -= 1);
    }
}

/// Events that a reader takes from the channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Reads {
    All,
    /// Only verdicts, because too much waits for them.
    Verdicts,
}

/// Sends verdicts on one choice.
#[derive(Debug, Clone)]
pub(crate) struct VerdictSender {
    choice: usize,
    shared: Arc<Shared>,
}

impl VerdictSender {
    /// Announces a verdict of a guard.
    pub(crate) fn pending(&self, guard: usize) -> PendingVerdict {
        self.shared.lock().num_sinks += 1;
        PendingVerdict { choice: self.choice, guard, verdict: None, shared: self.shared.clone() }
    }
}

/// A verdict that a guard owes. Dropping it without one reports that the guard failed.
#[derive(Debug)]
pub(crate) struct PendingVerdict {
    choice: usize,
    guard: usize,
    verdict: Option<Result<Verdict, GuardError>>,
    shared: Arc<Shared>,
}

impl PendingVerdict {
    /// Whether the reader is still there.
    pub(crate) fn is_wanted(&self) -> bool {
        self.shared.is_open.load(Ordering::Relaxed)
    }

    /// Sends the verdict.
    pub(crate) fn set(mut self, verdict: Result<Verdict, GuardError>) {
        self.verdict = Some(verdict);
    }
}

impl Drop for PendingVerdict {
    fn drop(&mut self) {
        let failed = || Err(GuardError("it ended without a verdict".into()));
        let verdict = self.verdict.take().unwrap_or_else(failed);
        self.shared.notify(|state| {
            state.num_sinks -= 1;
            state.verdicts.push_back((self.choice, self.guard, verdict));
        });
    }
}

/// The reader's end. Dropping it cancels all requests of the channel.
#[derive(Debug)]
pub(crate) struct EventReceiver {
    shared: Arc<Shared>,
}

impl EventReceiver {
    /// Returns the next event; `Ready(None)` when the engine holds no sink any more.
    pub(crate) fn poll(&self, reads: Reads, context: &mut Context<'_>) -> Poll<Option<ChannelEvent>> {
        let mut state = self.shared.lock();
        let taken = self.take(&mut state, reads);
        if taken.is_pending() {
            state.waker = Some(context.waker().clone());
        }
        taken
    }

    /// Blocks until there is an event or `deadline` has passed: `Pending` means that it has.
    pub(crate) fn wait(&self, reads: Reads, deadline: Option<Instant>) -> Poll<Option<ChannelEvent>> {
        let mut state = self.shared.lock();
        loop {
            let taken = self.take(&mut state, reads);
            if taken.is_ready() {
                return taken;
            }
            state = match deadline {
                None => self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return Poll::Pending;
                    }
                    self.shared.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
    }

    /// Sends a control message to the request of a prompt.
    pub(crate) fn control(&self, prompt: usize, control: Control) {
        self.shared.lock().controls[prompt].push_back(control);
        self.shared.num_controls.fetch_add(1, Ordering::Release);
    }

    /// Returns what watches the generation and can cancel it.
    pub(crate) fn monitor(&self) -> Monitor {
        Monitor(self.shared.clone())
    }

    /// Returns what sends verdicts on a choice.
    pub(crate) fn verdicts(&self, choice: usize) -> VerdictSender {
        VerdictSender { choice, shared: self.shared.clone() }
    }

    fn take(&self, state: &mut State, reads: Reads) -> Poll<Option<ChannelEvent>> {
        let failed = |prompt, error| {
            let event = PromptEvent { prompt, event: Event::Failed(error), sent: Instant::now() };
            Poll::Ready(Some(ChannelEvent::Engine(event)))
        };
        if state.is_cancelled {
            return failed(0, Error::Cancelled);
        }
        if let Some((choice, guard, verdict)) = state.verdicts.pop_front() {
            return Poll::Ready(Some(ChannelEvent::Verdict { choice, guard, verdict }));
        }
        if reads == Reads::Verdicts {
            return Poll::Pending;
        }
        match state.events.pop_front() {
            Some(event) => {
                self.shared.backlog.fetch_sub(1, Ordering::Relaxed);
                Poll::Ready(Some(ChannelEvent::Engine(event)))
            }
            None => match state.lost {
                Some(prompt) => failed(prompt, fallible::out_of_memory()),
                None if state.num_sinks == 0 => Poll::Ready(None),
                None => Poll::Pending,
            },
        }
    }
}

impl Drop for EventReceiver {
    fn drop(&mut self) {
        self.shared.is_open.store(false, Ordering::Relaxed);
    }
}

/// Watches a generation from another thread than its reader's, and can cancel it. Does not keep it alive.
#[derive(Debug, Clone)]
pub struct Monitor(Arc<Shared>);

impl Monitor {
    /// Returns how far the engine is. Does not depend on how much the reader has read.
    pub fn progress(&self) -> Progress {
        let state = self.0.lock();
        Progress {
            is_cancelled: state.is_cancelled,
            waits_for_reader: self.0.backlog.load(Ordering::Relaxed) >= MAX_BACKLOG,
            ..state.progress
        }
    }

    /// Ends the generation: the engine frees its KV blocks before the next step, also if the reader has stopped
    /// reading, and the reader gets [`Error::Cancelled`] next. Events that were not read are lost.
    pub fn cancel(&self) {
        self.0.notify(|state| state.is_cancelled = true);
        self.0.is_open.store(false, Ordering::Relaxed);
    }
}
