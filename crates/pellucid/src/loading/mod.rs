//! The steps of opening a model: weights onto a device, KV memory, the prefix that all tenants share.
//!
//! [`Builder::open`](crate::Builder::open) calls them in order. Programs that drive a model without an engine, such as
//! benchmarks, call the public ones directly.

mod devices;
mod loaded;
mod ranks;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use pellucid_checkpoint::{Checkpoint, Source};
use pellucid_engine::{KvBudget, KvNeed, MemoryPlan, WindowBytes, state_need, window_need};
use pellucid_generate::{ChatPrompt, ModelDetails, PromptEncoder, PromptEnd, utc_now};
use pellucid_model::{
    BLOCK_LEN, Decoder, DecoderConfig, Devices, Error as ModelError, KvMemory, LoadOptions, Model as _, Placement,
};
use pellucid_tensor::Backend;
use pellucid_tokenizer::{ChatTemplate, DateTime, Tokenizer, message};

use crate::{Error, KvType};

pub use devices::{DeviceGroup, DeviceNeed, Split, description};
pub use loaded::{Loaded, ModelInfo};
pub use ranks::{Ranks, load_decoder_on_ranks};

/// Something to report while a model is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadEvent {
    /// A sentence that a user may want to read, such as why a GPU was skipped.
    Note(String),
    /// The next part of opening a model begins.
    Phase(LoadPhase),
    /// Tensors are on the device.
    Weights {
        /// Tensors loaded so far.
        loaded: usize,
        /// Tensors of the model.
        total: usize,
    },
}

/// A part of opening a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum LoadPhase {
    /// The model's files are mapped, or read into memory, and their headers checked.
    Files,
    /// The vocabulary and the chat template are read.
    Vocabulary,
    /// The files of the draft model are read, and its vocabulary is compared.
    DraftModel,
    /// The device is opened.
    Device,
    /// The weights are packed in the order in which the device's kernels read them.
    Weights,
    /// Memory for keys and values is reserved, and the engine started.
    Memory,
}

impl fmt::Display for LoadPhase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            LoadPhase::Files => "reading the files",
            LoadPhase::Vocabulary => "reading the vocabulary",
            LoadPhase::DraftModel => "reading the draft model",
            LoadPhase::Device => "opening the device",
            LoadPhase::Weights => "packing the weights",
            LoadPhase::Memory => "reserving memory",
        })
    }
}

/// Returns a note for each weight file that was read into memory: its SHA-256, and whether it is the expected one.
pub fn hash_notes(checkpoint: &Checkpoint) -> impl Iterator<Item = String> {
    checkpoint.hashes().iter().map(|hash| {
        let known = if hash.verified { "as recorded" } else { "not compared: no hash is recorded for this file" };
        format!("note: {} was read into memory, sha256 {} ({known})", hash.path.display(), hash.sha256)
    })
}

/// Loads the weights of a checkpoint onto a device.
pub fn load_decoder(
    checkpoint: &Checkpoint,
    options: LoadOptions,
    backend: &Arc<dyn Backend>,
    on_event: &mut dyn FnMut(LoadEvent),
) -> Result<Decoder, Error> {
    load_decoder_by(checkpoint, options, backend, on_event, |progress| {
        Decoder::load(checkpoint, backend.clone(), options, progress)
    })
}

