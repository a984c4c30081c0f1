//! ModernBERT: rotary positions, norms before attention and MLP, a gated MLP with GELU, no embeddings of token types.
//! Most layers attend only to tokens within a distance, with a rotary base of their own.

use super::nomic_bert::must_be_unscaled;
use super::{Family, bert};
use crate::config::MlpKind;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{Fields, activation, named_activation};
use crate::encoder::config::{ClassifierConfig, EncoderConfig, EncoderLayer, EncoderPositions, NormPlacement};
use crate::encoder::head::HeadActivation;
use crate::encoder::tensor_names::{self, EncoderNames};
use crate::rope::{RopeConfig, RopeScaling};
use crate::{Error, Pooling};

pub(super) const MODERN_BERT: Family = Family {
    name: "modern-bert",
    hugging_face: &["modernbert"],
    read_gguf,
    read_hugging_face,
    names: NAMES,
    gguf_names: GGUF,
};

const NAMES: EncoderNames = EncoderNames {
    prefixes: &["", "model."],
    token_embedding: "embeddings.tok_embeddings",
    position_embedding: "",
    type_embedding: "",
    embedding_norm: "embeddings.norm",
    query: "",
    key: "",
    value: "",
    fused_qkv: "layers.{}.attn.Wqkv",
    attention_output: "layers.{}.attn.Wo",
    attention_norm: "layers.{}.attn_norm",
    gate: "",
    up: "",
    fused_gate_up: "layers.{}.mlp.Wi",
    down: "layers.{}.mlp.Wo",
    mlp_norm: "layers.{}.mlp_norm",
    final_norm: "final_norm",
    head_dense: "head.dense",
    head_norm: "head.norm",
    classifier: "classifier",
    ignored: &["head.", "decoder."],
};

const GGUF: EncoderNames = EncoderNames {
    attention_norm: "blk.{}.attn_norm",
    gate: "",
    up: "",
    fused_gate_up: "blk.{}.ffn_up",
    mlp_norm: "blk.{}.ffn_norm",
    final_norm: "output_norm",
    position_embedding: "",
    type_embedding: "",
    ..tensor_names::GGUF
};

const GLOBAL_BASE: f32 = 160_000.0;
const LOCAL_BASE: f32 = 10_000.0;

/// Sets the layers: those for which `is_local` holds attend within `window / 2` positions and use the second table.
fn set_layers(
    config: &mut EncoderConfig,
    [global, local]: [f32; 2],
    window: usize,
    is_local: impl Fn(usize) -> bool,
) -> Result<(), Error> {
    if config.num_heads == 0 {
        return Err(Error::MissingSetting { key: "number of heads".into() });
    }
    let rotary_size = config.head_size();
    let table = |base: f32| RopeConfig { base, rotary_size, scaling: RopeScaling::None };
    config.positions = EncoderPositions::Rope(vec![table(global), table(local)]);
    config.mlp = MlpKind::Gated;
    config.norm_placement = NormPlacement::Before;
    for (index, layer) in config.layers.iter_mut().enumerate() {
        if is_local(index) {
            *layer = EncoderLayer { max_distance: Some(window / 2), rope: 1 };
        }
    }
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    config.hidden_size = fields.usize("hidden_size")?;
    config.num_heads = fields.usize("num_attention_heads")?;
    config.mlp_size = fields.usize("intermediate_size")?;
    config.context_len = fields.usize("max_position_embeddings")?;
    config.norm_eps = fields.opt_f32("norm_eps")?.unwrap_or(1e-5);
    config.activation = activation(fields, &["hidden_activation"])?;
    config.layers = EncoderConfig::full_layers(fields.usize("num_hidden_layers")?);
    if bert::is_classifier(fields)? {
        config.classifier = Some(read_classifier(fields)?);
    }
    let mut bases = [
        fields.opt_f32("global_rope_theta")?.unwrap_or(GLOBAL_BASE),
        fields.opt_f32("local_rope_theta")?.unwrap_or(LOCAL_BASE),
    ];
    if let Some(ropes) = fields.opt_object("rope_parameters")? {
        for (base, kind) in bases.iter_mut().zip(["full_attention", "sliding_attention"]) {
            if let Some(rope) = ropes.opt_object(kind)? {
                must_be_unscaled(rope)?;
                *base = rope.opt_f32("rope_theta")?.unwrap_or(*base);
            }
        }
    }
    let window = fields.opt_usize("local_attention")?.unwrap_or(128);
    let num_layers = config.layers.len();
    if let Some(kinds) = fields.opt_strs("layer_types")? {
        if kinds.len() != num_layers || kinds.iter().any(|kind| !KINDS.contains(kind)) {
            return Err(Error::BadSetting {
                key: "config.json: layer_types".into(),
                expected: format!("{num_layers} of {}", KINDS.join(" and ")),
                found: kinds.join(", "),
            });
        }
        return set_layers(config, bases, window, |index| kinds[index] == KINDS[1]);
    }
    let period = fields.opt_usize("global_attn_every_n_layers")?.unwrap_or(3).max(1);
    set_layers(config, bases, window, |index| !index.is_multiple_of(period))
}

fn read_classifier(fields: Fields<'_>) -> Result<ClassifierConfig, Error> {
    let bad = |key: &str, expected: &str, found: &str| Error::BadSetting {
        key: format!("config.json: {key}"),
        expected: expected.into(),
        found: found.into(),
    };
    let pooling = match fields.opt_str("classifier_pooling")?.unwrap_or("cls") {
        "cls" => Pooling::Cls,
        "mean" => Pooling::Mean,
        other => return Err(bad("classifier_pooling", "cls or mean", other)),
    };
    match fields.opt_str("classifier_activation")?.unwrap_or("gelu") {
        "gelu" => Ok(ClassifierConfig { pooling, activation: HeadActivation::Gelu }),
        other => Err(bad("classifier_activation", "gelu", other)),
    }
}

const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];

fn read_gguf(keys: Keys<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    bert::read_sizes(keys, config)?;
    if let Some(name) = keys.opt_str("hidden_activation")? {
        config.activation = named_activation(name).ok_or_else(|| Error::BadSetting {
            key: "hidden_activation".into(),
            expected: "a known activation".into(),
            found: name.into(),
        })?;
    }
    let bases = [
        keys.opt_f32("rope.freq_base")?.unwrap_or(GLOBAL_BASE),
        keys.opt_f32("rope.freq_base_swa")?.unwrap_or(LOCAL_BASE),
    ];
    let window = keys.opt_usize("attention.sliding_window")?.unwrap_or(128);
    // The format counts the period's first layer as the global one for this architecture.
    let period = keys.opt_usize("attention.sliding_window_pattern")?.unwrap_or(3).max(1);
    set_layers(config, bases, window, |index| !index.is_multiple_of(period))
}
