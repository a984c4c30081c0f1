//! MiniMax-M2: an RMSNorm over all heads of queries and of keys, rotation of a part of each head, and experts with a
//! router of sigmoid scores whose bias selects and does not weigh.

use pellucid_tensor::{Routing, Scoring};

use super::{Blueprint, Family, GgufForm, mixtral};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, QkNorm};

pub(super) const MINIMAX_M2: Family = Family {
    name: "minimax-m2",
    gguf: Some(&GgufForm { name: "minimax-m2", read: read_gguf }),
    hugging_face: &["minimax_m2"],
    read_hugging_face,
};

const DEFAULT_ROPE_BASE: f32 = 5_000_000.0;

fn set_common(config: &mut DecoderConfig, num_experts: usize, mlp_size: usize, num_selected: usize) {
    config.qk_norm = Some(QkNorm::Row);
    let routing = Routing { scoring: Scoring::Sigmoid, ..Routing::softmax(num_selected, true) };
    config.experts = Some(Experts {
        num_experts,
        mlp_size,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing,
    });
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    let mlp_size = keys.opt_usize("expert_feed_forward_length")?.unwrap_or(config.mlp_size);
    set_common(config, keys.usize("expert_count")?, mlp_size, keys.usize("expert_used_count")?);
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama_with_rotary_size(fields, DEFAULT_ROPE_BASE, "rotary_dim")?;
    let config = &mut blueprint.config;
    let mlp_size = config.mlp_size;
    set_common(config, fields.usize("num_local_experts")?, mlp_size, fields.usize("num_experts_per_tok")?);
    mixtral::name_experts(&mut blueprint.names);
    blueprint.names.score_bias = "layers.{}.block_sparse_moe.e_score_correction_bias";
    Ok(())
}
