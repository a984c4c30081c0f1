//! Errors on the way from messages to token ids.

/// Why a prompt could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A conversation needs a chat template.
    #[error("this model has no chat template")]
    NoChatTemplate,
    /// The template does not render the conversation.
    #[error(transparent)]
    Template(#[from] pellucid_tokenizer::Error),
    /// The prompt's bytes need more tokens than the limit, however they are encoded.
    #[error("the prompt has at least {at_least} tokens, but the context holds {context_len}")]
    PromptTooLong {
        /// Fewest tokens that the text can have.
        at_least: usize,
        /// The limit, in tokens.
        context_len: usize,
    },
}
