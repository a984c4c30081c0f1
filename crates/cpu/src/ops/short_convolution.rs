//! The gated short convolution of a layer with a recurrence, one sequence at a time.
//!
//! For each channel, with `x[t] = gate_in[t] * input[t]` and `k` taps:
//!
//! ```text
//! out[t] = gate_out[t] * (taps[0] * x[t - k + 1] + ... + taps[k - 1] * x[t] + bias)
//! ```
//!
//! The state before position t holds `x[t - k + 1]` to `x[t - 1]`. Rows are computed in order and a sum always runs
//! from the oldest position to the newest, so that the result does not depend on the chunks of a prompt. Bytes moved:
//! four rows of the channels for each token; the arithmetic is small beside the projections around it.

use crate::simd::vectorized;

/// Some channels of a sequence's rows.
pub(crate) struct Channels<'a> {
    /// `[taps][all channels]`
    pub(crate) taps: &'a [f32],
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) num_channels: usize,
    /// The first of the channels to compute.
    pub(crate) first: usize,
}

vectorized! {
    /// Computes one row of these channels: `projected` is the whole row, `out` and each of `window` have the channels
    /// alone. `window` holds the state, then a row for x, which this function fills.
    pub(crate) fn row<S: Simd>(channels: &Channels<'_>, projected: &[f32], window: &mut [f32], out: &mut [f32]) {
        let (len, first) = (out.len(), channels.first);
        let (input_gate, rest) = projected.split_at(channels.num_channels);
        let (output_gate, input) = rest.split_at(channels.num_channels);
        let newest = window.len() - len;
        for ((x, gate), input) in window[newest..].iter_mut().zip(&input_gate[first..]).zip(&input[first..]) {
            *x = gate * input;
        }
        out.fill(0.0);
        for (x, taps) in window.chunks_exact(len).zip(channels.taps.chunks_exact(channels.num_channels)) {
            for ((out, x), tap) in out.iter_mut().zip(x).zip(&taps[first..]) {
                *out += tap * x;
            }
        }
        if let Some(bias) = channels.bias {
            out.iter_mut().zip(&bias[first..]).for_each(|(out, bias)| *out += bias);
        }
        out.iter_mut().zip(&output_gate[first..]).for_each(|(out, gate)| *out *= gate);
        // The window moves on by one position.
        window.copy_within(len.., 0);
    }
}
