//! Why a request was refused, or ended without a complete reply.

/// An error of one request, or of the whole engine ([`Error::Stopped`], [`Error::DeviceLost`]).
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("the prompt is empty: expected at least one token")]
    EmptyPrompt,
    #[error("the prompt has {prompt} tokens, but the context holds {context}, of which one is needed for the reply")]
    PromptTooLong { prompt: usize, context: usize },
    #[error("token id {id} of the prompt is outside the vocabulary: expected an id below {vocab_size}")]
    IdOutsideVocabulary { id: u32, vocab_size: usize },
    #[error("{name}: expected {expected}, found {found}")]
    OutOfRange { name: &'static str, expected: String, found: String },
    #[error("{name} cannot be used with beam search")]
    NotWithBeams { name: &'static str },
    #[error("the request needs {needed} blocks of KV memory, but there are only {have}; lower max_tokens")]
    ExceedsKvMemory { needed: usize, have: usize },
    #[error("the request needs {needed} blocks of KV memory, but its tenant's quota is {quota}; lower max_tokens")]
    ExceedsQuota { needed: usize, quota: usize },
    #[error("the queue is full: {waiting} requests are waiting; try again later")]
    QueueFull { waiting: usize },
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
