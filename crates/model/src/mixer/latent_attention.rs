//! Multi-head latent attention of one layer, with absorbed maps: queries are mapped to the latents, attention has one
//! key head whose values are parts of its keys, and what each head attended is mapped to its values.
//!
//! A rank has its own heads, and stores the whole rows that all heads read: the maps to latents are not shared out.
//!
//! Prefill and decode do the same arithmetic in the same order. The other form, which maps every latent to the keys and
//! values of all heads, would give other bits.

use pellucid_tensor::{Attend, Backend, Error, Input, Rope, Values};

use super::attention::LayerMemory;
use crate::activations::{Activations, AttentionActivations, Entry, LatentActivations, output};
use crate::config::{LatentAttention, Positions};
use crate::ranks::{self, Columns};
use crate::weights::{LatentAttentionWeights, Norm};
use crate::{Batch, DecoderConfig, KvMemory};

/// Writes its result to the residual stream, or to `update` if an output norm follows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &LatentAttentionWeights,
    batch: &Batch,
    kv: LayerMemory<'_>,
    (entry, output_norm): (Entry<'_>, Option<&Norm>),
    a: &mut Activations,
) -> Result<(), Error> {
    let sizes = config.latent_attention.expect("checked with the configuration");
    let input = entry.input(config, &mut a.residual, &mut a.normed);
    let latent = a.latent.as_mut().expect("a model with latent attention has them");
    let rows = a.attention.of_mut(kv.index);
    project(backend, config, weights, input, (&mut *latent, &mut *rows))?;
    if let Some(taps) = &mut a.taps {
        taps.before_attention(backend, kv.index, [&a.residual.hidden, &rows.queries, &rows.keys])?;
    }
    let shape = KvMemory::shape(config, kv.index, kv.block_len);
    let rope = match &config.positions {
        Positions::Rope { style, .. } => Some(Rope { angles: &a.angles[0], head_size: shape.head_size, style: *style }),
        _ => None,
    };
    let AttentionActivations { queries, keys, attended, .. } = rows;
    let attend = Attend {
        rope,
        values: Values::InKeys { first: sizes.rotary_size },
        slots: kv.places.0,
        positions: &batch.positions,
        sequences: &batch.sequences,
        block_tables: kv.places.1,
        shape,
        scale: config.attention_scale,
        soft_cap: config.attention_soft_cap,
        window: config.layers[kv.index].window,
        sinks: None,
    };
    backend.attend(attend, queries, keys, kv.layer, attended)?;
    backend.map_heads(attended, &weights.value_maps, &mut latent.values)?;
    let values = (&latent.values, Columns::Attended(kv.index));
    ranks::project(backend, a.ranks.as_deref_mut(), values, &weights.output, output(&mut a.residual, output_norm))
}

/// Computes queries and keys: in each head the values to rotate, then those in the space of latents.
fn project(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &LatentAttentionWeights,
    input: Input<'_>,
    (latent, rows): (&mut LatentActivations, &mut AttentionActivations),
) -> Result<(), Error> {
    let LatentActivations { query_ranks, query_ranks_normed, plain_queries, rotary_queries, .. } = latent;
    let LatentActivations { rotary_keys, latents, latents_normed, .. } = latent;
    let eps = LatentAttention::NORM_EPS;
    let [latent, rotary_key] = [(&weights.latent, &mut *latents), (&weights.rotary_key, &mut *rotary_keys)];
    let [plain, rotary] = [(&weights.plain_query, &mut *plain_queries), (&weights.rotary_query, &mut *rotary_queries)];
    match &weights.query_rank {
        None => backend.linears(input, &mut [latent, rotary_key, plain, rotary])?,
        Some((down, norm)) => {
            backend.linears(input, &mut [latent, rotary_key, (down, &mut *query_ranks)])?;
            let input = Input::Normed { x: query_ranks, weight: &norm.weight, eps, normed: query_ranks_normed };
            backend.linears(input, &mut [plain, rotary])?;
        }
    }
    backend.rms_norm(latents, &weights.latent_norm.weight, eps, latents_normed)?;
    backend.join_heads(1, [rotary_keys, latents_normed], &mut rows.keys)?;
    // `attended` has the width of all heads' latents and is free until attention has run.
    backend.map_heads(plain_queries, &weights.key_maps, &mut rows.attended)?;
    backend.join_heads(config.num_heads, [rotary_queries, &rows.attended], &mut rows.queries)
}
