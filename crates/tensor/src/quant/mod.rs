//! The quantized block formats of GGUF and FP8, their decoding to f32, and the encoding of those that have an encoder.
//!
//! A format is a zero-sized type that implements [`BlockFormat`]; [`decode`] selects one by [`DType`]. This is the
//! reference version: it documents each layout, and faster kernels are compared with it. Its results agree to the bit
//! with the dequantizer of the `gguf` Python package, so products and sums keep its order and are never fused. A device
//! may instantiate the same generic code under `#[target_feature]`: every step is inlined, works on arrays of fixed
//! size, and rounds the same way at any vector width.
//!
//! Values are little-endian. This module does not know tensors, shapes or files.

mod codebooks;
mod encode;
mod fp8;
mod half;
mod iq1;
mod iq2;
mod iq3;
mod iq4;
mod k;
mod legacy;
mod mxfp4;
mod nvfp4;
mod random;
mod ternary;

pub use fp8::{F8_E4M3, e4m3_to_f32};
pub use half::{BF16, F16, F32, bf16_to_f32, f16_to_f32, f32_to_bf16, f32_to_f16};
pub use iq1::{IQ1_M, IQ1_S};
pub use iq2::{IQ2_S, IQ2_XS, IQ2_XXS};
pub use iq3::{IQ3_S, IQ3_XXS};
pub use iq4::{IQ4_NL, IQ4_XS};
pub use k::{Q2_K, Q3_K, Q4_K, Q5_K, Q6_K};
pub use legacy::{Q4_0, Q4_1, Q5_0, Q5_1, Q8_0};
pub use mxfp4::MXFP4;
pub use nvfp4::NVFP4;
pub use random::fill_random;
pub use ternary::{TQ1_0, TQ2_0};

use crate::DType;

/// A layout of `LEN` values in `BYTES` bytes.
pub trait BlockFormat {
    const DTYPE: DType;
    /// Values in a block.
    const LEN: usize = Self::DTYPE.block_len();
    /// Bytes in a block.
    const BYTES: usize = Self::DTYPE.block_bytes();

    /// Decodes one block: `BYTES` bytes into `LEN` values. Panics on any other length.
    fn decode(block: &[u8], out: &mut [f32]);
}

/// A format that values can be rounded to.
pub trait BlockEncoder: BlockFormat {
    /// Encodes one block: `LEN` values into `BYTES` bytes. Panics on any other length.
    fn encode(x: &[f32], block: &mut [u8]);
}

/// Decodes whole blocks of one format, in order.
///
/// Panics unless `bytes` is whole blocks and `out` has exactly their number of values.
#[inline(always)]
pub fn decode_blocks<F: BlockFormat>(bytes: &[u8], out: &mut [f32]) {
    let blocks = bytes.chunks_exact(F::BYTES);
    assert!(
        blocks.remainder().is_empty() && Some(out.len()) == blocks.len().checked_mul(F::LEN),
        "{} bytes of {} do not decode to {} numbers",
        bytes.len(),
        F::DTYPE,
        out.len(),
    );
    for (block, out) in blocks.zip(out.chunks_exact_mut(F::LEN)) {
        F::decode(block, out);
        // A barrier without instructions. Without it the compiler unrolls small blocks and then vectorizes across them,
        // gathering single bytes at the stride of a block, at a third of the speed for Q4_0 under AVX2. Unquantized
        // formats are blocks of one value, for which that is right.
        if F::LEN > 1 {
            std::hint::black_box(());
        }
    }
}

