//! Slices of 32 numbers that floats scale, as a stream through tiles: one is multiplied, the second before it stored, and the fourth before it
//! scaled by vectors and added to the sums of its rows. The stream goes on from block to block, or from panel to panel.
//!
//! **Order.** A slice of 16 x 16 x 32 is 16 cycles of multiplication, 16 of storing and 48 operations on vectors (64 with minimums), for two
//! units of the core, of which one also multiplies tiles: 33 cycles. A core by itself comes to 36 in any order. While another program uses
//! its second hardware thread it looks ahead half as far, and instructions that wait then hold up those behind them: tile instructions
//! in one clump before the vectors took 74 to 91 cycles a slice, spread among them 50 to 57 (2026-11-16, Xeon with AMX). So each tile
//! instruction stands apart from the one that needs its result, with a quarter or a half of the rows between them.

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::activations::RowBlock;
use super::super::ahead::Ahead;
use super::super::packing::{Mins, Packing, SLICE};
use super::slices::{CHUNK_UNITS, unpack_slice};
use super::{BLOCK, CHUNK_SLICES, Chunk, SliceScales, Tile};

/// So many units are unpacked before they are multiplied. More of them are more to do before the first multiplication of a run, which short
/// rows feel.
const UNPACKED: usize = 1;

/// Units that a ring holds where they are unpacked on the way: the fewer, the surer they are still in the first-level cache when they are
/// overwritten. With sixteen, products of 16 rows were a fifth slower.
const RING_UNITS: usize = 4;

/// Units from being multiplied to being scaled.
const LAG: usize = 2;

/// 1.5 * 2^23: an integer below 2^22 in magnitude, added to these bits, is a float that is larger than the integer by this much.
const MAGIC: f32 = 12_582_912.0;

/// What is multiplied in one go: blocks of rows with the units of the ring; or one block with many panels, whose units are unpacked on the way.
pub(super) struct Run {
    /// The first block, from the first unit on.
    pub(super) x: RowBlock,
    /// To the next block of as many rows: bytes of its integers, entries of its sums and scales. None where it stays the same.
    pub(super) distance: (usize, usize),
    /// Units of a block.
    pub(super) num_units: usize,
    /// Results begin with these units; they are added to what is there otherwise.
    pub(super) fresh: bool,
    /// Panels side by side, where they have to be unpacked.
    pub(super) units: *const u8,
}

/// Where the next unit to be multiplied lies.
struct Factors {
    x: *const i8,
    /// In the ring.
    at: usize,
    /// Units that are left of the block, and blocks (or panels) with it.
    left: usize,
    blocks: usize,
}

/// A slice that has been multiplied and stored, with what scales it: of W in registers, of x for each row.
struct InFlight {
    tile: *const Tile<i32>,
    scale: __m512,
    /// What the integers are too large by, times the scale.
    excess: __m512,
    mins: __m512,
    x_scales: *const f32,
    x_sums: *const f32,
}

/// The instructions for a row: `product * scale`, rounded once (that the product becomes a float costs no more than an addition of integers),
/// times the scale of x, added to the row's sum.
macro_rules! plain_row {
    ($r:literal) => {
        concat!(
            "vpaddd zmm31, {magic}, zmmword ptr [{tile} + 64 * ",
            $r,
            "]\nvfmadd213ps zmm31, {scale}, {excess}\nvfmadd231ps {sum",
            $r,
            "}, zmm31, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}"
        )
    };
}

/// The same with a minimum, times the sum of x.
macro_rules! row_with_min {
    ($r:literal) => {
        concat!(
            "vpaddd zmm31, {magic}, zmmword ptr [{tile} + 64 * ",
            $r,
            "]\nvfmadd213ps zmm31, {scale}, {excess}\nvfmadd231ps zmm31, {mins}, dword ptr [{x_sums} + 4 * ",
            $r,
            "]{{1to16}}\nvfmadd231ps {sum",
            $r,
            "}, zmm31, dword ptr [{x_scales} + 4 * ",
            $r,
            "]{{1to16}}"
        )
    };
}

/// Tile instructions before, between and after rows that are scaled, in this very order.
macro_rules! interleaved {
    ($slice:ident, $sums:ident, $row:ident, $before:literal, [$($first:ident $f:literal)*], $between:literal,
        [$($second:ident $s:literal)*], $after:literal, $($operands:tt)*) => {
        asm!(
            $before,
            $($row!($f),)*
            $between,
            $($row!($s),)*
            $after,
            stride = in(reg) 2 * SLICE,
            tile = in(reg) $slice.tile,
            magic = in(zmm_reg) _mm512_set1_ps(MAGIC),
            scale = in(zmm_reg) $slice.scale,
            excess = in(zmm_reg) $slice.excess,
            x_scales = in(reg) $slice.x_scales,
            out("zmm31") _,
            $($first = inout(zmm_reg) $sums[$f],)*
            $($second = inout(zmm_reg) $sums[$s],)*
            $($operands)*
            options(nostack, preserves_flags),
        )
    };
}

