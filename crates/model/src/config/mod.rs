//! The configuration of a decoder: sizes, and choices under the names that papers use.
//!
//! A file in `architectures` fills it in from a checkpoint; [`crate::Decoder`] reads nothing else.

pub(crate) mod gguf;
pub(crate) mod gguf_keys;
pub(crate) mod hugging_face;

use pellucid_tensor::{Activation, Extension, RopeStyle, Routing};

use crate::Error;
use crate::rope::{RopeConfig, RopeScaling};

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Name of the family, as in [`supported`](crate::supported).
    pub architecture: String,
    /// Whether the model also takes images, for which only its text part is loaded.
    pub leaves_out_images: bool,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    pub num_kv_heads: usize,
    pub head_size: usize,
    /// Width of the dense MLP.
    pub mlp_size: usize,
    /// Maximum tokens of a sequence: the length that the model was trained for, or the smaller one that it was loaded
    /// with.
    pub context_len: usize,
    pub norm: NormKind,
    pub norm_eps: f32,
    /// Normalise the inputs of attention and MLP.
    pub input_norms: bool,
    /// Normalise the outputs of attention and MLP before they are added to the residual.
    pub output_norms: bool,
    /// The RMSNorm of queries and keys before the rotation.
    pub qk_norm: Option<QkNorm>,
    pub positions: Positions,
    pub mlp: MlpKind,
    pub activation: Activation,
    /// The experts of the layers that have them.
    pub experts: Option<Experts>,
    /// Factor of the token's embedding.
    pub embedding_scale: f32,
    /// Factor of the outputs of attention and MLP when they are added to the residual stream.
    pub residual_scale: f32,
    /// Divisor of the logits.
    pub logits_divisor: f32,
    /// Factor of the dot product of query and key.
    pub attention_scale: f32,
    /// Replaces attention scores x by `cap * tanh(x / cap)`.
    pub attention_soft_cap: Option<f32>,
    /// Each head has a score that takes part in its softmax and has no value.
    pub attention_sinks: bool,
    /// Replaces logits x by `cap * tanh(x / cap)`.
    pub logits_soft_cap: Option<f32>,
    pub layers: Vec<LayerConfig>,
}

/// Settings that may differ from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Number of positions that a query attends to, its own included; `None` for all.
    pub window: Option<usize>,
    /// Index of the rotary table that it uses; `None` if it does not rotate queries and keys.
    pub rope: Option<usize>,
    /// Whether it has experts in place of the dense MLP.
    pub experts: bool,
}

impl LayerConfig {
    /// Attends to all positions, uses the first rotary table, has a dense MLP.
    pub const PLAIN: LayerConfig = LayerConfig { window: None, rope: Some(0), experts: false };
}

/// The kind of all norms of a decoder.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NormKind {
    /// RMSNorm: `x / rms(x) * weight`.
    Rms,
    /// LayerNorm: `(x - mean(x)) / std(x) * weight + bias`.
    Layer,
}

/// The values over which queries and keys are normalised.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum QkNorm {
    /// Each head, by one weight for all heads.
    Head,
    /// All heads of a token.
    Row,
}

/// How a decoder takes the positions of tokens into account.
#[derive(Debug, Clone, PartialEq)]
pub enum Positions {
    /// Queries and keys are rotated. Each layer uses one of the tables.
    Rope { tables: Vec<RopeConfig>, style: RopeStyle },
    /// A trained table, added to the embedding.
    Learned,
    /// The sines and cosines of the original transformer, added to the embedding.
    Sinusoidal,
}

/// The formula of the dense MLP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// `down(activation(gate x) * up x)`
    Gated,
    /// `down(activation(up x))`
    Plain,
}

/// A mixture of experts, each a gated MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    pub num_experts: usize,
    pub mlp_size: usize,
    /// Width of the expert that every token uses beside the selected ones.
    pub shared_mlp_size: Option<usize>,
    /// Whether the linear maps of the selected experts have biases.
    pub biases: bool,
    /// Whether a bias is added to the scores for the selection alone.
    pub score_bias: bool,
    pub routing: Routing,
}

/// Bounds far above every known model. A file beyond them is damaged, and products of its sizes could overflow.
const MAX_SIZE: usize = 1 << 24;
const MAX_LAYERS: usize = 4096;

/// Returns `count` layers like Llama's. A count above `MAX_LAYERS` is cut to one too many, which
/// [`DecoderConfig::check`] refuses.
pub(crate) fn plain_layers(count: usize) -> Vec<LayerConfig> {
    vec![LayerConfig::PLAIN; count.min(MAX_LAYERS + 1)]
}

/// Returns the routing that every backend has, with the same settings where it has them.
fn plain_routing(routing: Routing) -> Routing {
    Routing::softmax(routing.num_selected, routing.normalize)
}

impl DecoderConfig {
    /// No sizes and no layers, and Llama's value for every choice. Families start from it and fill in the rest.
    pub(crate) const EMPTY: DecoderConfig = DecoderConfig {
        architecture: String::new(),
        leaves_out_images: false,
        vocab_size: 0,
        hidden_size: 0,
        num_heads: 0,
        num_kv_heads: 0,
        head_size: 0,
        mlp_size: 0,
        context_len: 0,
        norm: NormKind::Rms,
        norm_eps: 0.0,
        input_norms: true,
        output_norms: false,
        qk_norm: None,
        positions: Positions::Learned,
        mlp: MlpKind::Gated,
        activation: Activation::Silu,
        experts: None,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits_divisor: 1.0,
        attention_scale: 0.0,
        attention_soft_cap: None,
        attention_sinks: false,
        logits_soft_cap: None,
        layers: Vec::new(),
    };

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the number of values in a row of queries.
    pub fn query_size(&self) -> usize {
        self.num_heads * self.head_size
    }

