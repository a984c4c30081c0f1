//! compressed-tensors: packed integers of four or eight bits, and integers and floats of eight bits as they are.

use pellucid_tensor::DType;
use safetensors::Dtype;

use super::encoded::{Codes, ColumnGroups, EncodedValues, QuantizedMatrix, ScaleGrid, Zeros, words};
use super::scaled::fp8_weight;
use super::scheme::{CompressedWeights, ScaleStrategy};
use super::{Parts, StoredTensor, weight};
use crate::checkpoint::TensorInfo;
use crate::error::Error;

const SCALES: &str = "one scale for each tensor, row, group or block, by the strategy in config.json";

/// Describes `module.weight` from packed integers; `index` is that of `module.weight_packed`.
pub(super) fn packed(
    weights: CompressedWeights,
    parts: &mut Parts,
    index: usize,
    module: &str,
) -> Result<TensorInfo, Error> {
    let main = parts.take_at(index);
    let per_word = (32 / weights.bits) as usize;
    let stated = parts.need(&format!("{module}.weight_shape"), &main)?;
    let [rows, cols] = stated_shape(&stated)?;
    let packed = main.checked(Dtype::I32, &[rows, cols.div_ceil(per_word)], "the rows and columns of weight_shape")?;
    let scales = parts.need(&format!("{module}.weight_scale"), &packed)?;
    let mut grid = grid(weights.scales, &scales, rows, cols)?;
    if let Some(listed) = parts.take(&format!("{module}.weight_g_idx")) {
        list_groups(&mut grid, listed, cols)?;
    }
    let scale_rows = rows.div_ceil(grid.rows_per_scale);
    let mut num_bytes = packed.bytes.len() + scales.bytes.len();
    let zeros = if weights.symmetric {
        Zeros::None
    } else {
        let zeros = parts.need(&format!("{module}.weight_zero_point"), &packed)?;
        let shape = [scale_rows.div_ceil(per_word), grid.num_groups];
        let zeros = zeros.checked(Dtype::I32, &shape, "a word for 32 / bits rows of each group")?;
        num_bytes += zeros.bytes.len();
        Zeros::WordsDown { bits: weights.bits, bytes: zeros.bytes }
    };
    let scales = scales.into_floats()?;
    let codes = Codes::Words { bits: weights.bits };
    let (dtype, bytes) = (scales.dtype, packed.bytes);
    let matrix = QuantizedMatrix { rows, cols, codes, bytes, scales, zeros, grid, dtype };
    let scheme = format!("INT{}", weights.bits);
    Ok(weight(format!("{module}.weight"), vec![rows, cols], scheme, num_bytes, EncodedValues::of_integers(matrix)))
}

/// Describes `module.weight` in integers or floats of eight bits.
pub(super) fn stored(
    weights: CompressedWeights,
    parts: &mut Parts,
    index: usize,
    module: &str,
) -> Result<TensorInfo, Error> {
    let codes = parts.take_at(index);
    let [rows, cols] = codes.matrix()?;
    let expected = if weights.is_float { Dtype::F8_E4M3 } else { Dtype::I8 };
    let codes = codes.checked(expected, &[rows, cols], "two dimensions")?;
    let scales = parts.need(&format!("{module}.weight_scale"), &codes)?;
    let grid = grid(weights.scales, &scales, rows, cols)?;
    let zeros = zero_points(weights, parts, module, &codes, &scales)?;
    if weights.is_float {
        let dtype = StoredTensor::format(scales.dtype).unwrap_or(DType::F32);
        return fp8_weight(codes, scales, grid, dtype, (rows, cols));
    }
    let num_bytes = codes.bytes.len() + scales.bytes.len();
    let (name, bytes, scales) = (codes.name, codes.bytes, scales.into_floats()?);
    let dtype = scales.dtype;
    let matrix = QuantizedMatrix { rows, cols, codes: Codes::Int8, bytes, scales, zeros, grid, dtype };
    let scheme = "INT8".into();
    Ok(weight(name, vec![rows, cols], scheme, num_bytes, EncodedValues::of_integers(matrix)))
}

