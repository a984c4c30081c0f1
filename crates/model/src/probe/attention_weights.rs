//! The weights of attention, read off the attention kernel itself: it runs again over the layer's keys, with values of
//! which each is 1 in the column of its position and 0 in the others, so that its output is the weights. No kernel is
//! written a second time, and every device can do it.

use pellucid_tensor::{
    Attend, Attention, Backend, Error as DeviceError, HeadShape, KvLayer, Rope, SequenceSpan, StoreKv, Tensor, Values,
};

use super::{AttentionQuery, AttentionRows};
use crate::activations::{Activations, AttentionActivations};
use crate::config::Positions;
use crate::weights::AttentionWeights;
use crate::{Batch, DecoderConfig, KvMemory};

/// Returns the attention weights of a layer for the rows of a batch of one sequence, whose keys are stored and whose
/// queries and keys the taps of `a` hold.
pub(crate) fn attention_rows(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (query, weights): (AttentionQuery, &AttentionWeights),
    (batch, kv): (&Batch, &KvMemory),
    a: &mut Activations,
) -> Result<AttentionRows, DeviceError> {
    let taps = a.taps.take().expect("the layers ran with taps");
    let (num_rows, len) = (batch.num_rows(), *batch.positions.last().expect("a batch with rows") as usize + 1);
    let mut pass = WeightPass::new(backend, config, kv, query.layer, len)?;
    let all: Vec<u32> = (0..num_rows as u32).collect();
    let layer = config.layers[query.layer];
    let stored_in = layer.kv_from.unwrap_or(query.layer);
    let stored = &kv.layers[stored_in];
    let (_, block_tables) = batch.places(kv.is_windowed(stored_in));
    let blocks = &block_tables[..pass.block_table.len()];
    let (rows, head_size) = (a.attention.of_mut(query.layer), pass.shape.head_size);
    let rope = match (&config.positions, layer.rope) {
        (Positions::Rope { style, .. }, Some(table)) => {
            Some(Rope { angles: &a.angles[table], head_size, style: *style })
        }
        _ => None,
    };
    let mut found = vec![vec![0.0; len]; num_rows];
    let mut attended = vec![0.0; rows.attended.len()];
    let AttentionActivations { queries, keys, values, attended: output, .. } = rows;
    let sequences = &[SequenceSpan { rows: 0..num_rows, blocks: 0..pass.block_table.len() }];
    let (scale, soft_cap, window) = (config.attention_scale, config.attention_soft_cap, layer.window);
    for first in (0..len).step_by(head_size) {
        pass.fill(backend, first, &stored.keys, blocks)?;
        backend.copy_rows(&taps.queries, &all, queries, 0)?;
        let (positions, block_tables, shape) = (&batch.positions[..], &pass.block_table[..], pass.shape);
        if layer.kv_from.is_some() {
            if let Some(rope) = rope {
                backend.rope(rope, queries)?;
            }
            let kv = &pass.layer;
            let call = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
            backend.attention(call, output)?;
        } else {
            // Attention stores the rows' own keys and values, and may change queries and keys.
            backend.write(&pass.values(positions, first), values)?;
            backend.copy_rows(&taps.keys, &all, keys, 0)?;
            let attend = Attend {
                rope,
                values: Values::Rows(values),
                slots: positions,
                positions,
                sequences,
                block_tables,
                shape,
                scale,
                soft_cap,
                window,
                sinks: weights.sinks.as_ref(),
            };
            backend.attend(attend, queries, keys, &mut pass.layer, output)?;
        }
        backend.read(output, &mut attended)?;
        for (row, found) in attended.chunks_exact(config.query_size(query.layer)).zip(&mut found) {
            let window = first..len.min(first + head_size);
            copy_weights(row, query.head, (config.num_heads, head_size), &mut found[window]);
        }
    }
    Ok(AttentionRows { weights: found })
}

/// Copies the weights of a head, or their mean over all heads, from an output of attention.
fn copy_weights(row: &[f32], head: Option<usize>, (num_heads, head_size): (usize, usize), out: &mut [f32]) {
    let heads = head.map_or(0..num_heads, |head| head..head + 1);
    let num_heads = heads.len() as f64;
    for (column, weight) in out.iter_mut().enumerate() {
        let of_head = |head: usize| f64::from(row[head * head_size + column]);
        *weight = (heads.clone().map(of_head).sum::<f64>() / num_heads) as f32;
    }
}

/// KV memory of one layer and one sequence, in which position p has slot p, and whose values show the weights of
/// `head_size` positions at a time.
struct WeightPass {
    shape: HeadShape,
    layer: KvLayer,
    block_table: Vec<u32>,
    len: usize,
}

impl WeightPass {
    fn new(
        backend: &dyn Backend,
        config: &DecoderConfig,
        kv: &KvMemory,
        layer: usize,
        len: usize,
    ) -> Result<WeightPass, DeviceError> {
        let shape = KvMemory::shape(config, layer, kv.block_len());
        let num_blocks = len.div_ceil(shape.block_len);
        let stored = &kv.layers[config.layers[layer].kv_from.unwrap_or(layer)];
        let zeros = |like: &Tensor| backend.zeros(like.dtype(), num_blocks, like.cols());
        let layer = KvLayer { keys: zeros(&stored.keys)?, values: zeros(&stored.values)? };
        Ok(WeightPass { shape, layer, block_table: (0..num_blocks as u32).collect(), len })
    }

    /// Returns the values of rows at these positions: 1 in the column of the position, counted from `first`.
    fn values(&self, positions: &[u32], first: usize) -> Vec<f32> {
        let head_size = self.shape.head_size;
        let mut values = Vec::with_capacity(positions.len() * self.shape.num_kv_heads * head_size);
        for &position in positions {
            let column = (position as usize).checked_sub(first);
            let head = (0..head_size).map(|i| if column == Some(i) { 1.0 } else { 0.0 });
            (0..self.shape.num_kv_heads).for_each(|_| values.extend(head.clone()));
        }
        values
    }

    /// Stores the values that show the positions from `first` on, and the sequence's keys.
    fn fill(&mut self, backend: &dyn Backend, first: usize, keys: &Tensor, blocks: &[u32]) -> Result<(), DeviceError> {
        let HeadShape { head_size, num_kv_heads, .. } = self.shape;
        // The positions of the pass before lose their values.
        let rows = first.saturating_sub(head_size)..self.len.min(first + head_size);
        let slots: Vec<u32> = rows.map(|position| position as u32).collect();
        let dtype = backend.activation_dtype();
        let mut values = backend.zeros(dtype, slots.len(), num_kv_heads * head_size)?;
        backend.write(&self.values(&slots, first), &mut values)?;
        let no_keys = backend.zeros(dtype, slots.len(), num_kv_heads * head_size)?;
        let store = StoreKv { keys: &no_keys, values: &values, slots: &slots, shape: self.shape };
        backend.store_kv(store, &mut self.layer)?;
        backend.copy_rows(keys, blocks, &mut self.layer.keys, 0)
    }
}
