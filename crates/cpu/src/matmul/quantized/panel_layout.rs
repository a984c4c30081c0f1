//! The layout of quantized weights in memory, and how rows of a file are packed into it. All instruction sets read the
//! same layout.
//!
//! Sixteen columns of the result (rows of W) make a *panel*: a vector register then holds one value for each of sixteen
//! columns, and no sum crosses lanes. A panel is a sequence of *units*. A unit has two slices of 32 values of K, or
//! eight for the K formats, which have scales of scales. A unit consists of:
//!
//! ```text
//! low    for each slice: 4 bits per value, 256 bytes; or 8 bits, 512 bytes, signed, which tiles read unchanged
//! high   for each slice: the bits above the fourth; 1 bit per value, 64 bytes; or 2 bits, 128 bytes
//! scale  for each slice: 16 f16, bf16 or f32; or 16 u8; or, for scales of 16 values, 2 x 16 i8
//! min    for each slice: 16 f16; or for each pair of slices 16 x (u8, u8)
//! head   16 f16 scales of scales, then 16 f16 scales of mins
//! ```
//! A slice unpacks to eight registers. Value k = 4 j + b of a slice (j < 8, b < 4) of column c is byte 4 c + b of
//! register j: four consecutive values of a column share a 32-bit lane, which is what VNNI and AMX multiply. Of 4-bit
//! values, byte 64 j + 4 c + b (j < 4) holds that of register j in its lower half and that of register j + 4 in its
//! upper half. The high bits of all registers are in byte 4 c + b: 1 bit for each register from the lowest bit up, or 2
//! bits each, with registers 0 to 3 in the first 64 bytes.
//!
//! Size: that of the file, plus 2.8 % for Q4_K, 2.3 % for Q5_K and 1 % for Q6_K, whose scales become bytes and whose
//! units fill cache lines, 6 % for MXFP4, 18 % for IQ4_XS, whose scales become floats, and 36 to 167 % for Q3_K,
//! IQ3_S and TQ, whose values are stored in four or six bits, plus columns that fill up the last panel, plus a slice of
//! zeros where K is an odd multiple of 32.

use pellucid_tensor::{DType, quant};

use super::file_block::{
    FileBlock, half, half_power_of_two, iq3_s, iq4_xs, k3, k6, k45, legacy4, legacy5, signed8, ternary,
};

/// Values of K in a slice.
pub(crate) const SLICE_LEN: usize = 32;

/// The offsets of the parts of a unit, and how its integers become values.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PanelLayout {
    /// Slices in a unit.
    pub(crate) slices: usize,
    /// Slices whose activations share a scale: one, or all of a unit.
    pub(crate) group: usize,
    pub(crate) bits: usize,
    /// The integers that codes of 4 bits stand for, before the offset is subtracted; `None` if a code is its integer.
    pub(crate) integers: Option<[u8; 16]>,
    /// `1 << offset_shift` is subtracted from the unsigned integer. For 8 bits, kernels that multiply unsigned integers
    /// add it to the stored, signed one.
    pub(crate) offset_shift: Option<u32>,
    pub(crate) scales: Scales,
    pub(crate) mins: Mins,
}

/// The scales of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Scales {
    /// An f16 for each slice.
    Float,
    /// A bf16 for each slice, which has the exponents of a power of two in 8 bits.
    BrainFloat,
    /// An f32 for each slice, the product of an f16 and an integer.
    Single,
    /// A u8 for each slice, times the unit's f16.
    PerSlice,
    /// An i8 for each half of a slice, times the unit's f16.
    PerHalfSlice,
}

/// The minimums of a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mins {
    None,
    /// An f16 for each slice, added to each value.
    Float,
    /// A u8 for each slice, times the unit's f16, subtracted from each value.
    PerSlice,
}

/// Number of distinct values of [`PanelLayout::input_form`].
pub(crate) const NUM_INPUT_FORMS: usize = 5;

impl PanelLayout {
    /// Whether each slice has a float scale. Otherwise slices have integer scales, and a unit has one float scale.
    pub(crate) const fn scaled_by_floats(&self) -> bool {
        matches!(self.scales, Scales::Float | Scales::BrainFloat | Scales::Single)
    }

    /// Whether integers need all values of a signed byte.
    pub(crate) const fn needs_signed_bytes(&self) -> bool {
        matches!(self.offset_shift, Some(7))
    }

