//! Reads `quantization_config` of a `config.json`. A setting that is not supported is refused by its name.

use std::path::Path;

use serde_json::Value;

use crate::error::{Error, quote};
use crate::hugging_face::json;

/// How a folder encodes its quantized weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scheme {
    /// Integers of `bits` bits, packed along the inputs. Version 1 stores zero points minus one.
    Gptq {
        bits: u32,
        group_size: Option<usize>,
        desc_act: bool,
        zeros_minus_one: bool,
    },
    /// Integers of four bits, packed along the outputs in a permuted order.
    Awq {
        group_size: Option<usize>,
    },
    /// FP8 with a scale for each block of rows and columns, or for each tensor.
    Fp8 {
        block: Option<[usize; 2]>,
    },
    CompressedTensors(CompressedWeights),
    /// Four-bit floats with a power of two for 32 values.
    Mxfp4,
}

/// The settings of compressed-tensors for weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct CompressedWeights {
    pub(super) bits: u32,
    pub(super) is_float: bool,
    /// Whether integers are packed in words; floats and integers of eight bits may be stored as they are.
    pub(super) is_packed: bool,
    pub(super) symmetric: bool,
    pub(super) scales: ScaleStrategy,
}

/// The weights that share a scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ScaleStrategy {
    Tensor,
    Channel,
    Group(usize),
    Block([usize; 2]),
}

/// An object of `config.json`, with the keys that lead to it.
struct Settings<'a> {
    path: &'a Path,
    prefix: String,
    object: &'a Value,
}

impl<'a> Settings<'a> {
    fn get(&self, key: &str) -> Option<&'a Value> {
        self.object.get(key).filter(|value| !value.is_null())
    }

    fn bad(&self, key: &str, expected: &'static str, found: &Value) -> Error {
        let found = match found {
            Value::String(text) => quote(text),
            Value::Number(_) | Value::Bool(_) | Value::Null => found.to_string(),
            other => json::kind(other).into(),
        };
        Error::invalid(self.path, format_args!("{}.{key}", self.prefix), expected, found)
    }

    fn missing(&self, key: &str, expected: &'static str) -> Error {
        Error::invalid(self.path, format_args!("{}.{key}", self.prefix), expected, "none")
    }

    fn object(&self, key: &str) -> Result<Settings<'a>, Error> {
        let object = self.get(key).ok_or_else(|| self.missing(key, "an object"))?;
        if !object.is_object() {
            return Err(self.bad(key, "an object", object));
        }
        Ok(Settings { path: self.path, prefix: format!("{}.{key}", self.prefix), object })
    }

    fn opt_str(&self, key: &str) -> Result<Option<&'a str>, Error> {
        self.get(key).map(|value| value.as_str().ok_or_else(|| self.bad(key, "a string", value))).transpose()
    }

    fn opt_bool(&self, key: &str) -> Result<Option<bool>, Error> {
        self.get(key).map(|value| value.as_bool().ok_or_else(|| self.bad(key, "true or false", value))).transpose()
    }

    /// Returns the first of several names of a number.
    fn int(&self, keys: &[&str], expected: &'static str) -> Result<i64, Error> {
        let found = keys.iter().find_map(|key| Some((key, self.get(key)?)));
        let (key, value) = found.ok_or_else(|| self.missing(keys[0], expected))?;
        value.as_i64().ok_or_else(|| self.bad(key, expected, value))
    }

    /// Returns a group's number of columns; `None` if a group is a whole row.
    fn group_size(&self, keys: &[&str]) -> Result<Option<usize>, Error> {
        const EXPECTED: &str = "-1, or a number of columns from 1 to 65536";
        match self.int(keys, EXPECTED)? {
            -1 => Ok(None),
            size @ 1..=65_536 => Ok(Some(size as usize)),
            other => Err(self.bad(keys[0], EXPECTED, &Value::from(other))),
        }
    }

    /// Returns the rows and columns of a block.
    fn block(&self, key: &str) -> Result<Option<[usize; 2]>, Error> {
        const EXPECTED: &str = "two numbers from 1 to 65536, the rows and columns of a block";
        let Some(value) = self.get(key) else { return Ok(None) };
        let sizes: Vec<usize> = (value.as_array().into_iter().flatten())
            .filter_map(|size| size.as_u64().filter(|size| (1..=65_536).contains(size)).map(|size| size as usize))
            .collect();
        match (value.as_array().map(Vec::len), sizes.as_slice()) {
            (Some(2), &[rows, columns]) => Ok(Some([rows, columns])),
            _ => Err(self.bad(key, EXPECTED, value)),
        }
    }

    /// Refuses a key unless it is absent, empty or false.
    fn must_be_empty(&self, key: &str, expected: &'static str) -> Result<(), Error> {
        match self.get(key) {
            None | Some(Value::Bool(false)) => Ok(()),
            Some(Value::Object(object)) if object.is_empty() => Ok(()),
            Some(Value::Array(list)) if list.is_empty() => Ok(()),
            Some(value) => Err(self.bad(key, expected, value)),
        }
    }

    /// Refuses a string other than one of `allowed`. Absent counts as allowed.
    fn one_of(&self, key: &str, allowed: &[&str], expected: &'static str) -> Result<(), Error> {
        match self.opt_str(key)? {
            Some(found) if !allowed.contains(&found) => Err(self.bad(key, expected, &Value::from(found))),
            _ => Ok(()),
        }
    }
}

