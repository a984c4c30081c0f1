//! SmolLM3: Llama in which every fourth layer does not rotate queries and keys.
//!
//! A folder may list these layers, and may give them a sliding window. A GGUF file has no key for either.

use super::{Blueprint, Family, GgufForm, llama, qwen2};
use crate::Error;
use crate::config::DecoderConfig;
use crate::config::hugging_face::{self, Fields};

pub(super) const SMOLLM3: Family = Family {
    name: "smollm3",
    gguf: Some(&GgufForm {
        name: "smollm3",
        read: |_, blueprint| {
            llama::rotates_adjacent_values(&mut blueprint.config);
            set_period(&mut blueprint.config, DEFAULT_PERIOD);
            Ok(())
        },
    }),
    hugging_face: &["smollm3"],
    read_hugging_face,
};

/// The last layer of each period has no rotation.
const DEFAULT_PERIOD: usize = 4;
const DEFAULT_ROPE_BASE: f32 = 2_000_000.0;

fn set_period(config: &mut DecoderConfig, period: usize) {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.rope = (!(i + 1).is_multiple_of(period)).then_some(0);
    }
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    blueprint.config = hugging_face::llama_with_rope(fields, None, DEFAULT_ROPE_BASE)?;
    let config = &mut blueprint.config;
    qwen2::read_windows(fields, config)?;
    match fields.opt_usizes("no_rope_layers")? {
        // 1 for a layer with rotation, 0 for one without. The list may be longer than the model.
        Some(list) if list.len() < config.num_layers() => {
            return Err(fields.bad_list("no_rope_layers", config.num_layers()));
        }
        Some(list) => {
            for (layer, rotates) in config.layers.iter_mut().zip(list) {
                layer.rope = (rotates != 0).then_some(0);
            }
        }
        None => set_period(config, fields.opt_usize("no_rope_layer_interval")?.unwrap_or(DEFAULT_PERIOD).max(1)),
    }
    Ok(())
}
