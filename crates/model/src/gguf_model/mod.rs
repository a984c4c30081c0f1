//! A model as the GGUF file that it is, or that a Hugging Face folder becomes: keys, names, and how the numbers of each tensor are made.
//!
//! The file is described first and read back by the same code that reads any GGUF file. What comes out must be the folder's own
//! configuration; a setting that the format cannot say is refused by name and not lost. Numbers are made when a tensor is asked for, one
//! tensor at a time, so that a model larger than memory can be written. `pellucid quantize` calls this.

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

/// A checkpoint in the form of a GGUF file.
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
    /// The format in which the checkpoint has it.
    pub dtype: DType,
    pub shape: Vec<usize>,
    recipe: TensorRecipe,
}

impl<'a> GgufModel<'a> {
    /// Describes a checkpoint as a GGUF file; one that is such a file stays as it is. Refuses a family that has no such form.
    pub fn new(checkpoint: &'a Checkpoint) -> Result<GgufModel<'a>, Error> {
        match checkpoint.source() {
            Source::Gguf(metadata) => {
                let tensors = checkpoint.tensors().iter().map(GgufTensor::as_it_is).collect();
                Ok(GgufModel { checkpoint, metadata: metadata.clone(), tensors, left_out: Vec::new() })
            }
            Source::HuggingFace(_) => GgufModel::of_folder(checkpoint),
        }
    }

    fn of_folder(checkpoint: &'a Checkpoint) -> Result<GgufModel<'a>, Error> {
        let source = blueprint(checkpoint, None)?;
        let keys = GgufKeys::of(&source.config, architectures::gguf_name(checkpoint)?);
        let embedding = tensor_map::embedding(checkpoint, &source)?;
        let mut tensors: Vec<GgufTensor> = keys.factors.into_iter().map(GgufTensor::of_factors).collect();
        tensors.push(embedding);
        let mut model = GgufModel { checkpoint, metadata: keys.metadata, tensors, left_out: Vec::new() };
        // Everything that a configuration is read from is there: what would a reader make of it?
        let target = blueprint(&model.checkpoint()?, None)?;
        round_trip::check(&source.config, &target.config)?;
        let (tensors, left_out) = tensor_map::tensors(checkpoint, &source, &target)?;
        model.tensors.extend(tensors);
        model.left_out = left_out;
        Ok(model)
    }

    /// The keys of the file. A folder's tokenizer is not among them.
    pub fn metadata(&self) -> &Metadata {
        &self.metadata
    }

    pub fn tensors(&self) -> &[GgufTensor] {
        &self.tensors
    }

    /// Names of the folder's tensors that the file does not have, because the decoder does not use them: the part that sees images.
    pub fn left_out(&self) -> &[String] {
        &self.left_out
    }

    /// The whole file in memory, its tensors in the formats that they come in.
    pub fn checkpoint(&self) -> Result<Checkpoint, Error> {
        let made = self.tensors.iter().map(|tensor| {
            let (dtype, bytes) = tensor.recipe.bytes(self.checkpoint)?;
            Ok((NewTensor { name: tensor.name.clone(), dtype, shape: tensor.shape.clone() }, bytes))
        });
        let tensors = made.collect::<Result<_, Error>>()?;
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