impl Scheme {
    /// Reads the scheme; `None` for a folder whose weights are not quantized.
    pub(super) fn read(path: &Path, config: &Value) -> Result<Option<Scheme>, Error> {
        const KEY: &str = "quantization_config";
        let text = config.get("text_config").unwrap_or(&Value::Null);
        let places = [(config, KEY, ""), (text, KEY, "text_config."), (config, "compression_config", "")];
        let found = places.into_iter().find_map(|(object, key, prefix)| {
            let object = object.get(key).filter(|value| !value.is_null())?;
            Some(Settings { path, prefix: format!("{prefix}{key}"), object })
        });
        let Some(settings) = found else { return Ok(None) };
        const METHODS: &str = "awq, compressed-tensors, fp8, gptq or mxfp4";
        let method = settings.opt_str("quant_method")?;
        match method.ok_or_else(|| settings.missing("quant_method", METHODS))? {
            "gptq" => gptq(&settings),
            "awq" => awq(&settings),
            "fp8" => fp8(&settings),
            "compressed-tensors" => compressed_tensors(&settings),
            "mxfp4" => Ok(Scheme::Mxfp4),
            other => Err(settings.bad("quant_method", METHODS, &Value::from(other))),
        }
        .map(Some)
    }
}

fn gptq(settings: &Settings<'_>) -> Result<Scheme, Error> {
    const BITS: &str = "4 or 8";
    let bits = match settings.int(&["bits"], BITS)? {
        bits @ (4 | 8) => bits as u32,
        other => return Err(settings.bad("bits", BITS, &Value::from(other))),
    };
    settings.must_be_empty("is_marlin_format", "false: the layout of Marlin is not supported")?;
    settings.must_be_empty("dynamic", "no settings for single modules")?;
    settings.one_of("pack_dtype", &["int32"], "int32")?;
    let zeros_minus_one = match settings.opt_str("checkpoint_format")? {
        None | Some("gptq") => true,
        Some("gptq_v2") => false,
        Some(other) => return Err(settings.bad("checkpoint_format", "gptq or gptq_v2", &Value::from(other))),
    };
    Ok(Scheme::Gptq {
        bits,
        group_size: settings.group_size(&["group_size"])?,
        desc_act: settings.opt_bool("desc_act")?.unwrap_or(false),
        zeros_minus_one,
    })
}

fn awq(settings: &Settings<'_>) -> Result<Scheme, Error> {
    let bits = settings.int(&["bits", "w_bit"], "4")?;
    if bits != 4 {
        return Err(settings.bad("bits", "4", &Value::from(bits)));
    }
    settings.one_of("version", &["gemm", "GEMM"], "gemm")?;
    if settings.opt_bool("zero_point")? == Some(false) {
        return Err(settings.bad("zero_point", "true", &Value::Bool(false)));
    }
    Ok(Scheme::Awq { group_size: settings.group_size(&["group_size", "q_group_size"])? })
}

