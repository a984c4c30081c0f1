//! NVFP4: the four-bit float of [`MXFP4`](super::MXFP4), with a scale of eight bits for 16 values.
//!
//! ```text
//! d 4 bytes | qs 32 bytes        x = d v[q],  v twice the value of the float q      64 values
//! ```
//! d is half an unsigned E4M3 float: four exponent bits of bias 7 and three mantissa bits; the highest bit is ignored,
//! and 0x7f, the NaN of E4M3, is zero. Of the eight bytes of 16 values, the lower halves are the first eight. A file
//! may have a scale for the whole tensor beside it; this format does not contain it.

use super::mxfp4::DOUBLED;
use super::{BlockFormat, fixed, fixed_mut};
use crate::DType;

#[derive(Debug, Clone, Copy)]
pub struct NVFP4;

impl BlockFormat for NVFP4 {
    const DTYPE: DType = DType::NVFP4;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        let block: &[u8; Self::BYTES] = fixed(block);
        let out: &mut [f32; Self::LEN] = fixed_mut(out);
        for s in 0..4 {
            let d = half_ue4m3(block[s]);
            for j in 0..8 {
                let pair = block[4 + 8 * s + j];
                out[16 * s + j] = d * DOUBLED[usize::from(pair & 0x0f)];
                out[16 * s + 8 + j] = d * DOUBLED[usize::from(pair >> 4)];
            }
        }
    }
}

/// Half the value of an unsigned E4M3 float.
#[inline(always)]
fn half_ue4m3(x: u8) -> f32 {
    let (exponent, mantissa) = (u32::from(x >> 3 & 0x0f), x & 7);
    if x == 0x7f {
        0.0
    } else if exponent == 0 {
        f32::from(mantissa) / 1024.0
    } else {
        // 2^(exponent - 8) (1 + mantissa / 8), from its bits.
        f32::from_bits((exponent + 119) << 23 | u32::from(mantissa) << 20)
    }
}
