//! The trait that the engine's embedding loop runs: texts in, one vector for each out.

mod pooled_decoder;
mod pooling;

use crate::Error;
pub use pooled_decoder::{DecoderEmbedder, stated_pooling};
pub use pooling::Pooling;

/// Facts about a model that computes vectors.
#[derive(Debug, Clone, PartialEq)]
pub struct EmbedderInfo {
    pub architecture: String,
    /// Number of values of a vector.
    pub num_dimensions: usize,
    /// Whether it is a cross-encoder: a text is a pair, and its vector one value, its relevance from 0 to 1.
    pub scores_pairs: bool,
    /// Maximum tokens of a text.
    pub context_len: usize,
    pub vocab_size: usize,
    pub pooling: Pooling,
}

/// The tokens of a text, with those that the model expects before and after it.
#[derive(Debug, Clone, Copy)]
pub struct EmbeddingText<'a> {
    pub ids: &'a [u32],
    /// Index at which the second text of a pair begins; the number of ids if there is none.
    pub second_at: usize,
}

impl<'a> EmbeddingText<'a> {
    /// One text, not a pair.
    pub fn new(ids: &'a [u32]) -> EmbeddingText<'a> {
        EmbeddingText { ids, second_at: ids.len() }
    }
}

impl EmbedderInfo {
    /// Refuses texts without tokens, texts that are too long, and ids outside the vocabulary.
    pub fn check(&self, text: &EmbeddingText<'_>) -> Result<(), Error> {
        if text.ids.is_empty() {
            return Err(Error::EmptyText);
        }
        if text.ids.len() > self.context_len {
            return Err(Error::PositionOutsideContext { position: self.context_len, context_len: self.context_len });
        }
        match text.ids.iter().enumerate().find(|(_, id)| **id as usize >= self.vocab_size) {
            Some((row, &id)) => Err(Error::IdOutsideVocabulary { id, row, vocab_size: self.vocab_size }),
            None => Ok(()),
        }
    }
}

/// Computes vectors from token ids: an encoder, or a decoder whose rows are pooled.
pub trait Embedder: Send {
    fn info(&self) -> &EmbedderInfo;

    /// Appends the vector of each text to `out`, not normalised. A vector depends on its own text alone.
    fn embed(&mut self, texts: &[EmbeddingText<'_>], out: &mut Vec<f32>) -> Result<(), Error>;
}
