//! FP8 weights with scales for blocks of rows and columns, and the MXFP4 experts of gpt-oss.

use pellucid_tensor::DType;
use safetensors::Dtype;

use super::encoded::{Codes, ColumnGroups, EncodedValues, MxBlocks, QuantizedMatrix, ScaleGrid, Zeros};
use super::{Parts, StoredTensor, weight};
use crate::checkpoint::TensorInfo;
use crate::error::Error;

const GRID: &str = "one scale, or one for each block of weight_block_size in config.json";

/// Describes a weight in FP8. Its name with `_scale_inv` or `_scale` is that of the scales that multiply it.
pub(super) fn fp8(block: Option<[usize; 2]>, parts: &mut Parts, index: usize) -> Result<TensorInfo, Error> {
    let codes = parts.take_at(index);
    let scales = match parts.take(&format!("{}_scale", codes.name)) {
        Some(scales) => scales,
        None => parts.need(&format!("{}_scale_inv", codes.name), &codes)?,
    };
    let (rows, cols) = rows_and_columns(&codes)?;
    let own_rows = codes.shape[codes.shape.len() - 2];
    let grid = if scales.num_elements() == 1 {
        ScaleGrid::of_blocks([rows, cols], rows, cols)
    } else {
        let [block_rows, block_cols] = block.ok_or_else(|| scales.wrong_shape(GRID))?;
        let mut expected = codes.shape[..codes.shape.len() - 2].to_vec();
        expected.extend([own_rows.div_ceil(block_rows), cols.div_ceil(block_cols)]);
        if scales.shape != expected {
            return Err(scales.wrong_shape(GRID));
        }
        if own_rows != rows && !own_rows.is_multiple_of(block_rows) {
            return Err(codes.wrong_shape("matrices of whole blocks, because several are stacked"));
        }
        ScaleGrid::of_blocks([block_rows, block_cols], rows, cols)
    };
    // The reference multiplies in f32.
    fp8_weight(codes, scales, grid, DType::F32, (rows, cols))
}

/// Describes a weight in FP8 with a grid of scales. Products that are not rounded to 16 bits need no decoding, if
/// blocks of F8_E4M3 fit the rows.
pub(super) fn fp8_weight(
    codes: StoredTensor,
    scales: StoredTensor,
    grid: ScaleGrid,
    dtype: DType,
    (rows, cols): (usize, usize),
) -> Result<TensorInfo, Error> {
    let num_bytes = codes.bytes.len() + scales.bytes.len();
    let (name, shape, bytes) = (codes.name.clone(), codes.shape.clone(), codes.bytes);
    let scales = scales.into_floats()?;
    let len = DType::F8_E4M3.block_len();
    let fits = |group: usize| group >= cols || group.is_multiple_of(len);
    let is_kept = dtype == DType::F32
        && cols.is_multiple_of(len)
        && matches!(grid.columns, ColumnGroups::Adjacent(group) if fits(group));
    let matrix = QuantizedMatrix { rows, cols, codes: Codes::Fp8, bytes, scales, zeros: Zeros::None, grid, dtype };
    let values = if is_kept { EncodedValues::Fp8(matrix) } else { EncodedValues::Matrix(matrix) };
    Ok(weight(name, shape, "FP8".into(), num_bytes, values))
}

impl ScaleGrid {
    /// The grid of scales for blocks of rows and columns.
    pub(super) fn of_blocks([block_rows, block_cols]: [usize; 2], rows: usize, cols: usize) -> ScaleGrid {
        let (rows_per_scale, size) = (block_rows.min(rows), block_cols.min(cols));
        let num_groups = cols.div_ceil(size);
        ScaleGrid { groups_first: false, rows_per_scale, num_groups, columns: ColumnGroups::Adjacent(size) }
    }
}

/// Returns the rows of all stacked matrices together, and the columns.
fn rows_and_columns(codes: &StoredTensor) -> Result<(usize, usize), Error> {
    match *codes.shape.as_slice() {
        [rows, cols] => Ok((rows, cols)),
        // The product of all dimensions was checked when the header was read.
        [count, rows, cols] => Ok((count * rows, cols)),
        _ => Err(codes.wrong_shape("two or three dimensions")),
    }
}

/// Describes stacked matrices in MXFP4, `name` being the part of the names before `_blocks` and `_scales`.
pub(super) fn mxfp4(parts: &mut Parts, index: usize, name: &str) -> Result<TensorInfo, Error> {
    const BLOCKS: &str = "[..., rows, blocks of 32 columns, 16]";
    let blocks = parts.take_at(index);
    let scales = parts.need(&format!("{name}_scales"), &blocks)?;
    let shape = blocks.shape.clone();
    let blocks = blocks.checked(Dtype::U8, &shape, BLOCKS)?;
    let Some((&16, of_scales)) = shape.split_last() else { return Err(blocks.wrong_shape(BLOCKS)) };
    let scales = scales.checked(Dtype::U8, of_scales, "one for each block")?;
    let Some((&num_blocks, leading)) = of_scales.split_last().filter(|(_, leading)| !leading.is_empty()) else {
        return Err(blocks.wrong_shape(BLOCKS));
    };
    let cols = num_blocks.checked_mul(32).ok_or_else(|| blocks.wrong_shape("a size that fits the machine"))?;
    if blocks.num_elements().checked_mul(2).is_none() {
        return Err(blocks.wrong_shape("a size that fits the machine"));
    }
    let shape: Vec<usize> = leading.iter().copied().chain([cols]).collect();
    let num_bytes = blocks.bytes.len() + scales.bytes.len();
    let values = EncodedValues::Mxfp4(MxBlocks { blocks: blocks.bytes, scales: scales.bytes });
    Ok(weight(name.to_owned(), shape, "MXFP4".into(), num_bytes, values))
}
