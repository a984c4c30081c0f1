//! Loads gated delta nets, and knows the orders in which files keep their rows.

use pellucid_tensor::{DType, DeltaNetShape, HostWeight, Linear, SharedBytes, Tensor, ValueHeadOrder, quant};

use super::Loader;
use super::tensor_finder::ModulePath;
use crate::Error;
use crate::architectures::Blueprint;
use crate::ranks::{Columns, WeightRows};
use crate::weights::DeltaNetWeights;

/// How a file stores the vectors and the heads of delta nets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DeltaNetStorage {
    pub(crate) order: ValueHeadOrder,
    /// The file has the logarithm of the negated rate of the decay.
    pub(crate) log_decay: bool,
}

/// Returns the rows of queries, keys and values, and those of the gate, in a matrix that stacks all of them by key
/// head: its query, its key, its values, their gates.
pub(crate) fn qkv_gate_rows(shape: DeltaNetShape) -> [Vec<usize>; 2] {
    let DeltaNetShape { num_key_heads, key_size, value_size, .. } = shape;
    let values = shape.values_per_key() * value_size;
    let rows = |offset: usize, len: usize| {
        let start = move |head: usize| head * (2 * key_size + 2 * values) + offset;
        (0..num_key_heads).flat_map(move |head| start(head)..start(head) + len)
    };
    let qkv = rows(0, key_size).chain(rows(key_size, key_size)).chain(rows(2 * key_size, values)).collect();
    [qkv, rows(2 * key_size + values, values).collect()]
}

/// Returns the rows of the strengths of writing, and those of the time steps, in a matrix that stacks both by key head.
fn beta_time_step_rows(shape: DeltaNetShape) -> [Vec<usize>; 2] {
    let len = shape.values_per_key();
    [0, len].map(|offset| {
        let start = |head: usize| head * 2 * len + offset;
        (0..shape.num_key_heads).flat_map(|head| start(head)..start(head) + len).collect()
    })
}

/// Returns the rows of queries, and those of their gates, in a matrix that stacks both by head.
pub(crate) fn query_gate_rows(num_heads: usize, head_size: usize) -> [Vec<usize>; 2] {
    [0, head_size].map(|offset| {
        let start = |head: usize| head * 2 * head_size + offset;
        (0..num_heads).flat_map(|head| start(head)..start(head) + head_size).collect()
    })
}

/// Copies rows of a matrix of `cols` columns.
pub(crate) fn gather_rows(bytes: &[u8], dtype: DType, rows: &[usize], cols: usize) -> SharedBytes {
    let len = dtype.bytes_for(cols).expect("rows are whole blocks");
    rows.iter().flat_map(|row| &bytes[row * len..(row + 1) * len]).copied().collect::<Vec<u8>>().into()
}

