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
use super::super::packing::{COLUMNS, Layout, Mins, Packing, SLICE, Scales};
use super::{CHUNK_SLICES, Chunk, Tile, UnitScales};

const HALF: usize = CHUNK_SLICES / 2;

/// What the high byte counts.
const fn low_bits(layout: &Layout) -> u32 {
    if matches!(layout.scales, Scales::Halves) { 7 } else { 3 }
}

/// Pairs of slices in a unit: steps of the multiplication.
pub(super) const PAIRS: usize = 4;

/// Units whose integers a chunk holds, and whose scales: rings, of which scales are needed for longer.
const INTEGER_UNITS: usize = HALF / (2 * PAIRS);
pub(super) const SCALE_UNITS: usize = 2 * INTEGER_UNITS;

/// Unpacks two slices of a unit to bytes of 1 KB in each plane, and with the first two the unit's scales to f32.
///
/// # Safety
/// `unit` is a whole unit of F, and there is room for both planes; the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn unpack_pair<F: Packing>(
    unit: *const u8,
    pair: usize,
    planes: [*mut u8; 2],
    scales: &mut UnitScales,
) {
    let layout = F::LAYOUT;
    // SAFETY: by the caller's promise.
    unsafe {
        for s in 0..2 {
            let slice = 2 * pair + s;
            let integers = integers::<F>(unit, slice);
            let factors =
                [in_words(scale_integers::<F>(unit, slice, 0)), in_words(scale_integers::<F>(unit, slice, 1))];
            for j in 0..8 {
                let (high, low) = scaled::<F>(integers[j], factors[j / 4]);
                _mm512_store_si512(planes[0].add(512 * s + 64 * j).cast(), high);
                _mm512_store_si512(planes[1].add(512 * s + 64 * j).cast(), low);
            }
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

/// One block of rows times a whole panel, which is unpacked unit by unit just before its use.
///
/// # Safety
/// The panel holds whole units of F, and the block as many; tiles are configured for it; the machine has AMX and AVX-512 with VNNI.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_panel<F: Packing>(
    chunk: &mut Chunk,
    panel: &[u8],
    x: RowBlock,
    ahead: &mut Ahead,
    results: &mut Tile<f32>,
) {
    let unit_bytes = F::LAYOUT.unit_bytes();
    let num_units = panel.len() / unit_bytes;
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        let unpack = |n: usize, pair: usize, chunk: &mut Chunk| {
            let to = (n % INTEGER_UNITS * PAIRS + pair) * 2;
            let planes = [to, HALF + to].map(|to| chunk.integers[to].as_mut_ptr());
            unpack_pair::<F>(panel.as_ptr().add(n * unit_bytes), pair, planes, &mut chunk.unit_scales[n % SCALE_UNITS]);
        };
        (0..PAIRS).for_each(|pair| unpack(0, pair, chunk));
        for n in 0..=num_units {
            for pair in 0..PAIRS {
                if n < num_units {
                    multiply_tiles::<F>(chunk, x, pair, n);
                    ahead.fetch();
                }
                if n + 1 < num_units {
                    unpack(n + 1, pair, chunk);
                }
                match (n, pair) {
                    (0, _) => {}
                    (_, 0) => store_tiles(chunk, n - 1),
                    // A third of the rows.
                    _ => {
                        let third = |i: usize| i * x.num_rows / (PAIRS - 1);
                        let scales = &chunk.unit_scales[(n - 1) % SCALE_UNITS];
                        let tiles = [&chunk.tiles[0], &chunk.tiles[1]];
                        scale_rows::<F>(tiles, scales, x, n - 1, third(pair - 1)..third(pair), n == 1, results);
                    }
                }
            }
        }
    }
}

/// Adds what a unit leaves in the tiles, high and low, to the results of some rows; or, when it is the first, makes that the results.
///
/// # Safety
/// The block has that unit and these rows; the machine has AVX-512 with VNNI.
#[inline(always)]
pub(super) unsafe fn scale_rows<F: Packing>(
    tiles: [&Tile<i32>; 2],
    scales: &UnitScales,
    x: RowBlock,
    unit: usize,
    rows: Range<usize>,
    fresh: bool,
    results: &mut Tile<f32>,
) {
    let kept: __mmask16 = if fresh { 0 } else { !0 };
    // SAFETY: by the caller's promise; arrays of sums and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        let (scale, dmin) = (_mm512_load_ps(scales.scale.as_ptr()), _mm512_load_ps(scales.min.as_ptr()));
        let mins: [__m512i; PAIRS] = std::array::from_fn(|i| _mm512_load_si512(scales.min_pairs[i].as_ptr().cast()));
        let pairs = x.pairs.add(unit * PAIRS * x.num_rows).cast::<i32>();
        let x_scales = x.scales.add(unit * x.num_rows);
        for r in rows {
            let high = _mm512_load_si512(tiles[0][r].as_ptr().cast());
            let low = _mm512_load_si512(tiles[1][r].as_ptr().cast());
            let high = match low_bits(&F::LAYOUT) {
                3 => _mm512_slli_epi32::<3>(high),
                _ => _mm512_slli_epi32::<7>(high),
            };
            let sum = _mm512_add_epi32(high, low);
            let mut part = _mm512_mul_ps(_mm512_cvtepi32_ps(sum), scale);
            if F::LAYOUT.mins == Mins::Slices {
                let mut minimums = _mm512_setzero_si512();
                for i in 0..PAIRS {
                    let pair = pairs.add(i * x.num_rows + r).read_unaligned();
                    minimums = _mm512_dpwssd_epi32(minimums, mins[i], _mm512_set1_epi32(pair));
                }
                part = _mm512_fnmadd_ps(_mm512_cvtepi32_ps(minimums), dmin, part);
            }
            let result = _mm512_maskz_loadu_ps(kept, results[r].as_ptr());
            let result = _mm512_fmadd_ps(part, _mm512_set1_ps(*x_scales.add(r)), result);
            _mm512_storeu_ps(results[r].as_mut_ptr(), result);
        }
    }
}

/// Multiplies two slices of a unit in both planes, into tiles 0 and 1 for even n and 2 and 3 for odd ones, which begin as zeros.
///
/// # Safety
/// As for `multiply_panel`; the block has that unit.
#[inline(always)]
unsafe fn multiply_tiles<F: Packing>(chunk: &Chunk, x: RowBlock, pair: usize, n: usize) {
    let slice = 2 * (PAIRS * n + pair);
    let at = slice % HALF;
    macro_rules! multiply {
        ($dot:literal, $high:literal, $low:literal) => {
            asm!(
                "tileloadd tmm4, [{x} + {stride}]",
                "tileloadd tmm5, [{high} + {stride}]",
                concat!($dot, " tmm", $high, ", tmm4, tmm5"),
                "tileloadd tmm5, [{low} + {stride}]",
                concat!($dot, " tmm", $low, ", tmm4, tmm5"),
                x = in(reg) x.slice(slice, 0),
                high = in(reg) chunk.integers[at].as_ptr(),
                low = in(reg) chunk.integers[HALF + at].as_ptr(),
                stride = in(reg) 2 * SLICE,
                options(nostack, preserves_flags, readonly),
            )
        };
    }
    const { assert!(2 * SLICE == 4 * COLUMNS) };
    // SAFETY: the tiles read two slices of the block, whose rows lie side by side, and of the chunk; nothing else of the program uses
    // tile registers.
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
/// As for `multiply_panel`.
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
