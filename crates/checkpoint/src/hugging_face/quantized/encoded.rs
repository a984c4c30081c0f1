//! Tensors whose values are computed from several tensors of the file, when they are read.
//!
//! A matrix is `(q - zero) * scale`. Where GGUF's blocks hold `q - zero` and the scales exactly, it is kept in them
//! (`blocks`); else it is computed in f32 and rounded once to the format in which the reference computes: that of the
//! scales. `q - zero` is exact in each of these formats. FP8 with f32 products stays one byte a weight, and MXFP4 keeps
//! its values; only their order in memory changes.

use std::thread;

use pellucid_tensor::{DType, SharedBytes, quant};

/// A tensor as a quantization scheme encodes it. Shapes and indices were checked when the file was opened.
#[derive(Debug)]
pub(crate) struct EncodedTensor {
    /// Name of the scheme.
    pub(crate) scheme: String,
    /// Bytes in the file.
    pub(crate) num_bytes: usize,
    pub(super) values: EncodedValues,
}

#[derive(Debug)]
pub(super) enum EncodedValues {
    Matrix(QuantizedMatrix),
    /// Of integers, in this format of blocks.
    Blocks(QuantizedMatrix, DType),
    /// Of FP8, without a rounding of the products: `F8_E4M3`.
    Fp8(QuantizedMatrix),
    Mxfp4(MxBlocks),
}

/// A matrix of integers or eight-bit floats with scales. Leading dimensions count as rows.
#[derive(Debug)]
pub(super) struct QuantizedMatrix {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) codes: Codes,
    pub(super) bytes: SharedBytes,
    pub(super) scales: Floats,
    pub(super) zeros: Zeros,
    pub(super) grid: ScaleGrid,
    /// Format of the values: F32, F16 or BF16.
    pub(super) dtype: DType,
}

/// How the numbers q of a matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Codes {
    /// `[cols * bits / 32][rows]`: a word holds adjacent columns of a row, the first in its lowest bits.
    WordsDown { bits: u32 },
    /// `[cols][rows / 8]`: a word holds eight rows of a column, in the order of [`AWQ_SHIFTS`].
    WordsAcross,
    /// `[rows][ceil(cols * bits / 32)]`: a word holds adjacent columns of a row; the middle of the range is zero.
    Words { bits: u32 },
    /// `[rows][cols]`
    Int8,
    /// `[rows][cols]`
    Fp8,
}

/// Position of each of eight adjacent rows in a word of AWQ, in bits.
const AWQ_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// Floats of the file.
#[derive(Debug)]
pub(super) struct Floats {
    pub(super) dtype: DType,
    pub(super) bytes: SharedBytes,
}

/// The zero points, in the order of the scales.
#[derive(Debug)]
pub(super) enum Zeros {
    None,
    /// `[groups][rows * bits / 32]`: a word holds adjacent rows. `added` is added to each word first.
    WordsAcross {
        bits: u32,
        added: u32,
        bytes: SharedBytes,
    },
    /// Like `WordsAcross` of four bits, in the order of [`AWQ_SHIFTS`].
    Awq {
        bytes: SharedBytes,
    },
    /// `[ceil(scale rows * bits / 32)][groups]`: a word holds adjacent rows; the middle of the range is zero.
    WordsDown {
        bits: u32,
        bytes: SharedBytes,
    },
    Int8 {
        bytes: SharedBytes,
    },
}

/// Which scale belongs to a value.
#[derive(Debug)]
pub(super) struct ScaleGrid {
    /// The scales are `[groups][rows]`, else `[ceil(rows / rows_per_scale)][groups]`.
    pub(super) groups_first: bool,
    pub(super) rows_per_scale: usize,
    pub(super) num_groups: usize,
    pub(super) columns: ColumnGroups,
}

/// The group of a column.
#[derive(Debug)]
pub(super) enum ColumnGroups {
    /// Groups are adjacent columns of this number.
    Adjacent(usize),
    /// Little-endian i32 for each column.
    Listed(SharedBytes),
}

/// Stacked matrices in MXFP4: 32 values have 16 bytes in `blocks` and one in `scales`.
#[derive(Debug)]
pub(super) struct MxBlocks {
    pub(super) blocks: SharedBytes,
    pub(super) scales: SharedBytes,
}

/// Minimum values of a thread.
const VALUES_PER_THREAD: usize = 1 << 17;

impl EncodedTensor {
    /// Returns the format of the values.
    pub(crate) fn dtype(&self) -> DType {
        match &self.values {
            EncodedValues::Matrix(matrix) => matrix.dtype,
            EncodedValues::Blocks(_, format) => *format,
            EncodedValues::Fp8(_) => DType::F8_E4M3,
            EncodedValues::Mxfp4(_) => DType::MXFP4,
        }
    }

