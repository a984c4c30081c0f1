//! One product, and the part of it that a task computes.

use std::ops::Range;

use super::{LinearWeight, PANEL_COLUMNS};
use crate::pool::Direction;
use crate::shared_slice::SharedSlice;

/// One of several products with the same x.
#[derive(Clone, Copy)]
pub(crate) struct Product<'a> {
    pub(crate) weight: &'a LinearWeight,
    pub(crate) bias: Option<&'a [f32]>,
    /// `[rows][columns of this product]`
    pub(crate) out: SharedSlice<'a, f32>,
}

/// The part of a product that a task computes.
pub(super) struct ProductPart<'a> {
    pub(super) product: &'a Product<'a>,
    pub(super) panels: Range<usize>,
    /// Blocks of rows.
    pub(super) blocks: Range<usize>,
    /// The direction in which the thread probably goes on when this part is done.
    #[cfg_attr(
        not(target_arch = "x86_64"),
        expect(dead_code, reason = "only x86 kernels prefetch in both directions")
    )]
    pub(super) direction: Direction,
}

impl Product<'_> {
    pub(super) fn num_columns(&self) -> usize {
        self.weight.num_columns
    }

    /// Writes sixteen results of a row (fewer in the last panel), with their bias.
    ///
    /// # Safety
    /// No other thread writes this panel of this row.
    #[inline(always)]
    pub(super) unsafe fn put(&self, row: usize, panel: usize, results: &[f32; PANEL_COLUMNS]) {
        let (start, num_columns) = (panel * PANEL_COLUMNS, self.num_columns());
        let width = PANEL_COLUMNS.min(num_columns - start);
        // SAFETY: passed on from the caller.
        let out = unsafe { self.out.part(row * num_columns + start, width) };
        match (<&mut [f32; PANEL_COLUMNS]>::try_from(&mut *out), self.bias) {
            // A copy of known length is one instruction; others are a call.
            (Ok(out), None) => *out = *results,
            (_, bias) => {
                for (c, out) in out.iter_mut().enumerate() {
                    *out = results[c] + bias.map_or(0.0, |bias| bias[start + c]);
                }
            }
        }
    }
}
