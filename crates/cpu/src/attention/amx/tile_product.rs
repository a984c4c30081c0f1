//! A product of tiles: sixteen rows by 32 columns at a time, with values split into a high and a low bf16.

use std::arch::asm;

use super::{LINE, ROWS};
use crate::simd::amx::TileConfig;

/// The left operand: rows of high parts; the low parts are `low` bytes further on. `step` bytes from 32 values to the
/// next 32.
#[derive(Clone, Copy)]
pub(super) struct LeftTiles {
    pub(super) high: *const u8,
    pub(super) low: usize,
    pub(super) stride: usize,
    pub(super) step: usize,
}

/// The right operand: pairs of rows, in lines of sixteen columns; the low parts are `low` bytes further on.
#[derive(Clone, Copy)]
pub(super) struct RightTiles {
    pub(super) high: *const u8,
    pub(super) low: usize,
    pub(super) stride: usize,
    pub(super) step: usize,
}

impl RightTiles {
    /// The operand from column `first` on, a multiple of sixteen.
    pub(super) fn columns(self, first: usize) -> Self {
        RightTiles { high: self.high.wrapping_add(first / ROWS * LINE), ..self }
    }
}

/// `out = left · right` or `out += left · right`, for the rows that tiles are configured for.
#[derive(Clone, Copy)]
pub(super) struct TileProduct {
    pub(super) left: LeftTiles,
    pub(super) right: RightTiles,
    pub(super) steps: usize,
    pub(super) out: *mut f32,
    /// Bytes from a row of `out` to the next.
    pub(super) stride: usize,
    /// Two, or one if the right operand has no low parts.
    pub(super) planes: usize,
}

/// The instructions of one step for one group of sixteen columns.
macro_rules! group {
    (2, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm4, [{bl} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm2, tmm4\n",
            group!(1, $sum, $at)
        )
    };
    (1, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm4, [{bh} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm2, tmm4\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm3, tmm4"
        )
    };
}

/// The loop over all steps for two groups of columns.
macro_rules! steps {
    ($product:expr, $planes:tt) => {{
        let TileProduct { left, right, steps, .. } = $product;
        for step in 0..steps {
            let (a, b) = (left.high.add(step * left.step), right.high.add(step * right.step));
            asm!(
                "tileloadd tmm2, [{ah} + {sa}]",
                "tileloadd tmm3, [{al} + {sa}]",
                group!($planes, 0, 0),
                group!($planes, 1, 64),
                "/* {bl} */",
                ah = in(reg) a,
                al = in(reg) a.add(left.low),
                sa = in(reg) left.stride,
                bh = in(reg) b,
                bl = in(reg) b.add(right.low),
                sb = in(reg) right.stride,
                options(nostack, preserves_flags, readonly),
            );
        }
    }};
}

impl TileProduct {
    /// Tiles 0 and 1 are results, 2 and 3 the left operand, 4 the right one. [`crate::simd::amx`] says why there are no
    /// more.
    pub(super) fn tile_shapes(rows: usize) -> TileConfig {
        let mut config = TileConfig::default();
        (0..4).for_each(|tile| config.set(tile, rows, LINE));
        config.set(4, ROWS, LINE);
        config
    }

    /// Computes `groups` groups of sixteen columns, an even number; adds to `out` unless `fresh`.
    ///
    /// # Safety
    /// The machine has AMX, tiles are configured, and both operands and `out` have these rows and columns.
    #[inline(always)]
    pub(super) unsafe fn run(self, groups: usize, fresh: bool) {
        for group in (0..groups).step_by(2) {
            let right = self.right.columns(group * ROWS);
            // SAFETY: passed on from the caller.
            unsafe { TileProduct { right, out: self.out.add(group * ROWS), ..self }.two_groups(fresh) };
        }
    }

    /// # Safety
    /// As for [`TileProduct::run`].
    #[inline(always)]
    unsafe fn two_groups(self, fresh: bool) {
        // SAFETY: passed on from the caller; no compiled code uses tile registers.
        unsafe {
            if fresh {
                asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
            } else {
                asm!(
                    "tileloadd tmm0, [{0} + {1}]", "tileloadd tmm1, [{0} + {1} + 64]",
                    in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags, readonly),
                );
            }
            match self.planes {
                1 => steps!(self, 1),
                _ => steps!(self, 2),
            }
            asm!(
                "tilestored [{0} + {1}], tmm0", "tilezero tmm0", "tilestored [{0} + {1} + 64], tmm1", "tilezero tmm1",
                in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags),
            );
        }
    }
}
