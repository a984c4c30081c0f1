//! The probe: computes the last positions of one sequence again and shows what is inside. The engine runs it outside
//! its batches, between two steps.
//!
//! *Layers*: the residual stream after each layer goes through the final norm and the output projection, as that after
//! the last layer always does. *Attention*: the weights of one layer's softmax, in `attention_weights`.
//!
//! A probe runs the operations of a step on the same blocks, and taps only copy. The bits of a row do not depend on the
//! other rows of its batch, so keys, values and logits get the bits that they had.

mod attention_weights;

use pellucid_tensor::{Backend, Error as DeviceError, Tensor};

use crate::{Batch, DecoderConfig};

pub(crate) use attention_weights::attention_rows;

/// Layers whose logits are computed at a time, which bounds the memory of a probe.
pub(crate) const LAYERS_AT_ONCE: usize = 8;

/// Contents of a probe.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ProbeQuery {
    /// Whether to report the logits after each layer.
    pub layers: bool,
    /// The attention weights to report.
    pub attention: Option<AttentionQuery>,
}

/// Attention weights to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionQuery {
    /// Index of the layer, from 0.
    pub layer: usize,
    /// Index of the head, from 0; `None` reports the mean of all heads.
    pub head: Option<usize>,
}

/// Attention weights of the rows of a batch.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionRows {
    /// For each row, the weights of all positions of the sequence up to that of the batch's last row; 0 where the row
    /// does not attend.
    pub weights: Vec<Vec<f32>>,
}

/// Copies of activations that a probe makes while the layers run.
#[derive(Debug)]
pub(crate) struct Taps {
    /// Row of the batch whose stream is kept.
    row: u32,
    /// The residual stream after each layer.
    pub(crate) streams: Tensor,
    /// The layer whose queries and keys are kept.
    layer: Option<usize>,
    /// Queries and keys before the rotation.
    queries: Tensor,
    keys: Tensor,
}

impl Taps {
    pub(crate) fn new(
        config: &DecoderConfig,
        backend: &dyn Backend,
        batch: &Batch,
        query: &ProbeQuery,
    ) -> Result<Taps, DeviceError> {
        let (dtype, num_rows) = (backend.activation_dtype(), batch.num_rows());
        let layer = query.attention.map_or(0, |query| query.layer);
        Ok(Taps {
            row: num_rows as u32 - 1,
            streams: backend.zeros(dtype, config.num_layers(), config.hidden_size)?,
            layer: query.attention.map(|query| query.layer),
            queries: backend.zeros(dtype, num_rows, config.query_size(layer))?,
            keys: backend.zeros(dtype, num_rows, config.key_size(layer))?,
        })
    }

    /// Keeps the residual stream after a layer.
    pub(crate) fn after_layer(
        &mut self,
        backend: &dyn Backend,
        layer: usize,
        hidden: &Tensor,
    ) -> Result<(), DeviceError> {
        backend.copy_rows(hidden, &[self.row], &mut self.streams, layer)
    }

    /// Keeps the residual stream before a layer, whose linear maps have just completed it, and the queries and keys of
    /// the layer whose attention is wanted.
    pub(crate) fn before_attention(
        &mut self,
        backend: &dyn Backend,
        layer: usize,
        [hidden, queries, keys]: [&Tensor; 3],
    ) -> Result<(), DeviceError> {
        if let Some(before) = layer.checked_sub(1) {
            self.after_layer(backend, before, hidden)?;
        }
        if self.layer == Some(layer) {
            let rows: Vec<u32> = (0..queries.rows() as u32).collect();
            backend.copy_rows(queries, &rows, &mut self.queries, 0)?;
            backend.copy_rows(keys, &rows, &mut self.keys, 0)?;
        }
        Ok(())
    }
}
