//! FP8 weights as Hugging Face folders publish them: eight-bit floats with an f32 scale for 128 values of a row.
//!
//! ```text
//! F8_E4M3  d f32 | qs 128 bytes        x = d q        128 values
//! E4M3     s eeee mmm    (-1)^s 2^(e-7) (1 + m/8);  e = 0: (-1)^s m 2^-9;  e = 15 and m = 7: NaN
//! ```
//! Files store the scales apart: one for a tensor, a row, or a block of 128 x 128 values. A row's blocks repeat them,
//! so that a row can be read alone, which costs 3 % of the memory. No GGUF file has this format.

use super::{BlockFormat, fixed, fixed_mut};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct F8_E4M3;

impl BlockFormat for F8_E4M3 {
    const DTYPE: DType = DType::F8_E4M3;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = f32::from_le_bytes([block[0], block[1], block[2], block[3]]);
        let q: &[u8; 128] = fixed(&block[4..]);
        for j in 0..128 {
            out[j] = d * e4m3_to_f32(q[j]);
        }
    }
}

/// Returns the value of an E4M3 float. Integer operations and selects without a denormal operand, like
/// [`f16_to_f32`](super::f16_to_f32).
#[inline(always)]
pub fn e4m3_to_f32(x: u8) -> f32 {
    let x = u32::from(x);
    let (sign, magnitude) = ((x & 0x80) << 24, x & 0x7f);
    // The exponent moves from bias 7 to bias 127.
    let normal = (magnitude << 20) + (120 << 23);
    // 1 + m/8 in units of 2^-6, less one unit: m 2^-9.
    let subnormal = (f32::from_bits((121 << 23) | magnitude << 20) - f32::from_bits(121 << 23)).to_bits();
    let finite = if magnitude < 8 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude == 0x7f { 0x7ff0_0000 } else { finite })
}
