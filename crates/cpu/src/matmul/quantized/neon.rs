//! Products with quantized weights with NEON, a quarter of a panel (four columns) at a time.
//!
//! If the machine has the feature `dotprod`, `sdot` multiplies the four bytes of a lane and adds them in one
//! instruction ([`Sdot`]). Otherwise bytes are multiplied to 16 bits and added in pairs to 32-bit sums ([`Widening`]).
//! All integers are exact, so the results have the bits of `scalar`.

use std::arch::aarch64::*;
use std::arch::{asm, is_aarch64_feature_detected};

use crate::matmul::PANEL_COLUMNS;
use crate::matmul::quantized::activations::RowBlock;
use crate::matmul::quantized::panel_layout::{Mins, QuantizedFormat, SLICE_LEN, Scales};

/// Bytes from a row's slice to that of the next row.
const ROW_BYTES: usize = 2 * SLICE_LEN;

/// The instructions that multiply and add bytes.
trait DotProduct {
    /// `start` plus the products of the registers `w` and the row's values at `x`.
    ///
    /// # Safety
    /// `x` has four bytes for each register; there are four or eight registers. The machine has the instructions.
    unsafe fn dot(start: int32x4_t, w: &[int8x16_t], x: *const i8) -> int32x4_t;
}

/// `sdot`, of the feature `dotprod`.
struct Sdot;

impl DotProduct for Sdot {
    #[inline(always)]
    unsafe fn dot(start: int32x4_t, w: &[int8x16_t], x: *const i8) -> int32x4_t {
        let mut sum = start;
        for (i, w) in w.chunks_exact(4).enumerate() {
            // SAFETY: passed on from the caller.
            unsafe {
                let x = vld1q_s8(x.add(16 * i));
                sum = sdot::<0>(sum, w[0], x);
                sum = sdot::<1>(sum, w[1], x);
                sum = sdot::<2>(sum, w[2], x);
                sum = sdot::<3>(sum, w[3], x);
            }
        }
        sum
    }
}

/// Each lane of `sum` plus the products of its four bytes of `w` and the four of one lane of x.
///
/// # Safety
/// The machine has `dotprod`.
#[inline(always)]
unsafe fn sdot<const LANE: i32>(mut sum: int32x4_t, w: int8x16_t, x: int8x16_t) -> int32x4_t {
    // SAFETY: the caller guarantees the instruction, which uses registers only.
    unsafe {
        asm!(
            "sdot {sum:v}.4s, {w:v}.16b, {x:v}.4b[{lane}]",
            sum = inout(vreg) sum, w = in(vreg) w, x = in(vreg) x, lane = const LANE,
            options(pure, nomem, nostack, preserves_flags),
        );
    }
    sum
}

/// Widening multiplications, which every machine has.
struct Widening;

impl DotProduct for Widening {
    #[inline(always)]
    unsafe fn dot(start: int32x4_t, w: &[int8x16_t], x: *const i8) -> int32x4_t {
        // SAFETY: passed on from the caller.
        unsafe {
            // Two lanes for each column.
            let mut sums = [vdupq_n_s32(0); 2];
            for (j, &w) in w.iter().enumerate() {
                let x = vreinterpretq_s8_s32(vdupq_n_s32(x.add(4 * j).cast::<i32>().read_unaligned()));
                sums[0] = vpadalq_s16(sums[0], vmull_s8(vget_low_s8(w), vget_low_s8(x)));
                sums[1] = vpadalq_s16(sums[1], vmull_high_s8(w, x));
            }
            vaddq_s32(start, vpaddq_s32(sums[0], sums[1]))
        }
    }
}

/// The values of a slice for four columns; register j holds values 4 j to 4 j + 3 of each.
///
/// # Safety
/// `unit` is a whole unit of F.
#[inline(always)]
unsafe fn integers<F: QuantizedFormat>(unit: *const u8, slice: usize, quarter: usize) -> [int8x16_t; 8] {
    let layout = F::LAYOUT;
    // SAFETY: the layout's parts are within the unit.
    unsafe {
        let load = |at: usize, j: usize| vld1q_u8(unit.add(at + 64 * j + 16 * quarter));
        if layout.bits == 8 {
            // Signed, unlike in the other formats.
            return std::array::from_fn(|j| vreinterpretq_s8_u8(load(layout.low(slice), j)));
        }
        let mut q = [vdupq_n_u8(0); 8];
        for j in 0..4 {
            let both = load(layout.low(slice), j);
            q[j] = vandq_u8(both, vdupq_n_u8(0x0f));
            q[j + 4] = vshrq_n_u8::<4>(both);
        }
        if let Some(codes) = &layout.integers {
            let codes = vld1q_u8(codes.as_ptr());
            let offset = vdupq_n_u8(if layout.needs_signed_bytes() { 0x80 } else { 0 });
            return q.map(|q| vreinterpretq_s8_u8(veorq_u8(vqtbl1q_u8(codes, q), offset)));
        }
        for j in 0..8 {
            let (bits, up, mask) = match layout.bits {
                5 => (load(layout.high(slice), 0), 4 - j as i8, 0x10),
                6 => (load(layout.high(slice), j / 4), 4 - 2 * (j as i8 % 4), 0x30),
                _ => break,
            };
            // A negative shift is one to the right.
            let bits = vshlq_u8(bits, vdupq_n_s8(up));
            q[j] = vorrq_u8(q[j], vandq_u8(bits, vdupq_n_u8(mask)));
        }
        q.map(|q| vreinterpretq_s8_u8(q))
    }
}

