//! Phi-3, 3.5 and 4-mini: Llama with query, key and value in one matrix, gate and up in another, LongRoPE for the long
//! variants, and in Phi-4-mini a part of each head that is not rotated.

use super::{Blueprint, Family, GgufForm};
use crate::Error;
use crate::config::LayerConfig;
use crate::config::gguf::Keys;
use crate::config::hugging_face::{self, Fields};

pub(super) const PHI3: Family = Family {
    name: "phi3",
    gguf: Some(&GgufForm { name: "phi3", read: read_gguf }),
    hugging_face: &["phi3"],
    read_hugging_face,
};

fn read_gguf(keys: Keys<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.names.fused_gate_up = "blk.{}.ffn_up";
    let window = keys.opt_usize("attention.sliding_window")?.filter(|&window| window > 0);
    blueprint.config.layers.fill(LayerConfig { window, ..LayerConfig::PLAIN });
    Ok(())
}

fn read_hugging_face(fields: Fields<'_>, blueprint: &mut Blueprint) -> Result<(), Error> {
    blueprint.config = hugging_face::llama(fields)?;
    blueprint.names.fused_qkv = "layers.{}.self_attn.qkv_proj";
    blueprint.names.fused_gate_up = "layers.{}.mlp.gate_up_proj";
    let window = fields.opt_usize("sliding_window")?;
    blueprint.config.layers.fill(LayerConfig { window, ..LayerConfig::PLAIN });
    Ok(())
}
