//! GLM-4.5, 4.6 and 4.7: rotation of half of each head, experts after the first dense layers, of which one is used by
//! every token, and a router with sigmoid scores whose bias selects and does not weigh.
//!
//! The layer after the last predicts further tokens. It has experts.

use pellucid_tensor::{Routing, Scoring};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, QkNorm};

pub(super) const GLM4_MOE: Family = Family {
    name: "glm4-moe",
    gguf: Some(&GgufForm { name: "glm4moe", read: read_gguf }),
    hugging_face: &["glm4_moe"],
    read_hugging_face,
};

fn set_experts(config: &mut DecoderConfig, experts: Experts, num_dense: usize) {
    config.experts = Some(experts);
    config.layers.iter_mut().skip(num_dense).for_each(|layer| layer.experts = true);
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.names.mlp_norm = "blk.{}.post_attention_norm";
    let config = &mut blueprint.config;
    blueprint.num_extra_layers = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    config.layers.truncate(config.num_layers().saturating_sub(blueprint.num_extra_layers));
    // The format has no key for these norms.
    config.qk_norm = blueprint.has_qk_norms.then_some(QkNorm::Head);
    let mlp_size = keys.usize("expert_feed_forward_length")?;
    let num_shared = keys.opt_usize("expert_shared_count")?.unwrap_or(0);
    let experts = Experts {
        num_experts: keys.usize("expert_count")?,
        mlp_size,
        shared_mlp_size: Some(mlp_size * num_shared).filter(|&size| size > 0),
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: keys.opt_f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
            ..Routing::softmax(keys.usize("expert_used_count")?, keys.opt_bool("expert_weights_norm")?.unwrap_or(true))
        },
    };
    set_experts(config, experts, keys.opt_usize("leading_dense_block_count")?.unwrap_or(0));
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama_with_rotary_factor(fields, 0.5)?;
    blueprint.num_extra_layers = fields.opt_usize("num_nextn_predict_layers")?.unwrap_or(1);
    let config = &mut blueprint.config;
    config.qk_norm = fields.opt_bool("use_qk_norm")?.unwrap_or(false).then_some(QkNorm::Head);
    let mlp_size = fields.usize("moe_intermediate_size")?;
    let num_shared = fields.opt_usize("n_shared_experts")?.unwrap_or(1);
    let (num_groups, used_groups) =
        (fields.opt_usize("n_group")?.unwrap_or(1), fields.opt_usize("topk_group")?.unwrap_or(1));
    let experts = Experts {
        num_experts: fields.usize("n_routed_experts")?,
        mlp_size,
        shared_mlp_size: Some(mlp_size * num_shared).filter(|&size| size > 0),
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: fields.opt_f32("routed_scaling_factor")?.unwrap_or(1.0),
            groups: (num_groups != 1).then_some((num_groups, used_groups)),
            ..Routing::softmax(fields.usize("num_experts_per_tok")?, fields.opt_bool("norm_topk_prob")?.unwrap_or(true))
        },
    };
    set_experts(config, experts, fields.opt_usize("first_k_dense_replace")?.unwrap_or(1));
    Ok(())
}