impl InFlight {
    /// # Safety
    /// The machine has AVX-512 F.
    #[inline(always)]
    unsafe fn new(tile: *const Tile<i32>, scales: &SliceScales, x_scales: *const f32, x_sums: *const f32) -> Self {
        // SAFETY: by the caller's promise.
        unsafe {
            let (scale, mins) = (_mm512_load_ps(scales.scale.as_ptr()), _mm512_load_ps(scales.min.as_ptr()));
            // Exact: 2 bits times the 11 of a half.
            let excess = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            InFlight { tile, scale, excess, mins, x_scales, x_sums }
        }
    }
}

/// Adds the first half of a slice's rows to their sums. Meanwhile x is loaded for a multiplication into a tile of this number, and what is
/// in that tile is stored and zeroed. (A macro, since functions that are always inlined may not hold such registers.)
macro_rules! first_half {
    ($slice:ident, $sums:ident, $mins:expr, $rows:expr, $number:literal, $x:expr, $to:expr) => {
        match ($mins, $rows) {
            (Mins::None, BLOCK) => {
                first_half!(@ $slice, $sums, plain_row, $number, $x, $to, [sum0 0 sum1 1 sum2 2 sum3 3], [sum4 4 sum5 5 sum6 6 sum7 7],)
            }
            (Mins::None, _) => first_half!(@ $slice, $sums, plain_row, $number, $x, $to, [sum0 0 sum1 1], [sum2 2 sum3 3],),
            (_, BLOCK) => first_half!(
                @ $slice, $sums, row_with_min, $number, $x, $to, [sum0 0 sum1 1 sum2 2 sum3 3], [sum4 4 sum5 5 sum6 6 sum7 7],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
            _ => first_half!(
                @ $slice, $sums, row_with_min, $number, $x, $to, [sum0 0 sum1 1], [sum2 2 sum3 3],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
        }
    };
    (@ $slice:ident, $sums:ident, $row:ident, $number:literal, $x:expr, $to:expr, $first:tt, $second:tt, $($operands:tt)*) => {
        interleaved!(
            $slice, $sums, $row,
            "tileloadd tmm4, [{x} + {stride}]", $first,
            "tilestored [{to} + {stride}], tmm{number}\ntilezero tmm{number}", $second,
            "",
            x = in(reg) $x,
            to = in(reg) $to,
            number = const $number,
            $($operands)*
        )
    };
}

/// The second half of the rows. Meanwhile W is loaded, and when they are done multiplied with x.
macro_rules! second_half {
    ($slice:ident, $sums:ident, $mins:expr, $rows:expr, $number:literal, $w:expr) => {
        match ($mins, $rows) {
            (Mins::None, BLOCK) => second_half!(
                @ $slice, $sums, plain_row, $number, $w,
                [sum8 8 sum9 9 sum10 10 sum11 11], [sum12 12 sum13 13 sum14 14 sum15 15],
            ),
            (Mins::None, _) => second_half!(@ $slice, $sums, plain_row, $number, $w, [sum4 4 sum5 5], [sum6 6 sum7 7],),
            (_, BLOCK) => second_half!(
                @ $slice, $sums, row_with_min, $number, $w,
                [sum8 8 sum9 9 sum10 10 sum11 11], [sum12 12 sum13 13 sum14 14 sum15 15],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
            _ => second_half!(
                @ $slice, $sums, row_with_min, $number, $w, [sum4 4 sum5 5], [sum6 6 sum7 7],
                x_sums = in(reg) $slice.x_sums, mins = in(zmm_reg) $slice.mins,
            ),
        }
    };
    (@ $slice:ident, $sums:ident, $row:ident, $number:literal, $w:expr, $first:tt, $second:tt, $($operands:tt)*) => {
        interleaved!(
            $slice, $sums, $row,
            "tileloadd tmm5, [{w} + {stride}]", $first,
            "", $second,
            "tdpbssd tmm{number}, tmm4, tmm5\ntilezero tmm4\ntilezero tmm5",
            w = in(reg) $w,
            number = const $number,
            $($operands)*
        )
    };
}

/// Multiplies a run, one tile of results for each of its blocks or panels. While the units of one are scaled, `ahead` of its number says
/// what to ask for.
///
/// # Safety
/// Tiles are configured for the blocks and hold zeros; without `UNPACK` the ring holds the units; rows have them all, and ROWS or fewer in a
/// block; the machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<F: Packing, const ROWS: usize, const UNPACK: bool>(
    chunk: &mut Chunk,
    run: &Run,
    results: &mut [Tile<f32>],
    ahead: impl Fn(usize) -> Ahead,
) {
    let (num_units, total) = (run.num_units, run.num_units * results.len());
    // SAFETY: see the promises of the function; every index below is within the block's and the ring's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        let unpack = |unit: usize, slice: usize, chunk: &mut Chunk| {
            if UNPACK && unit < total {
                unpack_slice::<F>(run.units.add(unit * F::LAYOUT.unit_bytes()), unit % RING_UNITS, slice, chunk);
            }
        };
        for unit in 0..LAG + UNPACKED {
            (0..2).for_each(|slice| unpack(unit, slice, chunk));
        }
        let m = run.x.num_rows;
        let unit_bytes = 2 * SLICE * m;
        let ring_units = if UNPACK { RING_UNITS } else { CHUNK_UNITS };
        let mut factors = Factors { x: run.x.quants, at: 0, left: num_units, blocks: results.len() };
        // After the last unit of all, some of the last block are multiplied again, and nobody reads the products.
        let advance = |factors: &mut Factors| {
            factors.x = factors.x.wrapping_add(unit_bytes);
            factors.at = (factors.at + 1) % ring_units;
            factors.left -= 1;
            if factors.left == 0 {
                let distance = if factors.blocks > 1 { run.distance.0 } else { 0 };
                factors.x = factors.x.wrapping_add(distance).wrapping_sub(num_units * unit_bytes);
                (factors.left, factors.blocks) = (num_units, factors.blocks.saturating_sub(1));
                if !UNPACK {
                    factors.at = 0;
                }
            }
        };
        let ring = chunk.integers.as_ptr();
        let w = |at: usize, slice: usize| ring.add(2 * at + slice).cast::<u8>();
        let tiles = chunk.tiles.as_mut_ptr();
        for unit in 0..LAG {
            multiply_tile::<0>(factors.x, w(factors.at, 0), (unit > 0).then_some(tiles));
            multiply_tile::<1>(factors.x.add(SLICE), w(factors.at, 1), (unit > 0).then_some(tiles.add(1)));
            advance(&mut factors);
        }
        // Of the unit that is scaled: its number of all, and in the ring.
        let (mut n, mut at) = (0, 0);
        let (mut block_scales, mut block_sums) = (run.x.scales, run.x.sums);
        for (i, result) in results.iter_mut().enumerate() {
            let mut ahead = ahead(i);
            let mut sums = [_mm512_setzero_ps(); BLOCK];
            if !run.fresh {
                sums = std::array::from_fn(|r| _mm512_loadu_ps(result[r].as_ptr()));
            }
            let (mut x_scales, mut x_sums) = (block_scales, block_sums);
            if !UNPACK {
                ahead.fetch();
                at = 0;
            }
            for _ in 0..num_units {
                let (scaled, stored) = (tiles.add(n % 2 * 2), tiles.add((n + 1) % 2 * 2));
                macro_rules! slice {
                    ($slice:literal) => {{
                        let slice = InFlight::new(scaled.add($slice), &chunk.scales[2 * at + $slice], x_scales, x_sums);
                        let (x, to) = (factors.x.add($slice * SLICE), stored.add($slice));
                        first_half!(slice, sums, F::LAYOUT.mins, ROWS, $slice, x, to);
                        unpack(n + LAG + UNPACKED, $slice, chunk);
                        second_half!(slice, sums, F::LAYOUT.mins, ROWS, $slice, w(factors.at, $slice));
                        (x_scales, x_sums) = (x_scales.add(m), x_sums.add(m));
                    }};
                }
                slice!(0);
                slice!(1);
                if UNPACK {
                    ahead.fetch();
                }
                advance(&mut factors);
                (n, at) = (n + 1, (at + 1) % ring_units);
            }
            for r in 0..ROWS {
                _mm512_storeu_ps(result[r].as_mut_ptr(), sums[r]);
            }
            block_scales = block_scales.wrapping_add(run.distance.1);
            block_sums = block_sums.wrapping_add(run.distance.1);
        }
        asm!("tilezero tmm0", "tilezero tmm1", options(nostack, preserves_flags, nomem));
    }
}

