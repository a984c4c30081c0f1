//! The configuration of a decoder: sizes, and choices under the names that papers use.
//!
//! A file in `architectures` fills it in from a checkpoint; [`crate::Decoder`] reads nothing else.

mod check;
pub(crate) mod gguf;
pub(crate) mod gguf_keys;
pub(crate) mod hugging_face;
mod hybrid_fields;
mod latent_attention;
mod windows;

use pellucid_tensor::{Activation, DeltaNetShape, Extension, Mamba2Shape, RopeStyle, Routing};

use crate::rope::RopeConfig;

use check::MAX_LAYERS;
pub use latent_attention::LatentAttention;

/// A decoder-only transformer.
#[derive(Debug, Clone, PartialEq)]
pub struct DecoderConfig {
    /// Name of the family, as in [`supported`](crate::supported).
    pub architecture: String,
    /// Whether the model also takes images, for which only its text part is loaded.
    pub leaves_out_images: bool,
    /// Whether the model also takes audio.
    pub leaves_out_audio: bool,
    pub vocab_size: usize,
    pub hidden_size: usize,
    pub num_heads: usize,
    /// Number of key heads of the layers that do not state it.
    pub num_kv_heads: usize,
    /// Size of a head in the layers that do not state it.
    pub head_size: usize,
    /// Width of the dense MLP of the layers that do not state it.
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
    /// Divide each head's value by its root mean square.
    pub value_norm: bool,
    pub positions: Positions,
    pub mlp: MlpKind,
    pub activation: Activation,
    /// The experts of the layers that have them.
    pub experts: Option<Experts>,
    /// Layers with experts have a dense MLP as well. Both have a norm before and one after them, the router has a norm
    /// of its own, and each expert has a factor.
    pub dense_beside_experts: bool,
    /// Width of the projection of the MLP's input that the selected experts read; their sum is projected back. `None`
    /// if they read the input itself.
    pub expert_input_size: Option<usize>,
    /// Width of the input that each layer gets in addition, from the token and its embedding.
    pub layer_input_size: Option<usize>,
    /// The residual stream is multiplied by a number after each layer.
    pub layer_scales: bool,
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
    /// Outputs of attention are multiplied by the sigmoid of a projection of its input.
    pub attention_gate: bool,
    /// Sizes of latent attention, if the layers with attention have that.
    pub latent_attention: Option<LatentAttention>,
    /// Replaces logits x by `cap * tanh(x / cap)`.
    pub logits_soft_cap: Option<f32>,
    /// The short convolutions of the layers that have them.
    pub short_convolution: Option<ShortConvolutionConfig>,
    /// The gated delta nets of the layers that have them.
    pub delta_net: Option<DeltaNetShape>,
    /// The Mamba-2 layers.
    pub mamba2: Option<Mamba2Config>,
    /// Number of ranks that compute the model together. With several, the numbers of heads and the widths of MLPs are
    /// those of one rank.
    pub num_ranks: usize,
    pub layers: Vec<LayerConfig>,
    /// The layer after the last, which predicts the token after the next; `None` if it is not loaded.
    pub predictor: Option<LayerConfig>,
}

/// Settings that may differ from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// Number of positions that a query attends to, its own included; `None` for all.
    pub window: Option<usize>,
    /// Index of the rotary table that it uses; `None` if it does not rotate queries and keys.
    pub rope: Option<usize>,
    /// Whether it has an MLP. A layer without one has a mixer alone.
    pub has_mlp: bool,
    /// Whether it has experts in place of the dense MLP.
    pub experts: bool,
    pub mixer: Mixer,
    /// Sizes of its key heads; `None` for those of the decoder.
    pub heads: Option<KeyHeads>,
    /// Width of its dense MLP; `None` for that of the decoder.
    pub mlp_size: Option<usize>,
    /// Index of the layer whose keys and values it reads; `None` if it has its own.
    pub kv_from: Option<usize>,
    /// Its values are its keys, before the norm of the keys and without rotation.
    pub keys_as_values: bool,
}

/// Number and size of the key heads of a layer. Its query heads have the same size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeyHeads {
    pub num_kv_heads: usize,
    pub head_size: usize,
}

impl LayerConfig {
    /// Attends to all positions, uses the first rotary table, has a dense MLP and the sizes of the decoder.
    pub const PLAIN: LayerConfig = LayerConfig {
        window: None,
        rope: Some(0),
        has_mlp: true,
        experts: false,
        mixer: Mixer::Attention,
        heads: None,
        mlp_size: None,
        kv_from: None,
        keys_as_values: false,
    };

    /// Whether it has a recurrence in place of attention.
    pub(crate) fn has_recurrence(&self) -> bool {
        !matches!(self.mixer, Mixer::Attention | Mixer::None)
    }