/// Takes the zero points of weights that are not packed: one for each scale. Symmetric weights may have zeros.
fn zero_points(
    weights: CompressedWeights,
    parts: &mut Parts,
    module: &str,
    codes: &StoredTensor,
    scales: &StoredTensor,
) -> Result<Zeros, Error> {
    let name = format!("{module}.weight_zero_point");
    if weights.symmetric {
        return match parts.take(&name) {
            Some(zeros) if zeros.bytes.iter().any(|&byte| byte != 0) => {
                let what = format_args!("tensor {:?}", zeros.name);
                Err(Error::invalid(&zeros.path, what, "zeros, because the weights are symmetric", "other numbers"))
            }
            _ => Ok(Zeros::None),
        };
    }
    if weights.is_float {
        let what = format_args!("tensor {:?}", codes.name);
        let expected = "symmetric floats, by the quantization scheme of config.json";
        return Err(Error::invalid(&codes.path, what, expected, "floats with zero points"));
    }
    let zeros = parts.need(&name, codes)?.checked(Dtype::I8, &scales.shape, "a zero point for each scale")?;
    Ok(Zeros::Int8 { bytes: zeros.bytes })
}

/// Returns the grid of the scales, after checking their shape.
fn grid(strategy: ScaleStrategy, scales: &StoredTensor, rows: usize, cols: usize) -> Result<ScaleGrid, Error> {
    let block = match strategy {
        ScaleStrategy::Tensor => [rows, cols],
        ScaleStrategy::Channel => [1, cols],
        ScaleStrategy::Group(size) if cols.is_multiple_of(size) => [1, size],
        ScaleStrategy::Group(_) => return Err(scales.wrong_shape("groups of the same size, by config.json")),
        ScaleStrategy::Block(block) => block,
    };
    let expected = [rows.div_ceil(block[0]), cols.div_ceil(block[1])];
    let is_one = strategy == ScaleStrategy::Tensor && scales.num_elements() == 1;
    let is_vector = strategy == ScaleStrategy::Channel && scales.shape == [rows];
    if scales.shape != expected && !is_one && !is_vector {
        return Err(scales.wrong_shape(SCALES));
    }
    Ok(ScaleGrid::of_blocks(block, rows, cols))
}

/// Replaces the groups of adjacent columns by a list, if it is one: a list of -1 stands for adjacent columns.
fn list_groups(grid: &mut ScaleGrid, listed: StoredTensor, cols: usize) -> Result<(), Error> {
    let listed = listed.checked(Dtype::I32, &[cols], "a group for each column")?;
    if words(&listed.bytes).all(|group| group as i32 == -1) {
        return Ok(());
    }
    if words(&listed.bytes).any(|group| group as usize >= grid.num_groups) {
        let what = format_args!("tensor {:?}", listed.name);
        return Err(Error::invalid(&listed.path, what, "groups that have scales", "others"));
    }
    grid.columns = ColumnGroups::Listed(listed.bytes);
    Ok(())
}

/// Returns the rows and columns that `weight_shape` states.
fn stated_shape(stated: &StoredTensor) -> Result<[usize; 2], Error> {
    const EXPECTED: &str = "two positive numbers, the rows and columns of the weight";
    let (width, len) = match stated.dtype {
        Dtype::I64 => (8, stated.num_elements()),
        Dtype::I32 => (4, stated.num_elements()),
        _ => return Err(stated.unsupported("I64, I32")),
    };
    if len != 2 {
        return Err(stated.wrong_shape(EXPECTED));
    }
    let number = |i: usize| {
        let mut bytes = [0; 8];
        bytes[..width].copy_from_slice(&stated.bytes[i * width..(i + 1) * width]);
        // The upper bound keeps the product of both within 64 bits.
        usize::try_from(u64::from_le_bytes(bytes)).ok().filter(|size| (1..1 << 31).contains(size))
    };
    match (number(0), number(1)) {
        (Some(rows), Some(cols)) => Ok([rows, cols]),
        _ => Err(stated.wrong_shape(EXPECTED)),
    }
}
