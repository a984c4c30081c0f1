//! gpt-oss: attention sinks, biases everywhere, a sliding window in every other layer, YaRN with unrounded ends, and
//! experts with a clamped SwiGLU.

use pellucid_tensor::{Activation, Routing};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, Positions};
use crate::loader::experts::ExpertLayout;
use crate::rope::RopeScaling;

pub(super) const GPT_OSS: Family = Family {
    name: "gpt-oss",
    gguf: Some(&GgufForm { name: "gpt-oss", read: read_gguf }),
    hugging_face: &["gpt_oss"],
    read_hugging_face,
};

const DEFAULT_ROPE_BASE: f32 = 150_000.0;
const DEFAULT_WINDOW: usize = 128;
/// The constants of the activation, which are part of its definition here.
const SWIGLU: [(&str, f32); 2] = [("swiglu_limit", 7.0), ("swiglu_alpha", 1.702)];

fn set_common(config: &mut DecoderConfig, experts: Experts) {
    config.attention_sinks = true;
    config.activation = Activation::ClampedSwiglu;
    config.experts = Some(experts);
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
}

/// Every other layer has a sliding window, the first one included.
fn is_sliding(layer: usize) -> bool {
    layer.is_multiple_of(2)
}

fn set_windows(config: &mut DecoderConfig, window: usize, sliding: impl Fn(usize) -> bool) {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.window = sliding(i).then_some(window);
    }
}

fn experts(num_experts: usize, mlp_size: usize, num_selected: usize) -> Experts {
    // The softmax over the selected experts alone is the softmax over all of them, normalised.
    let routing = Routing::softmax(num_selected, true);
    Experts {
        num_experts,
        mlp_size,
        shared_mlp_size: None,
        shared_gate: false,
        biases: true,
        score_bias: false,
        routing,
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.names.mlp_norm = "blk.{}.post_attention_norm";
    let config = &mut blueprint.config;
    let mlp_size = keys.opt_usize("expert_feed_forward_length")?.unwrap_or(config.mlp_size);
    set_common(config, experts(keys.usize("expert_count")?, mlp_size, keys.usize("expert_used_count")?));
    let window = keys.usize("attention.sliding_window")?;
    match keys.sliding_layers(config.num_layers())? {
        Some(sliding) => set_windows(config, window, |layer| sliding[layer]),
        None => set_windows(config, window, is_sliding),
    }
    // The format has no key for this; the published models do not round.
    if let Positions::Rope { tables, .. } = &mut config.positions
        && let RopeScaling::Yarn { truncate, .. } = &mut tables[0].scaling
    {
        *truncate = false;
    }
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    for (key, expected) in SWIGLU {
        fields.must_equal(key, expected)?;
    }
    blueprint.config = hugging_face::llama_with_rope(fields, None, DEFAULT_ROPE_BASE)?;
    let config = &mut blueprint.config;
    let num_selected = match fields.opt_usize("num_experts_per_tok")? {
        Some(count) => count,
        None => fields.usize("experts_per_token")?,
    };
    set_common(config, experts(fields.usize("num_local_experts")?, config.mlp_size, num_selected));
    let window = fields.opt_usize("sliding_window")?.unwrap_or(DEFAULT_WINDOW);
    match hugging_face::sliding_layers(fields, config.num_layers())? {
        Some(sliding) => set_windows(config, window, |layer| sliding[layer]),
        None => set_windows(config, window, is_sliding),
    }
    blueprint.expert_layout = ExpertLayout::Interleaved;
    blueprint.names.router = "layers.{}.mlp.router";
    blueprint.names.fused_expert_gate_up = "layers.{}.mlp.experts.gate_up_proj";
    blueprint.names.expert_down = "layers.{}.mlp.experts.down_proj";
    Ok(())
}
