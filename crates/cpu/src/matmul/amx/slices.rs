//! Formats whose slices of 32 numbers have a scale of their own in floats: each slice is a tile that goes to memory, where vectors scale it.
//!
//! Bound for 16 x 16 x 32: 16 cycles of multiplication, 16 of storing, and 32 float operations (48 with minimums), of which a core does
//! one a cycle while it uses tiles. Measured: 40 cycles with x in the first-level cache, 44 from the second (2026-11-15, Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::avx512::{halves, integers};
use super::super::packing::{Mins, Packing, SLICE};
use super::{Ahead, BLOCK, Chunk, RowBlock, Stretch, Tile};

/// 1.5 * 2^23: an integer below 2^22 in magnitude, added to these bits, is a float that is larger than the integer by this much.
const MAGIC: f32 = 12_582_912.0;

/// Unpacks units: integers to signed bytes, scales to f32.
///
/// # Safety
/// They are whole units of F, no more than a chunk holds; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn unpack<F: Packing>(units: &[u8], chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    let offset = _mm512_set1_epi8(layout.offset_shift.map_or(0, |shift| (1u8 << shift) as i8));
    for (u, unit) in units.chunks_exact(layout.unit_bytes()).enumerate() {
        for slice in 0..layout.slices {
            let at = u * layout.slices + slice;
            // SAFETY: the unit is whole by the caller's promise; the chunk's arrays have room for all slices of a chunk.
            unsafe {
                let bytes = chunk.integers[at].as_mut_ptr();
                for (j, integers) in integers::<F>(unit.as_ptr(), slice).into_iter().enumerate() {
                    _mm512_store_si512(bytes.add(64 * j).cast(), _mm512_sub_epi8(integers, offset));
                }
                let scales = halves(unit.as_ptr().add(layout.scale(slice)));
                _mm512_store_ps(chunk.scales[at].as_mut_ptr(), scales);
                if layout.mins == Mins::Plain {
                    let mins = halves(unit.as_ptr().add(layout.min(slice)));
                    _mm512_store_ps(chunk.mins[at].as_mut_ptr(), mins);
                }
            }
        }
    }
}

/// Evaluates a block for each row of a block with the row as a constant: sixteen sums stay in registers only when nothing indexes them
/// by a variable.
macro_rules! for_each_row {
    ($r:ident => $body:block) => {
        for_each_row!($r => $body, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    ($r:ident => $body:block, $($row:literal)*) => {
        $({
            const $r: usize = $row;
            $body
        })*
    };
}

/// Blocks of rows times a chunk: into `results` when the chunk is the first of its panel, else added to them.
///
/// # Safety
/// The chunk holds as many units as the stretch; tiles are configured for its blocks; the machine has AMX and AVX-512 with VNNI.
pub(super) unsafe fn multiply<F: Packing>(
    chunk: &mut Chunk,
    stretch: &Stretch<'_>,
    fresh: bool,
    ahead: &mut Ahead,
    results: &mut [Tile<f32>],
) {
    for (i, results) in results.iter_mut().enumerate() {
        // SAFETY: passed on from the caller.
        unsafe { multiply_block::<F>(chunk, stretch.num_units, stretch.block(i, &F::LAYOUT), fresh, ahead, results) };
    }
}

/// # Safety
/// As for `multiply`; the block has that many units.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
unsafe fn multiply_block<F: Packing>(
    chunk: &mut Chunk,
    num_units: usize,
    x: RowBlock,
    fresh: bool,
    ahead: &mut Ahead,
    results: &mut Tile<f32>,
) {
    let mut sums = [_mm512_setzero_ps(); BLOCK];
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        if !fresh {
            for_each_row!(R => { sums[R] = _mm512_loadu_ps(results[R].as_ptr()); });
        }
        // A step is a unit. While unit n + 1 is multiplied, n is stored and n - 1 scaled: whoever follows at once waits for the one before,
        // and holds up everything behind.
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
                if n > 0 {
                    scale_slice::<F>(chunk, x, 2 * n - 2, $scaled, &mut sums);
                    scale_slice::<F>(chunk, x, 2 * n - 1, $scaled + 1, &mut sums);
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
        for_each_row!(R => { _mm512_storeu_ps(results[R].as_mut_ptr(), sums[R]); });
    }
}

/// Adds what a slice left in a tile to the sums of its rows.
///
/// # Safety
/// As for `multiply`; the slice is one of the chunk's.
#[inline(always)]
unsafe fn scale_slice<F: Packing>(chunk: &Chunk, x: RowBlock, slice: usize, tile: usize, sums: &mut [__m512; BLOCK]) {
    // SAFETY: as for `multiply`.
    unsafe {
        let tile = &chunk.tiles[tile];
        let magic = _mm512_castps_si512(_mm512_set1_ps(MAGIC));
        let scale = _mm512_load_ps(chunk.scales[slice].as_ptr());
        // Exact: 2 bits times the 11 of a half.
        let excess = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
        let mins = _mm512_load_ps(chunk.mins[slice].as_ptr());
        let (x_scales, row_sums) = (x.scales.add(slice * x.num_rows), x.sums.add(slice * x.num_rows));
        for_each_row!(R => {
            // `product * scale`, rounded once; that the product becomes a float costs no more than an addition of integers.
            let product = _mm512_add_epi32(magic, _mm512_load_si512(tile[R].as_ptr().cast()));
            let mut part = _mm512_fmadd_ps(_mm512_castsi512_ps(product), scale, excess);
            if F::LAYOUT.mins == Mins::Plain {
                part = _mm512_fmadd_ps(_mm512_set1_ps(*row_sums.add(R)), mins, part);
            }
            sums[R] = _mm512_fmadd_ps(part, _mm512_set1_ps(*x_scales.add(R)), sums[R]);
        });
    }
}

/// Multiplies the two slices of a unit, into two tiles.
macro_rules! multiply_unit {
    ($chunk:ident, $x:ident, $unit:expr, ($first:literal, $second:literal)) => {
        multiply_unit!($chunk, $x, $unit, $first, $second)
    };
    ($chunk:ident, $x:ident, $unit:expr, $first:literal, $second:literal) => {{
        let slice = 2 * ($unit);
        // Two slices of a row lie side by side, and so do a tile's lines: 64 bytes.
        let x = $x.slice(slice, 0);
        asm!(
            concat!("tilezero tmm", $first),
            "tileloadd tmm4, [{x0} + {stride}]",
            "tileloadd tmm6, [{w0} + {stride}]",
            concat!("tdpbssd tmm", $first, ", tmm4, tmm6"),
            concat!("tilezero tmm", $second),
            "tileloadd tmm5, [{x1} + {stride}]",
            "tileloadd tmm7, [{w1} + {stride}]",
            concat!("tdpbssd tmm", $second, ", tmm5, tmm7"),
            x0 = in(reg) x,
            x1 = in(reg) x.add(SLICE),
            w0 = in(reg) $chunk.integers[slice].as_ptr(),
            w1 = in(reg) $chunk.integers[slice + 1].as_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags, readonly),
        )
    }};
}

/// Stores the two tiles of a unit.
macro_rules! store_unit {
    ($chunk:ident, ($first:literal, $second:literal)) => {
        asm!(
            concat!("tilestored [{to0} + {stride}], tmm", $first),
            concat!("tilestored [{to1} + {stride}], tmm", $second),
            to0 = in(reg) $chunk.tiles[$first].as_mut_ptr(),
            to1 = in(reg) $chunk.tiles[$second].as_mut_ptr(),
            stride = in(reg) 64usize,
            options(nostack, preserves_flags),
        )
    };
}
use {multiply_unit, store_unit};
