//! NEON: a register has four lanes, so sixteen lanes take four registers.
//!
//! Every 64-bit ARM target of Rust has it, so no function needs to enable it.

use std::arch::aarch64::*;
use std::arch::is_aarch64_feature_detected;

use super::{Isa, Simd, padded};

/// Proof that the machine has NEON.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Neon(());

impl Neon {
    pub(crate) fn detect() -> Option<Self> {
        // Miri runs the scalar code: it knows few of the intrinsics.
        (!cfg!(miri) && is_aarch64_feature_detected!("neon")).then_some(Neon(()))
    }
}

impl Simd for Neon {
    const ISA: Isa = Isa::Neon;
    const TILE_ROWS: usize = 2;
    const TILE_COLS: usize = 2;

    #[inline(always)]
    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
        let len = w[0].len();
        assert!(x.iter().all(|x| x.len() == len) && w.iter().all(|w| w.len() == len));
        let mut sums = [[[zero(); 4]; C]; R];
        let whole = len / 16 * 16;
        for k in (0..whole).step_by(16) {
            for quad in 0..4 {
                // SAFETY: k + 16 <= len, which is the length of every slice.
                let (x, w) = unsafe {
                    (
                        x.map(|x| vld1q_f32(x.as_ptr().add(k + 4 * quad))),
                        w.map(|w| vld1q_f32(w.as_ptr().add(k + 4 * quad))),
                    )
                };
                for r in 0..R {
                    for c in 0..C {
                        sums[r][c][quad] = multiply_add(x[r], w[c], sums[r][c][quad]);
                    }
                }
            }
        }
        if whole < len {
            let (x, w) = (x.map(|x| padded(&x[whole..])), w.map(|w| padded(&w[whole..])));
            for r in 0..R {
                for c in 0..C {
                    for quad in 0..4 {
                        // SAFETY: the arrays hold sixteen values.
                        let (x, w) = unsafe { (vld1q_f32(&x[r][4 * quad]), vld1q_f32(&w[c][4 * quad])) };
                        sums[r][c][quad] = multiply_add(x, w, sums[r][c][quad]);
                    }
                }
            }
        }
        sums.map(|row| row.map(sum_lanes))
    }
}

#[inline(always)]
fn zero() -> float32x4_t {
    // SAFETY: every machine of this target has NEON.
    unsafe { vdupq_n_f32(0.0) }
}

/// `a * b + c`, rounded once.
#[inline(always)]
fn multiply_add(a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
    // SAFETY: every machine of this target has NEON.
    unsafe { vfmaq_f32(c, a, b) }
}

/// The fixed tree of [`crate::math::sum_lanes`].
#[inline(always)]
fn sum_lanes(lanes: [float32x4_t; 4]) -> f32 {
    // SAFETY: both are sixteen f32, lane 0 first.
    crate::math::sum_lanes(unsafe { std::mem::transmute::<[float32x4_t; 4], [f32; 16]>(lanes) })
}
