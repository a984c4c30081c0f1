//! Formats whose slices of 32 numbers have a scale of their own in floats: each slice is a tile that goes to memory, where vectors scale it.
//!
//! Bound for 16 x 16 x 32: 16 cycles of multiplication, 16 of storing, and 32 float operations (48 with minimums), of which a core does
//! one a cycle while it uses tiles. Measured: 40 cycles with x in the first-level cache, 44 from the second (2026-11-15, Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;

use super::super::avx512::{halves, integers};
use super::super::packing::{COLUMNS, Mins, Packing, SLICE};
use super::{BLOCK, Chunk, Place, Stretch, Tile, prefetch};

/// Slices between a multiplication and the store of its tile, which would otherwise wait for it and hold up all that follows.
const STORE_LAG: usize = 2;
/// Slices between a multiplication and the use of what was stored.
const USE_LAG: usize = 3;

/// 1.5 * 2^23: an integer below 2^22 in magnitude, added to these bits, is a float that is larger than the integer by this much.
const MAGIC: f32 = 12_582_912.0;

/// Unpacks units: integers to signed bytes, scales to f32.
///
/// # Safety
/// They are whole units of F, no more than a chunk holds; the machine has AVX-512 BW.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn unpack<F: Packing>(units: &[u8], ahead: usize, chunk: &mut Chunk) {
    let layout = F::LAYOUT;
    let offset = _mm512_set1_epi8(layout.offset_shift.map_or(0, |shift| (1u8 << shift) as i8));
    for (u, unit) in units.chunks_exact(layout.unit_bytes()).enumerate() {
        prefetch(unit, ahead);
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
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply<F: Packing>(
    chunk: &mut Chunk,
    stretch: &Stretch<'_>,
    fresh: bool,
    results: &mut [Tile<f32>],
) {
    let layout = F::LAYOUT;
    let num_slices = stretch.num_units * layout.slices;
    let total = num_slices * results.len();
    let magic = _mm512_castps_si512(_mm512_set1_ps(MAGIC));
    let mut sums = [_mm512_setzero_ps(); BLOCK];
    // SAFETY: see the promises of the function; every index below is within the blocks' and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        let mut next = Place::first(stretch, &layout);
        let mut done = next;
        for n in 0..total + USE_LAG {
            if n < total {
                multiply_tile(chunk, &next, n);
                next.advance(num_slices, stretch, &layout);
            }
            if (STORE_LAG..total + STORE_LAG).contains(&n) {
                store_tile(chunk, n - STORE_LAG);
            }
            let Some(used) = n.checked_sub(USE_LAG) else { continue };
            let Place { block, step: slice, x } = done;
            let results = &mut results[block];
            if slice == 0 {
                for_each_row!(R => {
                    sums[R] = if fresh { _mm512_setzero_ps() } else { _mm512_loadu_ps(results[R].as_ptr()) };
                });
            }
            let tile = &chunk.tiles[used % 4];
            let scale = _mm512_load_ps(chunk.scales[slice].as_ptr());
            // Exact: 2 bits times the 11 of a half.
            let excess = _mm512_mul_ps(scale, _mm512_set1_ps(-MAGIC));
            let mins = _mm512_load_ps(chunk.mins[slice].as_ptr());
            let (x_scales, row_sums) = (x.scales.add(slice * x.num_rows), x.sums.add(slice * x.num_rows));
            for_each_row!(R => {
                // `product * scale`, rounded once, like everything that is fused; the conversion to a float costs an addition of integers.
                let product = _mm512_add_epi32(magic, _mm512_load_si512(tile[R].as_ptr().cast()));
                let mut part = _mm512_fmadd_ps(_mm512_castsi512_ps(product), scale, excess);
                if layout.mins == Mins::Plain {
                    part = _mm512_fmadd_ps(_mm512_set1_ps(*row_sums.add(R)), mins, part);
                }
                sums[R] = _mm512_fmadd_ps(part, _mm512_set1_ps(*x_scales.add(R)), sums[R]);
            });
            if slice + 1 == num_slices {
                for_each_row!(R => { _mm512_storeu_ps(results[R].as_mut_ptr(), sums[R]); });
            }
            done.advance(num_slices, stretch, &layout);
        }
    }
}

/// Multiplies the tiles of one slice; results of four stay in registers.
///
/// # Safety
/// As for `multiply`; the place is one of the stretch.
#[inline(always)]
unsafe fn multiply_tile(chunk: &Chunk, place: &Place, n: usize) {
    macro_rules! multiply {
        ($result:literal, $x:literal, $w:literal) => {
            asm!(
                concat!("tilezero tmm", $result),
                concat!("tileloadd tmm", $x, ", [{x} + {stride}]"),
                concat!("tileloadd tmm", $w, ", [{w} + {stride}]"),
                concat!("tdpbssd tmm", $result, ", tmm", $x, ", tmm", $w),
                x = in(reg) place.x.slice(place.step, 0),
                w = in(reg) chunk.integers[place.step].as_ptr(),
                stride = in(reg) 2 * SLICE,
                options(nostack, preserves_flags, readonly),
            )
        };
    }
    const { assert!(2 * SLICE == 4 * COLUMNS) };
    // SAFETY: the tiles read a slice of the block, whose rows lie two slices apart, and one of the chunk; nothing else of the program uses
    // tile registers.
    unsafe {
        match n % 4 {
            0 => multiply!("0", "4", "6"),
            1 => multiply!("1", "5", "7"),
            2 => multiply!("2", "4", "6"),
            _ => multiply!("3", "5", "7"),
        }
    }
}

/// # Safety
/// As for `multiply`.
#[inline(always)]
unsafe fn store_tile(chunk: &mut Chunk, n: usize) {
    macro_rules! store {
        ($result:literal) => {
            asm!(
                concat!("tilestored [{to} + {stride}], tmm", $result),
                to = in(reg) chunk.tiles[$result].as_mut_ptr(),
                stride = in(reg) 4 * COLUMNS,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: each store writes sixteen lines, or fewer, of an array of as many.
    unsafe {
        match n % 4 {
            0 => store!(0),
            1 => store!(1),
            2 => store!(2),
            _ => store!(3),
        }
    }
}
