//! Formats whose slices of 32 numbers have a scale of their own in floats: each slice is a tile that goes to memory, where vectors scale it.
//!
//! Many rows: for each stretch of K a panel is unpacked to bytes into the first-level cache and used for all rows, whose own stretch stays in
//! the second-level cache. One block of rows: panel after panel, unpacked on the way.
//!
//! Bound for 16 x 16 x 32: 16 cycles of multiplication, 16 of storing, and 32 float operations (48 with minimums), of which a core does
//! one a cycle while it uses tiles. Measured: 44 cycles alone on the core (2026-11-15, Xeon with AMX). Keeping the tiles of x in registers
//! for several panels was slower here: sums then go to memory and back after every four slices.

use std::arch::asm;
use std::arch::x86_64::*;

use std::ops::Range;

use super::super::activations::{Quantized, RowBlock};
use super::super::ahead::Ahead;
use super::super::avx512::{halves, integers};
use super::super::packing::{Mins, Packing, SLICE};
use super::super::weight::PackedWeight;
use super::{BLOCK, CHUNK_SLICES, Chunk, Scratch, SliceScales, Tile, tile_shapes};

/// Units have two slices in all of these formats; the chunk is a ring of so many.
const CHUNK_UNITS: usize = CHUNK_SLICES / 2;

/// So many units are unpacked before they are multiplied: what is in the cache by then is loaded sooner than what is on its way there.
const UNPACKED: usize = 4;

/// A block of up to so many rows leaves the others out.
const HALF_BLOCK: usize = BLOCK / 2;

/// 1.5 * 2^23: an integer below 2^22 in magnitude, added to these bits, is a float that is larger than the integer by this much.
const MAGIC: f32 = 12_582_912.0;

/// Unpacks units, no more than the ring holds.
///
/// # Safety
/// They are whole units of F; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn unpack<F: Packing>(units: &[u8], chunk: &mut Chunk) {
    for (u, unit) in units.chunks_exact(F::LAYOUT.unit_bytes()).enumerate() {
        // SAFETY: passed on from the caller.
        unsafe { unpack_unit::<F>(unit.as_ptr(), u, chunk) };
    }
}

/// Unpacks a unit of two slices into the ring.
///
/// # Safety
/// `unit` is a whole unit of F; the machine has AVX-512 BW.
#[inline(always)]
unsafe fn unpack_unit<F: Packing>(unit: *const u8, at: usize, chunk: &mut Chunk) {
    for slice in 0..F::LAYOUT.slices {
        let at = at % CHUNK_UNITS * F::LAYOUT.slices + slice;
        // SAFETY: passed on from the caller.
        unsafe { unpack_slice::<F>(unit, slice, &mut chunk.integers[at], &mut chunk.scales[at]) };
    }
}

/// Unpacks a slice to signed bytes, its scales to f32.
///
/// # Safety
/// `unit` is a whole unit of F, and `to` begins on a cache line; the machine has AVX-512 BW.
#[inline(always)]
unsafe fn unpack_slice<F: Packing>(unit: *const u8, slice: usize, to: &mut [u8; 512], scales: &mut SliceScales) {
    let layout = F::LAYOUT;
    // SAFETY: the unit is whole by the caller's promise.
    unsafe {
        let offset = _mm512_set1_epi8(layout.offset_shift.map_or(0, |shift| (1u8 << shift) as i8));
        for (j, integers) in integers::<F>(unit, slice).into_iter().enumerate() {
            _mm512_store_si512(to.as_mut_ptr().add(64 * j).cast(), _mm512_sub_epi8(integers, offset));
        }
        _mm512_store_ps(scales.scale.as_mut_ptr(), halves(unit.add(layout.scale(slice))));
        if layout.mins == Mins::Plain {
            _mm512_store_ps(scales.min.as_mut_ptr(), halves(unit.add(layout.min(slice))));
        }
    }
}

