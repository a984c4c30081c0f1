//! The end of a layer of Gemma 4, after attention and MLP: an input of the layer's own, and a factor of the residual
//! stream.
//!
//! The inputs of all layers are computed once a step: the token's row of a table, plus a projection of its embedding,
//! which is normalised for each layer.

use std::f32::consts::FRAC_1_SQRT_2;

use pellucid_tensor::{Backend, Error, TableRows};

use crate::activations::{Activations, LayerInputActivations};
use crate::weights::{LayerInputTables, LayerWeights};
use crate::{Batch, DecoderConfig};

/// Factor of the sum of both parts, which the table's factor and the norm's weight contain.
pub(crate) const SUM_SCALE: f32 = FRAC_1_SQRT_2;

/// Computes the inputs of all layers from the tokens and their embeddings, which are the residual stream.
pub(crate) fn prepare(
    backend: &dyn Backend,
    config: &DecoderConfig,
    tables: &LayerInputTables,
    batch: &Batch,
    a: &mut Activations,
) -> Result<(), Error> {
    let LayerInputActivations { inputs, projected, projected_normed, .. } = &mut a.layer_inputs;
    let size = config.layer_input_size.expect("the model has inputs of layers") as f32;
    backend.embed(&tables.table, TableRows::Tokens(&batch.ids), size.sqrt() * SUM_SCALE, inputs)?;
    backend.linear(&a.residual.hidden, &tables.projection, projected)?;
    // The projection is divided by the root of the hidden size, which the norm cancels except in its epsilon.
    let eps = config.norm_eps * config.hidden_size as f32;
    backend.rms_norm(projected, &tables.norm.weight, eps, projected_normed)?;
    backend.add(projected_normed, inputs)
}

/// Adds the contribution of the layer's input to the residual stream, which has no pending update, and multiplies the
/// stream by the layer's factor.
pub(crate) fn finish_layer(
    backend: &dyn Backend,
    config: &DecoderConfig,
    (index, layer): (usize, &LayerWeights),
    a: &mut Activations,
) -> Result<(), Error> {
    if let Some(weights) = &layer.input {
        let LayerInputActivations { inputs, gate, .. } = &mut a.layer_inputs;
        backend.linear(&a.residual.hidden, &weights.gate, gate)?;
        backend.gate_by_columns(config.activation, inputs, index * gate.cols(), gate)?;
        backend.linear(gate, &weights.projection, &mut a.residual.update)?;
        backend.rms_norm(&a.residual.update, &weights.norm.weight, config.norm_eps, &mut a.normed)?;
        backend.add(&a.normed, &mut a.residual.hidden)?;
    }
    match layer.scale {
        Some(factor) => backend.scale(factor, &mut a.residual.hidden),
        None => Ok(()),
    }
}
