//! The non-linear four-bit formats: a value is an index of 16 levels, which are closer together near zero, where
//! weights are dense.
//!
//! ```text
//! IQ4_NL  d f16 | qs 16 bytes                                      x = d level[q]              32 values
//! IQ4_XS  d f16 | scales_h u16 | scales_l 4 bytes | qs 128 bytes   x = (d (s - 32)) level[q]   256, sub-blocks of 32
//! ```
//! Within 16 bytes of `qs`, the lower halves are values 0 to 15 and the upper halves 16 to 31. The scale of sub-block s
//! has its low four bits in half s of `scales_l` (lower half first) and its high two at bit 2 s of `scales_h`.

use super::legacy::nibbles;
use super::{BlockFormat, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ4_NL;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ4_XS;

/// Integers, stored as f32 because they are multiplied as f32.
const LEVELS: [f32; 16] =
    [-127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0];

impl BlockFormat for IQ4_NL {
    const DTYPE: DType = DType::IQ4_NL;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        let q = nibbles(fixed(&block[2..]));
        for j in 0..32 {
            out[j] = d * LEVELS[usize::from(q[j] & 0x0f)];
        }
    }
}

impl BlockFormat for IQ4_XS {
    const DTYPE: DType = DType::IQ4_XS;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        let scales_h = u16::from_le_bytes([block[2], block[3]]);
        let scales_l: &[u8; 4] = fixed(&block[4..8]);
        let qs: &[u8; 128] = fixed(&block[8..]);
        for s in 0..8 {
            let low = scales_l[s / 2] >> (4 * (s % 2)) & 0x0f;
            let high = (scales_h >> (2 * s) & 3) as u8;
            let ds = d * f32::from((low | high << 4) as i8 - 32);
            let q = nibbles(fixed(&qs[16 * s..16 * s + 16]));
            for j in 0..32 {
                out[32 * s + j] = ds * LEVELS[usize::from(q[j] & 0x0f)];
            }
        }
    }
}
