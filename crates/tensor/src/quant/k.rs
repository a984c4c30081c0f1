//! The K formats: 256 values a block, in sub-blocks whose scales are themselves quantized.
//!
//! ```text
//! Q2_K  scales 16 bytes | qs 64 bytes | d f16 | dmin f16               x = (d s) q - (dmin m)     sub-blocks of 16
//! Q3_K  hmask 32 bytes | qs 64 bytes | scales 12 bytes | d f16         x = (d (s - 32)) (q - 4)   sub-blocks of 16
//! Q4_K  d f16 | dmin f16 | scales 12 bytes | qs 128 bytes              x = (d s) q - (dmin m)     sub-blocks of 32
//! Q5_K  d f16 | dmin f16 | scales 12 bytes | qh 32 bytes | qs 128      x = (d s) q - (dmin m)     sub-blocks of 32
//! Q6_K  ql 128 bytes | qh 64 bytes | scales 16 x i8 | d f16            x = (d s) (q - 32)         sub-blocks of 16
//! ```
//! Values are in runs of 32. Two bits a value (`qs` of Q2_K and Q3_K, `qh` of Q6_K): each half of the block has 32
//! bytes, of which byte j holds two bits of value j of each of the half's four runs, from the lowest bits up. One bit a
//! value (`hmask`, `qh` of Q5_K): bit r of byte j belongs to value j of run r. The order of four-bit halves is given
//! with each format.

use super::{BlockFormat, fixed, fixed_mut, scale};
use crate::DType;

#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q2_K;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q3_K;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q4_K;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q5_K;
#[derive(Debug, Clone, Copy)]
#[allow(non_camel_case_types)]
pub struct Q6_K;

impl BlockFormat for Q2_K {
    const DTYPE: DType = DType::Q2_K;

    /// The lower half of a scale byte is s, the upper half m.
    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let scales: &[u8; 16] = fixed(&block[..16]);
        let qs: &[u8; 64] = fixed(&block[16..80]);
        let (d, dmin) = (scale(block, 80), scale(block, 82));
        for half in 0..2 {
            for run in 0..4 {
                for sub in 0..2 {
                    let (s, at) = (8 * half + 2 * run + sub, 16 * sub);
                    let ds = d * f32::from(scales[s] & 0x0f);
                    let ms = dmin * f32::from(scales[s] >> 4);
                    for j in 0..16 {
                        let q = qs[32 * half + at + j] >> (2 * run) & 3;
                        out[16 * s + j] = ds * f32::from(q) - ms;
                    }
                }
            }
        }
    }
}

impl BlockFormat for Q3_K {
    const DTYPE: DType = DType::Q3_K;

    /// A set bit of `hmask` is the third bit of q, so a clear one lowers q - 4 by four.
    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let hmask: &[u8; 32] = fixed(&block[..32]);
        let qs: &[u8; 64] = fixed(&block[32..96]);
        let scales = six_bit_scales(fixed(&block[96..108]));
        let d = scale(block, 108);
        for half in 0..2 {
            let qs: &[u8; 32] = fixed(&qs[32 * half..32 * half + 32]);
            let out = &mut out[128 * half..128 * half + 128];
            for run in 0..4 {
                for sub in 0..2 {
                    let (s, at) = (8 * half + 2 * run + sub, 16 * sub);
                    let ds = d * f32::from(scales[s]);
                    for j in 0..16 {
                        let low = qs[at + j] >> (2 * run) & 3;
                        let high = hmask[at + j] >> (4 * half + run) & 1;
                        out[32 * run + at + j] = ds * f32::from((low | high << 2) as i8 - 4);
                    }
                }
            }
        }
    }
}

impl BlockFormat for Q4_K {
    const DTYPE: DType = DType::Q4_K;

