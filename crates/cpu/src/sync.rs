//! The atomics, threads and cells of the pool. `loom/` compiles the pool with its own module of this name, in which
//! they are those of a model checker.

pub(crate) use std::hint::spin_loop;
pub(crate) use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
pub(crate) use std::sync::{Arc, Mutex};
pub(crate) use std::thread::{JoinHandle, park, yield_now};

/// Polls before a thread goes to sleep: around 50 microseconds, which is longer than the gap between two jobs of a step
/// and short enough not to disturb other programs.
pub(crate) const SPINS_BEFORE_SLEEP: usize = 2_000;

/// Starts a thread with a name.
pub(crate) fn spawn(name: String, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    std::thread::Builder::new().name(name).spawn(work)
}

/// A value that threads share by a protocol of their own.
#[derive(Debug, Default)]
pub(crate) struct SharedCell<T>(std::cell::UnsafeCell<T>);

impl<T: Copy> SharedCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(std::cell::UnsafeCell::new(value))
    }

    /// Reads the value.
    ///
    /// # Safety
    /// No thread writes it at the same time.
    pub(crate) unsafe fn get(&self) -> T {
        // SAFETY: the caller's promise.
        unsafe { *self.0.get() }
    }

    /// Writes the value.
    ///
    /// # Safety
    /// No thread reads or writes it at the same time.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: the caller's promise.
        unsafe { *self.0.get() = value }
    }
}
