//! The rows of a batch of an encoder between two operations. Kept from batch to batch.

use pellucid_tensor::{Backend, DType, Error as DeviceError, KvLayer, Tensor};

use super::config::EncoderConfig;
use crate::rope::RopeFrequencies;
use crate::{BLOCK_LEN, Error};

#[derive(Debug)]
pub(super) struct EncoderActivations {
    pub(super) hidden: Tensor,
    pub(super) update: Tensor,
    pub(super) normed: Tensor,
    pub(super) queries: Tensor,
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
    pub(super) attended: Tensor,
    pub(super) gate: Tensor,
    pub(super) up: Tensor,
    /// Cosines and sines, for each rotary table.
    pub(super) angles: Vec<Tensor>,
    /// Keys and values of the layer that is being computed, in blocks.
    pub(super) kv: KvLayer,
}

impl EncoderActivations {
    pub(super) fn new(
        config: &EncoderConfig,
        backend: &dyn Backend,
        ropes: &[RopeFrequencies],
    ) -> Result<EncoderActivations, Error> {
        let dtype = backend.activation_dtype();
        let rows = |cols: usize| backend.zeros(dtype, 0, cols);
        let hidden = config.hidden_size;
        let angles = |rope: &RopeFrequencies| backend.zeros(DType::F32, 0, 2 * rope.frequencies.len());
        // Vectors are compared with those of other programs: keys and values are not rounded.
        let blocks = || backend.zeros(DType::F32, 0, hidden * BLOCK_LEN);
        Ok(EncoderActivations {
            hidden: rows(hidden)?,
            update: rows(hidden)?,
            normed: rows(hidden)?,
            queries: rows(hidden)?,
            keys: rows(hidden)?,
            values: rows(hidden)?,
            attended: rows(hidden)?,
            gate: rows(config.mlp_size)?,
            up: rows(config.mlp_size)?,
            angles: ropes.iter().map(angles).collect::<Result<_, _>>()?,
            kv: KvLayer { keys: blocks()?, values: blocks()? },
        })
    }

    pub(super) fn resize(
        &mut self,
        backend: &dyn Backend,
        num_rows: usize,
        num_blocks: usize,
    ) -> Result<(), DeviceError> {
        let EncoderActivations { hidden, update, normed, queries, keys, values, attended, gate, up, angles, kv } = self;
        let rows = [hidden, update, normed, queries, keys, values, attended, gate, up].into_iter().chain(angles);
        rows.into_iter().try_for_each(|tensor| backend.resize_rows(tensor, num_rows))?;
        [&mut kv.keys, &mut kv.values].into_iter().try_for_each(|tensor| backend.resize_rows(tensor, num_blocks))
    }
}
