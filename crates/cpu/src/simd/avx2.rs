//! AVX2 with FMA: eight lanes a register, two registers to a lane set of sixteen.

use std::arch::x86_64::*;

use super::{Simd, padded};
use crate::math::sum_lanes;

/// Proof that the machine has AVX2, FMA, F16C and BMI2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let available = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2");
        available.then_some(Avx2(()))
    }
}

impl Simd for Avx2 {
    const TILE_ROWS: usize = 2;
    const TILE_COLS: usize = 2;

    #[inline(always)]
    fn vectorize<R>(self, f: impl FnOnce() -> R) -> R {
        // SAFETY: `self` proves that the features are there.
        unsafe { with_features(f) }
    }

    #[inline(always)]
    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
        // SAFETY: `self` proves that the features are there.
        unsafe { dot_tile(x, w) }
    }

    #[inline(always)]
    fn multiply_add(a: f32, b: f32, c: f32) -> f32 {
        a.mul_add(b, c)
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn with_features<R>(f: impl FnOnce() -> R) -> R {
    f()
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn dot_tile<const R: usize, const C: usize>(x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
    let len = w[0].len();
    assert!(x.iter().all(|x| x.len() == len) && w.iter().all(|w| w.len() == len));
    let mut sums = [[[_mm256_setzero_ps(); 2]; C]; R];
    let whole = len / 16 * 16;
    for k in (0..whole).step_by(16) {
        for half in 0..2 {
            // SAFETY: k + 16 <= len, which is the length of every slice.
            let w: [__m256; C] = std::array::from_fn(|c| unsafe { _mm256_loadu_ps(w[c].as_ptr().add(k + 8 * half)) });
            for r in 0..R {
                // SAFETY: as above.
                let x = unsafe { _mm256_loadu_ps(x[r].as_ptr().add(k + 8 * half)) };
                for c in 0..C {
                    sums[r][c][half] = _mm256_fmadd_ps(x, w[c], sums[r][c][half]);
                }
            }
        }
    }
    if whole < len {
        for r in 0..R {
            let x = padded(&x[r][whole..]);
            for c in 0..C {
                let w = padded(&w[c][whole..]);
                for half in 0..2 {
                    // SAFETY: both arrays hold sixteen numbers.
                    let (x, w) = unsafe {
                        (_mm256_loadu_ps(x.as_ptr().add(8 * half)), _mm256_loadu_ps(w.as_ptr().add(8 * half)))
                    };
                    sums[r][c][half] = _mm256_fmadd_ps(x, w, sums[r][c][half]);
                }
            }
        }
    }
    sums.map(|row| {
        row.map(|[low, high]| {
            let mut lanes = [0.0; 16];
            // SAFETY: the array holds sixteen numbers.
            unsafe {
                _mm256_storeu_ps(lanes.as_mut_ptr(), low);
                _mm256_storeu_ps(lanes.as_mut_ptr().add(8), high);
            }
            sum_lanes(lanes)
        })
    })
}
