//! A model that computes vectors of texts, ready for requests: its loop runs, its tokenizer is read.

use std::sync::Arc;

use pellucid_engine::{EmbedderInfo, EmbeddingHandle, EmbeddingInput};
use pellucid_tokenizer::Tokenizer;

use crate::Error;

/// A model that computes vectors. The program that opened the files and chose the device builds it.
#[derive(Debug)]
pub struct LoadedEmbedder {
    /// Name of the model, as requests and reports use it.
    pub id: String,
    /// Further names by which requests may call it. Replies have `id`.
    pub aliases: Vec<String>,
    /// Identifies model, build and instruction set: equal texts to equal fingerprints return equal vectors.
    pub fingerprint: String,
    /// Converts between text and token ids.
    pub tokenizer: Arc<Tokenizer>,
    /// Lengths to which vectors may be shortened.
    pub shorter: ShorterVectors,
    /// Time of loading, in seconds since 1970.
    pub created: u64,
    /// Submits texts. Dropping the model stops its loop.
    pub handle: EmbeddingHandle,
}

/// Lengths to which the vectors of a model may be shortened: it was trained so that their first values are vectors too
/// (Matryoshka representation learning).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum ShorterVectors {
    /// None: the first values of a vector have no meaning of their own.
    #[default]
    None,
    /// Every length.
    Any,
    /// These lengths.
    Listed(Vec<usize>),
}

impl ShorterVectors {
    /// Whether vectors of `full` values may be shortened to `wanted`.
    pub fn allows(&self, wanted: usize, full: usize) -> bool {
        wanted == full
            || match self {
                ShorterVectors::None => false,
                ShorterVectors::Any => (1..=full).contains(&wanted),
                ShorterVectors::Listed(lengths) => lengths.contains(&wanted),
            }
    }

    /// Describes the allowed lengths of vectors of `full` values.
    pub fn describe(&self, full: usize) -> String {
        match self {
            ShorterVectors::None => format!("{full}, the length of this model's vectors, which cannot be shortened"),
            ShorterVectors::Any => format!("1 to {full}"),
            ShorterVectors::Listed(lengths) => {
                let listed: Vec<String> = lengths.iter().map(usize::to_string).collect();
                format!("{full} or one of {}", listed.join(", "))
            }
        }
    }
}

impl LoadedEmbedder {
    /// Returns every name that requests may use, `id` first.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        std::iter::once(&self.id).chain(&self.aliases).map(String::as_str)
    }

    /// Returns facts about the model.
    pub fn info(&self) -> &EmbedderInfo {
        self.handle.info()
    }

    /// Encodes a text, with the tokens that the model expects before and after it. With `max_tokens`, a longer text is
    /// cut; the tokens after it are kept, as the reference libraries do. Control tokens in the text are ordinary text.
    pub fn encode(&self, text: &str, max_tokens: Option<usize>) -> Result<EmbeddingInput, Error> {
        let (prefix, suffix) = (self.tokenizer.prefix(), self.tokenizer.suffix());
        let mut own = self.tokenizer.try_encode(text)?;
        if let Some(max) = max_tokens {
            own.truncate(max.saturating_sub(prefix.len() + suffix.len()));
        }
        let mut ids = Vec::new();
        ids.try_reserve_exact(prefix.len() + own.len() + suffix.len()).map_err(|_| Error::OutOfMemory)?;
        ids.extend(prefix.iter().chain(&own).chain(suffix));
        Ok(EmbeddingInput::new(ids))
    }

    /// Encodes two texts as one pair, as cross-encoders expect them: each text is followed by the tokens that follow
    /// every text. With `max_tokens`, the second text is cut.
    pub fn encode_pair(&self, first: &str, second: &str, max_tokens: Option<usize>) -> Result<EmbeddingInput, Error> {
        let suffix = self.tokenizer.suffix();
        let mut ids = self.encode(first, max_tokens.map(|max| max.saturating_sub(suffix.len())))?.ids;
        let mut own = self.tokenizer.try_encode(second)?;
        if let Some(max) = max_tokens {
            own.truncate(max.saturating_sub(ids.len() + suffix.len()));
        }
        let second_at = ids.len();
        ids.try_reserve_exact(own.len() + suffix.len()).map_err(|_| Error::OutOfMemory)?;
        ids.extend(own.iter().chain(suffix));
        Ok(EmbeddingInput { ids, second_at })
    }
}

/// Returns the first `num_dimensions` values of a vector, divided by their length (the Euclidean norm) if `normalize`.
/// The sum of squares is computed in f64. A vector of zeros stays one.
pub fn finished_vector(values: &[f32], num_dimensions: usize, normalize: bool) -> Vec<f32> {
    let values = &values[..num_dimensions];
    if !normalize {
        return values.to_vec();
    }
    let length = values.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>().sqrt();
    if length == 0.0 {
        return values.to_vec();
    }
    values.iter().map(|value| (f64::from(*value) / length) as f32).collect()
}

/// Returns the cosine of the angle between two vectors of equal length; 0 if one of them is zero.
pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    let lengths = dot(a, a).sqrt() * dot(b, b).sqrt();
    if lengths == 0.0 { 0.0 } else { (dot(a, b) / lengths) as f32 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vectors_are_shortened_before_they_are_normalised() {
        assert_eq!(finished_vector(&[3.0, 4.0, 12.0], 3, false), [3.0, 4.0, 12.0]);
        assert_eq!(finished_vector(&[3.0, 4.0, 12.0], 2, true), [0.6, 0.8]);
        assert_eq!(finished_vector(&[0.0, 0.0], 2, true), [0.0, 0.0]);
        assert_eq!(cosine(&[1.0, 0.0], &[0.0, 2.0]), 0.0);
        assert_eq!(cosine(&[1.0, 2.0], &[2.0, 4.0]), 1.0);
        assert_eq!(cosine(&[1.0, 2.0], &[0.0, 0.0]), 0.0);
    }

    #[test]
    fn only_lengths_that_the_model_was_trained_for_are_allowed() {
        let listed = ShorterVectors::Listed(vec![64, 128]);
        assert!(listed.allows(64, 768) && listed.allows(768, 768) && !listed.allows(65, 768));
        assert!(ShorterVectors::Any.allows(1, 768) && !ShorterVectors::Any.allows(0, 768));
        assert!(!ShorterVectors::None.allows(64, 768) && ShorterVectors::None.allows(768, 768));
        assert_eq!(listed.describe(768), "768 or one of 64, 128");
    }
}
