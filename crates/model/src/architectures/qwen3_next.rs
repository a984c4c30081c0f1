//! Qwen3-Next, Qwen 3.5 and Qwen 3.5-MoE (3.6 too): gated delta nets in three layers of four, gated attention with an
//! RMSNorm of each head's query and key, rotation of a quarter of each head, norm weights stored minus one (in Hugging
//! Face files). With experts, every token uses one of them beside the selected ones, through a gate.
//!
//! The families differ in the order in which files keep the rows of delta nets. Qwen 3.5 also takes images; its
//! positions have three coordinates, which are equal for text. The layer that predicts further tokens has attention.

use pellucid_tensor::{DeltaNetShape, ValueHeadOrder};

use super::{Blueprint, Family, GgufForm, mixtral, qwen3};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Mixer, QkNorm};
use crate::loader::experts::ExpertLayout;

pub(super) const QWEN3_NEXT: Family = Family {
    name: "qwen3-next",
    gguf: Some(&GgufForm { name: "qwen3next", read: read_gguf_mixture }),
    hugging_face: &["qwen3_next"],
    read_hugging_face: read_mixture,
};

pub(super) const QWEN35: Family = Family {
    name: "qwen35",
    gguf: Some(&GgufForm {
        name: "qwen35",
        read: |keys, blueprint| {
            blueprint.delta_net.order = ValueHeadOrder::Tiled;
            blueprint.config.leaves_out_images = true;
            read_gguf(keys, blueprint)
        },
    }),
    hugging_face: &["qwen3_5", "qwen3_5_text"],
    read_hugging_face: |fields, blueprint| read(text_model(fields, blueprint)?, blueprint),
};

pub(super) const QWEN35_MOE: Family = Family {
    name: "qwen35-moe",
    gguf: Some(&GgufForm {
        name: "qwen35moe",
        read: |keys, blueprint| {
            blueprint.delta_net.order = ValueHeadOrder::Tiled;
            blueprint.config.leaves_out_images = true;
            read_gguf_mixture(keys, blueprint)
        },
    }),
    hugging_face: &["qwen3_5_moe", "qwen3_5_moe_text"],
    read_hugging_face: |fields, blueprint| read_mixture(text_model(fields, blueprint)?, blueprint),
};

/// The last layer of each period has attention.
const DEFAULT_PERIOD: usize = 4;
const DEFAULT_ROTARY_FACTOR: f32 = 0.25;

fn set_common(config: &mut DecoderConfig, shape: DeltaNetShape, is_recurrent: impl Fn(usize) -> bool) {
    config.qk_norm = Some(QkNorm::Head);
    config.attention_gate = true;
    config.delta_net = Some(shape);
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.mixer = if is_recurrent(i) { Mixer::DeltaNet } else { Mixer::Attention };
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.names.mlp_norm = "blk.{}.post_attention_norm";
    let config = &mut blueprint.config;
    let num_blocks = config.num_layers();
    blueprint.num_extra_layers = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    config.layers.truncate(num_blocks.saturating_sub(blueprint.num_extra_layers));
    let num_value_heads = keys.usize("ssm.time_step_rank")?;
    let shape = DeltaNetShape {
        num_key_heads: keys.usize("ssm.group_count")?,
        num_value_heads,
        key_size: keys.usize("ssm.state_size")?,
        value_size: keys.usize("ssm.inner_size")? / num_value_heads.max(1),
        num_taps: keys.usize("ssm.conv_kernel")?,
    };
    let period = keys.opt_usize("full_attention_interval")?.unwrap_or(DEFAULT_PERIOD).max(1);
    match keys.recurrent_layers(num_blocks)? {
        Some(recurrent) => set_common(config, shape, |layer| recurrent[layer]),
        None => set_common(config, shape, |layer| !(layer + 1).is_multiple_of(period)),
    }
    Ok(())
}

