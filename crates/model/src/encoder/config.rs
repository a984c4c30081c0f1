//! The configuration of an encoder: the choices in which BERT and its successors differ.

use pellucid_tensor::Activation;

use super::head::HeadActivation;
use crate::config::MlpKind;
use crate::rope::RopeConfig;
use crate::{Error, Pooling};

/// Every choice that distinguishes the families of encoders.
#[derive(Debug, Clone, PartialEq)]
pub struct EncoderConfig {
    pub architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub mlp_size: usize,
    /// Maximum tokens of a text.
    pub context_len: usize,
    /// Kinds of text with an embedding of their own, such as the two texts of a pair; 0 if there are none.
    pub num_types: usize,
    pub norm_eps: f32,
    pub norm_placement: NormPlacement,
    pub positions: EncoderPositions,
    pub mlp: MlpKind,
    pub activation: Activation,
    pub layers: Vec<EncoderLayer>,
    /// How the rows of a text become one vector, if the file says so.
    pub pooling: Option<Pooling>,
    /// The classifier of a cross-encoder, which scores a pair of texts; `None` for models that compute vectors.
    pub classifier: Option<ClassifierConfig>,
}

/// The classifier of a cross-encoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClassifierConfig {
    /// How the rows of a pair become the one that is classified.
    pub pooling: Pooling,
    pub activation: HeadActivation,
}

/// Position of the norms relative to the residual stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormPlacement {
    /// `x = norm(x + f(x))`, as in the original transformer.
    After,
    /// `x = x + f(norm(x))`, and one more norm after the last layer.
    Before,
}

/// How an encoder takes the positions of tokens into account.
#[derive(Debug, Clone, PartialEq)]
pub enum EncoderPositions {
    /// A trained table, added to the embedding.
    Learned,
    /// Queries and keys are rotated. Each layer uses one of the tables.
    Rope(Vec<RopeConfig>),
}

/// Settings that may differ from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EncoderLayer {
    /// Maximum distance between a token and those that it attends to; `None` for all tokens of the text.
    pub max_distance: Option<usize>,
    /// Index of the rotary table that it uses.
    pub rope: usize,
}

impl EncoderLayer {
    pub(crate) const FULL: EncoderLayer = EncoderLayer { max_distance: None, rope: 0 };
}

/// Bounds far above every known model. A file beyond them is damaged, and products of its sizes could overflow.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;

impl EncoderConfig {
    /// No sizes and no layers, and BERT's value for every choice. Families start from it and fill in the rest.
    pub(crate) const BERT: EncoderConfig = EncoderConfig {
        architecture: String::new(),
        vocab_size: 0,
        hidden_size: 0,
        num_heads: 0,
        mlp_size: 0,
        context_len: 0,
        num_types: 0,
        norm_eps: 0.0,
        norm_placement: NormPlacement::After,
        positions: EncoderPositions::Learned,
        mlp: MlpKind::Plain,
        activation: Activation::Gelu,
        layers: Vec::new(),
        pooling: None,
        classifier: None,
    };

    pub fn head_size(&self) -> usize {
        self.hidden_size / self.num_heads
    }

    /// Returns `count` layers that attend to the whole text. A count above `MAX_LAYERS` is cut to one too many, which
    /// [`EncoderConfig::check`] refuses.
    pub(crate) fn full_layers(count: usize) -> Vec<EncoderLayer> {
        vec![EncoderLayer::FULL; count.min(MAX_LAYERS + 1)]
    }

    /// Checks what the encoder relies on: sizes are in range, divisors are not zero, and settings fit together.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let bad =
            |key: &str, expected: String, found: String| Err(Error::BadSetting { key: key.into(), expected, found });
        let sizes = [
            ("vocabulary size", self.vocab_size),
            ("hidden size", self.hidden_size),
            ("number of heads", self.num_heads),
            ("mlp size", self.mlp_size),
            ("context length", self.context_len),
        ];
        if let Some((key, size)) = sizes.into_iter().find(|(_, size)| *size == 0 || *size > MAX_SIZE) {
            return bad(key, format!("1 to {MAX_SIZE}"), size.to_string());
        }
        if self.num_types > MAX_SIZE {
            return bad("number of token types", format!("0 to {MAX_SIZE}"), self.num_types.to_string());
        }
        if !self.hidden_size.is_multiple_of(self.num_heads) {
            let expected = format!("a divisor of the hidden size ({})", self.hidden_size);
            return bad("number of heads", expected, self.num_heads.to_string());
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return bad("number of layers", format!("1 to {MAX_LAYERS}"), self.layers.len().to_string());
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return bad("norm epsilon", "above 0 and below 1".into(), self.norm_eps.to_string());
        }
        self.check_positions()
    }

    fn check_positions(&self) -> Result<(), Error> {
        let EncoderPositions::Rope(tables) = &self.positions else { return Ok(()) };
        let bad = |expected: &str, found: String| {
            Err(Error::BadSetting { key: "rotary positions".into(), expected: expected.into(), found })
        };
        for rope in tables {
            if rope.rotary_size == 0 || rope.rotary_size > self.head_size() || !rope.rotary_size.is_multiple_of(2) {
                return bad("an even rotary size up to the head size", rope.rotary_size.to_string());
            }
            if !rope.frequencies(self.context_len).frequencies.iter().all(|frequency| frequency.is_finite()) {
                return bad("finite frequencies", format!("base {}", rope.base));
            }
        }
        if self.layers.iter().any(|layer| layer.rope >= tables.len()) {
            return Err(Error::MissingSetting { key: "rotary positions of a layer".into() });
        }
        Ok(())
    }
}
