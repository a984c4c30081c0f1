//! Products with quantized weights with AVX2: four rows and the sixteen columns of a panel at a time. All integers are
//! exact, so the results have the bits of `scalar`.
//!
//! `vpmaddubsw` multiplies bytes and adds pairs in 16 bits ([`Maddubs`]). Sums of pairs are added in 16 bits as long as
//! they cannot overflow (eight of them for 4-bit values: 8 * 2 * 15 * 127 < 2^15), then widened to 32 bits. 8-bit
//! values are multiplied as magnitudes, with their signs moved to x: 2 * 128 * 127 < 2^15. Machines with AVX-VNNI have
//! one instruction for all of this ([`Dpbusd`]).

use std::arch::x86_64::*;

use crate::matmul::PANEL_COLUMNS;
use crate::matmul::prefetch::PacedPrefetch;
use crate::matmul::quantized::activations::RowBlock;
use crate::matmul::quantized::panel_layout::{Mins, PanelLayout, QuantizedFormat, SLICE_LEN, Scales};

/// Distance between the slices of adjacent rows, in words of four values.
const ROW_WORDS: usize = 2 * SLICE_LEN / 4;

/// Rows that are multiplied together: there are not enough registers for the sums of more.
const ROWS: usize = 4;

/// The instruction that multiplies bytes.
trait Instruction {
    /// Whether 8-bit values are multiplied with their sign.
    const SIGNED: bool;

    /// Number of products that are added before they are widened.
    fn run(layout: &PanelLayout) -> usize;

    /// `sums` plus the products of w and x.
    ///
    /// # Safety
    /// The machine has the instruction.
    unsafe fn add<F: QuantizedFormat>(sums: __m256i, w: __m256i, x: __m256i) -> __m256i;

    /// `total`, in 32 bits, plus sums.
    ///
    /// # Safety
    /// As for `add`.
    unsafe fn widen(total: __m256i, sums: __m256i) -> __m256i;
}

/// `vpmaddubsw` of AVX2.
struct Maddubs;

impl Instruction for Maddubs {
    const SIGNED: bool = true;

    #[inline(always)]
    fn run(layout: &PanelLayout) -> usize {
        if layout.needs_signed_bytes() { 1 } else { i16::MAX as usize / (2 * 127 * layout.largest_integer()) }
    }

    #[inline(always)]
    unsafe fn add<F: QuantizedFormat>(sums: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: passed on from the caller.
        unsafe {
            _mm256_add_epi16(
                sums,
                match F::LAYOUT.needs_signed_bytes() {
                    true => _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)),
                    false => _mm256_maddubs_epi16(w, x),
                },
            )
        }
    }

    #[inline(always)]
    unsafe fn widen(total: __m256i, sums: __m256i) -> __m256i {
        // SAFETY: passed on from the caller.
        unsafe { _mm256_add_epi32(total, _mm256_madd_epi16(sums, _mm256_set1_epi16(1))) }
    }
}

/// `vpdpbusd` of AVX-VNNI.
struct Dpbusd;

impl Instruction for Dpbusd {
    const SIGNED: bool = false;

    #[inline(always)]
    fn run(_: &PanelLayout) -> usize {
        8
    }

    #[inline(always)]
    unsafe fn add<F: QuantizedFormat>(sums: __m256i, w: __m256i, x: __m256i) -> __m256i {
        // SAFETY: passed on from the caller.
        unsafe { _mm256_dpbusd_avx_epi32(sums, w, x) }
    }

    #[inline(always)]
    unsafe fn widen(total: __m256i, sums: __m256i) -> __m256i {
        // SAFETY: passed on from the caller.
        unsafe { _mm256_add_epi32(total, sums) }
    }
}

