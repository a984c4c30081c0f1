//! Scales the two result tiles of a unit of a K format and adds them to the results: four rows at a time, with tile
//! instructions in between.
//!
//! The order of instructions is fixed in `asm!`, for the reason that [`slice_pipeline`](super::slice_pipeline) gives:
//! tile multiplications take long, and instructions right behind them wait.

use std::arch::x86_64::*;

use super::byte_planes::PAIRS;
use super::{BLOCK_ROWS, Tile, UnitScales};
use crate::matmul::PANEL_COLUMNS;
use crate::matmul::quantized::activations::RowBlock;

/// Rows that are scaled at a time.
pub(super) const ROWS_AT_ONCE: usize = BLOCK_ROWS / 4;

/// Scales and minimums of a unit, in registers.
#[derive(Clone, Copy)]
pub(super) struct UnitScaleRegisters {
    pub(super) scale: __m512,
    pub(super) min: __m512,
    pub(super) min_pairs: [__m512i; PAIRS],
}

impl UnitScaleRegisters {
    /// # Safety
    /// The machine has AVX-512 F.
    #[inline(always)]
    pub(super) unsafe fn load(scales: &UnitScales) -> Self {
        // SAFETY: passed on from the caller.
        unsafe {
            UnitScaleRegisters {
                scale: _mm512_load_ps(scales.scale.as_ptr()),
                min: _mm512_load_ps(scales.min.as_ptr()),
                min_pairs: std::array::from_fn(|i| _mm512_load_si512(scales.min_pairs[i].as_ptr().cast())),
            }
        }
    }
}

/// The operands of [`scale_four`]: pointers to the first of the rows.
#[derive(Clone, Copy)]
pub(super) struct ScaledRows {
    /// Row of the high plane's tile; the low plane's tile follows.
    pub(super) tiles: *const [i32; PANEL_COLUMNS],
    pub(super) x_scales: *const f32,
    /// Sums of x over two slices each.
    pub(super) pairs: [*const [i16; 2]; PAIRS],
    pub(super) results: *mut [f32; PANEL_COLUMNS],
    /// All ones if results are added to, zero if they are overwritten.
    pub(super) kept: __mmask16,
}

impl ScaledRows {
    /// Rows of a block from `first` on.
    ///
    /// # Safety
    /// The block has that unit. Sums and scales can be read for sixteen rows even if the block has fewer.
    #[inline(always)]
    pub(super) unsafe fn new(
        tiles: &[Tile<i32>],
        x: &RowBlock<'_>,
        unit: usize,
        first: usize,
        fresh: bool,
        results: *mut Tile<f32>,
    ) -> Self {
        let at = |pair: usize| (unit * PAIRS + pair) * x.num_rows + first;
        ScaledRows {
            tiles: tiles[0][first..].as_ptr(),
            x_scales: x.scales.wrapping_add(unit * x.num_rows + first),
            pairs: std::array::from_fn(|pair| x.pairs.wrapping_add(at(pair))),
            results: results.cast::<[f32; PANEL_COLUMNS]>().wrapping_add(first),
            kept: if fresh { 0 } else { !0 },
        }
    }
}

/// The instructions for a row: the sums of both planes are combined and scaled, the minimums times the sums of x are
/// subtracted, and the result times the scale of x is added to the row's results.
macro_rules! row_with_min {
    ($shift:literal, $r:literal) => {
        concat!(
            "vpslld zmm30, zmmword ptr [{tiles} + 64 * ",
            $r,
            "], ",
            $shift,
            "\nvpaddd zmm30, zmm30, zmmword ptr [{tiles} + 1024 + 64 * ",
            $r,
            "]\nvpxord zmm31, zmm31, zmm31\nvpdpwssd zmm31, {min0}, dword ptr [{pairs0} + 4 * ",
            $r,
            "]{{1to16}}\nvcvtdq2ps zmm30, zmm30\nvpdpwssd zmm31, {min1}, dword ptr [{pairs1} + 4 * ",
            $r,
            "]{{1to16}}\nvmulps zmm30, zmm30, {scale}\nvpdpwssd zmm31, {min2}, dword ptr [{pairs2} + 4 * ",
            $r,
            "]{{1to16}}\nvpdpwssd zmm31, {min3}, dword ptr [{pairs3} + 4 * ",
            $r,
            "]{{1to16}}\nvcvtdq2ps zmm31, zmm31\nvfnmadd231ps zmm30, zmm31, {min}",
            "\nvmovups zmm31{{{kept}}}{{z}}, zmmword ptr [{results} + 64 * ",
            $r,
            "]\nvfmadd231ps zmm31, zmm30, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}\nvmovups zmmword ptr [{results} + 64 * ",
            $r,
            "], zmm31"
        )
    };
}

/// Like `row_with_min`, without minimums.
macro_rules! plain_row {
    ($shift:literal, $r:literal) => {
        concat!(
            "vpslld zmm30, zmmword ptr [{tiles} + 64 * ",
            $r,
            "], ",
            $shift,
            "\nvpaddd zmm30, zmm30, zmmword ptr [{tiles} + 1024 + 64 * ",
            $r,
            "]\nvcvtdq2ps zmm30, zmm30\nvmovups zmm31{{{kept}}}{{z}}, zmmword ptr [{results} + 64 * ",
            $r,
            "]\nvmulps zmm30, zmm30, {scale}\nvfmadd231ps zmm31, zmm30, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}\nvmovups zmmword ptr [{results} + 64 * ",
            $r,
            "], zmm31"
        )
    };
}

/// Scales four rows of a unit, each after one of the given instructions.
macro_rules! scale_four {
    ($scales:expr, $registers:expr, $rows:expr, [$a:expr, $b:expr, $c:expr, $d:expr], $($operands:tt)*) => {
        match $scales {
            Scales::PerHalfSlice => asm!(
                $a, plain_row!("8", 0),
                $b, plain_row!("8", 1),
                $c, plain_row!("8", 2),
                $d, plain_row!("8", 3),
                tiles = in(reg) $rows.tiles,
                x_scales = in(reg) $rows.x_scales,
                results = in(reg) $rows.results,
                kept = in(kreg) $rows.kept,
                scale = in(zmm_reg) $registers.scale,
                out("zmm30") _,
                out("zmm31") _,
                $($operands)*
                options(nostack, preserves_flags),
            ),
            _ => asm!(
                $a, row_with_min!("3", 0),
                $b, row_with_min!("3", 1),
                $c, row_with_min!("3", 2),
                $d, row_with_min!("3", 3),
                tiles = in(reg) $rows.tiles,
                x_scales = in(reg) $rows.x_scales,
                results = in(reg) $rows.results,
                pairs0 = in(reg) $rows.pairs[0],
                pairs1 = in(reg) $rows.pairs[1],
                pairs2 = in(reg) $rows.pairs[2],
                pairs3 = in(reg) $rows.pairs[3],
                kept = in(kreg) $rows.kept,
                scale = in(zmm_reg) $registers.scale,
                min = in(zmm_reg) $registers.min,
                min0 = in(zmm_reg) $registers.min_pairs[0],
                min1 = in(zmm_reg) $registers.min_pairs[1],
                min2 = in(zmm_reg) $registers.min_pairs[2],
                min3 = in(zmm_reg) $registers.min_pairs[3],
                out("zmm30") _,
                out("zmm31") _,
                $($operands)*
                options(nostack, preserves_flags),
            ),
        }
    };
}
pub(super) use {plain_row, row_with_min, scale_four};