    /// Whether it stores keys and values.
    pub(crate) fn has_kv(&self) -> bool {
        self.mixer == Mixer::Attention && self.kv_from.is_none()
    }
}

/// The part of a layer that mixes positions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mixer {
    /// Attention over keys and values.
    Attention,
    /// A gated convolution over the last positions.
    ShortConvolution,
    /// A gated delta net: a matrix for each head, to which every position writes.
    DeltaNet,
    /// A Mamba-2 layer: a matrix for each head, which decays and to which every position adds.
    Mamba2,
    /// The layer has an MLP alone.
    None,
}

/// Mamba-2 layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Mamba2Config {
    pub shape: Mamba2Shape,
    /// The smallest and the largest time step.
    pub time_limits: [f32; 2],
}

impl Mamba2Config {
    /// Time steps are not limited: softplus is positive.
    pub(crate) const NO_LIMITS: [f32; 2] = [0.0, f32::INFINITY];
}

/// A gated convolution over the last positions of each channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShortConvolutionConfig {
    /// Number of values of a row, each convolved separately: the hidden size, or the part of one rank.
    pub num_channels: usize,
    /// Number of positions, the row's own included.
    pub num_taps: usize,
    /// Whether the convolution and the maps around it have biases.
    pub biases: bool,
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
    /// Not at all: recurrent layers know the order of tokens.
    None,
}

/// The formula of the dense MLP, and of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MlpKind {
    /// `down(activation(gate x) * up x)`
    Gated,
    /// `down(activation(up x))`
    Plain,
}

