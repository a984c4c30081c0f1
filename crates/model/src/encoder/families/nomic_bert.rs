//! Nomic BERT: BERT with rotary positions, a gated MLP with SiLU, and no biases in attention and MLP.
//!
//! `config.json` exists in two layouts: that of the model's own code, and that of the transformers library since 2026.
//! Both have the same tensors.

use pellucid_tensor::Activation;

use super::{Family, bert};
use crate::Error;
use crate::config::MlpKind;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{Fields, activation};
use crate::encoder::config::{EncoderConfig, EncoderPositions};
use crate::encoder::tensor_names::{self, EncoderNames};
use crate::rope::{RopeConfig, RopeScaling};

pub(super) const NOMIC_BERT: Family = Family {
    name: "nomic-bert",
    hugging_face: &["nomic_bert"],
    read_gguf,
    read_hugging_face,
    names: NAMES,
    gguf_names: tensor_names::GGUF,
};

const NAMES: EncoderNames = EncoderNames {
    prefixes: &["", "bert."],
    token_embedding: "embeddings.word_embeddings",
    position_embedding: "",
    type_embedding: "embeddings.token_type_embeddings",
    embedding_norm: "emb_ln",
    query: "",
    key: "",
    value: "",
    fused_qkv: "encoder.layers.{}.attn.Wqkv",
    attention_output: "encoder.layers.{}.attn.out_proj",
    attention_norm: "encoder.layers.{}.norm1",
    gate: "encoder.layers.{}.mlp.fc12",
    up: "encoder.layers.{}.mlp.fc11",
    fused_gate_up: "",
    down: "encoder.layers.{}.mlp.fc2",
    mlp_norm: "encoder.layers.{}.norm2",
    final_norm: "",
    head_dense: "",
    head_norm: "",
    classifier: "",
    ignored: &["pooler.", "cls."],
};

const ROPE_BASE: f32 = 1000.0;

fn rotated(config: &mut EncoderConfig, base: f32) -> Result<(), Error> {
    if config.num_heads == 0 {
        return Err(Error::MissingSetting { key: "number of heads".into() });
    }
    let rope = RopeConfig { base, rotary_size: config.head_size(), scaling: RopeScaling::None };
    config.positions = EncoderPositions::Rope(vec![rope]);
    config.mlp = MlpKind::Gated;
    config.activation = Activation::Silu;
    Ok(())
}

/// Refuses a number other than `value`, which would change the arithmetic in a way that is not implemented. Absent
/// counts as `value`.
fn must_equal(fields: Fields<'_>, key: &str, value: f32) -> Result<(), Error> {
    match fields.opt_f32(key)?.filter(|found| *found != value) {
        Some(found) => Err(Error::BadSetting {
            key: format!("config.json: {key}"),
            expected: value.to_string(),
            found: found.to_string(),
        }),
        None => Ok(()),
    }
}

fn read_hugging_face(fields: Fields<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    if fields.opt_usize("n_embd")?.is_none() {
        return read_library(fields, config);
    }
    config.hidden_size = fields.usize("n_embd")?;
    config.num_heads = fields.usize("n_head")?;
    config.mlp_size = fields.usize("n_inner")?;
    config.context_len = fields.usize("n_positions")?;
    if let Some(trained) = fields.opt_usize("max_trained_positions")? {
        // Beyond these positions the model's own code changes the rotary base with the length of the text.
        config.context_len = config.context_len.min(trained);
    }
    config.norm_eps = fields.f32("layer_norm_epsilon")?;
    config.layers = EncoderConfig::full_layers(fields.usize("n_layer")?);
    for (key, value) in [("prenorm", false), ("parallel_block", false), ("use_rms_norm", false), ("causal", false)] {
        fields.must_be(key, value)?;
    }
    must_equal(fields, "rotary_emb_fraction", 1.0)?;
    must_equal(fields, "num_experts", 0.0)?;
    fields.must_be("rotary_emb_interleaved", false)?;
    if let Some(name) = fields.opt_str("activation_function")?.filter(|name| *name != "swiglu") {
        return Err(Error::BadSetting {
            key: "config.json: activation_function".into(),
            expected: "swiglu".into(),
            found: name.into(),
        });
    }
    rotated(config, fields.opt_f32("rotary_emb_base")?.unwrap_or(ROPE_BASE))
}

fn read_library(fields: Fields<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    config.hidden_size = fields.usize("hidden_size")?;
    config.num_heads = fields.usize("num_attention_heads")?;
    config.mlp_size = fields.usize("intermediate_size")?;
    config.context_len = fields.usize("max_position_embeddings")?;
    config.norm_eps = fields.opt_f32("layer_norm_eps")?.unwrap_or(1e-12);
    config.layers = EncoderConfig::full_layers(fields.usize("num_hidden_layers")?);
    let mut base = ROPE_BASE;
    if let Some(rope) = fields.opt_object("rope_parameters")? {
        must_be_unscaled(rope)?;
        base = rope.opt_f32("rope_theta")?.unwrap_or(base);
    }
    rotated(config, base)?;
    config.activation = activation(fields, &["hidden_act"])?;
    Ok(())
}

/// Refuses scaled rotary positions.
pub(super) fn must_be_unscaled(rope: Fields<'_>) -> Result<(), Error> {
    match rope.opt_str("rope_type")?.filter(|kind| *kind != "default") {
        Some(kind) => Err(Error::BadSetting {
            key: "config.json: rope_parameters.rope_type".into(),
            expected: "default".into(),
            found: kind.into(),
        }),
        None => Ok(()),
    }
}

fn read_gguf(keys: Keys<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    bert::read_sizes(keys, config)?;
    rotated(config, keys.opt_f32("rope.freq_base")?.unwrap_or(ROPE_BASE))
}
