//! Writes a configuration as the keys of a GGUF file. `gguf.rs` reads them.
//!
//! Every value is written under the key that all architectures share. The caller, `gguf_model`, checks that the
//! family's reader gets the same configuration from them.

use pellucid_checkpoint::{Array, Metadata, Value};

use pellucid_tensor::{DeltaNetShape, Scoring};

use super::{DecoderConfig, Experts, LatentAttention, LayerConfig, Mamba2Config, Mixer, NormKind, Positions};
use crate::rope::{RopeConfig, RopeScaling, yarn_attention_factor};

/// The keys, and the settings that the format stores as small tensors.
pub(crate) struct GgufKeys {
    pub(crate) metadata: Metadata,
    /// Divisors of rotary frequencies, with the name of their tensor.
    pub(crate) factors: Vec<(&'static str, Vec<f32>)>,
    prefix: &'static str,
}

impl GgufKeys {
    /// Returns the keys of a file with this `general.architecture`.
    pub(crate) fn of(config: &DecoderConfig, architecture: &'static str) -> GgufKeys {
        let mut keys = GgufKeys { metadata: Metadata::default(), factors: Vec::new(), prefix: architecture };
        keys.metadata.insert("general.architecture".into(), Value::String(architecture.into()));
        keys.sizes(config);
        keys.choices(config);
        if architecture == "gemma4" {
            keys.layer_sizes(config);
        }
        if architecture.starts_with("granite") {
            keys.multipliers(config);
        }
        if architecture == "granitehybrid" {
            // Readers of this architecture take the key as whether queries and keys are rotated.
            keys.put("rope.scaling.finetuned", Value::Bool(config.positions != Positions::None));
        }
        if architecture.starts_with("nemotron_h") {
            // llama.cpp needs the epsilon of RMSNorm under this name.
            keys.real("attention.layer_norm_epsilon", config.norm_eps);
        }
        if let Positions::Rope { tables, .. } = &config.positions {
            // With latent attention, readers take the factor of angles from the scale of scores.
            keys.rope(&tables[0], config.latent_attention.is_none());
            if let Some(sliding) = tables.get(1) {
                keys.real("rope.freq_base_swa", sliding.base);
            }
        }
        keys
    }

    fn put(&mut self, name: &str, value: Value) {
        let key = format!("{}.{name}", self.prefix);
        assert!(self.metadata.insert(key, value), "{name} is written once");
    }

    /// Writes a size, which is below 2^31 because the configuration was checked.
    fn number(&mut self, name: &str, number: usize) {
        self.put(name, Value::U32(number as u32));
    }

    fn real(&mut self, name: &str, number: f32) {
        self.put(name, Value::F32(number));
    }

    fn sizes(&mut self, config: &DecoderConfig) {
        self.number("vocab_size", config.vocab_size);
        self.number("context_length", config.context_len);
        self.number("embedding_length", config.hidden_size);
        self.number("block_count", config.num_layers());
        let mlp_size = |layer: usize| if config.layers[layer].has_mlp { config.mlp_size_of(layer) } else { 0 };
        self.of_layers("feed_forward_length", (0..config.num_layers()).map(mlp_size).collect());
        self.number("attention.head_count", config.num_heads);
        if config.short_convolution.is_some() || config.mamba2.is_some() {
            let heads =
                |layer: &LayerConfig| if layer.mixer == Mixer::Attention { config.num_kv_heads as i32 } else { 0 };
            let heads = config.layers.iter().map(heads).collect();
            self.put("attention.head_count_kv", Value::Array(Array::I32(heads)));
        } else {
            let heads = (0..config.num_layers()).map(|layer| config.key_heads(layer).num_kv_heads).collect();
            self.of_layers("attention.head_count_kv", heads);
        }
        if let Some(convolution) = config.short_convolution {
            self.number("shortconv.l_cache", convolution.num_taps);
        }
        if let Some(shape) = config.delta_net {
            self.delta_net(config, shape);
        }
        if let Some(mamba2) = config.mamba2 {
            self.mamba2(mamba2);
        }
        // The files give the size of heads without a window, and of those with one under other keys.
        let full = config.layers.iter().rposition(|layer| layer.window.is_none()).unwrap_or(0);
        let head_size = config.key_heads(full).head_size;
        self.number("attention.key_length", head_size);
        match config.latent_attention {
            Some(latent) => self.latent_attention(latent),
            None => self.number("attention.value_length", head_size),
        }
        if let Some(experts) = config.experts {
            self.number("expert_count", experts.num_experts);
            self.number("expert_used_count", experts.routing.num_selected);
            self.number("expert_feed_forward_length", experts.mlp_size);
            if let Some(size) = experts.shared_mlp_size {
                self.number("expert_shared_feed_forward_length", size);
            }
            if let Some(size) = config.expert_input_size {
                self.number("moe_latent_size", size);
            }
            if experts.routing.scoring == Scoring::Sigmoid || config.latent_attention.is_some() {
                self.router(config, experts);
            }
        }
    }

