//! Describes a checkpoint as a GGUF file: its keys, its tensor names, and how the values of each tensor are computed.
//!
//! For a Hugging Face folder, the description is read back by the code that reads every GGUF file. The result must be
//! the folder's configuration; a setting that the format cannot hold is an error that names it. Values are computed one
//! tensor at a time, when a tensor is written, so that a model larger than memory can be converted. `pellucid quantize`
//! calls this.

mod delta_net_map;
mod latent_attention_map;
mod mamba2_map;
mod recipe;
mod round_trip;
mod tensor_map;

use std::path::Path;

use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source, TensorSource};
use pellucid_tensor::{DType, SharedBytes};

use crate::Error;
use crate::architectures::{self, blueprint};
use crate::config::gguf_keys::GgufKeys;

use recipe::TensorRecipe;

/// A checkpoint described as a GGUF file.
#[derive(Debug)]
pub struct GgufModel<'a> {
    checkpoint: &'a Checkpoint,
    metadata: Metadata,
    tensors: Vec<GgufTensor>,
    left_out: Vec<String>,
}

/// A tensor of the file.
#[derive(Debug)]
pub struct GgufTensor {
    pub name: String,
    /// Format in the checkpoint.
    pub dtype: DType,
    pub shape: Vec<usize>,
    recipe: TensorRecipe,
}

impl<'a> GgufModel<'a> {
    /// Describes a checkpoint as a GGUF file. A GGUF file stays as it is. Returns an error for a family without a GGUF
    /// form.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<GgufModel<'a>, Error> {
        match checkpoint.source() {
            Source::Gguf(metadata) => {
                let tensors = checkpoint.tensors().iter().map(GgufTensor::unchanged).collect();
                Ok(GgufModel { checkpoint, metadata: metadata.clone(), tensors, left_out: Vec::new() })
            }
            Source::HuggingFace(_) => GgufModel::from_folder(checkpoint),
        }
    }

    fn from_folder(checkpoint: &'a Checkpoint) -> Result<GgufModel<'a>, Error> {
        let source = blueprint(checkpoint, None)?;
        let keys = GgufKeys::of(&source.config, architectures::gguf_name(checkpoint)?);
        let embedding = tensor_map::embedding(checkpoint, &source)?;
        let mut tensors: Vec<GgufTensor> = keys.factors.into_iter().map(GgufTensor::from_factors).collect();
        tensors.push(embedding);
        let mut model = GgufModel { checkpoint, metadata: keys.metadata, tensors, left_out: Vec::new() };
        // The model now has everything that a configuration is read from, so a reader can be tried on it.
        let target = blueprint(&model.checkpoint()?, None)?;
        round_trip::check(&source.config, &target.config)?;
        let (tensors, left_out) = tensor_map::tensors(checkpoint, &source, &target)?;
        model.tensors.extend(tensors);
        model.left_out = left_out;
        Ok(model)
    }

    /// Returns the keys of the file. A folder's tokenizer is not among them.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Returns the names of the folder's tensors that are not in the file, because they are no part of the decoder:
    /// those of a vision tower.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// Builds the whole file in memory, its tensors in their current formats.
    pub fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let tensors = self.tensors.iter().map(|tensor| {
            let (dtype, bytes) = tensor.recipe.bytes(self.checkpoint)?;
            Ok((NewTensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() }, bytes))
        });
        let tensors = tensors.collect::<Result<_, Error>>()?;
        let name = self.checkpoint.path().display().to_string();
        Ok(Checkpoint::in_memory(&name, self.metadata.clone(), tensors)?)
    }
}

impl TensorSource for GgufModel<'_> {
    fn path(&self) -> &Path {
        self.checkpoint.path()
    }

    fn tensor(&self, index: usize) -> Result<(DType, SharedBytes), pellucid_checkpoint::Error> {
        self.tensors[index].recipe.bytes(self.checkpoint)
    }
}
