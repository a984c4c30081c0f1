//! Formats whose slices are scaled by integers, the K formats: the scale is multiplied into the numbers, which then take two bytes.
//!
//! Q4_K and Q5_K: a scale of six bits is `8 high + low`, and the number times either fits an unsigned byte (31 * 7 < 256). Q6_K: the number
//! times its scale has 13 bits and a sign, and is `128 high + low` with high in -32..=32 and low in 0..128. Both bytes are multiplied with
//! x, 64 numbers at a time, and added up over a unit of 256. The sum is exact, and the same as that of scaled slices.
//!
//! Bound for 16 x 16 x 256: eight multiplications of 16 cycles. What a unit leaves is stored and scaled while the next is multiplied.
//! Measured: 25 cycles for each 32 numbers with x in the first-level cache, 32 from the second (2026-11-15, Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;
use std::ops::Range;

use super::super::activations::RowBlock;
use super::super::ahead::Ahead;
use super::super::avx512::{halves, integers, min_pairs, scale_integers};
use super::super::packing::{COLUMNS, Mins, Packing, SLICE, Scales};
use super::super::weight::PackedWeight;
use super::rows::{FEW, Registers, Rows, plain_row, row_with_min, scale_four};
use super::{BLOCK, Chunk, Scratch, Tile, UnitScales, num_planes};

/// Pairs of slices in a unit: steps of the multiplication.
pub(super) const PAIRS: usize = 4;

/// Pairs of slices whose integers the ring holds, 8 KB: the fewer, the surer they stay in the first-level cache. So many are unpacked before
/// they are multiplied.
const RING_PAIRS: usize = 4;
const UNPACKED: usize = RING_PAIRS - 1;

/// Units whose scales are kept.
pub(super) const SCALE_UNITS: usize = 4;

/// Unpacks one of a pair of slices of a unit to bytes in each plane, of which the low one lies 1 KB behind the high one; with the first slice
/// what else there is of the pair, and with the first pair the unit's scales to f32.
///
/// # Safety
/// `unit` is a whole unit of F, and there is room for two slices in both planes; the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn unpack_slice<F: Packing>(
    unit: *const u8,
    pair: usize,
    second: usize,
    planes: *mut [u8; 512],
    scales: &mut UnitScales,
) {
    let layout = F::LAYOUT;
    // SAFETY: by the caller's promise.
    unsafe {
        let slice = 2 * pair + second;
        let integers = integers::<F>(unit, slice);
        let factors = [in_words(scale_integers::<F>(unit, slice, 0)), in_words(scale_integers::<F>(unit, slice, 1))];
        let [high_plane, low_plane] = [second, 2 + second].map(|at| planes.add(at).cast::<u8>());
        for j in 0..8 {
            let (high, low) = scaled::<F>(integers[j], factors[j / 4]);
            _mm512_store_si512(high_plane.add(64 * j).cast(), high);
            _mm512_store_si512(low_plane.add(64 * j).cast(), low);
        }
        if second == 1 {
            return;
        }
        if layout.mins == Mins::Slices {
            _mm512_store_si512(scales.min_pairs[pair].as_mut_ptr().cast(), min_pairs::<F>(unit, pair));
        }
        if pair == 0 {
            _mm512_store_ps(scales.scale.as_mut_ptr(), halves(unit.add(layout.head())));
            if layout.mins == Mins::Slices {
                _mm512_store_ps(scales.min.as_mut_ptr(), halves(unit.add(layout.min_head())));
            }
        }
    }
}

/// Small integers in both halves of their lanes.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
unsafe fn in_words(integers: __m512i) -> __m512i {
    // SAFETY: by the caller's promise.
    unsafe {
        let low = _mm512_and_si512(integers, _mm512_set1_epi32(0xffff));
        _mm512_or_si512(_mm512_slli_epi32::<16>(integers), low)
    }
}

/// Bytes times scales, which are there in both halves of each lane: the high bytes and the low ones.
///
/// # Safety
/// The machine has AVX-512 BW.
#[inline(always)]
unsafe fn scaled<F: Packing>(integers: __m512i, scale: __m512i) -> (__m512i, __m512i) {
    // SAFETY: by the caller's promise.
    unsafe {
        if F::LAYOUT.scales == Scales::Slices {
            // One multiplication for two bytes: the product of the lower one stays below 256.
            let (high, low) = (_mm512_srli_epi16::<3>(scale), _mm512_and_si512(scale, _mm512_set1_epi16(7)));
            return (_mm512_mullo_epi16(integers, high), _mm512_mullo_epi16(integers, low));
        }
        let offset = _mm512_set1_epi16(F::LAYOUT.offset_shift.map_or(0, |shift| 1i16 << shift));
        let bytes = _mm512_set1_epi16(0xff);
        let even = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_and_si512(integers, bytes), offset), scale);
        let odd = _mm512_mullo_epi16(_mm512_sub_epi16(_mm512_srli_epi16::<8>(integers), offset), scale);
        // a where c is set, else b
        const CHOOSE: i32 = 0xe4;
        let (even_high, odd_high) = (_mm512_srai_epi16::<7>(even), _mm512_slli_epi16::<1>(odd));
        let high = _mm512_ternarylogic_epi32::<CHOOSE>(even_high, odd_high, bytes);
        let low = _mm512_ternarylogic_epi32::<CHOOSE>(even, _mm512_slli_epi16::<8>(odd), bytes);
        (high, _mm512_and_si512(low, _mm512_set1_epi8(0x7f)))
    }
}

