//! The formats of two bits: eight magnitudes are an entry of a codebook, and signs are stored apart.
//!
//! ```text
//! IQ2_XXS  d f16 | 8 x (4 indices u8 | signs and scale u32)              x = d (s + 1/2) / 4 level    256 values
//! IQ2_XS   d f16 | qs 32 u16 | scales 8 bytes                            the same
//! IQ2_S    d f16 | qs 32 bytes | signs 32 bytes | qh 8 bytes | scales 8  the same
//! ```
//! IQ2_XXS: 32 values share a scale, the upper four of the 32 bits; the others are the signs of four groups, seven bits
//! each. IQ2_XS: the lower nine bits of `qs` are the index, the upper seven the signs. The eighth sign of seven bits is
//! the one that makes the number of minus signs even. IQ2_S has eight signs, and the upper two bits of its indices in
//! `qh`. In both, 16 values share a scale, the lower half of a byte first.

use super::codebooks;
use super::{BlockFormat, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ2_XXS;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ2_XS;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ2_S;

const LEVELS: [f32; 4] = [8.0, 25.0, 43.0, 0.0];

impl BlockFormat for IQ2_XXS {
    const DTYPE: DType = DType::IQ2_XXS;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for s in 0..8 {
            let part: &[u8; 8] = fixed(&block[2 + 8 * s..10 + 8 * s]);
            let signs = u32::from_le_bytes([part[4], part[5], part[6], part[7]]);
            let ds = d * (0.5 + (signs >> 28) as f32) * 0.25;
            for g in 0..4 {
                let entry = codebooks::IQ2_XXS[usize::from(part[g])];
                let signs = with_even_parity((signs >> (7 * g)) as u8);
                eight(entry, signs, ds, &mut out[32 * s + 8 * g..32 * s + 8 * g + 8]);
            }
        }
    }
}

impl BlockFormat for IQ2_XS {
    const DTYPE: DType = DType::IQ2_XS;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for g in 0..32 {
            let q = u16::from_le_bytes([block[2 + 2 * g], block[3 + 2 * g]]);
            let entry = codebooks::IQ2_XS[usize::from(q & 511)];
            let ds = scale_of_pair(d, fixed(&block[66..]), g / 2);
            eight(entry, with_even_parity((q >> 9) as u8), ds, &mut out[8 * g..8 * g + 8]);
        }
    }
}

impl BlockFormat for IQ2_S {
    const DTYPE: DType = DType::IQ2_S;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for g in 0..32 {
            let high = block[66 + g / 4] >> (2 * (g % 4)) & 3;
            let entry = codebooks::IQ2_S[usize::from(block[2 + g]) | usize::from(high) << 8];
            let ds = scale_of_pair(d, fixed(&block[74..]), g / 2);
            eight(entry, block[34 + g], ds, &mut out[8 * g..8 * g + 8]);
        }
    }
}

/// Returns the scale of 16 values.
#[inline(always)]
fn scale_of_pair(d: f32, scales: &[u8; 8], pair: usize) -> f32 {
    d * (0.5 + f32::from(scales[pair / 2] >> (4 * (pair % 2)) & 0x0f)) * 0.25
}

/// Returns seven signs and the eighth that makes the number of minus signs even.
#[inline(always)]
pub(super) fn with_even_parity(signs: u8) -> u8 {
    let seven = signs & 0x7f;
    let halves = seven ^ seven >> 4;
    // Bit i is the parity of the four-bit number i.
    let odd = (0x6996u32 >> (halves & 0x0f) & 1) as u8;
    seven | odd << 7
}

#[inline(always)]
fn eight(entry: u16, signs: u8, ds: f32, out: &mut [f32]) {
    for (j, out) in out.iter_mut().enumerate() {
        let value = ds * LEVELS[usize::from(entry >> (2 * j) & 3)];
        *out = if signs >> j & 1 == 0 { value } else { -value };
    }
}