/// Multiplies a slice into a tile, which is stored and zeroed before where that is asked for.
///
/// # Safety
/// Block and ring have these slices, tiles are configured for them and the tile holds zeros otherwise; the machine has AMX.
#[inline(always)]
unsafe fn multiply_tile<const TILE: usize>(x: *const i8, w: *const u8, stored: Option<*mut Tile<i32>>) {
    // SAFETY: by the caller's promise; sixteen lines or fewer go to an array of as many.
    unsafe {
        if let Some(to) = stored {
            asm!(
                "tilestored [{to} + {stride}], tmm{tile}",
                "tilezero tmm{tile}",
                tile = const TILE,
                to = in(reg) to,
                stride = in(reg) 2 * SLICE,
                options(nostack, preserves_flags),
            );
        }
        asm!(
            "tileloadd tmm4, [{x} + {stride}]",
            "tileloadd tmm5, [{w} + {stride}]",
            "tdpbssd tmm{tile}, tmm4, tmm5",
            "tilezero tmm4",
            "tilezero tmm5",
            tile = const TILE,
            x = in(reg) x,
            w = in(reg) w,
            stride = in(reg) 2 * SLICE,
            options(nostack, preserves_flags, readonly),
        );
    }
}

const _: () = assert!(CHUNK_SLICES == 2 * CHUNK_UNITS && LAG + UNPACKED < RING_UNITS);
