//! The error type of this crate. Every variant says what was read, what was expected and what was found.

/// A tokenizer or a chat template that could not be built, or a conversation that could not be rendered.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Checkpoint(#[from] pellucid_checkpoint::Error),

    #[error("the model has no tokenizer: {0}")]
    Missing(&'static str),

    #[error("tokenizer model {found:?} is not supported; supported are {}", supported.join(", "))]
    UnsupportedModel { found: String, supported: &'static [&'static str] },

    #[error("pre-tokenizer {found:?} is not supported; supported are {}", supported.join(", "))]
    UnsupportedPreTokenizer { found: String, supported: Vec<&'static str> },

    #[error("the tokenizer has no GGUF form: {0}")]
    NoGgufForm(&'static str),

    #[error("{key}: expected {expected}, found {found}")]
    Invalid { key: String, expected: String, found: String },

    /// Not the fault of the text: it may succeed later.
    #[error("there is not enough memory for a text of {bytes} bytes now; try again later")]
    OutOfMemory { bytes: usize },

    #[error("chat template does not compile: {0}")]
    TemplateSyntax(String),

    #[error("chat template failed: {0}")]
    TemplateRender(String),

    /// The template called `raise_exception`: the model was not trained on such a conversation.
    #[error("the model's chat template refuses this conversation: {0}")]
    TemplateRefused(String),

    #[error("message {index}: role {role:?} is not one of {}", allowed.join(", "))]
    UnknownRole { index: usize, role: String, allowed: &'static [&'static str] },

    #[error("chat template needs more than {limit} bytes of memory for this conversation")]
    TemplateTooLarge { limit: usize },

    #[error("chat template needs more than {limit} units of work for this conversation")]
    TemplateTooSlow { limit: u64 },

    /// The caller cancelled the rendering.
    #[error("rendering the chat template was cancelled")]
    Cancelled,
}

impl Error {
    pub(crate) fn invalid(key: impl Into<String>, expected: impl Into<String>, found: impl ToString) -> Self {
        Error::Invalid { key: key.into(), expected: expected.into(), found: found.to_string() }
    }
}
