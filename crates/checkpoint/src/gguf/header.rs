//! One GGUF file: magic, version, counts, metadata, tensor descriptions; then, aligned, the data.
//!
//! ```text
//! "GGUF"  version u32  tensors u64  keys u64
//! keys    x { string key, u32 type, value }
//! tensors x { string name, u32 dims, dims x u64 (contiguous dimension first), u32 type, u64 offset into the data }
//! padding up to general.alignment, then the data
//! ```
//! Versions 2 and 3 have the same layout; 3 only added big-endian byte order, which is refused.

use std::path::Path;

use pellucid_tensor::{DType, SharedBytes};

use super::metadata::Metadata;
use super::reader::Reader;
use super::tensor_type;
use super::value::Value;
use crate::checkpoint::TensorInfo;
use crate::error::{Error, quote};

pub(crate) const MAGIC: [u8; 4] = *b"GGUF";
pub(super) const ALIGNMENT_KEY: &str = "general.alignment";
pub(super) const DEFAULT_ALIGNMENT: u64 = 32;
/// Larger than any memory page. A converted file keeps its alignment, and each tensor is padded to it.
pub(super) const MAX_ALIGNMENT: u64 = 1 << 20;
/// The format allows keys of up to 2^16 - 1 bytes.
const MAX_KEY_BYTES: u64 = 65_535;
/// The format allows 64; some writers use more.
const MAX_TENSOR_NAME_BYTES: u64 = 1024;
/// Real files have dozens of keys.
const MAX_KEYS: u64 = 1 << 16;
/// The largest mixtures of experts have some 10^5 tensors if each expert has its own.
const MAX_TENSORS: u64 = 1 << 20;
const MAX_DIMENSIONS: u32 = 4;
/// Minimum size of a key: an empty name, a type number and a one-byte value.
const MIN_KEY_BYTES: u64 = 8 + 4 + 1;
/// Minimum size of a tensor description: an empty name, no dimensions, a type number and an offset.
const MIN_TENSOR_BYTES: u64 = 8 + 4 + 4 + 8;

/// The contents of one file. The tensors are in the order of their data. [`Checkpoint`](crate::Checkpoint) checks that
/// their names are unique over all parts.
#[derive(Debug)]
pub(crate) struct File {
    pub(crate) metadata: Metadata,
    pub(crate) tensors: Vec<TensorInfo>,
}

/// A tensor's description, before its offset is compared with the file.
struct Description {
    name: String,
    dtype: DType,
    shape: Vec<usize>,
    /// Relative to the start of the data.
    start: u64,
    end: u64,
}

pub(crate) fn read(path: &Path, bytes: &SharedBytes) -> Result<File, Error> {
    let mut reader = Reader::new(path, bytes);
    read_version(&mut reader)?;
    // Compared with the rest of the file here; the reader checks the bounds of each item later.
    let num_tensors = reader.count(MIN_TENSOR_BYTES, MAX_TENSORS, &"the number of tensors")?;
    let num_keys = reader.count(MIN_KEY_BYTES, MAX_KEYS, &"the number of keys")?;
    let metadata = read_metadata(&mut reader, num_keys)?;
    let alignment = alignment(path, &metadata)?;

    let mut descriptions = Vec::new();
    for index in 0..num_tensors {
        descriptions.push(read_description(&mut reader, index, alignment)?);
    }
    let data_start = (reader.position() as u64).checked_next_multiple_of(alignment);
    let tensors = slice_tensors(path, bytes, descriptions, data_start)?;
    Ok(File { metadata, tensors })
}

fn read_version(reader: &mut Reader<'_>) -> Result<(), Error> {
    let path = reader.path();
    let magic = reader.take(4, &"the magic \"GGUF\"")?;
    if magic != MAGIC {
        return Err(Error::BadMagic { path: path.to_path_buf(), found: magic.to_vec() });
    }
    let version = reader.u32(&"the version")?;
    match (version, version.swap_bytes()) {
        (2 | 3, _) => Ok(()),
        (_, swapped @ 1..=3) => Err(Error::BigEndian { path: path.to_path_buf(), version: swapped }),
        _ => Err(Error::UnsupportedVersion { path: path.to_path_buf(), found: version }),
    }
}

fn read_metadata(reader: &mut Reader<'_>, num_keys: usize) -> Result<Metadata, Error> {
    let mut metadata = Metadata::default();
    for index in 0..num_keys {
        let key = reader.string(MAX_KEY_BYTES, &format_args!("the name of key {index}"))?;
        if key.is_empty() {
            return Err(Error::invalid(
                reader.path(),
                format_args!("the name of key {index}"),
                "a name",
                "an empty one",
            ));
        }
        let shown = quote(&key);
        let value = Value::read(reader, &format_args!("key {shown}"))?;
        if !metadata.insert(key, value) {
            return Err(Error::Duplicate { path: reader.path().to_path_buf(), what: format!("key {shown}") });
        }
    }
    Ok(metadata)
}

fn alignment(path: &Path, metadata: &Metadata) -> Result<u64, Error> {
    let alignment = metadata.opt_u32(ALIGNMENT_KEY)?.map_or(DEFAULT_ALIGNMENT, u64::from);
    if !alignment.is_power_of_two() || alignment > MAX_ALIGNMENT {
        let what = format_args!("key {}", quote(ALIGNMENT_KEY));
        return Err(Error::invalid(path, what, "a power of two up to 2^20", alignment));
    }
    Ok(alignment)
}