/// Register j of a slice for eight columns: values 4 j to 4 j + 3 of each, before the offset is subtracted. Values of 8
/// bits are signed if the instruction needs that.
///
/// # Safety
/// `unit` is a whole unit of F, and the machine has AVX2.
#[inline(always)]
unsafe fn integer<F: QuantizedFormat, I: Instruction>(unit: *const u8, slice: usize, side: usize, j: usize) -> __m256i {
    let layout = F::LAYOUT;
    // SAFETY: the layout's parts are within the unit; the caller guarantees the features.
    unsafe {
        let load = |at: usize, j: usize| _mm256_loadu_si256(unit.add(at + 64 * j + 32 * side).cast());
        if layout.bits == 8 {
            let w = load(layout.low(slice), j);
            return if I::SIGNED { w } else { _mm256_xor_si256(w, _mm256_set1_epi8(i8::MIN)) };
        }
        let both = load(layout.low(slice), j % 4);
        let q = if j < 4 { both } else { _mm256_srli_epi16::<4>(both) };
        let q = _mm256_and_si256(q, _mm256_set1_epi8(0x0f));
        if let Some(integers) = &layout.integers {
            let integers = _mm256_broadcastsi128_si256(_mm_loadu_si128(integers.as_ptr().cast()));
            let q = _mm256_shuffle_epi8(integers, q);
            let is_signed = I::SIGNED && layout.needs_signed_bytes();
            return if is_signed { _mm256_xor_si256(q, _mm256_set1_epi8(i8::MIN)) } else { q };
        }
        let (bits, up, mask) = match layout.bits {
            5 => (load(layout.high(slice), 0), 4 - j as i32, 0x10),
            6 => (load(layout.high(slice), j / 4), 4 - 2 * (j as i32 % 4), 0x30),
            _ => return q,
        };
        let bits = match up {
            4 => _mm256_slli_epi16::<4>(bits),
            3 => _mm256_slli_epi16::<3>(bits),
            2 => _mm256_slli_epi16::<2>(bits),
            1 => _mm256_slli_epi16::<1>(bits),
            0 => bits,
            -1 => _mm256_srli_epi16::<1>(bits),
            -2 => _mm256_srli_epi16::<2>(bits),
            _ => _mm256_srli_epi16::<3>(bits),
        };
        _mm256_or_si256(q, _mm256_and_si256(bits, _mm256_set1_epi8(mask)))
    }
}

/// Sums of the products of registers FROM to TO of a slice, for R rows and both halves of the columns.
///
/// # Safety
/// `unit` is a whole unit of F; `quants` are R rows of x, and `offsets` their sums times the negated offset of W. The
/// machine has the instruction.
#[inline(always)]
unsafe fn dots<F: QuantizedFormat, I: Instruction, const R: usize, const FROM: usize, const TO: usize>(
    unit: *const u8,
    slice: usize,
    quants: *const i32,
    offsets: *const i32,
) -> [[__m256i; 2]; R] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut totals = [[_mm256_setzero_si256(); 2]; R];
        for r in 0..R {
            totals[r] = [offset::<F, I>(offsets.wrapping_add(r)); 2];
        }
        let mut sums = [[_mm256_setzero_si256(); 2]; R];
        for j in FROM..TO {
            let w = [integer::<F, I>(unit, slice, 0, j), integer::<F, I>(unit, slice, 1, j)];
            for r in 0..R {
                let x = _mm256_set1_epi32(*quants.add(ROW_WORDS * r + j));
                for side in 0..2 {
                    sums[r][side] = I::add::<F>(sums[r][side], w[side], x);
                }
            }
            if (j + 1 - FROM).is_multiple_of(I::run(&F::LAYOUT)) || j + 1 == TO {
                for r in 0..R {
                    for side in 0..2 {
                        totals[r][side] = I::widen(totals[r][side], sums[r][side]);
                        sums[r][side] = _mm256_setzero_si256();
                    }
                }
            }
        }
        totals
    }
}

/// Eight f16 as f32.
///
/// # Safety
/// Sixteen bytes can be read from `at`; the machine has F16C.
#[inline(always)]
unsafe fn halves(at: *const u8) -> __m256 {
    // SAFETY: passed on from the caller.
    unsafe { _mm256_cvtph_ps(_mm_loadu_si128(at.cast())) }
}

/// The float scales of a slice.
///
/// # Safety
/// `unit` is a whole unit of F, whose slices have float scales; the machine has AVX2 and F16C.
#[inline(always)]
unsafe fn float_scales<F: QuantizedFormat>(unit: *const u8, slice: usize, side: usize) -> __m256 {
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice) + 16 * side);
        match F::LAYOUT.scales {
            Scales::BrainFloat => {
                let bits = _mm256_cvtepu16_epi32(_mm_loadu_si128(at.cast()));
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(bits))
            }
            Scales::Single => _mm256_loadu_ps(unit.add(F::LAYOUT.scale(slice) + 32 * side).cast()),
            _ => halves(at),
        }
    }
}

