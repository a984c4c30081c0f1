//! Gemma 4: like Gemma 3, with layers of two kinds. Those without a window have larger heads, fewer key heads and
//! rotate a part of the pairs; in some models their values are their keys. Values are normalised, attention scores are
//! not scaled, and the residual stream is multiplied by a number after each layer. Norm weights are stored as they are.
//!
//! The small models (E2B, E4B) give each layer an input of its own, and their last layers use the keys and values of
//! earlier ones. The 26B-A4B has experts beside the dense MLP. The 12B (`gemma4_unified`) has neither.

use pellucid_tensor::{Activation, RopeStyle, Routing};

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, Experts, KeyHeads, Positions, QkNorm, plain_layers};
use crate::loader::experts::ExpertLayout;
use crate::rope::{RopeConfig, RopeScaling};

pub(super) const GEMMA4: Family = Family {
    name: "gemma4",
    gguf: Some(&GgufForm { name: "gemma4", read: read_gguf }),
    hugging_face: &["gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"],
    read_hugging_face,
};

/// Divisor of the frequencies of pairs that are not rotated, as GGUF files have it: their angles are 0 in f32.
const NO_ROTATION: f32 = 1e30;
/// The last layer of each period has no window, unless the file has a list.
const PERIOD: usize = 6;

/// The settings of a layer that depend on its number.
struct LayerSizes {
    heads: KeyHeads,
    mlp_size: usize,
    is_sliding: bool,
}

/// Sets what both kinds of files leave to the family. `sizes` has an entry for each layer, and the last `num_sharing`
/// layers use the keys and values of the last layer of their kind before them.
fn set_common(
    config: &mut DecoderConfig,
    sizes: &[LayerSizes],
    window: usize,
    num_sharing: usize,
) -> Result<(), Error> {
    config.output_norms = true;
    config.embedding_scale = (config.hidden_size as f32).sqrt();
    config.attention_scale = 1.0;
    config.qk_norm = Some(QkNorm::Head);
    config.value_norm = true;
    config.layer_scales = true;
    let first_sharing = sizes.len().saturating_sub(num_sharing);
    for (i, (layer, size)) in config.layers.iter_mut().zip(sizes).enumerate() {
        layer.window = size.is_sliding.then_some(window);
        layer.rope = Some(usize::from(size.is_sliding));
        layer.heads = Some(size.heads);
        layer.mlp_size = Some(size.mlp_size);
        if i >= first_sharing {
            let source = sizes[..first_sharing].iter().rposition(|other| other.is_sliding == size.is_sliding);
            let key = "number of layers that share keys and values";
            let expected = format!("a layer before them that is like layer {i}");
            let missing = || Error::BadSetting { key: key.into(), expected, found: num_sharing.to_string() };
            layer.kv_from = Some(source.ok_or_else(missing)?);
        }
    }
    Ok(())
}

