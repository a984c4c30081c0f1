//! DeepSeek V2 and V3, Kimi K2 and GLM-4.7-Flash: multi-head latent attention, interleaved rotation, and experts after
//! the first dense layers, of which some are used by every token. V2 routes by softmax; the others by sigmoid with a
//! bias that selects and does not weigh.
//!
//! Layers after the last predict further tokens, and are not loaded.

use pellucid_tensor::{RopeStyle, Routing, Scoring};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, LatentAttention, NormKind, Positions, plain_layers};
use crate::rope::RopeScaling;

const GGUF_FORM: GgufForm = GgufForm { name: "deepseek2", read: read_gguf };

pub(super) const DEEPSEEK2: Family =
    Family { name: "deepseek2", gguf: Some(&GGUF_FORM), hugging_face: &["deepseek_v2"], read_hugging_face: read_v2 };

pub(super) const DEEPSEEK3: Family = Family {
    name: "deepseek3",
    gguf: Some(&GGUF_FORM),
    hugging_face: &["deepseek_v3", "kimi_k2"],
    read_hugging_face: read_v3,
};

pub(super) const GLM4_MOE_LITE: Family = Family {
    name: "glm4-moe-lite",
    gguf: Some(&GGUF_FORM),
    hugging_face: &["glm4_moe_lite"],
    read_hugging_face: read_glm,
};

fn read_v2(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    must_be_one_of(fields, "scoring_func", &["softmax"])?;
    must_be_one_of(fields, "topk_method", &["greedy", "group_limited_greedy"])?;
    // The reference implementation does not read it.
    fields.must_be("norm_topk_prob", false)?;
    blueprint.config = decoder(fields)?;
    let mut routing = Routing::softmax(fields.usize("num_experts_per_tok")?, false);
    routing.scale = fields.opt_f32("routed_scaling_factor")?.unwrap_or(1.0);
    if fields.opt_str("topk_method")? == Some("group_limited_greedy") {
        routing.groups = Some((fields.usize("n_group")?, fields.usize("topk_group")?));
    }
    let num_dense = fields.opt_usize("first_k_dense_replace")?.unwrap_or(0);
    set_experts(fields, &mut blueprint.config, routing, num_dense)
}

fn read_v3(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_sigmoid(fields, blueprint, (8, 4))?;
    let num_dense = fields.opt_usize("first_k_dense_replace")?.unwrap_or(3);
    set_expert_layers(&mut blueprint.config, num_dense);
    Ok(())
}

fn read_glm(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_sigmoid(fields, blueprint, (1, 1))?;
    let config = &mut blueprint.config;
    let Some(kinds) = fields.opt_strs("mlp_layer_types")? else {
        set_expert_layers(config, fields.opt_usize("first_k_dense_replace")?.unwrap_or(1));
        return Ok(());
    };
    let is_known = kinds.iter().all(|kind| ["dense", "sparse"].contains(kind));
    if kinds.len() != config.num_layers() || !is_known {
        return Err(Error::BadSetting {
            key: "config.json: mlp_layer_types".into(),
            expected: format!("dense or sparse for each of {} layers", config.num_layers()),
            found: format!("{kinds:?}"),
        });
    }
    config.layers.iter_mut().zip(kinds).for_each(|(layer, kind)| layer.experts = kind == "sparse");
    Ok(())
}

/// Reads a model whose router has sigmoid scores, except which layers have experts.
fn read_sigmoid(fields: Fields<'_>, blueprint: &mut Blueprint, default_groups: (usize, usize)) -> Result<(), Error> {
    must_be_one_of(fields, "scoring_func", &["sigmoid"])?;
    must_be_one_of(fields, "topk_method", &["noaux_tc"])?;
    fields.must_be("rope_interleave", true)?;
    blueprint.config = decoder(fields)?;
    blueprint.num_extra_layers = fields.opt_usize("num_nextn_predict_layers")?.unwrap_or(1);
    let num_groups = fields.opt_usize("n_group")?.unwrap_or(default_groups.0);
    let used_groups = fields.opt_usize("topk_group")?.unwrap_or(default_groups.1);
    let normalize = fields.opt_bool("norm_topk_prob")?.unwrap_or(true);
    let routing = Routing {
        scoring: Scoring::Sigmoid,
        scale: fields.opt_f32("routed_scaling_factor")?.unwrap_or(1.0),
        groups: (num_groups != 1).then_some((num_groups, used_groups)),
        ..Routing::softmax(fields.usize("num_experts_per_tok")?, normalize)
    };
    let num_layers = blueprint.config.num_layers();
    set_experts(fields, &mut blueprint.config, routing, num_layers)
}

/// Reads everything but the experts.
fn decoder(fields: Fields<'_>) -> Result<DecoderConfig, Error> {
    fields.must_equal("moe_layer_freq", 1.0)?;
    let rotary_size = fields.usize("qk_rope_head_dim")?;
    let rope = hugging_face::rope(fields, None, 10_000.0, rotary_size)?;
    let mut config = DecoderConfig {
        hidden_size: fields.usize("hidden_size")?,
        num_heads: fields.usize("num_attention_heads")?,
        mlp_size: fields.usize("intermediate_size")?,
        context_len: hugging_face::extended_len(fields.usize("max_position_embeddings")?, &rope),
        norm: NormKind::Rms,
        norm_eps: fields.f32("rms_norm_eps")?,
        positions: Positions::Rope { tables: vec![rope], style: RopeStyle::Interleaved },
        activation: hugging_face::activation(fields, &["hidden_act"])?,
        layers: plain_layers(fields.usize("num_hidden_layers")?),
        ..DecoderConfig::EMPTY
    };
    config.set_latent_attention(LatentAttention {
        query_rank: fields.opt_usize("q_lora_rank")?,
        latent_size: fields.usize("kv_lora_rank")?,
        rotary_size,
        plain_size: fields.usize("qk_nope_head_dim")?,
        value_size: fields.usize("v_head_dim")?,
        yarn_scale: hugging_face::yarn_scale_of_scores(fields)?,
    });
    Ok(config)
}

