//! Distributes the heads of gated delta nets over threads. A task has one key head of one sequence, with the value
//! heads that read it: together they own their channels of the convolution.

use std::cell::RefCell;

use pellucid_tensor::{DeltaNet, DeltaNetShape, StateSave, StateSpan, Tensor, ValueHeadOrder};

use crate::math;
use crate::memory::{floats, floats_mut};
use crate::ops::convolution::convolve;
use crate::ops::delta_net::{self, Token};
use crate::ops::norm;
use crate::pool::Pool;
use crate::shared_slice::SharedSlice;
use crate::simd::{Level, with_simd};

thread_local! {
    /// The buffers of a task, one after the other.
    static BUFFER: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Runs the delta nets of all sequences of a step.
pub(crate) fn delta_net(level: Level, pool: &Pool, call: &DeltaNet<'_>, memory: &mut Tensor, out: &mut Tensor) {
    let shape = call.shape;
    let num_rows = call.projected.rows();
    assert_eq!(call.projected.cols(), shape.num_channels());
    assert_eq!((call.taps.rows(), call.taps.cols()), (shape.num_taps, shape.num_channels()));
    assert_eq!((call.gate.rows(), call.gate.cols()), (num_rows, shape.output_size()));
    assert_eq!((out.rows(), out.cols()), (num_rows, shape.output_size()));
    for heads in [call.beta, call.time_step] {
        assert_eq!((heads.rows(), heads.cols()), (num_rows, shape.num_value_heads));
    }
    assert_eq!((call.decay.len(), call.time_bias.len()), (shape.num_value_heads, shape.num_value_heads));
    assert_eq!((call.norm.weight.len(), memory.cols()), (shape.value_size, shape.state_len()));
    assert_eq!(call.states.len(), call.sequences.len(), "a state for each sequence");
    let (memory, out) = (SharedSlice::new(floats_mut(memory)), SharedSlice::new(floats_mut(out)));
    let task = |task: usize| {
        let (sequence, key_head) = (task / shape.num_key_heads, task % shape.num_key_heads);
        let group = HeadGroup { shape, order: call.order, key_head };
        BUFFER.with_borrow_mut(|buffer| group.run(level, call, sequence, (memory, out), buffer));
    };
    let num_tasks = call.sequences.len() * shape.num_key_heads;
    // With less work, waking threads would take longer.
    match num_rows * shape.num_value_heads * shape.key_size * shape.value_size {
        0..16_384 => (0..num_tasks).for_each(task),
        _ => pool.run(num_tasks, &task),
    }
}

/// A key head and its value heads.
#[derive(Clone, Copy)]
struct HeadGroup {
    shape: DeltaNetShape,
    order: ValueHeadOrder,
    key_head: usize,
}

/// Adjacent channels: their offset in a row of the layer, their offset in a row of the group, and their number.
type ChannelSpan = (usize, usize, usize);

impl HeadGroup {
    fn value_heads(self) -> impl Iterator<Item = usize> {
        (0..self.shape.values_per_key()).map(move |i| self.order.value_head(self.shape, self.key_head, i))
    }

    /// Returns the channels of the query, of the key and of each value head.
    fn channels(self) -> impl Iterator<Item = ChannelSpan> {
        let DeltaNetShape { num_key_heads, key_size, value_size, .. } = self.shape;
        let (query, keys) = (self.key_head * key_size, num_key_heads * key_size);
        let values = self
            .value_heads()
            .enumerate()
            .map(move |(i, head)| (2 * keys + head * value_size, 2 * key_size + i * value_size, value_size));
        [(query, 0, key_size), (keys + query, key_size, key_size)].into_iter().chain(values)
    }

    fn num_channels(self) -> usize {
        2 * self.shape.key_size + self.shape.values_per_key() * self.shape.value_size
    }

    /// Copies the channels of this group from a row of the layer.
    fn gather(self, row: &[f32], out: &mut [f32]) {
        for (from, to, len) in self.channels() {
            out[to..to + len].copy_from_slice(&row[from..from + len]);
        }
    }

    /// Returns the parts of a state that belong to this group: their offsets in the state, and their lengths, in the
    /// order in which the group's buffers hold them.
    fn state_spans(self) -> impl Iterator<Item = (usize, usize)> {
        let shape = self.shape;
        let matrix = shape.key_size * shape.value_size;
        let first_matrix = (shape.num_taps - 1) * shape.num_channels();
        let inputs = (0..shape.num_taps - 1)
            .flat_map(move |tap| self.channels().map(move |(from, _, len)| (tap * shape.num_channels() + from, len)));
        inputs.chain(self.value_heads().map(move |head| (first_matrix + head * matrix, matrix)))
    }

    /// Computes all rows of a sequence.
    fn run(
        self,
        level: Level,
        call: &DeltaNet<'_>,
        sequence: usize,
        (memory, out): (SharedSlice<'_, f32>, SharedSlice<'_, f32>),
        buffer: &mut Vec<f32>,
    ) {
        let shape = self.shape;
        let (channels, num_taps) = (self.num_channels(), shape.num_taps);
        let (inputs, matrix) = ((num_taps - 1) * channels, shape.key_size * shape.value_size);
        let state_len = inputs + shape.values_per_key() * matrix;
        buffer.clear();
        buffer.resize(state_len + (num_taps + 2) * channels + 2 * shape.value_size, 0.0);
        let (state, rest) = buffer.split_at_mut(state_len);
        let (taps, rest) = rest.split_at_mut(num_taps * channels);
        for (taps, row) in taps.chunks_exact_mut(channels).zip(floats(call.taps).chunks_exact(shape.num_channels())) {
            self.gather(row, taps);
        }
        let offset = |slot: u32, from: usize| slot as usize * shape.state_len() + from;
        let StateSpan { from, saves } = &call.states[sequence];
        if let Some(slot) = *from {
            let mut start = 0;
            for (from, len) in self.state_spans() {
                // SAFETY: only this task uses this group's part of the sequence's slots.
                state[start..start + len].copy_from_slice(unsafe { memory.read(offset(slot, from), len) });
                start += len;
            }
        }
        let mut saves = call.saves[saves.clone()].iter().peekable();
        for (i, row) in call.sequences[sequence].rows.clone().enumerate() {
            self.row(level, call, row, (state, taps, rest), out);
            while let Some(&StateSave { slot, .. }) = saves.next_if(|save| save.row as usize == i) {
                let mut start = 0;
                for (from, len) in self.state_spans() {
                    // SAFETY: only this task uses this group's part of the sequence's slots, and it has read it.
                    unsafe { memory.part(offset(slot, from), len) }.copy_from_slice(&state[start..start + len]);
                    start += len;
                }
            }
        }
    }

    /// Computes one row, and advances the state by it.
    fn row(
        self,
        level: Level,
        call: &DeltaNet<'_>,
        row: usize,
        (state, taps, scratch): (&mut [f32], &[f32], &mut [f32]),
        out: SharedSlice<'_, f32>,
    ) {
        let shape = self.shape;
        let DeltaNetShape { num_value_heads, key_size, value_size, num_taps, .. } = shape;
        let channels = self.num_channels();
        let (inputs, matrices) = state.split_at_mut((num_taps - 1) * channels);
        let (newest, rest) = scratch.split_at_mut(channels);
        let (convolved, rest) = rest.split_at_mut(channels);
        let (delta, attended) = rest.split_at_mut(value_size);
        self.gather(&floats(call.projected)[row * shape.num_channels()..], newest);
        let of_head = |tensor: &Tensor, head: usize| floats(tensor)[row * num_value_heads + head];
        with_simd!(level, simd => {
            convolve(simd, taps, None, inputs, newest, convolved);
            let (keys, values) = convolved.split_at_mut(2 * key_size);
            let (query, key) = keys.split_at_mut(key_size);
            delta_net::normalise(simd, 1.0 / (key_size as f32).sqrt(), query);
            delta_net::normalise(simd, 1.0, key);
            let values = values.chunks_exact(value_size);
            for ((head, value), matrix) in
                self.value_heads().zip(values).zip(matrices.chunks_exact_mut(key_size * value_size))
            {
                let time_step = of_head(call.time_step, head) + floats(call.time_bias)[head];
                let decay = math::exp(floats(call.decay)[head] * math::softplus(time_step));
                let beta = math::sigmoid(of_head(call.beta, head));
                delta_net::advance(simd, &Token { query, key, value, decay, beta }, matrix, delta, attended);
                let start = row * shape.output_size() + head * value_size;
                // SAFETY: only this task writes these heads of the sequence's rows.
                let out = unsafe { out.part(start, value_size) };
                norm::rms_norm(simd, attended, floats(call.norm.weight), call.norm.eps, out);
                delta_net::gate(simd, &floats(call.gate)[start..start + value_size], out);
            }
        });
    }
}
