//! AVX-512: a register has sixteen lanes; a tile of six by four dot products takes 24 of the 32 registers.

use std::arch::x86_64::*;

use super::{Isa, Simd, padded};

/// Proof that the machine has AVX-512 F, BW, VL and DQ.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let available = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512dq")
            && super::Avx2::detect().is_some();
        available.then_some(Avx512(()))
    }
}

impl Simd for Avx512 {
    const ISA: Isa = Isa::Avx512;
    const TILE_ROWS: usize = 6;
    const TILE_COLS: usize = 4;

    #[inline(always)]
    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
        // SAFETY: `self` proves that the features are there.
        unsafe { dot_tile(x, w) }
    }
}

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx2,fma,f16c,bmi2")]
fn dot_tile<const R: usize, const C: usize>(x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
    let len = w[0].len();
    assert!(x.iter().all(|x| x.len() == len) && w.iter().all(|w| w.len() == len));
    let mut sums = [[_mm512_setzero_ps(); C]; R];
    let mut columns = [_mm512_setzero_ps(); C];
    let whole = len / 16 * 16;
    for k in (0..whole).step_by(16) {
        for c in 0..C {
            // SAFETY: k + 16 <= len, which is the length of every slice.
            columns[c] = unsafe { _mm512_loadu_ps(w[c].as_ptr().add(k)) };
        }
        for r in 0..R {
            // SAFETY: k + 16 <= len, which is the length of every slice.
            let row = unsafe { _mm512_loadu_ps(x[r].as_ptr().add(k)) };
            for c in 0..C {
                sums[r][c] = _mm512_fmadd_ps(row, columns[c], sums[r][c]);
            }
        }
    }
    if whole < len {
        for r in 0..R {
            let x = padded(&x[r][whole..]);
            for c in 0..C {
                let w = padded(&w[c][whole..]);
                // SAFETY: both arrays hold sixteen values.
                let (x, w) = unsafe { (_mm512_loadu_ps(x.as_ptr()), _mm512_loadu_ps(w.as_ptr())) };
                sums[r][c] = _mm512_fmadd_ps(x, w, sums[r][c]);
            }
        }
    }
    let mut products = [[0.0; C]; R];
    for r in 0..R {
        for c in 0..C {
            let (low, high) = (_mm512_castps512_ps256(sums[r][c]), _mm512_extractf32x8_ps::<1>(sums[r][c]));
            products[r][c] = super::avx2::sum_lanes(low, high);
        }
    }
    products
}
