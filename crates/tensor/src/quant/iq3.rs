//! The formats of three bits: four magnitudes are an entry of a codebook, and signs are stored apart.
//!
//! ```text
//! IQ3_XXS  d f16 | qs 64 bytes | 8 x (signs and scale u32)               x = d (s + 1/2) / 2 level    256 values
//! IQ3_S    d f16 | qs 64 bytes | qh 8 bytes | signs 32 bytes | scales 4  x = d (2 s + 1) level        256 values
//! ```
//! 32 values share a scale. IQ3_XXS stores scales and signs like IQ2_XXS. IQ3_S has the ninth bit of its indices in
//! `qh`, eight signs in a byte, and two scales in a byte, the lower half first.

use super::codebooks;
use super::iq2::with_even_parity;
use super::{BlockFormat, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ3_XXS;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct IQ3_S;

const XXS_LEVELS: [f32; 8] = [4.0, 12.0, 20.0, 28.0, 36.0, 44.0, 52.0, 62.0];

impl BlockFormat for IQ3_XXS {
    const DTYPE: DType = DType::IQ3_XXS;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for s in 0..8 {
            let signs: &[u8; 4] = fixed(&block[66 + 4 * s..70 + 4 * s]);
            let signs = u32::from_le_bytes(*signs);
            let ds = d * (0.5 + (signs >> 28) as f32) * 0.5;
            for g in 0..8 {
                let entry = codebooks::IQ3_XXS[usize::from(block[2 + 8 * s + g])];
                let signs = with_even_parity((signs >> (7 * (g / 2))) as u8) >> (4 * (g % 2));
                let at = 32 * s + 4 * g;
                four(|level| ds * XXS_LEVELS[usize::from(level)], entry, signs, &mut out[at..at + 4]);
            }
        }
    }
}

impl BlockFormat for IQ3_S {
    const DTYPE: DType = DType::IQ3_S;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let d = scale(block, 0);
        for s in 0..8 {
            let ds = d * f32::from(1 + 2 * (block[106 + s / 2] >> (4 * (s % 2)) & 0x0f));
            for g in 0..8 {
                let high = usize::from(block[66 + s] >> g & 1);
                let entry = codebooks::IQ3_S[usize::from(block[2 + 8 * s + g]) | high << 8];
                let signs = block[74 + 4 * s + g / 2] >> (4 * (g % 2));
                let at = 32 * s + 4 * g;
                // The levels are the odd numbers.
                four(|level| ds * f32::from(2 * level + 1), entry, signs, &mut out[at..at + 4]);
            }
        }
    }
}

#[inline(always)]
fn four(value: impl Fn(u16) -> f32, entry: u16, signs: u8, out: &mut [f32]) {
    for (j, out) in out.iter_mut().enumerate() {
        let value = value(entry >> (3 * j) & 7);
        *out = if signs >> j & 1 == 0 { value } else { -value };
    }
}