/// Sets the experts, which every layer has beside its dense MLP.
fn set_experts(config: &mut DecoderConfig, num_experts: usize, num_selected: usize, mlp_size: usize) {
    let routing = Routing::softmax(num_selected, true);
    config.experts = Some(Experts {
        num_experts,
        mlp_size,
        shared_mlp_size: None,
        shared_gate: false,
        biases: false,
        score_bias: false,
        routing,
    });
    config.dense_beside_experts = true;
    config.layers.iter_mut().for_each(|layer| layer.experts = true);
}

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let config = &mut blueprint.config;
    let num_layers = config.num_layers();
    let is_sliding = match keys.sliding_layers(num_layers)? {
        Some(is_sliding) => is_sliding,
        None => (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(PERIOD)).collect(),
    };
    let (full, sliding) = (config.head_size, keys.usize("attention.key_length_swa")?);
    keys.must_equal("attention.value_length_swa", sliding)?;
    let kv_heads = keys.of_layers("attention.head_count_kv", num_layers)?;
    let mlp_sizes = keys.of_layers("feed_forward_length", num_layers)?;
    let sizes: Vec<LayerSizes> = (0..num_layers)
        .map(|layer| LayerSizes {
            heads: KeyHeads {
                num_kv_heads: kv_heads[layer],
                head_size: if is_sliding[layer] { sliding } else { full },
            },
            mlp_size: mlp_sizes[layer],
            is_sliding: is_sliding[layer],
        })
        .collect();
    let num_sharing = keys.opt_usize("attention.shared_kv_layers")?.unwrap_or(0);
    set_common(config, &sizes, keys.usize("attention.sliding_window")?, num_sharing)?;
    config.activation = Activation::GeluTanh;
    config.logits_soft_cap = keys.opt_f32("final_logit_softcapping")?;
    config.layer_input_size = keys.opt_usize("embedding_length_per_layer_input")?.filter(|&size| size > 0);
    config.head_size = sliding;
    let first_sliding = is_sliding.iter().position(|is_sliding| *is_sliding).unwrap_or(0);
    config.num_kv_heads = kv_heads.get(first_sliding).copied().unwrap_or(0);
    let sliding_rope = RopeConfig {
        base: keys.opt_f32("rope.freq_base_swa")?.unwrap_or(10_000.0),
        rotary_size: keys.opt_usize("rope.dimension_count_swa")?.unwrap_or(sliding),
        scaling: RopeScaling::None,
    };
    if let Positions::Rope { tables, .. } = &mut config.positions {
        tables.push(sliding_rope);
    }
    if let Some(num_experts) = keys.opt_usize("expert_count")?.filter(|&count| count > 0) {
        set_experts(config, num_experts, keys.usize("expert_used_count")?, keys.usize("expert_feed_forward_length")?);
    }
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    let text = fields.opt_object("text_config")?;
    set_names(blueprint, text.is_some());
    let leaves_out_images = text.is_some() && fields.opt_object("vision_config")?.is_some();
    let leaves_out_audio = text.is_some() && fields.opt_object("audio_config")?.is_some();
    // The settings of the 12B have other defaults, and none for inputs of layers and experts.
    let is_unified = fields.opt_str("model_type")?.is_some_and(|name| name.starts_with("gemma4_unified"));
    let (context_len, window) = if is_unified { (262_144, 1024) } else { (131_072, 512) };
    let fields = text.unwrap_or(fields);
    // `vision` lets the tokens of one image see each other, which changes nothing for text.
    if fields.opt_str("use_bidirectional_attention")? == Some("all") {
        return Err(Error::BadSetting {
            key: "config.json: use_bidirectional_attention".into(),
            expected: "null or \"vision\"".into(),
            found: "all".into(),
        });
    }
    let num_layers = fields.opt_usize("num_hidden_layers")?.unwrap_or(30);
    let layers = plain_layers(num_layers);
    let sizes = layer_sizes(fields, layers.len())?;
    let full_size = sizes.iter().rfind(|size| !size.is_sliding).map_or(0, |size| size.heads.head_size);
    let head_size = fields.opt_usize("head_dim")?.unwrap_or(256);
    let mut config = DecoderConfig {
        leaves_out_images,
        leaves_out_audio,
        hidden_size: fields.opt_usize("hidden_size")?.unwrap_or(2304),
        num_heads: fields.opt_usize("num_attention_heads")?.unwrap_or(8),
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(4),
        head_size,
        mlp_size: fields.opt_usize("intermediate_size")?.unwrap_or(9216),
        context_len: fields.opt_usize("max_position_embeddings")?.unwrap_or(context_len),
        norm_eps: fields.opt_f32("rms_norm_eps")?.unwrap_or(1e-6),
        positions: Positions::Rope {
            tables: vec![rope(fields, "full_attention", full_size)?, rope(fields, "sliding_attention", head_size)?],
            style: RopeStyle::Half,
        },
        activation: match fields.opt_str("hidden_activation")? {
            Some(_) => hugging_face::activation(fields, &["hidden_activation"])?,
            None => Activation::GeluTanh,
        },
        logits_soft_cap: fields.opt_f32("final_logit_softcapping")?,
        layer_input_size: if is_unified { None } else { layer_input_size(fields)? },
        layers,
        ..DecoderConfig::EMPTY
    };
    let window = fields.opt_usize("sliding_window")?.unwrap_or(window);
    set_common(&mut config, &sizes, window, fields.opt_usize("num_kv_shared_layers")?.unwrap_or(0))?;
    if fields.opt_bool("attention_k_eq_v")?.unwrap_or(false) {
        for layer in config.layers.iter_mut().filter(|layer| layer.window.is_none() && layer.kv_from.is_none()) {
            layer.keys_as_values = true;
        }
    }
    if !is_unified && fields.opt_bool("enable_moe_block")?.unwrap_or(false) {
        let (num_experts, num_selected) = (fields.usize("num_experts")?, fields.usize("top_k_experts")?);
        set_experts(&mut config, num_experts, num_selected, fields.usize("moe_intermediate_size")?);
        blueprint.expert_layout = ExpertLayout::Transposed;
    }
    blueprint.config = config;
    Ok(())
}

/// Returns the width of each layer's own input: 256 unless the file states it; 0 and `null` are none.
fn layer_input_size(fields: Fields<'_>) -> Result<Option<usize>, Error> {
    let key = "hidden_size_per_layer_input";
    let default = if fields.is_null(key) { 0 } else { 256 };
    Ok(Some(fields.opt_usize(key)?.unwrap_or(default)).filter(|&size| size > 0))
}

