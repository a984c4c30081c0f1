//! Work that takes long, such as encoding a long text: on threads of its own, at a lower priority than the engine's
//! threads, and cancelled when the client disconnects.

use std::cell::{Cell, RefCell};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::error::{ApiError, RETRY_SOON_S};

/// Maximum threads for such work. With at least two, none of several tenants can occupy all of them.
const MAX_THREADS: usize = 8;
/// Niceness of these threads above that of the process. The Linux kernel then gives them about a tenth of the time of a
/// thread of the engine that wants the same core.
const NICENESS: i32 = 10;
/// Maximum niceness on Linux.
#[cfg(target_os = "linux")]
const MAX_NICENESS: i32 = 19;

/// Returns the number of threads for such work on a machine with `num_cores`: fewer than the cores, which the engine
/// keeps busy, but at least two.
pub(crate) fn num_threads(num_cores: usize) -> usize {
    num_cores.saturating_sub(1).clamp(2, MAX_THREADS)
}

/// Tells work that its result is not needed any more. Clones share one flag.
#[derive(Debug, Clone, Default)]
pub(crate) struct Cancel(Arc<AtomicBool>);

impl Cancel {
    /// Whether the client has disconnected.
    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }

    /// Returns the flag itself.
    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.0
    }

    /// Returns an error if the client has disconnected.
    pub(crate) fn check(&self) -> Result<(), ApiError> {
        if self.is_set() { Err(disconnected()) } else { Ok(()) }
    }
}

thread_local!(static CURRENT: RefCell<Cancel> = RefCell::default());

/// Returns the flag of the work that runs on this thread; one that is never set if that is not work of [`run`].
pub(crate) fn current() -> Cancel {
    CURRENT.with_borrow(Cancel::clone)
}

/// Sets the flag when it is dropped.
struct CancelOnDrop(Cancel);

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

/// Runs `work` on a blocking thread. If the returned future is dropped, because the client has disconnected, the flag
/// that is passed to `work` is set; work that has not begun yet still runs, so that it releases what it owns.
pub(crate) async fn run<T: Send + 'static>(
    work: impl FnOnce(&Cancel) -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let cancel = Cancel::default();
    let _cancel_on_drop = CancelOnDrop(cancel.clone());
    let work = move || {
        lower_priority();
        CURRENT.set(cancel.clone());
        let outcome = work(&cancel);
        CURRENT.take();
        outcome
    };
    match tokio::task::spawn_blocking(work).await {
        Ok(outcome) => outcome,
        Err(error) if error.is_panic() => {
            tracing::error!(%error, "processing a request body panicked");
            Err(ApiError::internal())
        }
        Err(_) => Err(no_thread()),
    }
}

/// Returns the error of work whose client has disconnected. Nobody receives it.
pub(crate) fn disconnected() -> ApiError {
    ApiError::invalid("the client has disconnected")
}

/// Returns the error of work for which the system has no thread.
fn no_thread() -> ApiError {
    tracing::warn!("the system has no thread for a request");
    ApiError::unavailable("no_thread", "the server is short of threads; try again later", RETRY_SOON_S)
}

/// Lowers the priority of this thread, once. Threads that it starts inherit the priority.
fn lower_priority() {
    thread_local!(static IS_LOW: Cell<bool> = const { Cell::new(false) });
    if !IS_LOW.replace(true) {
        set_niceness();
    }
}

#[cfg(target_os = "linux")]
fn set_niceness() {
    // On Linux, `None` is the calling thread and not the whole process. The work is correct at any priority.
    let lowered = rustix::process::getpriority_process(None)
        .and_then(|now| rustix::process::setpriority_process(None, (now + NICENESS).min(MAX_NICENESS)));
    if let Err(error) = lowered {
        tracing::debug!(%error, "the priority of a blocking thread could not be lowered");
    }
}

#[cfg(not(target_os = "linux"))]
fn set_niceness() {
    let _ = NICENESS;
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_current_thread().enable_time().max_blocking_threads(1).build().unwrap()
    }

    #[test]
    fn work_is_cancelled_when_its_future_is_dropped() {
        runtime().block_on(async {
            let (started, has_started) = channel();
            let (cancelled, was_cancelled) = channel();
            let work = move |cancel: &Cancel| {
                started.send(()).unwrap();
                while !current().is_set() {
                    std::thread::yield_now();
                }
                cancelled.send(cancel.check().is_err()).unwrap();
                Ok(())
            };
            let task = tokio::spawn(run(work));
            tokio::task::yield_now().await;
            has_started.recv().unwrap();
            // Positive control: work whose client waits is not cancelled.
            assert!(was_cancelled.try_recv().is_err());
            task.abort();
            assert!(task.await.unwrap_err().is_cancelled());
            assert!(was_cancelled.recv().unwrap());
            assert_eq!(run(|cancel| cancel.check().map(|()| 5)).await, Ok(5));
        });
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn blocking_threads_have_a_low_priority() {
        let niceness = || rustix::process::getpriority_process(None).unwrap();
        let before = niceness();
        runtime().block_on(async {
            assert_eq!(run(move |_| Ok(niceness())).await, Ok((before + NICENESS).min(MAX_NICENESS)));
        });
        assert_eq!(niceness(), before, "other threads keep their priority");
    }

    #[test]
    fn a_shortage_is_not_the_clients_fault() {
        let error = no_thread();
        assert_eq!((error.status.as_u16(), error.retry_after_s), (503, Some(1)));
    }

    #[test]
    fn the_engine_keeps_its_cores() {
        assert_eq!([1, 2, 4, 8, 64].map(num_threads), [2, 2, 3, 7, 8]);
    }
}
