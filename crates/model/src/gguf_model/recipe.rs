//! How the numbers of a GGUF tensor are made from those of a checkpoint. Only the order of numbers changes, but for norms that a folder
//! stores as their distance from one.

use pellucid_checkpoint::{Checkpoint, Error, TensorInfo, TensorView};
use pellucid_tensor::{DType, SharedBytes, quant};

use super::GgufTensor;
use crate::tensor_finder::transpose;

#[derive(Debug)]
pub(super) enum TensorRecipe {
    /// As they are.
    Taken { name: String },
    /// The first `rotary_size` rows of every head in another order: row i of the first half, then row i of the second, so that the two
    /// that turn together are neighbours.
    Interleaved { name: String, num_heads: usize, rotary_size: usize },
    /// One is added; as F32, since the sum need not fit the format that it was stored in.
    FromOne { name: String },
    /// `[in][out]` as `[out][in]`.
    Transposed { name: String },
    /// Several tensors of one format, one after the other.
    Stacked { names: Vec<String> },
    /// Numbers that the folder has in its configuration.
    Given { numbers: Vec<f32> },
}

impl TensorRecipe {
    /// The numbers, and the format that they are in now. The names and shapes were checked when the tensor was described.
    pub(super) fn bytes(&self, checkpoint: &Checkpoint) -> Result<(DType, SharedBytes), Error> {
        Ok(match self {
            TensorRecipe::Taken { name } => {
                let tensor = checkpoint.tensor(name)?;
                (tensor.info.dtype, tensor.bytes)
            }
            TensorRecipe::Interleaved { name, num_heads, rotary_size } => {
                let tensor = checkpoint.tensor(name)?;
                (tensor.info.dtype, interleave(&tensor, *num_heads, *rotary_size))
            }
            TensorRecipe::FromOne { name } => {
                let tensor = checkpoint.tensor(name)?;
                let mut numbers = vec![0.0; tensor.info.num_elements()];
                quant::decode(tensor.info.dtype, &tensor.bytes, &mut numbers);
                numbers.iter_mut().for_each(|number| *number += 1.0);
                (DType::F32, as_bytes(&numbers))
            }
            TensorRecipe::Transposed { name } => {
                let tensor = checkpoint.tensor(name)?;
                let (rows, cols) = (tensor.info.shape[1], tensor.info.shape[0]);
                (tensor.info.dtype, transpose(&tensor.bytes, tensor.info.dtype, rows, cols))
            }
            TensorRecipe::Stacked { names } => {
                let mut stack = Vec::new();
                let mut dtype = DType::F32;
                for name in names {
                    let tensor = checkpoint.tensor(name)?;
                    dtype = tensor.info.dtype;
                    stack.extend_from_slice(&tensor.bytes);
                }
                (dtype, stack.into())
            }
            TensorRecipe::Given { numbers } => (DType::F32, as_bytes(numbers)),
        })
    }
}

impl GgufTensor {
    pub(super) fn as_it_is(tensor: &TensorInfo) -> GgufTensor {
        let TensorInfo { name, dtype, shape, .. } = tensor;
        GgufTensor {
            name: name.clone(),
            dtype: *dtype,
            shape: shape.clone(),
            recipe: TensorRecipe::Taken { name: name.clone() },
        }
    }

    /// Divisors of rotary frequencies.
    pub(super) fn of_factors((name, numbers): (&str, Vec<f32>)) -> GgufTensor {
        let shape = vec![numbers.len()];
        GgufTensor { name: name.into(), dtype: DType::F32, shape, recipe: TensorRecipe::Given { numbers } }
    }
}

fn as_bytes(numbers: &[f32]) -> SharedBytes {
    numbers.iter().flat_map(|number| number.to_le_bytes()).collect::<Vec<u8>>().into()
}

/// A matrix's rows, or a bias's numbers, head by head.
fn interleave(tensor: &TensorView<'_>, num_heads: usize, rotary_size: usize) -> SharedBytes {
    let rows = tensor.info.shape[0];
    let row_bytes = tensor.bytes.len() / rows;
    let (head_size, half) = (rows / num_heads, rotary_size / 2);
    let origin = |row: usize| {
        let (head, at) = (row / head_size * head_size, row % head_size);
        if at < rotary_size { head + at % 2 * half + at / 2 } else { row }
    };
    let mut turned = Vec::with_capacity(tensor.bytes.len());
    for row in (0..rows).map(origin) {
        turned.extend_from_slice(&tensor.bytes[row * row_bytes..(row + 1) * row_bytes]);
    }
    turned.into()
}
