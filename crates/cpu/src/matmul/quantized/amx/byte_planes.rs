//! Formats whose slices are scaled by integers, the K formats: the scale is multiplied into the numbers, which then take two bytes.
//!
//! Q4_K and Q5_K: a scale of six bits is `8 high + low`, and the number times either fits an unsigned byte (31 * 7 < 256). Q6_K: the number
//! times its scale has 13 bits and a sign, and is `256 high + low` with high in -16..=16 and low in 0..256. Both bytes are multiplied with
//! x, 64 numbers at a time, and added up over a unit of 256. The sum is exact, and the same as that of scaled slices.
//!
//! Bound for 16 x 16 x 256: eight multiplications of 16 cycles. What a unit leaves is stored and scaled while the next is multiplied.
//! Measured: 25 cycles for each 32 numbers with x in the first-level cache, 32 from the second (2026-11-15, Xeon with AMX).

use std::arch::asm;
use std::arch::x86_64::*;
use std::marker::PhantomData;
use std::ops::Range;

use super::scale_rows::{ScaledRows, UnitScaleRegisters, plain_row, row_with_min, scale_four};
use super::{AmxScratch, Tile, UnitScales, UnpackRing};
use crate::matmul::PANEL_COLUMNS;
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::RowBlock;
use crate::matmul::quantized::avx512::{halves, integer, min_pairs, scale_integers};
use crate::matmul::quantized::panel_layout::{Mins, QuantizedFormat, SLICE_LEN, Scales};
use crate::matmul::weight::PackedWeight;

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
pub(super) unsafe fn unpack_slice<F: QuantizedFormat>(
    unit: *const u8,
    pair: usize,
    second: usize,
    planes: *mut [u8; 512],
    scales: &mut UnitScales,
) {
    // SAFETY: by the caller's promise.
    unsafe {
        let slice = SliceUnpacker::<F>::new(unit, 2 * pair + second, planes.add(second));
        for j in 0..4 {
            slice.unpack(j);
        }
        if second == 0 {
            unpack_scales::<F>(unit, pair, scales);
        }
    }
}

/// What scales a pair of slices beside their factors; with the first pair what scales the unit.
///
/// # Safety
/// As for [`unpack_slice`].
#[inline(always)]
unsafe fn unpack_scales<F: QuantizedFormat>(unit: *const u8, pair: usize, scales: &mut UnitScales) {
    let layout = F::LAYOUT;
    // SAFETY: by the caller's promise.
    unsafe {
        if layout.mins == Mins::PerSlice {
            _mm512_store_si512(scales.min_pairs[pair].as_mut_ptr().cast(), min_pairs::<F>(unit, pair));
        }
        if pair == 0 {
            _mm512_store_ps(scales.scale.as_mut_ptr(), halves(unit.add(layout.head())));
            if layout.mins == Mins::PerSlice {
                _mm512_store_ps(scales.min.as_mut_ptr(), halves(unit.add(layout.min_head())));
            }
        }
    }
}

/// A slice that is being unpacked.
struct SliceUnpacker<F> {
    unit: *const u8,
    slice: usize,
    /// Of each half of it.
    factors: [ScaleFactors; 2],
    /// In the high plane.
    to: *mut u8,
    format: PhantomData<F>,
}

impl<F: QuantizedFormat> SliceUnpacker<F> {
    /// # Safety
    /// As for [`unpack_slice`].
    #[inline(always)]
    unsafe fn new(unit: *const u8, slice: usize, to: *mut [u8; 512]) -> Self {
        // SAFETY: by the caller's promise.
        let factors = unsafe { [ScaleFactors::load::<F>(unit, slice, 0), ScaleFactors::load::<F>(unit, slice, 1)] };
        SliceUnpacker { unit, slice, factors, to: to.cast(), format: PhantomData }
    }

    /// A fourth of it: registers j and j + 4.
    ///
    /// # Safety
    /// As for [`unpack_slice`].
    #[inline(always)]
    unsafe fn unpack(&self, j: usize) {
        // SAFETY: by the promise of `new`.
        unsafe {
            let integers = [integer::<F>(self.unit, self.slice, j), integer::<F>(self.unit, self.slice, j + 4)];
            for half in 0..2 {
                let (high, low) = self.factors[half].times::<F>(integers[half]);
                let to = self.to.add(64 * (j + 4 * half));
                _mm512_store_si512(to.cast(), high);
                _mm512_store_si512(to.add(1024).cast(), low);
            }
        }
    }
}

/// What numbers are multiplied by: the scale, in both halves of each lane, in the forms that take the fewest instructions.
#[derive(Clone, Copy)]
struct ScaleFactors {
    /// For the high plane; of Q6_K for the lower bytes of lanes.
    high: __m512i,
    /// For the low plane; of Q6_K for the upper bytes of lanes.
    low: __m512i,
}

