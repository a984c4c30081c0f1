//! Memory that a model takes while it is open, computed from the headers of its files before it is loaded.

use pellucid_checkpoint::{Checkpoint, FileAccess};
use pellucid_engine::KvNeed;
use pellucid_generate::ModelDetails;
use pellucid_model::{BLOCK_LEN, DecoderConfig, EncoderConfig, KvMemory, LoadOptions};
use pellucid_tensor::Backend;
use pellucid_tokenizer::Tokenizer;

use crate::draft_model::DraftFiles;
use crate::embedding_model::DEFAULT_DECODER_CONTEXT;
use crate::loading::{details, kv_need, step_tokens};
use crate::{Builder, Device, DeviceOptions, Error};

/// Maximum rows of a step of an encoder, unless one text is longer; see `pellucid_engine`.
const ENCODER_ROWS: usize = 1024;

/// Memory that a model takes, and facts about it that are known before it is loaded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MemoryNeed {
    /// Weights, those of the draft model included. Files that are read into memory count twice, because they stay there
    /// until the weights are on the device.
    pub weight_bytes: u64,
    /// Activations and logits of the largest step.
    pub scratch_bytes: u64,
    /// Keys and values of a model that generates text; the size is for its operator to choose.
    pub kv: Option<KvNeed>,
    /// Keys and values of a model that computes vectors.
    pub fixed_kv_bytes: u64,
    /// Maximum tokens of prompt and reply together, or of a text.
    pub context_len: usize,
    /// Whether the files have a chat template.
    pub has_template: bool,
    /// The device in words.
    pub device: String,
    /// Facts about the files.
    pub details: ModelDetails,
}

impl MemoryNeed {
    /// Returns the bytes of keys and values: `given`, or as many whole contexts as `share` holds, at least one and at
    /// most the number that the builder asks for. 0 for a model that computes vectors.
    pub fn kv_bytes(&self, given: Option<u64>, share: u64) -> u64 {
        let Some(need) = self.kv else { return 0 };
        let context = need.blocks_per_context().max(1);
        let contexts = (need.affordable(share) / context).clamp(1, need.num_contexts.max(1) as u64);
        given.unwrap_or_else(|| need.bytes(contexts.saturating_mul(context)))
    }

    /// Returns the bytes of the whole model, with `kv_bytes` of keys and values.
    pub fn total_bytes(&self, kv_bytes: u64) -> u64 {
        [self.weight_bytes, self.scratch_bytes, self.fixed_kv_bytes, kv_bytes].into_iter().fold(0, u64::saturating_add)
    }
}

impl Builder {
    /// Returns the memory that the model will take. Reads the headers of its files and opens the device, but loads no
    /// weights. A draft model with another vocabulary is an error.
    pub fn memory_need(&self) -> Result<MemoryNeed, Error> {
        let checkpoint = Checkpoint::open(&self.path).map_err(Error::Open)?;
        let failed = |source| Error::Load { path: self.path.clone(), source: Box::new(source) };
        let options = LoadOptions { context_len: None, ..self.load_options() };
        let config = self.limited(pellucid_model::read_config_with(&checkpoint, options).map_err(failed)?);
        let backend = self.device.open(&mut |_| ())?;
        let draft = match self.draft_path() {
            Some(draft) => {
                let tokenizer = Tokenizer::from_checkpoint(&checkpoint)
                    .map_err(|source| Error::Tokenizer { path: self.path.clone(), source: Box::new(source) })?;
                let files = DraftFiles::open(draft, &FileAccess::Mapped, &self.path, &tokenizer, &mut |_| ())?;
                Some((files.config(config.context_len).map_err(failed)?, files.info(0).weight_bytes))
            }
            None => None,
        };
        let draft_config = draft.as_ref().map(|(config, _)| config);
        let distance = self.distance_in_blocks();
        let kv = kv_need(&config, draft_config, &backend.clone().into(), self.kv_type, self.max_sequences, distance)?;
        let num_rows = step_tokens(&*backend, self.max_sequences);
        let mut scratch = 0;
        for config in [Some(&config), draft.as_ref().map(|(config, _)| config)].into_iter().flatten() {
            let bytes = pellucid_model::step_bytes(config, &*backend, num_rows, self.max_sequences);
            scratch += bytes.map_err(failed)?;
        }
        let draft_bytes = draft.map_or(0, |(_, bytes)| bytes);
        Ok(MemoryNeed {
            weight_bytes: self.loaded_bytes(&checkpoint, draft_bytes),
            scratch_bytes: scratch,
            kv: Some(kv),
            fixed_kv_bytes: 0,
            context_len: config.context_len,
            has_template: checkpoint.chat_template().is_some(),
            device: backend.description(),
            details: details(&checkpoint),
        })
    }