/// Gives all layers from `num_dense` on experts.
fn set_experts(
    fields: Fields<'_>,
    config: &mut DecoderConfig,
    routing: Routing,
    num_dense: usize,
) -> Result<(), Error> {
    let mlp_size = fields.usize("moe_intermediate_size")?;
    let num_shared = fields.opt_usize("n_shared_experts")?.unwrap_or(0);
    config.experts = Some(experts(fields.usize("n_routed_experts")?, mlp_size, num_shared, routing));
    set_expert_layers(config, num_dense);
    Ok(())
}

fn experts(num_experts: usize, mlp_size: usize, num_shared: usize, routing: Routing) -> Experts {
    Experts {
        num_experts,
        mlp_size,
        shared_mlp_size: Some(mlp_size * num_shared).filter(|&size| size > 0),
        shared_gate: false,
        biases: false,
        score_bias: routing.scoring == Scoring::Sigmoid,
        routing,
    }
}

fn set_expert_layers(config: &mut DecoderConfig, num_dense: usize) {
    config.layers.iter_mut().skip(num_dense).for_each(|layer| layer.experts = true);
}

/// Refuses a name other than `known`. Absent counts as known.
fn must_be_one_of(fields: Fields<'_>, key: &str, known: &[&str]) -> Result<(), Error> {
    match fields.opt_str(key)?.filter(|found| !known.contains(found)) {
        None => Ok(()),
        Some(found) => {
            let (key, expected) = (format!("config.json: {key}"), known.join(" or "));
            Err(Error::BadSetting { key, expected, found: found.into() })
        }
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    blueprint.num_extra_layers = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    config.layers.truncate(config.num_layers().saturating_sub(blueprint.num_extra_layers));
    // Files with one matrix for keys and values have the sizes of heads under the keys of all families.
    let is_new = keys.opt_usize("attention.key_length_mla")?.is_some();
    let [key_size, value_size] = match is_new {
        true => [keys.usize("attention.key_length_mla")?, keys.usize("attention.value_length_mla")?],
        false => [keys.usize("attention.key_length")?, keys.usize("attention.value_length")?],
    };
    let rotary_size = keys.usize("rope.dimension_count")?;
    let latent = LatentAttention {
        query_rank: keys.opt_usize("attention.q_lora_rank")?.filter(|&rank| rank > 0),
        latent_size: keys.usize("attention.kv_lora_rank")?,
        rotary_size,
        plain_size: key_size.saturating_sub(rotary_size),
        value_size,
        yarn_scale: read_yarn(keys, config)?,
    };
    config.set_latent_attention(latent);
    let num_experts = keys.opt_usize("expert_count")?.filter(|&count| count > 0);
    let Some(num_experts) = num_experts else { return Ok(()) };
    // Old files do not state the scores; only sigmoid scores have a bias.
    let scoring = match keys.opt_usize("expert_gating_func")?.filter(|&number| number != 0) {
        Some(2) => Scoring::Sigmoid,
        None if blueprint.has_score_biases => Scoring::Sigmoid,
        _ => Scoring::Softmax,
    };
    let num_groups = keys.opt_usize("expert_group_count")?.unwrap_or(1);
    let routing = Routing {
        scoring,
        scale: keys.opt_f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
        groups: match num_groups {
            0 | 1 => None,
            _ => Some((num_groups, keys.usize("expert_group_used_count")?)),
        },
        ..Routing::softmax(keys.usize("expert_used_count")?, keys.opt_bool("expert_weights_norm")?.unwrap_or(false))
    };
    let num_shared = keys.opt_usize("expert_shared_count")?.unwrap_or(0);
    config.experts = Some(experts(num_experts, keys.usize("expert_feed_forward_length")?, num_shared, routing));
    set_expert_layers(config, keys.opt_usize("leading_dense_block_count")?.unwrap_or(0));
    Ok(())
}

/// Returns YaRN's scale of attention scores, and sets the factor of angles: files state only the former and assume that
/// it is that of angles too, so that angles have no factor.
fn read_yarn(keys: Keys<'_>, config: &mut DecoderConfig) -> Result<f32, Error> {
    let Positions::Rope { tables, style } = &mut config.positions else { return Ok(0.0) };
    *style = RopeStyle::Interleaved;
    let RopeScaling::Yarn { attention_factor, .. } = &mut tables[0].scaling else { return Ok(0.0) };
    *attention_factor = 1.0;
    keys.must_equal_real("rope.scaling.attn_factor", 1.0)?;
    // The converter of these files multiplies the scale by the factor in YaRN's formula.
    Ok(keys.f32("rope.scaling.yarn_log_multiplier")? / 0.1)
}