impl ScaleFactors {
    /// # Safety
    /// `unit` is a whole unit of F, a K format; the machine has AVX-512 BW.
    #[inline(always)]
    unsafe fn load<F: QuantizedFormat>(unit: *const u8, slice: usize, half: usize) -> Self {
        // SAFETY: by the caller's promise.
        unsafe {
            let scale = scale_integers::<F>(unit, slice, half);
            let scale =
                _mm512_or_si512(_mm512_slli_epi32::<16>(scale), _mm512_and_si512(scale, _mm512_set1_epi32(0xff)));
            if F::LAYOUT.scales == Scales::PerSlice {
                let low = _mm512_and_si512(scale, _mm512_set1_epi16(7));
                return ScaleFactors { high: _mm512_srli_epi16::<3>(scale), low };
            }
            let upper = _mm512_slli_epi16::<8>(scale);
            ScaleFactors { high: _mm512_srli_epi16::<8>(upper), low: upper }
        }
    }

    /// Bytes of the high plane and of the low one.
    ///
    /// # Safety
    /// The machine has AVX-512 BW.
    #[inline(always)]
    unsafe fn times<F: QuantizedFormat>(self, integers: __m512i) -> (__m512i, __m512i) {
        let ScaleFactors { high, low } = self;
        // SAFETY: by the caller's promise.
        unsafe {
            if F::LAYOUT.scales == Scales::PerSlice {
                // One multiplication for two bytes: the product of the lower one stays below 256.
                return (_mm512_mullo_epi16(integers, high), _mm512_mullo_epi16(integers, low));
            }
            // The scale was moved up by 8 bits; the offset is 1 << 5.
            const { assert!(!matches!(F::LAYOUT.scales, Scales::PerHalfSlice) || matches!(F::LAYOUT.offset_shift, Some(5))) };
            let offset = _mm512_srai_epi16::<3>(low);
            let lower = _mm512_sub_epi16(_mm512_maddubs_epi16(integers, high), offset);
            let upper = _mm512_sub_epi16(_mm512_maddubs_epi16(integers, low), offset);
            // a where c is set, else b
            const CHOOSE: i32 = 0xe4;
            let bytes = _mm512_set1_epi16(0xff);
            (
                _mm512_ternarylogic_epi32::<CHOOSE>(_mm512_srli_epi16::<8>(lower), upper, bytes),
                _mm512_ternarylogic_epi32::<CHOOSE>(lower, _mm512_slli_epi16::<8>(upper), bytes),
            )
        }
    }
}

/// One block of rows times some panels, each unpacked just before its use: a tile of results for each. There are more panels to
/// come, up to `end`.
///
/// # Safety
/// Tiles are configured for the block; the machine has AMX and AVX-512 with VNNI, and rows and weight have the same number of units of F.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_panels<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    x: RowBlock<'_>,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let chunk = &mut scratch.chunk;
    let units = weight.panels(panels.clone()).as_ptr();
    let (num_units, total) = (weight.num_units, weight.num_units * panels.len());
    // SAFETY: see the promises of the function; every index below is within the block's and the chunk's arrays, of which those of sums
    // and scales can be read for a whole block even where it has fewer rows.
    unsafe {
        // After the last unit it is unpacked again, and nobody reads that.
        let unit = |n: usize| units.add(n.min(total - 1) * F::LAYOUT.unit_bytes());
        let place = |n: usize, pair: usize| 4 * ((n * PAIRS + pair) % RING_PAIRS);
        for pair in 0..UNPACKED {
            let to = chunk.integers[place(0, pair)..].as_mut_ptr();
            (0..2).for_each(|second| unpack_slice::<F>(unit(0), pair, second, to, &mut chunk.unit_scales[0]));
        }
        let mut ahead = PacedPrefetch::new(&[], 1);
        // Of the unit that is multiplied, and of the one before it, which is scaled: the panel, and its number there.
        let (mut now, mut before) = ((0, 0), (0, 0));
        for n in 0..=total {
            if n < total && now.1 == 0 {
                let next = panels.start + now.0 + 1;
                // Four times a pair: lines that are asked for one by one hold up nothing.
                ahead = PacedPrefetch::new(weight.panels(next..end.min(next + 1)), num_units * 4 * PAIRS);
            }
            macro_rules! scale {
                ($first:literal) => {
                    if n > 0 && $first < x.num_rows {
                        let registers = UnitScaleRegisters::load(&chunk.unit_scales[(n - 1) % SCALE_UNITS]);
                        let (fresh, results) = (before.1 == 0, &mut results[before.0]);
                        let rows = ScaledRows::new(&chunk.tiles, &x, before.1, $first, fresh, results);
                        scale_four!(F::LAYOUT.scales, registers, rows, ["", "", "", ""],);
                    }
                };
            }
            // Each tile instruction stands apart from the next, with a part of what is unpacked or scaled between them.
            macro_rules! pair {
                ($pair:literal, $between:expr, $after:expr) => {
                    if n < total {
                        let (n_ahead, pair_ahead) = (n + ($pair + UNPACKED) / PAIRS, ($pair + UNPACKED) % PAIRS);
                        let to = chunk.integers[place(n_ahead, pair_ahead)..].as_mut_ptr();
                        let first = SliceUnpacker::<F>::new(unit(n_ahead), 2 * pair_ahead, to);
                        let w = chunk.integers[place(n, $pair)..].as_ptr().cast::<u8>();
                        load_x(x.slice(2 * (PAIRS * now.1 + $pair), 0));
                        first.unpack(0);
                        first.unpack(1);
                        ahead.fetch();
                        load_w(w);
                        first.unpack(2);
                        first.unpack(3);
                        ahead.fetch();
                        multiply::<F, 0>(n);
                        $between;
                        let second = SliceUnpacker::<F>::new(unit(n_ahead), 2 * pair_ahead + 1, to.add(1));
                        second.unpack(0);
                        ahead.fetch();
                        load_w(w.add(1024));
                        second.unpack(1);
                        second.unpack(2);
                        ahead.fetch();
                        multiply::<F, 1>(n);
                        second.unpack(3);
                        unpack_scales::<F>(unit(n_ahead), pair_ahead, &mut chunk.unit_scales[n_ahead % SCALE_UNITS]);
                    } else {
                        $between;
                    }
                    $after;
                };
            }
            pair!(0, {}, {});
            pair!(
                1,
                if n > 0 {
                    store_tiles(chunk, n - 1)
                },
                {}
            );
            pair!(2, scale!(0), scale!(4));
            pair!(3, scale!(8), scale!(12));
            before = now;
            now = if now.1 + 1 == num_units { (now.0 + 1, 0) } else { (now.0, now.1 + 1) };
        }
    }
}

