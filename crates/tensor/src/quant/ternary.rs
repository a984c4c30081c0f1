//! The ternary formats: a value is -1, 0 or 1 times the scale of its block.
//!
//! ```text
//! TQ1_0  qs 48 bytes | qh 4 bytes | d f16     x = d q     256 values
//! TQ2_0  qs 64 bytes | d f16                  x = d q     256 values
//! ```
//! A byte b of TQ1_0 holds five digits of base three as the fraction b / 256: digit n is the first one after the point
//! of 3^n b / 256. Values 0 to 159 are digits 0, 1, ... of all the first 32 bytes, 160 to 239 those of the next 16, and
//! 240 to 255 the four digits of each byte of `qh`. TQ2_0 holds the values of 32 bytes, two bits each, lowest bits
//! first, then those of the next 32.

use super::{BlockFormat, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct TQ1_0;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct TQ2_0;

const POWERS_OF_THREE: [u8; 5] = [1, 3, 9, 27, 81];

impl BlockFormat for TQ1_0 {
    const DTYPE: DType = DType::TQ1_0;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 52);
        for n in 0..5 {
            for m in 0..32 {
                out[32 * n + m] = d * digit(block[m], n);
            }
            for m in 0..16 {
                out[160 + 16 * n + m] = d * digit(block[32 + m], n);
            }
        }
        for n in 0..4 {
            for m in 0..4 {
                out[240 + 4 * n + m] = d * digit(block[48 + m], n);
            }
        }
    }
}

/// Returns digit n of a byte, minus one.
#[inline(always)]
fn digit(byte: u8, n: usize) -> f32 {
    let fraction = byte.wrapping_mul(POWERS_OF_THREE[n]);
    f32::from(((u16::from(fraction) * 3) >> 8) as i8 - 1)
}

impl BlockFormat for TQ2_0 {
    const DTYPE: DType = DType::TQ2_0;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 64);
        for half in 0..2 {
            for n in 0..4 {
                for m in 0..32 {
                    let q = block[32 * half + m] >> (2 * n) & 3;
                    out[128 * half + 32 * n + m] = d * f32::from(q as i8 - 1);
                }
            }
        }
    }
}
