//! Gemma 2 and 3: norms after attention and MLP as well as before, embeddings scaled by the root of the hidden size, GELU gates,
//! norm weights stored as their distance from one (in Hugging Face files), windows on most layers.
//!
//! Gemma 2 caps attention scores and logits, and every second layer slides. Gemma 3 normalises queries and keys instead, five layers
//! of six slide, and those have rotary positions of their own.

use pellucid_tensor::Activation;

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Positions};
use crate::rope::{Rope, RopeScaling};

pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    gguf: Some(&GgufForm { name: "gemma2", read: read_gguf_2 }),
    hugging_face: &["gemma2"],
    read_hugging_face: read_2,
};

pub(super) const GEMMA3: Family = Family {
    name: "gemma3",
    gguf: Some(&GgufForm { name: "gemma3", read: read_gguf_3 }),
    hugging_face: &["gemma3_text", "gemma3"],
    read_hugging_face: read_3,
};

/// One layer in so many sees everything; the others slide.
const PERIOD_2: usize = 2;
const PERIOD_3: usize = 6;

fn both(config: &mut DecoderConfig) {
    config.output_norms = true;
    config.activation = Activation::GeluTanh;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
}

fn slide(config: &mut DecoderConfig, window: usize, sliding: impl Fn(usize) -> bool) {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.window = sliding(i).then_some(window);
    }
}

fn read_gguf_2(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    both(config);
    config.attention_soft_cap = keys.opt_f32("attn_logit_softcapping")?.or(Some(50.0));
    config.logits_soft_cap = keys.opt_f32("final_logit_softcapping")?.or(Some(30.0));
    // The format has no key for the scale; the 27B model, alone in having 46 layers, divides by hidden / heads.
    if config.num_layers() == 46 {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.num_heads as f32).sqrt();
    }
    slide(config, keys.usize("attention.sliding_window")?, |layer| !(layer + 1).is_multiple_of(PERIOD_2));
    Ok(())
}

fn read_gguf_3(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    both(config);
    config.qk_norm = true;
    config.logits_soft_cap = keys.opt_f32("final_logit_softcapping")?;
    // As for Gemma 2: the 27B model is the one with 62 layers.
    if config.num_layers() == 62 {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.num_heads as f32).sqrt();
    }
    let sliding_base = keys.opt_f32("rope.freq_base_swa")?.unwrap_or(10_000.0);
    if let (Positions::Rope { tables, .. }, None) = (&mut config.positions, keys.opt_f32("rope.freq_base")?) {
        tables[0].base = 1_000_000.0;
    }
    let window = keys.usize("attention.sliding_window")?;
    match keys.sliding_layers(config.num_layers())? {
        Some(sliding) => slide(config, window, |layer| sliding[layer]),
        None => slide(config, window, |layer| !(layer + 1).is_multiple_of(PERIOD_3)),
    }
    turn_sliding_layers(config, sliding_base);
    Ok(())
}

/// Gives sliding layers a rotary table of their own, unscaled.
fn turn_sliding_layers(config: &mut DecoderConfig, base: f32) {
    let rotary_size = config.head_size;
    if let Positions::Rope { tables, .. } = &mut config.positions {
        tables.push(Rope { base, rotary_size, scaling: RopeScaling::None });
    }
    config.layers.iter_mut().for_each(|layer| layer.rope = usize::from(layer.window.is_some()));
}

fn read_both(fields: Fields<'_>, blueprint: &mut Blueprint, period: usize) -> Result<(), Error> {
    blueprint.norms_from_one = true;
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    blueprint.names.attention_output_norm = "layers.{}.post_attention_layernorm";
    blueprint.names.mlp_norm = "layers.{}.pre_feedforward_layernorm";
    blueprint.names.mlp_output_norm = "layers.{}.post_feedforward_layernorm";
    let config = &mut blueprint.config;
    let activation = config.activation;
    both(config);
    config.activation = activation;
    config.attention_soft_cap = fields.opt_f32("attn_logit_softcapping")?;
    config.logits_soft_cap = fields.opt_f32("final_logit_softcapping")?;
    let scalar = fields.opt_f32("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = 1.0 / scalar.sqrt();
    let window = fields.opt_usize("sliding_window")?.unwrap_or(4096);
    match hugging_face::sliding_layers(fields, config.num_layers())? {
        Some(sliding) => slide(config, window, |layer| sliding[layer]),
        None => {
            let period = fields.opt_usize("sliding_window_pattern")?.unwrap_or(period).max(1);
            slide(config, window, |layer| !(layer + 1).is_multiple_of(period));
        }
    }
    Ok(())
}

fn read_2(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    read_both(fields, blueprint, PERIOD_2)
}

fn read_3(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    // The larger models see images too: their text part is a configuration and a set of tensors within.
    let fields = match fields.opt_object("text_config")? {
        Some(text) => {
            blueprint.names.prefixes = &["language_model.model.", "model.language_model."];
            blueprint.names.ignored = &["vision_tower.", "multi_modal_projector."];
            text
        }
        None => fields,
    };
    blueprint.config = hugging_face::gemma3(fields)?;
    blueprint.config.qk_norm = true;
    read_both(fields, blueprint, PERIOD_3)?;
    let config = &mut blueprint.config;
    let sliding_base = hugging_face::gemma3_sliding_base(fields)?;
    turn_sliding_layers(config, sliding_base);
    Ok(())
}
