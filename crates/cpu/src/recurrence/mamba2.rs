//! Distributes Mamba-2 layers over threads, in three passes: the convolution by channels, the recurrence by heads, and
//! the norm by rows. Heads of a group share B and C, and norms span heads, so that no task could compute a head alone.

use std::cell::RefCell;
use std::ops::Range;

use pellucid_tensor::{Mamba2, Mamba2Shape, RmsNorm, StateSave, StateSpan, Tensor};

use crate::math;
use crate::memory::{floats, floats_mut};
use crate::ops::convolution::convolve;
use crate::ops::mamba2::{self, Token};
use crate::ops::{delta_net, norm};
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Level, with_simd};

/// Channels of a task of the convolution.
const CHANNELS: usize = 256;
/// With fewer values to compute, waking threads would take longer.
const ENOUGH_FOR_THREADS: usize = 16 * 1024;

thread_local! {
    /// The convolved rows of a step, and the results of its heads.
    static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// The part of a state that a task computes.
    static STATE: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs the Mamba-2 layer of all sequences of a step.
pub(crate) fn mamba2(level: Level, pool: &Pool, call: &Mamba2<'_>, memory: &mut Tensor, out: &mut Tensor) {
    check(call, memory, out);
    let shape = call.shape;
    let (num_rows, channels, width) = (call.projected.rows(), shape.num_channels(), shape.output_size());
    let run = |num_tasks: usize, cost: usize, task: &(dyn Fn(usize) + Sync)| match cost {
        0..ENOUGH_FOR_THREADS => (0..num_tasks).for_each(task),
        _ => pool.run(num_tasks, task),
    };
    let (memory, out) = (SharedSlice::new(floats_mut(memory)), SharedSlice::new(floats_mut(out)));
    ROWS.with_borrow_mut(|rows| {
        // Every value is written before it is read.
        rows.resize(rows.len().max(num_rows * (channels + width)), 0.0);
        let (convolved, scanned) = rows.split_at_mut(num_rows * channels);
        let (convolved, scanned) = (SharedSlice::new(convolved), SharedSlice::new(scanned));
        let layer = Layer { level, call, memory, convolved, scanned };

        let (num_sequences, per_sequence) = (call.sequences.len(), channels.div_ceil(CHANNELS));
        run(num_sequences * per_sequence, num_rows * channels, &|task| {
            let first = task % per_sequence * CHANNELS;
            layer.convolve(task / per_sequence, first..channels.min(first + CHANNELS));
        });
        run(num_sequences * shape.num_heads, num_rows * width * shape.state_size, &|task| {
            layer.scan(task / shape.num_heads, task % shape.num_heads);
        });
        run(num_rows, num_rows * width, &|row| {
            // SAFETY: only this task writes this row.
            layer.gate_and_norm(row, unsafe { out.part(row * width, width) });
        });
    });
}

fn check(call: &Mamba2<'_>, memory: &Tensor, out: &Tensor) {
    let shape = call.shape;
    let (num_rows, channels, width) = (call.projected.rows(), shape.num_channels(), shape.output_size());
    assert_eq!(call.projected.cols(), channels);
    assert_eq!((call.taps.rows(), call.taps.cols()), (shape.num_taps, channels));
    assert!(call.bias.is_none_or(|bias| bias.len() == channels));
    assert_eq!((call.gate.rows(), call.gate.cols()), (num_rows, width));
    assert_eq!((out.rows(), out.cols()), (num_rows, width));
    assert_eq!((call.time_step.rows(), call.time_step.cols()), (num_rows, shape.num_heads));
    assert!([call.decay, call.time_bias, call.skip].iter().all(|heads| heads.len() == shape.num_heads));
    assert_eq!(memory.cols(), shape.state_len());
    assert!(call.norm.is_none_or(|norm| norm.weight.len() == width && width.is_multiple_of(shape.norm_size)));
    assert_eq!(call.states.len(), call.sequences.len(), "a state for each sequence");
}

/// A layer in a step. Tasks write disjoint parts of its slices.
struct Layer<'a> {
    level: Level,
    call: &'a Mamba2<'a>,
    memory: SharedSlice<'a, f32>,
    /// `[rows][channels]`
    convolved: SharedSlice<'a, f32>,
    /// `[rows][heads * head_size]`
    scanned: SharedSlice<'a, f32>,
}

