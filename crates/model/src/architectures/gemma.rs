//! Gemma 2 and 3: norms after attention and MLP as well as before, embeddings scaled by the square root of the hidden
//! size, GELU gates, norm weights stored minus one (in Hugging Face files), sliding windows on most layers.
//!
//! Gemma 2 soft-caps attention scores and logits, and every second layer has a sliding window. Gemma 3 normalises
//! queries and keys instead; five layers of six have a sliding window, and these have a rotary base of their own.

use pellucid_tensor::Activation;

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Positions, QkNorm};
use crate::rope::{RopeConfig, RopeScaling};

pub(super) const GEMMA2: Family = Family {
    name: "gemma2",
    gguf: Some(&GgufForm { name: "gemma2", read: read_gguf_gemma2 }),
    hugging_face: &["gemma2"],
    read_hugging_face: read_gemma2,
};

pub(super) const GEMMA3: Family = Family {
    name: "gemma3",
    gguf: Some(&GgufForm { name: "gemma3", read: read_gguf_gemma3 }),
    hugging_face: &["gemma3_text", "gemma3"],
    read_hugging_face: read_gemma3,
};

/// The last layer of each period attends to all positions; the others have a sliding window.
const GEMMA2_PERIOD: usize = 2;
const GEMMA3_PERIOD: usize = 6;

fn set_common(config: &mut DecoderConfig) {
    config.output_norms = true;
    config.activation = Activation::GeluTanh;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
}

fn set_windows(config: &mut DecoderConfig, window: usize, sliding: impl Fn(usize) -> bool) {
    for (i, layer) in config.layers.iter_mut().enumerate() {
        layer.window = sliding(i).then_some(window);
    }
}

fn read_gguf_gemma2(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    set_common(config);
    config.attention_soft_cap = keys.opt_f32("attn_logit_softcapping")?.or(Some(50.0));
    config.logits_soft_cap = keys.opt_f32("final_logit_softcapping")?.or(Some(30.0));
    // The format has no key for the attention scale. The 27B model, the only one with 46 layers, uses 1 / sqrt(hidden /
    // heads).
    if config.num_layers() == 46 {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.num_heads as f32).sqrt();
    }
    set_windows(config, keys.usize("attention.sliding_window")?, |layer| !(layer + 1).is_multiple_of(GEMMA2_PERIOD));
    Ok(())
}

fn read_gguf_gemma3(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    set_common(config);
    config.qk_norm = Some(QkNorm::Head);
    config.logits_soft_cap = keys.opt_f32("final_logit_softcapping")?;
    // The format has no key for the attention scale. The 27B model, the only one with 62 layers, uses 1 / sqrt(hidden /
    // heads).
    if config.num_layers() == 62 {
        config.attention_scale = 1.0 / (config.hidden_size as f32 / config.num_heads as f32).sqrt();
    }
    let sliding_base = keys.opt_f32("rope.freq_base_swa")?.unwrap_or(10_000.0);
    if let (Positions::Rope { tables, .. }, None) = (&mut config.positions, keys.opt_f32("rope.freq_base")?) {
        tables[0].base = 1_000_000.0;
    }
    let window = keys.usize("attention.sliding_window")?;
    match keys.sliding_layers(config.num_layers())? {
        Some(sliding) => set_windows(config, window, |layer| sliding[layer]),
        None => set_windows(config, window, |layer| !(layer + 1).is_multiple_of(GEMMA3_PERIOD)),
    }
    add_sliding_rope(config, sliding_base);
    Ok(())
}

/// Gives layers with a sliding window their own rotary table, without scaling.
fn add_sliding_rope(config: &mut DecoderConfig, base: f32) {
    let rotary_size = config.head_size;
    if let Positions::Rope { tables, .. } = &mut config.positions {
        tables.push(RopeConfig { base, rotary_size, scaling: RopeScaling::None });
    }
    config.layers.iter_mut().for_each(|layer| layer.rope = Some(usize::from(layer.window.is_some())));
}

fn read_common(fields: Fields<'_>, blueprint: &mut Blueprint, period: usize) -> Result<(), Error> {
    blueprint.norms_minus_one = true;
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    blueprint.names.attention_output_norm = "layers.{}.post_attention_layernorm";
    blueprint.names.mlp_norm = "layers.{}.pre_feedforward_layernorm";
    blueprint.names.mlp_output_norm = "layers.{}.post_feedforward_layernorm";
    let config = &mut blueprint.config;
    let activation = config.activation;
    set_common(config);
    config.activation = activation;
    config.attention_soft_cap = fields.opt_f32("attn_logit_softcapping")?;
    config.logits_soft_cap = fields.opt_f32("final_logit_softcapping")?;
    let scalar = fields.opt_f32("query_pre_attn_scalar")?.unwrap_or(256.0);
    config.attention_scale = 1.0 / scalar.sqrt();
    let window = fields.opt_usize("sliding_window")?.unwrap_or(4096);
    match hugging_face::sliding_layers(fields, config.num_layers())? {
        Some(sliding) => set_windows(config, window, |layer| sliding[layer]),
        None => {
            let period = fields.opt_usize("sliding_window_pattern")?.unwrap_or(period).max(1);
            set_windows(config, window, |layer| !(layer + 1).is_multiple_of(period));
        }
    }
    Ok(())
}

fn read_gemma2(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    read_common(fields, blueprint, GEMMA2_PERIOD)
}

fn read_gemma3(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    // The larger models also take images. The configuration and the tensors of their text model are nested.
    let mut leaves_out_images = false;
    let fields = match fields.opt_object("text_config")? {
        Some(text) => {
            blueprint.names.prefixes = &["language_model.model.", "model.language_model."];
            blueprint.names.ignored = &["vision_tower.", "multi_modal_projector."];
            leaves_out_images = true;
            text
        }
        None => fields,
    };
    blueprint.config = hugging_face::gemma3(fields)?;
    blueprint.config.leaves_out_images = leaves_out_images;
    blueprint.config.qk_norm = Some(QkNorm::Head);
    read_common(fields, blueprint, GEMMA3_PERIOD)?;
    let config = &mut blueprint.config;
    let sliding_base = hugging_face::gemma3_sliding_base(fields)?;
    add_sliding_rope(config, sliding_base);
    Ok(())
}