/// A mixture of experts, each an MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Experts {
    pub num_experts: usize,
    pub mlp_size: usize,
    /// Width of the expert that every token uses beside the selected ones.
    pub shared_mlp_size: Option<usize>,
    /// Whether the output of that expert is multiplied by the sigmoid of a projection of its input.
    pub shared_gate: bool,
    /// Whether the linear maps of the selected experts have biases.
    pub biases: bool,
    /// Whether a bias is added to the scores for the selection alone.
    pub score_bias: bool,
    pub routing: Routing,
}

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
        leaves_out_audio: false,
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
        value_norm: false,
        positions: Positions::Learned,
        mlp: MlpKind::Gated,
        activation: Activation::Silu,
        experts: None,
        dense_beside_experts: false,
        expert_input_size: None,
        layer_input_size: None,
        layer_scales: false,
        embedding_scale: 1.0,
        residual_scale: 1.0,
        logits_divisor: 1.0,
        attention_scale: 0.0,
        attention_soft_cap: None,
        attention_sinks: false,
        attention_gate: false,
        latent_attention: None,
        logits_soft_cap: None,
        short_convolution: None,
        delta_net: None,
        mamba2: None,
        num_ranks: 1,
        layers: Vec::new(),
        predictor: None,
    };

    pub fn num_layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the number of layers with that of the predictor, if there is one.
    pub fn num_layers_with_predictor(&self) -> usize {
        self.num_layers() + usize::from(self.predictor.is_some())
    }

    /// Returns the settings of a layer. The predictor follows the last one.
    pub(crate) fn layer(&self, index: usize) -> LayerConfig {
        self.layers.get(index).copied().or(self.predictor).expect("a layer of the decoder")
    }

    /// Returns the number of layers with attention.
    pub fn num_attention_layers(&self) -> usize {
        self.layers.iter().filter(|layer| layer.mixer == Mixer::Attention).count()
    }

    /// Whether sequences have a recurrent state.
    pub fn has_state(&self) -> bool {
        self.layers.iter().any(LayerConfig::has_recurrence)
    }

    /// Returns the number of values of a layer's state.
    pub(crate) fn state_len(&self, layer: LayerConfig) -> usize {
        match layer.mixer {
            Mixer::Attention | Mixer::None => 0,
            Mixer::ShortConvolution => {
                self.short_convolution.map_or(0, |config| (config.num_taps - 1) * config.num_channels)
            }
            Mixer::DeltaNet => self.delta_net.map_or(0, DeltaNetShape::state_len),
            Mixer::Mamba2 => self.mamba2.map_or(0, |config| config.shape.state_len()),
        }
    }

    /// Returns the numbers of values in a row of a recurrence's inputs and of its outputs.
    pub(crate) fn recurrent_sizes(&self) -> Option<(usize, usize)> {
        let convolution = self.short_convolution.map(|config| (3 * config.num_channels, config.num_channels));
        let delta_net = self.delta_net.map(|shape| (shape.num_channels(), shape.output_size()));
        let mamba2 = self.mamba2.map(|config| (config.shape.num_channels(), config.shape.output_size()));
        convolution.or(delta_net).or(mamba2)
    }

    /// Returns the number of heads of a recurrence that has a time step for each.
    pub(crate) fn recurrent_heads(&self) -> Option<usize> {
        self.delta_net.map(|shape| shape.num_value_heads).or(self.mamba2.map(|config| config.shape.num_heads))
    }

    /// Returns the width of the input and output of a selected expert.
    pub(crate) fn expert_width(&self) -> usize {
        self.expert_input_size.unwrap_or(self.hidden_size)
    }

    /// Returns the bytes of a sequence's state in all layers.
    pub fn state_bytes(&self) -> usize {
        self.layers.iter().map(|&layer| self.state_len(layer) * size_of::<f32>()).sum()
    }

    /// Returns the sizes of a layer's key heads.
    pub fn key_heads(&self, layer: usize) -> KeyHeads {
        let of_decoder = KeyHeads { num_kv_heads: self.num_kv_heads, head_size: self.head_size };
        self.layer(layer).heads.unwrap_or(of_decoder)
    }

    /// Returns the number of values in a row of queries of a layer.
    pub fn query_size(&self, layer: usize) -> usize {
        self.num_heads * self.key_heads(layer).head_size
    }

    /// Returns the number of values in a row of keys of a layer, which is that of values too, except with latent
    /// attention.
    pub fn key_size(&self, layer: usize) -> usize {
        let KeyHeads { num_kv_heads, head_size } = self.key_heads(layer);
        num_kv_heads * head_size
    }

    /// Returns the number of values in a row of keys that a layer stores, which is 0 if it stores none.
    pub fn stored_key_size(&self, layer: usize) -> usize {
        if self.layer(layer).has_kv() { self.key_size(layer) } else { 0 }
    }

    /// Returns the number of values in a row of keys and in one of values that a layer stores, together.
    pub fn stored_kv_size(&self, layer: usize) -> usize {
        // Latents are both.
        let rows = if self.latent_attention.is_some() { 1 } else { 2 };
        rows * self.stored_key_size(layer)
    }

    /// Returns the number of values in a row of attention's output in a layer.
    pub(crate) fn attended_size(&self, layer: usize) -> usize {
        self.latent_attention.map_or(self.query_size(layer), |latent| self.num_heads * latent.latent_size)
    }

    /// Returns the width of a layer's dense MLP.
    pub fn mlp_size_of(&self, layer: usize) -> usize {
        self.layer(layer).mlp_size.unwrap_or(self.mlp_size)
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
            (Extension::LatentAttention, self.latent_attention.is_some()),
            (Extension::AttentionSinks, self.attention_sinks),
            (Extension::ClampedSwiglu, self.activation == Activation::ClampedSwiglu),
            (Extension::ExpertBiases, experts.is_some_and(|experts| experts.biases)),
            (Extension::SigmoidRouter, experts.is_some_and(routes_by_sigmoid)),
            (Extension::ExpertScales, experts.is_some() && self.dense_beside_experts),
            (Extension::LayerInputs, self.layer_input_size.is_some()),
            (Extension::LayerScales, self.layer_scales),
            (Extension::ShortConvolution, self.has_mixer(Mixer::ShortConvolution)),
            (Extension::DeltaNet, self.has_mixer(Mixer::DeltaNet)),
            (Extension::Mamba2, self.has_mixer(Mixer::Mamba2)),
            (Extension::PlainExperts, experts.is_some() && self.mlp == MlpKind::Plain),
            (Extension::SquaredRelu, self.activation == Activation::SquaredRelu),
            (Extension::SharedExperts, experts.is_some() && self.num_ranks > 1),
            (Extension::SharedMamba2, self.has_mixer(Mixer::Mamba2) && self.num_ranks > 1),
            (Extension::SigmoidGates, self.attention_gate || experts.is_some_and(|experts| experts.shared_gate)),
        ];
        needs.into_iter().filter(|(_, is_needed)| *is_needed).map(|(extension, _)| extension)
    }

    pub(crate) fn has_mixer(&self, mixer: Mixer) -> bool {
        self.layers.iter().any(|layer| layer.mixer == mixer)
    }

    /// Returns the lengths of the norms of queries and of keys of a layer.
    pub(crate) fn qk_norm_sizes(&self, layer: usize) -> Option<(usize, usize)> {
        let head_size = self.key_heads(layer).head_size;
        self.qk_norm.map(|norm| match norm {
            QkNorm::Head => (head_size, head_size),
            QkNorm::Row => (self.query_size(layer), self.key_size(layer)),
        })
    }

    /// Returns the bytes of one token's keys and values in all layers, if each value has `bytes_per_number`.
    pub fn kv_bytes_per_token(&self, bytes_per_number: usize) -> usize {
        (0..self.num_layers_with_predictor()).map(|layer| self.stored_kv_size(layer) * bytes_per_number).sum()
    }
}
