//! Granite 3: Llama with factors of the embeddings, of the attention scores and of what is added to the residual
//! stream, and a divisor of the logits. Granite 3 MoE has experts, of which one may be used by every token.

use pellucid_tensor::Routing;

use super::{Blueprint, Family, GgufForm, llama, mixtral};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts};
use crate::loader::experts::ExpertLayout;

pub(super) const GRANITE: Family = Family {
    name: "granite",
    gguf: Some(&GgufForm { name: "granite", read: read_gguf }),
    hugging_face: &["granite"],
    read_hugging_face,
};

pub(super) const GRANITE_MOE: Family = Family {
    name: "granite-moe",
    gguf: Some(&GgufForm { name: "granitemoe", read: read_gguf_mixture }),
    hugging_face: &["granitemoe", "granitemoeshared"],
    read_hugging_face: read_mixture,
};

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    llama::rotates_adjacent_values(config);
    // llama.cpp treats 0 as "not given".
    let factor = |key: &str| -> Result<Option<f32>, Error> { Ok(keys.opt_f32(key)?.filter(|&factor| factor != 0.0)) };
    config.attention_scale = factor("attention.scale")?.unwrap_or(config.attention_scale);
    config.embedding_scale = factor("embedding_scale")?.unwrap_or(1.0);
    config.residual_scale = factor("residual_scale")?.unwrap_or(1.0);
    config.logits_divisor = factor("logit_scale")?.unwrap_or(1.0);
    Ok(())
}

pub(super) fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    read_factors(fields, &mut blueprint.config)
}

fn read_factors(fields: Fields<'_>, config: &mut DecoderConfig) -> Result<(), Error> {
    config.attention_scale = fields.opt_f32("attention_multiplier")?.unwrap_or(1.0);
    config.embedding_scale = fields.opt_f32("embedding_multiplier")?.unwrap_or(1.0);
    config.residual_scale = fields.opt_f32("residual_multiplier")?.unwrap_or(1.0);
    config.logits_divisor = fields.opt_f32("logits_scaling")?.unwrap_or(1.0);
    Ok(())
}

pub(super) fn read_gguf_mixture(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_gguf(keys, blueprint)?;
    mixtral::read_gguf_experts(keys, &mut blueprint.config)?;
    if let Some(experts) = &mut blueprint.config.experts {
        experts.shared_mlp_size = keys.opt_usize("expert_shared_feed_forward_length")?.filter(|&size| size > 0);
    }
    Ok(())
}

pub(super) fn read_mixture(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_hugging_face(fields, blueprint)?;
    let config = &mut blueprint.config;
    config.experts = Some(Experts {
        num_experts: fields.usize("num_local_experts")?,
        mlp_size: config.mlp_size,
        shared_mlp_size: fields.opt_usize("shared_intermediate_size")?.filter(|&size| size > 0),
        shared_gate: false,
        biases: false,
        score_bias: false,
        // The softmax over the selected experts alone is the softmax over all of them, normalised.
        routing: Routing::softmax(fields.usize("num_experts_per_tok")?, true),
    });
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
    blueprint.expert_layout = ExpertLayout::Stacked;
    blueprint.names.router = "layers.{}.block_sparse_moe.router.layer";
    blueprint.names.fused_expert_gate_up = "layers.{}.block_sparse_moe.input_linear";
    blueprint.names.expert_down = "layers.{}.block_sparse_moe.output_linear";
    blueprint.names.fused_shared_gate_up = "layers.{}.shared_mlp.input_linear";
    blueprint.names.shared_down = "layers.{}.shared_mlp.output_linear";
    Ok(())
}
