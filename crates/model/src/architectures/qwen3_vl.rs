//! The text models of Qwen3-VL and Qwen3-VL-MoE: Qwen3 and Qwen3-MoE in nested settings and tensors.
//!
//! Positions have three coordinates, which are equal for text, so that the rotation is that of Qwen3.

use super::{Blueprint, Family, GgufForm, qwen3};
use crate::Error;
use crate::config::QkNorm;
use crate::config::hugging_face::{self, Fields};
use crate::loader::experts::ExpertLayout;

pub(super) const QWEN3_VL: Family = Family {
    name: "qwen3-vl",
    gguf: Some(&GgufForm {
        name: "qwen3vl",
        read: |_, blueprint| {
            blueprint.config.qk_norm = Some(QkNorm::Head);
            blueprint.config.leaves_out_images = true;
            Ok(())
        },
    }),
    hugging_face: &["qwen3_vl"],
    read_hugging_face: |fields, blueprint| read_text(fields, blueprint).map(drop),
};

pub(super) const QWEN3_VL_MOE: Family = Family {
    name: "qwen3-vl-moe",
    gguf: Some(&GgufForm {
        name: "qwen3vlmoe",
        read: |keys, blueprint| {
            blueprint.config.leaves_out_images = true;
            qwen3::read_gguf_mixture(keys, blueprint)
        },
    }),
    hugging_face: &["qwen3_vl_moe"],
    read_hugging_face: read_mixture,
};

const DEFAULT_ROPE_BASE: f32 = 500_000.0;

/// Reads the text model, and returns its settings.
fn read_text<'a>(fields: Fields<'a>, blueprint: &mut Blueprint) -> Result<Fields<'a>, Error> {
    let text = fields.object("text_config")?;
    blueprint.names.prefixes = &["model.language_model.", "language_model.model."];
    blueprint.names.ignored = &["model.visual.", "visual."];
    if let Some(is_tied) = text.opt_bool("tie_word_embeddings")? {
        blueprint.tied = fields.opt_bool("tie_word_embeddings")?.unwrap_or(is_tied);
    }
    blueprint.config = hugging_face::llama_with_rope(text, None, DEFAULT_ROPE_BASE)?;
    blueprint.config.qk_norm = Some(QkNorm::Head);
    blueprint.config.leaves_out_images = true;
    Ok(text)
}

fn read_mixture(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    let text = read_text(fields, blueprint)?;
    qwen3::read_experts(text, &mut blueprint.config, true)?;
    blueprint.expert_layout = ExpertLayout::Transposed;
    blueprint.names.fused_expert_gate_up = "layers.{}.mlp.experts.gate_up_proj";
    blueprint.names.expert_down = "layers.{}.mlp.experts.down_proj";
    Ok(())
}
