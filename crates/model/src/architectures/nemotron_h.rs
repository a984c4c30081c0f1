//! Nemotron-H, Nemotron Nano 2 and Nemotron 3: each layer is one of Mamba-2, attention without rotation, an ungated MLP
//! with squared ReLU, or ungated experts of which one is used by every token. The experts of Nemotron 3 Super read a
//! projection of their input.
//!
//! The reference implementation raises time steps to `time_step_min` in prefill, but not in decode.
//! That setting bounds the initial values of training. Like llama.cpp, this file sets no limit, and one function serves
//! both.
//!
//! Layers that predict further tokens are not loaded.

use pellucid_tensor::{Activation, Mamba2Shape, Routing, Scoring};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::config::{DecoderConfig, Experts, Mamba2Config, Mixer, MlpKind, NormKind, Positions, plain_layers};
use crate::loader::tensor_names::TensorNames;

pub(super) const NEMOTRON_H: Family = Family {
    name: "nemotron-h",
    gguf: Some(&GgufForm { name: "nemotron_h", read: read_gguf }),
    hugging_face: &["nemotron_h"],
    read_hugging_face,
};

/// The form of GGUF files with experts. Folders of both are of the family above.
pub(super) const NEMOTRON_H_MOE: Family = Family {
    name: "nemotron-h-moe",
    gguf: Some(&GgufForm { name: MOE_GGUF, read: read_gguf_mixture }),
    hugging_face: &[],
    read_hugging_face,
};

pub(super) const MOE_GGUF: &str = "nemotron_h_moe";

/// The one part of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Mamba,
    Attention,
    Mlp,
    Experts,
}

/// Names and letters of the kinds of layers.
const KINDS: [(&str, Kind); 6] = [
    ("mamba", Kind::Mamba),
    ("linear_attention", Kind::Mamba),
    ("attention", Kind::Attention),
    ("full_attention", Kind::Attention),
    ("mlp", Kind::Mlp),
    ("moe", Kind::Experts),
];
const LETTERS: [(char, Kind); 4] = [('M', Kind::Mamba), ('*', Kind::Attention), ('-', Kind::Mlp), ('E', Kind::Experts)];

fn set_common(config: &mut DecoderConfig, kinds: &[Kind], mamba2: Mamba2Config) {
    config.norm = NormKind::Rms;
    config.positions = Positions::None;
    config.mlp = MlpKind::Plain;
    config.activation = Activation::SquaredRelu;
    config.mamba2 = Some(mamba2);
    for (layer, kind) in config.layers.iter_mut().zip(kinds) {
        layer.mixer = match kind {
            Kind::Mamba => Mixer::Mamba2,
            Kind::Attention => Mixer::Attention,
            Kind::Mlp | Kind::Experts => Mixer::None,
        };
        layer.has_mlp = layer.mixer == Mixer::None;
        layer.experts = *kind == Kind::Experts;
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_gguf_layers(keys, blueprint, Kind::Mlp)
}

fn read_gguf_mixture(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let num_blocks = blueprint.config.num_layers();
    blueprint.num_extra_layers = keys.opt_usize("nextn_predict_layers")?.unwrap_or(0);
    blueprint.config.layers.truncate(num_blocks.saturating_sub(blueprint.num_extra_layers));
    read_gguf_layers(keys, blueprint, Kind::Experts)?;
    let config = &mut blueprint.config;
    config.expert_input_size = keys.opt_usize("moe_latent_size")?.filter(|&size| size > 0);
    config.experts = Some(Experts {
        num_experts: keys.usize("expert_count")?,
        mlp_size: keys.opt_usize("expert_feed_forward_length")?.unwrap_or(config.mlp_size),
        shared_mlp_size: Some(keys.usize("expert_shared_feed_forward_length")?).filter(|&size| size > 0),
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: keys.opt_f32("expert_weights_scale")?.filter(|&scale| scale != 0.0).unwrap_or(1.0),
            ..Routing::softmax(keys.usize("expert_used_count")?, keys.opt_bool("expert_weights_norm")?.unwrap_or(false))
        },
    });
    Ok(())
}