/// Decodes whole rows of any format.
///
/// Panics unless `bytes` is whole blocks and `out` has exactly their number of values. Inlined, so that a caller
/// compiled for more instructions uses them in every decoder.
#[inline(always)]
pub fn decode(dtype: DType, bytes: &[u8], out: &mut [f32]) {
    match dtype {
        DType::F32 => decode_blocks::<F32>(bytes, out),
        DType::F16 => decode_blocks::<F16>(bytes, out),
        DType::BF16 => decode_blocks::<BF16>(bytes, out),
        DType::Q4_0 => decode_blocks::<Q4_0>(bytes, out),
        DType::Q4_1 => decode_blocks::<Q4_1>(bytes, out),
        DType::Q5_0 => decode_blocks::<Q5_0>(bytes, out),
        DType::Q5_1 => decode_blocks::<Q5_1>(bytes, out),
        DType::Q8_0 => decode_blocks::<Q8_0>(bytes, out),
        DType::Q2_K => decode_blocks::<Q2_K>(bytes, out),
        DType::Q3_K => decode_blocks::<Q3_K>(bytes, out),
        DType::Q4_K => decode_blocks::<Q4_K>(bytes, out),
        DType::Q5_K => decode_blocks::<Q5_K>(bytes, out),
        DType::Q6_K => decode_blocks::<Q6_K>(bytes, out),
        DType::IQ4_NL => decode_blocks::<IQ4_NL>(bytes, out),
        DType::IQ4_XS => decode_blocks::<IQ4_XS>(bytes, out),
        DType::MXFP4 => decode_blocks::<MXFP4>(bytes, out),
        DType::NVFP4 => decode_blocks::<NVFP4>(bytes, out),
        DType::IQ1_S => decode_blocks::<IQ1_S>(bytes, out),
        DType::IQ1_M => decode_blocks::<IQ1_M>(bytes, out),
        DType::IQ2_XXS => decode_blocks::<IQ2_XXS>(bytes, out),
        DType::IQ2_XS => decode_blocks::<IQ2_XS>(bytes, out),
        DType::IQ2_S => decode_blocks::<IQ2_S>(bytes, out),
        DType::IQ3_XXS => decode_blocks::<IQ3_XXS>(bytes, out),
        DType::IQ3_S => decode_blocks::<IQ3_S>(bytes, out),
        DType::TQ1_0 => decode_blocks::<TQ1_0>(bytes, out),
        DType::TQ2_0 => decode_blocks::<TQ2_0>(bytes, out),
        DType::F8_E4M3 => decode_blocks::<F8_E4M3>(bytes, out),
    }
}

/// Encodes whole blocks of one format, in order. Panics unless `x` is whole blocks and `out` has exactly their
/// number of bytes.
#[inline(always)]
pub fn encode_blocks<F: BlockEncoder>(x: &[f32], out: &mut [u8]) {
    let blocks = x.chunks_exact(F::LEN);
    assert!(
        blocks.remainder().is_empty() && Some(out.len()) == blocks.len().checked_mul(F::BYTES),
        "{} numbers do not encode to {} bytes of {}",
        x.len(),
        out.len(),
        F::DTYPE,
    );
    for (x, block) in blocks.zip(out.chunks_exact_mut(F::BYTES)) {
        F::encode(x, block);
    }
}

/// Whether [`encode`] supports the format.
pub const fn has_encoder(dtype: DType) -> bool {
    use DType::{BF16, F16, F32, Q4_0, Q4_1, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0};
    matches!(dtype, F32 | F16 | BF16 | Q4_0 | Q4_1 | Q5_0 | Q5_1 | Q8_0 | Q4_K | Q5_K | Q6_K)
}

/// Encodes whole rows of a format that has an encoder. Panics for one that has none, and on lengths that do not fit.
#[inline(always)]
pub fn encode(dtype: DType, x: &[f32], out: &mut [u8]) {
    match dtype {
        DType::F32 => encode_blocks::<F32>(x, out),
        DType::F16 => encode_blocks::<F16>(x, out),
        DType::BF16 => encode_blocks::<BF16>(x, out),
        DType::Q4_0 => encode_blocks::<Q4_0>(x, out),
        DType::Q4_1 => encode_blocks::<Q4_1>(x, out),
        DType::Q5_0 => encode_blocks::<Q5_0>(x, out),
        DType::Q5_1 => encode_blocks::<Q5_1>(x, out),
        DType::Q8_0 => encode_blocks::<Q8_0>(x, out),
        DType::Q4_K => encode_blocks::<Q4_K>(x, out),
        DType::Q5_K => encode_blocks::<Q5_K>(x, out),
        DType::Q6_K => encode_blocks::<Q6_K>(x, out),
        _ => panic!("{dtype} has no encoder"),
    }
}

/// The nearest integer, halves away from zero, which is how GGUF's quantizers round.
#[inline(always)]
fn round_away(x: f32) -> f32 {
    let whole = x.trunc();
    // The remainder is exact, so doubling it distinguishes a half from a value just below.
    whole + ((x - whole) * 2.0).trunc()
}

/// Returns a block as an array, so that the compiler knows all bounds.
#[inline(always)]
fn fixed<const N: usize>(bytes: &[u8]) -> &[u8; N] {
    bytes.try_into().expect("a slice of the block's length")
}

#[inline(always)]
fn fixed_mut<const N: usize>(out: &mut [f32]) -> &mut [f32; N] {
    out.try_into().expect("room for one block")
}

/// The f16 that starts at `block[at]`, as f32.
#[inline(always)]
fn scale<const N: usize>(block: &[u8; N], at: usize) -> f32 {
    f16_to_f32(u16::from_le_bytes([block[at], block[at + 1]]))
}
