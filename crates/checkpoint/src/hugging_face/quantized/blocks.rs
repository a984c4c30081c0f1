//! Integers that GGUF's formats of blocks hold exactly, with their scales: such a weight stays as small as in its file,
//! and the kernels of these formats multiply with it.
//!
//! The reference rounds the product of integer and scale to 16 bits, and a block does not.

use pellucid_tensor::{DType, quant};

use super::encoded::{Codes, ColumnGroups, EncodedValues, Prepared, QuantizedMatrix};

/// Values of a block.
const LEN: usize = 32;

impl EncodedValues {
    /// Keeps a matrix of integers in blocks, if a format holds it exactly.
    pub(super) fn of_integers(matrix: QuantizedMatrix) -> EncodedValues {
        match matrix.block_format() {
            Some(format) => EncodedValues::Blocks(matrix, format),
            None => EncodedValues::Matrix(matrix),
        }
    }
}

impl QuantizedMatrix {
    /// Returns the smallest format whose blocks hold the integers and the scales.
    fn block_format(&self) -> Option<DType> {
        let fits = |size: usize| size >= self.cols || size.is_multiple_of(LEN);
        if !self.cols.is_multiple_of(LEN) || !matches!(self.grid.columns, ColumnGroups::Adjacent(size) if fits(size)) {
            return None;
        }
        let (lowest, highest) = self.codes.range()?;
        let prepared = self.prepare();
        let is_exact = |scale: &f32| quant::f16_to_f32(quant::f32_to_f16(*scale)).to_bits() == scale.to_bits();
        if !prepared.scales.iter().all(|scale| scale.is_finite() && is_exact(scale)) {
            return None;
        }
        let zeros = prepared.zeros.as_deref().unwrap_or(&[0.0]);
        let least = zeros.iter().copied().fold(f32::INFINITY, f32::min);
        let most = zeros.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let holds = |min: f32, max: f32| lowest - most >= min && highest - least <= max;
        [(DType::Q4_0, -8.0, 7.0), (DType::Q5_0, -16.0, 15.0), (DType::Q8_0, -128.0, 127.0)]
            .into_iter()
            .find_map(|(format, min, max)| holds(min, max).then_some(format))
    }

    /// Returns rows of blocks of `format`, which [`block_format`](QuantizedMatrix::block_format) chose.
    pub(super) fn blocks(&self, format: DType) -> Vec<u8> {
        let prepared = self.prepare();
        let row_bytes = format.bytes_for(self.cols).expect("whole blocks, which was checked");
        self.by_rows(row_bytes, |row, buffer, out| {
            self.integers(&prepared, row, buffer);
            for (i, out) in out.chunks_exact_mut(format.block_bytes()).enumerate() {
                let scale = quant::f32_to_f16(self.scale(&prepared, row, i * LEN));
                let (stored_scale, integers) = out.split_at_mut(2);
                stored_scale.copy_from_slice(&scale.to_le_bytes());
                let values: &[f32; LEN] = buffer[i * LEN..][..LEN].try_into().expect("a whole block");
                write_integers(format, &values.map(|value| value as i32), integers);
            }
        })
    }

    /// Returns the scale of a value.
    fn scale(&self, prepared: &Prepared, row: usize, col: usize) -> f32 {
        prepared.scales[self.grid.index(self.rows, row, prepared.groups[col] as usize)]
    }
}

impl Codes {
    /// Returns the smallest and the largest number; `None` for floats.
    fn range(self) -> Option<(f32, f32)> {
        match self {
            Codes::WordsDown { bits } => Some((0.0, ((1u32 << bits) - 1) as f32)),
            Codes::WordsAcross => Some((0.0, 15.0)),
            Codes::Words { bits } => {
                let middle = (1u32 << (bits - 1)) as f32;
                Some((-middle, middle - 1.0))
            }
            Codes::Int8 => Some((-128.0, 127.0)),
            Codes::Fp8 => None,
        }
    }
}

/// Writes a block after its scale, in the layout that `quant::legacy` describes.
fn write_integers(format: DType, values: &[i32; LEN], out: &mut [u8]) {
    let halves = |added: i32, out: &mut [u8]| {
        for (i, out) in out.iter_mut().enumerate() {
            let [low, high] = [values[i], values[i + LEN / 2]].map(|value| (value + added) as u8 & 0x0f);
            *out = low | high << 4;
        }
    };
    match format {
        DType::Q4_0 => halves(8, out),
        DType::Q5_0 => {
            let (fifth_bits, rest) = out.split_at_mut(4);
            let bit = |(i, value): (usize, &i32)| (((value + 16) as u32 >> 4) & 1) << i;
            let bits: u32 = values.iter().enumerate().map(bit).sum();
            fifth_bits.copy_from_slice(&bits.to_le_bytes());
            halves(16, rest);
        }
        _ => out.iter_mut().zip(values).for_each(|(out, value)| *out = *value as i8 as u8),
    }
}
