//! [`State`]: the result of a span for each query: its largest score, the sum of its weights, and the weighted sum of
//! values.

use super::lanes::{LANES, Lanes};

/// The states of several queries in one slice: rows of values in whole vectors, then all largest scores, then all sums.
pub(super) struct State<'a> {
    pub(super) largest: &'a mut [f32],
    pub(super) sums: &'a mut [f32],
    pub(super) values: &'a mut [f32],
}

impl<'a> State<'a> {
    /// Floats in the states of `num_queries` queries: whole vectors.
    pub(super) fn len(num_queries: usize, head_size: usize) -> usize {
        (num_queries * (2 + head_size.next_multiple_of(LANES))).next_multiple_of(LANES)
    }

    /// Reads a slice of [`State::len`] floats as states.
    pub(super) fn of(slice: &'a mut [f32], num_queries: usize, head_size: usize) -> Self {
        let (values, rest) = slice.split_at_mut(num_queries * head_size.next_multiple_of(LANES));
        let (largest, sums) = rest[..2 * num_queries].split_at_mut(num_queries);
        State { largest, sums, values }
    }

    /// Sets the state of no visible position.
    pub(super) fn clear(&mut self) {
        self.largest.fill(f32::NEG_INFINITY);
        self.sums.fill(0.0);
        self.values.fill(0.0);
    }

    /// Length of a row of `values`.
    pub(super) fn stride(&self) -> usize {
        self.values.len() / self.sums.len()
    }

    /// Adds the state of the next span, after rescaling both to the larger of their largest scores.
    #[inline(always)]
    pub(super) fn join<L: Lanes>(&mut self, lanes: L, next: &State<'_>) {
        let stride = self.stride();
        assert!(next.sums.len() == self.sums.len() && next.stride() == stride && stride.is_multiple_of(LANES));
        for i in 0..self.sums.len() {
            // The largest score has a weight of one, so the sum of a span is zero only if no position of it is visible.
            if next.sums[i] == 0.0 {
                continue;
            }
            let row = i * stride..(i + 1) * stride;
            if self.sums[i] == 0.0 {
                (self.largest[i], self.sums[i]) = (next.largest[i], next.sums[i]);
                self.values[row.clone()].copy_from_slice(&next.values[row]);
                continue;
            }
            let largest = self.largest[i].max(next.largest[i]);
            let ours = lanes.exp(lanes.splat(self.largest[i] - largest));
            let theirs = lanes.exp(lanes.splat(next.largest[i] - largest));
            self.largest[i] = largest;
            self.sums[i] = self.sums[i] * lanes.to_array(ours)[0] + next.sums[i] * lanes.to_array(theirs)[0];
            for at in row.step_by(LANES) {
                // SAFETY: by the assertion, rows of both are the same whole vectors.
                unsafe {
                    let (sum, add) = (lanes.load(self.values[at..].as_ptr()), lanes.load(next.values[at..].as_ptr()));
                    let joined = lanes.multiply_add(add, theirs, lanes.multiply(sum, ours));
                    lanes.store(joined, self.values[at..].as_mut_ptr());
                }
            }
        }
    }
}
