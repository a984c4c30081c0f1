//! Errors of loading and running a model.

use pellucid_tensor::DType;

use crate::{KvMemory, Pooling, architectures};

/// Why a model could not be loaded, converted or run.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("architecture \"{found}\" is not supported; supported are {}", architectures::supported().join(", "))]
    UnsupportedArchitecture { found: String },
    #[error("architecture \"{architecture}\" is an encoder: it computes vectors of texts, and generates no text")]
    IsEncoder { architecture: String },
    #[error("{architecture} models need {what}, which {device} does not have; run the model on the CPU (--device cpu)")]
    NotOnDevice { architecture: String, what: &'static str, device: String },
    #[error("{architecture} models have {what}, which several ranks cannot share yet; run the model without --ranks")]
    NotOnRanks { architecture: String, what: &'static str },
    #[error(
        "layer {layer} reads the keys and values of layer {from}, so both must be on one device; place at least {} \
         layers on the first device", num_layers - from
    )]
    SharedAcrossDevices { layer: usize, from: usize, num_layers: usize },
    #[error("{num_ranks} ranks cannot share the {count} {what} of this {architecture} model; use at most {count}")]
    TooManyRanks { architecture: String, num_ranks: usize, what: &'static str, count: usize },
    #[error("rank {rank} cannot compute this model together with rank 0: {what} {own} there, and {first} on rank 0")]
    DifferentRanks { rank: usize, what: &'static str, own: String, first: String },
    #[error("a message between ranks is malformed: {reason}")]
    BadRankMessage { reason: String },
    #[error("{key}: missing from the model's configuration")]
    MissingSetting { key: String },
    #[error("{key}: expected {expected}, found {found}")]
    BadSetting { key: String, expected: String, found: String },
    #[error("tensor \"{name}\": expected the shape {expected:?}, found {found:?}")]
    BadShape { name: String, expected: Vec<usize>, found: Vec<usize> },
    #[error("the file holds a vocabulary but no weights: its tokenizer can be used, but the model cannot be run")]
    NoWeights,
    #[error("the model has none of the tensors {}", names.join(", "))]
    MissingTensor { names: Vec<String> },
    #[error("the model has {count} tensors that {architecture} does not use, such as \"{example}\"")]
    UnusedTensors { architecture: String, count: usize, example: String },
    #[error("{family} models have no GGUF form; run this one from its folder")]
    NoGgufForm { family: &'static str },
    #[error(
        "a GGUF file cannot hold every setting of this {family} model: {what} is {folder_has}, but would be read as \
         {file_has}"
    )]
    LostInGguf { family: String, what: String, folder_has: String, file_has: String },
    #[error("a context of {requested} tokens was requested, but the model supports at most {limit}")]
    ContextTooLong { requested: usize, limit: usize },
    #[error(
        "the model does not state how the rows of a text become one vector; choose one of {}",
        Pooling::ALL.map(Pooling::name).join(", ")
    )]
    NoPooling,
    #[error("a text without tokens has no vector")]
    EmptyText,
    #[error("row {row} takes its token from digest {digest}, but the last step made {num_digests} digests")]
    NoSuchDigest { digest: usize, row: usize, num_digests: usize },
    #[error("token id {id} in row {row} is outside the vocabulary of {vocab_size}")]
    IdOutsideVocabulary { id: u32, row: usize, vocab_size: usize },
    #[error("position {position} is outside the context of {context_len} tokens")]
    PositionOutsideContext { position: usize, context_len: usize },
    #[error(
        "keys and values cannot be stored in {dtype}; supported are {}",
        KvMemory::FORMATS.map(DType::name).join(", ")
    )]
    NoKvFormat { dtype: DType },
    #[error(
        "keys and values cannot be stored in {dtype}: the head size must be a multiple of {multiple}, but this \
         model's is {head_size}"
    )]
    KvHeadSize { dtype: DType, multiple: usize, head_size: usize },
    #[error(
        "this model has no layer that predicts further tokens: its files have no tensor \"{tensor}\"; --speculate mtp \
         needs one"
    )]
    NoPredictor { tensor: String },
    #[error(
        "the layer of {architecture} models that predicts further tokens is not supported; run the model without \
         --speculate mtp"
    )]
    PredictorNotSupported { architecture: String },
    #[error("a model of several ranks or on several devices cannot be probed")]
    NoProbe,
    #[error(transparent)]
    Checkpoint(#[from] pellucid_checkpoint::Error),
    #[error(transparent)]
    Device(#[from] pellucid_tensor::Error),
}