    fn mamba2(&mut self, config: Mamba2Config) {
        self.number("ssm.conv_kernel", config.shape.num_taps);
        self.number("ssm.state_size", config.shape.state_size);
        self.number("ssm.group_count", config.shape.num_groups);
        self.number("ssm.time_step_rank", config.shape.num_heads);
        self.number("ssm.inner_size", config.shape.output_size());
    }

    fn delta_net(&mut self, config: &DecoderConfig, shape: DeltaNetShape) {
        self.number("ssm.conv_kernel", shape.num_taps);
        self.number("ssm.state_size", shape.key_size);
        self.number("ssm.group_count", shape.num_key_heads);
        self.number("ssm.time_step_rank", shape.num_value_heads);
        self.number("ssm.inner_size", shape.output_size());
        let recurrent = config.layers.iter().map(|layer| layer.mixer != Mixer::Attention).collect();
        self.put("attention.recurrent_layers", Value::Array(Array::Bool(recurrent)));
        // Readers of the list do not use it; llama.cpp's converter writes this number whatever the list is.
        self.number("full_attention_interval", 4);
    }

    /// Writes a number for each layer, or one for all if they are equal.
    fn of_layers(&mut self, name: &str, numbers: Vec<usize>) {
        match numbers.first() {
            Some(&first) if numbers.iter().all(|number| *number == first) => self.number(name, first),
            _ => {
                let numbers = numbers.into_iter().map(|number| number as i32).collect();
                self.put(name, Value::Array(Array::I32(numbers)));
            }
        }
    }

    /// Writes the sizes that only some layers have.
    fn layer_sizes(&mut self, config: &DecoderConfig) {
        self.number("attention.key_length_swa", config.head_size);
        self.number("attention.value_length_swa", config.head_size);
        self.number("rope.dimension_count_swa", config.head_size);
        let num_sharing = config.layers.iter().filter(|layer| layer.kv_from.is_some()).count();
        self.number("attention.shared_kv_layers", num_sharing);
        self.number("embedding_length_per_layer_input", config.layer_input_size.unwrap_or(0));
    }

    /// Writes the sizes of latent attention. The length of keys is that of the row that is stored.
    fn latent_attention(&mut self, latent: LatentAttention) {
        self.number("attention.value_length", latent.latent_size);
        self.number("attention.key_length_mla", latent.key_size());
        self.number("attention.value_length_mla", latent.value_size);
        self.number("attention.kv_lora_rank", latent.latent_size);
        if let Some(rank) = latent.query_rank {
            self.number("attention.q_lora_rank", rank);
        }
        if latent.yarn_scale != 0.0 {
            self.real("rope.scaling.yarn_log_multiplier", (0.1 * f64::from(latent.yarn_scale)) as f32);
        }
    }

