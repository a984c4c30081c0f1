//! Row by row: embedding, residual sums, activations, soft caps.

use pellucid_tensor::{Activation, DType};

use super::matmul::decode_row;
use crate::math;
use crate::simd::Simd;

/// `out = scale * row`, where `row` is one stored row of the embedding table.
pub(crate) fn embed_row<S: Simd>(simd: S, dtype: DType, row: &[u8], scale: f32, out: &mut [f32]) {
    decode_row(simd, dtype, row, out);
    if scale != 1.0 {
        simd.vectorize(|| out.iter_mut().for_each(|value| *value *= scale));
    }
}

pub(crate) fn add<S: Simd>(simd: S, y: &[f32], x: &mut [f32]) {
    simd.vectorize(|| x.iter_mut().zip(y).for_each(|(x, y)| *x += y));
}

pub(crate) fn soft_cap<S: Simd>(simd: S, cap: f32, x: &mut [f32]) {
    simd.vectorize(|| x.iter_mut().for_each(|x| *x = cap * math::tanh(*x / cap)));
}

pub(crate) fn activate<S: Simd>(simd: S, activation: Activation, x: &mut [f32]) {
    // The choice stands outside the loop: inside it would keep the loop from being vectorised.
    simd.vectorize(|| match activation {
        Activation::Silu => x.iter_mut().for_each(|x| *x = math::silu(*x)),
        Activation::GeluTanh => x.iter_mut().for_each(|x| *x = math::gelu_tanh(*x)),
        Activation::Gelu => x.iter_mut().for_each(|x| *x = math::gelu(*x)),
    });
}

pub(crate) fn gate<S: Simd>(simd: S, activation: Activation, up: &[f32], gate: &mut [f32]) {
    activate(simd, activation, gate);
    simd.vectorize(|| gate.iter_mut().zip(up).for_each(|(gate, up)| *gate *= up));
}
