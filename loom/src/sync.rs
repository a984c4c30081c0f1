//! The atomics, threads and cells of the pool, from Loom: it runs a closure under every interleaving, with every value
//! that the memory model allows a load to return, and reports unsynchronized accesses of a cell.
//!
//! Loom treats sequentially consistent operations as weaker ones, but knows sequentially consistent fences. Such an
//! operation is therefore modelled as a fence and the operation, as compilers do it for processors with weak memory.

use loom::sync::atomic::fence;

pub(crate) use loom::hint::spin_loop;
pub(crate) use loom::sync::atomic::Ordering;
pub(crate) use loom::sync::{Arc, Mutex};
pub(crate) use loom::thread::{JoinHandle, park, yield_now};

/// One poll: a second one finds nothing that the first one cannot find at another time.
pub(crate) const SPINS_BEFORE_SLEEP: usize = 1;

pub(crate) fn spawn(_name: String, work: impl FnOnce() + Send + 'static) -> std::io::Result<JoinHandle<()>> {
    Ok(loom::thread::spawn(work))
}

/// Returns the ordering of the operation after the fence that `ordering` needs.
fn fenced(ordering: Ordering, weaker: Ordering) -> Ordering {
    if ordering != Ordering::SeqCst {
        return ordering;
    }
    fence(Ordering::SeqCst);
    weaker
}

macro_rules! atomic {
    ($name:ident, $type:ty) => {
        #[derive(Debug, Default)]
        pub(crate) struct $name(loom::sync::atomic::$name);

        #[allow(dead_code, reason = "the pool does not use every operation of every type")]
        impl $name {
            pub(crate) fn new(value: $type) -> Self {
                Self(loom::sync::atomic::$name::new(value))
            }

            pub(crate) fn load(&self, ordering: Ordering) -> $type {
                self.0.load(fenced(ordering, Ordering::Acquire))
            }

            pub(crate) fn store(&self, value: $type, ordering: Ordering) {
                self.0.store(value, fenced(ordering, Ordering::Release));
            }

            pub(crate) fn swap(&self, value: $type, ordering: Ordering) -> $type {
                self.0.swap(value, fenced(ordering, Ordering::AcqRel))
            }
        }
    };
}

macro_rules! counter {
    ($name:ident, $type:ty) => {
        atomic!($name, $type);

        #[allow(dead_code, reason = "the pool does not use every operation of every type")]
        impl $name {
            pub(crate) fn fetch_add(&self, value: $type, ordering: Ordering) -> $type {
                self.0.fetch_add(value, fenced(ordering, Ordering::AcqRel))
            }

            pub(crate) fn fetch_sub(&self, value: $type, ordering: Ordering) -> $type {
                self.0.fetch_sub(value, fenced(ordering, Ordering::AcqRel))
            }
        }
    };
}

atomic!(AtomicBool, bool);
counter!(AtomicU64, u64);
counter!(AtomicUsize, usize);

/// A value that threads share by a protocol of their own; Loom checks the protocol.
#[derive(Debug)]
pub(crate) struct SharedCell<T>(loom::cell::UnsafeCell<T>);

impl<T: Copy> SharedCell<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(loom::cell::UnsafeCell::new(value))
    }

    /// # Safety
    /// No thread writes the value at the same time.
    pub(crate) unsafe fn get(&self) -> T {
        // SAFETY: the caller's promise, which Loom checks.
        self.0.with(|value| unsafe { *value })
    }

    /// # Safety
    /// No thread reads or writes the value at the same time.
    pub(crate) unsafe fn set(&self, value: T) {
        // SAFETY: the caller's promise, which Loom checks.
        self.0.with_mut(|place| unsafe { *place = value });
    }
}
