//! Blocks of a file, with integers and scales separated, before they are packed.

use pellucid_tensor::quant::{self, BlockFormat, f16_to_f32};

/// A block of a file, with integers and scales separated. Formats of 32 values use the first elements of each array.
pub(crate) struct FileBlock {
    /// As they are stored: codes or unsigned integers; signed ones for 8 bits.
    pub(super) integers: [u8; 256],
    /// Bits of an f16, or of a bf16.
    pub(super) scale: u16,
    pub(super) min: u16,
    /// One for each slice, or two for scales of 16 values.
    pub(super) scales: [u8; 16],
    pub(super) mins: [u8; 8],
    /// Scales in f32, one for each slice.
    pub(super) singles: [f32; 8],
}

impl FileBlock {
    fn new(scale: u16, min: u16) -> Self {
        FileBlock { integers: [0; 256], scale, min, scales: [0; 16], mins: [0; 8], singles: [0.0; 8] }
    }
}

#[inline(always)]
pub(super) fn half(block: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([block[at], block[at + 1]])
}

/// The bits of 2^(e - 128) as bf16. The two smallest have no exponent bits left.
#[inline(always)]
pub(super) fn half_power_of_two(e: u8) -> u16 {
    if e < 2 { 0x0020 << e } else { (u16::from(e) - 1) << 7 }
}

#[inline(always)]
pub(super) fn legacy4(scale: u16, min: u16, qs: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(scale, min);
    for j in 0..16 {
        numbers.integers[j] = qs[j] & 0x0f;
        numbers.integers[16 + j] = qs[j] >> 4;
    }
    numbers
}

#[inline(always)]
pub(super) fn legacy5(scale: u16, min: u16, qh: &[u8], qs: &[u8]) -> FileBlock {
    let mut numbers = legacy4(scale, min, qs);
    let high = u32::from_le_bytes([qh[0], qh[1], qh[2], qh[3]]);
    for j in 0..32 {
        numbers.integers[j] |= ((high >> j & 1) as u8) << 4;
    }
    numbers
}

#[inline(always)]
pub(super) fn signed8(scale: u16, qs: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(scale, 0);
    numbers.integers[..32].copy_from_slice(qs);
    numbers
}

#[inline(always)]
pub(super) fn k45(scale: u16, min: u16, packed: &[u8], qh: Option<&[u8]>, qs: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(scale, min);
    for s in 0..4 {
        numbers.scales[s] = packed[s] & 0x3f;
        numbers.mins[s] = packed[s + 4] & 0x3f;
        numbers.scales[s + 4] = packed[s + 8] & 0x0f | packed[s] >> 2 & 0x30;
        numbers.mins[s + 4] = packed[s + 8] >> 4 | packed[s + 4] >> 2 & 0x30;
    }
    for s in 0..8 {
        for j in 0..32 {
            let low = qs[32 * (s / 2) + j] >> (4 * (s % 2)) & 0x0f;
            numbers.integers[32 * s + j] = low | qh.map_or(0, |qh| (qh[j] >> s & 1) << 4);
        }
    }
    numbers
}

#[inline(always)]
pub(super) fn k3(scale: u16, high: &[u8], qs: &[u8], packed: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(scale, 0);
    for i in 0..16 {
        let low = packed[i % 8] >> (4 * (i / 8)) & 0x0f;
        numbers.scales[i] = (low | (packed[8 + i % 4] >> (2 * (i / 4)) & 3) << 4).wrapping_sub(32);
    }
    for s in 0..8 {
        let (half, run) = (s / 4, s % 4);
        for j in 0..32 {
            numbers.integers[32 * s + j] = qs[32 * half + j] >> (2 * run) & 3 | (high[j] >> s & 1) << 2;
        }
    }
    numbers
}

#[inline(always)]
pub(super) fn iq4_xs(scale: u16, scales_high: u16, scales_low: &[u8], qs: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(0, 0);
    for s in 0..8 {
        let low = scales_low[s / 2] >> (4 * (s % 2)) & 0x0f;
        let high = (scales_high >> (2 * s) & 3) as u8;
        numbers.singles[s] = f16_to_f32(scale) * f32::from((low | high << 4) as i8 - 32);
        for j in 0..16 {
            numbers.integers[32 * s + j] = qs[16 * s + j] & 0x0f;
            numbers.integers[32 * s + 16 + j] = qs[16 * s + j] >> 4;
        }
    }
    numbers
}

#[inline(always)]
pub(super) fn k6(scale: u16, ql: &[u8], qh: &[u8], scales: &[u8]) -> FileBlock {
    let mut numbers = FileBlock::new(scale, 0);
    numbers.scales.copy_from_slice(scales);
    for s in 0..8 {
        let (half, run) = (s / 4, s % 4);
        for j in 0..32 {
            let low = ql[64 * half + 32 * (run % 2) + j] >> (4 * (run / 2)) & 0x0f;
            let high = qh[32 * half + j] >> (2 * run) & 3;
            numbers.integers[32 * s + j] = low | high << 4;
        }
    }
    numbers
}

/// Returns the integers of a block of 256 values, which are integers times the scale of 32, plus `offset`. With a scale
/// of zero any integer is right.
#[inline(always)]
fn integers_of<F: BlockFormat>(block: &[u8], offset: i8, scales: [f32; 8]) -> [u8; 256] {
    let mut values = [0.0; 256];
    F::decode(block, &mut values);
    // Exact: a scale has at most 16 significant bits, and an integer 4.
    std::array::from_fn(|i| ((values[i] / scales[i / 32]) as i8).wrapping_add(offset) as u8)
}

/// A block of IQ3_S with the integers of Q6_K, plus 32, and its scales of 16 values.
pub(super) fn iq3_s(block: &[u8]) -> FileBlock {
    let d = half(block, 0);
    let scale = |s: usize| 1 + 2 * (block[106 + s / 2] >> (4 * (s % 2)) & 0x0f);
    let singles = std::array::from_fn(|s| f16_to_f32(d) * f32::from(scale(s)));
    let mut numbers = FileBlock::new(d, 0);
    numbers.integers = integers_of::<quant::IQ3_S>(block, 32, singles);
    numbers.scales = std::array::from_fn(|half| scale(half / 2));
    numbers
}

/// A ternary block with the integers of Q4_0, plus 8. Two bits of TQ2_0 have a fourth value, 2, which no quantizer
/// writes.
pub(super) fn ternary<F: BlockFormat>(block: &[u8], scale: u16) -> FileBlock {
    let mut numbers = FileBlock::new(scale, 0);
    numbers.integers = integers_of::<F>(block, 8, [f16_to_f32(scale); 8]);
    numbers
}
