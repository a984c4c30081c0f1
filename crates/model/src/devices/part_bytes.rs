//! The bytes of the parts of a model on a device, before it is loaded, for a plan of which device has what.

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, DType};

use crate::{DecoderConfig, Placement};

/// Bytes of the parts of a model, as a device stores them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PartBytes {
    /// For each layer, those of its mixer.
    pub mixers: Vec<u64>,
    /// For each layer, those of its MLP or experts.
    pub mlps: Vec<u64>,
    pub embedding: u64,
    /// Those of the last norm and the output projection, which may be the embedding table once more.
    pub output: u64,
}

/// Words in the names of tensors that belong to an MLP or to experts, in GGUF files and in folders.
const MLP_NAMES: [&str; 5] = ["ffn", "mlp", "expert", "feed_forward", "block_sparse_moe"];

impl PartBytes {
    /// Returns the bytes that the parts of a checkpoint would take on a device.
    pub fn of(checkpoint: &Checkpoint, config: &DecoderConfig, backend: &dyn Backend) -> PartBytes {
        let num_layers = config.num_layers();
        let mut parts = PartBytes { mixers: vec![0; num_layers], mlps: vec![0; num_layers], ..PartBytes::default() };
        let mut has_output = false;
        for tensor in checkpoint.tensors() {
            let name = tensor.name.as_str();
            let bytes = backend.stored_bytes(tensor.dtype, tensor.num_elements()).unwrap_or(tensor.num_bytes() as u64);
            let layer = name.split('.').find_map(|word| word.parse::<usize>().ok());
            let is_mlp = MLP_NAMES.iter().any(|word| name.contains(word));
            match layer {
                Some(layer) if layer < num_layers && is_mlp => parts.mlps[layer] += bytes,
                Some(layer) if layer < num_layers => parts.mixers[layer] += bytes,
                // Layers that predict further tokens are not loaded on several devices.
                Some(_) => {}
                None if name.contains("emb") || name.contains("wte") || name.contains("wpe") => {
                    parts.embedding += bytes;
                }
                None => {
                    parts.output += bytes;
                    has_output |= tensor.num_elements() >= config.vocab_size * config.hidden_size;
                }
            }
        }
        if !has_output {
            parts.output += parts.embedding;
        }
        parts
    }

    /// Returns the bytes of the parts on a device.
    pub fn on(&self, device: usize, placement: &Placement) -> u64 {
        let sum = |parts: &[u64], devices: &[usize]| -> u64 {
            parts.iter().zip(devices).filter(|(_, of)| **of == device).map(|(bytes, _)| bytes).sum()
        };
        let embedding = if placement.embedding() == device { self.embedding } else { 0 };
        let output = if placement.output == device { self.output } else { 0 };
        sum(&self.mixers, &placement.mixers) + sum(&self.mlps, &placement.mlps) + embedding + output
    }
}

impl DecoderConfig {
    /// Returns the bytes of a block of keys and values of one layer.
    pub fn kv_bytes_of_layer(&self, layer: usize, dtype: DType, block_len: usize) -> u64 {
        dtype.bytes_for(self.stored_kv_size(layer)).unwrap_or(0).saturating_mul(block_len) as u64
    }

    /// Returns the bytes of the recurrent state of one layer.
    pub fn state_bytes_of_layer(&self, layer: usize) -> u64 {
        (self.state_len(self.layer(layer)) * size_of::<f32>()) as u64
    }
}
