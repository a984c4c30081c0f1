//! Granite 4.0: Granite with Mamba-2 in place of attention in most layers or in none, and a dense MLP or experts of
//! which one is used by every token. Attention beside Mamba-2 usually has no rotation.

use pellucid_tensor::{Activation, Mamba2Shape};

use super::{Blueprint, Family, GgufForm, granite};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::config::{DecoderConfig, Mamba2Config, Mixer, Positions};

pub(super) const GRANITE_HYBRID: Family = Family {
    name: "granite-hybrid",
    gguf: Some(&GgufForm { name: "granitehybrid", read: read_gguf }),
    hugging_face: &["granitemoehybrid"],
    read_hugging_face,
};

/// Sets the layers without attention, and the Mamba-2 layers if there are any.
fn set_mixers(
    config: &mut DecoderConfig,
    has_attention: &[bool],
    mamba2: impl FnOnce() -> Result<Mamba2Config, Error>,
) -> Result<(), Error> {
    for (layer, has_attention) in config.layers.iter_mut().zip(has_attention) {
        layer.mixer = if *has_attention { Mixer::Attention } else { Mixer::Mamba2 };
    }
    if config.has_mixer(Mixer::Mamba2) {
        config.mamba2 = Some(mamba2()?);
    }
    Ok(())
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    granite::read_gguf_mixture(keys, blueprint)?;
    let config = &mut blueprint.config;
    // The format has no key for this; llama.cpp takes this one.
    if keys.opt_bool("rope.scaling.finetuned")? == Some(false) {
        config.positions = Positions::None;
        blueprint.interleaves_unrotated = true;
    }
    let kv_heads = keys.of_layers("attention.head_count_kv", config.num_layers())?;
    let has_attention: Vec<bool> = kv_heads.into_iter().map(|count| count > 0).collect();
    set_mixers(config, &has_attention, || keys.mamba2())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let shared = fields.opt_usize("shared_intermediate_size")?.unwrap_or(1024);
    match fields.opt_usize("num_local_experts")? {
        Some(0) => {
            granite::read_hugging_face(fields, blueprint)?;
            blueprint.config.mlp_size = shared;
            blueprint.names.fused_gate_up = "layers.{}.shared_mlp.input_linear";
            blueprint.names.down = "layers.{}.shared_mlp.output_linear";
        }
        _ => granite::read_mixture(fields, blueprint)?,
    }
    let config = &mut blueprint.config;
    if fields.opt_str("position_embedding_type")? != Some("rope") {
        config.positions = Positions::None;
    }
    let kinds = [("mamba", false), ("linear_attention", false), ("attention", true), ("full_attention", true)];
    let has_attention = match fields.kinds_of_layers("layer_types", &kinds)? {
        Some(list) if list.len() != config.num_layers() => {
            return Err(fields.bad_list("layer_types", config.num_layers()));
        }
        Some(list) => list,
        None => vec![false; config.num_layers()],
    };
    let (hidden_size, activation) = (config.hidden_size, config.activation);
    set_mixers(config, &has_attention, || read_mamba2(fields, hidden_size, activation))
}

fn read_mamba2(fields: Fields<'_>, hidden_size: usize, activation: Activation) -> Result<Mamba2Config, Error> {
    if activation != Activation::Silu {
        return Err(Error::BadSetting {
            key: "config.json: hidden_act".into(),
            expected: "silu, which Mamba-2 layers use".into(),
            found: format!("{activation:?}"),
        });
    }
    let num_heads = fields.opt_usize("mamba_n_heads")?.unwrap_or(128);
    let width = fields.opt_usize("mamba_expand")?.unwrap_or(2) * hidden_size;
    let shape = Mamba2Shape {
        num_heads,
        // Files may give the size of a head too; it is this one, or the reference implementation refuses it.
        head_size: width / num_heads.max(1),
        num_groups: fields.opt_usize("mamba_n_groups")?.unwrap_or(1),
        state_size: fields.opt_usize("mamba_d_state")?.unwrap_or(256),
        num_taps: fields.opt_usize("mamba_d_conv")?.unwrap_or(4),
        norm_size: width,
    };
    let time_limits = fields.opt_limits("time_step_limit")?.unwrap_or(Mamba2Config::NO_LIMITS);
    Ok(Mamba2Config { shape, time_limits })
}
