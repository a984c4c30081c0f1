//! Quantized weights of a Hugging Face folder: FP8, AWQ, GPTQ, compressed-tensors and MXFP4.
//!
//! A scheme stores a weight as several tensors, such as `x.qweight`, `x.qzeros` and `x.scales`. This module presents
//! them as one tensor `x.weight`, whose values are computed when it is read. Everything that decoding relies on
//! (shapes, types, indices) is checked here, so that decoding cannot fail. `scheme` reads the configuration, `encoded`
//! decodes, `blocks` keeps integers in blocks, `compressed`, `packed` and `scaled` describe the tensors of the schemes.

mod blocks;
mod compressed;
mod encoded;
mod packed;
mod scaled;
mod scheme;

use std::collections::{BTreeMap, HashMap};
use std::path::Path;

use pellucid_tensor::DType;
use safetensors::Dtype;
use serde_json::Value;

pub(crate) use encoded::EncodedTensor;
use encoded::EncodedValues;
use scheme::Scheme;

use super::safetensors::StoredTensor;
use crate::checkpoint::TensorInfo;
use crate::error::{Error, quote};

/// The tensors of a folder.
pub(super) struct Tensors {
    pub(super) tensors: Vec<TensorInfo>,
    /// Sentences about what is decoded, and about what is not used.
    pub(super) notes: Vec<String>,
}

/// The stored tensors that no description has used yet.
struct Parts {
    tensors: Vec<Option<StoredTensor>>,
    by_name: HashMap<String, usize>,
}

/// Endings of the names of scales and zero points of activations and of cached keys and values. Activations are not
/// quantized here, so they are not used.
const OF_ACTIVATIONS: [&str; 10] = [
    ".input_scale",
    ".input_zero_point",
    ".activation_scale",
    ".output_scale",
    ".output_zero_point",
    ".q_scale",
    ".k_scale",
    ".v_scale",
    ".k_zero_point",
    ".v_zero_point",
];

/// Describes the tensors of a folder. `path` is that of `config.json`.
pub(super) fn tensors(path: &Path, config: &Value, stored: Vec<StoredTensor>) -> Result<Tensors, Error> {
    let Some(scheme) = Scheme::read(path, config)? else {
        let tensors = stored.into_iter().map(StoredTensor::into_plain).collect::<Result<_, Error>>()?;
        return Ok(Tensors { tensors, notes: Vec::new() });
    };
    let mut parts = Parts::new(stored);
    let mut described = Vec::new();
    for index in 0..parts.tensors.len() {
        if let Some(tensor) = scheme.describe(&mut parts, index)? {
            described.push((index, tensor));
        }
    }
    let mut num_of_activations = 0;
    for (index, tensor) in parts.tensors.into_iter().enumerate() {
        let Some(tensor) = tensor else { continue };
        let is_of_activations = OF_ACTIVATIONS.iter().any(|ending| tensor.name.ends_with(ending));
        if is_of_activations && tensor.shape.len() <= 1 && !matches!(scheme, Scheme::Gptq { .. } | Scheme::Mxfp4) {
            num_of_activations += 1;
        } else {
            described.push((index, tensor.into_plain()?));
        }
    }
    described.sort_by_key(|(index, _)| *index);
    let tensors: Vec<TensorInfo> = described.into_iter().map(|(_, tensor)| tensor).collect();
    let mut notes = format_notes(&tensors);
    if num_of_activations > 0 {
        notes.push(format!(
            "{num_of_activations} scales of activations are not used: activations are not rounded to 8 bits, so that \
             results are closer to those of the unquantized model"
        ));
    }
    Ok(Tensors { tensors, notes })
}

/// Returns a sentence for each scheme and format that weights are kept in or decoded to. FP8 and MXFP4 that stay what
/// they are need none.
fn format_notes(tensors: &[TensorInfo]) -> Vec<String> {
    let mut totals: BTreeMap<(&str, DType), (usize, usize, usize)> = BTreeMap::new();
    for tensor in tensors.iter().filter(|tensor| !matches!(tensor.dtype, DType::F8_E4M3 | DType::MXFP4)) {
        let Some(scheme) = tensor.encoding() else { continue };
        let total = totals.entry((scheme, tensor.dtype)).or_default();
        total.0 += 1;
        total.1 += tensor.num_bytes();
        total.2 += tensor.dtype.bytes_for(tensor.num_elements()).unwrap_or(usize::MAX);
    }
    let note = |((scheme, dtype), (count, stored, decoded)): (&(&str, DType), &(usize, usize, usize))| {
        if dtype.block_len() > 1 {
            return format!("{count} weights in {scheme} are kept in {dtype}, with the same integers and scales");
        }
        let ratio = *decoded as f64 / *stored as f64;
        format!(
            "{count} weights in {scheme} are decoded to {dtype} when they are loaded: they take {ratio:.1} times the \
             memory of the file, and are as fast as {dtype}"
        )
    };
    totals.iter().map(note).collect()
}

