//! BERT: learned positions, embeddings of token types, norms after each residual sum, a plain MLP with the exact GELU.
//!
//! all-MiniLM, BGE, GTE and E5 in their English versions are of this family.

use super::Family;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{Fields, activation};
use crate::encoder::config::{ClassifierConfig, EncoderConfig};
use crate::encoder::head::HeadActivation;
use crate::encoder::tensor_names::{self, EncoderNames};
use crate::{Error, Pooling};

pub(super) const BERT: Family = Family {
    name: "bert",
    hugging_face: &["bert"],
    read_gguf,
    read_hugging_face,
    names: NAMES,
    gguf_names: tensor_names::GGUF,
};

const NAMES: EncoderNames = EncoderNames {
    prefixes: &["", "bert."],
    token_embedding: "embeddings.word_embeddings",
    position_embedding: "embeddings.position_embeddings",
    type_embedding: "embeddings.token_type_embeddings",
    embedding_norm: "embeddings.LayerNorm",
    query: "encoder.layer.{}.attention.self.query",
    key: "encoder.layer.{}.attention.self.key",
    value: "encoder.layer.{}.attention.self.value",
    fused_qkv: "",
    attention_output: "encoder.layer.{}.attention.output.dense",
    attention_norm: "encoder.layer.{}.attention.output.LayerNorm",
    gate: "",
    up: "encoder.layer.{}.intermediate.dense",
    fused_gate_up: "",
    down: "encoder.layer.{}.output.dense",
    mlp_norm: "encoder.layer.{}.output.LayerNorm",
    final_norm: "",
    head_dense: "pooler.dense",
    head_norm: "",
    classifier: "classifier",
    ignored: &["pooler.", "cls.", "embeddings.position_ids"],
};

fn read_hugging_face(fields: Fields<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    if let Some(kind) = fields.opt_str("position_embedding_type")?.filter(|kind| *kind != "absolute") {
        return Err(Error::BadSetting {
            key: "config.json: position_embedding_type".into(),
            expected: "absolute".into(),
            found: kind.into(),
        });
    }
    fields.must_be("is_decoder", false)?;
    config.hidden_size = fields.usize("hidden_size")?;
    config.num_heads = fields.usize("num_attention_heads")?;
    config.mlp_size = fields.usize("intermediate_size")?;
    config.context_len = fields.usize("max_position_embeddings")?;
    config.norm_eps = fields.f32("layer_norm_eps")?;
    config.activation = activation(fields, &["hidden_act"])?;
    config.layers = EncoderConfig::full_layers(fields.usize("num_hidden_layers")?);
    if is_classifier(fields)? {
        config.classifier = Some(ClassifierConfig { pooling: Pooling::Cls, activation: HeadActivation::Tanh });
    }
    Ok(())
}

/// Whether a folder holds a model with a classifier.
pub(super) fn is_classifier(fields: Fields<'_>) -> Result<bool, Error> {
    let names = fields.opt_strs("architectures")?.unwrap_or_default();
    Ok(names.iter().any(|name| name.ends_with("ForSequenceClassification")))
}

fn read_gguf(keys: Keys<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    read_sizes(keys, config)
}

/// Reads the keys that all families share.
pub(super) fn read_sizes(keys: Keys<'_>, config: &mut EncoderConfig) -> Result<(), Error> {
    config.hidden_size = keys.usize("embedding_length")?;
    config.num_heads = keys.usize("attention.head_count")?;
    config.mlp_size = keys.usize("feed_forward_length")?;
    config.context_len = keys.usize("context_length")?;
    // llama.cpp's converter writes ModernBERT's epsilon under the name of RMSNorm.
    let mut norm_eps = keys.opt_f32("attention.layer_norm_epsilon")?;
    if norm_eps.is_none() {
        norm_eps = keys.opt_f32("attention.layer_norm_rms_epsilon")?;
    }
    config.norm_eps = norm_eps.ok_or(Error::MissingSetting { key: "attention.layer_norm_epsilon".into() })?;
    config.layers = EncoderConfig::full_layers(keys.usize("block_count")?);
    Ok(())
}
