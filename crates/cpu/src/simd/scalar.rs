//! The reference: no instruction beyond the target's baseline. Machines without AVX2 run it too.

use super::{Isa, Simd};
use crate::math::sum_lanes;

#[derive(Debug, Clone, Copy)]
pub(crate) struct Scalar;

impl Simd for Scalar {
    const ISA: Isa = Isa::Scalar;
    const TILE_ROWS: usize = 1;
    const TILE_COLS: usize = 1;

    fn dot_tile<const R: usize, const C: usize>(self, x: [&[f32]; R], w: [&[f32]; C]) -> [[f32; C]; R] {
        x.map(|x| w.map(|w| dot(x, w)))
    }
}

fn dot(x: &[f32], w: &[f32]) -> f32 {
    assert_eq!(x.len(), w.len());
    let mut lanes = [0.0f32; 16];
    for (x, w) in x.chunks(16).zip(w.chunks(16)) {
        for (lane, (x, w)) in lanes.iter_mut().zip(x.iter().zip(w)) {
            *lane += x * w;
        }
    }
    sum_lanes(lanes)
}
