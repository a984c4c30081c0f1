//! Qwen2 and 2.5: Llama with biases on query, key and value, and optionally a sliding window from some layer on.

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::DecoderConfig;
use crate::config::hugging_face::{self, Fields};

pub(super) const QWEN2: Family = Family {
    name: "qwen2",
    gguf: Some(&GgufForm { name: "qwen2", read: |_, _| Ok(()) }),
    hugging_face: &["qwen2"],
    read_hugging_face,
};

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    read_windows(fields, &mut blueprint.config)
}

/// Reads the sliding windows. `use_sliding_window` turns them on, for the layers in `layer_types` or from
/// `max_window_layers` on.
pub(super) fn read_windows(fields: Fields<'_>, config: &mut DecoderConfig) -> Result<(), Error> {
    if !fields.opt_bool("use_sliding_window")?.unwrap_or(false) {
        return Ok(());
    }
    let window = fields.usize("sliding_window")?;
    let num_layers = config.num_layers();
    let sliding = match hugging_face::sliding_layers(fields, num_layers)? {
        Some(sliding) => sliding,
        None => {
            let first = fields.opt_usize("max_window_layers")?.unwrap_or(num_layers);
            (0..num_layers).map(|layer| layer >= first).collect()
        }
    };
    for (layer, sliding) in config.layers.iter_mut().zip(sliding) {
        layer.window = sliding.then_some(window);
    }
    Ok(())
}
