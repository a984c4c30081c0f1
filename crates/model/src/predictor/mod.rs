//! The layer with which some models predict the token after the next (`nextn`, MTP), for drafts.
//!
//! It takes token t at position p and the row h of position p - 1 after the decoder's last norm:
//!
//! ```text
//! x = join [norm(embedding[t]); norm(h)]
//! h' = output_norm(layer(x))
//! logits of position p + 1 = output h'
//! ```
//!
//! where h' takes the place of h for the row after it. The rows h of all positions are kept beside keys and values, in
//! the same blocks ([`KvMemory::hidden`]), so that they are found, shared and copied with them. Each step of the
//! decoder stores its rows, and the layer's keys and values for them ([`follow`]): what is stored for a position is a
//! function of the tokens up to it. Position 0 has a row of zeros before it, as in llama.cpp.

use pellucid_tensor::{Backend, Error as DeviceError, Pending, Residual, TableRows, Tensor};

use crate::activations::{Activations, normed};
use crate::batch::StepTables;
use crate::config::NormKind;
use crate::weights::{MixerWeights, PredictorWeights, Weights};
use crate::{Batch, DecoderConfig, KvMemory, Logits, mixer, mlp};

/// Tensors of a step of the layer that the decoder does not have.
#[derive(Debug)]
pub(crate) struct PredictorActivations {
    embedded: Tensor,
    /// The rows of the positions before those of the step.
    previous: Tensor,
}

impl PredictorActivations {
    pub(crate) fn new(config: &DecoderConfig, backend: &dyn Backend) -> Result<Option<Self>, DeviceError> {
        let rows = || backend.zeros(backend.activation_dtype(), 0, config.hidden_size);
        config.predictor.map(|_| Ok(PredictorActivations { embedded: rows()?, previous: rows()? })).transpose()
    }
}

/// Stores the rows of a step of the decoder, and the keys and values of the layer for them. The decoder's residual
/// stream is complete, and is lost.
pub(crate) fn follow(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Weights,
    (batch, tables): (&Batch, &StepTables),
    kv: &mut KvMemory,
    (a, own): (&mut Activations, &mut PredictorActivations),
) -> Result<(), DeviceError> {
    let Some(predictor) = &weights.predictor else { return Ok(()) };
    backend.rms_norm(&a.residual.hidden, &weights.final_norm.weight, config.stream_norm_eps(), &mut a.normed)?;
    store_rows(backend, batch, &a.normed, kv)?;
    join(backend, config, weights, predictor, (batch, tables), kv, (a, own))?;
    let entry = a.enter(backend, config, predictor.layer.attention_norm.as_ref())?;
    let Some(MixerWeights::Attention(attention)) = &predictor.layer.mixer else {
        unreachable!("the configuration was checked")
    };
    mixer::attention::store(backend, config, attention, batch, kv, (config.num_layers(), entry), a)
}

/// Computes the logits of the wanted rows.
pub(crate) fn forward(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Weights,
    (batch, tables): (&Batch, &StepTables),
    kv: &mut KvMemory,
    (a, own): (&mut Activations, &mut PredictorActivations),
) -> Result<(), DeviceError> {
    let predictor = weights.predictor.as_ref().expect("the model was loaded with it");
    let (index, layer) = (config.num_layers(), &predictor.layer);
    let (Some(mixer), Some(mlp)) = (&layer.mixer, &layer.mlp) else { unreachable!("the configuration was checked") };
    join(backend, config, weights, predictor, (batch, tables), kv, (a, own))?;
    let entry = a.enter(backend, config, layer.attention_norm.as_ref())?;
    let output_norm = layer.attention_output_norm.as_ref();
    mixer::forward(backend, config, (index, mixer), batch, kv, (entry, output_norm), a)?;
    let entry = a.join(backend, config, output_norm, layer.mlp_norm.as_ref())?;
    let output_norm = layer.mlp_output_norm.as_ref();
    mlp::forward(backend, config, (index, mlp), (entry, output_norm), a)?;
    a.join(backend, config, output_norm, None)?;
    let Activations { residual, normed: rows, last, logits, .. } = a;
    backend.input(normed(backend, config, &predictor.output_norm, &residual.hidden, rows)?)?;
    store_rows(backend, batch, rows, kv)?;
    backend.gather_rows(rows, &batch.wanted, last)?;
    backend.linear(last, &weights.output, logits)
}

/// Fills the residual stream with the join of embeddings and rows of the positions before.
fn join(
    backend: &dyn Backend,
    config: &DecoderConfig,
    weights: &Weights,
    predictor: &PredictorWeights,
    (batch, tables): (&Batch, &StepTables),
    kv: &KvMemory,
    (a, own): (&mut Activations, &mut PredictorActivations),
) -> Result<(), DeviceError> {
    let PredictorActivations { embedded, previous } = own;
    backend.resize_rows(embedded, batch.num_rows())?;
    backend.resize_rows(previous, batch.num_rows())?;
    let hidden = kv.hidden.as_ref().expect("the memory was allocated for the predictor");
    backend.gather_rows(hidden, &tables.previous_slots, previous)?;
    backend.embed(&weights.embedding, TableRows::Tokens(&batch.ids), config.embedding_scale, embedded)?;
    let Activations { residual: Residual { hidden, update, pending }, normed, .. } = a;
    backend.rms_norm(embedded, &predictor.embedding_norm.weight, config.norm_eps, normed)?;
    backend.linear(normed, &predictor.from_embedding, hidden)?;
    backend.rms_norm(previous, &predictor.hidden_norm.weight, config.norm_eps, normed)?;
    backend.linear(normed, &predictor.from_hidden, update)?;
    *pending = Pending::Update;
    Ok(())
}

/// Writes where the rows lie that a step of the layer starts from; nothing for a model without the layer. The last row
/// that is stored is of zeros.
pub(crate) fn write_previous_slots(batch: &Batch, kv: &KvMemory, out: &mut Vec<u32>) {
    if let Some(hidden) = &kv.hidden {
        batch.write_previous_slots(kv.block_len(), hidden.rows() - 1, out);
    }
}

/// Stores each row in the slot of its position.
fn store_rows(backend: &dyn Backend, batch: &Batch, rows: &Tensor, kv: &mut KvMemory) -> Result<(), DeviceError> {
    let hidden = kv.hidden.as_mut().expect("the memory was allocated for the predictor");
    backend.scatter_rows(rows, &batch.slots, hidden)
}

/// Whether a decoder with these settings can have a predictor of this form.
pub(crate) fn is_possible(config: &DecoderConfig) -> bool {
    let is_plain = config.layer_input_size.is_none() && !config.layer_scales && config.logits_soft_cap.is_none();
    let stores_both = config.latent_attention.is_none();
    is_plain
        && stores_both
        && config.norm == NormKind::Rms
        && config.logits_divisor == 1.0
        && config.residual_scale == 1.0
}

/// Reads the logits that [`forward`] computed.
pub(crate) fn read(
    backend: &dyn Backend,
    batch: &Batch,
    rows: &mut Tensor,
    vocab_size: usize,
    logits: &mut Logits,
) -> Result<(), DeviceError> {
    logits.await_rows(backend, &vec![None; batch.num_wanted()], vocab_size)?;
    logits.fill(backend, rows)
}
