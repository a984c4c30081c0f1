//! Why a request was refused or ended early.

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("the prompt is empty: a model needs at least one token to continue from")]
    EmptyPrompt,
    #[error("the prompt has {prompt} tokens, but the context holds {context}, of which one is needed for the reply")]
    PromptTooLong { prompt: usize, context: usize },
    #[error(transparent)]
    Model(#[from] pellucid_model::Error),
    #[error(transparent)]
    Sampling(#[from] pellucid_sampling::Error),
}
