//! K formats, one block of rows: the integer scale of a slice is multiplied into the values, which then take two bytes,
//! in two *planes*.
//!
//! Q4_K and Q5_K: a scale of six bits is `8 high + low`, and a value times either part fits an unsigned byte (31 * 7 <
//! 256). Q6_K: a value times its scale has 13 bits and a sign, and is `256 high + low` with high in -16..=16 and low in
//! 0..256. Both bytes are multiplied with x, 64 values at a time, and added over a unit of 256 values. The sum is
//! exact, so it equals the sum of scaled slices.
//!
//! Bound for 16 x 16 x 256: eight multiplications of 16 cycles. The sums of a unit are stored and scaled while the next
//! unit is multiplied. Measured: 25 cycles for each 32 values with x in the first-level cache, 32 with x in the second
//! (2026-11-15, Xeon with AMX).

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

/// Pairs of slices in the ring, 8 KB: a small ring stays in the first-level cache.
const RING_PAIRS: usize = 4;
/// Pairs of slices that are unpacked ahead of the multiplication.
const UNPACKED: usize = RING_PAIRS - 1;

/// Units whose scales are in the ring.
pub(super) const SCALE_UNITS: usize = 4;

/// Unpacks one of a pair of slices of a unit to bytes in both planes; the low plane is 1 KB behind the high one. With
/// the first slice, the minimums of the pair are unpacked too, and with the first pair the unit's scales.
///
/// # Safety
/// `unit` is a whole unit of F, and `planes` has memory for two slices in both planes; the machine has AVX-512 BW.
#[inline(always)]
pub(super) unsafe fn unpack_slice<F: QuantizedFormat>(
    unit: *const u8,
    pair: usize,
    second: usize,
    planes: *mut [u8; 512],
    scales: &mut UnitScales,
) {
    // SAFETY: passed on from the caller.
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

/// Unpacks the minimums of a pair of slices, and with the first pair the unit's scales.
///
/// # Safety
/// As for [`unpack_slice`].
#[inline(always)]
unsafe fn unpack_scales<F: QuantizedFormat>(unit: *const u8, pair: usize, scales: &mut UnitScales) {
    let layout = F::LAYOUT;
    // SAFETY: passed on from the caller.
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
    /// Of each half of the slice.
    factors: [ScaleFactors; 2],
    /// Start of the slice in the high plane.
    to: *mut u8,
    format: PhantomData<F>,
}

impl<F: QuantizedFormat> SliceUnpacker<F> {
    /// # Safety
    /// As for [`unpack_slice`].
    #[inline(always)]
    unsafe fn new(unit: *const u8, slice: usize, to: *mut [u8; 512]) -> Self {
        // SAFETY: passed on from the caller.
        let factors = unsafe { [ScaleFactors::load::<F>(unit, slice, 0), ScaleFactors::load::<F>(unit, slice, 1)] };
        SliceUnpacker { unit, slice, factors, to: to.cast(), format: PhantomData }
    }

    /// Unpacks a fourth of the slice: registers j and j + 4.
    ///
    /// # Safety
    /// As for [`unpack_slice`].
    #[inline(always)]
    unsafe fn unpack(&self, j: usize) {
        // SAFETY: the caller of `new` guarantees unit and planes.
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

/// The integer scale by which values are multiplied, in both halves of each lane, in the form that takes the fewest
/// instructions.
#[derive(Clone, Copy)]
struct ScaleFactors {
    /// For the high plane; for Q6_K, for the lower bytes of lanes.
    high: __m512i,
    /// For the low plane; for Q6_K, for the upper bytes of lanes.
    low: __m512i,
}

impl ScaleFactors {
    /// # Safety
    /// `unit` is a whole unit of F, a K format; the machine has AVX-512 BW.
    #[inline(always)]
    unsafe fn load<F: QuantizedFormat>(unit: *const u8, slice: usize, half: usize) -> Self {
        // SAFETY: passed on from the caller.
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

    /// Returns the bytes of the high plane and of the low plane.
    ///
    /// # Safety
    /// The machine has AVX-512 BW.
    #[inline(always)]
    unsafe fn times<F: QuantizedFormat>(self, integers: __m512i) -> (__m512i, __m512i) {
        let ScaleFactors { high, low } = self;
        // SAFETY: passed on from the caller.
        unsafe {
            if F::LAYOUT.scales == Scales::PerSlice {
                // One 16-bit multiplication for two bytes: the product of the lower byte stays below 256.
                return (_mm512_mullo_epi16(integers, high), _mm512_mullo_epi16(integers, low));
            }
            // The scale was shifted left by 8 bits; the offset is 1 << 5.
            const {
                let is_q6_k = matches!(F::LAYOUT.scales, Scales::PerHalfSlice);
                assert!(!is_q6_k || matches!(F::LAYOUT.offset_shift, Some(5)));
            }
            let offset = _mm512_srai_epi16::<3>(low);
            let lower = _mm512_sub_epi16(_mm512_maddubs_epi16(integers, high), offset);
            let upper = _mm512_sub_epi16(_mm512_maddubs_epi16(integers, low), offset);
            // a where c is set, otherwise b
            const CHOOSE: i32 = 0xe4;
            let bytes = _mm512_set1_epi16(0xff);
            (
                _mm512_ternarylogic_epi32::<CHOOSE>(_mm512_srli_epi16::<8>(lower), upper, bytes),
                _mm512_ternarylogic_epi32::<CHOOSE>(lower, _mm512_slli_epi16::<8>(upper), bytes),
            )
        }
    }
}

/// Multiplies one block of rows with some panels, each unpacked just before its use; there is a tile of results for
/// each panel. The task's panels go on to `end`.
///
/// # Safety
/// Tiles are configured for the block; the machine has AMX and AVX-512 with VNNI, and rows and weight have the same
/// number of units of F.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c,bmi2")]
pub(super) unsafe fn multiply_panels<F: QuantizedFormat>(
    weight: &PackedWeight,
    panels: Range<usize>,
    end: usize,
    x: RowBlock<'_>,
    scratch: &mut AmxScratch,
    results: &mut [Tile<f32>],
) {
    let ring = &mut scratch.ring;
    let units = weight.panels(panels.clone()).as_ptr();
    let (num_units, total) = (weight.num_units, weight.num_units * panels.len());
    // SAFETY: the caller guarantees block and panels. Every index below is within the block's and the ring's arrays;
    // sums and scales can be read for sixteen rows even if the block has fewer.
    unsafe {
        // After the last unit, the last unit is unpacked again, which has no effect.
        let unit = |n: usize| units.add(n.min(total - 1) * F::LAYOUT.unit_bytes());
        let place = |n: usize, pair: usize| 4 * ((n * PAIRS + pair) % RING_PAIRS);
        for pair in 0..UNPACKED {
            let to = ring.integers[place(0, pair)..].as_mut_ptr();
            (0..2).for_each(|second| unpack_slice::<F>(unit(0), pair, second, to, &mut ring.unit_scales[0]));
        }
        let mut ahead = PacedPrefetch::new(&[], 1);
        // (panel, index in the panel) of the unit that is multiplied, and of the unit before it, which is scaled.
        let (mut now, mut before) = ((0, 0), (0, 0));
        for n in 0..=total {
            if n < total && now.1 == 0 {
                let next = panels.start + now.0 + 1;
                // Four prefetches for each pair: single prefetches do not delay other instructions.
                ahead = PacedPrefetch::new(weight.panels(next..end.min(next + 1)), num_units * 4 * PAIRS);
            }
            macro_rules! scale {
                ($first:literal) => {
                    if n > 0 && $first < x.num_rows {
                        let registers = UnitScaleRegisters::load(&ring.unit_scales[(n - 1) % SCALE_UNITS]);
                        let (fresh, results) = (before.1 == 0, &mut results[before.0]);
                        let rows = ScaledRows::new(&ring.tiles, &x, before.1, $first, fresh, results);
                        scale_four!(F::LAYOUT.scales, registers, rows, ["", "", "", ""],);
                    }
                };
            }
            // Between two tile instructions, a part of a slice is unpacked or some rows are scaled.
            macro_rules! pair {
                ($pair:literal, $between:expr, $after:expr) => {
                    if n < total {
                        let (n_ahead, pair_ahead) = (n + ($pair + UNPACKED) / PAIRS, ($pair + UNPACKED) % PAIRS);
                        let to = ring.integers[place(n_ahead, pair_ahead)..].as_mut_ptr();
                        let first = SliceUnpacker::<F>::new(unit(n_ahead), 2 * pair_ahead, to);
                        let w = ring.integers[place(n, $pair)..].as_ptr().cast::<u8>();
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
                        unpack_scales::<F>(unit(n_ahead), pair_ahead, &mut ring.unit_scales[n_ahead % SCALE_UNITS]);
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
                    store_tiles(ring, n - 1)
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

/// Loads two slices of x into tile 4.
///
/// # Safety
/// The block has these slices, and tile 4 is configured for them; the machine has AMX. No compiled code uses tile
/// registers.
#[inline(always)]
unsafe fn load_x(x: *const i8) {
    const { assert!(2 * SLICE_LEN == 4 * PANEL_COLUMNS) };
    // SAFETY: passed on from the caller.
    unsafe {
        let stride = 2 * SLICE_LEN;
        asm!("tileloadd tmm4, [{} + {}]", in(reg) x, in(reg) stride, options(nostack, preserves_flags, readonly));
    }
}

/// Loads two slices of the ring into tile 5.
///
/// # Safety
/// As for [`load_x`], for two slices of the ring and tile 5.
#[inline(always)]
unsafe fn load_w(w: *const u8) {
    // SAFETY: passed on from the caller.
    unsafe {
        let stride = 2 * SLICE_LEN;
        asm!("tileloadd tmm5, [{} + {}]", in(reg) w, in(reg) stride, options(nostack, preserves_flags, readonly));
    }
}

/// Multiplies tiles 4 and 5 into the result tile of a plane: 0 or 1 for even n, 2 or 3 for odd n.
///
/// # Safety
/// As for [`load_x`].
#[inline(always)]
unsafe fn multiply<F: QuantizedFormat, const PLANE: usize>(n: usize) {
    // SAFETY: passed on from the caller.
    unsafe {
        match (has_sign::<F>(PLANE), n % 2) {
            (true, 0) => asm!("tdpbssd tmm{}, tmm4, tmm5", const PLANE, options(nostack, preserves_flags, nomem)),
            (true, _) => asm!("tdpbssd tmm{}, tmm4, tmm5", const 2 + PLANE, options(nostack, preserves_flags, nomem)),
            (_, 0) => asm!("tdpbsud tmm{}, tmm4, tmm5", const PLANE, options(nostack, preserves_flags, nomem)),
            _ => asm!("tdpbsud tmm{}, tmm4, tmm5", const 2 + PLANE, options(nostack, preserves_flags, nomem)),
        }
    }
}

/// Whether the bytes of a plane are signed: those of the high plane, if scales are signed.
const fn has_sign<F: QuantizedFormat>(plane: usize) -> bool {
    plane == 0 && matches!(F::LAYOUT.scales, Scales::PerHalfSlice)
}

/// Stores the result tiles of unit n and zeroes them.
///
/// # Safety
/// As for [`load_x`].
#[inline(always)]
unsafe fn store_tiles(ring: &mut UnpackRing, n: usize) {
    macro_rules! store {
        ($high:literal, $low:literal) => {
            asm!(
                concat!("tilestored [{high} + {stride}], tmm", $high),
                concat!("tilezero tmm", $high),
                concat!("tilestored [{low} + {stride}], tmm", $low),
                concat!("tilezero tmm", $low),
                high = in(reg) ring.tiles[0].as_mut_ptr(),
                low = in(reg) ring.tiles[1].as_mut_ptr(),
                stride = in(reg) 4 * PANEL_COLUMNS,
                options(nostack, preserves_flags),
            )
        };
    }
    // SAFETY: each store writes at most sixteen rows, as the memory has.
    unsafe {
        match n % 2 {
            0 => store!("0", "1"),
            _ => store!("2", "3"),
        }
    }
}