/// One block of rows times some panels, each unpacked just before its use: a tile of results for each. There are more panels to
/// come, up to `end`.
///
/// # Safety
/// Tiles are configured for the block; the machine has AMX and AVX-512 with VNNI, and rows and weight have the same number of units of F.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_panels<F: Packing>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    x: RowBlock,
    scratch: &mut Scratch,
    results: &mut [Tile<f32>],
) {
    let chunk = &mut scratch.chunk;
    let units = weight.panels(panels.clone()).as_ptr();
    let (num_units, total) = (weight.num_units, weight.num_units * panels.len());
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        let unpack = |n: usize, pair: usize, second: usize, chunk: &mut Chunk| {
            if n < total {
                let to = chunk.integers[4 * ((n * PAIRS + pair) % RING_PAIRS)..].as_mut_ptr();
                let scales = &mut chunk.unit_scales[n % SCALE_UNITS];
                unpack_slice::<F>(units.add(n * F::LAYOUT.unit_bytes()), pair, second, to, scales);
            }
        };
        for pair in 0..UNPACKED {
            (0..2).for_each(|second| unpack(0, pair, second, chunk));
        }
        let mut ahead = Ahead::new(&[], 1);
        // Of the unit that is multiplied, and of the one before it, which is scaled: the panel, and its number there.
        let (mut now, mut before) = ((0, 0), (0, 0));
        for n in 0..=total {
            if n < total && now.1 == 0 {
                let next = panels.start + now.0 + 1;
                ahead = Ahead::new(weight.panels(next..end.min(next + 1)), num_units * num_planes(&F::LAYOUT).pow(2));
            }
            for pair in 0..PAIRS {
                let (n_ahead, pair_ahead) = (n + (pair + UNPACKED) / PAIRS, (pair + UNPACKED) % PAIRS);
                if n < total {
                    let w = chunk.integers[4 * ((n * PAIRS + pair) % RING_PAIRS)..].as_ptr();
                    multiply_pair::<F>(x.slice(2 * (PAIRS * now.1 + pair), 0), w, n);
                    (0..2).for_each(|second| unpack(n_ahead, pair_ahead, second, chunk));
                    ahead.fetch();
                }
                if n > 0 && pair == 0 {
                    store_tiles(chunk, n - 1);
                }
                let registers = Registers::load(&chunk.unit_scales[n.wrapping_sub(1) % SCALE_UNITS]);
                for first in rows_after(pair).step_by(FEW) {
                    if n > 0 && first < x.num_rows {
                        let (fresh, results) = (before.1 == 0, &mut results[before.0]);
                        let rows = Rows::new(&chunk.tiles, &x, before.1, first, fresh, results);
                        scale_four!(F::LAYOUT.scales, registers, rows, ["", "", "", ""],);
                    }
                }
            }
            before = now;
            now = if now.1 + 1 == num_units { (now.0 + 1, 0) } else { (now.0, now.1 + 1) };
        }
    }
}

/// Rows of the unit before that are scaled after a pair of slices is multiplied: with the first pair it is still being stored.
const fn rows_after(pair: usize) -> Range<usize> {
    match pair {
        0 => 0..0,
        1 => 0..FEW,
        2 => FEW..2 * FEW,
        _ => 2 * FEW..BLOCK,
    }
}

/// Multiplies two slices of a unit in both planes, into tiles 0 and 1 for even n and 2 and 3 for odd ones, which begin as zeros. What is
/// unpacked meanwhile follows at once: among these instructions it made them slower.
///
/// # Safety
/// The block has these slices, and so has the ring; tiles are configured for them; the machine has AMX.
#[inline(always)]
unsafe fn multiply_pair<F: Packing>(x: *const i8, w: *const [u8; 512], n: usize) {
    macro_rules! multiply {
        ($dot:literal, $high:literal, $low:literal) => {
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm5, [{w} + {stride}]",
                concat!($dot, " tmm", $high, ", tmm4, tmm5"),
                "tileloadd tmm5, [{w} + {stride} + 1024]",
                concat!($dot, " tmm", $low, ", tmm4, tmm5"),
                x = in(reg) x,
                w = in(reg) w,
                stride = in(reg) 2 * SLICE,
                options(nostack, preserves_flags, readonly),
            )
        };
    }
    const { assert!(2 * SLICE == 4 * COLUMNS) };
    // SAFETY: by the caller's promise; nothing else of the program uses tile registers.
    unsafe {
        match (F::LAYOUT.scales, n % 2) {
            (Scales::Halves, 0) => multiply!("tdpbssd", "0", "1"),
            (Scales::Halves, _) => multiply!("tdpbssd", "2", "3"),
            (_, 0) => multiply!("tdpbsud", "0", "1"),
            _ => multiply!("tdpbsud", "2", "3"),
        }
    }
}

/// Stores the tiles of a unit, and leaves zeros in them, as configuring does.
///
/// # Safety
/// As for `multiply_pair`.
#[inline(always)]
unsafe fn store_tiles(chunk: &mut Chunk, n: usize) {
    macro_rules! store {
        ($high:literal, $low:literal) => {
            asm!(
                concat!("tilestored [{high} + {stride}], tmm", $high),
                concat!("tilezero tmm", $high),
                concat!("tilestored [{low} + {stride}], tmm", $low),
                concat!("tilezero tmm", $low),
                high = in(reg) chunk.tiles[0].as_mut_ptr(),
                low = in(reg) chunk.tiles[1].as_mut_ptr(),
                stride = in(reg) 4 * COLUMNS,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: each store writes sixteen lines, or fewer, of an array of as many.
    unsafe {
        match n % 2 {
            0 => store!("0", "1"),
            _ => store!("2", "3"),
        }
    }
}
