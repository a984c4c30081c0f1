//! The formats of one to two bits with levels -1, 0 and 1: eight values are an entry of a codebook.
//!
//! ```text
//! IQ1_S  d f16 | qs 32 bytes | qh 8 u16               x = d (2 s + 1) (level ± 1/8)   256 values, 32 share a scale
//! IQ1_M  qs 32 bytes | qh 16 bytes | scales 4 u16     x = d (2 s + 1) (level ± 1/8)   256 values, 16 share a scale
//! ```
//! A codebook index has its low eight bits in `qs`. IQ1_S has the other three of four groups, the scale s and the sign
//! of the shift (from bit 0 up) in one `qh`. IQ1_M has three bits and the sign of a group in half a byte of `qh`; each
//! of its `scales` holds four scales of three bits and four bits of d.

use super::codebooks::IQ1;
use super::{BlockFormat, f16_to_f32, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ1_S;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ1_M;

const SHIFT: f32 = 0.125;

impl BlockFormat for IQ1_S {
    const DTYPE: DType = DType::IQ1_S;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for s in 0..8 {
            let high = u16::from_le_bytes([block[34 + 2 * s], block[35 + 2 * s]]);
            let ds = d * f32::from(2 * (high >> 12 & 7) + 1);
            let shift = if high & 0x8000 == 0 { SHIFT } else { -SHIFT };
            for g in 0..4 {
                let index = u16::from(block[2 + 4 * s + g]) | (high >> (3 * g) & 7) << 8;
                eight(index, ds, shift, &mut out[32 * s + 8 * g..32 * s + 8 * g + 8]);
            }
        }
    }
}

impl BlockFormat for IQ1_M {
    const DTYPE: DType = DType::IQ1_M;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let scales: [u16; 4] = std::array::from_fn(|i| u16::from_le_bytes([block[48 + 2 * i], block[49 + 2 * i]]));
        let d = f16_to_f32(scales[0] >> 12 | scales[1] >> 12 << 4 | scales[2] >> 12 << 8 | scales[3] >> 12 << 12);
        for g in 0..32 {
            let s = g / 2;
            let ds = d * f32::from(2 * (scales[s / 4] >> (3 * (s % 4)) & 7) + 1);
            let high = block[32 + g / 2] >> (4 * (g % 2));
            let shift = if high & 8 == 0 { SHIFT } else { -SHIFT };
            let index = u16::from(block[g]) | u16::from(high & 7) << 8;
            eight(index, ds, shift, &mut out[8 * g..8 * g + 8]);
        }
    }
}

#[inline(always)]
fn eight(index: u16, ds: f32, shift: f32, out: &mut [f32]) {
    let levels = IQ1[usize::from(index)];
    for (j, out) in out.iter_mut().enumerate() {
        *out = ds * (f32::from((levels >> (2 * j) & 3) as i8 - 1) + shift);
    }
}
