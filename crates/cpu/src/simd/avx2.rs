//! AVX2 with FMA: a register has eight lanes, so sixteen lanes take two registers.

use std::arch::x86_64::*;

use super::{Isa, Simd, padded};

/// Proof that the machine has AVX2, FMA, F16C and BMI2.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        // Miri runs the scalar code: it knows few of the intrinsics.
        let available = !cfg!(miri)
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c")
            && is_x86_feature_detected!("bmi2");
        available.then_some(Avx2(()))
    }
}

impl Simd for Avx2 {
    const ISA: Isa = Isa::Avx2;
    const TILE_ROWS: usize = 2;
    const TILE_COLS: usize = 2;

    #[inline(always)]
    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
        // SAFETY: `self` proves that the features are there.
        unsafe { dot_tile(x, w) }
    }
}

#[target_feature(enable = "avx2,fma,f16c,bmi2")]
fn dot_tile<const R: usize, const C: usize>(x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
    let len = w[0].len();
    assert!(x.iter().all(|x| x.len() == len) && w.iter().all(|w| w.len() == len));
    let mut sums = [[[_mm256_setzero_ps(); 2]; C]; R];
    let mut columns = [_mm256_setzero_ps(); C];
    let whole = len / 16 * 16;
    for k in (0..whole).step_by(16) {
        for half in 0..2 {
            for c in 0..C {
                // SAFETY: k + 16 <= len, which is the length of every slice.
                columns[c] = unsafe { _mm256_loadu_ps(w[c].as_ptr().add(k + 8 * half)) };
            }
            for r in 0..R {
                // SAFETY: k + 16 <= len, which is the length of every slice.
                let row = unsafe { _mm256_loadu_ps(x[r].as_ptr().add(k + 8 * half)) };
                for c in 0..C {
                    sums[r][c][half] = _mm256_fmadd_ps(row, columns[c], sums[r][c][half]);
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
                    // SAFETY: both arrays hold sixteen values.
                    let (x, w) = unsafe {
                        (_mm256_loadu_ps(x.as_ptr().add(8 * half)), _mm256_loadu_ps(w.as_ptr().add(8 * half)))
                    };
                    sums[r][c][half] = _mm256_fmadd_ps(x, w, sums[r][c][half]);
                }
            }
        }
    }
    let mut products = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            products[r][c] = sum_lanes(sums[r][c][0], sums[r][c][1]);
        }
    }
    products
}

/// The fixed tree of [`crate::math::sum_lanes`]: lanes 0 to 7 plus lanes 8 to 15, then the upper half to the lower half
/// again.
#[inline]
#[target_feature(enable = "avx2,fma,f16c,bmi2")]
pub(super) fn sum_lanes(low: __m256, high: __m256) -> f32 {
    let eight = _mm256_add_ps(low, high);
    let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}
