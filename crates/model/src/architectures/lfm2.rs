//! LFM2 and LFM2-MoE: short convolutions in place of attention in most layers, an RMSNorm of each head's query and key,
//! tied output.
//!
//! The width of LFM2's MLP in a folder is a bound from which the real one is computed. LFM2-MoE has experts after the
//! first dense layers, and a router with sigmoid scores whose bias selects and does not weigh.

use pellucid_tensor::{RopeStyle, Routing, Scoring};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, Mixer, Positions, QkNorm, ShortConvolutionConfig, plain_layers};

pub(super) const LFM2: Family = Family {
    name: "lfm2",
    gguf: Some(&GgufForm { name: "lfm2", read: read_gguf }),
    hugging_face: &["lfm2"],
    read_hugging_face: |fields, blueprint| read_hugging_face(fields, blueprint, mlp_size(fields)?),
};

pub(super) const LFM2_MOE: Family = Family {
    name: "lfm2-moe",
    gguf: Some(&GgufForm { name: "lfm2moe", read: read_gguf_mixture }),
    hugging_face: &["lfm2_moe"],
    read_hugging_face: read_mixture,
};

const DEFAULT_ROPE_BASE: f32 = 1_000_000.0;

fn set_common(config: &mut DecoderConfig, num_taps: usize, biases: bool, has_attention: impl Fn(usize) -> bool) {
    config.qk_norm = Some(QkNorm::Head);
    config.short_convolution = Some(ShortConvolutionConfig { num_channels: config.hidden_size, num_taps, biases });
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.mixer = if has_attention(i) { Mixer::Attention } else { Mixer::ShortConvolution };
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    // The name that llama.cpp gives to the last norm of this family.
    blueprint.names.final_norm = "token_embd_norm";
    let config = &mut blueprint.config;
    let has_attention = keys.attention_layers(config.num_layers())?;
    set_common(config, keys.usize("shortconv.l_cache")?, false, |layer| has_attention[layer]);
    Ok(())
}

fn set_experts(config: &mut DecoderConfig, experts: Experts, num_dense: usize) {
    config.experts = Some(experts);
    config.layers.iter_mut().skip(num_dense).for_each(|layer| layer.experts = true);
}

fn read_gguf_mixture(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_gguf(keys, blueprint)?;
    let experts = Experts {
        num_experts: keys.usize("expert_count")?,
        mlp_size: keys.usize("expert_feed_forward_length")?,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: keys.opt_f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
            ..Routing::softmax(keys.usize("expert_used_count")?, keys.opt_bool("expert_weights_norm")?.unwrap_or(true))
        },
    };
    set_experts(&mut blueprint.config, experts, keys.opt_usize("leading_dense_block_count")?.unwrap_or(0));
    Ok(())
}