    /// Returns the memory that a model that computes vectors will take, like [`memory_need`](Builder::memory_need).
    pub fn embedding_memory_need(&self) -> Result<MemoryNeed, Error> {
        let checkpoint = Checkpoint::open(&self.path).map_err(Error::Open)?;
        let failed = |source| Error::Load { path: self.path.clone(), source: Box::new(source) };
        let is_encoder = pellucid_model::is_encoder(&checkpoint).map_err(failed)?;
        let (scratch_bytes, fixed_kv_bytes, context_len, device) = if is_encoder {
            let mut config = pellucid_model::read_encoder_config(&checkpoint).map_err(failed)?;
            config.context_len = self.context_len.unwrap_or(config.context_len);
            let options = DeviceOptions { device: Some(Device::Cpu), ..self.device };
            let backend = options.open(&mut |_| ())?;
            (encoder_step_bytes(&config), 0, config.context_len, backend.description())
        } else {
            let config = pellucid_model::read_config(&checkpoint).map_err(failed)?;
            let context_len = self.context_len.unwrap_or(config.context_len.min(DEFAULT_DECODER_CONTEXT));
            let config = DecoderConfig { context_len, ..config };
            let backend = self.device.open(&mut |_| ())?;
            let (step, kv) = self.pooled_bytes(&config, &*backend)?;
            (step, kv, context_len, backend.description())
        };
        Ok(MemoryNeed {
            weight_bytes: self.loaded_bytes(&checkpoint, 0),
            scratch_bytes,
            kv: None,
            fixed_kv_bytes,
            context_len,
            has_template: false,
            device,
            details: details(&checkpoint),
        })
    }

    /// Returns the bytes of a step, and of keys and values, of a decoder whose rows are pooled.
    fn pooled_bytes(&self, config: &DecoderConfig, backend: &dyn Backend) -> Result<(u64, u64), Error> {
        let failed = |source| Error::Load { path: self.path.clone(), source: Box::new(source) };
        let chunk_len = backend.chunk_len();
        let step = pellucid_model::step_bytes(config, backend, chunk_len, chunk_len).map_err(failed)?;
        let block = KvMemory::bytes_per_block(config, self.kv_type.dtype(), BLOCK_LEN);
        let block = block.map_err(|error| Error::Start(error.into()))? as u64;
        Ok((step, block * config.context_len.div_ceil(BLOCK_LEN).max(chunk_len) as u64))
    }

    fn limited(&self, config: DecoderConfig) -> DecoderConfig {
        let context_len = self.context_len.unwrap_or(config.context_len);
        DecoderConfig { context_len, ..config }
    }

    fn loaded_bytes(&self, checkpoint: &Checkpoint, draft_bytes: u64) -> u64 {
        let weight_bytes = checkpoint.weight_bytes() + draft_bytes;
        match self.file_access {
            FileAccess::Mapped => weight_bytes,
            _ => weight_bytes + checkpoint.file_bytes() + draft_bytes,
        }
    }
}

/// Returns the bytes of the activations of the largest step of an encoder: seven rows of the hidden size and two of the
/// MLP for each token, keys and values in blocks, and rotations, all in 32 bits.
fn encoder_step_bytes(config: &EncoderConfig) -> u64 {
    let rows = ENCODER_ROWS.max(config.context_len) as u64;
    let values = 10 * config.hidden_size as u64 + 2 * config.mlp_size as u64;
    // A text of one token takes a whole block; only a text alone in its step has more than `ENCODER_ROWS` tokens.
    let blocks = ENCODER_ROWS.max(config.context_len.div_ceil(BLOCK_LEN)) as u64;
    4 * (rows * values + blocks * 2 * (config.hidden_size * BLOCK_LEN) as u64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Pellucid, TINY_MODEL};

    #[test]
    fn the_need_is_that_of_the_loaded_model() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tiny.gguf");
        std::fs::write(&path, TINY_MODEL).unwrap();
        let builder = || Pellucid::builder(&path).device(Device::Cpu).context(64).max_sequences(2);
        let need = builder().memory_need().unwrap();
        let kv_bytes = need.kv_bytes(None, u64::MAX);
        assert_eq!(need.kv_bytes(None, 0) * 2, kv_bytes, "one context, and both");
        assert_eq!(need.kv_bytes(Some(5), 0), 5);
        let loaded = builder().kv_memory(kv_bytes).load().unwrap();
        assert_eq!((need.weight_bytes, need.scratch_bytes), (loaded.info.weight_bytes, loaded.info.scratch_bytes));
        assert_eq!(kv_bytes, loaded.info.kv_memory.bytes());
        assert_eq!((need.context_len, need.has_template), (64, loaded.model.template.is_some()));
        assert_eq!(need.device, loaded.info.device);
    }
}