/// Four f16 as f32.
///
/// # Safety
/// Eight bytes can be read from `at`.
#[inline(always)]
unsafe fn halves(at: *const u8) -> float32x4_t {
    // SAFETY: passed on from the caller.
    unsafe { vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(at))) }
}

/// The float scales of a slice.
///
/// # Safety
/// `unit` is a whole unit of F, whose slices have float scales.
#[inline(always)]
unsafe fn float_scales<F: QuantizedFormat>(unit: *const u8, slice: usize, quarter: usize) -> float32x4_t {
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice) + 8 * quarter);
        match F::LAYOUT.scales {
            Scales::BrainFloat => vreinterpretq_f32_u32(vshll_n_u16::<16>(vreinterpret_u16_u8(vld1_u8(at)))),
            Scales::Single => vld1q_f32(unit.add(F::LAYOUT.scale(slice) + 16 * quarter).cast()),
            _ => halves(at),
        }
    }
}

/// The integer scales of a slice, or of half a slice, in the K formats.
///
/// # Safety
/// `unit` is a whole unit of F.
#[inline(always)]
unsafe fn scale_integers<F: QuantizedFormat>(unit: *const u8, slice: usize, half: usize, quarter: usize) -> int32x4_t {
    let layout = F::LAYOUT;
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(layout.scale(slice) + 16 * half + 4 * quarter);
        let bytes = vcreate_u8(u64::from(at.cast::<u32>().read_unaligned()));
        match layout.scales {
            Scales::PerHalfSlice => vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(bytes)))),
            _ => vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(vmovl_u8(bytes)))),
        }
    }
}

/// The share of W's offset in a sum of products; zero for 8-bit values, which are multiplied with their sign.
#[inline(always)]
fn offset<F: QuantizedFormat>(offset: i32) -> int32x4_t {
    let no_offset = F::LAYOUT.offset_shift.is_none() || F::LAYOUT.needs_signed_bytes();
    let offset = if no_offset { 0 } else { offset };
    // SAFETY: every machine of this target has NEON.
    unsafe { vdupq_n_s32(offset) }
}

/// The minimums of a pair of slices times the row's sums over them.
///
/// # Safety
/// Eight bytes can be read from `mins`, four from `pair`.
#[inline(always)]
unsafe fn times_minimums(mins: *const u8, pair: *const [i16; 2]) -> int32x4_t {
    // SAFETY: passed on from the caller.
    unsafe {
        let mins = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(mins)));
        let pair = vreinterpretq_s16_s32(vdupq_n_s32(pair.cast::<i32>().read_unaligned()));
        vpaddq_s32(vmull_s16(vget_low_s16(mins), vget_low_s16(pair)), vmull_high_s16(mins, pair))
    }
}

