//! A model that is open.

use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pellucid_engine::EngineStats;
use pellucid_generate::LoadedModel;

use crate::{Builder, Error, Loaded, ModelInfo};

/// A model that is open: weights on a device, behind an engine that serves many requests at once.
///
/// Cloning is cheap, and all clones share the engine; it stops when the last clone and the last reply are dropped.
#[derive(Clone)]
pub struct Pellucid {
    pub(crate) loaded: Arc<Loaded>,
}

impl Pellucid {
    /// Opens a GGUF file or a Hugging Face folder with default options: the first usable GPU, else the CPU.
    pub fn open(path: impl AsRef<Path>) -> Result<Pellucid, Error> {
        Pellucid::builder(path).open()
    }

    /// Returns a builder for a GGUF file or a Hugging Face folder.
    pub fn builder(path: impl AsRef<Path>) -> Builder {
        Builder::new(path)
    }

    /// Returns the maximum tokens of a prompt and its reply together.
    pub fn context_len(&self) -> usize {
        self.model().context_len
    }

    /// Whether the model has a usable chat template. Without one, [`Request::text`](crate::Request::text) works alone.
    pub fn can_chat(&self) -> bool {
        self.model().template.is_some()
    }

    /// Returns facts about the model, its device and its memory.
    pub fn info(&self) -> &ModelInfo {
        &self.loaded.info
    }

    /// Returns the engine's counters; waits for the step that is being computed.
    pub fn stats(&self) -> Result<EngineStats, Error> {
        self.model().engine.stats().map_err(Error::Failed)
    }

    /// Returns the tokens of a text, without the ids that a model expects before every text.
    pub fn tokenize(&self, text: &str) -> Vec<u32> {
        self.model().tokenizer.encode(text)
    }

    /// Returns the text of tokens; control tokens have none.
    pub fn detokenize(&self, ids: &[u32]) -> String {
        self.model().tokenizer.decode(ids, true)
    }

    /// Returns the model as [`pellucid_generate`] uses it.
    pub fn model(&self) -> &LoadedModel {
        &self.loaded.model
    }
}

impl From<Loaded> for Pellucid {
    fn from(loaded: Loaded) -> Pellucid {
        Pellucid { loaded: Arc::new(loaded) }
    }
}

impl fmt::Debug for Pellucid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ModelInfo { path, device, .. } = self.info();
        f.debug_struct("Pellucid").field("path", path).field("device", device).finish_non_exhaustive()
    }
}