/// # Safety
/// The block has these slices, and tile 4 is configured for them; the machine has AMX. Nothing else of the program uses tile registers.
#[inline(always)]
unsafe fn load_x(x: *const i8) {
    const { assert!(2 * SLICE_LEN == 4 * PANEL_COLUMNS) };
    // SAFETY: by the caller's promise.
    unsafe {
        asm!("tileloadd tmm4, [{} + {}]", in(reg) x, in(reg) 2 * SLICE_LEN, options(nostack, preserves_flags, readonly));
    }
}

/// # Safety
/// As for [`load_x`], of two slices in the ring and tile 5.
#[inline(always)]
unsafe fn load_w(w: *const u8) {
    // SAFETY: by the caller's promise.
    unsafe {
        asm!("tileloadd tmm5, [{} + {}]", in(reg) w, in(reg) 2 * SLICE_LEN, options(nostack, preserves_flags, readonly));
    }
}

/// Multiplies what was loaded of a plane, into tiles 0 and 1 for even n and 2 and 3 for odd ones, which begin as zeros.
///
/// # Safety
/// As for [`load_x`].
#[inline(always)]
unsafe fn multiply<F: QuantizedFormat, const PLANE: usize>(n: usize) {
    // SAFETY: by the caller's promise.
    unsafe {
        match (has_sign::<F>(PLANE), n % 2) {
            (true, 0) => asm!("tdpbssd tmm{}, tmm4, tmm5", const PLANE, options(nostack, preserves_flags, nomem)),
            (true, _) => asm!("tdpbssd tmm{}, tmm4, tmm5", const 2 + PLANE, options(nostack, preserves_flags, nomem)),
            (_, 0) => asm!("tdpbsud tmm{}, tmm4, tmm5", const PLANE, options(nostack, preserves_flags, nomem)),
            _ => asm!("tdpbsud tmm{}, tmm4, tmm5", const 2 + PLANE, options(nostack, preserves_flags, nomem)),
        }
    }
}

/// Whether the bytes of a plane have a sign: the high ones, where the scales have one.
const fn has_sign<F: QuantizedFormat>(plane: usize) -> bool {
    plane == 0 && matches!(F::LAYOUT.scales, Scales::PerHalfSlice)
}

/// Stores the tiles of a unit, and leaves zeros in them, as configuring does.
///
/// # Safety
/// As for [`load_x`].
#[inline(always)]
unsafe fn store_tiles(chunk: &mut UnpackRing, n: usize) {
    macro_rules! store {
        ($high:literal, $low:literal) => {
            asm!(
                concat!("tilestored [{high} + {stride}], tmm", $high),
                concat!("tilezero tmm", $high),
                concat!("tilestored [{low} + {stride}], tmm", $low),
                concat!("tilezero tmm", $low),
                high = in(reg) chunk.tiles[0].as_mut_ptr(),
                low = in(reg) chunk.tiles[1].as_mut_ptr(),
                stride = in(reg) 4 * PANEL_COLUMNS,
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