    /// Each 32 bytes of `qs` hold two runs: the lower halves are one, the upper halves the next.
    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let (d, dmin) = (scale(block, 0), scale(block, 2));
        let (scales, mins) = scales_and_mins(fixed(&block[4..16]));
        let qs: &[u8; 128] = fixed(&block[16..]);
        for s in 0..8 {
            let ds = d * f32::from(scales[s]);
            let ms = dmin * f32::from(mins[s]);
            for j in 0..32 {
                let q = qs[32 * (s / 2) + j] >> (4 * (s % 2)) & 0x0f;
                out[32 * s + j] = ds * f32::from(q) - ms;
            }
        }
    }
}

impl BlockFormat for Q5_K {
    const DTYPE: DType = DType::Q5_K;

    /// The layout of Q4_K, with a fifth bit from `qh`.
    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let (d, dmin) = (scale(block, 0), scale(block, 2));
        let (scales, mins) = scales_and_mins(fixed(&block[4..16]));
        let qh: &[u8; 32] = fixed(&block[16..48]);
        let qs: &[u8; 128] = fixed(&block[48..]);
        for s in 0..8 {
            let ds = d * f32::from(scales[s]);
            let ms = dmin * f32::from(mins[s]);
            for j in 0..32 {
                let low = qs[32 * (s / 2) + j] >> (4 * (s % 2)) & 0x0f;
                let q = low | (qh[j] >> s & 1) << 4;
                out[32 * s + j] = ds * f32::from(q) - ms;
            }
        }
    }
}

impl BlockFormat for Q6_K {
    const DTYPE: DType = DType::Q6_K;

    /// Each 64 bytes of `ql` hold four runs: the lower halves are the first two, the upper halves the last two.
    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        let ql: &[u8; 128] = fixed(&block[..128]);
        let qh: &[u8; 64] = fixed(&block[128..192]);
        let scales: &[u8; 16] = fixed(&block[192..208]);
        let d = scale(block, 208);
        for half in 0..2 {
            let ql: &[u8; 64] = fixed(&ql[64 * half..64 * half + 64]);
            let qh: &[u8; 32] = fixed(&qh[32 * half..32 * half + 32]);
            let out = &mut out[128 * half..128 * half + 128];
            for run in 0..4 {
                for sub in 0..2 {
                    let (s, at) = (8 * half + 2 * run + sub, 16 * sub);
                    let ds = d * f32::from(scales[s] as i8);
                    for j in 0..16 {
                        let low = ql[32 * (run % 2) + at + j] >> (4 * (run / 2)) & 0x0f;
                        let high = qh[at + j] >> (2 * run) & 3;
                        out[32 * run + at + j] = ds * f32::from((low | high << 4) as i8 - 32);
                    }
                }
            }
        }
    }
}

/// Sixteen signed scales of six bits in 12 bytes (Q3_K): four low bits from the first eight bytes (lower halves, then
/// upper halves), two high bits from the last four (lowest pairs first), less 32.
#[inline(always)]
fn six_bit_scales(packed: &[u8; 12]) -> [i8; 16] {
    let mut scales = [0; 16];
    for s in 0..16 {
        let low = packed[s % 8] >> (4 * (s / 8)) & 0x0f;
        let high = packed[8 + s % 4] >> (2 * (s / 4)) & 3;
        scales[s] = (low | high << 4) as i8 - 32;
    }
    scales
}

/// Eight scales and eight mins of six bits in 12 bytes (Q4_K, Q5_K). Scales 0 to 3 are the low six bits of bytes 0 to
/// 3, mins 0 to 3 those of bytes 4 to 7. The two high bits of these bytes are the high bits of scales and mins 4 to 7,
/// whose low four bits are in bytes 8 to 11: the scale in the lower half, the min in the upper half.
#[inline(always)]
fn scales_and_mins(packed: &[u8; 12]) -> ([u8; 8], [u8; 8]) {
    let mut scales = [0; 8];
    let mut mins = [0; 8];
    for s in 0..4 {
        scales[s] = packed[s] & 0x3f;
        mins[s] = packed[s + 4] & 0x3f;
        scales[s + 4] = packed[s + 8] & 0x0f | packed[s] >> 2 & 0x30;
        mins[s + 4] = packed[s + 8] >> 4 | packed[s + 4] >> 2 & 0x30;
    }
    (scales, mins)
}
