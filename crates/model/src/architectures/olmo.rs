//! OLMo 2 and 3: norms after attention and MLP, none before them, and an RMSNorm over all heads of queries and of keys.
//!
//! In OLMo 3, three layers of four have a sliding window; their rotation is not scaled. A GGUF file of OLMo 3 has the
//! architecture `olmo2` and a window.

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Positions, QkNorm};
use crate::rope::{RopeConfig, RopeScaling};

const GGUF: GgufForm = GgufForm { name: "olmo2", read: read_gguf };

pub(super) const OLMO2: Family = Family {
    name: "olmo2",
    gguf: Some(&GGUF),
    hugging_face: &["olmo2"],
    read_hugging_face: |fields, blueprint| read_common(fields, blueprint, (None, 10_000.0)),
};

pub(super) const OLMO3: Family =
    Family { name: "olmo3", gguf: Some(&GGUF), hugging_face: &["olmo3"], read_hugging_face: read_olmo3 };

/// The last layer of each period attends to all positions.
const PERIOD: usize = 4;
const DEFAULT_ROPE_BASE: f32 = 500_000.0;

fn set_norms(config: &mut DecoderConfig) {
    config.input_norms = false;
    config.output_norms = true;
    config.qk_norm = Some(QkNorm::Row);
}

/// Gives the layers for which `sliding` is true a window, and the second rotary table.
fn set_windows(config: &mut DecoderConfig, window: usize, rope: RopeConfig, sliding: impl Fn(usize) -> bool) {
    if let Positions::Rope { tables, .. } = &mut config.positions {
        tables.push(rope);
    }
    for (_, layer) in config.layers.iter_mut().enumerate().filter(|(i, _)| sliding(*i)) {
        (layer.window, layer.rope) = (Some(window), Some(1));
    }
}

fn is_sliding(layer: usize) -> bool {
    !(layer + 1).is_multiple_of(PERIOD)
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    set_norms(config);
    let Some(window) = keys.opt_usize("attention.sliding_window")?.filter(|&window| window > 0) else { return Ok(()) };
    let base = match &config.positions {
        Positions::Rope { tables, .. } => tables[0].base,
        _ => DEFAULT_ROPE_BASE,
    };
    let base = keys.opt_f32("rope.freq_base_swa")?.unwrap_or(base);
    let rope = RopeConfig { base, rotary_size: config.head_size, scaling: RopeScaling::None };
    match keys.sliding_layers(config.num_layers())? {
        Some(sliding) => set_windows(config, window, rope, |layer| sliding[layer]),
        None => set_windows(config, window, rope, is_sliding),
    }
    Ok(())
}

/// Reads the settings of both. `kind` is the kind of layer whose rotary settings come first, `base` the rotary base of
/// a file without one.
fn read_common(
    fields: Fields<'_>,
    blueprint: &mut Blueprint,
    (kind, base): (Option<&'static str>, f32),
) -> Result<(), Error> {
    blueprint.names.attention_output_norm = "layers.{}.post_attention_layernorm";
    blueprint.names.mlp_output_norm = "layers.{}.post_feedforward_layernorm";
    blueprint.config = hugging_face::llama_with_rope(fields, kind, base)?;
    set_norms(&mut blueprint.config);
    Ok(())
}

fn read_olmo3(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    read_common(fields, blueprint, (Some("full_attention"), DEFAULT_ROPE_BASE))?;
    let config = &mut blueprint.config;
    let window = fields.opt_usize("sliding_window")?.unwrap_or(4096);
    let rope = hugging_face::sliding_rope(fields, DEFAULT_ROPE_BASE, config.head_size)?;
    match hugging_face::sliding_layers(fields, config.num_layers())? {
        Some(sliding) => set_windows(config, window, rope, |layer| sliding[layer]),
        None => set_windows(config, window, rope, is_sliding),
    }
    Ok(())
}
