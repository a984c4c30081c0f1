//! Attention of one layer: project, normalise and rotate queries and keys, store keys and values, attend, project. A
//! layer may read the keys and values of another; then it has queries alone. A rank has its own heads; its part of the
//! output is joined with those of other ranks in the last projection.

use pellucid_tensor::{Attend, Attention, Backend, Error, KvLayer, RmsNorm, Rope, StoreKv, Tensor, Values};

use crate::activations::{Activations, AttentionActivations, Entry, output};
use crate::config::Positions;
use crate::ranks::{Columns, Ranks, project};
use crate::weights::{AttentionWeights, Norm};
use crate::{Batch, DecoderConfig, KvMemory};

/// Number, keys and values of a layer.
pub(crate) struct LayerMemory<'a> {
    pub(crate) index: usize,
    pub(crate) layer: &'a mut KvLayer,
    /// The slots of the rows and the block tables of the sequences.
    pub(crate) places: (&'a [u32], &'a [u32]),
    pub(crate) block_len: usize,
}

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &AttentionWeights,
    batch: &Batch,
    kv: LayerMemory<'_>,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let layer = config.layer(kv.index);
    let shape = KvMemory::shape(config, kv.index, kv.block_len);
    let rows = a.attention.of_mut(kv.index);
    let input = entry.input(config, &mut a.residual, &mut a.normed);
    match (&weights.key, &weights.value) {
        (Some(key), Some(value)) if weights.gate.is_some() => {
            let gate = weights.gate.as_ref().expect("just seen");
            let [query, key, value] =
                [(&weights.query, &mut rows.queries), (key, &mut rows.keys), (value, &mut rows.values)];
            backend.linears(input, &mut [query, key, value, (gate, &mut a.attention_gate)])?;
        }
        (Some(key), Some(value)) => {
            let mut maps = [(&weights.query, &mut rows.queries), (key, &mut rows.keys), (value, &mut rows.values)];
            backend.linears(input, &mut maps)?;
        }
        (Some(key), None) => {
            backend.linears(input, &mut [(&weights.query, &mut rows.queries), (key, &mut rows.keys)])?;
        }
        (None, _) => backend.linears(input, &mut [(&weights.query, &mut rows.queries)])?,
    }
    normalise_heads(backend, config, (kv.index, weights), a.ranks.as_deref_mut(), rows)?;
    if let Some(taps) = &mut a.taps {
        taps.before_attention(backend, kv.index, [&a.residual.hidden, &rows.queries, &rows.keys])?;
    }
    let rope = match (&config.positions, layer.rope) {
        (Positions::Rope { style, .. }, Some(table)) => {
            Some(Rope { angles: &a.angles[table], head_size: shape.head_size, style: *style })
        }
        _ => None,
    };
    let AttentionActivations { queries, keys, values, attended, .. } = rows;
    let (positions, sequences, (slots, block_tables)) = (&batch.positions[..], &batch.sequences[..], kv.places);
    let (scale, soft_cap, window) = (config.attention_scale, config.attention_soft_cap, layer.window);
    if layer.kv_from.is_some() {
        if let Some(rope) = rope {
            backend.rope(rope, queries)?;
        }
        let kv = &*kv.layer;
        let call = Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window };
        backend.attention(call, attended)?;
    } else {
        let sinks = weights.sinks.as_ref();
        let values = Values::Rows(values);
        let call =
            Attend { rope, values, slots, positions, sequences, block_tables, shape, scale, soft_cap, window, sinks };
        backend.attend(call, queries, keys, kv.layer, attended)?;
    }
    if weights.gate.is_some() {
        backend.sigmoid_gate(&a.attention_gate, attended)?;
    }
    let attended = (&*attended, Columns::Attended(kv.index));
    project(backend, a.ranks.as_deref_mut(), attended, &weights.output, output(&mut a.residual, output_norm))
}

/// Computes and stores keys and values of layer `index` alone, for a layer with maps of both.
pub(crate) fn store(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &AttentionWeights,
    batch: &Batch,
    kv: &mut KvMemory,
    (index, entry): (usize, Entry<'_>),
    a: &mut Activations,
) -> Result<(), Error> {
    let (Some(key), Some(value)) = (&weights.key, &weights.value) else {
        unreachable!("a predictor has maps of keys and of values")
    };
    let shape = KvMemory::shape(config, index, kv.block_len());
    let rows = a.attention.of_mut(index);
    let input = entry.input(config, &mut a.residual, &mut a.normed);
    backend.linears(input, &mut [(key, &mut rows.keys), (value, &mut rows.values)])?;
    if let Some(norm) = &weights.key_norm {
        normalise(backend, config, (norm, None), &mut rows.keys, &mut rows.spare_keys)?;
    }
    if let (Positions::Rope { style, .. }, Some(table)) = (&config.positions, config.layer(index).rope) {
        let rope = Rope { angles: &a.angles[table], head_size: shape.head_size, style: *style };
        backend.rope(rope, &mut rows.keys)?;
    }
    let stored = StoreKv { keys: &rows.keys, values: &rows.values, slots: &batch.slots, shape };
    backend.store_kv(stored, &mut kv.layers[index])
}

/// Normalises queries, keys and values, each if the layer has it and a norm for it. Values that are the keys are made
/// first, because the norm of the keys has weights.
fn normalise_heads(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (layer, weights): (usize, &AttentionWeights),
    mut ranks: Option<&mut Ranks>,
    rows: &mut AttentionActivations,
) -> Result<(), Error> {
    let AttentionActivations { queries, keys, spare_keys, values, attended } = rows;
    match &weights.value_norm {
        Some(norm) if weights.value.is_some() => normalise(backend, config, (norm, None), values, spare_keys)?,
        Some(norm) => backend.rms_norm(keys, &norm.weight, config.norm_eps, values)?,
        None => {}
    }
    if let Some(norm) = &weights.query_norm {
        // `attended` has the queries' width and is free until attention has run.
        let of_all = ranks.as_deref_mut().map(|ranks| (ranks, Columns::Attended(layer)));
        normalise(backend, config, (norm, of_all), queries, attended)?;
    }
    match &weights.key_norm {
        Some(norm) => {
            let of_all = ranks.map(|ranks| (ranks, Columns::Keys(layer)));
            normalise(backend, config, (norm, of_all), keys, spare_keys)
        }
        None => Ok(()),
    }
}

/// Applies RMSNorm to each head, or to each row if the norm has its length: to the columns of all ranks if it is longer
/// than those of this one. `spare` holds the old values afterwards.
fn normalise(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (norm, of_all): (&Norm, Option<(&mut Ranks, Columns)>),
    x: &mut Tensor,
    spare: &mut Tensor,
) -> Result<(), Error> {
    let (weight, eps) = (&norm.weight, config.norm_eps);
    match of_all.filter(|_| weight.len() > x.cols()) {
        Some((ranks, columns)) => ranks.rms_norm(backend, (x, columns), RmsNorm { weight, eps }, spare)?,
        None => backend.rms_norm(x, weight, eps, spare)?,
    }
    std::mem::swap(x, spare);
    Ok(())
}
