//! The quantization schemes that GGUF files are named after, such as `q4_k_m`: which format each tensor gets.
//!
//! The choices are those of llama.cpp's quantizer, so that a file has the size and the speed that its name suggests.
//! The output projection gets six bits or more, and in the `_m` schemes so do the value and down projections of the
//! most sensitive layers. Two exceptions of llama.cpp are not implemented: more bits for attention in models with eight
//! experts, and for values in 70B models.

use pellucid_tensor::DType;

/// A named assignment of formats to tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QuantScheme {
    name: &'static str,
    /// Format of most matrices.
    base: DType,
    /// Whether sensitive matrices get more bits.
    is_medium: bool,
}

/// The properties of a tensor on which its format depends.
#[derive(Debug, Clone, Copy)]
pub struct TensorRole<'a> {
    /// Name in GGUF files.
    pub name: &'a str,
    pub shape: &'a [usize],
    pub num_layers: usize,
    /// Whether the token embedding is the output projection as well.
    pub is_tied: bool,
}

impl QuantScheme {
    /// All schemes.
    pub const ALL: [QuantScheme; 13] = [
        QuantScheme::plain("f32", DType::F32),
        QuantScheme::plain("f16", DType::F16),
        QuantScheme::plain("bf16", DType::BF16),
        QuantScheme::plain("q8_0", DType::Q8_0),
        QuantScheme::plain("q4_0", DType::Q4_0),
        QuantScheme::plain("q4_1", DType::Q4_1),
        QuantScheme::plain("q5_0", DType::Q5_0),
        QuantScheme::plain("q5_1", DType::Q5_1),
        QuantScheme::plain("q4_k", DType::Q4_K),
        QuantScheme::plain("q5_k", DType::Q5_K),
        QuantScheme::plain("q6_k", DType::Q6_K),
        QuantScheme { name: "q4_k_m", base: DType::Q4_K, is_medium: true },
        QuantScheme { name: "q5_k_m", base: DType::Q5_K, is_medium: true },
    ];

    /// The formats of gpt-oss's files: experts in MXFP4, other matrices in Q8_0. MXFP4 has no encoder, so that only
    /// synthetic models can have them.
    pub const MXFP4: QuantScheme = QuantScheme::plain("mxfp4", DType::MXFP4);

    const fn plain(name: &'static str, base: DType) -> QuantScheme {
        QuantScheme { name, base, is_medium: false }
    }

    /// Finds a scheme by its name, ignoring case.
    pub fn named(name: &str) -> Option<QuantScheme> {
        let mut all = QuantScheme::ALL.into_iter().chain([QuantScheme::MXFP4]);
        all.find(|scheme| scheme.name.eq_ignore_ascii_case(name))
    }

    pub fn name(self) -> &'static str {
        self.name
    }

    /// Returns the format of most matrices.
    pub fn base(self) -> DType {
        self.base
    }

    /// Returns the format of a tensor. Vectors (norms, biases), routers, convolutions and learned positions are
    /// F32: they are small, and errors in them affect everything else.
    pub fn dtype(self, role: TensorRole<'_>) -> DType {
        let small = ["ffn_gate_inp", "shortconv.conv", "ssm_conv1d", "ssm_norm"];
        let is_small = small.iter().any(|name| role.name.contains(name));
        let is_vector = role.shape.len() < 2 || role.shape.last() == Some(&1) || role.name.ends_with(".bias");
        if is_vector || is_small || role.name == "position_embd.weight" {
            return DType::F32;
        }
        let is_output = role.name == "output.weight" || (role.is_tied && role.name == "token_embd.weight");
        let wanted = match self.base {
            plain @ (DType::F32 | DType::F16 | DType::BF16 | DType::Q8_0) => plain,
            DType::MXFP4 if !role.name.contains("_exps.") => DType::Q8_0,
            DType::MXFP4 => DType::MXFP4,
            _ if is_output => DType::Q6_K,
            base if self.is_medium && is_sensitive(role) => more_bits(base, role),
            base => base,
        };
        fitting(wanted, role.shape[role.shape.len() - 1])
    }
}