/// Evaluates a block of code for each of the rows with the row as a constant: sixteen sums stay in registers only when nothing indexes them
/// by a variable.
macro_rules! for_each_row {
    ($count:expr, $r:ident => $body:block) => {
        for_each_row!($count, $r => $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($count:expr, $r:ident => $body:block, $($row:literal)*) => {
        $(if $row < $count {
            let $r: usize = $row;
            $body
        })*
    };
}

/// One block of rows times a whole panel, which is unpacked unit by unit just before its use.
///
/// # Safety
/// The panel holds whole units of F, and the block as many; tiles are configured for it; the machine has AMX and AVX-512 with VNNI.
pub(super) unsafe fn multiply_panel<F: Packing>(
    chunk: &mut Chunk,
    panel: &[u8],
    x: RowBlock,
    ahead: &mut Ahead,
    results: &mut Tile<f32>,
) {
    let num_units = panel.len() / F::LAYOUT.unit_bytes();
    // SAFETY: passed on from the caller.
    unsafe {
        match x.num_rows {
            ..=HALF_BLOCK => {
                multiply_block::<F, HALF_BLOCK, true>(chunk, panel.as_ptr(), num_units, x, true, ahead, results)
            }
            _ => multiply_block::<F, BLOCK, true>(chunk, panel.as_ptr(), num_units, x, true, ahead, results),
        }
    }
}

/// Some panels times some blocks, into the first tiles of `scratch.results`: `[panel][block]`.
///
/// # Safety
/// The machine has AMX and AVX-512 with VNNI, the program may use AMX, and rows and weight have the same number of units of F.
pub(super) unsafe fn multiply_blocks<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    rows: &Quantized,
    blocks: Range<usize>,
    scratch: &mut Scratch,
) {
    let layout = F::LAYOUT;
    let Scratch { chunk, results, .. } = scratch;
    let results = results.grow(panels.len() * blocks.len());
    let mut configured = 0;
    for first in (0..weight.num_units).step_by(CHUNK_UNITS) {
        let num_units = CHUNK_UNITS.min(weight.num_units - first);
        for (panel, results) in panels.clone().zip(results.chunks_mut(blocks.len())) {
            let units = &weight.panel(panel)[first * layout.unit_bytes()..][..num_units * layout.unit_bytes()];
            // What is read next lies at the same place of the next panel.
            let next = weight.panels(panel + 1..panels.end.min(panel + 2));
            let start = next.len().min(first * layout.unit_bytes());
            let next = &next[start..next.len().min(start + units.len())];
            let mut ahead = Ahead::new(next, num_units * blocks.len());
            // SAFETY: these are whole units of F; features by the caller's promise.
            unsafe { unpack::<F>(units, chunk) };
            for (block, results) in blocks.clone().zip(results) {
                // SAFETY: the block has more slices; what is unpacked already is not read again; tiles are configured for the block, of
                // which the last may have fewer rows.
                unsafe {
                    let x = rows.block(block).at_slice(first * layout.slices);
                    if std::mem::replace(&mut configured, x.num_rows) != x.num_rows {
                        tile_shapes(&layout, x.num_rows).load();
                    }
                    multiply_block::<F, BLOCK, false>(
                        chunk,
                        std::ptr::null(),
                        num_units,
                        x,
                        first == 0,
                        &mut ahead,
                        results,
                    );
                }
            }
        }
    }
}

/// A block times units: into `results` when they are the first of their panel, else added to them.
///
/// # Safety
/// As for `multiply_panel`, whose units begin at `units`; or, without `UNPACK`, the ring holds them.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_block<F: Packing, const ROWS: usize, const UNPACK: bool>(
    chunk: &mut Chunk,
    units: *const u8,
    num_units: usize,
    x: RowBlock,
    fresh: bool,
    ahead: &mut Ahead,
    results: &mut Tile<f32>,
) {
    let mut sums = [_mm512_setzero_ps(); ROWS];
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        if !fresh {
            for_each_row!(ROWS, r => { sums[r] = _mm512_loadu_ps(results[r].as_ptr()); });
        }
        // A step is a unit. While unit n + 1 is multiplied, n is stored and n - 1 scaled: whoever follows at once waits for the one before,
        // and holds up everything behind.
        for first in 0..if UNPACK { num_units.min(UNPACKED) } else { 0 } {
            unpack_unit::<F>(units.add(first * F::LAYOUT.unit_bytes()), first, chunk);
        }
        multiply_unit!(chunk, x, 0, "0", "1");
        let mut n = 0;
        macro_rules! step {
            ($multiplied:tt, $stored:tt, $scaled:literal) => {
                if n + 1 < num_units {
                    multiply_unit!(chunk, x, n + 1, $multiplied);
                }
                if n < num_units {
                    store_unit!(chunk, $stored);
                }
                ahead.fetch();
                if UNPACK && n + UNPACKED < num_units {
                    unpack_unit::<F>(units.add((n + UNPACKED) * F::LAYOUT.unit_bytes()), n + UNPACKED, chunk);
                }
                if n > 0 {
                    for i in 0..2 {
                        let slice = 2 * n - 2 + i;
                        let scales = &chunk.scales[slice % CHUNK_SLICES];
                        scale_slice::<F, ROWS>(&chunk.tiles[$scaled + i], scales, x, slice, &mut sums);
                    }
                }
                if n == num_units {
                    break;
                }
                n += 1;
            };
        }
        loop {
            step!(("2", "3"), (0, 1), 2);
            step!(("0", "1"), (2, 3), 0);
        }
        for_each_row!(ROWS, r => { _mm512_storeu_ps(results[r].as_mut_ptr(), sums[r]); });
    }
}

