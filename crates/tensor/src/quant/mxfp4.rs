//! MXFP4, the four-bit float of the OCP microscaling standard: 32 values with one power of two as scale.
//!
//! ```text
//! e u8 | qs 16 bytes        x = 2^(e - 128) v[q],  v twice the value of the float q (sign, 2 exponent bits, mantissa)
//! ```
//! The lower halves of `qs` are values 0 to 15, the upper halves 16 to 31. Values are doubled to be integers, hence 128
//! in place of the standard's bias of 127. The standard's NaN (e = 255) is decoded by the same formula, as in other
//! decoders.

use super::legacy::nibbles;
use super::{BlockFormat, fixed, fixed_mut};
use crate::DType;

#[derive(Debug, Clone, Copy)]
pub struct MXFP4;

/// Minus zero is decoded as zero, as in the reference.
pub(super) const DOUBLED: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

impl BlockFormat for MXFP4 {
    const DTYPE: DType = DType::MXFP4;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = half_power_of_two(block[0]);
        let q = nibbles(fixed(&block[1..]));
        for j in 0..32 {
            out[j] = d * DOUBLED[usize::from(q[j] & 0x0f)];
        }
    }
}

/// 2^(e - 128). The two smallest have no exponent bits left and are written as mantissa bits: 2^-128 and 2^-127.
#[inline(always)]
fn half_power_of_two(e: u8) -> f32 {
    let e = u32::from(e);
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { (e - 1) << 23 })
}