impl Layer<'_> {
    /// Convolves some channels of all rows of a sequence.
    fn convolve(&self, sequence: usize, channels: Range<usize>) {
        let Mamba2Shape { num_taps, .. } = self.call.shape;
        let (num_channels, len) = (self.call.shape.num_channels(), channels.len());
        let of_row = |row: usize| row * num_channels + channels.start..row * num_channels + channels.end;
        let (projected, taps) = (floats(self.call.projected), floats(self.call.taps));
        let bias = self.call.bias.map(|bias| &floats(bias)[channels.clone()]);
        STATE.with_borrow_mut(|buffer| {
            buffer.clear();
            buffer.extend((0..num_taps).flat_map(|tap| &taps[of_row(tap)]));
            buffer.resize((2 * num_taps - 1) * len, 0.0);
            let (taps, window) = buffer.split_at_mut(num_taps * len);
            self.advance(sequence, (window, (0..num_taps - 1).map(of_row)), |row, window| {
                // SAFETY: only this task writes these channels of the sequence's rows.
                let out = unsafe { self.convolved.part(of_row(row).start, len) };
                with_simd!(self.level, simd => convolve(simd, taps, bias, window, &projected[of_row(row)], out));
            });
        });
    }

    /// Runs the recurrence of a head over all rows of a sequence.
    fn scan(&self, sequence: usize, head: usize) {
        let Mamba2Shape { num_heads, head_size, num_groups, state_size, .. } = self.call.shape;
        let (channels, width) = (self.call.shape.num_channels(), self.call.shape.output_size());
        let matrix = state_size * head_size;
        let start = self.call.shape.window_len() + head * matrix;
        let group = head / (num_heads / num_groups) * state_size;
        let of_head = |heads: &Tensor| floats(heads)[head];
        let (rate, skip) = (of_head(self.call.decay), of_head(self.call.skip));
        let [least, most] = self.call.time_limits;
        STATE.with_borrow_mut(|state| {
            state.clear();
            state.resize(matrix, 0.0);
            self.advance(sequence, (state, std::iter::once(start..start + matrix)), |row, state| {
                // SAFETY: the convolution has ended.
                let convolved = unsafe { self.convolved.read(row * channels, channels) };
                let (x, bc) = convolved.split_at(width);
                let (b, c) = bc.split_at(num_groups * state_size);
                let time_step = floats(self.call.time_step)[row * num_heads + head] + of_head(self.call.time_bias);
                let time_step = math::softplus(time_step).clamp(least, most);
                let token = Token {
                    x: &x[head * head_size..(head + 1) * head_size],
                    b: &b[group..group + state_size],
                    c: &c[group..group + state_size],
                    time_step,
                    decay: math::exp(rate * time_step),
                    skip,
                };
                // SAFETY: only this task writes this head of the sequence's rows.
                let out = unsafe { self.scanned.part(row * width + head * head_size, head_size) };
                with_simd!(self.level, simd => mamba2::advance(simd, &token, state, out));
            });
        });
    }

    /// Multiplies a row by its gate, and normalises it if there is a norm.
    fn gate_and_norm(&self, row: usize, out: &mut [f32]) {
        let gate = &floats(self.call.gate)[row * out.len()..(row + 1) * out.len()];
        // SAFETY: only this task uses this row, and the recurrence has ended.
        let scanned = unsafe { self.scanned.part(row * out.len(), out.len()) };
        with_simd!(self.level, simd => {
            delta_net::gate(simd, gate, scanned);
            match self.call.norm {
                Some(RmsNorm { weight, eps }) => {
                    norm::grouped_rms_norm(simd, scanned, (floats(weight), self.call.shape.norm_size), eps, out);
                }
                None => out.copy_from_slice(scanned),
            }
        });
    }

    /// Loads a part of a sequence's state, calls `advance` with each of its rows, and stores the part where the step
    /// asks for it. `parts` are the ranges of the part in a slot, in the order in which `state` holds them.
    fn advance(
        &self,
        sequence: usize,
        (state, parts): (&mut [f32], impl Iterator<Item = Range<usize>> + Clone),
        advance: impl Fn(usize, &mut [f32]),
    ) {
        let state_len = self.call.shape.state_len();
        let offset = |slot: u32, part: &Range<usize>| slot as usize * state_len + part.start;
        let StateSpan { from, saves } = &self.call.states[sequence];
        if let Some(slot) = *from {
            let mut rest = &mut *state;
            for part in parts.clone() {
                let (to, others) = rest.split_at_mut(part.len());
                // SAFETY: only this task uses these parts of the sequence's slots.
                to.copy_from_slice(unsafe { self.memory.read(offset(slot, &part), part.len()) });
                rest = others;
            }
        }
        let mut saves = self.call.saves[saves.clone()].iter().peekable();
        for (i, row) in self.call.sequences[sequence].rows.clone().enumerate() {
            advance(row, state);
            while let Some(&StateSave { slot, .. }) = saves.next_if(|save| save.row as usize == i) {
                let mut rest = &*state;
                for part in parts.clone() {
                    let (from, others) = rest.split_at(part.len());
                    // SAFETY: only this task uses these parts of the sequence's slots, and it has read them.
                    unsafe { self.memory.part(offset(slot, &part), part.len()) }.copy_from_slice(from);
                    rest = others;
                }
            }
        }
    }
}
