//! How the values of a GGUF tensor are computed from those of a checkpoint. Only their order changes, except for norms
//! that a folder stores minus one and rates of a decay that it stores as logarithms.

use std::ops::Range;

use pellucid_checkpoint::{Checkpoint, Error, TensorInfo, TensorView};
use pellucid_tensor::{DType, SharedBytes, quant};

use super::GgufTensor;
use crate::loader::delta_net::{decay_rate, gather_rows};
use crate::loader::experts::ExpertStack;
use crate::loader::tensor_finder::transpose;

/// The source tensors of a GGUF tensor, and what is done with them.
#[derive(Debug)]
pub(super) enum TensorRecipe {
    /// The values are unchanged.
    Unchanged { name: String },
    /// The first `rotary_size` rows of every head are reordered: row i of the first half, then row i of the second
    /// half, so that the two rows that are rotated together are adjacent.
    Interleaved { name: String, num_heads: usize, rotary_size: usize },
    /// One is added. The result is F32, because the sum may not fit the stored format.
    PlusOne { name: String },
    /// `[in][out]` becomes `[out][in]`.
    Transposed { name: String },
    /// Several tensors of the same format are concatenated.
    Stacked { names: Vec<String> },
    /// One matrix of every expert, from a tensor that stacks more than these.
    OfExperts { stack: ExpertStack, num_experts: usize },
    /// Rows of a matrix, or values of a vector, in this order.
    Gathered { name: String, rows: Vec<usize> },
    /// Columns of an unquantized matrix, in this order.
    GatheredColumns { name: String, columns: Vec<usize> },
    /// Rows of an unquantized matrix, in this order; those of each head are transposed.
    TransposedHeads { name: String, rows: Vec<usize>, num_heads: usize },
    /// Rates of a decay from the logarithms of the negated rates, in this order.
    DecayRates { name: String, heads: Vec<usize> },
    /// These rows of a matrix.
    Rows { name: String, rows: Range<usize> },
    /// The values were computed when the tensor was described.
    FromConfig { values: Vec<f32> },
}