/// The integer scales of a slice, or of half a slice, in 32 bits.
///
/// # Safety
/// `unit` is a whole unit of F, whose scales are integers; the machine has AVX2.
#[inline(always)]
unsafe fn scale_integers<F: QuantizedFormat>(unit: *const u8, slice: usize, half: usize, side: usize) -> __m256i {
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice) + 8 * side);
        match F::LAYOUT.scales {
            Scales::PerHalfSlice => _mm256_cvtepi8_epi32(_mm_loadl_epi64(at.add(16 * half).cast())),
            _ => _mm256_cvtepu8_epi32(_mm_loadl_epi64(at.cast())),
        }
    }
}

/// The share of W's offset in a sum of products; zero if values are multiplied with their sign.
///
/// # Safety
/// `offset` can be read, and the machine has AVX2.
#[inline(always)]
unsafe fn offset<F: QuantizedFormat, I: Instruction>(offset: *const i32) -> __m256i {
    // SAFETY: passed on from the caller.
    unsafe {
        match F::LAYOUT.offset_shift {
            None => _mm256_setzero_si256(),
            Some(_) if F::LAYOUT.needs_signed_bytes() && I::SIGNED => _mm256_setzero_si256(),
            _ => _mm256_set1_epi32(*offset),
        }
    }
}

/// R rows of a block, from `first` on, times one panel; `ahead` is prefetched meanwhile.
///
/// # Safety
/// Panel and block have `num_units` units of F, and the block has at least `first + R` rows; the machine has AVX2, FMA,
/// F16C and the instruction.
#[inline(always)]
unsafe fn rows_times_panel<F: QuantizedFormat, I: Instruction, const R: usize>(
    work: PanelWork<'_>,
    first: usize,
    ahead: &mut PacedPrefetch,
) -> [[f32; PANEL_COLUMNS]; R] {
    let layout = F::LAYOUT;
    let PanelWork { panel, num_units, x } = work;
    let m = x.num_rows;
    // SAFETY: the caller guarantees the features.
    let mut results = unsafe { [[_mm256_setzero_ps(); 2]; R] };
    for u in 0..num_units {
        // SAFETY: the caller guarantees that units, slices and rows are within the panel and the block.
        unsafe {
            let unit = panel.add(u * layout.unit_bytes());
            let mut scaled = [[_mm256_setzero_si256(); 2]; R];
            let mut minimums = [[_mm256_setzero_si256(); 2]; R];
            for slice in 0..layout.slices {
                let at = u * layout.slices + slice;
                let place = at * m + first;
                let quants = x.slice(at, first).cast::<i32>();
                ahead.fetch();
                match layout.scales {
                    Scales::Float | Scales::BrainFloat | Scales::Single => {
                        let dots = dots::<F, I, R, 0, 8>(unit, slice, quants, x.offsets32.wrapping_add(place));
                        for side in 0..2 {
                            let scale = float_scales::<F>(unit, slice, side);
                            for r in 0..R {
                                let mut part = _mm256_mul_ps(_mm256_cvtepi32_ps(dots[r][side]), scale);
                                if layout.mins == Mins::Float {
                                    let mins = halves(unit.add(layout.min(slice) + 16 * side));
                                    part = _mm256_fmadd_ps(_mm256_set1_ps(*x.sums.add(place + r)), mins, part);
                                }
                                let x_scale = _mm256_set1_ps(*x.scales.add(place + r));
                                results[r][side] = _mm256_fmadd_ps(part, x_scale, results[r][side]);
                            }
                        }
                    }
                    Scales::PerSlice => {
                        let dots = dots::<F, I, R, 0, 8>(unit, slice, quants, x.offsets32);
                        add_scaled::<F, R>(&mut scaled, &dots, unit, slice, 0);
                    }
                    Scales::PerHalfSlice => {
                        let offsets = x.offsets16.wrapping_add(2 * at * m + first);
                        let dots_of_first = dots::<F, I, R, 0, 4>(unit, slice, quants, offsets);
                        add_scaled::<F, R>(&mut scaled, &dots_of_first, unit, slice, 0);
                        let dots_of_second = dots::<F, I, R, 4, 8>(unit, slice, quants, offsets.wrapping_add(m));
                        add_scaled::<F, R>(&mut scaled, &dots_of_second, unit, slice, 1);
                    }
                }
                if layout.mins == Mins::PerSlice && slice % 2 == 1 {
                    for side in 0..2 {
                        let mins = _mm_loadu_si128(unit.add(layout.min(slice - 1) + 16 * side).cast());
                        let mins = _mm256_cvtepu8_epi16(mins);
                        for r in 0..R {
                            let pair = x.pairs.add(at / 2 * m + first + r).cast::<i32>().read_unaligned();
                            let products = _mm256_madd_epi16(mins, _mm256_set1_epi32(pair));
                            minimums[r][side] = _mm256_add_epi32(minimums[r][side], products);
                        }
                    }
                }
            }
            if layout.scaled_by_floats() {
                continue;
            }
            for side in 0..2 {
                let head = halves(unit.add(layout.head() + 16 * side));
                let min_head = match layout.mins {
                    Mins::PerSlice => halves(unit.add(layout.min_head() + 16 * side)),
                    _ => _mm256_setzero_ps(),
                };
                for r in 0..R {
                    let mut part = _mm256_mul_ps(_mm256_cvtepi32_ps(scaled[r][side]), head);
                    if layout.mins == Mins::PerSlice {
                        part = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(minimums[r][side]), min_head, part);
                    }
                    let scale = _mm256_set1_ps(*x.scales.add(u * m + first + r));
                    results[r][side] = _mm256_fmadd_ps(part, scale, results[r][side]);
                }
            }
        }
    }
    // SAFETY: both are sixteen f32, lane 0 first.
    results.map(|result| unsafe { std::mem::transmute::<[__m256; 2], [f32; PANEL_COLUMNS]>(result) })
}

