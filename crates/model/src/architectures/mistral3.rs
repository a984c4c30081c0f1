//! The text models of Mistral Small 3.1 and 3.2 and of Ministral 3: Mistral in nested settings and tensors.
//!
//! Ministral 3 multiplies queries by a factor that grows with the position. It is exactly 1 for the positions that the
//! model was trained for before YaRN, so the context is limited to them.

use super::{Blueprint, Family, GgufForm, llama};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::Fields;
use crate::config::{DecoderConfig, Positions};
use crate::rope::RopeScaling;

pub(super) const MISTRAL3: Family = Family {
    name: "mistral3",
    gguf: Some(&GgufForm { name: "mistral3", read: read_gguf }),
    hugging_face: &["mistral3", "ministral3"],
    read_hugging_face,
};

/// Limits the context to the positions at which queries are not scaled.
fn limit_context(config: &mut DecoderConfig, unscaled: usize) {
    config.context_len = config.context_len.min(unscaled);
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    config.leaves_out_images = true;
    llama::rotates_adjacent_values(config);
    let window = keys.opt_usize("attention.sliding_window")?.filter(|&window| window > 0);
    config.layers.iter_mut().for_each(|layer| layer.window = window);
    let Positions::Rope { tables, .. } = &mut config.positions else { return Ok(()) };
    let RopeScaling::Yarn { original_context_len, .. } = &tables[0].scaling else { return Ok(()) };
    let unscaled = *original_context_len as usize;
    if keys.opt_f32("attention.temperature_scale")?.is_some_and(|scale| scale != 0.0) {
        limit_context(config, unscaled);
    }
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let text = match fields.opt_object("text_config")? {
        Some(text) => {
            blueprint.names.prefixes = &["language_model.model.", "model.language_model."];
            blueprint.names.ignored = &["vision_tower.", "multi_modal_projector."];
            blueprint.names.output = "language_model.lm_head";
            // The reference implementation ties them by default.
            blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(false);
            text
        }
        None => fields,
    };
    llama::read_mistral(text, blueprint)?;
    blueprint.config.leaves_out_images = fields.opt_object("text_config")?.is_some();
    let Some(rope) = text.opt_object("rope_parameters")? else { return Ok(()) };
    if rope.opt_f32("llama_4_scaling_beta")?.is_some_and(|beta| beta != 0.0) {
        limit_context(&mut blueprint.config, rope.usize("original_max_position_embeddings")?);
    }
    Ok(())
}
