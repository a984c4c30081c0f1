//! Settings of a model as words, for the error that says which one a GGUF file cannot hold.

use pellucid_tensor::{Activation, DeltaNetShape, RopeStyle};

use crate::config::{
    Experts, KeyHeads, LatentAttention, LayerConfig, Mamba2Config, Mixer, MlpKind, NormKind, Positions, QkNorm,
    ShortConvolutionConfig,
};
use crate::rope::{RopeConfig, RopeScaling};

/// Returns the words of a setting that may be missing.
pub(super) fn optional<T>(setting: Option<T>, words: impl FnOnce(T) -> String) -> String {
    setting.map_or("none".into(), words)
}

pub(super) fn yes_or_no(setting: bool) -> String {
    if setting { "yes" } else { "no" }.into()
}

pub(super) fn activation(activation: Activation) -> &'static str {
    match activation {
        Activation::Silu => "SiLU",
        Activation::Gelu => "GELU",
        Activation::GeluTanh => "GELU by tanh",
        Activation::ClampedSwiglu => "clamped SwiGLU",
        Activation::SquaredRelu => "squared ReLU",
    }
}

pub(super) fn norm(kind: NormKind) -> &'static str {
    match kind {
        NormKind::Rms => "RMSNorm",
        NormKind::Layer => "LayerNorm",
    }
}

pub(super) fn mlp(kind: MlpKind) -> &'static str {
    match kind {
        MlpKind::Gated => "with a gate",
        MlpKind::Plain => "without a gate",
    }
}

pub(super) fn qk_norm(norm: QkNorm) -> String {
    match norm {
        QkNorm::Head => "over each head",
        QkNorm::Row => "over all heads together",
    }
    .into()
}

pub(super) fn mixer(mixer: Mixer) -> &'static str {
    match mixer {
        Mixer::Attention => "attention",
        Mixer::ShortConvolution => "a short convolution",
        Mixer::DeltaNet => "a gated delta net",
        Mixer::Mamba2 => "Mamba-2",
        Mixer::None => "an MLP alone",
    }
}

pub(super) fn mixture(experts: Experts) -> String {
    let Experts { num_experts, mlp_size, shared_mlp_size, routing, .. } = experts;
    let weights = if routing.normalize { "normalised weights" } else { "unnormalised weights" };
    let groups = routing.groups.map_or(String::new(), |(all, used)| format!(" from {used} of {all} groups"));
    let shared = shared_mlp_size.map_or(String::new(), |size| format!(", and one of {size} for every token"));
    format!("{num_experts} experts of {mlp_size}, {} per token{groups} with {weights}{shared}", routing.num_selected)
}

pub(super) fn convolution(config: ShortConvolutionConfig) -> String {
    let biases = if config.biases { "with biases" } else { "without biases" };
    format!("over {} positions {biases}", config.num_taps)
}

pub(super) fn latent_attention(latent: LatentAttention) -> String {
    let LatentAttention { query_rank, latent_size, rotary_size, plain_size, value_size, yarn_scale } = latent;
    let rank = optional(query_rank, |rank| rank.to_string());
    format!(
        "latents of {latent_size} values, {rotary_size} rotated and {plain_size} other values of a key, values of \
         {value_size}, rank of queries {rank}, YaRN scale {yarn_scale}"
    )
}

pub(super) fn delta_net(shape: DeltaNetShape) -> String {
    let DeltaNetShape { num_key_heads, num_value_heads, key_size, value_size, num_taps } = shape;
    format!(
        "{num_key_heads} key heads of {key_size}, {num_value_heads} value heads of {value_size}, convolutions over \
         {num_taps} positions"
    )
}

pub(super) fn mamba2(config: Mamba2Config) -> String {
    let (shape, [shortest, longest]) = (config.shape, config.time_limits);
    let steps = if longest.is_finite() { format!("{shortest} to {longest}") } else { format!("{shortest} or longer") };
    format!(
        "{} heads of {} in {} groups, states of {}, convolutions over {} positions, norms over {}, time steps {steps}",
        shape.num_heads, shape.head_size, shape.num_groups, shape.state_size, shape.num_taps, shape.norm_size
    )
}

pub(super) fn positions(positions: &Positions) -> String {
    match positions {
        Positions::Rope { tables, style } => {
            let style = match style {
                RopeStyle::Half => "rotation of value i with i + half",
                RopeStyle::Interleaved => "rotation of value 2i with 2i + 1",
            };
            let tables: Vec<String> = tables.iter().map(rotation).collect();
            format!("{style}, {}", tables.join(", and "))
        }
        Positions::Learned => "a trained table".into(),
        Positions::Sinusoidal => "sines and cosines".into(),
        Positions::None => "none".into(),
    }
}

fn rotation(rope: &RopeConfig) -> String {
    let of_base = format!("{} values with base {}", rope.rotary_size, rope.base);
    let scaling = match &rope.scaling {
        RopeScaling::None => return of_base,
        RopeScaling::Linear { factor } => format!("stretched {factor} times"),
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context_len } => format!(
            "stretched {factor} times as by Llama 3 from {original_context_len} tokens, factors of frequencies \
             {low_freq_factor} to {high_freq_factor}"
        ),
        RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context_len, attention_factor, truncate } => {
            let ends = if *truncate { "whole" } else { "parts of" };
            format!(
                "stretched {factor} times by YaRN from {original_context_len} tokens, transition from {beta_slow} to \
                 {beta_fast} rotations over {ends} pairs, attention times {attention_factor}"
            )
        }
        RopeScaling::Factors { factors } => format!("{} divisors of frequencies", factors.len()),
        RopeScaling::LongRope { original_context_len, attention_factor, .. } => format!(
            "divisors of LongRoPE for contexts up to and beyond {original_context_len} tokens, attention times \
             {attention_factor}"
        ),
    };
    format!("{of_base} {scaling}")
}

pub(super) fn window(layer: &LayerConfig) -> String {
    optional(layer.window, |window| format!("{window} positions"))
}

pub(super) fn rope(layer: &LayerConfig) -> String {
    optional(layer.rope, |table| format!("rotary table {table}"))
}

pub(super) fn key_heads(layer: &LayerConfig) -> String {
    let words = |heads: KeyHeads| format!("{} key heads of {}", heads.num_kv_heads, heads.head_size);
    layer.heads.map_or("as in the other layers".into(), words)
}

/// Describes the MLP of a layer.
pub(super) fn layer_mlp(layer: &LayerConfig) -> String {
    let width = layer.mlp_size.map_or(String::new(), |size| format!(" of {size}"));
    match (layer.has_mlp, layer.experts) {
        (false, _) => "none".into(),
        (true, true) => format!("experts{width}"),
        (true, false) => format!("one dense MLP{width}"),
    }
}

/// Describes where a layer has its keys and values from.
pub(super) fn kv_source(layer: &LayerConfig) -> String {
    let source = layer.kv_from.map_or("its own".into(), |from| format!("those of layer {from}"));
    if layer.keys_as_values { format!("{source}, keys as values") } else { source }
}