/// Finds the kind of each layer: with key heads it has attention, with a width of the MLP it is of kind `mlp`.
fn read_gguf_layers(keys: Keys<'_>, blueprint: &mut Blueprint, mlp: Kind) -> Result<(), Error> {
    // The only norm of a layer.
    blueprint.names.mlp_norm = blueprint.names.attention_norm;
    blueprint.interleaves_unrotated = true;
    let num_blocks = blueprint.config.num_layers() + blueprint.num_extra_layers;
    let kv_heads = keys.of_layers("attention.head_count_kv", num_blocks)?;
    let widths = keys.of_layers("feed_forward_length", num_blocks)?;
    let kind = |(&heads, &width): (&usize, &usize)| match (heads, width) {
        (1.., _) => Kind::Attention,
        (0, 1..) => mlp,
        (0, 0) => Kind::Mamba,
    };
    let kinds: Vec<Kind> = kv_heads.iter().zip(&widths).map(kind).collect();
    set_common(&mut blueprint.config, &kinds, keys.mamba2()?);
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    must_name(fields, "mamba_hidden_act", "silu")?;
    must_name(fields, "mlp_hidden_act", "relu2")?;
    if fields.opt_limits("time_step_limit")?.is_some_and(|limits| limits != Mamba2Config::NO_LIMITS) {
        return Err(fields.unsupported("time_step_limit", "[0.0, Infinity], as the reference does not read it"));
    }
    let kinds = read_kinds(fields)?;
    let has_experts = kinds.contains(&Kind::Experts);
    let num_heads = fields.opt_usize("num_attention_heads")?.unwrap_or(32);
    let head_size = fields.opt_usize("head_dim")?.or(fields.opt_usize("attention_head_dim")?).unwrap_or(128);
    let mut config = DecoderConfig {
        hidden_size: fields.opt_usize("hidden_size")?.unwrap_or(4096),
        num_heads,
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(8),
        head_size,
        mlp_size: fields.opt_usize("intermediate_size")?.unwrap_or(21_504),
        context_len: fields.opt_usize("max_position_embeddings")?.unwrap_or(4096),
        norm_eps: fields.opt_f32("layer_norm_epsilon")?.unwrap_or(1e-5),
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(kinds.len()),
        ..DecoderConfig::EMPTY
    };
    set_common(&mut config, &kinds, read_mamba2(fields)?);
    if has_experts {
        read_experts(fields, &mut config)?;
        if !kinds.contains(&Kind::Mlp) {
            // GGUF files have the one width that is used.
            config.mlp_size = config.experts.map_or(config.mlp_size, |experts| experts.mlp_size);
        }
    }
    blueprint.config = config;
    set_names(&mut blueprint.names);
    Ok(())
}

fn must_name(fields: Fields<'_>, key: &str, value: &str) -> Result<(), Error> {
    match fields.opt_str(key)? {
        Some(found) if found != value => Err(fields.unsupported(key, value)),
        _ => Ok(()),
    }
}

/// Returns the kinds of layers: from a list of names, or from a string of letters.
fn read_kinds(fields: Fields<'_>) -> Result<Vec<Kind>, Error> {
    for key in ["layers_block_type", "layer_types"] {
        if let Some(kinds) = fields.kinds_of_layers(key, &KINDS)? {
            return Ok(kinds);
        }
    }
    let key = "hybrid_override_pattern";
    let letters = fields.opt_str(key)?.unwrap_or_default();
    let kind = |letter: char| LETTERS.into_iter().find(|(known, _)| *known == letter).map(|(_, kind)| kind);
    let kinds: Option<Vec<Kind>> = letters.chars().map(kind).collect();
    kinds.filter(|kinds| !kinds.is_empty()).ok_or_else(|| fields.unsupported(key, "a letter of M*-E for each layer"))
}

