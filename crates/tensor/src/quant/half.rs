//! Unquantized formats: F32, and the two 16-bit floats with their exact conversion to f32 and their rounding from it.
//!
//! ```text
//! F16   s eeeee mmmmmmmmmm   (-1)^s 2^(e-15) (1 + m/2^10);  e = 0: (-1)^s m 2^-24;  e = 31: infinity or NaN
//! BF16  s eeeeeeee mmmmmmm   the upper half of an f32
//! ```
//! Conversions are integer operations and selects: no table, no branch, and no denormal operand, so flushing denormals
//! to zero does not change them. Rounding to subnormal halves is done by an addition, which rounds to nearest like all
//! conversions here.

use super::{BlockEncoder, BlockFormat, fixed};
use crate::DType;

#[derive(Debug, Clone, Copy)]
pub struct F32;
#[derive(Debug, Clone, Copy)]
pub struct F16;
#[derive(Debug, Clone, Copy)]
pub struct BF16;

impl BlockFormat for F32 {
    const DTYPE: DType = DType::F32;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        out[0] = f32::from_le_bytes(*fixed(block));
    }
}

impl BlockFormat for F16 {
    const DTYPE: DType = DType::F16;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        out[0] = f16_to_f32(u16::from_le_bytes(*fixed(block)));
    }
}

impl BlockFormat for BF16 {
    const DTYPE: DType = DType::BF16;

    #[inline(always)]
    fn decode(block: &[u8], out: &mut [f32]) {
        out[0] = bf16_to_f32(u16::from_le_bytes(*fixed(block)));
    }
}

impl BlockEncoder for F32 {
    #[inline(always)]
    fn encode(x: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&x[0].to_le_bytes());
    }
}

impl BlockEncoder for F16 {
    #[inline(always)]
    fn encode(x: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&f32_to_f16(x[0]).to_le_bytes());
    }
}

impl BlockEncoder for BF16 {
    #[inline(always)]
    fn encode(x: &[f32], block: &mut [u8]) {
        block.copy_from_slice(&f32_to_bf16(x[0]).to_le_bytes());
    }
}

/// Returns the value of an IEEE half: exact for every finite number; infinities and NaN payloads are kept.
#[inline(always)]
pub fn f16_to_f32(bits: u16) -> f32 {
    let sign = u32::from(bits & 0x8000) << 16;
    let magnitude = u32::from(bits & 0x7fff);
    // Exponent and mantissa move up by the 13 additional mantissa bits of f32; the exponent's bias grows by 127 - 15.
    let normal = (magnitude << 13) + (112 << 23);
    // The last mantissa bit of values in [0.5, 1) is worth 2^-24, as is the last bit of a subnormal half.
    let subnormal = (f32::from_bits(0x3f00_0000 | magnitude) - 0.5).to_bits();
    let special = (magnitude << 13) | 0x7f80_0000;
    let finite = if magnitude < 0x0400 { subnormal } else { normal };
    f32::from_bits(sign | if magnitude < 0x7c00 { finite } else { special })
}

/// Returns the value of a bfloat16, which is an f32 without its lower mantissa bits.
#[inline(always)]
pub fn bf16_to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Returns the nearest IEEE half, ties to even; from 65,520 on that is infinity. A NaN stays one.
#[inline(always)]
pub fn f32_to_f16(x: f32) -> u16 {
    let bits = x.to_bits();
    let sign = (bits >> 16 & 0x8000) as u16;
    let magnitude = bits & 0x7fff_ffff;
    // Adds half of the last kept bit, less one if that bit is 0 (ties to even). The carry rounds up, and may carry into
    // the exponent, which is correct.
    let rounded = magnitude.wrapping_add(0x0fff + (magnitude >> 13 & 1));
    let normal = rounded.wrapping_sub(112 << 23) >> 13;
    // The last mantissa bit of values in [0.5, 1) is worth 2^-24. The addition rounds to nearest, ties to even.
    let subnormal = (f32::from_bits(magnitude) + 0.5).to_bits().wrapping_sub(0x3f00_0000);
    let finite = if magnitude < 0x3880_0000 { subnormal } else { normal };
    let nan = 0x7e00 | (magnitude >> 13 & 0x03ff);
    let beyond = if magnitude > 0x7f80_0000 { nan } else { 0x7c00 };
    sign | (if magnitude < 0x477f_f000 { finite } else { beyond }) as u16
}