fn fp8(settings: &Settings<'_>) -> Result<Scheme, Error> {
    settings.one_of("fmt", &["e4m3", "float8_e4m3fn"], "e4m3")?;
    settings.one_of("activation_scheme", &["dynamic", "static"], "dynamic or static")?;
    Ok(Scheme::Fp8 { block: settings.block("weight_block_size")? })
}

/// Reads the settings of the only group of modules, or of several that have the same.
fn compressed_tensors(settings: &Settings<'_>) -> Result<Scheme, Error> {
    const STATUS: &str = "compressed: other folders hold weights that are not quantized yet";
    settings.one_of("quantization_status", &["compressed"], STATUS)?;
    settings.must_be_empty("transform_config", "no transforms of weights or activations")?;
    if settings.get("sparsity_config").is_some_and(|config| config.get("format").is_some()) {
        settings.object("sparsity_config")?.one_of("format", &["dense"], "dense: sparse weights are not supported")?;
    }
    let groups = settings.object("config_groups")?;
    let mut all: Option<CompressedWeights> = None;
    for name in groups.object.as_object().into_iter().flatten().map(|(name, _)| name) {
        let weights = weights_of_group(settings, &groups.object(name)?)?;
        if all.is_some_and(|first| first != weights) {
            const EXPECTED: &str = "the settings for weights of the other groups; mixed formats are not supported";
            return Err(groups.bad(name, EXPECTED, &groups.object[name]));
        }
        all = Some(weights);
    }
    let weights = all.ok_or_else(|| settings.missing("config_groups", "one group or more"))?;
    Ok(Scheme::CompressedTensors(weights))
}

fn weights_of_group(config: &Settings<'_>, group: &Settings<'_>) -> Result<CompressedWeights, Error> {
    const FORMATS: &str = "pack-quantized, int-quantized, float-quantized or naive-quantized";
    const STRATEGIES: &str = "tensor, channel, group or block";
    let weights = group.object("weights")?;
    let holder = if group.get("format").is_some() { group } else { config };
    let format = holder.opt_str("format")?.ok_or_else(|| config.missing("format", FORMATS))?;
    if !["pack-quantized", "int-quantized", "float-quantized", "naive-quantized"].contains(&format) {
        return Err(holder.bad("format", FORMATS, &Value::from(format)));
    }
    let is_packed = format == "pack-quantized";
    let is_float = match weights.opt_str("type")? {
        None | Some("int") => false,
        Some("float") if !is_packed => true,
        Some(other) => return Err(weights.bad("type", "int, or float in float-quantized", &Value::from(other))),
    };
    let expected_bits = if is_packed { "4 or 8" } else { "8" };
    let bits = match weights.int(&["num_bits"], expected_bits)? {
        8 => 8,
        4 if is_packed => 4,
        other => return Err(weights.bad("num_bits", expected_bits, &Value::from(other))),
    };
    if weights.opt_bool("dynamic")? == Some(true) {
        return Err(weights.bad("dynamic", "false: weights have stored scales", &Value::Bool(true)));
    }
    let group_size = || weights.group_size(&["group_size"])?.ok_or_else(|| weights.missing("group_size", "a number"));
    let scales = match weights.opt_str("strategy")? {
        Some("tensor") => ScaleStrategy::Tensor,
        Some("channel") => ScaleStrategy::Channel,
        Some("group") => ScaleStrategy::Group(group_size()?),
        Some("block") => {
            let block = weights.block("block_structure")?;
            ScaleStrategy::Block(block.ok_or_else(|| weights.missing("block_structure", "two numbers"))?)
        }
        // The default depends on the size of the groups.
        None if weights.get("group_size").is_some() => match weights.group_size(&["group_size"])? {
            Some(size) => ScaleStrategy::Group(size),
            None => ScaleStrategy::Channel,
        },
        None => ScaleStrategy::Tensor,
        Some(other) => return Err(weights.bad("strategy", STRATEGIES, &Value::from(other))),
    };
    let symmetric = weights.opt_bool("symmetric")?.unwrap_or(true);
    Ok(CompressedWeights { bits, is_float, is_packed, symmetric, scales })
}
