//! Threads on which guards judge: a verdict may take seconds, and neither the engine nor an async runtime may wait.
//!
//! Each choice has at most one verdict under way, so the queue is no longer than the number of choices.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

/// Maximum threads; further verdicts wait. A thread waits most of the time, for another model or for a service.
const MAX_THREADS: usize = 32;

type Job = Box<dyn FnOnce() + Send>;

/// Threads that are started when they are needed and end when this is dropped.
#[derive(Debug, Default)]
pub(super) struct GuardThreads {
    shared: Arc<Shared>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    jobs: VecDeque<Job>,
    num_threads: usize,
    num_idle: usize,
    is_closed: bool,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("num_threads", &self.lock().num_threads).finish()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs jobs until the threads are dropped.
    fn work(&self) {
        let mut state = self.lock();
        loop {
            match state.jobs.pop_front() {
                Some(job) => {
                    drop(state);
                    // A guard that panics drops its answer, which counts as a failure.
                    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(job));
                    state = self.lock();
                }
                None if state.is_closed => return,
                None => {
                    state.num_idle += 1;
                    state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                    state.num_idle -= 1;
                }
            }
        }
    }
}

impl GuardThreads {
    /// Runs `job` on a thread. If the system has no thread at all, the job is dropped.
    pub(super) fn run(&self, job: impl FnOnce() + Send + 'static) {
        let mut state = self.shared.lock();
        state.jobs.push_back(Box::new(job));
        if state.num_idle < state.jobs.len() && state.num_threads < MAX_THREADS {
            let shared = self.shared.clone();
            match std::thread::Builder::new().name("guard".into()).spawn(move || shared.work()) {
                Ok(_) => state.num_threads += 1,
                Err(_) if state.num_threads == 0 => drop(state.jobs.pop_back()),
                Err(_) => {}
            }
        }
        drop(state);
        self.shared.changed.notify_one();
    }
}

impl Drop for GuardThreads {
    fn drop(&mut self) {
        self.shared.lock().is_closed = true;
        self.shared.changed.notify_all();
    }
}

/// The result of a job, for an async task; `None` if the job was dropped.
#[derive(Debug)]
pub(super) struct Promise<T> {
    slot: Arc<Mutex<Slot<T>>>,
}

/// The job's end of a [`Promise`].
#[derive(Debug)]
pub(super) struct Fulfil<T> {
    slot: Arc<Mutex<Slot<T>>>,
}

#[derive(Debug)]
struct Slot<T> {
    value: Option<T>,
    is_over: bool,
    waker: Option<Waker>,
}

/// Returns both ends of a promise.
pub(super) fn promise<T>() -> (Fulfil<T>, Promise<T>) {
    let slot = Arc::new(Mutex::new(Slot { value: None, is_over: false, waker: None }));
    (Fulfil { slot: slot.clone() }, Promise { slot })
}

impl<T> Fulfil<T> {
    pub(super) fn set(self, value: T) {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner).value = Some(value);
    }
}

impl<T> Drop for Fulfil<T> {
    fn drop(&mut self) {
        let waker = {
            let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
            slot.is_over = true;
            slot.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl<T> Future for Promise<T> {
    type Output = Option<T>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<T>> {
        let mut slot = self.slot.lock().unwrap_or_else(PoisonError::into_inner);
        if slot.is_over {
            return Poll::Ready(slot.value.take());
        }
        slot.waker = Some(context.waker().clone());
        Poll::Pending
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn jobs_run_beside_each_other_and_a_panic_ends_one() {
        let threads = GuardThreads::default();
        let (done, all) = channel();
        let (first, second) = (channel::<()>(), channel::<()>());
        // Each of the two waits for the other.
        let (mine, yours, report) = (first.0, second.1, done.clone());
        threads.run(move || {
            mine.send(()).unwrap();
            yours.recv().unwrap();
            report.send(1).unwrap();
        });
        let (mine, yours) = (second.0, first.1);
        threads.run(move || {
            yours.recv().unwrap();
            mine.send(()).unwrap();
            done.send(2).unwrap();
        });
        let wait = Duration::from_secs(60);
        assert_eq!(all.recv_timeout(wait).unwrap() + all.recv_timeout(wait).unwrap(), 3);
        let (fulfil, promise) = promise::<()>();
        threads.run(move || {
            let _fulfil = fulfil;
            panic!("a guard panics");
        });
        while !promise.slot.lock().unwrap().is_over {
            std::thread::yield_now();
        }
        assert!(promise.slot.lock().unwrap().value.is_none());
    }
}