fn read_mamba2(fields: Fields<'_>) -> Result<Mamba2Config, Error> {
    // Older files have the first of two names.
    let either = |keys: [&str; 2], default: usize| -> Result<usize, Error> {
        Ok(fields.opt_usize(keys[0])?.or(fields.opt_usize(keys[1])?).unwrap_or(default))
    };
    let num_heads = fields.opt_usize("mamba_num_heads")?.unwrap_or(128);
    let head_size = fields.opt_usize("mamba_head_dim")?.unwrap_or(64);
    let num_groups = either(["mamba_n_groups", "n_groups"], 8)?;
    let shape = Mamba2Shape {
        num_heads,
        head_size,
        num_groups,
        state_size: fields.opt_usize("ssm_state_size")?.unwrap_or(128),
        num_taps: either(["mamba_d_conv", "conv_kernel"], 4)?,
        norm_size: num_heads * head_size / num_groups.max(1),
    };
    Ok(Mamba2Config { shape, time_limits: Mamba2Config::NO_LIMITS })
}

fn read_experts(fields: Fields<'_>, config: &mut DecoderConfig) -> Result<(), Error> {
    let (num_groups, used_groups) =
        (fields.opt_usize("n_group")?.unwrap_or(1), fields.opt_usize("topk_group")?.unwrap_or(1));
    config.expert_input_size = fields.opt_usize("moe_latent_size")?;
    config.experts = Some(Experts {
        num_experts: fields.usize("n_routed_experts")?,
        mlp_size: fields.usize("moe_intermediate_size")?,
        shared_mlp_size: Some(fields.usize("moe_shared_expert_intermediate_size")?),
        shared_gate: false,
        biases: false,
        score_bias: true,
        routing: Routing {
            scoring: Scoring::Sigmoid,
            scale: fields.opt_f32("routed_scaling_factor")?.unwrap_or(1.0),
            groups: (num_groups != 1).then_some((num_groups, used_groups)),
            ..Routing::softmax(fields.usize("num_experts_per_tok")?, fields.opt_bool("norm_topk_prob")?.unwrap_or(true))
        },
    });
    Ok(())
}

fn set_names(names: &mut TensorNames) {
    names.prefixes = &["backbone.", "model."];
    names.token_embedding = "embeddings";
    names.final_norm = "norm_f";
    names.attention_norm = "layers.{}.norm";
    names.mlp_norm = "layers.{}.norm";
    names.query = "layers.{}.mixer.q_proj";
    names.key = "layers.{}.mixer.k_proj";
    names.value = "layers.{}.mixer.v_proj";
    names.attention_output = "layers.{}.mixer.o_proj";
    names.mamba_input = "layers.{}.mixer.in_proj";
    names.mamba_convolution = "layers.{}.mixer.conv1d";
    names.mamba_decay = "layers.{}.mixer.A_log";
    names.mamba_time_bias = "layers.{}.mixer.dt_bias";
    names.mamba_skip = "layers.{}.mixer.D";
    names.mamba_norm = "layers.{}.mixer.norm";
    names.mamba_output = "layers.{}.mixer.out_proj";
    names.up = "layers.{}.mixer.up_proj";
    names.down = "layers.{}.mixer.down_proj";
    names.router = "layers.{}.mixer.gate";
    names.score_bias = "layers.{}.mixer.gate.e_score_correction_bias";
    names.expert_up = "layers.{}.mixer.experts.{expert}.up_proj";
    names.expert_down = "layers.{}.mixer.experts.{expert}.down_proj";
    names.expert_input = "layers.{}.mixer.fc1_latent_proj";
    names.expert_output = "layers.{}.mixer.fc2_latent_proj";
    names.shared_up = "layers.{}.mixer.shared_experts.up_proj";
    names.shared_down = "layers.{}.mixer.shared_experts.down_proj";
    names.predicting = &["mtp."];
}
