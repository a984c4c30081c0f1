//! What a decoder is made of: choices with the names that papers use, and numbers.
//!
//! An architecture file fills this in from a checkpoint; [`crate::Decoder`] reads nothing else.

pub(crate) mod gguf;
pub(crate) mod gguf_keys;
pub(crate) mod hugging_face;

use pellucid_tensor::{Activation, RopeStyle, Routing};

use crate::Error;
use crate::rope::{Rope, RopeScaling};

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// The family's name in the supported list.
    pub architecture: String,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_size: usize,
    /// Width of the dense MLP.
    pub mlp_size: usize,
    /// Tokens that a sequence may hold: what the model was made for, or the smaller number that it was loaded for.
    pub context_len: usize,
    pub norm: NormKind,
    pub norm_eps: f32,
    /// Normalise the outputs of attention and MLP too, before they join the residual.
    pub output_norms: bool,
    /// RMSNorm over each head's query and key, before the rotation.
    pub qk_norm: bool,
    pub positions: Positions,
    pub mlp: MlpKind,
    pub activation: Activation,
    pub experts: Option<Experts>,
    /// Factor on the token's embedding.
    pub embedding_scale: f32,
    /// Factor on the dot product of query and key.
    pub attention_scale: f32,
    pub attention_soft_cap: Option<f32>,
    pub logits_soft_cap: Option<f32>,
    pub layers: Vec<LayerConfig>,
}

/// What may differ from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Positions that a query sees, its own included; `None` sees all.
    pub window: Option<usize>,
    /// Which of the rotary tables it uses.
    pub rope: usize,
    /// Experts in place of the dense MLP.
    pub experts: bool,
}

impl LayerConfig {
    /// Sees everything, uses the first rotary table, has a dense MLP.
    pub const PLAIN: LayerConfig = LayerConfig { window: None, rope: 0, experts: false };
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    Rms,
    Layer,
}

#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated; a layer picks one of the tables.
    Rope { tables: Vec<Rope>, style: RopeStyle },
    /// A trained table, added to the embedding.
    Learned,
    /// The sines and cosines of the original transformer, added to the embedding.
    Sinusoidal,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// `down(activation(gate x) * up x)`
    Gated,
    /// `down(activation(up x))`
    Plain,
}

/// A mixture of experts, each a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Experts {
    pub num_experts: usize,
    pub mlp_size: usize,
    pub routing: Routing,
}

/// No model known today comes near these; a file that does is damaged, and its sizes must not be multiplied.
const LARGEST_SIZE: usize = 1 << 24;
const MOST_LAYERS: usize = 4096;

/// `count` plain layers; more than any model has are cut to one too many, which the final check refuses by name.
pub(crate) fn plain_layers(count: usize) -> Vec<LayerConfig> {
    vec![LayerConfig::PLAIN; count.min(MOST_LAYERS + 1)]
}

impl DecoderConfig {
    /// No sizes, no layers, and for every choice what Llama does: families start from it and fill in the rest.
    pub(crate) const EMPTY: DecoderConfig = DecoderConfig {
        architecture: String::new(),
        vocab_size: 0,
        hidden_size: 0,
        num_heads: 0,
        num_kv_heads: 0,
        head_size: 0,
        mlp_size: 0,
        context_len: 0,
        norm: NormKind::Rms,
        norm_eps: 0.0,
        output_norms: false,
        qk_norm: false,
        positions: Positions::Learned,
        mlp: MlpKind::Gated,
        activation: Activation::Silu,
        experts: None,
        embedding_scale: 1.0,
        attention_scale: 0.0,
        attention_soft_cap: None,
        logits_soft_cap: None,
        layers: Vec::new(),
    };

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Bytes of keys and values that one token leaves behind: 2 x layers x kv heads x head size x bytes.
    pub fn kv_bytes_per_token(&self, bytes_per_number: usize) -> usize {
        2 * self.num_layers() * self.num_kv_heads * self.head_size * bytes_per_number
    }

