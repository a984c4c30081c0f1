//! Bounds of one rendering: work, memory held at one time, depth of recursion; and the flag that cancels it.
//!
//! Everything that takes time charges work before it is done, everything that allocates holds bytes before it
//! allocates. So a template ends with an error, whatever it computes, and never with the process.

use std::cell::Cell;
use std::fmt;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::failure::{Failure, Kind, Outcome};

/// Maximum depth of evaluation: statements, expressions and macros within each other. One level takes at most
/// 1.3 KB of stack (`the_deepest_recursion_fits_a_small_stack`).
const MAX_DEPTH: u32 = 500;
/// Work units between two looks at the cancel flag: well below a millisecond.
const POLL_INTERVAL: u64 = 4096;
/// Bytes that are copied, compared or searched for one unit of work.
const BYTES_PER_UNIT: usize = 16;

/// Grants memory for a rendering beyond 64 KiB. It is called with all bytes that the rendering is to hold, rounded up
/// to 256 KiB; `false` ends the rendering with [`crate::Error::OutOfMemory`].
#[derive(Clone)]
pub struct MemoryGrant(pub Arc<dyn Fn(usize) -> bool + Send + Sync>);

impl fmt::Debug for MemoryGrant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("MemoryGrant")
    }
}

/// Bytes that a rendering may hold before it asks for memory.
const FREE_BYTES: usize = 64 << 10;
/// Bytes are granted in multiples of this.
const GRANT_BYTES: usize = 256 << 10;

/// Bounds of one rendering.
#[derive(Debug, Clone, Copy)]
pub struct RenderLimits<'c> {
    /// Maximum units of work: one for each evaluated node of the template, and one for every 16 bytes of text that
    /// are copied, compared or searched. A unit takes 20 to 70 ns.
    pub max_work: u64,
    /// Maximum bytes of strings, lists and dictionaries that are held at one time, the conversation and the rendered
    /// text included.
    pub max_bytes: usize,
    /// Ends the rendering with an error once it is set.
    pub cancel: Option<&'c AtomicBool>,
    /// Grants the memory up to `max_bytes`; `None` grants everything.
    pub grant: Option<&'c MemoryGrant>,
}

impl RenderLimits<'_> {
    /// Returns the usual limits for a conversation of `num_bytes` bytes: one or two seconds of work, and memory for
    /// several copies of the conversation.
    pub fn for_size(num_bytes: usize) -> RenderLimits<'static> {
        RenderLimits { max_work: 24_000_000, max_bytes: (32 << 20) + 12 * num_bytes, cancel: None, grant: None }
    }
}

/// Bytes that values hold; shared by all of them.
pub(super) struct Meter {
    held: Cell<usize>,
    limit: usize,
    /// Bytes that may be held without a further grant.
    granted: Cell<usize>,
    grant: Option<MemoryGrant>,
}

impl Meter {
    /// Takes memory until `total` bytes are held.
    fn hold(&self, total: usize) -> Outcome<()> {
        if total > self.limit {
            return Err(Failure::new(Kind::TooLarge { limit: self.limit }));
        }
        if let Some(MemoryGrant(grant)) = self.grant.as_ref().filter(|_| total > self.granted.get()) {
            let granted = total.next_multiple_of(GRANT_BYTES);
            if !grant(granted) {
                return Err(Failure::out_of_memory(total));
            }
            self.granted.set(granted);
        }
        self.held.set(total);
        Ok(())
    }
}

/// Bytes that one value holds, released when it is dropped.
pub(super) struct Held {
    meter: Rc<Meter>,
    bytes: usize,
}

impl Held {
    pub(super) fn grow_to(&mut self, bytes: usize) -> Outcome<()> {
        let more = bytes.saturating_sub(self.bytes);
        self.meter.hold(self.meter.held.get().saturating_add(more))?;
        self.bytes += more;
        Ok(())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.meter.held.set(self.meter.held.get() - self.bytes);
    }
}

