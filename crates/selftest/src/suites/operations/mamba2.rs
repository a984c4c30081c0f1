//! Mamba-2 layers against their formula, in chunks of any size.

use pellucid_tensor::{Extension, Mamba2, Mamba2Shape, RmsNorm, Tensor};

use super::recurrence::{Call, LEN, NORM_EPS, in_chunks, upload_taps};
use crate::suites::harness::Harness;
use crate::suites::tolerance::ROUNDING;

/// The inputs and weights of a layer.
struct Mamba2Data {
    shape: Mamba2Shape,
    projected: Vec<f32>,
    gate: Vec<f32>,
    time_step: Vec<f32>,
    taps: Vec<f32>,
    bias: Option<Vec<f32>>,
    decay: Vec<f32>,
    time_bias: Vec<f32>,
    skip: Vec<f32>,
    norm: Vec<f32>,
}

const TIME_LIMITS: [f32; 2] = [0.05, 2.0];

pub(super) fn mamba2(harness: &mut Harness<'_>) {
    if !harness.backend.supports(Extension::Mamba2) {
        return;
    }
    for (num_heads, head_size, num_groups, state_size, num_taps, has_bias) in
        [(4, 64, 1, 128, 4, true), (6, 12, 3, 8, 4, true), (2, 40, 2, 20, 2, false), (1, 20, 1, 192, 3, true)]
    {
        let norm_size = num_heads * head_size / num_groups;
        let shape = Mamba2Shape { num_heads, head_size, num_groups, state_size, num_taps, norm_size };
        let mut normals = |len: usize| harness.random.normals(len);
        let data = Mamba2Data {
            shape,
            projected: normals(LEN * shape.num_channels()),
            gate: normals(LEN * shape.output_size()),
            time_step: normals(LEN * num_heads),
            taps: normals(num_taps * shape.num_channels()),
            bias: has_bias.then(|| normals(shape.num_channels())),
            decay: normals(num_heads).iter().map(|value| -value.abs()).collect(),
            time_bias: normals(num_heads),
            skip: normals(num_heads),
            norm: normals(shape.output_size()),
        };
        data.check(harness);
    }
}

