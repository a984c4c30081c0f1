//! Why a request was refused, or ended without a complete reply.

/// An error of one request, or of the whole engine ([`Error::Stopped`], [`Error::DeviceLost`]).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// The prompt has no tokens.
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    /// The prompt leaves no token of the context for a reply.
    #[error("the prompt has {prompt} tokens, but the context holds {context}, of which one is needed for the reply")]
    PromptTooLong {
        /// Tokens of the prompt.
        prompt: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// A text whose vector is wanted is longer than the model's context.
    #[error("the text has {text} tokens, but the model's context holds {context}")]
    TextTooLong {
        /// Tokens of the text, with those that the model expects before and after it.
        text: usize,
        /// Tokens of the context.
        context: usize,
    },
    /// The prompt has an id that the model does not know.
    #[error("token id {id} of the prompt is outside the vocabulary: expected an id below {vocab_size}")]
    IdOutsideVocabulary {
        /// The id.
        id: u32,
        /// Number of ids that the model knows.
        vocab_size: usize,
    },
    /// A number of the request is outside its range.
    #[error("{name}: expected {expected}, found {found}")]
    OutOfRange {
        /// Name of the parameter.
        name: &'static str,
        /// The allowed range.
        expected: String,
        /// The value of the request.
        found: String,
    },
    /// A parameter that has no effect in a beam search.
    #[error("{name} cannot be used with beam search")]
    NotWithBeams {
        /// Name of the parameter.
        name: &'static str,
    },
    /// The request could need more KV memory than there is.
    #[error("the request needs {needed} blocks of KV memory, but there are only {have}; lower max_tokens")]
    ExceedsKvMemory {
        /// Blocks that the request could need.
        needed: usize,
        /// Blocks of the whole KV memory.
        have: usize,
    },
    /// The request could need more KV memory than its tenant may hold.
    #[error("the request needs {needed} blocks of KV memory, but its tenant's quota is {quota}; lower max_tokens")]
    ExceedsQuota {
        /// Blocks that the request could need.
        needed: usize,
        /// Maximum blocks of the tenant.
        quota: usize,
    },
    /// A draft model's sequences are cut back after every draft, which a recurrent state does not allow.
    #[error("{architecture} models have recurrent state and cannot draft; choose a draft model without")]
    StatefulDraftModel {
        /// Family of the draft model.
        architecture: String,
    },
    /// The queue has no place for the request now, or its tenant holds its share of the places. The text has no
    /// numbers, because they would tell of other tenants' requests.
    #[error("the queue is full; try again later")]
    QueueFull,
    /// Someone else than its reader cancelled the request.
    #[error("the request was cancelled")]
    Cancelled,
    /// The engine's loop has ended.
    #[error("the engine has stopped")]
    Stopped,
    /// The model or its device failed. The requests of that step end; the engine goes on.
    #[error("the model failed: {0}")]
    Model(String),
    /// The device had no memory for a step. The requests of that step end; the engine goes on.
    #[error("{0}")]
    OutOfMemory(String),
    /// The device is lost, and the model with it. Every request ends, and the engine stops.
    #[error("{0}; the engine has stopped")]
    DeviceLost(String),
    /// The sampling parameters are invalid, or the logits are not numbers.
    #[error(transparent)]
    Sampling(#[from] pellucid_sampling::Error),
    /// A bug in the engine or the model panicked while it served this request; other requests are not affected.
    #[error("an internal error ended this request: {0}")]
    Internal(String),
}

impl From<pellucid_model::Error> for Error {
    fn from(error: pellucid_model::Error) -> Error {
        use pellucid_tensor::Error as Device;
        let text = error.to_string();
        match error {
            pellucid_model::Error::Device(Device::OutOfMemory { .. }) => Error::OutOfMemory(text),
            pellucid_model::Error::Device(Device::Lost { .. }) => Error::DeviceLost(text),
            _ => Error::Model(text),
        }
    }
}