/// Adds what a slice left in a tile to the sums of its rows.
///
/// # Safety
/// The block has that slice; the machine has AVX-512 F.
#[inline(always)]
unsafe fn scale_slice<F: Packing, const ROWS: usize>(
    tile: &Tile<i32>,
    scales: &SliceScales,
    x: RowBlock,
    slice: usize,
    sums: &mut [__m512; ROWS],
) {
    // SAFETY: by the caller's promise; sums and scales of x can be read for a whole block even where it has fewer rows.
    unsafe {
        let magic = _mm512_castps_si512(_mm512_set1_ps(MAGIC));
        let scale = _mm512_load_ps(scales.scale.as_ptr());
        // Exact: 2 bits times the 11 of a half.
        let excess = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
        let mins = _mm512_load_ps(scales.min.as_ptr());
        let (x_scales, row_sums) = (x.scales.add(slice * x.num_rows), x.sums.add(slice * x.num_rows));
        for_each_row!(ROWS, r => {
            // `product * scale`, rounded once; that the product becomes a float costs no more than an addition of integers.
            let product = _mm512_add_epi32(magic, _mm512_load_si512(tile[r].as_ptr().cast()));
            let mut part = _mm512_fmadd_ps(_mm512_castsi512_ps(product), scale, excess);
            if F::LAYOUT.mins == Mins::Plain {
                part = _mm512_fmadd_ps(_mm512_set1_ps(*row_sums.add(r)), mins, part);
            }
            sums[r] = _mm512_fmadd_ps(part, _mm512_set1_ps(*x_scales.add(r)), sums[r]);
        });
    }
}

/// Multiplies the two slices of a unit, into two tiles that are zero.
macro_rules! multiply_unit {
    ($chunk:ident, $x:ident, $unit:expr, ($first:literal, $second:literal)) => {
        multiply_unit!($chunk, $x, $unit, $first, $second)
    };
    ($chunk:ident, $x:ident, $unit:expr, $first:literal, $second:literal) => {{
        let slice = 2 * ($unit);
        // Two slices of a row lie side by side, and so do a tile's lines: 64 bytes.
        let x = $x.slice(slice, 0);
        asm!(
            "tileloadd tmm4, [{x0} + {stride}]",
            "tileloadd tmm5, [{w0} + {stride}]",
            concat!("tdpbssd tmm", $first, ", tmm4, tmm5"),
            "tilezero tmm4",
            "tilezero tmm5",
            "tileloadd tmm4, [{x1} + {stride}]",
            "tileloadd tmm5, [{w1} + {stride}]",
            concat!("tdpbssd tmm", $second, ", tmm4, tmm5"),
            "tilezero tmm4",
            "tilezero tmm5",
            x0 = in(reg) x,
            x1 = in(reg) x.add(SLICE),
            w0 = in(reg) $chunk.integers[slice % CHUNK_SLICES].as_ptr(),
            w1 = in(reg) $chunk.integers[slice % CHUNK_SLICES + 1].as_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        )
    }};
}

/// Stores the two tiles of a unit, and leaves zeros in them, as configuring does.
macro_rules! store_unit {
    ($chunk:ident, ($first:literal, $second:literal)) => {
        asm!(
            concat!("tilestored [{to0} + {stride}], tmm", $first),
            concat!("tilezero tmm", $first),
            concat!("tilestored [{to1} + {stride}], tmm", $second),
            concat!("tilezero tmm", $second),
            to0 = in(reg) $chunk.tiles[$first].as_mut_ptr(),
            to1 = in(reg) $chunk.tiles[$second].as_mut_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        )
    };
}
use {multiply_unit, store_unit};