impl Mamba2Data {
    fn check(&self, harness: &Harness<'_>) {
        let shape = self.shape;
        let taps = upload_taps(harness.backend, &self.taps, shape.num_channels());
        let bias = self.bias.as_ref().map(|bias| harness.vector(bias));
        let [decay, time_bias, skip, norm] =
            [&self.decay, &self.time_bias, &self.skip, &self.norm].map(|values| harness.vector(values));
        let run = |call: &Call<'_>, memory: &mut Tensor, norm: Option<RmsNorm<'_>>| {
            let part = |values: &[f32]| {
                let cols = values.len() / LEN;
                harness.activation(&values[call.rows.start * cols..call.rows.end * cols], cols)
            };
            let mut out = harness.zeros(call.rows.len(), shape.output_size());
            let layer = Mamba2 {
                shape,
                projected: &part(&self.projected),
                gate: &part(&self.gate),
                time_step: &part(&self.time_step),
                taps: &taps,
                bias: bias.as_ref(),
                decay: &decay,
                time_bias: &time_bias,
                time_limits: TIME_LIMITS,
                skip: &skip,
                norm,
                sequences: call.sequences,
                states: call.states,
                saves: call.saves,
            };
            harness.backend.mamba2(layer, memory, &mut out).expect("a Mamba-2 layer");
            out
        };
        let norm = RmsNorm { weight: &norm, eps: NORM_EPS };
        let what = format!("Mamba-2 layer of {}x{} values", shape.state_size, shape.head_size);
        let expected = self.expected();
        let whole = |call: &Call<'_>, memory: &mut Tensor| harness.read(&run(call, memory, Some(norm)));
        in_chunks(harness, &what, (shape.state_len(), &expected), &whole);
        if !harness.backend.supports(Extension::SharedMamba2) {
            return;
        }
        let in_two = |call: &Call<'_>, memory: &mut Tensor| {
            let gated = run(call, memory, None);
            let mut out = harness.zeros(call.rows.len(), shape.output_size());
            harness.backend.grouped_rms_norm(&gated, norm, shape.norm_size, &mut out).expect("a norm");
            harness.read(&out)
        };
        in_chunks(harness, &format!("{what}, normalised apart"), (shape.state_len(), &expected), &in_two);
    }

    /// Returns each value of the output, and its bound.
    fn expected(&self) -> Vec<(f64, f64)> {
        let Mamba2Shape { num_heads, head_size, num_groups, state_size, norm_size, .. } = self.shape;
        let width = self.shape.output_size();
        let mut matrices = vec![vec![0.0; state_size * head_size]; num_heads];
        let mut out = Vec::with_capacity(LEN * width);
        for row in 0..LEN {
            let convolved = self.convolved(row);
            let mut gated = vec![0.0; width];
            for (head, matrix) in matrices.iter_mut().enumerate() {
                let group = head / (num_heads / num_groups);
                let of_group = |first: usize| &convolved[first + group * state_size..][..state_size];
                let (b, c) = (of_group(width), of_group(width + num_groups * state_size));
                let inputs = &convolved[head * head_size..][..head_size];
                let attended = self.advance((row, head), (inputs, b, c), matrix);
                for (i, y) in attended.into_iter().enumerate() {
                    let gate = f64::from(self.gate[row * width + head * head_size + i]);
                    gated[head * head_size + i] = y * gate / (1.0 + (-gate).exp());
                }
            }
            for (gated, weights) in gated.chunks_exact(norm_size).zip(self.norm.chunks_exact(norm_size)) {
                let mean = gated.iter().map(|x| x * x).sum::<f64>() / norm_size as f64;
                let factor = 1.0 / (mean + f64::from(NORM_EPS)).sqrt();
                // A rounding of the state is of the size of its largest values, so the error of an output is relative
                // to the length of all that are normalised together; it adds up over rows.
                out.extend(gated.iter().zip(weights).map(|(x, &weight)| {
                    let weight = f64::from(weight);
                    let roundings = 8.0 * LEN as f64;
                    (x * factor * weight, (1.0 + (x * factor).abs()) * weight.abs() * roundings * ROUNDING + ROUNDING)
                }));
            }
        }
        out
    }

    /// `silu` of the convolution of every channel.
    fn convolved(&self, row: usize) -> Vec<f64> {
        let (channels, num_taps) = (self.shape.num_channels(), self.shape.num_taps);
        let sum = |channel: usize| -> f64 {
            let products = (num_taps.saturating_sub(row + 1)..num_taps).map(|tap| {
                let x = self.projected[(row + tap + 1 - num_taps) * channels + channel];
                f64::from(self.taps[tap * channels + channel]) * f64::from(x)
            });
            products.sum::<f64>() + self.bias.as_ref().map_or(0.0, |bias| f64::from(bias[channel]))
        };
        (0..channels).map(sum).map(|x| x / (1.0 + (-x).exp())).collect()
    }

    /// Advances the matrix of a head, and returns its outputs before the gate.
    fn advance(
        &self,
        (row, head): (usize, usize),
        (inputs, b, c): (&[f64], &[f64], &[f64]),
        matrix: &mut [f64],
    ) -> Vec<f64> {
        let width = inputs.len();
        let time_step = f64::from(self.time_step[row * self.shape.num_heads + head]) + f64::from(self.time_bias[head]);
        let [least, most] = TIME_LIMITS.map(f64::from);
        let time_step = time_step.exp().ln_1p().clamp(least, most);
        let decay = (f64::from(self.decay[head]) * time_step).exp();
        for (row, b) in matrix.chunks_exact_mut(width).zip(b) {
            row.iter_mut().zip(inputs).for_each(|(cell, x)| *cell = decay * *cell + b * time_step * x);
        }
        let read = |column: usize| c.iter().enumerate().map(|(i, c)| c * matrix[i * width + column]).sum::<f64>();
        (0..width).map(|column| read(column) + f64::from(self.skip[head]) * inputs[column]).collect()
    }
}
