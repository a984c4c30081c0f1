#![doc = include_str!("../README.md")]
#![forbid(unsafe_code)]
#![deny(missing_docs)]
#![warn(clippy::print_stdout, clippy::print_stderr)]

mod builder;
mod device;
mod draft_model;
mod embedding_model;
mod error;
mod generate_all;
mod kv_events;
mod kv_type;
mod loading;
mod memory_need;
mod model;
mod recommended_sampling;
mod reply;
mod request;
mod speculation;
mod stream;
mod tiny_model;

pub use builder::Builder;
pub use device::{Device, DeviceError, DeviceOptions};
pub use draft_model::DraftInfo;
pub use embedding_model::{EmbeddingModel, LoadedEmbeddings};
pub use error::Error;
pub use kv_type::KvType;
pub use loading::{
    DeviceGroup, DeviceNeed, LoadEvent, LoadPhase, Loaded, ModelInfo, Ranks, Split, description, hash_notes,
    load_decoder, load_decoder_on_ranks, plan_kv_memory,
};
pub use memory_need::MemoryNeed;
pub use model::Pellucid;
pub use recommended_sampling::{Recommendation, recommended_sampling};
pub use reply::{Choice, Reply};
pub use request::{Message, Request};
pub use speculation::{Speculation, SpeculationError};
pub use stream::{AsyncReplyStream, ReplyStream};
pub use tiny_model::TINY_MODEL;

// Types of the crates below that appear in this crate's interface.
pub use pellucid_checkpoint::FileAccess;
pub use pellucid_cpu::Isa;
pub use pellucid_engine::{
    BeamParams, DraftCounts, DrafterKind, EarlyStopping, EngineStats, MemoryPlan, Overcommit, Proposal, Repetition,
    SpeculationStats, TenantId,
};
pub use pellucid_generate::{
    CallDelta, Delta, Finish, Guard, GuardError, Guards, ModelGuard, OnGuardError, Passage, PatternGuard, PromptText,
    Refusal, ReplyScanner, ReplyText, ReplyToken, ReplyTrace, Scan, ShorterVectors, Summary, Tool, ToolCall,
    ToolChoice, ToolError, Turn, Verdict, cosine,
};
pub use pellucid_model::{LoadOptions, Pooling};
pub use pellucid_sampling::{Logprobs, PELLUCID_DEFAULT, Preset, SamplingParams, StepKind, TokenTrace};
pub use pellucid_tokenizer::VocabularyDifference;