fn read_description(reader: &mut Reader<'_>, index: usize, alignment: u64) -> Result<Description, Error> {
    let path = reader.path();
    let name = reader.string(MAX_TENSOR_NAME_BYTES, &format_args!("the name of tensor {index}"))?;
    let tensor = quote(&name);
    if name.is_empty() {
        return Err(Error::invalid(path, format_args!("the name of tensor {index}"), "a name", "an empty one"));
    }
    let num_dims = reader.u32(&format_args!("the number of dimensions of tensor {tensor}"))?;
    if num_dims > MAX_DIMENSIONS {
        let what = format!("the number of dimensions of tensor {tensor}");
        let (limit, found) = (u64::from(MAX_DIMENSIONS), u64::from(num_dims));
        return Err(Error::TooLarge { path: path.to_path_buf(), what, limit, found });
    }
    let mut dims = [1u64; MAX_DIMENSIONS as usize];
    let dims = &mut dims[..num_dims as usize];
    for dim in dims.iter_mut() {
        *dim = reader.u64(&format_args!("the dimensions of tensor {tensor}"))?;
    }
    // The file has the contiguous dimension first, `TensorInfo` has it last.
    dims.reverse();
    let number = reader.u32(&format_args!("the type of tensor {tensor}"))?;
    let dtype = tensor_type::dtype(number).map_err(|found| Error::UnsupportedTensorType {
        path: path.to_path_buf(),
        tensor: tensor.clone(),
        found,
        supported: tensor_type::supported(),
    })?;
    let start = reader.u64(&format_args!("the offset of tensor {tensor}"))?;

    let wrong_shape = |expected| Error::TensorShape {
        path: path.to_path_buf(),
        tensor: tensor.clone(),
        dtype: dtype.to_string(),
        shape: format!("{dims:?}"),
        expected,
    };
    let (shape, num_bytes) = checked_shape(dtype, dims).map_err(wrong_shape)?;
    let wrong_offsets =
        |end, expected| Error::TensorOffsets { path: path.to_path_buf(), tensor: tensor.clone(), start, end, expected };
    let end = start.checked_add(num_bytes).ok_or_else(|| wrong_offsets(u64::MAX, "an end within 64 bits".into()))?;
    if !start.is_multiple_of(alignment) {
        return Err(wrong_offsets(end, format!("a start at a multiple of the alignment of {alignment} bytes")));
    }
    Ok(Description { name, dtype, shape, start, end })
}

/// Returns the shape as `usize` and its number of bytes; or what was expected, as text.
pub(crate) fn checked_shape(dtype: DType, dims: &[u64]) -> Result<(Vec<usize>, u64), &'static str> {
    const OVERFLOW: &str = "a size in bytes that fits 63 bits";
    if dims.contains(&0) {
        return Err("dimensions above zero");
    }
    let row = dims.last().copied().unwrap_or(1);
    if !row.is_multiple_of(dtype.block_len() as u64) {
        return Err("a last dimension of whole blocks");
    }
    let num_elements = dims.iter().try_fold(1u64, |product, &dim| product.checked_mul(dim)).ok_or(OVERFLOW)?;
    let num_blocks = num_elements / dtype.block_len() as u64;
    let num_bytes =
        num_blocks.checked_mul(dtype.block_bytes() as u64).filter(|&n| n <= i64::MAX as u64).ok_or(OVERFLOW)?;
    // Elements are counted in `usize`, which is the tighter bound on a 32-bit machine.
    usize::try_from(num_elements).map_err(|_| OVERFLOW)?;
    let shape = dims.iter().map(|&dim| usize::try_from(dim)).collect::<Result<_, _>>().map_err(|_| OVERFLOW)?;
    Ok((shape, num_bytes))
}

/// Slices each tensor's bytes out of the file, in the order of the data. Refuses tensors outside the file and
/// overlapping ones.
fn slice_tensors(
    path: &Path,
    bytes: &SharedBytes,
    mut descriptions: Vec<Description>,
    data_start: Option<u64>,
) -> Result<Vec<TensorInfo>, Error> {
    descriptions.sort_by_key(|d| (d.start, d.end));
    let mut tensors = Vec::with_capacity(descriptions.len());
    let mut previous_end = 0;
    for Description { name, dtype, shape, start, end } in descriptions {
        let wrong_offsets = |expected| {
            let (path, tensor) = (path.to_path_buf(), quote(&name));
            Error::TensorOffsets { path, tensor, start, end, expected }
        };
        if start < previous_end {
            return Err(wrong_offsets(format!("a start at {previous_end} or later, where the tensor before it ends")));
        }
        previous_end = end;
        let range = data_start.and_then(|data_start| {
            let first = usize::try_from(data_start.checked_add(start)?).ok()?;
            let last = usize::try_from(data_start.checked_add(end)?).ok()?;
            Some(first..last)
        });
        let Some(data) = range.and_then(|range| bytes.slice(range)) else {
            let available = data_start.map_or(0, |data_start| (bytes.len() as u64).saturating_sub(data_start));
            return Err(wrong_offsets(format!("an end within the {available} bytes of data that the file has")));
        };
        tensors.push(TensorInfo::new(name, dtype, shape, data));
    }
    Ok(tensors)
}
