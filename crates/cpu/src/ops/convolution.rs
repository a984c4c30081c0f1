//! The convolution at the entry of a recurrence: a delta net or a Mamba-2 layer.

use crate::math;
use crate::simd::vectorized;

vectorized! {
    /// `out = silu(bias + sum(taps[i] * x[i]))` over the positions in `inputs`, the oldest first, and `newest`. Moves
    /// `inputs` on by one position.
    pub(crate) fn convolve<S: Simd>(
        taps: &[f32],
        bias: Option<&[f32]>,
        inputs: &mut [f32],
        newest: &[f32],
        out: &mut [f32],
    ) {
        let len = newest.len();
        match bias {
            Some(bias) => out.copy_from_slice(bias),
            None => out.fill(0.0),
        }
        for (x, taps) in inputs.chunks_exact(len).chain([newest]).zip(taps.chunks_exact(len)) {
            for ((out, x), tap) in out.iter_mut().zip(x).zip(taps) {
                *out += tap * x;
            }
        }
        out.iter_mut().for_each(|out| *out = math::silu(*out));
        inputs.copy_within(len.., 0);
        let last = inputs.len() - len;
        inputs[last..].copy_from_slice(newest);
    }
}
