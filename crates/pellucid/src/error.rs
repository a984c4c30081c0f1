//! The one error type of this crate. A variant says what failed; its `source()` says why.

use std::path::PathBuf;

use pellucid_engine::ContextDoesNotFit;
use pellucid_tokenizer::VocabularyDifference;

use crate::{DeviceError, KvType};

/// Why a model could not be opened, or a request not answered.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The path does not lead to a readable model file.
    #[error("the model file cannot be opened")]
    Open(#[source] pellucid_checkpoint::Error),
    /// The model is not supported, or its configuration or tensors are wrong.
    #[error("{}: the model cannot be loaded", path.display())]
    Load {
        /// Path of the model.
        path: PathBuf,
        /// The reason.
        source: Box<pellucid_model::Error>,
    },
    /// The model has no usable tokenizer.
    #[error("{}: the tokenizer cannot be read", path.display())]
    Tokenizer {
        /// Path of the model.
        path: PathBuf,
        /// The reason.
        source: Box<pellucid_tokenizer::Error>,
    },
    /// The draft model has another vocabulary than the model, so its proposals would be wrong.
    #[error(
        "the draft model {} and the model {} have different vocabularies: {difference}; use a draft model of the same \
         family",
        draft.display(), model.display()
    )]
    DraftVocabulary {
        /// Path of the model.
        model: PathBuf,
        /// Path of the draft model.
        draft: PathBuf,
        /// The first token that differs: in the draft model, then in the model.
        difference: VocabularyDifference,
    },
    /// The device cannot be used.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// This process is one of several ranks and not the first: it followed rank 0 until that shut down. No failure.
    #[error("rank {rank} ended with rank 0")]
    RankEnded {
        /// Number of the rank.
        rank: usize,
    },
    /// An encoder was to be opened on a GPU.
    #[error("cuda:{ordinal}: encoders run on the CPU only; select the CPU")]
    EncoderOnGpu {
        /// Number of the GPU.
        ordinal: usize,
    },
    /// One whole context does not fit into the KV cache.
    #[error(
        "the KV cache holds {} tokens in {kv_type}, but a whole context has {}: use a shorter context, a larger KV \
         memory or a smaller KV type",
        source.fits, source.context_len
    )]
    KvMemory {
        /// Number format of the keys and values.
        kv_type: KvType,
        /// The sizes.
        source: ContextDoesNotFit,
    },
    /// The engine could not be started.
    #[error("the engine cannot be started")]
    Start(#[source] pellucid_engine::Error),
    /// The messages or the text could not be made a prompt: no chat template, a role that it does not know, too long.
    #[error("the prompt cannot be encoded")]
    Prompt(#[source] pellucid_generate::Error),
    /// The model's chat template does not compile. Text prompts work without it.
    #[error("the model's chat template cannot be used: {reason}")]
    Template {
        /// The compiler's message, with the path of the model.
        reason: String,
    },
    /// The template of [`Builder::chat_template`](crate::Builder::chat_template) does not compile.
    #[error("the given chat template cannot be used")]
    GivenTemplate(#[source] Box<pellucid_tokenizer::Error>),
    /// A tenant's name that the builder did not declare.
    #[error("tenant {name:?} is not declared; declare it with `Builder::tenant`")]
    UnknownTenant {
        /// The name in the request.
        name: String,
    },
    /// An option of a request has a value that it cannot have.
    #[error("{name}: expected {expected}, found {found}")]
    Option {
        /// Name of the option.
        name: &'static str,
        /// Values that are allowed.
        expected: String,
        /// The value in the request.
        found: String,
    },
    /// The tools of a request, or the choice among them, are not valid.
    #[error("the tools cannot be used")]
    Tools(#[source] pellucid_generate::ToolError),
    /// The schema of a tool's arguments cannot be enforced, or the model's vocabulary cannot spell its calls.
    #[error("the tools cannot be used")]
    Grammar(#[source] pellucid_generate::GrammarError),
    /// The engine rejected the request before it started: sizes, sampling parameters, a full queue.
    #[error("the request was rejected")]
    Rejected(#[source] pellucid_engine::Error),
    /// A guard blocked the prompt, or could not judge it.
    #[error("the prompt was not accepted")]
    Blocked(#[source] pellucid_generate::Refusal),
    /// The request started and did not finish: the model, the device or the engine failed.
    #[error("the request failed")]
    Failed(#[source] pellucid_engine::Error),
}

impl Error {
    /// Whether the same request may succeed later: the queue was full.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Error::Rejected(pellucid_engine::Error::QueueFull))
    }
}