/// Adds sums of products times their integer scales.
///
/// # Safety
/// `unit` is a whole unit of F, whose scales are integers; the machine has AVX2.
#[inline(always)]
unsafe fn add_scaled<F: QuantizedFormat, const R: usize>(
    scaled: &mut [[__m256i; 2]; R],
    dots: &[[__m256i; 2]; R],
    unit: *const u8,
    slice: usize,
    half: usize,
) {
    for side in 0..2 {
        // SAFETY: passed on from the caller.
        unsafe {
            let scale = scale_integers::<F>(unit, slice, half, side);
            for r in 0..R {
                scaled[r][side] = _mm256_add_epi32(scaled[r][side], _mm256_mullo_epi32(dots[r][side], scale));
            }
        }
    }
}

/// A block of rows, and a panel of `num_units` units to multiply it with.
#[derive(Clone, Copy)]
pub(in crate::matmul) struct PanelWork<'a> {
    pub(in crate::matmul) panel: *const u8,
    pub(in crate::matmul) num_units: usize,
    pub(in crate::matmul) x: RowBlock<'a>,
}

/// All rows of a block times one panel; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// Panel and block have `num_units` units of F; the machine has AVX2, FMA, F16C and the instruction.
#[inline(always)]
unsafe fn multiply<F: QuantizedFormat, I: Instruction>(
    work: PanelWork<'_>,
    ahead: &mut PacedPrefetch,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    let x = work.x;
    let mut first = 0;
    while first + ROWS <= x.num_rows {
        // SAFETY: passed on from the caller; the rows end within the block.
        let results = unsafe { rows_times_panel::<F, I, ROWS>(work, first, ahead) };
        (0..ROWS).for_each(|r| put(first + r, &results[r]));
        first += ROWS;
    }
    for row in first..x.num_rows {
        // SAFETY: passed on from the caller; the row is within the block.
        let [result] = unsafe { rows_times_panel::<F, I, 1>(work, row, ahead) };
        put(row, &result);
    }
}

/// All rows of a block times one panel, with AVX2; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// Panel and block have `num_units` units of F; the machine has AVX2, FMA and F16C.
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(in crate::matmul) unsafe fn block_times_panel<F: QuantizedFormat>(
    work: PanelWork<'_>,
    ahead: &mut PacedPrefetch,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    // SAFETY: passed on from the caller.
    unsafe { multiply::<F, Maddubs>(work, ahead, put) };
}

/// All rows of a block times one panel, with AVX-VNNI; `put(row, results)` receives the sixteen results of each row.
///
/// # Safety
/// As for [`block_times_panel`], and the machine has AVX-VNNI.
#[target_feature(enable = "avx2,fma,f16c,bmi2,avxvnni")]
pub(in crate::matmul) unsafe fn block_times_panel_by_vnni<F: QuantizedFormat>(
    work: PanelWork<'_>,
    ahead: &mut PacedPrefetch,
    put: &mut dyn FnMut(usize, &[f32; PANEL_COLUMNS]),
) {
    // SAFETY: passed on from the caller.
    unsafe { multiply::<F, Dpbusd>(work, ahead, put) };
}