    /// The largest integer before the offset is subtracted, for formats that do not need signed bytes.
    #[cfg(target_arch = "x86_64")]
    pub(crate) const fn largest_integer(&self) -> usize {
        let Some(integers) = self.integers else { return (1 << self.bits) - 1 };
        let (mut largest, mut code) = (0, 0);
        while code < integers.len() {
            if integers[code] > largest {
                largest = integers[code];
            }
            code += 1;
        }
        largest as usize
    }

    /// Layouts with the same input form read the same integers, sums and offsets of x.
    pub(crate) const fn input_form(&self) -> usize {
        match (self.group, self.offset_shift) {
            (1, None) => 0,
            (1, Some(3)) => 1,
            (1, Some(4)) => 2,
            (1, _) => 3,
            _ => 4,
        }
    }

    /// The offset of all layouts with this input form that have one.
    pub(crate) const fn shared_offset(&self) -> i32 {
        match (self.group, self.offset_shift) {
            (1, None) => 0,
            (1, Some(shift)) => 1 << shift,
            _ => K_OFFSET,
        }
    }

    pub(crate) const fn low_bytes(&self) -> usize {
        if self.bits == 8 { 512 } else { 256 }
    }

    pub(crate) const fn high_bytes(&self) -> usize {
        match self.bits {
            5 => 64,
            6 => 128,
            _ => 0,
        }
    }

    const fn scale_bytes(&self) -> usize {
        match self.scales {
            Scales::Float | Scales::BrainFloat | Scales::PerHalfSlice => 32,
            Scales::PerSlice => 16,
            Scales::Single => 64,
        }
    }

    const fn min_bytes(&self) -> usize {
        match self.mins {
            Mins::None => 0,
            Mins::Float => 32,
            Mins::PerSlice => 16,
        }
    }

    pub(crate) const fn low(&self, slice: usize) -> usize {
        slice * self.low_bytes()
    }

    pub(crate) const fn high(&self, slice: usize) -> usize {
        self.slices * self.low_bytes() + slice * self.high_bytes()
    }

    pub(crate) const fn scale(&self, slice: usize) -> usize {
        self.high(self.slices) + slice * self.scale_bytes()
    }

    pub(crate) const fn min(&self, slice: usize) -> usize {
        self.scale(self.slices) + slice * self.min_bytes()
    }

    /// Offset of the scales of scales.
    pub(crate) const fn head(&self) -> usize {
        self.min(self.slices)
    }

    /// Offset of the scales of minimums.
    pub(crate) const fn min_head(&self) -> usize {
        self.head() + 32
    }

    pub(crate) const fn unit_bytes(&self) -> usize {
        // A whole cache line, so that the next unit begins on one.
        let head = if self.scaled_by_floats() { 0 } else { 64 };
        self.head() + head
    }
}

/// The offset of Q6_K, the only K format that has one.
const K_OFFSET: i32 = 32;
const _: () = assert!(1 << Q6_K::LAYOUT.offset_shift.expect("an offset") == K_OFFSET);

/// A format with integer kernels.
pub(crate) trait QuantizedFormat: Copy + Send + Sync + 'static {
    const DTYPE: DType;
    const LAYOUT: PanelLayout;

    /// Reads one block of the file.
    fn read(block: &[u8]) -> FileBlock;
}

/// Formats with an f16 scale for 32 values: activations have a scale for 32 values too. Two slices make a unit so that
/// units fill cache lines.
const fn float_scaled(bits: usize, offset_shift: Option<u32>, mins: Mins) -> PanelLayout {
    PanelLayout { slices: 2, group: 1, bits, integers: None, offset_shift, scales: Scales::Float, mins }
}

/// Formats with codes of four bits for other integers, here less the offset, and a scale for 32 values.
const fn coded(integers: [i8; 16], offset_shift: u32, scales: Scales) -> PanelLayout {
    let integers = Some(plus_offset(integers, offset_shift));
    PanelLayout { integers, scales, ..float_scaled(4, Some(offset_shift), Mins::None) }
}

const fn plus_offset(integers: [i8; 16], offset_shift: u32) -> [u8; 16] {
    let (mut unsigned, mut code) = ([0; 16], 0);
    while code < 16 {
        unsigned[code] = (integers[code] as i16 + (1 << offset_shift)) as u8;
        code += 1;
    }
    unsigned
}

/// The four-bit floats, doubled to be integers.
const FOUR_BIT_FLOATS: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];
/// The levels of IQ4_NL and IQ4_XS.
const LEVELS: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// The values of Q3_K; there are eight.
const THREE_BITS: [i8; 16] = [-4, -3, -2, -1, 0, 1, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0];

