//! The number formats of tensors, unquantized and quantized.
//!
//! A quantized format stores a row as blocks: `block_len` values in `block_bytes` bytes. An unquantized format is a
//! block of one. [`crate::quant`] holds the layouts.

use std::fmt;

/// The format in which the values of a tensor are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(non_camel_case_types)]
pub enum DType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q5_0,
    Q5_1,
    Q8_0,
    Q2_K,
    Q3_K,
    Q4_K,
    Q5_K,
    Q6_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
    NVFP4,
    IQ1_S,
    IQ1_M,
    IQ2_XXS,
    IQ2_XS,
    IQ2_S,
    IQ3_XXS,
    IQ3_S,
    TQ1_0,
    TQ2_0,
    F8_E4M3,
}

impl DType {
    /// Every format, in the order of the documentation.
    pub const ALL: [DType; 27] = [
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::Q4_0,
        DType::Q4_1,
        DType::Q5_0,
        DType::Q5_1,
        DType::Q8_0,
        DType::Q2_K,
        DType::Q3_K,
        DType::Q4_K,
        DType::Q5_K,
        DType::Q6_K,
        DType::IQ4_NL,
        DType::IQ4_XS,
        DType::MXFP4,
        DType::NVFP4,
        DType::IQ1_S,
        DType::IQ1_M,
        DType::IQ2_XXS,
        DType::IQ2_XS,
        DType::IQ2_S,
        DType::IQ3_XXS,
        DType::IQ3_S,
        DType::TQ1_0,
        DType::TQ2_0,
        DType::F8_E4M3,
    ];

    /// Values in a block; a row's length is a multiple of it. Never zero.
    pub const fn block_len(self) -> usize {
        match self {
            DType::F32 | DType::F16 | DType::BF16 => 1,
            DType::Q4_0 | DType::Q4_1 | DType::Q5_0 | DType::Q5_1 | DType::Q8_0 | DType::IQ4_NL | DType::MXFP4 => 32,
            DType::NVFP4 => 64,
            DType::F8_E4M3 => 128,
            DType::Q2_K | DType::Q3_K | DType::Q4_K | DType::Q5_K | DType::Q6_K => 256,
            DType::IQ1_S | DType::IQ1_M | DType::IQ2_XXS | DType::IQ2_XS | DType::IQ2_S => 256,
            DType::IQ3_XXS | DType::IQ3_S | DType::IQ4_XS | DType::TQ1_0 | DType::TQ2_0 => 256,
        }
    }

    /// Bytes in a block.
    pub const fn block_bytes(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::Q4_0 | DType::IQ4_NL => 18,
            DType::Q4_1 => 20,
            DType::Q5_0 => 22,
            DType::Q5_1 => 24,
            DType::Q8_0 => 34,
            DType::Q2_K => 84,
            DType::Q3_K | DType::IQ3_S => 110,
            DType::Q4_K => 144,
            DType::Q5_K => 176,
            DType::Q6_K => 210,
            DType::IQ4_XS => 136,
            DType::MXFP4 => 17,
            DType::NVFP4 => 36,
            DType::IQ1_S => 50,
            DType::IQ1_M => 56,
            DType::IQ2_XXS | DType::TQ2_0 => 66,
            DType::IQ2_XS => 74,
            DType::IQ2_S => 82,
            DType::IQ3_XXS => 98,
            DType::TQ1_0 => 54,
            DType::F8_E4M3 => 132,
        }
    }

    /// Bytes of `len` values, or `None` when `len` is not whole blocks or the product overflows.
    pub fn bytes_for(self, len: usize) -> Option<usize> {
        if !len.is_multiple_of(self.block_len()) {
            return None;
        }
        (len / self.block_len()).checked_mul(self.block_bytes())
    }

    pub const fn is_quantized(self) -> bool {
        self.block_len() > 1
    }

    /// The name that GGUF tools use, or for F8_E4M3, which no GGUF file has, that of safetensors files.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "F32",
            DType::F16 => "F16",
            DType::BF16 => "BF16",
            DType::Q4_0 => "Q4_0",
            DType::Q4_1 => "Q4_1",
            DType::Q5_0 => "Q5_0",
            DType::Q5_1 => "Q5_1",
            DType::Q8_0 => "Q8_0",
            DType::Q2_K => "Q2_K",
            DType::Q3_K => "Q3_K",
            DType::Q4_K => "Q4_K",
            DType::Q5_K => "Q5_K",
            DType::Q6_K => "Q6_K",
            DType::IQ4_NL => "IQ4_NL",
            DType::IQ4_XS => "IQ4_XS",
            DType::MXFP4 => "MXFP4",
            DType::NVFP4 => "NVFP4",
            DType::IQ1_S => "IQ1_S",
            DType::IQ1_M => "IQ1_M",
            DType::IQ2_XXS => "IQ2_XXS",
            DType::IQ2_XS => "IQ2_XS",
            DType::IQ2_S => "IQ2_S",
            DType::IQ3_XXS => "IQ3_XXS",
            DType::IQ3_S => "IQ3_S",
            DType::TQ1_0 => "TQ1_0",
            DType::TQ2_0 => "TQ2_0",
            DType::F8_E4M3 => "F8_E4M3",
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}