/// Makes room for `more` values; fails if the system has no memory for them.
pub(super) fn reserve_exact<T>(values: &mut Vec<T>, more: usize) -> Outcome<()> {
    let reserved = values.try_reserve_exact(more);
    reserved.map_err(|_| Failure::out_of_memory(more.saturating_mul(size_of::<T>())))
}

/// Returns an empty list with room for `capacity` values.
pub(super) fn with_capacity<T>(capacity: usize) -> Outcome<Vec<T>> {
    let mut values = Vec::new();
    reserve_exact(&mut values, capacity)?;
    Ok(values)
}

/// Adds a value; fails if the system has no memory for it.
pub(super) fn push<T>(values: &mut Vec<T>, value: T) -> Outcome<()> {
    if values.len() == values.capacity() {
        values.try_reserve(1).map_err(|_| Failure::out_of_memory(size_of_val(&**values).max(size_of::<T>())))?;
    }
    values.push(value);
    Ok(())
}

/// Collects values; fails with the first that is an error, or if the system has no memory for them.
pub(super) fn try_collect<T>(from: impl Iterator<Item = Outcome<T>>) -> Outcome<Vec<T>> {
    let mut values = with_capacity(from.size_hint().0)?;
    for value in from {
        push(&mut values, value?)?;
    }
    Ok(values)
}

/// Collects values; fails if the system has no memory for them.
pub(super) fn collect<T>(from: impl Iterator<Item = T>) -> Outcome<Vec<T>> {
    try_collect(from.map(Ok))
}

pub(super) struct Budget<'c> {
    work_left: Cell<u64>,
    next_poll: Cell<u64>,
    depth: Cell<u32>,
    limits: RenderLimits<'c>,
    meter: Rc<Meter>,
}

impl<'c> Budget<'c> {
    pub(super) fn new(limits: RenderLimits<'c>) -> Budget<'c> {
        Budget {
            work_left: Cell::new(limits.max_work),
            next_poll: Cell::new(limits.max_work),
            depth: Cell::new(0),
            limits,
            meter: Rc::new(Meter {
                held: Cell::new(0),
                limit: limits.max_bytes,
                granted: Cell::new(FREE_BYTES),
                grant: limits.grant.cloned(),
            }),
        }
    }

    /// Returns the units of work so far.
    pub(super) fn work(&self) -> u64 {
        self.limits.max_work - self.work_left.get()
    }

    /// Takes units of work.
    pub(super) fn charge(&self, units: usize) -> Outcome<()> {
        let Some(left) = self.work_left.get().checked_sub(units as u64) else {
            return Err(Failure::new(Kind::TooSlow { limit: self.limits.max_work }));
        };
        self.work_left.set(left);
        if left <= self.next_poll.get() {
            self.next_poll.set(left.saturating_sub(POLL_INTERVAL));
            if self.limits.cancel.is_some_and(|cancel| cancel.load(Ordering::Relaxed)) {
                return Err(Failure::new(Kind::Cancelled));
            }
        }
        Ok(())
    }

    /// Takes the work of reading or writing bytes.
    pub(super) fn charge_bytes(&self, num_bytes: usize) -> Outcome<()> {
        self.charge(num_bytes / BYTES_PER_UNIT + 1)
    }

    /// Takes the work of making a list of `count` values.
    pub(super) fn charge_items(&self, count: usize) -> Outcome<()> {
        self.charge(count.saturating_add(1))
    }

    pub(super) fn hold(&self, bytes: usize) -> Outcome<Held> {
        let mut held = Held { meter: Rc::clone(&self.meter), bytes: 0 };
        held.grow_to(bytes)?;
        Ok(held)
    }

    /// Enters one level of recursion; every successful call is followed by [`Budget::leave`].
    pub(super) fn enter(&self) -> Outcome<()> {
        self.charge(1)?;
        if self.depth.get() >= MAX_DEPTH {
            return Err(Failure::error(format!("macros and expressions nest deeper than {MAX_DEPTH} levels")));
        }
        self.depth.set(self.depth.get() + 1);
        Ok(())
    }

    pub(super) fn leave(&self) {
        self.depth.set(self.depth.get() - 1);
    }
}
