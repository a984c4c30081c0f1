//! From token ids to logits: one decoder for every supported family, driven by a configuration. From token ids to
//! vectors: one encoder for BERT and its successors, and decoders whose rows are pooled.
//!
//! `engine` builds a [`Batch`] for each step and calls [`Model::forward`]. A `Backend`, which the program chooses, does
//! the arithmetic. This crate knows no text, no request and no sampling.

#![forbid(unsafe_code)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod activations;
mod architectures;
mod batch;
mod config;
mod decoder;
mod devices;
mod embedding;
mod encoder;
mod error;
mod gguf_model;
mod kv_memory;
mod layer_input;
mod loader;
mod logits;
mod mixer;
mod mlp;
mod model;
mod predictor;
mod probe;
mod quant_scheme;
mod ranks;
mod rope;
mod sinusoidal;
mod synthetic;
mod weights;

pub use architectures::supported;
pub use batch::{Batch, Chunk, ChunkIds, ChunkState};
pub use config::{
    DecoderConfig, Experts, KeyHeads, LatentAttention, LayerConfig, Mixer, MlpKind, NormKind, Positions, QkNorm,
    ShortConvolutionConfig,
};
pub use decoder::{Decoder, LoadOptions, read_config, read_config_with, step_bytes};
pub use devices::{DeviceIndex, Devices, LayerDevices, PartBytes, Placement};
pub use embedding::{DecoderEmbedder, Embedder, EmbedderInfo, EmbeddingText, Pooling, stated_pooling};
pub use encoder::{
    ClassifierConfig, Encoder, EncoderConfig, EncoderLayer, EncoderPositions, HeadActivation, NormPlacement,
    is_encoder, read_encoder_config, supported_encoders,
};
pub use error::Error;
pub use gguf_model::{GgufModel, GgufTensor};
pub use kv_memory::{BLOCK_LEN, KvMemory};
pub use logits::Logits;
pub use model::Model;
pub use probe::{AttentionQuery, AttentionRows, ProbeQuery};
pub use quant_scheme::{QuantScheme, TensorRole};
pub use ranks::{GatherStats, GroupMember, RankIdentity};
pub use rope::{RopeConfig, RopeFrequencies, RopeScaling};
pub use synthetic::SyntheticModel;
pub use weights::TokenCost;
