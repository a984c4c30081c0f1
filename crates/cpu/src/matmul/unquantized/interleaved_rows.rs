//! Rows of x, eight side by side.

use super::{UNIT, units};
use crate::matmul::input::InputRows;
use crate::memory::Buffer;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Simd, vectorized};

/// Rows that lie side by side.
pub(super) const GROUP: usize = 8;

/// Rows in groups of eight, of which number k lies side by side: what the rows of a group multiply by is then one stream through memory, where
/// rows as they are would share a few sets of the first-level cache. Rows of the last group that are not there are zeros.
///
/// `[unit][group][k of the unit][8]`: what all rows need at a time is one stretch.
#[derive(Debug, Default)]
pub(in crate::matmul) struct InterleavedRows {
    num_rows: usize,
    depth: usize,
    numbers: Buffer<f32>,
}

impl InterleavedRows {
    /// Interleaves rows; returns the rows, computed.
    pub(in crate::matmul) fn fill<'x, S: Simd>(&mut self, simd: S, pool: &Pool, x: InputRows<'x>) -> InputRows<'x> {
        (self.num_rows, self.depth) = (x.num_rows(), x.depth());
        let (num_rows, depth, num_groups) = (self.num_rows, self.depth, self.num_groups());
        let numbers = SharedSlice::new(self.numbers.grow(depth * num_groups * GROUP));
        pool.run(num_groups, &|group| {
            // SAFETY: every row is taken once.
            let rows = unsafe { x.take(group * GROUP..num_rows.min((group + 1) * GROUP)) };
            for unit in units(depth) {
                let start = (unit.start * num_groups + group * unit.len()) * GROUP;
                // SAFETY: this group's own place, by the layout above.
                let to = unsafe { numbers.part(start, unit.len() * GROUP) };
                lay_side_by_side(simd, rows, depth, unit.start, to);
            }
        });
        // SAFETY: each task took its own rows, and all tasks are done.
        unsafe { x.taken() }
    }

    pub(super) fn num_rows(&self) -> usize {
        self.num_rows
    }

    pub(super) fn num_groups(&self) -> usize {
        self.num_rows.div_ceil(GROUP)
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    /// A group's numbers of a unit, from the one that begins at `start`.
    pub(super) fn unit(&self, start: usize, group: usize) -> &[f32] {
        let len = UNIT.min(self.depth - start);
        &self.numbers[(start * self.num_groups() + group * len) * GROUP..][..len * GROUP]
    }
}

vectorized! {
    /// Numbers of up to eight rows, from number `start` of each on.
    fn lay_side_by_side<S: Simd>(rows: &[f32], depth: usize, start: usize, to: &mut [f32]) {
        for r in 0..GROUP {
            let to = to[r..].iter_mut().step_by(GROUP);
            match rows.chunks_exact(depth).nth(r) {
                Some(row) => to.zip(&row[start..]).for_each(|(to, x)| *to = *x),
                None => to.for_each(|to| *to = 0.0),
            }
        }
    }
}