/// Formats with integer scales and a float scale for 256 values.
const fn super_block(bits: usize, offset_shift: Option<u32>, scales: Scales, mins: Mins) -> PanelLayout {
    PanelLayout { slices: 8, group: 8, bits, integers: None, offset_shift, scales, mins }
}

macro_rules! formats {
    (
        kernels { $($name:ident: $layout:expr, $read:expr;)* }
        packed { $($other:ident as $kernel:ident: $read_other:expr;)* }
    ) => {
        $(file_format!($name, $layout, $read);)*
        $(file_format!($other, $kernel::LAYOUT, $read_other);)*

        /// Evaluates an expression with `$format` as a format's type; `None` if the format has no integer kernels.
        macro_rules! with_quantized_format {
            ($dtype:expr, $format:ident => $body:expr) => {
                match $dtype {
                    $(pellucid_tensor::DType::$name => {
                        type $format = $crate::matmul::quantized::panel_layout::$name;
                        Some($body)
                    })*
                    $(pellucid_tensor::DType::$other => {
                        type $format = $crate::matmul::quantized::panel_layout::$other;
                        Some($body)
                    })*
                    _ => None,
                }
            };
        }
        pub(crate) use with_quantized_format;

        /// The same with the format whose kernels a packed format uses.
        macro_rules! with_kernel_format {
            ($dtype:expr, $format:ident => $body:expr) => {
                match $dtype {
                    $(pellucid_tensor::DType::$name => {
                        type $format = $crate::matmul::quantized::panel_layout::$name;
                        Some($body)
                    })*
                    $(pellucid_tensor::DType::$other => {
                        type $format = $crate::matmul::quantized::panel_layout::$kernel;
                        Some($body)
                    })*
                    _ => None,
                }
            };
        }
        pub(crate) use with_kernel_format;
    };
}

macro_rules! file_format {
    ($name:ident, $layout:expr, $read:expr) => {
        #[derive(Debug, Clone, Copy)]
        #[allow(non_camel_case_types)]
        pub(crate) struct $name;

        impl QuantizedFormat for $name {
            const DTYPE: DType = DType::$name;
            const LAYOUT: PanelLayout = $layout;

            #[inline(always)]
            fn read(block: &[u8]) -> FileBlock {
                let read: fn(&[u8; Self::DTYPE.block_bytes()]) -> FileBlock = $read;
                read(block.try_into().expect("one block"))
            }
        }
    };
}

formats! {
    kernels {
        Q4_0: float_scaled(4, Some(3), Mins::None), |b| legacy4(half(b, 0), 0, &b[2..]);
        Q4_1: float_scaled(4, None, Mins::Float), |b| legacy4(half(b, 0), half(b, 2), &b[4..]);
        Q5_0: float_scaled(5, Some(4), Mins::None), |b| legacy5(half(b, 0), 0, &b[2..6], &b[6..]);
        Q5_1: float_scaled(5, None, Mins::Float), |b| legacy5(half(b, 0), half(b, 2), &b[4..8], &b[8..]);
        Q8_0: float_scaled(8, Some(7), Mins::None), |b| signed8(half(b, 0), &b[2..]);
        MXFP4: coded(FOUR_BIT_FLOATS, 4, Scales::BrainFloat), |b| legacy4(half_power_of_two(b[0]), 0, &b[1..]);
        IQ4_NL: coded(LEVELS, 7, Scales::Float), |b| legacy4(half(b, 0), 0, &b[2..]);
        IQ4_XS: coded(LEVELS, 7, Scales::Single), |b| iq4_xs(half(b, 0), half(b, 2), &b[4..8], &b[8..]);
        // With the offset of Q6_K, so that both read the same sums of x.
        Q3_K: PanelLayout {
                integers: Some(plus_offset(THREE_BITS, 5)),
                ..super_block(4, Some(5), Scales::PerHalfSlice, Mins::None)
            },
            |b| k3(half(b, 108), &b[..32], &b[32..96], &b[96..108]);
        Q4_K: super_block(4, None, Scales::PerSlice, Mins::PerSlice),
            |b| k45(half(b, 0), half(b, 2), &b[4..16], None, &b[16..]);
        Q5_K: super_block(5, None, Scales::PerSlice, Mins::PerSlice),
            |b| k45(half(b, 0), half(b, 2), &b[4..16], Some(&b[16..48]), &b[48..]);
        Q6_K: super_block(6, Some(5), Scales::PerHalfSlice, Mins::None),
            |b| k6(half(b, 208), &b[..128], &b[128..192], &b[192..208]);
    }
    packed {
        IQ3_S as Q6_K: |b| iq3_s(b);
        TQ1_0 as Q4_0: |b| ternary::<quant::TQ1_0>(b, half(b, 52));
        TQ2_0 as Q4_0: |b| ternary::<quant::TQ2_0>(b, half(b, 64));
    }
}

