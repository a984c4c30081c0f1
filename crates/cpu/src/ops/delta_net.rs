//! The parts of a gated delta net that run over many values: the length of queries and keys, one step of a head's
//! recurrence, and the gate.
//!
//! A step reads and writes the head's matrix twice: once to decay it and to read what it holds for the key, and once to
//! write the difference to the value and to read the result for the query. Every sum over the key's values runs in
//! ascending order, with one sum for each of the value's lanes, so that all instruction sets give the same bits.

use super::norm::sum;
use crate::math;
use crate::simd::vectorized;

/// Added to the square of a length before its root is taken. The reference implementation has this constant.
const LENGTH_EPS: f32 = 1e-6;

/// The inputs of one head at one position.
pub(crate) struct Token<'a> {
    pub(crate) query: &'a [f32],
    pub(crate) key: &'a [f32],
    pub(crate) value: &'a [f32],
    /// Factor of the matrix.
    pub(crate) decay: f32,
    /// Part of the difference that is written.
    pub(crate) beta: f32,
}

vectorized! {
    /// Divides x by its length, and multiplies it by `factor`.
    pub(crate) fn normalise<S: Simd>(factor: f32, x: &mut [f32]) {
        let factor = factor / (sum(x, |x| x * x) + LENGTH_EPS).sqrt();
        x.iter_mut().for_each(|x| *x *= factor);
    }
}

vectorized! {
    /// Advances the matrix of a head, a row for each value of the key, by one position. `out` becomes the matrix read
    /// by the query, `delta` the difference that was written.
    pub(crate) fn advance<S: Simd>(token: &Token<'_>, matrix: &mut [f32], delta: &mut [f32], out: &mut [f32]) {
        let len = out.len();
        delta.fill(0.0);
        for (row, &key) in matrix.chunks_exact_mut(len).zip(token.key) {
            for (cell, delta) in row.iter_mut().zip(&mut *delta) {
                *cell *= token.decay;
                *delta += key * *cell;
            }
        }
        for (delta, value) in delta.iter_mut().zip(token.value) {
            *delta = (value - *delta) * token.beta;
        }
        out.fill(0.0);
        for ((row, &key), &query) in matrix.chunks_exact_mut(len).zip(token.key).zip(token.query) {
            for ((cell, delta), out) in row.iter_mut().zip(&*delta).zip(&mut *out) {
                *cell += key * delta;
                *out += query * *cell;
            }
        }
    }
}

vectorized! {
    /// `x *= silu(gate)`
    pub(crate) fn gate<S: Simd>(gate: &[f32], x: &mut [f32]) {
        x.iter_mut().zip(gate).for_each(|(x, gate)| *x *= math::silu(*gate));
    }
}