/// Loads a decoder with `load`, which reports its progress, and adds the notes about the checkpoint and the device.
pub(crate) fn load_decoder_by(
    checkpoint: &Checkpoint,
    options: LoadOptions,
    backend: &Arc<dyn Backend>,
    on_event: &mut dyn FnMut(LoadEvent),
    load: impl FnOnce(&mut dyn FnMut(usize, usize)) -> Result<Decoder, ModelError>,
) -> Result<Decoder, Error> {
    on_event(LoadEvent::Phase(LoadPhase::Weights));
    let loaded = load(&mut |loaded, total| on_event(LoadEvent::Weights { loaded, total }));
    for remark in checkpoint.notes().iter().cloned().chain(backend.remarks()) {
        on_event(LoadEvent::Note(remark));
    }
    let config = loaded.as_ref().ok().map(Decoder::config);
    let left_out = match config.map(|config| (config.leaves_out_images, config.leaves_out_audio)) {
        Some((true, true)) => Some("images and audio"),
        Some((true, false)) => Some("images"),
        Some((false, true)) => Some("audio"),
        _ => None,
    };
    if let Some(left_out) = left_out {
        on_event(LoadEvent::Note(format!("this model also takes {left_out}; its text part alone was loaded")));
    }
    // With a predictor, these are copies of embedding and output, or further layers.
    let predicting = loaded.as_ref().map_or(&[][..], Decoder::predicting_tensors);
    if let Some((first, others)) = predicting.split_first().filter(|_| !options.predictor) {
        let count = others.len() + 1;
        on_event(LoadEvent::Note(format!(
            "the layers that predict further tokens were not loaded (--speculate mtp loads one): {count} tensors, the \
             first is {first}"
        )));
    }
    loaded.map_err(|source| Error::Load { path: checkpoint.path().to_owned(), source: Box::new(source) })
}

/// Returns what listings show of a checkpoint.
pub(crate) fn details(checkpoint: &Checkpoint) -> ModelDetails {
    let mut bytes_by_type: BTreeMap<&str, usize> = BTreeMap::new();
    for tensor in checkpoint.tensors() {
        *bytes_by_type.entry(tensor.encoding().unwrap_or(tensor.dtype.name())).or_default() += tensor.num_bytes();
    }
    let most = bytes_by_type.into_iter().max_by_key(|(_, bytes)| *bytes);
    ModelDetails {
        format: match checkpoint.source() {
            Source::Gguf(_) => "gguf",
            Source::HuggingFace(_) => "safetensors",
        },
        family: checkpoint.architecture().unwrap_or_default().to_owned(),
        num_parameters: checkpoint.tensors().iter().map(|tensor| tensor.num_elements() as u64).sum(),
        quantization: most.map_or_else(String::new, |(name, _)| name.to_owned()),
        num_bytes: checkpoint.file_bytes(),
    }
}

/// Returns the size of the KV cache: `num_contexts` whole contexts as far as the budget allows, at least one. A draft
/// model has as many blocks, which come out of the same budget.
///
/// `kv_memory` is the budget in bytes; `None` is a share of the free memory of each device. With several ranks, it is
/// that of one rank, and the free memory is divided by their number, as if all were on this machine.
///
/// `snapshot_distance` is that of [`EngineOptions`](pellucid_engine::EngineOptions).
pub fn plan_kv_memory(
    config: &DecoderConfig,
    draft: Option<&DecoderConfig>,
    devices: &Devices,
    kv_type: KvType,
    kv_memory: Option<u64>,
    num_contexts: usize,
    snapshot_distance: Option<usize>,
) -> Result<MemoryPlan, Error> {
    let need = kv_need(config, draft, devices, kv_type, num_contexts, snapshot_distance)?;
    let budget = match kv_memory {
        Some(bytes) => KvBudget::Bytes(bytes),
        None => {
            let of_rank = |bytes: u64| KvBudget::OutOf(bytes / config.num_ranks as u64);
            devices.output().free_memory().map_or(KvBudget::Unknown, of_rank)
        }
    };
    let plan = |need, budget| MemoryPlan::new(need, budget).map_err(|source| Error::KvMemory { kv_type, source });
    let (Some(placement), None) = (devices.placement(), kv_memory) else { return plan(need, budget) };
    // The device with the least room for its part decides.
    let mut whole = plan(need, KvBudget::Unknown)?;
    for (device, backend) in devices.backends().iter().enumerate() {
        let part = need_on(device, placement, config, kv_type, &need);
        if part.bytes_per_block > 0 {
            let budget = backend.free_memory().map_or(KvBudget::Unknown, KvBudget::OutOf);
            whole.num_blocks = whole.num_blocks.min(plan(part, budget)?.num_blocks);
        }
    }
    Ok(whole)
}

