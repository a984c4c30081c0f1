//! Sixteen lanes in four registers of NEON, with the bits of AVX2 and AVX-512.
//!
//! Every `unsafe` block of this module calls an intrinsic that every machine of this target has; loads and stores pass
//! the safety conditions on to their callers.
#![allow(clippy::undocumented_unsafe_blocks)]

use std::arch::aarch64::*;

use super::{LaneKernel, Lanes};
use crate::simd::Neon;

type Quarters = [float32x4_t; 4];

/// Applies an intrinsic to each quarter.
macro_rules! quarters {
    ($f:expr, $($x:expr),*) => { unsafe { [$f($($x[0]),*), $f($($x[1]),*), $f($($x[2]),*), $f($($x[3]),*)] } };
}

/// The four quarters of sixteen 16-bit values at `from`.
#[inline(always)]
unsafe fn load_u16(from: *const u8) -> [uint16x4_t; 4] {
    unsafe {
        let (low, high) = (vreinterpretq_u16_u8(vld1q_u8(from)), vreinterpretq_u16_u8(vld1q_u8(from.add(16))));
        [vget_low_u16(low), vget_high_u16(low), vget_low_u16(high), vget_high_u16(high)]
    }
}

impl Lanes for Neon {
    type Vector = Quarters;
    /// One: its four vectors of sums take sixteen of the 32 registers.
    const TILE_QUERIES: usize = 1;

    #[inline(never)]
    fn call(self, kernel: impl LaneKernel) {
        kernel.run(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Quarters {
        [unsafe { vdupq_n_f32(x) }; 4]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Quarters {
        unsafe { [vld1q_f32(from), vld1q_f32(from.add(4)), vld1q_f32(from.add(8)), vld1q_f32(from.add(12))] }
    }
    #[inline(always)]
    unsafe fn store(self, x: Quarters, to: *mut f32) {
        for quarter in 0..4 {
            unsafe { vst1q_f32(to.add(4 * quarter), x[quarter]) };
        }
    }
    #[inline(always)]
    unsafe fn load_f16(self, from: *const u8) -> Quarters {
        let halves = unsafe { load_u16(from) };
        quarters!(f16_to_f32, halves)
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u8) -> Quarters {
        let halves = unsafe { load_u16(from) };
        quarters!(bf16_to_f32, halves)
    }
    #[inline(always)]
    unsafe fn load_i8(self, from: *const u8) -> Quarters {
        let integers = unsafe {
            let bytes = vld1q_s8(from.cast());
            let (low, high) = (vmovl_s8(vget_low_s8(bytes)), vmovl_s8(vget_high_s8(bytes)));
            [vget_low_s16(low), vget_high_s16(low), vget_low_s16(high), vget_high_s16(high)]
        };
        quarters!(s16_to_f32, integers)
    }
    #[inline(always)]
    fn multiply_add(self, a: Quarters, b: Quarters, c: Quarters) -> Quarters {
        quarters!(vfmaq_f32, c, a, b)
    }
    #[inline(always)]
    fn multiply(self, a: Quarters, b: Quarters) -> Quarters {
        quarters!(vmulq_f32, a, b)
    }
    #[inline(always)]
    fn divide(self, a: Quarters, b: Quarters) -> Quarters {
        quarters!(vdivq_f32, a, b)
    }
    #[inline(always)]
    fn add(self, a: Quarters, b: Quarters) -> Quarters {
        quarters!(vaddq_f32, a, b)
    }
    #[inline(always)]
    fn subtract(self, a: Quarters, b: Quarters) -> Quarters {
        quarters!(vsubq_f32, a, b)
    }
    #[inline(always)]
    fn max(self, a: Quarters, b: Quarters) -> Quarters {
        let greater = quarters!(vcgtq_f32, a, b);
        quarters!(vbslq_f32, greater, a, b)
    }
    #[inline(always)]
    fn min(self, a: Quarters, b: Quarters) -> Quarters {
        let less = quarters!(vcltq_f32, a, b);
        quarters!(vbslq_f32, less, a, b)
    }
    #[inline(always)]
    fn largest(self, x: Quarters) -> f32 {
        unsafe { vmaxvq_f32(vmaxq_f32(vmaxq_f32(x[0], x[1]), vmaxq_f32(x[2], x[3]))) }
    }
    #[inline(always)]
    fn zero_below(self, x: Quarters, limit: Quarters, value: Quarters) -> Quarters {
        let below = quarters!(vcltq_f32, x, limit);
        quarters!(vbslq_f32, below, self.splat(0.0), value)
    }
    #[inline(always)]
    fn power_of_two(self, shifted: Quarters) -> Quarters {
        quarters!(power_of_two, shifted)
    }
}

#[inline(always)]
unsafe fn f16_to_f32(halves: uint16x4_t) -> float32x4_t {
    unsafe { vcvt_f32_f16(vreinterpret_f16_u16(halves)) }
}

#[inline(always)]
unsafe fn bf16_to_f32(halves: uint16x4_t) -> float32x4_t {
    unsafe { vreinterpretq_f32_u32(vshll_n_u16::<16>(halves)) }
}

#[inline(always)]
unsafe fn s16_to_f32(integers: int16x4_t) -> float32x4_t {
    unsafe { vcvtq_f32_s32(vmovl_s16(integers)) }
}

#[inline(always)]
unsafe fn power_of_two(shifted: float32x4_t) -> float32x4_t {
    unsafe {
        let biased = vaddq_s32(vreinterpretq_s32_f32(shifted), vdupq_n_s32(127));
        vreinterpretq_f32_s32(vshlq_n_s32::<23>(biased))
    }
}
