//! A model that is open, and the facts about it.

use std::path::PathBuf;

use pellucid_engine::MemoryPlan;
use pellucid_generate::LoadedModel;

use crate::draft_model::DraftInfo;
use crate::{KvType, Speculation};

/// A model with a running engine and the facts about it, for programs that use [`pellucid_generate`] directly.
#[derive(Debug)]
pub struct Loaded {
    /// The model. Its `fingerprint` is empty.
    pub model: LoadedModel,
    /// Facts about it.
    pub info: ModelInfo,
    /// Names of the tenants; the first has the id 1. Id 0 is the tenant without a name.
    pub tenants: Vec<String>,
}

/// Facts about a model that is open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct ModelInfo {
    /// Path that it was opened from.
    pub path: PathBuf,
    /// Files that hold its weights.
    pub files: Vec<PathBuf>,
    /// Size of these files in bytes.
    pub weight_bytes: u64,
    /// The device in words, such as `cpu (avx512, 2 threads)`.
    pub device: String,
    /// Number format of the KV cache.
    pub kv_type: KvType,
    /// Size of the KV cache, that of the draft model included.
    pub kv_memory: MemoryPlan,
    /// Scratch memory: bytes of the activations and logits of the largest step.
    pub scratch_bytes: u64,
    /// The draft model, if there is one.
    pub draft: Option<DraftInfo>,
    /// Drafters that propose tokens.
    pub speculation: Speculation,
}
