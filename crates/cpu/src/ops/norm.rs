//! RMSNorm and LayerNorm of one row. Sums run in sixteen lanes and end in a fixed tree, like dot products.

use crate::math::sum_lanes;
use crate::simd::{Simd, vectorized};

/// The sum of `f(x)` over a row.
#[inline(always)]
pub(crate) fn sum(x: &[f32], f: impl Fn(f32) -> f32) -> f32 {
    let mut lanes = [0.0f32; 16];
    let mut chunks = x.chunks_exact(16);
    for chunk in &mut chunks {
        for i in 0..16 {
            lanes[i] += f(chunk[i]);
        }
    }
    for (lane, &x) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += f(x);
    }
    sum_lanes(lanes)
}

vectorized! {
    /// `out = x / sqrt(mean(x^2) + eps) * weight`
    pub(crate) fn rms_norm<S: Simd>(x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let mean_square = sum(x, |x| x * x) / x.len() as f32;
        let factor = 1.0 / (mean_square + eps).sqrt();
        for ((out, x), weight) in out.iter_mut().zip(x).zip(weight) {
            *out = x * factor * weight;
        }
    }
}

/// [`rms_norm`] of each group of `group_len` values. The groups have weights of their own.
pub(crate) fn grouped_rms_norm<S: Simd>(
    simd: S,
    x: &[f32],
    (weight, group_len): (&[f32], usize),
    eps: f32,
    out: &mut [f32],
) {
    let groups = x.chunks_exact(group_len).zip(weight.chunks_exact(group_len));
    for ((x, weight), out) in groups.zip(out.chunks_exact_mut(group_len)) {
        rms_norm(simd, x, weight, eps, out);
    }
}

vectorized! {
    /// `out = (x - mean) / sqrt(var + eps) * weight + bias`
    pub(crate) fn layer_norm<S: Simd>(x: &[f32], weight: &[f32], bias: &[f32], eps: f32, out: &mut [f32]) {
        let mean = sum(x, |x| x) / x.len() as f32;
        let variance = sum(x, |x| (x - mean) * (x - mean)) / x.len() as f32;
        let factor = 1.0 / (variance + eps).sqrt();
        for (((out, x), weight), bias) in out.iter_mut().zip(x).zip(weight).zip(bias) {
            *out = (x - mean) * factor * weight + bias;
        }
    }
}
