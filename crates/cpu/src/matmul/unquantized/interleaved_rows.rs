//! [`InterleavedRows`]: rows of x in f32, eight of them interleaved.

use super::{UNIT, units};
use crate::matmul::input::InputRows;
use crate::memory::Buffer;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Simd, vectorized};

/// Rows that are interleaved.
pub(super) const GROUP: usize = 8;

/// Rows in groups of eight: values k of the rows of a group are adjacent. A group is then one stream of memory;
/// separate rows would share a few sets of the first-level cache. Rows that the last group lacks are zeros.
///
/// `[unit][group][k of the unit][8]`: the values of a unit are contiguous for all rows.
#[derive(Debug, Default)]
pub(in crate::matmul) struct InterleavedRows {
    num_rows: usize,
    depth: usize,
    values: Buffer<f32>,
}

impl InterleavedRows {
    /// Interleaves rows; returns the rows, computed.
    pub(in crate::matmul) fn fill<'x, S: Simd>(&mut self, simd: S, pool: &Pool, x: InputRows<'x>) -> InputRows<'x> {
        (self.num_rows, self.depth) = (x.num_rows(), x.depth());
        let (num_rows, depth, num_groups) = (self.num_rows, self.depth, self.num_groups());
        let values = SharedSlice::new(self.values.grow(depth * num_groups * GROUP));
        pool.run(num_groups, &|group| {
            // SAFETY: each task has its own rows.
            let rows = unsafe { x.take(group * GROUP..num_rows.min((group + 1) * GROUP)) };
            for unit in units(depth) {
                let start = (unit.start * num_groups + group * unit.len()) * GROUP;
                // SAFETY: by the layout above, only this group has these values.
                let to = unsafe { values.part(start, unit.len() * GROUP) };
                interleave(simd, rows, depth, unit.start, to);
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

    /// A group's values of the unit that begins at value `start`.
    pub(super) fn unit(&self, start: usize, group: usize) -> &[f32] {
        let len = UNIT.min(self.depth - start);
        &self.values[(start * self.num_groups() + group * len) * GROUP..][..len * GROUP]
    }
}

vectorized! {
    /// Interleaves values of up to eight rows, from value `start` of each on.
    fn interleave<S: Simd>(rows: &[f32], depth: usize, start: usize, to: &mut [f32]) {
        for r in 0..GROUP {
            let to = to[r..].iter_mut().step_by(GROUP);
            match rows.chunks_exact(depth).nth(r) {
                Some(row) => to.zip(&row[start..]).for_each(|(to, x)| *to = *x),
                None => to.for_each(|to| *to = 0.0),
            }
        }
    }
}
