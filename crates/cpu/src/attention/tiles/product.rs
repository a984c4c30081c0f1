//! A product of tiles: sixteen rows by 32 or 64 columns, every number in its high and its low part.

use std::arch::asm;

use super::{LINE, ROWS};

/// Rows of high parts, of which low parts lie `low` bytes apart; `step` bytes from 32 numbers to the next.
#[derive(Clone, Copy)]
pub(super) struct Left {
    pub(super) high: *const u8,
    pub(super) low: usize,
    pub(super) stride: usize,
    pub(super) step: usize,
}

/// Pairs of rows, in lines of sixteen columns.
#[derive(Clone, Copy)]
pub(super) struct Right {
    pub(super) high: *const u8,
    pub(super) low: usize,
    pub(super) stride: usize,
    pub(super) step: usize,
}

impl Right {
    /// From a column on, a multiple of sixteen.
    pub(super) fn columns(self, first: usize) -> Self {
        Right { high: self.high.wrapping_add(first / ROWS * LINE), ..self }
    }
}

/// `out (+)= left · right`, sixteen rows (or what tiles are configured for) by two or four times sixteen columns.
#[derive(Clone, Copy)]
pub(super) struct Product {
    pub(super) left: Left,
    pub(super) right: Right,
    pub(super) steps: usize,
    pub(super) out: *mut f32,
    /// Bytes from a row of `out` to the next.
    pub(super) stride: usize,
    /// Two, or one where there are no low parts on the right.
    pub(super) planes: usize,
}

/// One step for one group of sixteen columns.
macro_rules! group {
    (2, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm6, [{bl} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm4, tmm6\n",
            group!(1, $sum, $at)
        )
    };
    (1, $sum:literal, $at:literal) => {
        concat!(
            "tileloadd tmm7, [{bh} + {sb} + ",
            $at,
            "]\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm4, tmm7\n",
            "tdpbf16ps tmm",
            $sum,
            ", tmm5, tmm7"
        )
    };
}

/// All steps, with these groups.
macro_rules! steps {
    ($product:expr, $($group:expr),*) => {{
        let Product { left, right, steps, .. } = $product;
        for step in 0..steps {
            let (a, b) = (left.high.add(step * left.step), right.high.add(step * right.step));
            asm!(
                "tileloadd tmm4, [{ah} + {sa}]",
                "tileloadd tmm5, [{al} + {sa}]",
                $($group,)*
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

impl Product {
    /// # Safety
    /// The machine has AMX, tiles are configured, and rows of both sides and of `out` are as long as is said.
    #[inline(always)]
    pub(super) unsafe fn run(self, groups: usize, fresh: bool) {
        // SAFETY: passed on from the caller; nothing else of the program uses tile registers.
        unsafe {
            match groups {
                0 => {}
                2 => {
                    self.begin::<2>(fresh);
                    match self.planes {
                        1 => steps!(self, group!(1, 0, 0), group!(1, 1, 64)),
                        _ => steps!(self, group!(2, 0, 0), group!(2, 1, 64)),
                    }
                    self.end::<2>();
                }
                _ => {
                    self.begin::<4>(fresh);
                    match self.planes {
                        1 => steps!(self, group!(1, 0, 0), group!(1, 1, 64), group!(1, 2, 128), group!(1, 3, 192)),
                        _ => steps!(self, group!(2, 0, 0), group!(2, 1, 64), group!(2, 2, 128), group!(2, 3, 192)),
                    }
                    self.end::<4>();
                }
            }
        }
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn begin<const GROUPS: usize>(self, fresh: bool) {
        // SAFETY: passed on from the caller.
        unsafe {
            if fresh {
                asm!(
                    "tilezero tmm0",
                    "tilezero tmm1",
                    "tilezero tmm2",
                    "tilezero tmm3",
                    options(nostack, preserves_flags, nomem)
                );
                return;
            }
            asm!(
                "tileloadd tmm0, [{0} + {1}]", "tileloadd tmm1, [{0} + {1} + 64]",
                in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags, readonly),
            );
            if GROUPS == 4 {
                asm!(
                    "tileloadd tmm2, [{0} + {1} + 128]", "tileloadd tmm3, [{0} + {1} + 192]",
                    in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags, readonly),
                );
            }
        }
    }

    /// # Safety
    /// As for `run`.
    #[inline(always)]
    unsafe fn end<const GROUPS: usize>(self) {
        // SAFETY: passed on from the caller.
        unsafe {
            asm!(
                "tilestored [{0} + {1}], tmm0", "tilestored [{0} + {1} + 64], tmm1",
                in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags),
            );
            if GROUPS == 4 {
                asm!(
                    "tilestored [{0} + {1} + 128], tmm2", "tilestored [{0} + {1} + 192], tmm3",
                    in(reg) self.out, in(reg) self.stride, options(nostack, preserves_flags),
                );
            }
        }
    }
}
