//! The rows of x, which may still have to be computed: whoever reads them first does it, while they are in its cache.

use std::ops::Range;

use crate::memory::SharedSlice;
use crate::pool::Pool;

/// Rows of `depth` numbers.
#[derive(Clone, Copy)]
pub(crate) struct InputRows<'a> {
    numbers: SharedSlice<f32>,
    depth: usize,
    num_rows: usize,
    /// Computes some rows, in their place.
    compute: Option<&'a (dyn Fn(Range<usize>) + Sync)>,
}

impl<'a> InputRows<'a> {
    pub(crate) fn rows(x: &'a [f32], depth: usize) -> Self {
        InputRows { numbers: SharedSlice::read_only(x), depth, num_rows: x.len() / depth, compute: None }
    }

    /// Rows of `x` that `compute` writes, each once.
    ///
    /// # Safety
    /// What `x` was made of stays borrowed for as long as `compute`, and is used in no other way.
    pub(crate) unsafe fn computed(
        x: SharedSlice<f32>,
        depth: usize,
        num_rows: usize,
        compute: &'a (dyn Fn(Range<usize>) + Sync),
    ) -> Self {
        InputRows { numbers: x, depth, num_rows, compute: Some(compute) }
    }

    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(crate) fn num_rows(&self) -> usize {
        self.num_rows
    }

    /// Some rows, computed now where they are not there yet.
    ///
    /// # Safety
    /// Rows that are not there yet are asked for once.
    #[inline(always)]
    pub(super) unsafe fn take(&self, rows: Range<usize>) -> &[f32] {
        if let Some(compute) = self.compute {
            compute(rows.clone());
        }
        // SAFETY: they are alive, and nobody writes them any more.
        unsafe { self.numbers.read(rows.start * self.depth, rows.len() * self.depth) }
    }

    /// The same rows after all of them were taken.
    pub(super) fn taken(self) -> Self {
        InputRows { compute: None, ..self }
    }

    /// The same rows after all of them were computed, whoever does it.
    pub(crate) fn ready(self, pool: &Pool) -> Self {
        const ROWS: usize = 8;
        if let Some(compute) = self.compute {
            let rows = |task: usize| task * ROWS..self.num_rows.min((task + 1) * ROWS);
            pool.run(self.num_rows.div_ceil(ROWS), &|task| compute(rows(task)));
        }
        self.taken()
    }

    /// All rows, which are ready.
    pub(super) fn all(&self) -> &'a [f32] {
        assert!(self.compute.is_none(), "rows that are ready");
        // SAFETY: alive for as long, and nobody writes them any more.
        unsafe { std::slice::from_raw_parts(self.numbers.address(0), self.num_rows * self.depth) }
    }
}