/// Returns the part of a need that a device has: that of its layers. The draft model is on the device of the output.
fn need_on(device: usize, placement: &Placement, config: &DecoderConfig, kv_type: KvType, all: &KvNeed) -> KvNeed {
    let sum = |bytes: &dyn Fn(usize) -> u64| placement.layers_of(device).map(bytes).sum::<u64>();
    let block = sum(&|layer| config.kv_bytes_of_layer(layer, kv_type.dtype(), BLOCK_LEN));
    let state = sum(&|layer| config.state_bytes_of_layer(layer));
    let of_states = |bytes: u64| match config.state_bytes() as u64 {
        0 => 0,
        total => (u128::from(bytes) * u128::from(state) / u128::from(total)) as u64,
    };
    KvNeed {
        bytes_per_block: block,
        windows: None,
        draft_bytes_per_block: if device == placement.output { all.draft_bytes_per_block } else { 0 },
        snapshot_bytes_per_block: of_states(all.snapshot_bytes_per_block),
        state_bytes: of_states(all.state_bytes),
        ..*all
    }
}

/// Returns the contexts that the KV cache of a model and its draft model should hold.
pub(crate) fn kv_need(
    config: &DecoderConfig,
    draft: Option<&DecoderConfig>,
    devices: &Devices,
    kv_type: KvType,
    num_contexts: usize,
    snapshot_distance: Option<usize>,
) -> Result<KvNeed, Error> {
    let bytes_per_block = |config: &DecoderConfig| {
        let bytes = KvMemory::bytes_per_block(config, kv_type.dtype(), BLOCK_LEN);
        bytes.map(|bytes| bytes as u64).map_err(|error| Error::Start(error.into()))
    };
    let block = bytes_per_block(config)?;
    let (snapshot_bytes_per_block, state_bytes) = state_need(config, block as usize, num_contexts, snapshot_distance);
    let step_tokens = step_tokens(&**devices.output(), num_contexts);
    let windows = window_need(config, devices, BLOCK_LEN, num_contexts, step_tokens).map(|need| WindowBytes {
        bytes_per_block: KvMemory::window_bytes_per_block(config, kv_type.dtype(), BLOCK_LEN) as u64,
        need,
    });
    Ok(KvNeed {
        bytes_per_block: block,
        windows,
        draft_bytes_per_block: draft.map_or(Ok(0), bytes_per_block)?,
        snapshot_bytes_per_block,
        state_bytes,
        block_len: BLOCK_LEN,
        context_len: config.context_len,
        num_contexts,
    })
}

/// Returns the maximum rows of a step.
pub(crate) fn step_tokens(backend: &dyn Backend, max_sequences: usize) -> usize {
    backend.chunk_len().max(max_sequences)
}

/// Returns the ids that every conversation with this system prompt begins with, whatever the user writes on whatever
/// day. Adds a note when the template writes the date before the system prompt ends, which shortens the prefix.
pub(crate) fn shared_prefix(
    system: &str,
    tokenizer: &Tokenizer,
    template: Option<&ChatTemplate>,
    on_event: &mut dyn FnMut(LoadEvent),
) -> Result<Vec<u32>, Error> {
    let ids = |user: &str, now: fn() -> DateTime| {
        let messages = [message("system", system), message("user", user)];
        let prompt = ChatPrompt { end: PromptEnd::Closed, ..ChatPrompt::new(&messages) };
        PromptEncoder::new(tokenizer, template, now).encode_chat(&prompt).map_err(Error::Prompt)
    };
    let common = |one: &[u32], other: &[u32]| one.iter().zip(other).take_while(|(one, other)| one == other).count();
    // Two messages that share no character differ from their first token on.
    let one = ids("a", utc_now)?;
    let on_one_day = common(&one, &ids("1", utc_now)?);
    let on_every_day = common(&one, &ids("1", another_day)?).min(on_one_day);
    if on_every_day < on_one_day {
        on_event(LoadEvent::Note(format!(
            "the chat template writes the date before the shared system prompt ends: {on_every_day} of its \
             {on_one_day} tokens are shared"
        )));
    }
    Ok(one[..on_every_day].to_vec())
}

fn another_day() -> DateTime {
    DateTime { year: 2001, month: 2, day: 3, hour: 4, minute: 5, second: 6 }
}
