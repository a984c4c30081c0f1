//! Errors: parameters out of range, invalid logits, and no candidate left.

/// Why parameters are refused, or why no token can be sampled.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    #[error("{name}: expected {low} to {high}, found {found}")]
    OutOfRange { name: &'static str, low: f64, high: f64, found: f64 },
    #[error("{name}: expected at most {limit} entries, found {found}")]
    TooMany { name: &'static str, limit: usize, found: usize },
    #[error("{name}: expected at least one entry, found none")]
    Empty { name: &'static str },
    #[error("{name}: token {token} is listed twice")]
    ListedTwice { name: &'static str, token: u32 },
    #[error("{name}: token {token} is outside the vocabulary of {vocab_size}")]
    OutsideVocabulary { name: &'static str, token: u32, vocab_size: usize },
    #[error("{name}: every token is excluded, so no reply is possible; allow more tokens")]
    AllExcluded { name: &'static str },
    #[error("samplers: no step is called {found:?}; expected {expected}")]
    UnknownStep { found: String, expected: String },
    #[error("samplers: {step} is listed twice")]
    StepTwice { step: &'static str },
    #[error("samplers: {step} runs at a fixed position and cannot be listed")]
    StepFixed { step: &'static str },
    #[error("samplers: {step} is set but not listed, so it would do nothing; list it or leave it neutral")]
    StepLeftOut { step: &'static str },
    #[error("{step}: mirostat does its own truncation; leave {step} neutral or mirostat off")]
    MirostatTruncates { step: &'static str },
    #[error("{name} does nothing without {without}")]
    NoEffect { name: &'static str, without: &'static str },
    #[error("{name} does nothing at temperature 0, which takes the most probable token; raise the temperature")]
    NothingToMove { name: &'static str },
    #[error("preset: no preset is called {found:?}; expected {expected}")]
    UnknownPreset { found: String, expected: String },
    #[error("vocabulary: expected 1 to {limit} tokens, found {found}")]
    VocabularySize { limit: usize, found: usize },
    #[error("logits: expected {expected}, one per token, found {found}")]
    NumLogits { expected: usize, found: usize },
    #[error("mask: expected {expected} words of 32 tokens, found {found}")]
    MaskLength { expected: usize, found: usize },
    #[error("the model gave a logit that is not a number for token {token}")]
    NotANumber { token: u32 },
    #[error("every token is excluded; allow more tokens")]
    NothingLeft,
    /// The grammar of a reply cannot go on: its work exceeds a limit, or no token of the vocabulary fits.
    #[error("the grammar cannot be followed any further: {0}")]
    Grammar(String),
}
