//! Layers with a recurrence against their formulas, in chunks of any size: short convolutions and gated delta nets.

use std::ops::Range;

use pellucid_tensor::{
    Backend, DType, DeltaNet, DeltaNetShape, Extension, HostWeight, RmsNorm, SequenceSpan, ShortConvolution, StateSave,
    StateSpan, Tensor, ValueHeadOrder,
};

use crate::suites::harness::Harness;
use crate::suites::tolerance::{ROUNDING, close};

/// Rows of a sequence in these checks.
pub(super) const LEN: usize = 45;

/// Chunks of the whole sequence. A device may compute chunks of up to 16 rows in another way than longer ones.
const CHUNKINGS: [&[usize]; 5] = [&[LEN], &[1], &[16, 1, 2, 16, 10], &[3, 40, 2], &[17, 17, 11]];

/// The arguments of one call: the spans of its sequences, and their states and saves.
pub(super) struct Call<'a> {
    pub(super) rows: Range<usize>,
    pub(super) sequences: &'a [SequenceSpan],
    pub(super) states: &'a [StateSpan],
    pub(super) saves: &'a [StateSave],
}

/// Computes the rows of a sequence chunk by chunk and compares them with `expected`, to the bit from one chunking to
/// another. `run` computes the rows of a call with a memory of `state_len` values for each slot.
pub(super) fn in_chunks(
    harness: &Harness<'_>,
    what: &str,
    (state_len, expected): (usize, &[(f64, f64)]),
    run: &dyn Fn(&Call<'_>, &mut Tensor) -> Vec<f32>,
) {
    let mut bits: Option<Vec<u32>> = None;
    for chunks in CHUNKINGS {
        // Slots hold anything before the first save.
        let mut memory = harness.activation(&vec![f32::NAN; 4 * state_len], state_len);
        let (mut out, mut slot) = (Vec::new(), None);
        for (i, &len) in chunks.iter().cycle().enumerate() {
            let rows = out.len() * LEN / expected.len()..LEN;
            if rows.is_empty() {
                break;
            }
            let rows = rows.start..rows.end.min(rows.start + len);
            let len = rows.len();
            // The state after the last row goes to the slot that the chunk started from, or to another; one within
            // the chunk is saved too.
            let to = if i % 3 == 2 { 3 - slot.unwrap_or(0) } else { slot.unwrap_or(1) };
            let last = StateSave { row: len as u32 - 1, slot: to };
            let saves = if len > 2 { vec![StateSave { row: len as u32 / 2, slot: 0 }, last] } else { vec![last] };
            let call = Call {
                rows,
                sequences: &[SequenceSpan { rows: 0..len, blocks: 0..0 }],
                states: &[StateSpan { from: slot, saves: 0..saves.len() }],
                saves: &saves,
            };
            out.extend(run(&call, &mut memory));
            slot = Some(to);
        }
        close(&format!("{what} in chunks of {chunks:?}"), &out, expected);
        let found: Vec<u32> = out.iter().map(|value| value.to_bits()).collect();
        assert!(bits.get_or_insert_with(|| found.clone()) == &found, "{what}: chunks of {chunks:?} give other bits");
        restart(&format!("{what} after chunks of {chunks:?}"), (&found, memory), run);
    }
    many_sequences(harness, (what, state_len), run);
}

/// Computes each row as a sequence of its own, twice, the second time from the state after the first: all sequences in
/// one step, and each alone. A device may have other kernels for many sequences.
fn many_sequences(
    harness: &Harness<'_>,
    (what, state_len): (&str, usize),
    run: &dyn Fn(&Call<'_>, &mut Tensor) -> Vec<f32>,
) {
    let steps = |rows_at_once: usize| {
        let mut memory = harness.activation(&vec![f32::NAN; LEN * state_len], state_len);
        let mut found = Vec::new();
        for from_zeros in [true, false] {
            for first in (0..LEN).step_by(rows_at_once) {
                let len = rows_at_once as u32;
                let save = |row: u32| StateSave { row: 0, slot: first as u32 + row };
                let saves: Vec<StateSave> = (0..len).map(save).collect();
                let state = |i: usize| StateSpan { from: (!from_zeros).then_some(saves[i].slot), saves: i..i + 1 };
                let span = |i: usize| SequenceSpan { rows: i..i + 1, blocks: 0..0 };
                let call = Call {
                    rows: first..first + rows_at_once,
                    sequences: &(0..rows_at_once).map(span).collect::<Vec<_>>(),
                    states: &(0..rows_at_once).map(state).collect::<Vec<_>>(),
                    saves: &saves,
                };
                found.extend(run(&call, &mut memory).iter().map(|value| value.to_bits()));
            }
        }
        found
    };
    assert!(steps(LEN) == steps(1), "{what}: many sequences in one step give other bits than each alone");
}

/// Computes one step of two sequences, of which the second goes on from the state in the middle of a chunk, if the
/// first chunk had one. Both must have the bits that they have alone.
fn restart(what: &str, (bits, mut memory): (&[u32], Tensor), run: &dyn Fn(&Call<'_>, &mut Tensor) -> Vec<f32>) {
    let saves = [(0, 0), (1, 1), (0, 2)].map(|(row, slot)| StateSave { row, slot });
    let call = Call {
        rows: 0..3,
        sequences: &[SequenceSpan { rows: 0..2, blocks: 0..0 }, SequenceSpan { rows: 2..3, blocks: 0..0 }],
        states: &[StateSpan { from: None, saves: 0..2 }, StateSpan { from: None, saves: 2..3 }],
        saves: &saves,
    };
    let cols = bits.len() / LEN;
    let first = run(&call, &mut memory);
    assert!(same_bits(&first[..2 * cols], &bits[..2 * cols]), "{what}: two sequences give other bits");
    // Row 1 from the state after row 0, and rows 2 and 3 from that after row 1, which they overwrite.
    let saves = [(0, 3), (1, 1)].map(|(row, slot)| StateSave { row, slot });
    let call = Call {
        rows: 1..4,
        sequences: &[SequenceSpan { rows: 0..1, blocks: 0..0 }, SequenceSpan { rows: 1..3, blocks: 0..0 }],
        states: &[StateSpan { from: Some(0), saves: 0..1 }, StateSpan { from: Some(1), saves: 1..2 }],
        saves: &saves,
    };
    let found = run(&call, &mut memory);
    assert!(same_bits(&found, &bits[cols..4 * cols]), "{what}: going on from a state within a chunk gives other bits");
}

fn same_bits(found: &[f32], expected: &[u32]) -> bool {
    found.iter().map(|value| value.to_bits()).eq(expected.iter().copied())
}

/// The taps of a convolution on the device: `[taps][channels]`.
pub(super) fn upload_taps(backend: &dyn Backend, taps: &[f32], channels: usize) -> Tensor {
    let bytes: Vec<u8> = taps.iter().flat_map(|value| value.to_le_bytes()).collect();
    let weight = HostWeight { dtype: DType::F32, rows: taps.len() / channels, cols: channels, bytes: bytes.into() };
    backend.weight(weight).expect("an upload")
}

pub(super) fn short_convolution(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::ShortConvolution) {
        return;
    }
    for (channels, num_taps, has_bias) in [(150, 3, false), (32, 4, true), (7, 2, true), (300, 8, false)] {
        let projected = harness.random.normals(LEN * 3 * channels);
        let taps = harness.random.normals(num_taps * channels);
        let bias = harness.random.normals(channels);
        let x = |row: usize, channel: usize| {
            let row = &projected[row * 3 * channels..];
            f64::from(row[channel]) * f64::from(row[2 * channels + channel])
        };
        let value = |row: usize, channel: usize| {
            let first_tap = num_taps.saturating_sub(row + 1);
            let products = (first_tap..num_taps)
                .map(|tap| f64::from(taps[tap * channels + channel]) * x(row + tap + 1 - num_taps, channel));
            let bias = if has_bias { f64::from(bias[channel]) } else { 0.0 };
            let (sum, size) = products.fold((bias, bias.abs()), |(sum, size), p| (sum + p, size + p.abs()));
            let gate = f64::from(projected[(row * 3 + 1) * channels + channel]);
            // A rounding of each product and each sum.
            (gate * sum, gate.abs() * size * ROUNDING * (num_taps + 4) as f64)
        };
        let expected: Vec<(f64, f64)> = (0..LEN)
            .flat_map(|row| (0..channels).map(move |channel| (row, channel)))
            .map(|(r, c)| value(r, c))
            .collect();
        let (taps, bias) = (upload_taps(harness.backend, &taps, channels), harness.vector(&bias));
        let run = |call: &Call<'_>, memory: &mut Tensor| {
            let rows = &projected[call.rows.start * 3 * channels..call.rows.end * 3 * channels];
            let mut out = harness.zeros(call.rows.len(), channels);
            let convolution = ShortConvolution {
                projected: &harness.activation(rows, 3 * channels),
                taps: &taps,
                bias: has_bias.then_some(&bias),
                sequences: call.sequences,
                states: call.states,
                saves: call.saves,
            };
            harness.backend.short_convolution(convolution, memory, &mut out).expect("a short convolution");
            harness.read(&out)
        };
        let what = format!("short convolution of {channels} channels");
        in_chunks(harness, &what, ((num_taps - 1) * channels, &expected), &run);
    }
}

/// The inputs and weights of a delta net.
struct DeltaNetData {
    shape: DeltaNetShape,
    order: ValueHeadOrder,
    projected: Vec<f32>,
    gate: Vec<f32>,
    beta: Vec<f32>,
    time_step: Vec<f32>,
    taps: Vec<f32>,
    decay: Vec<f32>,
    time_bias: Vec<f32>,
    norm: Vec<f32>,
}

pub(super) const NORM_EPS: f32 = 1e-6;

pub(super) fn delta_net(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::DeltaNet) {
        return;
    }
    for (num_key_heads, num_value_heads, key_size, value_size, num_taps, order) in [
        (1, 2, 128, 36, 4, ValueHeadOrder::Tiled),
        (2, 6, 8, 12, 4, ValueHeadOrder::Grouped),
        (2, 4, 12, 16, 2, ValueHeadOrder::Tiled),
        (1, 1, 192, 20, 3, ValueHeadOrder::Grouped),
        (1, 1, 32, 256, 4, ValueHeadOrder::Grouped),
    ] {
        let shape = DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, num_taps };
        let mut normals = |len: usize| harness.random.normals(len);
        let data = DeltaNetData {
            shape,
            order,
            projected: normals(LEN * shape.num_channels()),
            gate: normals(LEN * shape.output_size()),
            beta: normals(LEN * num_value_heads),
            time_step: normals(LEN * num_value_heads),
            taps: normals(num_taps * shape.num_channels()),
            decay: normals(num_value_heads).iter().map(|value| -value.abs()).collect(),
            time_bias: normals(num_value_heads),
            norm: normals(value_size),
        };
        data.check(harness);
    }
}

