//! One step of the recurrence of a Mamba-2 head.
//!
//! A step reads and writes the head's matrix once. Its rows are the values of B and C, its columns the inputs of the
//! head: the sum over a column runs in ascending order of rows, each column in a lane of its own, so that all
//! instruction sets give the same bits. Columns are computed in tiles whose inputs and sums stay in registers. With a
//! matrix in the first-level cache, the limit is one store of a vector and five operations on it: 2.5 cycles.

use crate::simd::vectorized;

/// Columns of a wide tile. With fewer, a step waits for the sums of the row before.
const WIDE: usize = 32;
const NARROW: usize = 8;

/// The inputs of one head at one position.
pub(crate) struct Token<'a> {
    pub(crate) x: &'a [f32],
    pub(crate) b: &'a [f32],
    pub(crate) c: &'a [f32],
    pub(crate) time_step: f32,
    /// Factor of the matrix.
    pub(crate) decay: f32,
    /// Factor of `x` in the result.
    pub(crate) skip: f32,
}

vectorized! {
    /// Advances the matrix of a head, a row for each value of B, by one position. `out` becomes the matrix read by C,
    /// plus the inputs themselves times a factor.
    pub(crate) fn advance<S: Simd>(token: &Token<'_>, matrix: &mut [f32], out: &mut [f32]) {
        let mut first = 0;
        while first + WIDE <= out.len() {
            tile::<WIDE>(token, matrix, first, out);
            first += WIDE;
        }
        while first + NARROW <= out.len() {
            tile::<NARROW>(token, matrix, first, out);
            first += NARROW;
        }
        while first < out.len() {
            tile::<1>(token, matrix, first, out);
            first += 1;
        }
    }
}

/// Computes N columns from `first` on.
#[inline(always)]
fn tile<const N: usize>(token: &Token<'_>, matrix: &mut [f32], first: usize, out: &mut [f32]) {
    let columns = first..first + N;
    let x = &token.x[columns.clone()];
    let inputs: [f32; N] = std::array::from_fn(|i| token.time_step * x[i]);
    let mut sums = [0.0f32; N];
    for ((row, &b), &c) in matrix.chunks_exact_mut(out.len()).zip(token.b).zip(token.c) {
        let cells = &mut row[columns.clone()];
        for i in 0..N {
            cells[i] = token.decay * cells[i] + b * inputs[i];
            sums[i] += c * cells[i];
        }
    }
    for (i, out) in out[columns].iter_mut().enumerate() {
        *out = sums[i] + token.skip * x[i];
    }
}
