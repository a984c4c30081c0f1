//! [`InputRows`]: the rows of x. They may still have to be computed; the thread that reads a row first does it, while
//! the row is in its cache.

use std::ops::Range;

use crate::pool::Pool;
use crate::shared_slice::SharedSlice;

/// Rows of x, `depth` values each.
#[derive(Clone, Copy)]
pub(crate) struct InputRows<'a> {
    values: SharedSlice<'a, f32>,
    depth: usize,
    num_rows: usize,
    /// Writes some rows of `values`; `None` when all of them are written.
    compute: Option<&'a (dyn Fn(Range<usize>) + Sync)>,
}

impl<'a> InputRows<'a> {
    pub(crate) fn rows(x: &'a [f32], depth: usize) -> Self {
        InputRows { values: SharedSlice::read_only(x), depth, num_rows: x.len() / depth, compute: None }
    }

    /// Rows of `x` that `compute` writes, each once.
    ///
    /// # Safety
    /// `compute` writes the rows that it is called for and no others, and nothing else uses `x` before every row is
    /// written.
    pub(crate) unsafe fn computed(
        x: SharedSlice<'a, f32>,
        depth: usize,
        num_rows: usize,
        compute: &'a (dyn Fn(Range<usize>) + Sync),
    ) -> Self {
        InputRows { values: x, depth, num_rows, compute: Some(compute) }
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Returns some rows, computing them first if they are not computed yet.
    ///
    /// # Safety
    /// No row that is not computed yet is taken twice.
    #[inline(always)]
    pub(super) unsafe fn take(&self, rows: Range<usize>) -> &[f32] {
        if let Some(compute) = self.compute {
            compute(rows.clone());
        }
        // SAFETY: `compute` has written these rows, and is not called for them again.
        unsafe { self.values.read(rows.start * self.depth, rows.len() * self.depth) }
    }

    /// The same rows, marked as computed.
    ///
    /// # Safety
    /// Every row was taken, and no thread computes one any more.
    pub(super) unsafe fn taken(self) -> Self {
        InputRows { compute: None, ..self }
    }

    /// Computes all rows on all threads, unless they are computed already.
    pub(crate) fn ready(self, pool: &Pool) -> Self {
        const ROWS: usize = 8;
        if let Some(compute) = self.compute {
            let rows = |task: usize| task * ROWS..self.num_rows.min((task + 1) * ROWS);
            pool.run(self.num_rows.div_ceil(ROWS), &|task| compute(rows(task)));
        }
        // SAFETY: `run` has returned, so all rows are written.
        unsafe { self.taken() }
    }

    /// All rows.
    ///
    /// # Panics
    /// When they are not computed yet.
    pub(super) fn all(&self) -> &'a [f32] {
        assert!(self.compute.is_none(), "the rows of x are computed before they are read as a whole");
        // SAFETY: all rows are written, and nothing writes them again while they are borrowed.
        unsafe { self.values.read(0, self.num_rows * self.depth) }
    }
}
