//! XGLM: the sinusoidal positions of the original transformer, on embeddings scaled by the square root of the hidden
//! size. Otherwise it is like GPT-2, with separate matrices and the exact GELU. No GGUF converter supports it, so only
//! the Hugging Face form is read.

use super::{Blueprint, Family};
use crate::Error;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, MlpKind, NormKind, Positions, plain_layers};
use crate::loader::tensor_names::TensorNames;

pub(super) const XGLM: Family = Family { name: "xglm", gguf: None, hugging_face: &["xglm"], read_hugging_face };

const NAMES: TensorNames = TensorNames {
    final_norm: "layer_norm",
    attention_norm: "layers.{}.self_attn_layer_norm",
    attention_output: "layers.{}.self_attn.out_proj",
    mlp_norm: "layers.{}.final_layer_norm",
    gate: "",
    up: "layers.{}.fc1",
    down: "layers.{}.fc2",
    // The sinusoidal table, which some files contain.
    ignored: &["embed_positions.weights"],
    ..crate::loader::tensor_names::HUGGING_FACE
};

/// Epsilon of PyTorch's LayerNorm, which the reference implementation uses without reading a setting.
const NORM_EPS: f32 = 1e-5;

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let hidden_size = fields.usize("d_model")?;
    let num_heads = fields.usize("attention_heads")?;
    let head_size = hugging_face::head_size(fields, hidden_size, num_heads)?;
    let scaled = fields.opt_bool("scale_embedding")?.unwrap_or(true);
    blueprint.names = NAMES;
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    blueprint.config = DecoderConfig {
        hidden_size,
        num_heads,
        num_kv_heads: num_heads,
        head_size,
        mlp_size: fields.usize("ffn_dim")?,
        context_len: fields.usize("max_position_embeddings")?,
        norm: NormKind::Layer,
        norm_eps: NORM_EPS,
        positions: Positions::Sinusoidal,
        mlp: MlpKind::Plain,
        activation: hugging_face::activation(fields, &["activation_function"])?,
        embedding_scale: if scaled { (hidden_size as f32).sqrt() } else { 1.0 },
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(fields.usize("num_layers")?),
        ..DecoderConfig::EMPTY
    };
    Ok(())
}