/// R rows of a block, from `first` on, times one panel; each slice is unpacked once for all of them.
///
/// # Safety
/// Panel and block have `num_units` units of F, and the block has at least `first + R` rows; the machine has the
/// instructions of D.
#[inline(always)]
unsafe fn rows_times_panel<D: DotProduct, F: QuantizedFormat, const R: usize>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock<'_>,
    first: usize,
) -> [[f32; PANEL_COLUMNS]; R] {
    let layout = F::LAYOUT;
    let m = x.num_rows;
    // SAFETY: the caller guarantees that units, slices and rows are within the panel and the block.
    unsafe {
        let zero = vdupq_n_f32(0.0);
        let mut results = [[zero; 4]; R];
        for u in 0..num_units {
            let unit = panel.add(u * layout.unit_bytes());
            for quarter in 0..4 {
                let mut scaled = [vdupq_n_s32(0); R];
                let mut minimums = [vdupq_n_s32(0); R];
                for slice in 0..layout.slices {
                    let at = u * layout.slices + slice;
                    let place = at * m + first;
                    let w = integers::<F>(unit, slice, quarter);
                    let quants = x.slice(at, first);
                    match layout.scales {
                        Scales::Float | Scales::BrainFloat | Scales::Single => {
                            let scale = float_scales::<F>(unit, slice, quarter);
                            for r in 0..R {
                                let start = offset::<F>(*x.offsets32.add(place + r));
                                let sum = D::dot(start, &w, quants.add(ROW_BYTES * r));
                                let mut part = vmulq_f32(vcvtq_f32_s32(sum), scale);
                                if layout.mins == Mins::Float {
                                    let mins = halves(unit.add(layout.min(slice) + 8 * quarter));
                                    part = vfmaq_f32(part, vdupq_n_f32(*x.sums.add(place + r)), mins);
                                }
                                let x_scale = vdupq_n_f32(*x.scales.add(place + r));
                                results[r][quarter] = vfmaq_f32(results[r][quarter], part, x_scale);
                            }
                        }
                        Scales::PerSlice => {
                            let scale = scale_integers::<F>(unit, slice, 0, quarter);
                            for r in 0..R {
                                let sum = D::dot(vdupq_n_s32(0), &w, quants.add(ROW_BYTES * r));
                                scaled[r] = vmlaq_s32(scaled[r], sum, scale);
                            }
                        }
                        Scales::PerHalfSlice => {
                            for half in 0..2 {
                                let scale = scale_integers::<F>(unit, slice, half, quarter);
                                for r in 0..R {
                                    let start = offset::<F>(*x.offsets16.add((2 * at + half) * m + first + r));
                                    let quants = quants.add(ROW_BYTES * r + 16 * half);
                                    let sum = D::dot(start, &w[4 * half..4 * half + 4], quants);
                                    scaled[r] = vmlaq_s32(scaled[r], sum, scale);
                                }
                            }
                        }
                    }
                    if layout.mins == Mins::PerSlice && slice % 2 == 1 {
                        let mins = unit.add(layout.min(slice - 1) + 8 * quarter);
                        for r in 0..R {
                            let products = times_minimums(mins, x.pairs.add(at / 2 * m + first + r));
                            minimums[r] = vaddq_s32(minimums[r], products);
                        }
                    }
                }
                if layout.scaled_by_floats() {
                    continue;
                }
                let head = halves(unit.add(layout.head() + 8 * quarter));
                for r in 0..R {
                    let mut part = vmulq_f32(vcvtq_f32_s32(scaled[r]), head);
                    if layout.mins == Mins::PerSlice {
                        let min_head = halves(unit.add(layout.min_head() + 8 * quarter));
                        part = vfmsq_f32(part, vcvtq_f32_s32(minimums[r]), min_head);
                    }
                    let scale = vdupq_n_f32(*x.scales.add(u * m + first + r));
                    results[r][quarter] = vfmaq_f32(results[r][quarter], part, scale);
                }
            }
        }
        // Both are sixteen f32, lane 0 first.
        results.map(|result| std::mem::transmute::<[float32x4_t; 4], [f32; PANEL_COLUMNS]>(result))
    }
}

/// All rows of a block times one panel; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// As for [`block_times_panel`], and the machine has the instructions of D.
#[inline(always)]
unsafe fn all_rows<D: DotProduct, F: QuantizedFormat>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock<'_>,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    let mut first = 0;
    while first + 4 <= x.num_rows {
        // SAFETY: passed on from the caller; the rows end within the block.
        let results = unsafe { rows_times_panel::<D, F, 4>(panel, num_units, x, first) };
        (0..4).for_each(|r| put(first + r, &results[r]));
        first += 4;
    }
    for row in first..x.num_rows {
        // SAFETY: passed on from the caller; the row is within the block.
        let [result] = unsafe { rows_times_panel::<D, F, 1>(panel, num_units, x, row) };
        put(row, &result);
    }
}

/// All rows of a block times one panel, with `sdot`; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// Panel and block have `num_units` units of F; the machine has `dotprod`.
#[target_feature(enable = "dotprod")]
pub(crate) unsafe fn block_times_panel_by_dot_products<F: QuantizedFormat>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock<'_>,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    // SAFETY: passed on from the caller.
    unsafe { all_rows::<Sdot, F>(panel, num_units, x, put) }
}

/// All rows of a block times one panel; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// Panel and block have `num_units` units of F.
pub(crate) unsafe fn block_times_panel<F: QuantizedFormat>(
    panel: *const u8,
    num_units: usize,
    x: RowBlock<'_>,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    // SAFETY: passed on from the caller; every machine of this target has the instructions.
    unsafe { all_rows::<Widening, F>(panel, num_units, x, put) }
}

/// Whether this machine has `sdot`.
pub(crate) fn has_dot_products() -> bool {
    is_aarch64_feature_detected!("dotprod")
}