fn read_mixture(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_hugging_face(fields, blueprint, fields.usize("intermediate_size")?)?;
    let experts = Experts {
        num_experts: fields.usize("num_experts")?,
        mlp_size: fields.usize("moe_intermediate_size")?,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: fields.opt_bool("use_expert_bias")?.unwrap_or(true),
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: fields.opt_f32("routed_scaling_factor")?.unwrap_or(1.0),
            ..Routing::softmax(fields.usize("num_experts_per_tok")?, fields.opt_bool("norm_topk_prob")?.unwrap_or(true))
        },
    };
    set_experts(&mut blueprint.config, experts, fields.opt_usize("num_dense_layers")?.unwrap_or(2));
    let names = &mut blueprint.names;
    names.router = "layers.{}.feed_forward.gate";
    names.score_bias = "layers.{}.feed_forward.expert_bias";
    names.expert_gate = "layers.{}.feed_forward.experts.{expert}.w1";
    names.expert_up = "layers.{}.feed_forward.experts.{expert}.w3";
    names.expert_down = "layers.{}.feed_forward.experts.{expert}.w2";
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint, mlp_size: usize) -> Result<(), Error> {
    let hidden_size = fields.usize("hidden_size")?;
    let num_heads = fields.usize("num_attention_heads")?;
    let head_size = hugging_face::head_size(fields, hidden_size, num_heads)?;
    let rope = hugging_face::rope(fields, None, DEFAULT_ROPE_BASE, head_size)?;
    let mut config = DecoderConfig {
        hidden_size,
        num_heads,
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(8),
        head_size,
        mlp_size,
        context_len: fields.opt_usize("max_position_embeddings")?.unwrap_or(128_000),
        norm_eps: fields.opt_f32("norm_eps")?.unwrap_or(1e-5),
        positions: Positions::Rope { tables: vec![rope], style: RopeStyle::Half },
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(fields.usize("num_hidden_layers")?),
        ..DecoderConfig::EMPTY
    };
    let has_attention = attention_layers(fields, config.num_layers())?;
    let num_taps = fields.opt_usize("conv_L_cache")?.unwrap_or(3);
    let biases = fields.opt_bool("conv_bias")?.unwrap_or(false);
    set_common(&mut config, num_taps, biases, |layer| has_attention[layer]);
    blueprint.config = config;
    let tied = fields.opt_bool("tie_embedding")?.or(fields.opt_bool("tie_word_embeddings")?);
    blueprint.tied = tied.unwrap_or(true);
    set_names(blueprint);
    Ok(())
}

fn set_names(blueprint: &mut Blueprint) {
    let names = &mut blueprint.names;
    names.final_norm = "embedding_norm";
    names.attention_norm = "layers.{}.operator_norm";
    names.attention_output = "layers.{}.self_attn.out_proj";
    names.query_norm = "layers.{}.self_attn.q_layernorm";
    names.key_norm = "layers.{}.self_attn.k_layernorm";
    names.mlp_norm = "layers.{}.ffn_norm";
    names.gate = "layers.{}.feed_forward.w1";
    names.up = "layers.{}.feed_forward.w3";
    names.down = "layers.{}.feed_forward.w2";
}

/// Returns the width of the MLP: two thirds of the stated one, times a factor, rounded up to a multiple.
fn mlp_size(fields: Fields<'_>) -> Result<usize, Error> {
    let stated = match fields.opt_usize("block_ff_dim")? {
        Some(size) => size,
        None => fields.usize("intermediate_size")?,
    };
    if !fields.opt_bool("block_auto_adjust_ff_dim")?.unwrap_or(true) {
        return Ok(stated);
    }
    let size = 2 * stated / 3;
    // Without a factor, the reference implementation does not round either.
    if fields.is_null("block_ffn_dim_multiplier") {
        return Ok(size);
    }
    let factor = fields.opt_f32("block_ffn_dim_multiplier")?.unwrap_or(1.0);
    let multiple = fields.opt_usize("block_multiple_of")?.unwrap_or(256).max(1);
    let size = (f64::from(factor) * size as f64) as usize;
    Ok(size.div_ceil(multiple) * multiple)
}

/// Returns for each layer whether it has attention: by the list of kinds, or by the numbers of these layers.
fn attention_layers(fields: Fields<'_>, num_layers: usize) -> Result<Vec<bool>, Error> {
    let Some(kinds) = fields.opt_strs("layer_types")? else {
        let layers = fields.opt_usizes("full_attn_idxs")?;
        return Ok((0..num_layers).map(|i| layers.as_ref().is_none_or(|layers| layers.contains(&i))).collect());
    };
    if kinds.len() != num_layers {
        return Err(fields.bad_list("layer_types", num_layers));
    }
    let has_attention = |kind: &&str| match *kind {
        "full_attention" => Ok(true),
        "conv" => Ok(false),
        other => Err(Error::BadSetting {
            key: "config.json: layer_types".into(),
            expected: "conv or full_attention".into(),
            found: other.into(),
        }),
    };
    kinds.iter().map(has_attention).collect()
}