fn read_gguf_mixture(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_gguf(keys, blueprint)?;
    mixtral::read_gguf_experts(keys, &mut blueprint.config)?;
    if let Some(experts) = &mut blueprint.config.experts {
        experts.shared_mlp_size = Some(keys.usize("expert_shared_feed_forward_length")?);
        experts.shared_gate = true;
    }
    Ok(())
}

/// Returns the settings of the text model, which may be nested, and sets the names for them.
fn text_model<'a>(fields: Fields<'a>, blueprint: &mut Blueprint) -> Result<Fields<'a>, Error> {
    let Some(text) = fields.opt_object("text_config")? else { return Ok(fields) };
    blueprint.names.prefixes = &["model.language_model.", "language_model.model."];
    blueprint.names.ignored = &["model.visual.", "visual."];
    blueprint.config.leaves_out_images = true;
    if let Some(is_tied) = text.opt_bool("tie_word_embeddings")? {
        blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(is_tied);
    }
    Ok(text)
}

fn read(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    fields.must_be("attn_output_gate", true)?;
    let leaves_out_images = blueprint.config.leaves_out_images;
    let mut config = hugging_face::llama_with_rotary_factor(fields, DEFAULT_ROTARY_FACTOR)?;
    config.leaves_out_images = leaves_out_images;
    let shape = DeltaNetShape {
        num_key_heads: fields.usize("linear_num_key_heads")?,
        num_value_heads: fields.usize("linear_num_value_heads")?,
        key_size: fields.usize("linear_key_head_dim")?,
        value_size: fields.usize("linear_value_head_dim")?,
        num_taps: fields.usize("linear_conv_kernel_dim")?,
    };
    let recurrent = recurrent_layers(fields, config.num_layers())?;
    set_common(&mut config, shape, |layer| recurrent[layer]);
    blueprint.config = config;
    blueprint.norms_minus_one = true;
    let names = &mut blueprint.names;
    names.predicting = &["mtp."];
    names.predictor_prefix = "mtp.";
    names.predictor_embedding_norm = "pre_fc_norm_embedding";
    names.predictor_hidden_norm = "pre_fc_norm_hidden";
    names.predictor_join = "fc";
    names.predictor_output_norm = "norm";
    Ok(())
}

fn read_mixture(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read(fields, blueprint)?;
    qwen3::read_experts(fields, &mut blueprint.config, true)?;
    if let Some(experts) = &mut blueprint.config.experts {
        experts.shared_mlp_size = Some(fields.usize("shared_expert_intermediate_size")?);
        experts.shared_gate = true;
    }
    blueprint.expert_layout = ExpertLayout::SeparateOrStacked;
    let names = &mut blueprint.names;
    names.fused_expert_gate_up = "layers.{}.mlp.experts.gate_up_proj";
    names.stacked_expert_down = "layers.{}.mlp.experts.down_proj";
    names.shared_gate = "layers.{}.mlp.shared_expert.gate_proj";
    names.shared_up = "layers.{}.mlp.shared_expert.up_proj";
    names.shared_down = "layers.{}.mlp.shared_expert.down_proj";
    Ok(())
}

/// Returns for each layer whether it has a delta net: by the list of kinds, or by the period.
fn recurrent_layers(fields: Fields<'_>, num_layers: usize) -> Result<Vec<bool>, Error> {
    let Some(kinds) = fields.opt_strs("layer_types")? else {
        let period = fields.opt_usize("full_attention_interval")?.unwrap_or(DEFAULT_PERIOD).max(1);
        return Ok((0..num_layers).map(|layer| !(layer + 1).is_multiple_of(period)).collect());
    };
    if kinds.len() != num_layers {
        return Err(fields.bad_list("layer_types", num_layers));
    }
    let is_recurrent = |kind: &&str| match *kind {
        "linear_attention" => Ok(true),
        "full_attention" => Ok(false),
        other => Err(Error::BadSetting {
            key: "config.json: layer_types".into(),
            expected: "linear_attention or full_attention".into(),
            found: other.into(),
        }),
    };
    kinds.iter().map(is_recurrent).collect()
}
