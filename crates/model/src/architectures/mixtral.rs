//! Mixtral: Mistral with a mixture of experts in place of the MLP. The weights of the selected experts add up to one.

use pellucid_tensor::Routing;

use super::{Blueprint, Family, llama};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::config::{DecoderConfig, Experts};
use crate::loader::tensor_names::TensorNames;

pub(super) const MIXTRAL: Family =
    Family { name: "mixtral", gguf: Some(&llama::GGUF), hugging_face: &["mixtral"], read_hugging_face };

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    llama::read_mistral(fields, blueprint)?;
    let config = &mut blueprint.config;
    config.experts = Some(Experts {
        num_experts: fields.usize("num_local_experts")?,
        mlp_size: config.mlp_size,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: false,
        routing: Routing::softmax(fields.usize("num_experts_per_tok")?, true),
    });
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
    name_experts(&mut blueprint.names);
    Ok(())
}

/// Sets the names of the router and of the experts.
pub(super) fn name_experts(names: &mut TensorNames) {
    names.router = "layers.{}.block_sparse_moe.gate";
    names.expert_gate = "layers.{}.block_sparse_moe.experts.{expert}.w1";
    names.expert_down = "layers.{}.block_sparse_moe.experts.{expert}.w2";
    names.expert_up = "layers.{}.block_sparse_moe.experts.{expert}.w3";
}

/// Reads the mixture of experts of a GGUF file. Files without `expert_count` have none; in files with it, every layer
/// has one.
pub(super) fn read_gguf_experts(keys: Keys<'_>, config: &mut DecoderConfig) -> Result<(), Error> {
    let Some(num_experts) = keys.opt_usize("expert_count")?.filter(|&count| count > 0) else { return Ok(()) };
    config.experts = Some(Experts {
        num_experts,
        mlp_size: keys.opt_usize("expert_feed_forward_length")?.unwrap_or(config.mlp_size),
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: false,
        routing: Routing::softmax(keys.usize("expert_used_count")?, true),
    });
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
    Ok(())
}
