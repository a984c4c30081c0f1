//! Fills a step with rows, by their predicted cost. [`TimeShare`](super::TimeShare) decides whose rows, and for how
//! long.

use super::{Pending, StepCosts, Work};

/// Rows that CPUs and GPUs compute together. A chunk that is cut ends where a group of rows is full.
const TILE: usize = 16;
/// A chunk of a prompt may be cut if it costs at least this multiple of its overhead. Fewer would cost the tenant more
/// than the margin; more would make the other tenants wait longer at a time.
const MIN_OVERHEADS: f64 = 16.0;

/// A step while it is filled.
pub(super) struct Fill<'a> {
    pending: &'a [Pending],
    wanted: &'a [usize],
    costs: &'a StepCosts,
    /// Number of tokens that each sequence computes.
    pub(super) given: Vec<usize>,
    pub(super) work: Work,
}

impl<'a> Fill<'a> {
    /// Returns an empty step.
    pub(super) fn new(pending: &'a [Pending], wanted: &'a [usize], costs: &'a StepCosts) -> Fill<'a> {
        Fill { pending, wanted, costs, given: vec![0; pending.len()], work: Work::default() }
    }

    pub(super) fn take(&mut self, i: usize, num_rows: usize) {
        self.given[i] += num_rows;
        if num_rows > 0 {
            self.work += Work::chunk(self.pending[i].depth, num_rows);
        }
    }

    /// Returns the time by which a chunk lengthens the step.
    fn cost(&self, i: usize, num_rows: usize) -> f64 {
        let more = if num_rows > 0 { Work::chunk(self.pending[i].depth, num_rows) } else { Work::default() };
        self.costs.predict(self.work.and(more)) - self.costs.predict(self.work)
    }

    /// Returns the time of the shortest chunk whose overhead is small, or of the whole chunk if that is less.
    pub(super) fn least_chunk_cost(&self, i: usize, num_overheads: f64) -> f64 {
        let (one, all) = (self.cost(i, 1), self.cost(i, self.wanted[i]));
        let per_row = (all - one) / (self.wanted[i].max(2) - 1) as f64;
        all.min(one + num_overheads * (one - per_row).max(0.0))
    }

    /// Returns the largest number of rows of a sequence that lengthen the step by at most `seconds`.
    pub(super) fn rows_within(&self, i: usize, seconds: f64) -> usize {
        let (mut low, mut high) = (0, self.wanted[i]);
        while low < high {
            let middle = (low + high).div_ceil(2);
            if self.cost(i, middle) <= seconds { low = middle } else { high = middle - 1 }
        }
        low
    }

    /// Shortens a chunk that does not compute all that is wanted, so that the step has whole tiles, unless that would
    /// be less than half.
    fn whole_tiles(&self, i: usize, num_rows: usize) -> usize {
        let rest = (self.work.num_rows + num_rows) % TILE;
        if num_rows < self.wanted[i] && 2 * rest <= num_rows { num_rows - rest } else { num_rows }
    }

    /// Takes the next rows of replies in `order`, those of one request at least, while the step takes at most `limit`.
    pub(super) fn take_decode(&mut self, order: &[usize], limit: f64) {
        let mut rest = order;
        while let Some((&head, tail)) = rest.split_first() {
            let num_joined = tail.iter().take_while(|&&i| self.pending[i].joins_previous).count();
            let (group, tail) = (&rest[..=num_joined], &tail[num_joined..]);
            let mut work = self.work;
            group.iter().for_each(|&i| work += Work::chunk(self.pending[i].depth, 1));
            if head != order[0] && self.costs.predict(work) > limit {
                return;
            }
            group.iter().for_each(|&i| self.take(i, self.wanted[i]));
            rest = tail;
        }
    }

    /// Serves the sequences of a tenant in `order`. Together they may cost `part`; the first may cost `first`. Returns
    /// the time to save for a sequence or a tile that did not fit, or 0.
    pub(super) fn serve(&mut self, order: &[usize], part: f64, first: f64) -> f64 {
        let start = self.costs.predict(self.work);
        let mut rest = order;
        while let Some((&head, tail)) = rest.split_first() {
            let num_joined = tail.iter().take_while(|&&i| self.pending[i].joins_previous).count();
            let (joined, tail) = tail.split_at(num_joined);
            let spent = self.costs.predict(self.work) - start;
            let left = if spent > 0.0 { part - spent } else { first };
            if self.pending[head].is_decode {
                let mut work = self.work;
                [&[head], joined].concat().iter().for_each(|&i| work += Work::chunk(self.pending[i].depth, 1));
                let cost = self.costs.predict(work) - self.costs.predict(self.work);
                if cost > left {
                    return cost;
                }
                [&[head], joined].concat().iter().for_each(|&i| self.take(i, self.wanted[i]));
            } else {
                let needed = self.least_chunk_cost(head, MIN_OVERHEADS);
                if needed > left {
                    return needed;
                }
                let num_rows = self.whole_tiles(head, self.rows_within(head, left).max(1));
                self.take(head, num_rows);
                let num_left = self.wanted[head] - num_rows;
                if num_left > 0 {
                    // The part of its time that is too short for a further tile is not lost.
                    return self.cost(head, TILE.min(num_left));
                }
            }
            rest = tail;
        }
        0.0
    }
}
