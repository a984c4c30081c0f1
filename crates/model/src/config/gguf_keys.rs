//! Writes a configuration as the keys of a GGUF file. `gguf.rs` reads them.
//!
//! Every value is written under the key that all architectures share. The caller, `gguf_model`, checks that the
//! family's reader gets the same configuration from them.

use pellucid_checkpoint::{Array, Metadata, Value};

use pellucid_tensor::Scoring;

use super::{DecoderConfig, Experts, NormKind, Positions};
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
        if architecture.starts_with("granite") {
            keys.multipliers(config);
        }
        if let Positions::Rope { tables, .. } = &config.positions {
            keys.rope(&tables[0]);
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
        self.number("feed_forward_length", config.mlp_size);
        self.number("attention.head_count", config.num_heads);
        self.number("attention.head_count_kv", config.num_kv_heads);
        self.number("attention.key_length", config.head_size);
        self.number("attention.value_length", config.head_size);
        if let Some(experts) = config.experts {
            self.number("expert_count", experts.num_experts);
            self.number("expert_used_count", experts.routing.num_selected);
            self.number("expert_feed_forward_length", experts.mlp_size);
            if let Some(size) = experts.shared_mlp_size {
                self.number("expert_shared_feed_forward_length", size);
            }
            if experts.routing.scoring == Scoring::Sigmoid {
                self.sigmoid_router(config, experts);
            }
        }
    }

    fn sigmoid_router(&mut self, config: &DecoderConfig, experts: Experts) {
        let routing = experts.routing;
        self.number("expert_gating_func", 2);
        self.put("expert_weights_norm", Value::Bool(routing.normalize));
        self.real("expert_weights_scale", routing.scale);
        self.number("expert_shared_count", experts.shared_mlp_size.unwrap_or(0) / experts.mlp_size);
        let num_dense = config.layers.iter().take_while(|layer| !layer.experts).count();
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

    fn rope(&mut self, rope: &RopeConfig) {
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
                if *attention_factor != default {
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