fn set_names(blueprint: &mut Blueprint, is_nested: bool) {
    let names = &mut blueprint.names;
    if is_nested {
        names.prefixes = &["model.language_model.", "language_model.model.", "language_model."];
        names.ignored = &["vision_tower.", "audio_tower.", "embed_vision.", "embed_audio.", "vision_embedder."];
    }
    names.attention_output_norm = "layers.{}.post_attention_layernorm";
    names.mlp_norm = "layers.{}.pre_feedforward_layernorm";
    names.mlp_output_norm = "layers.{}.post_feedforward_layernorm";
    names.router = "layers.{}.router.proj";
    names.fused_expert_gate_up = "layers.{}.experts.gate_up_proj";
    names.expert_down = "layers.{}.experts.down_proj";
}

/// Reads the sizes of each layer: by number, or for all layers without a window.
fn layer_sizes(fields: Fields<'_>, num_layers: usize) -> Result<Vec<LayerSizes>, Error> {
    const OF_LAYER: [&str; 2] = ["head_dim", "num_key_value_heads"];
    let mut is_sliding = match hugging_face::sliding_layers(fields, num_layers)? {
        Some(is_sliding) => is_sliding,
        None => (0..num_layers).map(|layer| !(layer + 1).is_multiple_of(PERIOD)).collect(),
    };
    // The reference implementation does so, whatever the list says.
    if let Some(last) = is_sliding.last_mut() {
        *last = false;
    }
    let sliding = KeyHeads {
        num_kv_heads: fields.opt_usize("num_key_value_heads")?.unwrap_or(4),
        head_size: fields.opt_usize("head_dim")?.unwrap_or(256),
    };
    let keys_as_values = fields.opt_bool("attention_k_eq_v")?.unwrap_or(false);
    let full_kv_heads = fields.opt_usize("num_global_key_value_heads")?.filter(|_| keys_as_values);
    let mlp_size = fields.opt_usize("intermediate_size")?.unwrap_or(9216);
    let num_sharing = fields.opt_usize("num_kv_shared_layers")?.unwrap_or(0);
    let is_double = fields.opt_bool("use_double_wide_mlp")?.unwrap_or(false);
    let full = match fields.opt_object("per_layer_config")? {
        Some(_) => sliding,
        None => KeyHeads {
            num_kv_heads: full_kv_heads.unwrap_or(sliding.num_kv_heads),
            head_size: fields.opt_usize("global_head_dim")?.unwrap_or(512),
        },
    };
    let sizes = |(layer, is_sliding): (usize, bool)| {
        let heads = if is_sliding { sliding } else { full };
        let stated = |key: &str| fields.opt_of_layer(layer, key, &OF_LAYER);
        let heads = KeyHeads {
            head_size: stated("head_dim")?.unwrap_or(heads.head_size),
            num_kv_heads: stated("num_key_value_heads")?.unwrap_or(heads.num_kv_heads),
        };
        let doubles = is_double && layer + num_sharing >= num_layers;
        Ok(LayerSizes { heads, mlp_size: if doubles { 2 * mlp_size } else { mlp_size }, is_sliding })
    };
    is_sliding.into_iter().enumerate().map(sizes).collect()
}

/// Reads the rotary positions of a kind of layer. With the type `proportional`, the first pairs are rotated by the
/// frequencies that they have if all pairs are.
fn rope(fields: Fields<'_>, kind: &'static str, head_size: usize) -> Result<RopeConfig, Error> {
    let is_full = kind == "full_attention";
    let (base, default_type) = if is_full { (1e6, "proportional") } else { (1e4, "default") };
    let stated = match fields.opt_object("rope_parameters")? {
        Some(kinds) => Some(kinds.object(kind)?),
        None => None,
    };
    let real = |key: &str| stated.map(|rope| rope.opt_f32(key)).transpose().map(Option::flatten);
    let rope_type = match stated {
        Some(rope) => rope.opt_str("rope_type")?.unwrap_or("default"),
        None => default_type,
    };
    let plain =
        RopeConfig { base: real("rope_theta")?.unwrap_or(base), rotary_size: head_size, scaling: RopeScaling::None };
    match (rope_type, stated) {
        ("proportional", _) => {
            let default_part = if stated.is_some() { 1.0 } else { 0.25 };
            let part = real("partial_rotary_factor")?.unwrap_or(default_part);
            let num_rotated = (part * head_size as f32 / 2.0) as usize;
            let factor = real("factor")?.unwrap_or(1.0);
            let factors =
                (0..head_size / 2).map(|pair| if pair < num_rotated { factor } else { NO_ROTATION }).collect();
            Ok(RopeConfig { scaling: RopeScaling::Factors { factors }, ..plain })
        }
        ("default", _) | (_, None) => Ok(plain),
        (_, Some(_)) => hugging_face::rope(fields, Some(kind), plain.base, head_size),
    }
}
