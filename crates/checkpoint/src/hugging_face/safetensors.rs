//! A safetensors file: a header length (u64), a JSON header, and the data, which the header describes without gaps.
//!
//! The `safetensors` crate parses each description. This module checks the whole file: its errors name the tensor, it
//! refuses duplicate names, and its sums are checked. (The crate adds header length and data length unchecked, which
//! overflows for offsets near 2^64.)

use std::collections::HashSet;
use std::fmt;
use std::path::Path;
use std::sync::Arc;

use pellucid_tensor::{DType, SharedBytes};
use safetensors::Dtype;
use safetensors::tensor::TensorInfo as Description;
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};

use crate::checkpoint::TensorInfo;
use crate::error::{Error, quote};
use crate::file_bytes::FileReader;
use crate::{gguf, pickle};

/// The format allows 100 MB; a header of 10^5 tensors takes 15 MB.
const MAX_HEADER_BYTES: u64 = 64 << 20;
const LENGTH_BYTES: u64 = 8;
const MAX_DIMENSIONS: usize = 8;

pub(super) struct Shard {
    pub(super) tensors: Vec<StoredTensor>,
    pub(super) file_bytes: u64,
}

/// A tensor of a file, with bytes that its type and shape were compared with. Quantization schemes use types that no
/// weight has.
#[derive(Debug, Clone)]
pub(super) struct StoredTensor {
    pub(super) path: Arc<Path>,
    pub(super) name: String,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    pub(super) bytes: SharedBytes,
}

impl StoredTensor {
    /// Returns the format of a type that weights may have as they are.
    pub(super) fn format(dtype: Dtype) -> Option<DType> {
        match dtype {
            Dtype::F32 => Some(DType::F32),
            Dtype::F16 => Some(DType::F16),
            Dtype::BF16 => Some(DType::BF16),
            _ => None,
        }
    }

    pub(super) fn num_elements(&self) -> usize {
        self.shape.iter().product()
    }

    pub(super) fn unsupported(&self, supported: &str) -> Error {
        Error::UnsupportedTensorType {
            path: self.path.to_path_buf(),
            tensor: quote(&self.name),
            found: format!("{:?}", self.dtype),
            supported: supported.into(),
        }
    }

    pub(super) fn wrong_shape(&self, expected: &'static str) -> Error {
        Error::TensorShape {
            path: self.path.to_path_buf(),
            tensor: quote(&self.name),
            dtype: format!("{:?}", self.dtype),
            shape: shown_shape(&self.shape),
            expected,
        }
    }

    /// Returns a tensor whose values are used as they are.
    pub(super) fn into_plain(self) -> Result<TensorInfo, Error> {
        match StoredTensor::format(self.dtype) {
            Some(dtype) => Ok(TensorInfo::new(self.name, dtype, self.shape, self.bytes)),
            None => Err(self.unsupported("F32, F16, BF16")),
        }
    }
}

pub(super) fn read(path: &Path, reader: &mut FileReader<'_>) -> Result<Shard, Error> {
    let bytes = reader.read(path)?;
    let header_bytes = header_bytes(path, &bytes)?;
    let header: Header =
        serde_json::from_slice(&header_bytes).map_err(|cause| Error::Json { path: path.to_path_buf(), cause })?;

    let data_start = LENGTH_BYTES as usize + header_bytes.len();
    let data = bytes.slice(data_start..bytes.len()).unwrap_or_else(|| SharedBytes::from(Vec::new()));
    let tensors = slice_tensors(path, &data, header.tensors)?;
    Ok(Shard { tensors, file_bytes: bytes.len() as u64 })
}

/// Returns a copy of the header's JSON text.
fn header_bytes(path: &Path, bytes: &[u8]) -> Result<Vec<u8>, Error> {
    // A header length may look like the start of a pickle, but then JSON starts at the ninth byte.
    if bytes.get(LENGTH_BYTES as usize) != Some(&b'{')
        && let Some(reason) = pickle::by_magic(bytes)
    {
        return Err(pickle::refuse(path, reason));
    }
    let truncated = |what: &str, offset, needed, left| Error::Truncated {
        path: path.to_path_buf(),
        what: what.into(),
        offset,
        needed,
        left,
    };
    let Some((length, rest)) = bytes.split_first_chunk::<{ LENGTH_BYTES as usize }>() else {
        return Err(truncated("the length of the header", 0, LENGTH_BYTES, bytes.len() as u64));
    };
    let length = u64::from_le_bytes(*length);
    if length > rest.len() as u64 {
        return Err(truncated("the header", LENGTH_BYTES, length, rest.len() as u64));
    }
    if length > MAX_HEADER_BYTES {
        let what = "the length of the header in bytes".into();
        return Err(Error::TooLarge { path: path.to_path_buf(), what, limit: MAX_HEADER_BYTES, found: length });
    }
    Ok(rest[..length as usize].to_vec())
}

/// The header's tensors in the order of the text. Duplicates are included, so that an error can name them.
struct Header {
    tensors: Vec<(String, Description)>,
}

impl<'de> Deserialize<'de> for Header {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Header, D::Error> {
        deserializer.deserialize_map(HeaderVisitor)
    }
}