impl Loader<'_> {
    pub(super) fn delta_net(&mut self, layer: usize) -> Result<DeltaNetWeights, Error> {
        let Blueprint { config, names, delta_net: storage, .. } = self.blueprint;
        let shape = config.delta_net.expect("checked with the configuration");
        let (hidden, sharing) = (config.hidden_size, self.sharing);
        let [channels, outputs, heads] = [Columns::RecurrentInput, Columns::RecurrentOutput, Columns::RecurrentHeads]
            .map(|columns| sharing.rows(columns));
        let num_heads = heads.total;
        let path = |template: &'static str| ModulePath::new(template, layer);
        let (qkv_gate, beta_time_step) = (path(names.delta_qkv_gate), path(names.delta_beta_time_step));
        let [input, gate] = if self.finder.exists(qkv_gate) {
            self.parts(qkv_gate, [channels.clone(), outputs], || qkv_gate_rows(shape), hidden)?
        } else {
            [
                self.linear(path(names.delta_qkv), channels.clone(), hidden)?,
                self.linear(path(names.delta_gate), outputs, hidden)?,
            ]
        };
        let [beta, time_step] = if self.finder.exists(beta_time_step) {
            self.parts(beta_time_step, [heads.clone(), heads.clone()], || beta_time_step_rows(shape), hidden)?
        } else {
            [
                self.linear(path(names.delta_beta), heads.clone(), hidden)?,
                self.linear(path(names.delta_time_step), heads.clone(), hidden)?,
            ]
        };
        let mut decay = self.floats(&self.finder.name(path(names.delta_decay), ""), num_heads)?;
        if storage.log_decay {
            decay.iter_mut().for_each(|rate| *rate = decay_rate(*rate));
        }
        let time_bias = self.floats(&self.finder.name(path(names.delta_time_bias), ""), num_heads)?;
        let norm = self.floats(&self.finder.name(path(names.delta_norm), "weight"), shape.value_size)?;
        Ok(DeltaNetWeights {
            input,
            gate,
            beta,
            time_step,
            time_bias: self.vector(&heads.select(&time_bias))?,
            decay: self.vector(&heads.select(&decay))?,
            taps: self.taps(path(names.delta_convolution), &channels, shape.num_taps)?,
            norm: self.vector(&norm)?,
            output: self.linear(path(names.delta_output), sharing.rows(Columns::Hidden), shape.output_size())?,
            order: storage.order,
        })
    }

    /// Loads the weights of a convolution as `[taps][channels]`: the backend reads the channels of one position
    /// together.
    pub(super) fn taps(&mut self, path: ModulePath, channels: &WeightRows, num_taps: usize) -> Result<Tensor, Error> {
        let by_channel = self.finder.taps(path, channels.total, num_taps)?;
        let mut values = vec![0.0; channels.total * num_taps];
        quant::decode(by_channel.info.dtype, &by_channel.bytes(), &mut values);
        let own: Vec<f32> =
            channels.own.iter().flat_map(|own| &values[own.start * num_taps..own.end * num_taps]).copied().collect();
        let taps = (0..num_taps).flat_map(|tap| own.iter().skip(tap).step_by(num_taps));
        let bytes: Vec<u8> = taps.flat_map(|value| value.to_le_bytes()).collect();
        let taps = HostWeight { dtype: DType::F32, rows: num_taps, cols: channels.len(), bytes: bytes.into() };
        Ok(self.backend.weight(taps)?)
    }

    /// Loads the rows of two maps that are mixed in one matrix, as those of its bias are. `parts` returns the rows of
    /// each map in the matrix, in the map's order. It is called once the file is known to have all rows: those that a
    /// damaged configuration names may not fit into memory.
    pub(super) fn parts(
        &mut self,
        path: ModulePath,
        [first, second]: [WeightRows; 2],
        parts: impl FnOnce() -> [Vec<usize>; 2],
        cols: usize,
    ) -> Result<[Linear; 2], Error> {
        let total = first.total + second.total;
        let whole = self.host(&self.finder.name(path, "weight"), total, cols)?;
        let bias = self.finder.name(path, "bias");
        let bias = if self.finder.has(&bias) { Some(self.floats(&bias, total)?) } else { None };
        let part = |own: &WeightRows, all: &[usize]| -> Result<Linear, Error> {
            let rows = own.select(all);
            let bytes = gather_rows(&whole.bytes, whole.dtype, &rows, cols);
            let weight = HostWeight { dtype: whole.dtype, rows: rows.len(), cols, bytes };
            let bias = bias.as_ref().map(|bias| rows.iter().map(|&row| bias[row]).collect::<Vec<f32>>());
            let bias = bias.map(|bias| self.vector(&bias)).transpose()?;
            Ok(Linear { weight: self.backend.linear_weight(weight)?, bias })
        };
        let [rows_of_first, rows_of_second] = parts();
        Ok([part(&first, &rows_of_first)?, part(&second, &rows_of_second)?])
    }
}

/// Returns the rate of a decay from the logarithm of the negated rate.
pub(crate) fn decay_rate(logarithm: f32) -> f32 {
    -f64::from(logarithm).exp() as f32
}