impl TensorRecipe {
    /// Returns the values and their format. Names and shapes were checked when the tensor was described.
    pub(super) fn bytes(&self, checkpoint: &Checkpoint) -> Result<(DType, SharedBytes), Error> {
        Ok(match self {
            TensorRecipe::Unchanged { name } => {
                let tensor = checkpoint.tensor(name)?;
                (tensor.info.dtype, tensor.bytes())
            }
            TensorRecipe::Interleaved { name, num_heads, rotary_size } => {
                let tensor = checkpoint.tensor(name)?;
                (tensor.info.dtype, interleave(&tensor, *num_heads, *rotary_size))
            }
            TensorRecipe::PlusOne { name } => {
                let tensor = checkpoint.tensor(name)?;
                let mut values = vec![0.0; tensor.info.num_elements()];
                quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
                values.iter_mut().for_each(|value| *value += 1.0);
                (DType::F32, as_bytes(&values))
            }
            TensorRecipe::Transposed { name } => {
                let tensor = checkpoint.tensor(name)?;
                let (rows, cols) = (tensor.info.shape[1], tensor.info.shape[0]);
                (tensor.info.dtype, transpose(&tensor.bytes(), tensor.info.dtype, rows, cols))
            }
            TensorRecipe::Stacked { names } => {
                let mut stack = Vec::new();
                let mut dtype = DType::F32;
                for name in names {
                    let tensor = checkpoint.tensor(name)?;
                    dtype = tensor.info.dtype;
                    stack.extend_from_slice(&tensor.bytes());
                }
                (dtype, stack.into())
            }
            TensorRecipe::OfExperts { stack, num_experts } => {
                let tensor = checkpoint.tensor(&stack.name)?;
                let whole = tensor.bytes();
                let matrices: Vec<_> = (0..*num_experts).map(|expert| stack.matrix(&whole, expert)).collect();
                let bytes: Vec<u8> = matrices.iter().flat_map(|matrix| matrix.iter().copied()).collect();
                (stack.dtype, bytes.into())
            }
            TensorRecipe::Gathered { name, rows } => {
                let view = checkpoint.tensor(name)?;
                let (info, bytes) = (view.info, view.bytes());
                let cols = info.shape[1..].iter().product();
                (info.dtype, gather_rows(&bytes, info.dtype, rows, cols))
            }
            TensorRecipe::GatheredColumns { name, columns } => {
                let view = checkpoint.tensor(name)?;
                let (info, bytes) = (view.info, view.bytes());
                let row_bytes = bytes.len() / info.shape[0];
                let gathered = bytes.chunks_exact(row_bytes).flat_map(|row| {
                    let size = info.dtype.block_bytes();
                    columns.iter().flat_map(move |column| &row[column * size..(column + 1) * size])
                });
                (info.dtype, gathered.copied().collect::<Vec<u8>>().into())
            }
            TensorRecipe::TransposedHeads { name, rows, num_heads } => {
                let view = checkpoint.tensor(name)?;
                let (info, bytes) = (view.info, view.bytes());
                let (dtype, cols, of_head) = (info.dtype, info.shape[1], rows.len() / num_heads);
                let transposed = rows.chunks_exact(of_head).map(|rows| {
                    let head = gather_rows(&bytes, dtype, rows, cols);
                    transpose(&head, dtype, cols, of_head)
                });
                (dtype, transposed.flat_map(|head| head.to_vec()).collect::<Vec<u8>>().into())
            }
            TensorRecipe::DecayRates { name, heads } => {
                let tensor = checkpoint.tensor(name)?;
                let mut values = vec![0.0; tensor.info.num_elements()];
                quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
                let rates: Vec<f32> = heads.iter().map(|&head| decay_rate(values[head])).collect();
                (DType::F32, as_bytes(&rates))
            }
            TensorRecipe::Rows { name, rows } => {
                let tensor = checkpoint.tensor(name)?;
                let whole = tensor.bytes();
                let row_bytes = whole.len() / tensor.info.shape[0];
                let bytes = whole.slice(rows.start * row_bytes..rows.end * row_bytes);
                (tensor.info.dtype, bytes.expect("the shape was checked"))
            }
            TensorRecipe::FromConfig { values } => (DType::F32, as_bytes(values)),
        })
    }
}

impl GgufTensor {
    /// A tensor that is copied unchanged.
    pub(super) fn unchanged(tensor: &TensorInfo) -> GgufTensor {
        let TensorInfo { name, dtype, shape, .. } = tensor;
        GgufTensor {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            recipe: TensorRecipe::Unchanged { name: name.clone() },
        }
    }

    /// A tensor of divisors of rotary frequencies.
    pub(super) fn from_factors((name, values): (&str, Vec<f32>)) -> GgufTensor {
        let shape = vec![values.len()];
        GgufTensor { name: name.into(), dtype: DType::F32, shape, recipe: TensorRecipe::FromConfig { values } }
    }
}

fn as_bytes(values: &[f32]) -> SharedBytes {
    values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// Reorders the rows of a matrix, or the values of a bias, head by head.
fn interleave(tensor: &TensorView<'_>, num_heads: usize, rotary_size: usize) -> SharedBytes {
    let rows = tensor.info.shape[0];
    let bytes = tensor.bytes();
    let row_bytes = bytes.len() / rows;
    let (head_size, half) = (rows / num_heads, rotary_size / 2);
    let origin = |row: usize| {
        let (head_start, i) = (row / head_size * head_size, row % head_size);
        if i < rotary_size { head_start + i % 2 * half + i / 2 } else { row }
    };
    let mut reordered = Vec::with_capacity(bytes.len());
    for row in (0..rows).map(origin) {
        reordered.extend_from_slice(&bytes[row * row_bytes..(row + 1) * row_bytes]);
    }
    reordered.into()
}
