//! The memory of keys and values, in blocks of positions, and of recurrent states, in slots.
//!
//! Which sequence owns a block is not known here: each [`crate::Batch`] contains the block tables of its sequences.

use pellucid_tensor::{DType, HeadShape, KvLayer, Tensor};

use crate::config::{KeyHeads, LayerConfig};
use crate::{DecoderConfig, Error, LayerDevices};

/// Positions in a block, except in tests that use smaller ones. Long enough for efficient reads, and short enough that
/// a half-empty last block wastes little memory.
pub const BLOCK_LEN: usize = 32;

/// Keys and values of every layer, `num_blocks` blocks of `block_len` positions. If several ranks compute the model,
/// those of the KV heads of one rank.
#[derive(Debug)]
pub struct KvMemory {
    /// Layers without keys and values of their own have no blocks, and latent attention has no blocks of values.
    pub layers: Vec<KvLayer>,
    /// For each layer, whether it has blocks of its own, because it has a window.
    windowed: Vec<bool>,
    /// For models with a predictor, the row after the last norm of each position, and a row of zeros for the position
    /// before the first.
    pub(crate) hidden: Option<Tensor>,
    /// For each layer with a recurrence, a row for each slot.
    pub(crate) states: Vec<Option<Tensor>>,
    dtype: DType,
    num_blocks: usize,
    block_len: usize,
    /// Number of slots for recurrent states.
    num_slots: usize,
    /// Copies since the last step, if other ranks have to make them too.
    copies: Option<KvCopies>,
}

/// Copies within a KV memory, each from one block or slot to another, in the order in which they are made.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct KvCopies {
    pub(crate) blocks: Vec<[u32; 2]>,
    /// Of recurrent states.
    pub(crate) states: Vec<[u32; 2]>,
}

impl KvMemory {
    /// The formats in which keys and values can be stored. `docs/accuracy.md` states the error of each.
    pub const FORMATS: [DType; 4] = [DType::F32, DType::F16, DType::BF16, DType::Q8_0];

    /// Allocates the memory, filled with zeros.
    pub fn new(
        config: &DecoderConfig,
        devices: &(impl LayerDevices + ?Sized),
        dtype: DType,
        num_blocks: usize,
        block_len: usize,
    ) -> Result<Self, Error> {
        KvMemory::with_windows(config, devices, dtype, (num_blocks, None), block_len)
    }

