//! Unpacks the integers and scales of a unit into registers of sixteen columns.

use std::arch::x86_64::*;

use crate::matmul::quantized::panel_layout::{QuantizedFormat, Scales};

/// The eight registers of a slice: register j holds, for each column, values 4 j to 4 j + 3, before the offset is
/// subtracted.
///
/// # Safety
/// `unit` is a whole unit of F, and the machine has AVX-512 BW.
#[inline(always)]
pub(in crate::matmul) unsafe fn integers<F: QuantizedFormat>(unit: *const u8, slice: usize) -> [__m512i; 8] {
    // SAFETY: passed on from the caller.
    unsafe {
        let mut q = [_mm512_setzero_si512(); 8];
        for j in 0..8 {
            q[j] = integer::<F>(unit, slice, j);
        }
        q
    }
}

/// Register j of a slice.
///
/// # Safety
/// As for [`integers`].
#[inline(always)]
pub(in crate::matmul) unsafe fn integer<F: QuantizedFormat>(unit: *const u8, slice: usize, j: usize) -> __m512i {
    let layout = F::LAYOUT;
    // SAFETY: the layout's parts are within the unit; the caller guarantees the features.
    unsafe {
        let low = unit.add(layout.low(slice));
        let load = |at: *const u8, j: usize| _mm512_loadu_si512(at.add(64 * j).cast());
        if layout.bits == 8 {
            // Inverting the sign bit adds the offset of 128.
            return _mm512_xor_si512(load(low, j), _mm512_set1_epi8(i8::MIN));
        }
        let both = load(low, j % 4);
        let q = if j < 4 { both } else { _mm512_srli_epi16::<4>(both) };
        let q = _mm512_and_si512(q, _mm512_set1_epi8(0x0f));
        if let Some(integers) = &layout.integers {
            let integers = _mm512_broadcast_i32x4(_mm_loadu_si128(integers.as_ptr().cast()));
            return _mm512_shuffle_epi8(integers, q);
        }
        let high = unit.add(layout.high(slice));
        // a | (b & c)
        const OR_AND: i32 = 0xf8;
        match layout.bits {
            5 => {
                let bits = shifted(load(high, 0), 4 - j as i32);
                _mm512_ternarylogic_epi32::<OR_AND>(q, bits, _mm512_set1_epi8(0x10))
            }
            6 => {
                let bits = shifted(load(high, j / 4), 4 - 2 * (j % 4) as i32);
                _mm512_ternarylogic_epi32::<OR_AND>(q, bits, _mm512_set1_epi8(0x30))
            }
            _ => q,
        }
    }
}

/// Bits shifted left by `by`, or right if it is negative. `by` is a constant after unrolling.
///
/// # Safety
/// The machine has AVX-512 BW.
#[inline(always)]
unsafe fn shifted(bits: __m512i, by: i32) -> __m512i {
    // SAFETY: the caller guarantees the features.
    unsafe {
        match by {
            4 => _mm512_slli_epi16::<4>(bits),
            3 => _mm512_slli_epi16::<3>(bits),
            2 => _mm512_slli_epi16::<2>(bits),
            1 => _mm512_slli_epi16::<1>(bits),
            0 => bits,
            -1 => _mm512_srli_epi16::<1>(bits),
            -2 => _mm512_srli_epi16::<2>(bits),
            _ => _mm512_srli_epi16::<3>(bits),
        }
    }
}

/// Sixteen f16 as f32.
///
/// # Safety
/// 32 bytes can be read from `at`; the machine has AVX-512 F.
#[inline(always)]
pub(in crate::matmul) unsafe fn halves(at: *const u8) -> __m512 {
    // SAFETY: passed on from the caller.
    unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(at.cast())) }
}

/// The float scales of a slice.
///
/// # Safety
/// `unit` is a whole unit of F, whose slices have float scales; the machine has AVX-512 F.
#[inline(always)]
pub(in crate::matmul) unsafe fn float_scales<F: QuantizedFormat>(unit: *const u8, slice: usize) -> __m512 {
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice));
        match F::LAYOUT.scales {
            Scales::BrainFloat => {
                let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(at.cast()));
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits))
            }
            Scales::Single => _mm512_loadu_ps(at.cast()),
            _ => halves(at),
        }
    }
}

/// The integer scales of a slice, or of half a slice, in 32 bits.
///
/// # Safety
/// `unit` is a whole unit of F, whose scales are integers; the machine has AVX-512 F.
#[inline(always)]
pub(in crate::matmul) unsafe fn scale_integers<F: QuantizedFormat>(
    unit: *const u8,
    slice: usize,
    half: usize,
) -> __m512i {
    // SAFETY: passed on from the caller.
    unsafe {
        let at = unit.add(F::LAYOUT.scale(slice));
        match F::LAYOUT.scales {
            Scales::PerHalfSlice => _mm512_cvtepi8_epi32(_mm_loadu_si128(at.add(16 * half).cast())),
            _ => _mm512_cvtepu8_epi32(_mm_loadu_si128(at.cast())),
        }
    }
}

/// The minimums of two slices, as pairs of i16.
///
/// # Safety
/// `unit` is a whole unit of F, whose minimums are integers; the machine has AVX-512 BW.
#[inline(always)]
pub(in crate::matmul) unsafe fn min_pairs<F: QuantizedFormat>(unit: *const u8, pair: usize) -> __m512i {
    // SAFETY: passed on from the caller.
    unsafe { _mm512_cvtepu8_epi16(_mm256_loadu_si256(unit.add(F::LAYOUT.min(2 * pair)).cast())) }
}