    fn router(&mut self, config: &DecoderConfig, experts: Experts) {
        let routing = experts.routing;
        self.number("expert_gating_func", if routing.scoring == Scoring::Sigmoid { 2 } else { 1 });
        self.put("expert_weights_norm", Value::Bool(routing.normalize));
        self.real("expert_weights_scale", routing.scale);
        self.number("expert_shared_count", experts.shared_mlp_size.unwrap_or(0) / experts.mlp_size);
        let num_dense = config.layers.iter().take_while(|layer| layer.has_mlp && !layer.experts).count();
        self.number("leading_dense_block_count", num_dense);
        if let Some((num_groups, used_groups)) = routing.groups {
            self.number("expert_group_count", num_groups);
            self.number("expert_group_used_count", used_groups);
        }
    }

    fn choices(&mut self, config: &DecoderConfig) {
        let epsilon = match config.norm {
            NormKind::Rms => "attention.layer_norm_rms_epsilon",
            NormKind::Layer => "attention.layer_norm_epsilon",
        };
        self.real(epsilon, config.norm_eps);
        if let Some(window) = config.layers.iter().find_map(|layer| layer.window) {
            self.number("attention.sliding_window", window);
            if config.layers.iter().any(|layer| layer.window.is_none()) {
                let sliding = config.layers.iter().map(|layer| layer.window.is_some()).collect();
                self.put("attention.sliding_window_pattern", Value::Array(Array::Bool(sliding)));
            }
        }
        if let Some(cap) = config.attention_soft_cap {
            self.real("attn_logit_softcapping", cap);
        }
        if let Some(cap) = config.logits_soft_cap {
            self.real("final_logit_softcapping", cap);
        }
    }

    fn multipliers(&mut self, config: &DecoderConfig) {
        self.real("attention.scale", config.attention_scale);
        self.real("embedding_scale", config.embedding_scale);
        self.real("residual_scale", config.residual_scale);
        self.real("logit_scale", config.logits_divisor);
    }

    fn rope(&mut self, rope: &RopeConfig, has_factor: bool) {
        self.number("rope.dimension_count", rope.rotary_size);
        self.real("rope.freq_base", rope.base);
        match &rope.scaling {
            RopeScaling::None => {}
            RopeScaling::Linear { factor } => self.scaling("linear", *factor),
            RopeScaling::Factors { factors } => self.factors.push(("rope_freqs.weight", factors.clone())),
            RopeScaling::Llama3 { .. } => {
                // Neither of the two depends on the context length.
                let plain = RopeConfig { scaling: RopeScaling::None, ..rope.clone() }.frequencies(0).frequencies;
                let stretched = rope.frequencies(0).frequencies;
                let factors = plain.iter().zip(&stretched).map(|(plain, stretched)| plain / stretched).collect();
                self.factors.push(("rope_freqs.weight", factors));
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context_len, attention_factor, .. } => {
                self.scaling("yarn", *factor);
                self.number("rope.scaling.original_context_length", *original_context_len as usize);
                self.real("rope.scaling.yarn_beta_fast", *beta_fast);
                self.real("rope.scaling.yarn_beta_slow", *beta_slow);
                // Readers multiply this key with YaRN's default factor.
                let default = yarn_attention_factor(*factor);
                if has_factor && *attention_factor != default {
                    self.real("rope.scaling.attn_factor", attention_factor / default);
                }
            }
            RopeScaling::LongRope { short, long, original_context_len, attention_factor } => {
                self.number("rope.scaling.original_context_length", *original_context_len);
                self.real("rope.scaling.attn_factor", *attention_factor);
                self.factors.push(("rope_factors_long.weight", long.clone()));
                self.factors.push(("rope_factors_short.weight", short.clone()));
            }
        }
    }

    fn scaling(&mut self, kind: &str, factor: f32) {
        self.put("rope.scaling.type", Value::String(kind.into()));
        self.real("rope.scaling.factor", factor);
    }
}
