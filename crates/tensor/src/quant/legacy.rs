//! The formats of one scale for 32 values: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.
//!
//! ```text
//! Q4_0  d f16 | qs 16 bytes                                x = d (q - 8)
//! Q4_1  d f16 | m f16 | qs 16 bytes                        x = d q + m
//! Q5_0  d f16 | qh 32 bits | qs 16 bytes                   x = d (q - 16)
//! Q5_1  d f16 | m f16 | qh 32 bits | qs 16 bytes           x = d q + m
//! Q8_0  d f16 | qs 32 x i8                                 x = q d
//! ```
//! Byte j of `qs` has the low four bits of value j in its lower half and those of value j + 16 in its upper half. Bit j
//! of `qh` is the fifth bit of value j.

use super::{BlockEncoder, BlockFormat, f32_to_f16, fixed, fixed_mut, round_away, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q4_0;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q4_1;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q5_0;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q5_1;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q8_0;

impl BlockFormat for Q4_0 {
    const DTYPE: DType = DType::Q4_0;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        let q = nibbles(fixed(&block[2..]));
        for j in 0..32 {
            out[j] = d * f32::from(q[j] as i8 - 8);
        }
    }
}

impl BlockFormat for Q4_1 {
    const DTYPE: DType = DType::Q4_1;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let (d, m) = (scale(block, 0), scale(block, 2));
        let q = nibbles(fixed(&block[4..]));
        for j in 0..32 {
            out[j] = d * f32::from(q[j]) + m;
        }
    }
}

impl BlockFormat for Q5_0 {
    const DTYPE: DType = DType::Q5_0;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        let q = five_bits(fixed(&block[2..6]), fixed(&block[6..]));
        for j in 0..32 {
            out[j] = d * f32::from(q[j] as i8 - 16);
        }
    }
}

impl BlockFormat for Q5_1 {
    const DTYPE: DType = DType::Q5_1;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let (d, m) = (scale(block, 0), scale(block, 2));
        let q = five_bits(fixed(&block[4..8]), fixed(&block[8..]));
        for j in 0..32 {
            out[j] = d * f32::from(q[j]) + m;
        }
    }
}

impl BlockFormat for Q8_0 {
    const DTYPE: DType = DType::Q8_0;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        let q: &[u8; 32] = fixed(&block[2..]);
        for j in 0..32 {
            out[j] = f32::from(q[j] as i8) * d;
        }
    }
}

impl BlockEncoder for Q8_0 {
    /// d is the largest magnitude over 127, which is rounded to f16 only after the values were divided by it.
    #[inline(always)]
    fn encode(x: &[f32], block: &mut [u8]) {
        let largest = x.iter().fold(0.0f32, |largest, x| largest.max(x.abs()));
        let d = largest / 127.0;
        let inverse = if d == 0.0 { 0.0 } else { 1.0 / d };
        block[..2].copy_from_slice(&f32_to_f16(d).to_le_bytes());
        for (q, x) in block[2..].iter_mut().zip(x) {
            *q = round_away(x * inverse) as i8 as u8;
        }
    }
}

/// Returns the 32 values of four bits in 16 bytes: lower halves first, then upper halves.
#[inline(always)]
pub(super) fn nibbles(qs: &[u8; 16]) -> [u8; 32] {
    let mut q = [0; 32];
    for j in 0..16 {
        q[j] = qs[j] & 0x0f;
        q[j + 16] = qs[j] >> 4;
    }
    q
}

#[inline(always)]
fn five_bits(qh: &[u8; 4], qs: &[u8; 16]) -> [u8; 32] {
    let high = u32::from_le_bytes(*qh);
    let mut q = nibbles(qs);
    for j in 0..32 {
        q[j] |= ((high >> j & 1) as u8) << 4;
    }
    q
}
