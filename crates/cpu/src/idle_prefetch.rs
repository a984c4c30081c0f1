//! What will be read soon: threads that wait for each other bring it into their second-level caches.
//!
//! Between two products of a step one thread works by itself (norms, quantizing, rotating) while the others wait, and each product
//! begins with memory that nobody has asked for. The products of a step are the same ones in the same order as those of the step before,
//! so it is known where threads will begin to read next.

use crate::pool::{Direction, share};

/// Bytes that a thread fetches at most: a small part of a second-level cache of 1 or 2 MB.
const MAX_BYTES: usize = 192 * 1024;

/// Weights that are read by one job at most.
pub(crate) const MAX_WEIGHTS: usize = 4;

/// Panels that are read side by side at most.
const SIDE_BY_SIDE: usize = 4;

/// One of the weights that a job goes through: panels after each other.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WeightPanels {
    pub(crate) address: usize,
    pub(crate) panel_bytes: usize,
    pub(crate) num_panels: usize,
}

/// What a job goes through: weights one after the other, so many panels a task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NextWeights {
    pub(crate) weights: [WeightPanels; MAX_WEIGHTS],
    pub(crate) per_task: usize,
}

impl NextWeights {
    /// How one of so many threads will begin to read: [`share`] says where.
    pub(crate) fn path(&self, thread: usize, num_threads: usize) -> PrefetchPath {
        let total: usize = self.weights.iter().map(|weight| weight.num_panels).sum();
        if total == 0 {
            return PrefetchPath::default();
        }
        let (tasks, direction) = share(total.div_ceil(self.per_task), thread, num_threads);
        let panels = tasks.start * self.per_task..total.min(tasks.end * self.per_task);
        if panels.is_empty() {
            return PrefetchPath::default();
        }
        let mut first = if direction == Direction::Up { panels.start } else { panels.end - 1 };
        for weight in self.weights {
            if first < weight.num_panels {
                // Two threads meet in the middle.
                return weight.path(first, direction, self.per_task.min(SIDE_BY_SIDE), panels.len() / 2);
            }
            first -= weight.num_panels;
        }
        PrefetchPath::default()
    }
}

impl WeightPanels {
    /// From one panel on, so many side by side, at most so many in all.
    fn path(self, first: usize, direction: Direction, streams: usize, most: usize) -> PrefetchPath {
        let WeightPanels { address, panel_bytes, num_panels } = self;
        let (here, group) = match direction {
            Direction::Up => (num_panels - first, first),
            Direction::Down => (first + 1, (first + 1).saturating_sub(streams)),
        };
        let group_bytes = streams * panel_bytes;
        let groups = (MAX_BYTES / group_bytes.max(1)).min(most.min(here) / streams);
        let step = if direction == Direction::Up { group_bytes as isize } else { -(group_bytes as isize) };
        PrefetchPath { group: address + group * panel_bytes, step, groups, streams, stretch: panel_bytes, done: 0 }
    }
}

/// A way through memory, in groups of stretches that are read side by side.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PrefetchPath {
    /// Address of the group, and the distance to the next one.
    group: usize,
    step: isize,
    groups: usize,
    /// Stretches of a group, and the bytes of each.
    streams: usize,
    stretch: usize,
    /// Bytes of each stretch that have been asked for.
    done: usize,
}

impl PrefetchPath {
    /// Asks for the next lines, one of each stretch of a group; false when there are none.
    #[inline]
    pub(crate) fn fetch(&mut self) -> bool {
        if self.groups == 0 {
            return false;
        }
        for stream in 0..self.streams {
            prefetch(self.group + stream * self.stretch + self.done);
        }
        self.done += 64;
        if self.done >= self.stretch {
            (self.group, self.groups, self.done) = (self.group.wrapping_add_signed(self.step), self.groups - 1, 0);
        }
        true
    }
}

#[inline(always)]
fn prefetch(address: usize) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch may go anywhere, and every processor of this family has it.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T1>(std::ptr::without_provenance(address));
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = address;
}

/// What was read after each thing the last time. A table with a place for each, found at once: where two things share one, the later has it.
#[derive(Debug)]
pub(crate) struct ProductHistory {
    /// The address of a thing, and what came after it.
    places: Box<[(usize, NextWeights); ProductHistory::PLACES]>,
    last: usize,
}

impl Default for ProductHistory {
    fn default() -> Self {
        ProductHistory { places: Box::new([(0, NextWeights::default()); ProductHistory::PLACES]), last: 0 }
    }
}

impl ProductHistory {
    const PLACES: usize = 1024;

    /// Notes what is read now; gives what was read after it the last time, or nothing.
    pub(crate) fn record(&mut self, now: NextWeights) -> NextWeights {
        let address = now.weights[0].address;
        self.places[Self::place(self.last)] = (self.last, now);
        self.last = address;
        let (of, next) = self.places[Self::place(address)];
        if of == address { next } else { NextWeights::default() }
    }

    /// Things are many lines apart: their numbers in lines, spread out.
    fn place(address: usize) -> usize {
        ((address as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn next_weights(address: usize, num_panels: usize, per_task: usize) -> NextWeights {
        let mut next_weights = NextWeights { per_task, ..NextWeights::default() };
        next_weights.weights[0] = WeightPanels { address, panel_bytes: 128, num_panels };
        next_weights
    }

    #[test]
    fn what_came_after_comes_after() {
        let next_weights = |i: usize| next_weights(4096 * (i + 1), 8, 1);
        let mut order = ProductHistory::default();
        for i in [0, 1, 2, 3] {
            order.record(next_weights(i));
        }
        assert_eq!([0, 1, 2, 3, 0].map(|i| order.record(next_weights(i))), [1, 2, 3, 0, 1].map(next_weights));
        assert_eq!(
            [2, 3, 2].map(|i| order.record(next_weights(i))),
            [3, 0, 3].map(next_weights),
            "whatever came before"
        );
    }

    #[test]
    fn a_thread_takes_half_of_what_it_shares_from_its_end() {
        const START: usize = 1 << 20;
        let mut next_weights = next_weights(START, 10, 2);
        let count = |next_weights: NextWeights, thread: usize, num_threads: usize| {
            let mut path = next_weights.path(thread, num_threads);
            (path.group.saturating_sub(START) / 128, (0..).take_while(|_| path.fetch()).count())
        };
        // Five panels are two groups of two; a panel is two lines.
        assert_eq!([count(next_weights, 0, 2), count(next_weights, 1, 2)], [(0, 4), (8, 4)]);
        // Five tasks for four threads: two for the first pair, three for the second.
        assert_eq!([0, 1, 2, 3].map(|i| count(next_weights, i, 4)), [(0, 2), (2, 2), (4, 2), (8, 2)]);
        // What a thread begins with ends where its weight does.
        next_weights.weights[1] = WeightPanels { address: START + (1 << 16), panel_bytes: 128, num_panels: 2 };
        assert_eq!([count(next_weights, 0, 2), count(next_weights, 1, 2)], [(0, 6), (512, 2)]);
        assert_eq!(NextWeights::default().path(0, 2), PrefetchPath::default());
    }
}
