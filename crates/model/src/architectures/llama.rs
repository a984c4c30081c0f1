//! Llama 2 and 3, SmolLM2 and other models of this family; Mistral.
//!
//! This is the base case: RMSNorm before attention and MLP, rotary positions, grouped queries, SiLU gates. The other
//! families are described by their differences from it. Mistral adds a sliding window over all layers; its GGUF files
//! have the architecture `llama`.

use pellucid_tensor::RopeStyle;

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, LayerConfig, Positions};

/// Also used by Mistral and Mixtral.
pub(super) const GGUF: GgufForm = GgufForm { name: "llama", read: read_gguf };

pub(super) const LLAMA: Family = Family {
    name: "llama",
    gguf: Some(&GGUF),
    hugging_face: &["llama"],
    read_hugging_face: |fields, blueprint| {
        blueprint.config = hugging_face::llama(fields)?;
        Ok(())
    },
};

pub(super) const MISTRAL: Family =
    Family { name: "mistral", gguf: Some(&GGUF), hugging_face: &["mistral"], read_hugging_face: read_mistral };

/// Marks a file whose converter reordered the rows of Wq and Wk so that adjacent values are rotated together.
pub(super) fn rotates_adjacent_values(config: &mut DecoderConfig) {
    if let Positions::Rope { style, .. } = &mut config.positions {
        *style = RopeStyle::Interleaved;
    }
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    rotates_adjacent_values(config);
    let window = keys.opt_usize("attention.sliding_window")?.filter(|&window| window > 0);
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    super::mixtral::read_gguf_experts(keys, config)
}

pub(super) fn read_mistral(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    let window = fields.opt_usize("sliding_window")?;
    blueprint.config.layers.fill(LayerConfig { window, ..LayerConfig::PLAIN });
    Ok(())
}
