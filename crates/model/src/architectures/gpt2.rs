//! GPT-2: learned positions, LayerNorm, biases everywhere, an ungated MLP with the tanh form of GELU, one matrix for
//! query, key and value. Hugging Face files store its matrices as `[in][out]`.

use pellucid_tensor::Activation;

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::hugging_face::{self, Fields};
use crate::config::{DecoderConfig, MlpKind, NormKind, Positions, plain_layers};
use crate::loader::tensor_names::TensorNames;

pub(super) const GPT2: Family = Family {
    name: "gpt2",
    gguf: Some(&GgufForm {
        name: "gpt2",
        read: |_, blueprint| {
            let config = &mut blueprint.config;
            config.positions = Positions::Learned;
            config.mlp = MlpKind::Plain;
            config.activation = Activation::GeluTanh;
            Ok(())
        },
    }),
    hugging_face: &["gpt2"],
    read_hugging_face,
};

const NAMES: TensorNames = TensorNames {
    // The first releases had no prefix.
    prefixes: &["transformer.", ""],
    token_embedding: "wte",
    position_embedding: "wpe",
    final_norm: "ln_f",
    attention_norm: "h.{}.ln_1",
    query: "",
    key: "",
    value: "",
    fused_qkv: "h.{}.attn.c_attn",
    attention_output: "h.{}.attn.c_proj",
    mlp_norm: "h.{}.ln_2",
    gate: "",
    up: "h.{}.mlp.c_fc",
    down: "h.{}.mlp.c_proj",
    // Causal masks, which early files contain.
    ignored: &[".attn.bias", ".attn.masked_bias"],
    ..crate::loader::tensor_names::HUGGING_FACE
};

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    for key in ["scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"] {
        fields.must_be(key, false)?;
    }
    fields.must_be("scale_attn_weights", true)?;
    let hidden_size = fields.usize("n_embd")?;
    let num_heads = fields.usize("n_head")?;
    let head_size = hugging_face::head_size(fields, hidden_size, num_heads)?;
    blueprint.names = NAMES;
    blueprint.transposed = true;
    blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(true);
    blueprint.config = DecoderConfig {
        hidden_size,
        num_heads,
        num_kv_heads: num_heads,
        head_size,
        mlp_size: fields.opt_usize("n_inner")?.unwrap_or(4 * hidden_size),
        context_len: fields.usize("n_positions")?,
        norm: NormKind::Layer,
        norm_eps: fields.f32("layer_norm_epsilon")?,
        positions: Positions::Learned,
        mlp: MlpKind::Plain,
        activation: hugging_face::activation(fields, &["activation_function"])?,
        attention_scale: 1.0 / (head_size as f32).sqrt(),
        layers: plain_layers(fields.usize("n_layer")?),
        ..DecoderConfig::EMPTY
    };
    Ok(())
}
