//! Operations on each value of a row: residual sums, activations, soft caps.

use pellucid_tensor::Activation;

use crate::math;
use crate::simd::{Simd, vectorized};

vectorized! {
    /// `x *= factor`
    pub(crate) fn scale<S: Simd>(factor: f32, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

vectorized! {
    /// `x += y`
    pub(crate) fn add<S: Simd>(y: &[f32], x: &mut [f32]) {
        x.iter_mut().zip(y).for_each(|(x, y)| *x += y);
    }
}

vectorized! {
    /// `x = cap * tanh(x / cap)`
    pub(crate) fn soft_cap<S: Simd>(cap: f32, x: &mut [f32]) {
        x.iter_mut().for_each(|x| *x = cap * math::tanh(*x / cap));
    }
}

vectorized! {
    /// `x = activation(x)`. The match is outside the loops: inside, it would prevent vectorisation.
    pub(crate) fn activate<S: Simd>(activation: Activation, x: &mut [f32]) {
        match activation {
            Activation::Silu => x.iter_mut().for_each(|x| *x = math::silu(*x)),
            Activation::GeluTanh => x.iter_mut().for_each(|x| *x = math::gelu_tanh(*x)),
            Activation::Gelu => x.iter_mut().for_each(|x| *x = math::gelu(*x)),
            Activation::ClampedSwiglu => unreachable!("`gate` computes it"),
            Activation::SquaredRelu => x.iter_mut().for_each(|x| *x = math::squared_relu(*x)),
        }
    }
}

/// `gate = activation(gate) * up`
#[inline(always)]
pub(crate) fn gate<S: Simd>(simd: S, activation: Activation, up: &[f32], gate: &mut [f32]) {
    if activation == Activation::ClampedSwiglu {
        return clamped_swiglu(simd, up, gate);
    }
    activate(simd, activation, gate);
    multiply(simd, up, gate);
}

vectorized! {
    /// `gate = clamped_swiglu(gate, up)`
    fn clamped_swiglu<S: Simd>(up: &[f32], gate: &mut [f32]) {
        gate.iter_mut().zip(up).for_each(|(gate, up)| *gate = math::clamped_swiglu(*gate, *up));
    }
}

vectorized! {
    /// `x *= sigmoid(gate)`; a gate of one value applies to all of x.
    pub(crate) fn sigmoid_gate<S: Simd>(gate: &[f32], x: &mut [f32]) {
        match *gate {
            [gate] => {
                let factor = math::sigmoid(gate);
                x.iter_mut().for_each(|x| *x *= factor);
            }
            _ => x.iter_mut().zip(gate).for_each(|(x, gate)| *x *= math::sigmoid(*gate)),
        }
    }
}

vectorized! {
    /// `x *= y`
    pub(crate) fn multiply<S: Simd>(y: &[f32], x: &mut [f32]) {
        x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
    }
}