impl Scheme {
    /// Describes the weight that tensor `index` is the main part of, and takes its parts; `None` for any other tensor.
    fn describe(&self, parts: &mut Parts, index: usize) -> Result<Option<TensorInfo>, Error> {
        let Some(tensor) = &parts.tensors[index] else { return Ok(None) };
        let (name, dtype) = (tensor.name.clone(), tensor.dtype);
        let module = |ending: &str| name.strip_suffix(ending).map(str::to_owned);
        match *self {
            Scheme::Gptq { .. } | Scheme::Awq { .. } => {
                let Some(module) = module(".qweight") else { return Ok(None) };
                packed::describe(self, parts, index, &module).map(Some)
            }
            Scheme::Fp8 { block } if dtype == Dtype::F8_E4M3 => scaled::fp8(block, parts, index).map(Some),
            Scheme::CompressedTensors(weights) => match (module(".weight_packed"), module(".weight")) {
                (Some(module), _) => compressed::packed(weights, parts, index, &module).map(Some),
                (None, Some(module)) if matches!(dtype, Dtype::I8 | Dtype::F8_E4M3) => {
                    compressed::stored(weights, parts, index, &module).map(Some)
                }
                _ => Ok(None),
            },
            Scheme::Mxfp4 => match module("_blocks") {
                Some(name) => scaled::mxfp4(parts, index, &name).map(Some),
                None => Ok(None),
            },
            Scheme::Fp8 { .. } => Ok(None),
        }
    }
}

impl Parts {
    fn new(stored: Vec<StoredTensor>) -> Parts {
        let by_name = stored.iter().enumerate().map(|(i, tensor)| (tensor.name.clone(), i)).collect();
        Parts { tensors: stored.into_iter().map(Some).collect(), by_name }
    }

    fn take_at(&mut self, index: usize) -> StoredTensor {
        self.tensors[index].take().expect("a part that was not taken yet")
    }

    fn take(&mut self, name: &str) -> Option<StoredTensor> {
        self.tensors[*self.by_name.get(name)?].take()
    }

    /// Takes a tensor that `main` needs.
    fn need(&mut self, name: &str, main: &StoredTensor) -> Result<StoredTensor, Error> {
        self.take(name).ok_or_else(|| {
            let what = format!("tensor {}", quote(&main.name));
            Error::Invalid {
                path: main.path.to_path_buf(),
                what,
                expected: "its scales, zero points or shape beside it, by the quantization scheme of config.json",
                found: format!("no tensor {}", quote(name)),
            }
        })
    }
}

impl StoredTensor {
    /// Checks the type and the shape.
    fn checked(self, dtype: Dtype, shape: &[usize], expected: &'static str) -> Result<StoredTensor, Error> {
        if self.dtype != dtype {
            return Err(self.unsupported(&format!("{dtype:?}")));
        }
        if self.shape != shape { Err(self.wrong_shape(expected)) } else { Ok(self) }
    }

    /// Returns the rows and columns of a matrix.
    fn matrix(&self) -> Result<[usize; 2], Error> {
        match self.shape.as_slice() {
            &[rows, cols] => Ok([rows, cols]),
            _ => Err(self.wrong_shape("two dimensions")),
        }
    }

    /// Returns scales of the shape that is expected, and the format in which products with them are rounded.
    fn into_floats(self) -> Result<encoded::Floats, Error> {
        let dtype = StoredTensor::format(self.dtype).ok_or_else(|| self.unsupported("F32, F16, BF16"))?;
        Ok(encoded::Floats { dtype, bytes: self.bytes })
    }
}

/// Describes a weight of several parts.
fn weight(name: String, shape: Vec<usize>, scheme: String, num_bytes: usize, values: EncodedValues) -> TensorInfo {
    TensorInfo::encoded(name, shape, EncodedTensor { scheme, num_bytes, values })
}