    /// Returns the number of values in a row of keys, which is that of values too.
    pub fn key_size(&self) -> usize {
        self.num_kv_heads * self.head_size
    }

    /// Returns the factor of embeddings in the residual stream as the decoder keeps it: divided by `residual_scale`, so
    /// that outputs are added without a factor. The norms that read the stream cancel the division.
    pub(crate) fn stream_embedding_scale(&self) -> f32 {
        self.embedding_scale / self.residual_scale
    }

    /// Returns the epsilon of the norms that read the residual stream as the decoder keeps it.
    pub(crate) fn stream_norm_eps(&self) -> f32 {
        self.norm_eps / (self.residual_scale * self.residual_scale)
    }

    /// Returns the operations that the model needs and that not every backend has.
    pub(crate) fn extensions(&self) -> impl Iterator<Item = Extension> {
        let experts = self.experts.filter(|_| self.layers.iter().any(|layer| layer.experts));
        let routes_by_sigmoid =
            |experts: Experts| experts.score_bias || experts.routing != plain_routing(experts.routing);
        let needs = [
            (Extension::AttentionSinks, self.attention_sinks),
            (Extension::ClampedSwiglu, self.activation == Activation::ClampedSwiglu),
            (Extension::ExpertBiases, experts.is_some_and(|experts| experts.biases)),
            (Extension::SigmoidRouter, experts.is_some_and(routes_by_sigmoid)),
        ];
        needs.into_iter().filter(|(_, is_needed)| *is_needed).map(|(extension, _)| extension)
    }

    /// Returns the lengths of the norms of queries and of keys.
    pub(crate) fn qk_norm_sizes(&self) -> Option<(usize, usize)> {
        self.qk_norm.map(|norm| match norm {
            QkNorm::Head => (self.head_size, self.head_size),
            QkNorm::Row => (self.query_size(), self.key_size()),
        })
    }

    /// Returns the bytes of one token's keys and values: 2 x layers x kv heads x head size x `bytes_per_number`.
    pub fn kv_bytes_per_token(&self, bytes_per_number: usize) -> usize {
        2 * self.num_layers() * self.num_kv_heads * self.head_size * bytes_per_number
    }

    /// Checks what the decoder relies on: sizes are in range, divisors are not zero, and settings fit together.
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
            if size == 0 || size > MAX_SIZE {
                return bad(key, &format!("1 to {MAX_SIZE}"), size.to_string());
            }
        }
        if !self.num_heads.is_multiple_of(self.num_kv_heads) {
            return bad(
                "number of heads",
                &format!("a multiple of {} kv heads", self.num_kv_heads),
                self.num_heads.to_string(),
            );
        }
        if self.layers.is_empty() || self.layers.len() > MAX_LAYERS {
            return bad("number of layers", &format!("1 to {MAX_LAYERS}"), self.layers.len().to_string());
        }
        if !(self.norm_eps > 0.0 && self.norm_eps < 1.0) {
            return bad("norm epsilon", "above 0 and below 1", self.norm_eps.to_string());
        }
        let factors = [
            ("embedding scale", self.embedding_scale),
            ("attention scale", self.attention_scale),
            ("residual scale", self.residual_scale),
            ("divisor of logits", self.logits_divisor),
        ];
        for (key, factor) in factors {
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
        // The factor is cancelled by the norms that read the stream, and is applied to token embeddings alone.
        let keeps_stream_scaled = self.input_norms && matches!(self.positions, Positions::Rope { .. });
        if self.residual_scale != 1.0 && !keeps_stream_scaled {
            return bad("residual scale", "1 for a model without norms before attention or without RoPE", {
                self.residual_scale.to_string()
            });
        }
        if !self.input_norms && self.experts.is_some() {
            return bad("experts", "a norm before them", "norms after attention and MLP alone".into());
        }
        if let Some(experts) = self.experts {
            let selected = experts.routing.num_selected;
            let widths = [Some(experts.mlp_size), experts.shared_mlp_size];
            let is_width_bad = widths.into_iter().flatten().any(|width| width == 0 || width > MAX_SIZE);
            if experts.num_experts == 0 || experts.num_experts > 65_536 || is_width_bad {
                return bad("experts", "1 to 65536 experts of a width above 0", format!("{experts:?}"));
            }
            let (num_groups, used_groups) = experts.routing.groups.unwrap_or((1, 1));
            let are_groups_bad = num_groups == 0
                || used_groups == 0
                || used_groups > num_groups
                || !experts.num_experts.is_multiple_of(num_groups);
            if are_groups_bad {
                let expected = format!("groups that divide {} experts", experts.num_experts);
                return bad("groups of experts", &expected, format!("{used_groups} of {num_groups}"));
            }
            let selectable = experts.num_experts / num_groups * used_groups;
            if selected == 0 || selected > selectable {
                return bad("experts used", &format!("1 to {selectable}"), selected.to_string());
            }
            if !(experts.routing.scale.is_finite() && experts.routing.scale > 0.0) {
                return bad("scale of experts", "a positive number", experts.routing.scale.to_string());
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
        if self.layers.iter().filter_map(|layer| layer.rope).any(|rope| rope >= tables.len()) {
            return Err(Error::MissingSetting { key: "rotary positions of a layer".into() });
        }
        Ok(())
    }
}
