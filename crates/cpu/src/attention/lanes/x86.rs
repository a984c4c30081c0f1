//! Sixteen lanes in one register of AVX-512, or in two of AVX2.
//!
//! Every `unsafe` block of this module calls an intrinsic whose features the value `self` proves; loads and stores pass
//! the safety conditions on to their callers.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::x86_64::*;

use super::{LaneKernel, Lanes};
use crate::simd::{Avx2, Avx512};

#[inline(never)]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn with_avx2(avx2: Avx2, kernel: impl LaneKernel) {
    kernel.run(avx2);
}

#[inline(never)]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
fn with_avx512(avx512: Avx512, kernel: impl LaneKernel) {
    kernel.run(avx512);
}

impl Lanes for Avx512 {
    type Vector = __m512;
    const TILE_QUERIES: usize = 4;
    const TILES: bool = true;

    #[inline(always)]
    fn call(self, kernel: impl LaneKernel) {
        unsafe { with_avx512(self, kernel) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn store(self, x: __m512, to: *mut f32) {
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(from.cast())) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u8) -> __m512 {
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast())))) }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from.cast()))) }
    }
    #[inline(always)]
    fn multiply_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn multiply(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn divide(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn subtract(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn largest(self, x: __m512) -> f32 {
        unsafe { _mm512_reduce_max_ps(x) }
    }
    #[inline(always)]
    fn zero_below(self, x: __m512, limit: __m512, value: __m512) -> __m512 {
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, limit), value) }
    }
    #[inline(always)]
    fn power_of_two(self, shifted: __m512) -> __m512 {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_castps_si512(shifted), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }
}

/// Applies an intrinsic to both halves.
macro_rules! halves {
    ($f:ident, $($x:expr),*) => { unsafe { [$f($($x[0]),*), $f($($x[1]),*)] } };
}

impl Lanes for Avx2 {
    type Vector = [__m256; 2];
    /// One: its four vectors of sums take eight of the sixteen registers.
    const TILE_QUERIES: usize = 1;

    #[inline(always)]
    fn call(self, kernel: impl LaneKernel) {
        unsafe { with_avx2(self, kernel) }
    }
    #[inline(always)]
    fn splat(self, x: f32) -> [__m256; 2] {
        [unsafe { _mm256_set1_ps(x) }; 2]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> [__m256; 2] {
        unsafe { [_mm256_loadu_ps(from), _mm256_loadu_ps(from.add(8))] }
    }
    #[inline(always)]
    unsafe fn store(self, x: [__m256; 2], to: *mut f32) {
        unsafe {
            _mm256_storeu_ps(to, x[0]);
            _mm256_storeu_ps(to.add(8), x[1]);
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> [__m256; 2] {
        unsafe {
            let (low, high) = (_mm_loadu_si128(from.cast()), _mm_loadu_si128(from.add(16).cast()));
            [_mm256_cvtph_ps(low), _mm256_cvtph_ps(high)]
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u8) -> [__m256; 2] {
        unsafe {
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.cast()));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(16).cast()));
            [_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)), _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))]
        }
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> [__m256; 2] {
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(from.add(8).cast()));
            [_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high)]
        }
    }
    #[inline(always)]
    fn multiply_add(self, a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn multiply(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn divide(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn add(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn subtract(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn max(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] {
        halves!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn largest(self, x: [__m256; 2]) -> f32 {
        unsafe {
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        }
    }
    #[inline(always)]
    fn zero_below(self, x: [__m256; 2], limit: [__m256; 2], value: [__m256; 2]) -> [__m256; 2] {
        let keep = halves!(not_below, x, limit);
        halves!(_mm256_and_ps, keep, value)
    }
    #[inline(always)]
    fn power_of_two(self, shifted: [__m256; 2]) -> [__m256; 2] {
        halves!(power_of_two, shifted)
    }
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn not_below(x: __m256, limit: __m256) -> __m256 {
    _mm256_cmp_ps::<_CMP_NLT_UQ>(x, limit)
}

#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn power_of_two(shifted: __m256) -> __m256 {
    let biased = _mm256_add_epi32(_mm256_castps_si256(shifted), _mm256_set1_epi32(127));
    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
}
