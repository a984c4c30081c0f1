//! Prefetching the weights of the next product by threads that would otherwise wait.
//!
//! Between two products of a step one thread works alone (norms, quantizing, rotating) while the others wait, and each
//! product begins with weights that are in no cache. The products of a step are the same, in the same order, as those
//! of the step before, so the weights that come next are known. Waiting threads prefetch the part that they will read
//! first into their second-level caches.

use crate::pool::{Direction, share};
use crate::simd::prefetch_to_l2;

/// Maximum number of bytes that a thread prefetches: a small part of a second-level cache of 1 or 2 MB.
const MAX_BYTES: usize = 192 * 1024;

/// Maximum number of weights that one job reads.
pub(crate) const MAX_WEIGHTS: usize = 4;

/// Maximum number of panels that kernels read at the same time.
const MAX_STREAMS: usize = 4;

/// One of the weights that a job reads: panels, one after the other in memory.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct WeightPanels {
    pub(crate) address: usize,
    pub(crate) panel_bytes: usize,
    pub(crate) num_panels: usize,
}

/// The weights that a job reads, one after the other, `per_task` panels in each task.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct NextWeights {
    pub(crate) weights: [WeightPanels; MAX_WEIGHTS],
    pub(crate) per_task: usize,
}

impl NextWeights {
    /// Returns the memory that a thread will read first: that of the task which [`share`] gives it first.
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
                // Half of the panels, because two threads share them and meet in the middle.
                return weight.path(first, direction, self.per_task.min(MAX_STREAMS), panels.len() / 2);
            }
            first -= weight.num_panels;
        }
        PrefetchPath::default()
    }
}

impl WeightPanels {
    /// A path from panel `first` on, `streams` panels at a time, at most `max_panels` in all.
    fn path(self, first: usize, direction: Direction, streams: usize, max_panels: usize) -> PrefetchPath {
        let WeightPanels { address, panel_bytes, num_panels } = self;
        let (available, group) = match direction {
            Direction::Up => (num_panels - first, first),
            Direction::Down => (first + 1, (first + 1).saturating_sub(streams)),
        };
        let group_bytes = streams * panel_bytes;
        let num_groups = (MAX_BYTES / group_bytes.max(1)).min(max_panels.min(available) / streams);
        let step = if direction == Direction::Up { group_bytes as isize } else { -(group_bytes as isize) };
        PrefetchPath { group: address + group * panel_bytes, step, num_groups, streams, panel_bytes, done: 0 }
    }
}

/// Memory to prefetch: groups of panels, whose panels are prefetched line by line in turns.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PrefetchPath {
    /// Address of the current group, and the distance to the next one.
    group: usize,
    step: isize,
    /// Groups that are left, including the current one.
    num_groups: usize,
    /// Panels of a group.
    streams: usize,
    panel_bytes: usize,
    /// Bytes of each panel of the group that have been prefetched.
    done: usize,
}

impl PrefetchPath {
    /// Prefetches the next cache line of each panel of the group. Returns false when nothing is left.
    #[inline]
    pub(crate) fn fetch(&mut self) -> bool {
        if self.num_groups == 0 {
            return false;
        }
        for stream in 0..self.streams {
            prefetch_to_l2(std::ptr::without_provenance(self.group + stream * self.panel_bytes + self.done));
        }
        self.done += 64;
        if self.done >= self.panel_bytes {
            self.group = self.group.wrapping_add_signed(self.step);
            (self.num_groups, self.done) = (self.num_groups - 1, 0);
        }
        true
    }
}

/// Remembers which weights followed which, to predict those of the next product.
///
/// A hash table without chains: when two weights have the same slot, the later one overwrites the earlier.
#[derive(Debug)]
pub(crate) struct ProductHistory {
    /// The address of a weight, and the weights that followed it.
    slots: Box<[(usize, NextWeights); ProductHistory::SLOTS]>,
    last: usize,
}

impl Default for ProductHistory {
    fn default() -> Self {
        ProductHistory { slots: Box::new([(0, NextWeights::default()); ProductHistory::SLOTS]), last: 0 }
    }
}

impl ProductHistory {
    const SLOTS: usize = 1024;

    /// Records the weights of the current product; returns those that followed it the last time, or none.
    pub(crate) fn record(&mut self, now: NextWeights) -> NextWeights {
        let address = now.weights[0].address;
        self.slots[Self::slot(self.last)] = (self.last, now);
        self.last = address;
        let (key, next) = self.slots[Self::slot(address)];
        if key == address { next } else { NextWeights::default() }
    }

    /// The upper ten bits of a multiplicative hash of the cache line's number.
    fn slot(address: usize) -> usize {
        ((address as u64 >> 6).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 54) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn weights(address: usize, num_panels: usize, per_task: usize) -> NextWeights {
        let mut weights = NextWeights { per_task, ..NextWeights::default() };
        weights.weights[0] = WeightPanels { address, panel_bytes: 128, num_panels };
        weights
    }

    #[test]
    fn the_history_predicts_what_followed_last_time() {
        let weights = |i: usize| weights(4096 * (i + 1), 8, 1);
        let mut history = ProductHistory::default();
        for i in [0, 1, 2, 3] {
            history.record(weights(i));
        }
        assert_eq!([0, 1, 2, 3, 0].map(|i| history.record(weights(i))), [1, 2, 3, 0, 1].map(weights));
        assert_eq!([2, 3, 2].map(|i| history.record(weights(i))), [3, 0, 3].map(weights), "whatever came before");
    }

    #[test]
    fn a_thread_prefetches_half_of_what_its_pair_shares() {
        const START: usize = 1 << 20;
        let mut weights = weights(START, 10, 2);
        let count = |weights: NextWeights, thread: usize, num_threads: usize| {
            let mut path = weights.path(thread, num_threads);
            (path.group.saturating_sub(START) / 128, (0..).take_while(|_| path.fetch()).count())
        };
        // Half of ten panels is two groups of two; a panel is two lines.
        assert_eq!([count(weights, 0, 2), count(weights, 1, 2)], [(0, 4), (8, 4)]);
        // Five tasks for four threads: two for the first pair, three for the second.
        assert_eq!([0, 1, 2, 3].map(|i| count(weights, i, 4)), [(0, 2), (2, 2), (4, 2), (8, 2)]);
        // A path ends where its weight ends.
        weights.weights[1] = WeightPanels { address: START + (1 << 16), panel_bytes: 128, num_panels: 2 };
        assert_eq!([count(weights, 0, 2), count(weights, 1, 2)], [(0, 6), (512, 2)]);
        assert_eq!(NextWeights::default().path(0, 2), PrefetchPath::default());
    }
}