/// Returns the nearest bfloat16, ties to even; values within half a step of the largest become infinity. A NaN stays
/// one.
#[inline(always)]
pub fn f32_to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // A NaN must not round into an infinity: its quiet bit is set instead.
    let nan = bits >> 16 | 0x0040;
    (if bits & 0x7fff_ffff > 0x7f80_0000 { nan } else { rounded }) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All 65,536 halves against the definition, evaluated in f64 where every step is exact.
    #[test]
    fn every_half_by_its_definition() {
        for bits in 0..=u16::MAX {
            let exponent = i32::from(bits >> 10 & 0x1f);
            let mantissa = f64::from(bits & 0x03ff);
            let magnitude = match exponent {
                0 => mantissa * 2f64.powi(-24),
                31 if mantissa == 0.0 => f64::INFINITY,
                31 => f64::NAN,
                _ => 2f64.powi(exponent - 15) * (1.0 + mantissa / 1024.0),
            };
            let expected = if bits & 0x8000 == 0 { magnitude } else { -magnitude } as f32;
            let found = f16_to_f32(bits);
            if expected.is_nan() {
                assert!(found.is_nan(), "{bits:#06x}");
                assert_eq!(found.to_bits() >> 13 & 0x3ff, u32::from(bits & 0x3ff), "payload of {bits:#06x}");
            } else {
                assert_eq!(found.to_bits(), expected.to_bits(), "{bits:#06x}");
            }
        }
    }

    /// A bfloat16 is the f32 of which it is the upper half, and nothing else is.
    #[test]
    fn every_bfloat16_is_an_upper_half() {
        for bits in 0..=u16::MAX {
            assert_eq!(bf16_to_f32(bits).to_bits(), u32::from_be_bytes([(bits >> 8) as u8, bits as u8, 0, 0]));
        }
        assert_eq!(bf16_to_f32(0x3fc0), 1.5);
    }

    /// Every 16-bit value is kept, and a value between two of them becomes the nearer one, or the even one from the
    /// middle.
    fn rounds_to_nearest(encode: fn(f32) -> u16, decode: fn(u16) -> f32, largest: u16) {
        for bits in 0..largest {
            let (low, high) = (decode(bits), decode(bits + 1));
            let middle = ((f64::from(low) + f64::from(high)) / 2.0) as f32;
            let even = if bits % 2 == 0 { bits } else { bits + 1 };
            for (sign, mask) in [(1.0, 0), (-1.0, 0x8000)] {
                assert_eq!(encode(sign * low), bits | mask, "{low}");
                assert_eq!(encode(sign * middle), even | mask, "{middle} between {low} and {high}");
                assert_eq!(encode(sign * middle.next_down()), bits | mask, "below {middle}");
                assert_eq!(encode(sign * middle.next_up()), (bits + 1) | mask, "above {middle}");
            }
        }
    }

    #[test]
    fn halves_round_to_nearest() {
        rounds_to_nearest(f32_to_f16, f16_to_f32, 0x7bff);
        assert_eq!([f32_to_f16(65_519.996), f32_to_f16(65_520.0), f32_to_f16(-f32::MAX)], [0x7bff, 0x7c00, 0xfc00]);
        assert!(f16_to_f32(f32_to_f16(f32::NAN)).is_nan());
    }

    #[test]
    fn bfloat16s_round_to_nearest() {
        rounds_to_nearest(f32_to_bf16, bf16_to_f32, 0x7f7f);
        assert_eq!([f32_to_bf16(f32::MAX), f32_to_bf16(f32::NEG_INFINITY)], [0x7f80, 0xff80]);
        // A NaN whose payload lies in the bits that are cut off.
        assert!(bf16_to_f32(f32_to_bf16(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
