//! Finds the tensors of a decoder in a checkpoint, by the names that this kind of file uses.
//!
//! It records which tensors were used. A tensor that the decoder does not use is an error: the model probably computes
//! something that is not implemented, and would silently give wrong logits. The loader and the GGUF export use this.

use std::collections::HashSet;

use pellucid_checkpoint::{Checkpoint, TensorView};
use pellucid_tensor::{DType, SharedBytes};

use crate::Error;
use crate::architectures::Blueprint;

pub(crate) struct TensorFinder<'a> {
    checkpoint: &'a Checkpoint,
    blueprint: &'a Blueprint,
    prefix: &'static str,
    used: HashSet<String>,
}

/// Names of tensors that the decoder does not use.
pub(crate) struct LeftOut {
    /// Tensors of layers that predict further tokens.
    pub(crate) predicting: Vec<String>,
    /// Everything else that is known to be no part of the decoder.
    pub(crate) others: Vec<String>,
}

/// The path of a module in a file, such as `layers.3.mlp.up_proj`: the template of its name, the layer and, for
/// experts, the expert.
#[derive(Clone, Copy)]
pub(crate) struct ModulePath {
    pub(crate) template: &'static str,
    pub(crate) layer: usize,
    pub(crate) expert: Option<usize>,
}

impl ModulePath {
    pub(crate) fn new(template: &'static str, layer: usize) -> ModulePath {
        ModulePath { template, layer, expert: None }
    }

    /// Returns the name of one of its tensors, without the file's prefix. `ending` is `weight`, `bias` or
    /// empty.
    pub(crate) fn name(self, ending: &str) -> String {
        let name = self.template.replace("{}", &self.layer.to_string());
        let name = match self.expert {
            Some(expert) => name.replace("{expert}", &expert.to_string()),
            None => name,
        };
        if ending.is_empty() { name } else { format!("{name}.{ending}") }
    }
}

