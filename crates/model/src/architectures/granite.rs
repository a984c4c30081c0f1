//! Granite 3: Llama with factors of the embeddings, of the attention scores and of what is added to the residual
//! stream, and a divisor of the logits.

use super::{Blueprint, Family, GgufForm, llama};
use crate::Error;
use crate::config::DecoderConfig;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};

pub(super) const GRANITE: Family = Family {
    name: "granite",
    gguf: Some(&GgufForm { name: "granite", read: read_gguf }),
    hugging_face: &["granite"],
    read_hugging_face,
};

pub(super) fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    llama::rotates_adjacent_values(config);
    // llama.cpp treats 0 as "not given".
    let factor = |key: &str| -> Result<Option<f32>, Error> { Ok(keys.opt_f32(key)?.filter(|&factor| factor != 0.0)) };
    config.attention_scale = factor("attention.scale")?.unwrap_or(config.attention_scale);
    config.embedding_scale = factor("embedding_scale")?.unwrap_or(1.0);
    config.residual_scale = factor("residual_scale")?.unwrap_or(1.0);
    config.logits_divisor = factor("logit_scale")?.unwrap_or(1.0);
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    read_factors(fields, &mut blueprint.config)
}

pub(super) fn read_factors(fields: Fields<'_>, config: &mut DecoderConfig) -> Result<(), Error> {
    config.attention_scale = fields.opt_f32("attention_multiplier")?.unwrap_or(1.0);
    config.embedding_scale = fields.opt_f32("embedding_multiplier")?.unwrap_or(1.0);
    config.residual_scale = fields.opt_f32("residual_multiplier")?.unwrap_or(1.0);
    config.logits_divisor = fields.opt_f32("logits_scaling")?.unwrap_or(1.0);
    Ok(())
}
