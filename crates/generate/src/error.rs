//! Errors of turning messages or text into the token ids of a prompt.

/// Reason why messages or text could not become the token ids of a prompt.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A conversation needs a chat template.
    #[error("this model has no chat template")]
    NoChatTemplate,
    /// The template does not render the conversation.
    #[error(transparent)]
    Template(pellucid_tokenizer::Error),
    /// The template does not end with the text of the last message, so a reply would not continue it.
    #[error("the model's chat template does not write the last message as it is, so it cannot be continued")]
    LastMessageChanged,
    /// The model has no control tokens that mark a gap.
    #[error("this model was not trained to fill a gap between two texts")]
    NoFillIn,
    /// There is not enough memory to make the prompt.
    #[error("there is not enough memory for this prompt now; try again later")]
    OutOfMemory,
    /// The prompt's bytes need more tokens than the limit, however they are encoded.
    #[error("the prompt has at least {at_least} tokens, but the context holds {context_len}")]
    PromptTooLong {
        /// Fewest tokens that the text can have.
        at_least: usize,
        /// The limit, in tokens.
        context_len: usize,
    },
}

impl From<pellucid_tokenizer::Error> for Error {
    fn from(error: pellucid_tokenizer::Error) -> Error {
        match error {
            pellucid_tokenizer::Error::OutOfMemory { .. } => Error::OutOfMemory,
            error => Error::Template(error),
        }
    }
}