    /// Returns the format of the values if products with scales are rounded as by the reference.
    pub(crate) fn reference_dtype(&self) -> DType {
        match &self.values {
            EncodedValues::Blocks(matrix, _) => matrix.dtype,
            _ => self.dtype(),
        }
    }

    /// Returns the values in `format`: [`dtype`](EncodedTensor::dtype) or
    /// [`reference_dtype`](EncodedTensor::reference_dtype).
    pub(crate) fn decode(&self, format: DType) -> SharedBytes {
        match &self.values {
            EncodedValues::Blocks(matrix, blocks) if format == *blocks => matrix.blocks(format),
            EncodedValues::Matrix(matrix) | EncodedValues::Blocks(matrix, _) => matrix.decode(),
            EncodedValues::Fp8(matrix) => matrix.fp8_blocks(),
            EncodedValues::Mxfp4(blocks) => blocks.repack(),
        }
        .into()
    }
}

/// The scales and zero points of a matrix as f32.
pub(super) struct Prepared {
    pub(super) scales: Vec<f32>,
    pub(super) zeros: Option<Vec<f32>>,
    /// Group of each column.
    pub(super) groups: Vec<u32>,
}

impl QuantizedMatrix {
    fn decode(&self) -> Vec<u8> {
        let prepared = self.prepare();
        self.by_rows(self.dtype.bytes_for(self.cols).expect("a format without blocks"), |row, buffer, out| {
            self.decode_row(&prepared, row, buffer);
            match self.dtype {
                DType::F16 => quant::encode_blocks::<quant::F16>(buffer, out),
                DType::BF16 => quant::encode_blocks::<quant::BF16>(buffer, out),
                _ => quant::encode_blocks::<quant::F32>(buffer, out),
            }
        })
    }

    /// Returns rows of blocks of F8_E4M3, each with its scale.
    fn fp8_blocks(&self) -> Vec<u8> {
        let prepared = self.prepare();
        let row_bytes = DType::F8_E4M3.bytes_for(self.cols).expect("whole blocks, which was checked");
        let (len, size) = (DType::F8_E4M3.block_len(), DType::F8_E4M3.block_bytes());
        self.by_rows(row_bytes, |row, _, out| {
            let codes = &self.bytes[row * self.cols..(row + 1) * self.cols];
            for (i, (codes, out)) in codes.chunks_exact(len).zip(out.chunks_exact_mut(size)).enumerate() {
                let scale = prepared.scales[self.grid.index(self.rows, row, prepared.groups[i * len] as usize)];
                out[..4].copy_from_slice(&scale.to_le_bytes());
                out[4..].copy_from_slice(codes);
            }
        })
    }

    /// Calls `f` with each row, a buffer for its values, and its bytes of the result; rows are divided among threads.
    pub(super) fn by_rows(&self, row_bytes: usize, f: impl Fn(usize, &mut [f32], &mut [u8]) + Sync) -> Vec<u8> {
        let mut out = vec![0; self.rows * row_bytes];
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let num_threads = (self.rows * self.cols / VALUES_PER_THREAD).clamp(1, cores);
        let rows_per_thread = self.rows.div_ceil(num_threads).max(1);
        let run = |first: usize, out: &mut [u8]| {
            let mut buffer = vec![0.0; self.cols];
            for (i, out) in out.chunks_exact_mut(row_bytes).enumerate() {
                f(first + i, &mut buffer, out);
            }
        };
        let run = &run;
        thread::scope(|scope| {
            let mut parts = out.chunks_mut(rows_per_thread * row_bytes).enumerate();
            let own = parts.next();
            for (i, part) in parts {
                scope.spawn(move || run(i * rows_per_thread, part));
            }
            own.into_iter().for_each(|(_, part)| run(0, part));
        });
        out
    }

    pub(super) fn prepare(&self) -> Prepared {
        let mut scales = vec![0.0; self.scales.bytes.len() / self.scales.dtype.block_bytes()];
        quant::decode(self.scales.dtype, &self.scales.bytes, &mut scales);
        let groups = match &self.grid.columns {
            ColumnGroups::Adjacent(size) => (0..self.cols).map(|col| (col / size) as u32).collect(),
            ColumnGroups::Listed(bytes) => words(bytes).collect(),
        };
        Prepared { zeros: self.zeros.values(scales.len(), self.rows, self.grid.num_groups), scales, groups }
    }

    fn decode_row(&self, prepared: &Prepared, row: usize, out: &mut [f32]) {
        self.integers(prepared, row, out);
        for (out, group) in out.iter_mut().zip(&prepared.groups) {
            *out *= prepared.scales[self.grid.index(self.rows, row, *group as usize)];
        }
    }

