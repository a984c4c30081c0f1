//! Sixteen numbers at a time, on every instruction set: what the attention kernels are written in.
//!
//! A value of an implementing type proves that its instructions are there, as everywhere in [`crate::simd`]. AVX2 holds sixteen lanes
//! in two registers, NEON in four, and both give the bits of AVX-512; the scalar version does not fuse and is the oracle within a
//! tolerance.
//!
//! Code over lanes is `#[inline(always)]`, its closures small enough that the compiler takes them in too: a closure is a function without
//! the instructions, and left by itself every one of its operations would become a call.

#[cfg(target_arch = "aarch64")]
mod neon;

use pellucid_tensor::quant::{bf16_to_f32, f16_to_f32};

use crate::math;
use crate::simd::{Level, Scalar, prefetch_to_l1};

/// Numbers in a vector.
pub(super) const LANES: usize = 16;

/// Arithmetic on sixteen lanes. Where an argument is not a number, `max` and `min` give the second.
pub(super) trait Lanes: Copy + Send + Sync + 'static {
    type Vector: Copy;

    /// Queries whose sums fit into registers beside four vectors of keys.
    const TILE_QUERIES: usize;
    /// Whether the machines that have these instructions may have tiles too.
    #[cfg(target_arch = "x86_64")]
    const TILES: bool = false;

    /// Runs a kernel as a function of its own: compiled once with these instructions, wherever it is called.
    fn apart(self, kernel: impl LaneKernel);

    fn splat(self, x: f32) -> Self::Vector;
    /// # Safety
    /// Sixteen numbers can be read from `from`, which may have any alignment.
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    /// # Safety
    /// Sixteen numbers can be written to `to`, which may have any alignment.
    unsafe fn store(self, x: Self::Vector, to: *mut f32);
    /// # Safety
    /// Sixteen halves, 32 bytes, can be read from `from`.
    unsafe fn load_f16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// Sixteen bfloat16s, 32 bytes, can be read from `from`.
    unsafe fn load_bf16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// Sixteen signed bytes can be read from `from`.
    unsafe fn load_i8(self, from: *const u8) -> Self::Vector;

    /// `a * b + c`, fused where that is one instruction.
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    fn multiply(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn divide(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn subtract(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `value`, or zero in the lanes where `x` is below `limit`.
    fn zero_below(self, x: Self::Vector, limit: Self::Vector, value: Self::Vector) -> Self::Vector;
    /// 2^n for numbers that are [`math::ROUND`] + n with an integer n of -126 to 127.
    fn power_of_two(self, shifted: Self::Vector) -> Self::Vector;

    /// The largest lane, where all are numbers.
    fn largest(self, x: Self::Vector) -> f32;

    /// All lanes, for the sums at the end of a row.
    #[inline(always)]
    fn to_array(self, x: Self::Vector) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array has room for sixteen numbers.
        unsafe { self.store(x, lanes.as_mut_ptr()) };
        lanes
    }

    /// Asks for a cache line that will be read soon.
    #[inline(always)]
    fn prefetch(self, line: *const u8) {
        prefetch_to_l1(line);
    }

    /// e^x by the steps of [`math::exp`], the polynomial fused where the instructions are; relative error under 2e-7.
    #[inline(always)]
    fn exp(self, x: Self::Vector) -> Self::Vector {
        let lowest = self.splat(math::EXP_LOWEST);
        let clamped = self.min(self.splat(math::EXP_HIGHEST), self.max(lowest, x));
        let shifted = self.multiply_add(clamped, self.splat(math::LOG2_E), self.splat(math::ROUND));
        let n = self.subtract(shifted, self.splat(math::ROUND));
        let r = self.multiply_add(n, self.splat(-math::LN2_HIGH), clamped);
        let r = self.multiply_add(n, self.splat(-math::LN2_LOW), r);
        let mut p = self.splat(math::EXP_TAYLOR[0]);
        for coefficient in &math::EXP_TAYLOR[1..] {
            p = self.multiply_add(p, r, self.splat(*coefficient));
        }
        self.zero_below(x, lowest, self.multiply(p, self.power_of_two(shifted)))
    }
}

/// Work that is compiled once for each instruction set.
pub(super) trait LaneKernel {
    /// Implementations are `#[inline(always)]`: that is what brings the instructions into their loops.
    fn run<L: Lanes>(self, lanes: L);
}

/// Runs a kernel with the instructions that were chosen at start.
pub(super) fn run(level: Level, kernel: impl LaneKernel) {
    match level {
        Level::Scalar(scalar) => scalar.apart(kernel),
        #[cfg(target_arch = "aarch64")]
        Level::Neon(neon) => neon.apart(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(avx2) => avx2.apart(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(avx512) | Level::Amx(avx512, _) => avx512.apart(kernel),
    }
}

impl Lanes for Scalar {
    type Vector = [f32; LANES];
    const TILE_QUERIES: usize = 1;

    #[inline(never)]
    fn apart(self, kernel: impl LaneKernel) {
        kernel.run(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::Vector {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Vector {
        // SAFETY: passed on from the caller.
        unsafe { from.cast::<Self::Vector>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, x: Self::Vector, to: *mut f32) {
        // SAFETY: passed on from the caller.
        unsafe { to.cast::<Self::Vector>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> Self::Vector {
        // SAFETY: passed on from the caller.
        unsafe { from.cast::<[[u8; 2]; LANES]>().read() }.map(|half| f16_to_f32(u16::from_le_bytes(half)))
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u8) -> Self::Vector {
        // SAFETY: passed on from the caller.
        unsafe { from.cast::<[[u8; 2]; LANES]>().read() }.map(|half| bf16_to_f32(u16::from_le_bytes(half)))
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> Self::Vector {
        // SAFETY: passed on from the caller.
        unsafe { from.cast::<[i8; LANES]>().read() }.map(f32::from)
    }
    #[inline(always)]
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i] * b[i] + c[i])
    }
    #[inline(always)]
    fn multiply(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn divide(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn subtract(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| if a[i] < b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn largest(self, x: Self::Vector) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn zero_below(self, x: Self::Vector, limit: Self::Vector, value: Self::Vector) -> Self::Vector {
        std::array::from_fn(|i| if x[i] < limit[i] { 0.0 } else { value[i] })
    }
    #[inline(always)]
    fn power_of_two(self, shifted: Self::Vector) -> Self::Vector {
        shifted.map(math::power_of_two)
    }
}

#[cfg(target_arch = "x86_64")]
mod x86 {
    //! Every `unsafe` block of this module calls a function whose features the value `self` proves; loads and stores pass their
    //! caller's promise on.
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
        fn apart(self, kernel: impl LaneKernel) {
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
            unsafe {
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(_mm256_loadu_si256(from.cast()))))
            }
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
        /// One: its four vectors of sums are eight of the sixteen registers.
        const TILE_QUERIES: usize = 1;

        #[inline(always)]
        fn apart(self, kernel: impl LaneKernel) {
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    /// Sixteen numbers and their exponentials.
    struct Exp<'a>(&'a [f32; LANES], &'a mut [f32; LANES]);

    impl LaneKernel for Exp<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) {
            // SAFETY: the array holds sixteen numbers.
            *self.1 = lanes.to_array(lanes.exp(unsafe { lanes.load(self.0.as_ptr()) }));
        }
    }

    #[test]
    fn exp_is_within_its_error_on_every_instruction_set_and_fused_sets_agree() {
        let levels: Vec<Level> = Isa::ALL.into_iter().filter_map(Level::of).collect();
        let mut x = -87.2f32;
        while x < 88.0 {
            let xs: [f32; LANES] = std::array::from_fn(|i| x + i as f32 * 0.001_3);
            let mut fused: Option<[f32; LANES]> = None;
            for &level in &levels {
                let mut found = [0.0; LANES];
                run(level, Exp(&xs, &mut found));
                for (x, found) in xs.iter().zip(found) {
                    let expected = f64::from(*x).exp();
                    let relative = (f64::from(found) - expected).abs() / expected;
                    assert!(relative < 2e-7, "exp({x}) on {}: relative error {relative}", level.isa());
                }
                if level.isa() != Isa::Scalar {
                    let first = *fused.get_or_insert(found);
                    assert_eq!(first.map(f32::to_bits), found.map(f32::to_bits), "exp near {x} on {}", level.isa());
                }
            }
            x += if cfg!(miri) { 5.0 } else { 0.021 };
        }
        for level in levels {
            let special = [f32::NEG_INFINITY, f32::NAN, 0.0, -1e30, 1e30, -87.4];
            let xs = std::array::from_fn(|i| special[i % special.len()]);
            let mut found = [0.0; LANES];
            run(level, Exp(&xs, &mut found));
            assert!(found[1].is_nan() && found[4].is_finite(), "{}: {found:?}", level.isa());
            assert_eq!([found[0], found[2], found[3], found[5]], [0.0, 1.0, 0.0, 0.0]);
        }
    }
}