    /// Allocates the memory, filled with zeros. With a number of window blocks, layers with sliding windows have this
    /// number of blocks of their own, if the decoder has a [`DecoderConfig::kv_window`], and one more that nothing is
    /// stored in.
    pub fn with_windows(
        config: &DecoderConfig,
        devices: &(impl LayerDevices + ?Sized),
        dtype: DType,
        (num_blocks, num_window_blocks): (usize, Option<usize>),
        block_len: usize,
    ) -> Result<Self, Error> {
        check_format(config, dtype)?;
        let num_layers = config.num_layers_with_predictor();
        let has_own_blocks = |layer| num_window_blocks.is_some() && config.is_windowed(layer);
        let windowed: Vec<bool> = (0..num_layers).map(has_own_blocks).collect();
        let layers = (0..num_layers)
            .map(|layer| {
                let block = block_len * config.key_size(layer);
                let num_blocks = num_window_blocks.filter(|_| windowed[layer]).map_or(num_blocks, |num| num + 1);
                let num_blocks = if config.layer(layer).has_kv() { num_blocks } else { 0 };
                let backend = devices.of_layer(layer);
                let num_value_blocks = if config.latent_attention.is_some() { 0 } else { num_blocks };
                Ok(KvLayer {
                    keys: backend.zeros(dtype, num_blocks, block)?,
                    values: backend.zeros(dtype, num_value_blocks, block)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        // Predictors run on one device.
        let backend = devices.of_layer(0);
        let rows = || backend.zeros(backend.activation_dtype(), num_blocks * block_len + 1, config.hidden_size);
        let hidden = config.predictor.map(|_| rows()).transpose()?;
        let copies = (config.num_ranks > 1).then(KvCopies::default);
        let states = Vec::new();
        Ok(KvMemory { layers, windowed, hidden, states, dtype, num_blocks, block_len, num_slots: 0, copies })
    }

    /// Adds `num_slots` slots for recurrent states, which are stored in F32. Nothing is allocated for a model without
    /// them.
    pub fn with_states(
        mut self,
        config: &DecoderConfig,
        devices: &(impl LayerDevices + ?Sized),
        num_slots: usize,
    ) -> Result<Self, Error> {
        let state = |(index, &layer): (usize, &LayerConfig)| match config.state_len(layer) {
            0 => Ok(None),
            len => devices.of_layer(index).zeros(DType::F32, num_slots, len).map(Some),
        };
        self.states = config.layers.iter().enumerate().map(state).collect::<Result<_, _>>()?;
        self.num_slots = if self.has_states() { num_slots } else { 0 };
        Ok(self)
    }

    /// Returns the bytes of one block in all layers, keys and values together, and of the rows that a predictor reads.
    /// Saturates at `usize::MAX`, which fits no budget.
    pub fn bytes_per_block(config: &DecoderConfig, dtype: DType, block_len: usize) -> Result<usize, Error> {
        check_format(config, dtype)?;
        // Predictors run on devices with activations in F32.
        let hidden = config.predictor.map_or(0, |_| config.hidden_size * block_len * size_of::<f32>());
        let of_layer = |layer: usize| stored_bytes(config, layer, dtype, block_len);
        Ok((0..config.num_layers_with_predictor()).map(of_layer).fold(hidden, usize::saturating_add))
    }

    /// Returns the part of [`KvMemory::bytes_per_block`] that belongs to layers which can have blocks of their own.
    pub fn window_bytes_per_block(config: &DecoderConfig, dtype: DType, block_len: usize) -> usize {
        let windowed = (0..config.num_layers()).filter(|&layer| config.is_windowed(layer));
        windowed.map(|layer| stored_bytes(config, layer, dtype, block_len)).fold(0, usize::saturating_add)
    }

    /// Whether a layer has blocks of its own, because it has a window.
    pub(crate) fn is_windowed(&self, layer: usize) -> bool {
        self.windowed[layer]
    }

    /// Whether a layer has slots for recurrent states.
    pub(crate) fn has_states(&self) -> bool {
        self.states.iter().any(Option::is_some)
    }

    pub(crate) fn dtype(&self) -> DType {
        self.dtype
    }

    /// Returns the number of slots for recurrent states; 0 if the model has none.
    pub(crate) fn num_slots(&self) -> usize {
        self.num_slots
    }

    /// Returns the copies since the last call.
    pub(crate) fn take_copies(&mut self) -> KvCopies {
        self.copies.as_mut().map(std::mem::take).unwrap_or_default()
    }

    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }

    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Returns the bytes of one position's keys and values in all layers.
    pub fn bytes_per_position(&self) -> usize {
        let bytes = |tensor: &Tensor| tensor.dtype().bytes_for(tensor.cols()).expect("rows are whole blocks");
        let tensors = self.layers.iter().flat_map(|layer| [&layer.keys, &layer.values]);
        tensors.filter(|tensor| tensor.rows() > 0).map(bytes).sum::<usize>() / self.block_len
    }

    /// Copies a slot's state in every layer. Other ranks make the copy before the next step.
    pub fn copy_state(&mut self, devices: &(impl LayerDevices + ?Sized), from: u32, to: u32) -> Result<(), Error> {
        if let Some(copies) = self.copies.as_mut().filter(|_| self.num_slots > 0) {
            copies.states.push([from, to]);
        }
        for (layer, states) in self.states.iter_mut().enumerate() {
            states.iter_mut().try_for_each(|s| devices.of_layer(layer).copy_row(from as usize, to as usize, s))?;
        }
        Ok(())
    }

    /// Copies a block's keys and values in every layer, and the rows that a predictor reads, for copy-on-write. Other
    /// ranks make the copy before the next step.
    pub fn copy_block(&mut self, devices: &(impl LayerDevices + ?Sized), from: u32, to: u32) -> Result<(), Error> {
        if let Some(copies) = &mut self.copies {
            copies.blocks.push([from, to]);
        }
        self.copy_in_layers(devices, [from, to], false)?;
        if let Some(hidden) = &mut self.hidden {
            let (from, to) = (from as usize * self.block_len, to as usize * self.block_len);
            let backend = devices.of_layer(0);
            (0..self.block_len).try_for_each(|row| backend.copy_row(from + row, to + row, hidden))?;
        }
        Ok(())
    }

    /// Copies a block of the layers with blocks of their own.
    pub fn copy_window_block(
        &mut self,
        devices: &(impl LayerDevices + ?Sized),
        from: u32,
        to: u32,
    ) -> Result<(), Error> {
        self.copy_in_layers(devices, [from, to], true)
    }

    fn copy_in_layers(
        &mut self,
        devices: &(impl LayerDevices + ?Sized),
        [from, to]: [u32; 2],
        windowed: bool,
    ) -> Result<(), Error> {
        let layers = self.layers.iter_mut().zip(&self.windowed).enumerate();
        for (index, (layer, _)) in layers.filter(|(_, (_, is_windowed))| **is_windowed == windowed) {
            let tensors = [&mut layer.keys, &mut layer.values].into_iter().filter(|tensor| tensor.rows() > 0);
            for tensor in tensors {
                devices.of_layer(index).copy_row(from as usize, to as usize, tensor)?;
            }
        }
        Ok(())
    }

    pub(crate) fn shape(config: &DecoderConfig, layer: usize, block_len: usize) -> HeadShape {
        let KeyHeads { num_kv_heads, head_size } = config.key_heads(layer);
        HeadShape { num_heads: config.num_heads, num_kv_heads, head_size, block_len }
    }
}

/// Returns the bytes of one block of a layer, keys and values together.
fn stored_bytes(config: &DecoderConfig, layer: usize, dtype: DType, block_len: usize) -> usize {
    dtype.bytes_for(config.stored_kv_size(layer)).unwrap_or(usize::MAX).saturating_mul(block_len)
}

/// Checks that the format is supported and that a head, which is stored separately, is a whole number of the format's
/// blocks.
fn check_format(config: &DecoderConfig, dtype: DType) -> Result<(), Error> {
    if !KvMemory::FORMATS.contains(&dtype) {
        return Err(Error::NoKvFormat { dtype });
    }
    let mut head_sizes = (0..config.num_layers_with_predictor()).map(|layer| config.key_heads(layer).head_size);
    match head_sizes.find(|&head_size| dtype.bytes_for(head_size).is_none()) {
        Some(head_size) => Err(Error::KvHeadSize { dtype, multiple: dtype.block_len(), head_size }),
        None => Ok(()),
    }
}
