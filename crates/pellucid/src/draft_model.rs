//! Opens a draft model: a smaller model with the vocabulary of the one that it drafts for, on the same device.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_checkpoint::{Checkpoint, FileAccess};
use pellucid_model::{Decoder, DecoderConfig, LoadOptions};
use pellucid_tensor::Backend;
use pellucid_tokenizer::{Tokenizer, VocabularyDifference};

use crate::loading::{hash_notes, load_decoder};
use crate::{Error, LoadEvent, LoadPhase};

/// A draft model whose files are open and whose vocabulary is that of the model.
pub(crate) struct DraftFiles {
    checkpoint: Checkpoint,
    /// Maximum context of the draft model itself.
    context_len: usize,
}

/// Facts about a draft model that is open.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct DraftInfo {
    /// Path that it was opened from.
    pub path: PathBuf,
    /// Size of its weight files in bytes.
    pub weight_bytes: u64,
    /// Bytes of its keys and values.
    pub kv_bytes: u64,
}

impl DraftFiles {
    /// Opens the files of a draft model for the model at `model` with `tokenizer`. A wrong one is refused before
    /// weights are loaded.
    pub(crate) fn open(
        path: &Path,
        access: &FileAccess,
        model: &Path,
        tokenizer: &Tokenizer,
        on_event: &mut dyn FnMut(LoadEvent),
    ) -> Result<DraftFiles, Error> {
        on_event(LoadEvent::Phase(LoadPhase::DraftModel));
        let checkpoint = Checkpoint::open_with(path, access).map_err(Error::Open)?;
        hash_notes(&checkpoint).for_each(|note| on_event(LoadEvent::Note(note)));
        let config = pellucid_model::read_config(&checkpoint)
            .map_err(|source| Error::Load { path: path.to_owned(), source: Box::new(source) })?;
        let own = Tokenizer::from_checkpoint(&checkpoint)
            .map_err(|source| Error::Tokenizer { path: path.to_owned(), source: Box::new(source) })?;
        match VocabularyDifference::find(&own, tokenizer) {
            None => Ok(DraftFiles { checkpoint, context_len: config.context_len }),
            Some(difference) => {
                Err(Error::DraftVocabulary { model: model.to_owned(), draft: path.to_owned(), difference })
            }
        }
    }

    /// Loads the weights, with the context of the model or its own if that is shorter.
    pub(crate) fn load(
        &self,
        context_len: usize,
        backend: &Arc<dyn Backend>,
        on_event: &mut dyn FnMut(LoadEvent),
    ) -> Result<Decoder, Error> {
        let options = LoadOptions { context_len: Some(context_len.min(self.context_len)), ..LoadOptions::default() };
        load_decoder(&self.checkpoint, options, backend, on_event)
    }

    /// Returns the configuration that [`DraftFiles::load`] uses.
    pub(crate) fn config(&self, context_len: usize) -> Result<DecoderConfig, pellucid_model::Error> {
        let config = pellucid_model::read_config(&self.checkpoint)?;
        Ok(DecoderConfig { context_len: context_len.min(self.context_len), ..config })
    }

    pub(crate) fn info(&self, kv_bytes: u64) -> DraftInfo {
        let checkpoint = &self.checkpoint;
        DraftInfo { path: checkpoint.path().to_owned(), weight_bytes: checkpoint.weight_bytes(), kv_bytes }
    }
}
