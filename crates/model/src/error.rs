//! What can go wrong between a checkpoint and its logits.

use pellucid_tensor::DType;

use crate::{KvMemory, architectures};

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("architecture \"{found}\" is not supported; supported are {}", architectures::supported().join(", "))]
    UnsupportedArchitecture { found: String },
    #[error("{key}: missing from the model's configuration")]
    MissingSetting { key: String },
    #[error("{key}: expected {expected}, found {found}")]
    BadSetting { key: String, expected: String, found: String },
    #[error("tensor \"{name}\": expected the shape {expected:?}, found {found:?}")]
    BadShape { name: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("the file holds a vocabulary and no weights: its tokenizer can be used, but it cannot be run")]
    NoWeights,
    #[error("no tensor of the names {} is in the model", names.join(", "))]
    MissingTensor { names: Vec<String> },
    #[error("the model has {count} tensors that {architecture} does not use, such as \"{example}\"")]
    UnusedTensors { architecture: String, count: usize, example: String },
    #[error("the family {family} has no GGUF form; it is run from its folder")]
    NoGgufForm { family: &'static str },
    #[error(
        "a GGUF file cannot say all of this {family} model: {what} is {folder_has}, and would be read as {file_has}"
    )]
    LostInGguf { family: String, what: String, folder_has: String, file_has: String },
    #[error("a context of {asked} tokens was asked for, but the model was made for {limit} at most")]
    ContextTooLong { asked: usize, limit: usize },
    #[error("token id {id} in row {row} is outside the vocabulary of {vocab_size}")]
    IdOutsideVocabulary { id: u32, row: usize, vocab_size: usize },
    #[error("position {position} is outside the context of {context_len} tokens")]
    PositionOutsideContext { position: usize, context_len: usize },
    #[error("{dtype} is no format of KV memory; those are {}", KvMemory::FORMATS.map(DType::name).join(", "))]
    NoKvFormat { dtype: DType },
    #[error("KV memory in {dtype} holds heads of a multiple of {multiple} numbers, but this model's have {head_size}")]
    KvHeadSize { dtype: DType, multiple: usize, head_size: usize },
    #[error(transparent)]
    Checkpoint(#[from] pellucid_checkpoint::Error),
    #[error(transparent)]
    Device(#[from] pellucid_tensor::Error),
}