    /// Checks what the decoder relies on: nothing is zero that divides, and the parts fit together.
    pub(crate) fn check(&self) -> Result<(), Error> {
        let bad = |key: &str, expected: &str, found: String| {
            Err(Error::BadSetting { key: key.into(), expected: expected.into(), found })
        };
        let sizes = [
            ("vocabulary size", self.vocab_size),
            ("hidden size", self.hidden_size),
            ("number of heads", self.num_heads),
            ("number of kv heads", self.num_kv_heads),
            ("head size", self.head_size),
            ("mlp size", self.mlp_size),
            ("context length", self.context_len),
        ];
        for (key, size) in sizes {
            if size == 0 || size > LARGEST_SIZE {
                return bad(key, &format!("1 to {LARGEST_SIZE}"), size.to_string());
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return bad(
                "number of heads",
                &format!("a multiple of {} kv heads", self.num_kv_heads),
                self.num_heads.to_string(),
            );
        }
        if self.layers.is_empty() || self.layers.len() > MOST_LAYERS {
            return bad("number of layers", &format!("1 to {MOST_LAYERS}"), self.layers.len().to_string());
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return bad("norm epsilon", "above 0 and below 1", self.norm_eps.to_string());
        }
        for (key, factor) in [("embedding scale", self.embedding_scale), ("attention scale", self.attention_scale)] {
            if !(factor.is_finite() && factor > 0.0) {
                return bad(key, "a positive number", factor.to_string());
            }
        }
        for (key, cap) in [("attention soft cap", self.attention_soft_cap), ("logits soft cap", self.logits_soft_cap)] {
            if let Some(cap) = cap.filter(|cap| !(cap.is_finite() && *cap > 0.0)) {
                return bad(key, "a positive number", cap.to_string());
            }
        }
        if let Some(layer) = self.layers.iter().find(|layer| layer.window == Some(0)) {
            return bad("sliding window", "at least 1", format!("{:?}", layer.window));
        }
        if let Some(experts) = self.experts {
            let selected = experts.routing.num_selected;
            if experts.num_experts == 0 || experts.num_experts > 65_536 || experts.mlp_size == 0 {
                return bad("experts", "1 to 65536 experts of a width above 0", format!("{experts:?}"));
            }
            if selected == 0 || selected > experts.num_experts {
                return bad("experts used", &format!("1 to {}", experts.num_experts), selected.to_string());
            }
        } else if self.layers.iter().any(|layer| layer.experts) {
            return bad("experts", "their number and width", "none".into());
        }
        self.check_positions()
    }

    fn check_positions(&self) -> Result<(), Error> {
        let Positions::Rope { tables, .. } = &self.positions else { return Ok(()) };
        for rope in tables {
            let bad = |expected: String, found: String| {
                Err(Error::BadSetting { key: "rotary positions".into(), expected, found })
            };
            if rope.rotary_size == 0 || rope.rotary_size > self.head_size || !rope.rotary_size.is_multiple_of(2) {
                return bad(format!("an even rotary size up to {}", self.head_size), rope.rotary_size.to_string());
            }
            if !(rope.base.is_finite() && rope.base > 0.0) {
                return bad("a positive base".into(), rope.base.to_string());
            }
            let lists: &[&Vec<f32>] = match &rope.scaling {
                RopeScaling::Factors { factors } => &[factors],
                RopeScaling::LongRope { short, long, .. } => &[short, long],
                _ => &[],
            };
            if let Some(list) = lists.iter().find(|list| list.len() != rope.rotary_size / 2) {
                let expected = format!("{} factors, one for each pair", rope.rotary_size / 2);
                return bad(expected, list.len().to_string());
            }
            let made = rope.frequencies(self.context_len);
            if !(made.factor.is_finite() && made.frequencies.iter().all(|frequency| frequency.is_finite())) {
                return bad("finite frequencies".into(), format!("{:?}", rope.scaling));
            }
        }
        if self.layers.iter().any(|layer| layer.rope >= tables.len()) {
            return Err(Error::MissingSetting { key: "rotary positions of a layer".into() });
        }
        Ok(())
    }
}