    /// Writes `q - zero` of a row.
    pub(super) fn integers(&self, prepared: &Prepared, row: usize, out: &mut [f32]) {
        self.codes.row(&self.bytes, (self.rows, self.cols), row, out);
        let Some(zeros) = &prepared.zeros else { return };
        for (out, group) in out.iter_mut().zip(&prepared.groups) {
            *out -= zeros[self.grid.index(self.rows, row, *group as usize)];
        }
    }
}

impl ScaleGrid {
    /// Returns the index of a scale.
    pub(super) fn index(&self, rows: usize, row: usize, group: usize) -> usize {
        if self.groups_first { group * rows + row } else { row / self.rows_per_scale * self.num_groups + group }
    }
}

impl Codes {
    /// Writes the numbers of a row.
    fn row(self, bytes: &[u8], (rows, cols): (usize, usize), row: usize, out: &mut [f32]) {
        match self {
            Codes::WordsDown { bits } => {
                let per_word = (32 / bits) as usize;
                for (i, out) in out.chunks_mut(per_word).enumerate() {
                    let word = word(bytes, i * rows + row);
                    out.iter_mut().zip(0u32..).for_each(|(out, j)| *out = field(word, bits, bits * j) as f32);
                }
            }
            Codes::WordsAcross => {
                let shift = AWQ_SHIFTS[row % 8];
                for (col, out) in out.iter_mut().enumerate() {
                    *out = field(word(bytes, col * (rows / 8) + row / 8), 4, shift) as f32;
                }
            }
            Codes::Words { bits } => {
                let (per_word, middle) = ((32 / bits) as usize, 1i32 << (bits - 1));
                let first = row * cols.div_ceil(per_word);
                for (i, out) in out.chunks_mut(per_word).enumerate() {
                    let word = word(bytes, first + i);
                    let value = |j: u32| (field(word, bits, bits * j) as i32 - middle) as f32;
                    out.iter_mut().zip(0u32..).for_each(|(out, j)| *out = value(j));
                }
            }
            Codes::Int8 => {
                let codes = &bytes[row * cols..(row + 1) * cols];
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = f32::from(*code as i8));
            }
            Codes::Fp8 => {
                let codes = &bytes[row * cols..(row + 1) * cols];
                out.iter_mut().zip(codes).for_each(|(out, code)| *out = quant::e4m3_to_f32(*code));
            }
        }
    }
}

impl Zeros {
    /// Returns the zero points in the order of `len` scales.
    fn values(&self, len: usize, rows: usize, num_groups: usize) -> Option<Vec<f32>> {
        match self {
            Zeros::None => None,
            Zeros::WordsAcross { bits, added, bytes } => {
                let per_word = (32 / bits) as usize;
                let value = |i: usize| {
                    let (group, row) = (i / rows, i % rows);
                    let word = word(bytes, group * (rows / per_word) + row / per_word).wrapping_add(*added);
                    field(word, *bits, bits * (row % per_word) as u32)
                };
                Some((0..len).map(|i| value(i) as f32).collect())
            }
            Zeros::Awq { bytes } => {
                let value = |i: usize| {
                    let (group, row) = (i / rows, i % rows);
                    field(word(bytes, group * (rows / 8) + row / 8), 4, AWQ_SHIFTS[row % 8])
                };
                Some((0..len).map(|i| value(i) as f32).collect())
            }
            Zeros::WordsDown { bits, bytes } => {
                let (per_word, middle) = ((32 / bits) as usize, 1i32 << (bits - 1));
                let value = |i: usize| {
                    let (row, group) = (i / num_groups, i % num_groups);
                    let word = word(bytes, row / per_word * num_groups + group);
                    field(word, *bits, bits * (row % per_word) as u32) as i32 - middle
                };
                Some((0..len).map(|i| value(i) as f32).collect())
            }
            Zeros::Int8 { bytes } => Some(bytes.iter().map(|&zero| f32::from(zero as i8)).collect()),
        }
    }
}

impl MxBlocks {
    /// Returns blocks of MXFP4 as GGUF has them: the scale, then the first half of the values in the lower halves of 16
    /// bytes and the second in the upper halves. The folder has adjacent values in one byte.
    fn repack(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(self.blocks.len() + self.scales.len());
        for (block, &scale) in self.blocks.chunks_exact(16).zip(self.scales.iter()) {
            let value = |i: usize| block[i / 2] >> (4 * (i % 2)) & 0x0f;
            out.push(scale);
            out.extend((0..16).map(|j| value(j) | value(j + 16) << 4));
        }
        out
    }
}

fn word(bytes: &[u8], index: usize) -> u32 {
    u32::from_le_bytes(bytes[4 * index..4 * index + 4].try_into().expect("four bytes"))
}

pub(super) fn words(bytes: &[u8]) -> impl Iterator<Item = u32> {
    bytes.as_chunks::<4>().0.iter().map(|&word| u32::from_le_bytes(word))
}

fn field(word: u32, bits: u32, shift: u32) -> u32 {
    word >> shift & ((1 << bits) - 1)
}