impl DeltaNetData {
    fn check(&self, harness: &Harness<'_>) {
        let (shape, order) = (self.shape, self.order);
        let taps = upload_taps(harness.backend, &self.taps, shape.num_channels());
        let [decay, time_bias, norm] = [&self.decay, &self.time_bias, &self.norm].map(|values| harness.vector(values));
        let run = |call: &Call<'_>, memory: &mut Tensor| {
            let part = |values: &[f32]| {
                let cols = values.len() / LEN;
                harness.activation(&values[call.rows.start * cols..call.rows.end * cols], cols)
            };
            let mut out = harness.zeros(call.rows.len(), shape.output_size());
            let net = DeltaNet {
                shape,
                order,
                projected: &part(&self.projected),
                gate: &part(&self.gate),
                beta: &part(&self.beta),
                time_step: &part(&self.time_step),
                taps: &taps,
                decay: &decay,
                time_bias: &time_bias,
                norm: RmsNorm { weight: &norm, eps: NORM_EPS },
                sequences: call.sequences,
                states: call.states,
                saves: call.saves,
            };
            harness.backend.delta_net(net, memory, &mut out).expect("a delta net");
            harness.read(&out)
        };
        let what = format!("delta net of {}x{} values", shape.key_size, shape.value_size);
        in_chunks(harness, &what, (shape.state_len(), &self.expected()), &run);
    }

    /// Returns each value of the output, and its bound.
    fn expected(&self) -> Vec<(f64, f64)> {
        let DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, .. } = self.shape;
        let mut matrices = vec![vec![0.0; key_size * value_size]; num_value_heads];
        let mut out = vec![(0.0, 0.0); LEN * self.shape.output_size()];
        for row in 0..LEN {
            let convolved = self.convolved(row);
            for key_head in 0..num_key_heads {
                let start = key_head * key_size;
                let query = of_length(&convolved[start..start + key_size], 1.0 / (key_size as f64).sqrt());
                let key = of_length(&convolved[num_key_heads * key_size + start..][..key_size], 1.0);
                for i in 0..self.shape.values_per_key() {
                    let head = self.order.value_head(self.shape, key_head, i);
                    let value = &convolved[2 * num_key_heads * key_size + head * value_size..][..value_size];
                    let attended = self.advance(row, head, (&query, &key, value), &mut matrices[head]);
                    let at = (row * num_value_heads + head) * value_size;
                    self.normed(&attended, &self.gate[at..at + value_size], &mut out[at..at + value_size]);
                }
            }
        }
        out
    }

    /// `silu` of the convolution of every channel.
    fn convolved(&self, row: usize) -> Vec<f64> {
        let (channels, num_taps) = (self.shape.num_channels(), self.shape.num_taps);
        let sum = |channel: usize| -> f64 {
            (num_taps.saturating_sub(row + 1)..num_taps)
                .map(|tap| {
                    let x = self.projected[(row + tap + 1 - num_taps) * channels + channel];
                    f64::from(self.taps[tap * channels + channel]) * f64::from(x)
                })
                .sum()
        };
        (0..channels).map(sum).map(|x| x / (1.0 + (-x).exp())).collect()
    }

    /// Advances the matrix of a value head, and returns what the query reads.
    fn advance(
        &self,
        row: usize,
        head: usize,
        (query, key, value): (&[f64], &[f64], &[f64]),
        matrix: &mut [f64],
    ) -> Vec<f64> {
        let (heads, width) = (self.shape.num_value_heads, value.len());
        let time_step = f64::from(self.time_step[row * heads + head]) + f64::from(self.time_bias[head]);
        let decay = (f64::from(self.decay[head]) * time_step.exp().ln_1p()).exp();
        let beta = 1.0 / (1.0 + f64::from(-self.beta[row * heads + head]).exp());
        matrix.iter_mut().for_each(|cell| *cell *= decay);
        let read = |matrix: &[f64], by: &[f64], column: usize| -> f64 {
            by.iter().enumerate().map(|(i, by)| by * matrix[i * width + column]).sum()
        };
        let delta: Vec<f64> = (0..width).map(|column| beta * (value[column] - read(matrix, key, column))).collect();
        for (i, key) in key.iter().enumerate() {
            for (cell, delta) in matrix[i * width..].iter_mut().zip(&delta) {
                *cell += key * delta;
            }
        }
        (0..width).map(|column| read(matrix, query, column)).collect()
    }

    /// The norm of a head's output, times the gate. A rounding of the state is of the size of its largest values, so
    /// the error of an output is relative to the length of the head's, whatever its own size; it adds up over rows.
    fn normed(&self, attended: &[f64], gate: &[f32], out: &mut [(f64, f64)]) {
        let mean = attended.iter().map(|x| x * x).sum::<f64>() / attended.len() as f64;
        let factor = 1.0 / (mean + f64::from(NORM_EPS)).sqrt();
        for (((x, weight), &gate), out) in attended.iter().zip(&self.norm).zip(gate).zip(out) {
            let gate = f64::from(gate);
            let by = f64::from(*weight) * gate / (1.0 + (-gate).exp());
            let roundings = 8.0 * LEN as f64;
            *out = (x * factor * by, (1.0 + (x * factor).abs()) * by.abs() * roundings * ROUNDING + ROUNDING);
        }
    }
}

/// Divides x by its length, and multiplies it by `factor`.
fn of_length(x: &[f64], factor: f64) -> Vec<f64> {
    let length = (x.iter().map(|x| x * x).sum::<f64>() + 1e-6).sqrt();
    x.iter().map(|x| x / length * factor).collect()
}
