//! [`Lanes`]: vectors of sixteen floats on every instruction set, in which the attention kernels are written.
//!
//! A value of an implementing type proves that its instructions are there, as everywhere in [`crate::simd`]. AVX2 holds
//! sixteen lanes in two registers, NEON in four, and both give the bits of AVX-512. The scalar version does not fuse
//! multiply and add; it is the reference, within a tolerance.
//!
//! Code over lanes is `#[inline(always)]`, with closures small enough that the compiler inlines them too: a closure is
//! a function without the target features, and if it were not inlined, each of its operations would become a call.

#[cfg(target_arch = "aarch64")]
mod neon;
#[cfg(target_arch = "x86_64")]
mod x86;

use pellucid_tensor::quant::{bf16_to_f32, f16_to_f32};

use crate::math;
use crate::simd::{Level, Scalar, prefetch_to_l1};

/// Floats in a vector.
pub(super) const LANES: usize = 16;

/// Arithmetic on sixteen lanes. If an argument is NaN, `max` and `min` return the second.
pub(super) trait Lanes: Copy + Send + Sync + 'static {
    type Vector: Copy;

    /// Queries whose sums fit into registers together with four vectors of keys.
    const TILE_QUERIES: usize;
    /// Whether machines with these instructions may have AMX.
    #[cfg(target_arch = "x86_64")]
    const TILES: bool = false;

    /// Runs a kernel as a separate function, which is compiled once with these instructions and not inlined.
    fn call(self, kernel: impl LaneKernel);

    fn splat(self, x: f32) -> Self::Vector;
    /// # Safety
    /// Sixteen floats can be read from `from`, which may have any alignment.
    unsafe fn load(self, from: *const f32) -> Self::Vector;
    /// # Safety
    /// Sixteen floats can be written to `to`, which may have any alignment.
    unsafe fn store(self, x: Self::Vector, to: *mut f32);
    /// # Safety
    /// Sixteen f16, 32 bytes, can be read from `from`.
    unsafe fn load_f16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// Sixteen bf16, 32 bytes, can be read from `from`.
    unsafe fn load_bf16(self, from: *const u8) -> Self::Vector;
    /// # Safety
    /// Sixteen signed bytes can be read from `from`.
    unsafe fn load_i8(self, from: *const u8) -> Self::Vector;

    /// `a * b + c`, rounded once except in the scalar version.
    fn multiply_add(self, a: Self::Vector, b: Self::Vector, c: Self::Vector) -> Self::Vector;
    fn multiply(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn divide(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn add(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn subtract(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn max(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    fn min(self, a: Self::Vector, b: Self::Vector) -> Self::Vector;
    /// `value`, or zero in the lanes where `x` is below `limit`.
    fn zero_below(self, x: Self::Vector, limit: Self::Vector, value: Self::Vector) -> Self::Vector;
    /// 2^n for floats that are [`math::ROUND`] + n with an integer n of -126 to 127.
    fn power_of_two(self, shifted: Self::Vector) -> Self::Vector;

    /// The largest lane; no lane is NaN.
    fn largest(self, x: Self::Vector) -> f32;

    /// All lanes as an array.
    #[inline(always)]
    fn to_array(self, x: Self::Vector) -> [f32; LANES] {
        let mut lanes = [0.0; LANES];
        // SAFETY: the array holds sixteen floats.
        unsafe { self.store(x, lanes.as_mut_ptr()) };
        lanes
    }

    /// Prefetches a cache line, at any address.
    #[inline(always)]
    fn prefetch(self, line: *const u8) {
        prefetch_to_l1(line);
    }

    /// e^x by the steps of [`math::exp`], with fused multiply-adds; relative error under 2e-7.
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

/// Code that is compiled once for each instruction set.
pub(super) trait LaneKernel {
    /// Implementations must be `#[inline(always)]`, so that they are compiled with the features of their caller.
    fn run<L: Lanes>(self, lanes: L);
}

/// Runs a kernel with the instruction set that was selected at start.
pub(super) fn run(level: Level, kernel: impl LaneKernel) {
    match level {
        Level::Scalar(scalar) => scalar.call(kernel),
        #[cfg(target_arch = "aarch64")]
        Level::Neon(neon) => neon.call(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx2(avx2) => avx2.call(kernel),
        #[cfg(target_arch = "x86_64")]
        Level::Avx512(avx512) | Level::Amx(avx512, _) => avx512.call(kernel),
    }
}

impl Lanes for Scalar {
    type Vector = [f32; LANES];
    const TILE_QUERIES: usize = 1;

    #[inline(never)]
    fn call(self, kernel: impl LaneKernel) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::Isa;

    /// Computes the exponentials of sixteen values.
    struct Exp<'a>(&'a [f32; LANES], &'a mut [f32; LANES]);

    impl LaneKernel for Exp<'_> {
        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) {
            // SAFETY: the array holds sixteen floats.
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
