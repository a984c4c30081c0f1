//! Attention of one layer: project, normalise and rotate queries and keys, store keys and values, attend, project.

use pellucid_tensor::{Attend, Backend, Error, KvLayer, Rope, Tensor};

use crate::activations::{Activations, Entry, output};
use crate::config::Positions;
use crate::weights::{AttentionWeights, Norm};
use crate::{Batch, DecoderConfig, KvMemory};

/// Number, keys and values of a layer.
pub(crate) struct LayerMemory<'a> {
    pub(crate) index: usize,
    pub(crate) layer: &'a mut KvLayer,
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
    let layer = config.layers[kv.index];
    let shape = KvMemory::shape(config, kv.block_len);
    let mut maps = [(&weights.query, &mut a.queries), (&weights.key, &mut a.keys), (&weights.value, &mut a.values)];
    backend.linears(entry.input(config, &mut a.residual, &mut a.normed), &mut maps)?;

    if let (Some(query_norm), Some(key_norm)) = (&weights.query_norm, &weights.key_norm) {
        // `attended` has the queries' width and is free until attention has run.
        normalise(backend, config, query_norm, &mut a.queries, &mut a.attended)?;
        normalise(backend, config, key_norm, &mut a.keys, &mut a.spare_keys)?;
    }
    let rope = match (&config.positions, layer.rope) {
        (Positions::Rope { style, .. }, Some(table)) => {
            Some(Rope { angles: &a.angles[table], head_size: config.head_size, style: *style })
        }
        _ => None,
    };
    let attend = Attend {
        rope,
        values: &a.values,
        slots: &batch.slots,
        positions: &batch.positions,
        sequences: &batch.sequences,
        block_tables: &batch.block_tables,
        shape,
        scale: config.attention_scale,
        soft_cap: config.attention_soft_cap,
        window: layer.window,
        sinks: weights.sinks.as_ref(),
    };
    backend.attend(attend, &mut a.queries, &mut a.keys, kv.layer, &mut a.attended)?;
    backend.linear_to(&a.attended, &weights.output, output(&mut a.residual, output_norm))
}

/// Applies RMSNorm to each head, or to each row if the norm has its length. `spare` holds the old values afterwards.
fn normalise(
    backend: &dyn Backend,
    config: &DecoderConfig,
    norm: &Norm,
    x: &mut Tensor,
    spare: &mut Tensor,
) -> Result<(), Error> {
    backend.rms_norm(x, &norm.weight, config.norm_eps, spare)?;
    std::mem::swap(x, spare);
    Ok(())
}