struct HeaderVisitor;

impl<'de> Visitor<'de> for HeaderVisitor {
    type Value = Header;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of tensor descriptions")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Header, A::Error> {
        let mut tensors = Vec::new();
        while let Some(name) = map.next_key::<String>()? {
            // Free text for humans.
            if name == "__metadata__" {
                map.next_value::<IgnoredAny>()?;
                continue;
            }
            let description =
                map.next_value().map_err(|e| serde::de::Error::custom(format_args!("tensor {}: {e}", quote(&name))))?;
            tensors.push((name, description));
        }
        Ok(Header { tensors })
    }
}

/// Slices each tensor's bytes out of the data. In the order of their offsets, the tensors must cover it without gaps or
/// overlaps.
fn slice_tensors(
    path: &Path,
    data: &SharedBytes,
    mut tensors: Vec<(String, Description)>,
) -> Result<Vec<StoredTensor>, Error> {
    let shared_path: Arc<Path> = path.into();
    tensors.sort_by_key(|(_, d)| d.data_offsets);
    let mut sliced = Vec::with_capacity(tensors.len());
    let mut names = HashSet::with_capacity(tensors.len());
    let mut previous_end = 0;
    for (name, description) in tensors {
        if !names.insert(name.clone()) {
            return Err(Error::Duplicate { path: path.to_path_buf(), what: format!("tensor {}", quote(&name)) });
        }
        let (start, end) = description.data_offsets;
        let is_cached = is_cached_positions(&name, &description);
        let num_bytes = checked_size(path, &name, &description)?;
        let wrong_offsets = |expected| {
            let (path, tensor) = (path.to_path_buf(), quote(&name));
            Error::TensorOffsets { path, tensor, start: start as u64, end: end as u64, expected }
        };
        if start != previous_end {
            return Err(wrong_offsets(format!("a start at {previous_end}, where the tensor before it ends")));
        }
        if start.checked_add(num_bytes) != Some(end) {
            return Err(wrong_offsets(format!("{num_bytes} bytes, by its type and shape")));
        }
        let Some(bytes) = data.slice(start..end) else {
            return Err(wrong_offsets(format!("an end within the {} bytes of data that the file has", data.len())));
        };
        previous_end = end;
        if !is_cached {
            let (path, dtype, shape) = (shared_path.clone(), description.dtype, description.shape);
            sliced.push(StoredTensor { path, name, dtype, shape, bytes });
        }
    }
    if previous_end != data.len() {
        let found = format_args!("{previous_end} of {} bytes", data.len());
        return Err(Error::invalid(path, "the data", "tensors that cover all of it", found));
    }
    Ok(sliced)
}

/// Whether a tensor is the list of positions 0, 1, 2, ... that older folders of encoders hold as integers. It is no
/// weight, and the checkpoint leaves it out.
fn is_cached_positions(name: &str, description: &Description) -> bool {
    let is_small = description.shape.len() <= 2 && description.shape.iter().all(|&dim| dim <= 1 << 24);
    description.dtype == Dtype::I64 && name.ends_with("embeddings.position_ids") && is_small
}

/// Returns the number of bytes of a tensor, by its type and shape.
fn checked_size(path: &Path, name: &str, description: &Description) -> Result<usize, Error> {
    let width = match description.dtype {
        Dtype::I8 | Dtype::U8 | Dtype::F8_E4M3 => 1,
        Dtype::F16 | Dtype::BF16 => 2,
        Dtype::F32 | Dtype::I32 => 4,
        Dtype::I64 => 8,
        other => {
            return Err(Error::UnsupportedTensorType {
                path: path.to_path_buf(),
                tensor: quote(name),
                found: format!("{other:?}"),
                supported: "F32, F16, BF16; quantized F8_E4M3, I8, I32, U8".into(),
            });
        }
    };
    let wrong_shape = |expected| Error::TensorShape {
        path: path.to_path_buf(),
        tensor: quote(name),
        dtype: format!("{:?}", description.dtype),
        shape: shown_shape(&description.shape),
        expected,
    };
    if description.shape.len() > MAX_DIMENSIONS {
        return Err(wrong_shape("at most 8 dimensions"));
    }
    let dims: Vec<u64> = description.shape.iter().map(|&dim| dim as u64).collect();
    // The number of elements is that of bytes in a format of two; the wider types may still overflow.
    let (_, of_two_bytes) = gguf::checked_shape(DType::F16, &dims).map_err(wrong_shape)?;
    let num_bytes = (of_two_bytes / 2).checked_mul(width).filter(|&bytes| bytes <= i64::MAX as u64);
    let num_bytes = num_bytes.ok_or_else(|| wrong_shape("a size in bytes that fits 63 bits"))?;
    usize::try_from(num_bytes).map_err(|_| wrong_shape("a size in bytes that fits the machine"))
}

/// Returns a shape for a message, cut to 8 dimensions because a hostile header may have thousands.
fn shown_shape(shape: &[usize]) -> String {
    match shape.get(..MAX_DIMENSIONS) {
        Some(first) if shape.len() > MAX_DIMENSIONS => format!("{first:?}... ({} dimensions)", shape.len()),
        _ => format!("{shape:?}"),
    }
}