/// Whether an `_m` scheme gives a tensor more bits: the value and down projections of the first and the last eighth of
/// the layers and of every third layer in between, and a fused query, key and value matrix.
fn is_sensitive(role: TensorRole<'_>) -> bool {
    if role.name.contains("attn_qkv") {
        return true;
    }
    let layer = role.name.strip_prefix("blk.").and_then(|rest| rest.split('.').next()?.parse::<usize>().ok());
    let Some(layer) = layer.filter(|_| role.name.contains("attn_v.") || role.name.contains("ffn_down")) else {
        return false;
    };
    let eighth = role.num_layers / 8;
    layer < eighth || layer >= 7 * role.num_layers / 8 || (layer - eighth) % 3 == 2
}

fn more_bits(base: DType, role: TensorRole<'_>) -> DType {
    if role.name.contains("attn_qkv") && base == DType::Q4_K { DType::Q5_K } else { DType::Q6_K }
}

/// Returns the format itself, or the nearest one with smaller blocks if the row length is not a multiple of its block
/// length.
fn fitting(dtype: DType, row: usize) -> DType {
    if row.is_multiple_of(dtype.block_len()) {
        return dtype;
    }
    let smaller = match dtype {
        DType::Q4_K => DType::Q5_0,
        DType::Q5_K => DType::Q5_1,
        DType::Q6_K => DType::Q8_0,
        _ => DType::F16,
    };
    if row.is_multiple_of(smaller.block_len()) { smaller } else { DType::F16 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dtype(scheme: &str, name: &str, shape: &[usize], is_tied: bool) -> DType {
        let role = TensorRole { name, shape, num_layers: 16, is_tied };
        QuantScheme::named(scheme).expect("a known scheme").dtype(role)
    }

    #[test]
    fn output_projections_get_six_bits() {
        for (scheme, expected) in
            [("q4_0", DType::Q6_K), ("Q4_K_M", DType::Q6_K), ("q8_0", DType::Q8_0), ("bf16", DType::BF16)]
        {
            assert_eq!(dtype(scheme, "output.weight", &[1000, 256], false), expected, "{scheme}");
            assert_eq!(dtype(scheme, "token_embd.weight", &[1000, 256], true), expected, "{scheme}");
        }
        assert_eq!(dtype("q4_0", "token_embd.weight", &[1000, 256], false), DType::Q4_0);
    }

    #[test]
    fn only_experts_are_mxfp4() {
        assert_eq!(dtype("mxfp4", "blk.0.ffn_up_exps.weight", &[8, 256, 256], false), DType::MXFP4);
        assert_eq!(dtype("mxfp4", "blk.0.ffn_up_exps.bias", &[8, 256], false), DType::F32);
        assert_eq!(dtype("mxfp4", "blk.0.attn_q.weight", &[256, 256], false), DType::Q8_0);
        assert_eq!(dtype("mxfp4", "output.weight", &[512, 256], false), DType::Q8_0);
    }

    #[test]
    fn a_medium_scheme_gives_half_of_the_down_projections_more_bits() {
        let layers = |name: &str| -> Vec<usize> {
            let role = |layer: usize| format!("blk.{layer}.{name}.weight");
            (0..16).filter(|&layer| dtype("q4_k_m", &role(layer), &[256, 256], true) == DType::Q6_K).collect()
        };
        assert_eq!(layers("ffn_down"), [0, 1, 4, 7, 10, 13, 14, 15]);
        assert_eq!(layers("attn_v"), layers("ffn_down"));
        assert!(layers("ffn_up").is_empty());
    }

    #[test]
    fn rows_that_are_not_whole_blocks_get_formats_with_smaller_blocks() {
        assert_eq!(dtype("q4_k", "blk.0.ffn_up.weight", &[64, 576], true), DType::Q5_0);
        assert_eq!(dtype("q4_0", "token_embd.weight", &[64, 576], true), DType::Q8_0);
        assert_eq!(dtype("q4_0", "blk.0.ffn_up.weight", &[64, 33], true), DType::F16);
        assert_eq!(dtype("q4_k", "blk.0.ffn_norm.weight", &[576], true), DType::F32);
    }
}
