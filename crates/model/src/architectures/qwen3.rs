//! Qwen3 and Qwen3-MoE: Qwen2 without the biases, with an RMSNorm over each head's query and key.
//!
//! In Qwen3-MoE the configuration may keep some layers dense, and may leave the experts' weights unnormalised.

use pellucid_tensor::Routing;

use super::{Blueprint, Family, GgufForm, qwen2};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, QkNorm};

pub(super) const QWEN3: Family = Family {
    name: "qwen3",
    gguf: Some(&GgufForm {
        name: "qwen3",
        read: |_, blueprint| {
            blueprint.config.qk_norm = Some(QkNorm::Head);
            Ok(())
        },
    }),
    hugging_face: &["qwen3"],
    read_hugging_face: read_dense,
};

pub(super) const QWEN3_MOE: Family = Family {
    name: "qwen3-moe",
    gguf: Some(&GgufForm { name: "qwen3moe", read: read_gguf_mixture }),
    hugging_face: &["qwen3_moe"],
    read_hugging_face: read_mixture,
};

fn read_dense(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    blueprint.config.qk_norm = Some(QkNorm::Head);
    qwen2::read_windows(fields, &mut blueprint.config)
}

pub(super) fn read_gguf_mixture(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config.qk_norm = Some(QkNorm::Head);
    super::mixtral::read_gguf_experts(keys, &mut blueprint.config)
}

fn read_mixture(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_dense(fields, blueprint)?;
    read_experts(fields, &mut blueprint.config, false)
}

/// Reads the mixture of experts. `normalizes` is the default of `norm_topk_prob`.
pub(super) fn read_experts(fields: Fields<'_>, config: &mut DecoderConfig, normalizes: bool) -> Result<(), Error> {
    let num_experts = match fields.opt_usize("num_experts")? {
        Some(count) => count,
        None => fields.usize("num_local_experts")?,
    };
    config.experts = Some(Experts {
        num_experts,
        mlp_size: fields.usize("moe_intermediate_size")?,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: false,
        routing: Routing::softmax(
            fields.usize("num_experts_per_tok")?,
            fields.opt_bool("norm_topk_prob")?.unwrap_or(normalizes),
        ),
    });
    let step = fields.opt_usize("decoder_sparse_step")?.unwrap_or(1).max(1);
    let dense = fields.opt_usizes("mlp_only_layers")?.unwrap_or_default();
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.experts = !dense.contains(&i) && (i + 1).is_multiple_of(step);
    }
    Ok(())
}
