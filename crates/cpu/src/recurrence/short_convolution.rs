//! Distributes the channels of short convolutions over threads.

use std::cell::RefCell;

use pellucid_tensor::{ShortConvolution, StateSave, StateSpan, Tensor};

use crate::memory::{floats, floats_mut};
use crate::ops::short_convolution::{self, Channels};
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Level, with_simd};

/// Channels of a task: with few rows, a task is as long as a call of a thread costs.
const CHANNELS: usize = 256;

thread_local! {
    /// The state of a task, and the row after it.
    static WINDOW: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs the convolution of all sequences of a step.
pub(crate) fn short_convolution(
    level: Level,
    pool: &Pool,
    call: &ShortConvolution<'_>,
    memory: &mut Tensor,
    out: &mut Tensor,
) {
    let (num_channels, num_taps) = (call.taps.cols(), call.taps.rows());
    assert_eq!((out.rows(), out.cols()), (call.projected.rows(), num_channels));
    assert_eq!(call.projected.cols(), 3 * num_channels);
    assert_eq!(memory.cols(), (num_taps - 1) * num_channels, "a state has all positions of the window but the newest");
    assert_eq!(call.states.len(), call.sequences.len(), "a state for each sequence");
    let per_sequence = num_channels.div_ceil(CHANNELS);
    let (memory, out) = (SharedSlice::new(floats_mut(memory)), SharedSlice::new(floats_mut(out)));
    let task = |task: usize| {
        let (sequence, first) = (task / per_sequence, task % per_sequence * CHANNELS);
        let channels = Channels { taps: floats(call.taps), bias: call.bias.map(floats), num_channels, first };
        WINDOW.with_borrow_mut(|window| convolve(level, call, (sequence, &channels), (memory, out), window));
    };
    // A step of one token has little work: waking threads would take longer.
    match call.projected.rows() * num_channels {
        0..16_384 => (0..call.sequences.len() * per_sequence).for_each(task),
        _ => pool.run(call.sequences.len() * per_sequence, &task),
    }
}

/// Computes some channels of one sequence.
fn convolve(
    level: Level,
    call: &ShortConvolution<'_>,
    (sequence, channels): (usize, &Channels<'_>),
    (memory, out): (SharedSlice<'_, f32>, SharedSlice<'_, f32>),
    window: &mut Vec<f32>,
) {
    let Channels { num_channels, first, .. } = *channels;
    let (len, num_taps) = ((num_channels - first).min(CHANNELS), call.taps.rows());
    let projected = floats(call.projected);
    let offset = |slot: u32, i: usize| (slot as usize * (num_taps - 1) + i) * num_channels + first;
    window.clear();
    window.resize(num_taps * len, 0.0);
    let StateSpan { from, saves } = &call.states[sequence];
    if let Some(slot) = *from {
        for (i, row) in window.chunks_exact_mut(len).take(num_taps - 1).enumerate() {
            // SAFETY: only this task uses these channels of the sequence's slots.
            row.copy_from_slice(unsafe { memory.read(offset(slot, i), len) });
        }
    }
    let mut saves = call.saves[saves.clone()].iter().peekable();
    for (i, row) in call.sequences[sequence].rows.clone().enumerate() {
        let projected = &projected[row * 3 * num_channels..(row + 1) * 3 * num_channels];
        // SAFETY: only this task writes these channels of the sequence's rows.
        let out = unsafe { out.part(row * num_channels + first, len) };
        with_simd!(level, simd => short_convolution::row(simd, channels, projected, window, out));
        while let Some(&StateSave { slot, .. }) = saves.next_if(|save| save.row as usize == i) {
            for (i, row) in window.chunks_exact(len).take(num_taps - 1).enumerate() {
                // SAFETY: only this task uses these channels of the sequence's slots, and it has read them.
                unsafe { memory.part(offset(slot, i), len) }.copy_from_slice(row);
            }
        }
    }
}