/// Packs up to sixteen rows of a file into a panel. Columns without a row stay zero.
pub(crate) fn pack_panel<F: QuantizedFormat>(rows: &[&[u8]], panel: &mut [u8]) {
    let layout = F::LAYOUT;
    let block_slices = F::DTYPE.block_len() / SLICE_LEN;
    for (column, row) in rows.iter().enumerate() {
        for (i, block) in row.chunks_exact(F::DTYPE.block_bytes()).enumerate() {
            let numbers = F::read(block);
            for s in 0..block_slices {
                let (unit, slice) = ((i * block_slices + s) / layout.slices, (i * block_slices + s) % layout.slices);
                let unit = &mut panel[unit * layout.unit_bytes()..][..layout.unit_bytes()];
                write_integers(&layout, &numbers.integers[SLICE_LEN * s..SLICE_LEN * (s + 1)], slice, column, unit);
                write_scales(&layout, &numbers, (s, slice), column, unit);
            }
            if !layout.scaled_by_floats() {
                // A block is a unit.
                let unit = &mut panel[i * layout.unit_bytes()..][..layout.unit_bytes()];
                put_half(unit, layout.head(), column, numbers.scale);
                if layout.mins == Mins::PerSlice {
                    put_half(unit, layout.min_head(), column, numbers.min);
                }
            }
        }
    }
}

#[inline(always)]
fn put_half(unit: &mut [u8], at: usize, column: usize, bits: u16) {
    unit[at + 2 * column..at + 2 * column + 2].copy_from_slice(&bits.to_le_bytes());
}

#[inline(always)]
fn write_integers(layout: &PanelLayout, integers: &[u8], slice: usize, column: usize, unit: &mut [u8]) {
    let word = |j: usize| u32::from_le_bytes([0, 1, 2, 3].map(|b| integers[4 * j + b]));
    let mut put =
        |at: usize, word: u32| unit[at + 4 * column..at + 4 * column + 4].copy_from_slice(&word.to_le_bytes());
    let low = layout.low(slice);
    if layout.bits == 8 {
        for j in 0..8 {
            put(low + 64 * j, word(j));
        }
        return;
    }
    for j in 0..4 {
        put(low + 64 * j, word(j) & 0x0f0f_0f0f | (word(j + 4) & 0x0f0f_0f0f) << 4);
    }
    let high = layout.high(slice);
    match layout.bits {
        5 => put(high, (0..8).fold(0, |bits, j| bits | (word(j) >> 4 & 0x0101_0101) << j)),
        6 => {
            for part in 0..2 {
                let bits = (0..4).fold(0, |bits, j| bits | (word(4 * part + j) >> 4 & 0x0303_0303) << (2 * j));
                put(high + 64 * part, bits);
            }
        }
        _ => {}
    }
}

/// Writes the scales of slice `s` of a block, which is `slice` of the unit.
#[inline(always)]
fn write_scales(layout: &PanelLayout, numbers: &FileBlock, (s, slice): (usize, usize), column: usize, unit: &mut [u8]) {
    match layout.scales {
        Scales::Float | Scales::BrainFloat => put_half(unit, layout.scale(slice), column, numbers.scale),
        Scales::Single => {
            let at = layout.scale(slice) + 4 * column;
            unit[at..at + 4].copy_from_slice(&numbers.singles[s].to_le_bytes());
        }
        Scales::PerSlice => unit[layout.scale(slice) + column] = numbers.scales[s],
        Scales::PerHalfSlice => {
            for h in 0..2 {
                unit[layout.scale(slice) + 16 * h + column] = numbers.scales[2 * s + h];
            }
        }
    }
    match layout.mins {
        Mins::None => {}
        Mins::Float => put_half(unit, layout.min(slice), column, numbers.min),
        Mins::PerSlice => unit[layout.min(slice / 2 * 2) + 2 * column + slice % 2] = numbers.mins[s],
    }
}