impl<'a> TensorFinder<'a> {
    pub(crate) fn new(checkpoint: &'a Checkpoint, blueprint: &'a Blueprint) -> TensorFinder<'a> {
        let names = &blueprint.names;
        let embedding = ModulePath::new(names.token_embedding, 0).name("weight");
        let found = |prefix: &&&str| checkpoint.find_tensor(&format!("{prefix}{embedding}")).is_some();
        let prefix = names.prefixes.iter().find(found).copied().unwrap_or(names.prefixes[0]);
        TensorFinder { checkpoint, blueprint, prefix, used: HashSet::new() }
    }

    pub(crate) fn name(&self, path: ModulePath, ending: &str) -> String {
        let Blueprint { names, config, .. } = self.blueprint;
        if path.layer == config.num_layers() && !names.predictor_prefix.is_empty() {
            let first = ModulePath { layer: 0, ..path };
            return format!("{}{}", names.predictor_prefix, first.name(ending));
        }
        format!("{}{}", self.prefix, path.name(ending))
    }

    /// Returns the name of the output projection, which has no prefix; `None` if the embedding table takes its place. A
    /// model that is not tied must have it: with the table in its place, the logits would be silently wrong.
    pub(crate) fn output(&mut self) -> Option<String> {
        let name = ModulePath::new(self.blueprint.names.output, 0).name("weight");
        self.used.insert(name.clone());
        (!self.blueprint.tied).then_some(name)
    }

    /// Returns the name of a module's tensor, with the ending `weight` or without one.
    pub(crate) fn weight_or_bare(&self, path: ModulePath) -> String {
        let bare = self.name(path, "");
        if self.has(&bare) { bare } else { self.name(path, "weight") }
    }

    pub(crate) fn exists(&self, path: ModulePath) -> bool {
        !path.template.is_empty() && self.has(&self.name(path, "weight"))
    }

    pub(crate) fn has(&self, name: &str) -> bool {
        self.checkpoint.find_tensor(name).is_some()
    }

    /// Counts the tensors of a module as used. The file may have them although the arithmetic does not need them.
    pub(crate) fn skip(&mut self, path: ModulePath) {
        self.used.extend(["weight", "bias"].map(|ending| self.name(path, ending)));
    }

    pub(crate) fn find(&mut self, name: &str) -> Result<TensorView<'a>, Error> {
        let tensor = self.checkpoint.tensor(name)?;
        self.used.insert(name.to_owned());
        Ok(tensor)
    }

    /// Finds a tensor and checks its shape.
    pub(crate) fn shaped(&mut self, name: &str, shape: &[usize]) -> Result<TensorView<'a>, Error> {
        let tensor = self.find(name)?;
        if tensor.info.shape == shape {
            return Ok(tensor);
        }
        Err(Error::BadShape { name: name.to_owned(), expected: shape.to_vec(), found: tensor.info.shape.clone() })
    }

    /// Finds a tensor of `len` values, whatever their division into rows.
    pub(crate) fn flat(&mut self, name: &str, len: usize) -> Result<TensorView<'a>, Error> {
        let tensor = self.find(name)?;
        if tensor.info.num_elements() == len {
            return Ok(tensor);
        }
        Err(Error::BadShape { name: name.to_owned(), expected: vec![len], found: tensor.info.shape.clone() })
    }

    /// Finds the weights of a convolution, `[channels][taps]`. Hugging Face files have an axis of length 1 in the
    /// middle.
    pub(crate) fn taps(&mut self, path: ModulePath, channels: usize, taps: usize) -> Result<TensorView<'a>, Error> {
        let name = self.name(path, "weight");
        let has_three_axes = self.find(&name)?.info.shape.len() == 3;
        if has_three_axes { self.shaped(&name, &[channels, 1, taps]) } else { self.shaped(&name, &[channels, taps]) }
    }

    /// Finds a matrix that the file stores as `[in][out]`, for [`transpose`]. It must be unquantized.
    pub(crate) fn transposed(&mut self, name: &str, rows: usize, cols: usize) -> Result<TensorView<'a>, Error> {
        let tensor = self.shaped(name, &[cols, rows])?;
        if tensor.info.dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "an unquantized format, because the matrix is transposed".into(),
                found: tensor.info.dtype.to_string(),
            });
        }
        Ok(tensor)
    }

    /// Returns the number of rows of a table of learned positions. It must have one for each position of the context.
    pub(crate) fn num_positions(&mut self, name: &str) -> Result<usize, Error> {
        let (rows, hidden) =
            (self.find(name)?.info.shape.first().copied().unwrap_or(0), self.blueprint.config.hidden_size);
        let context_len = self.blueprint.config.context_len;
        if rows < context_len {
            let (expected, found) = (vec![context_len, hidden], vec![rows, hidden]);
            return Err(Error::BadShape { name: name.to_owned(), expected, found });
        }
        Ok(rows)
    }

    /// Refuses unused tensors. Returns the names of those that are known to be no part of the decoder.
    pub(crate) fn finish(self) -> Result<LeftOut, Error> {
        let Blueprint { names, config, .. } = self.blueprint;
        // Layers after the last, which predict further tokens.
        let layer = |index: usize| format!("{}{}", self.prefix, names.query.replace("{}", &index.to_string()));
        let extra: Vec<String> = (config.num_layers()..config.num_layers() + self.blueprint.num_extra_layers)
            .map(|index| layer(index).split_inclusive(&format!(".{index}.")).next().unwrap_or_default().to_owned())
            .collect();
        let predicts = |name: &&str| {
            names.predicting.iter().any(|part| name.contains(part)) || extra.iter().any(|layer| name.starts_with(layer))
        };
        let ignored = |name: &&str| names.ignored.iter().any(|part| name.contains(part));
        let all = self.checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
        let (predicting, others): (Vec<&str>, Vec<&str>) =
            all.filter(|name| !self.used.contains(*name)).partition(predicts);
        let (others, unused): (Vec<&str>, Vec<&str>) = others.into_iter().partition(ignored);
        let owned = |names: Vec<&str>| names.into_iter().map(str::to_owned).collect();
        match unused.first() {
            None => Ok(LeftOut { predicting: owned(predicting), others: owned(others) }),
            Some(&example) => Err(Error::UnusedTensors {
                architecture: config.architecture.clone(),
                count: unused.len(),
                example: example.into(),
            }),
        }
    }
}

/// Transposes an unquantized matrix of `[cols][rows]` to `[rows][cols]`.
pub(crate) fn transpose(bytes: &[u8], dtype: DType, rows: usize, cols: usize) -> SharedBytes {
    let size = dtype.block_bytes();
    let mut transposed = vec![0; bytes.len()];
    for (i, value) in bytes.chunks_exact(size).enumerate() {
        let (col, row) = (i / rows, i % rows);
        let target = (row * cols + col) * size;
        transposed[target..target + size].copy_from_slice(value);
    }
    transposed.into()
}
