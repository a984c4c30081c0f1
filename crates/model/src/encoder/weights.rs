//! Loads the weights of an encoder: finds each tensor by its name, checks its shape, splits fused tensors.

use std::collections::HashSet;

use pellucid_checkpoint::{Checkpoint, TensorView};
use pellucid_tensor::{Backend, DType, GatedMlp, HostWeight, Linear, Tensor, quant};

use super::config::{ClassifierConfig, EncoderConfig, EncoderPositions, NormPlacement};
use super::families::EncoderBlueprint;
use super::head::{HostLinear, ScoreHead};
use crate::Error;
use crate::config::MlpKind;

/// All weights of an encoder. They never change after loading.
#[derive(Debug)]
pub(super) struct EncoderWeights {
    pub(super) tokens: Tensor,
    pub(super) positions: Option<Tensor>,
    pub(super) types: Option<Tensor>,
    pub(super) embedding_norm: LayerNorm,
    pub(super) layers: Vec<EncoderLayerWeights>,
    pub(super) final_norm: Option<LayerNorm>,
    pub(super) head: Option<ScoreHead>,
}

#[derive(Debug)]
pub(super) struct EncoderLayerWeights {
    pub(super) query: Linear,
    pub(super) key: Linear,
    pub(super) value: Linear,
    pub(super) output: Linear,
    /// Before or after attention; `None` for the first layer of models whose embedding is normalised already.
    pub(super) attention_norm: Option<LayerNorm>,
    pub(super) mlp: EncoderMlp,
    pub(super) mlp_norm: LayerNorm,
}

#[derive(Debug)]
pub(super) enum EncoderMlp {
    Gated(GatedMlp),
    Plain { up: Linear, down: Linear },
}

#[derive(Debug)]
pub(super) struct LayerNorm {
    pub(super) weight: Tensor,
    /// Zeros if the file has none.
    pub(super) bias: Tensor,
}

pub(super) fn load(
    checkpoint: &Checkpoint,
    backend: &dyn Backend,
    blueprint: &EncoderBlueprint,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<EncoderWeights, Error> {
    let mut loader = WeightLoader { checkpoint, backend, blueprint, used: HashSet::new() };
    let weights = loader.weights(progress)?;
    loader.refuse_unused()?;
    Ok(weights)
}

struct WeightLoader<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a dyn Backend,
    blueprint: &'a EncoderBlueprint,
    used: HashSet<String>,
}

impl<'a> WeightLoader<'a> {
    fn weights(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<EncoderWeights, Error> {
        let EncoderBlueprint { config, names, .. } = self.blueprint;
        let (hidden, num_layers) = (config.hidden_size, config.layers.len());
        let positions = match config.positions {
            EncoderPositions::Rope(_) => None,
            EncoderPositions::Learned => Some(self.positions(names.position_embedding)?),
        };
        let types = match config.num_types {
            0 => None,
            num_types => Some(self.table(names.type_embedding, num_types)?),
        };
        let final_norm = match config.norm_placement {
            NormPlacement::After => None,
            NormPlacement::Before => Some(self.norm(names.final_norm)?),
        };
        let layers = (0..num_layers)
            .map(|layer| {
                let weights = self.layer(layer);
                progress(layer + 1, num_layers + 1);
                weights
            })
            .collect::<Result<_, Error>>()?;
        let weights = EncoderWeights {
            tokens: self.table(names.token_embedding, config.vocab_size)?,
            positions,
            types,
            embedding_norm: self.norm(names.embedding_norm)?,
            layers,
            final_norm,
            head: config.classifier.map(|classifier| self.head(classifier)).transpose()?,
        };
        debug_assert_eq!(weights.tokens.cols(), hidden);
        progress(num_layers + 1, num_layers + 1);
        Ok(weights)
    }

    fn layer(&mut self, layer: usize) -> Result<EncoderLayerWeights, Error> {
        let EncoderBlueprint { config, names, .. } = self.blueprint;
        let (hidden, size) = (config.hidden_size, config.mlp_size);
        let name = |template: &str| template.replace("{}", &layer.to_string());
        let fused = name(names.fused_qkv);
        let [query, key, value] = if self.has(&fused) {
            self.linears(&fused, [hidden; 3], hidden)?
        } else {
            let mut one = |template| self.linear(&name(template), hidden, hidden);
            [one(names.query)?, one(names.key)?, one(names.value)?]
        };
        let mlp = match config.mlp {
            MlpKind::Plain => EncoderMlp::Plain {
                up: self.linear(&name(names.up), size, hidden)?,
                down: self.linear(&name(names.down), hidden, size)?,
            },
            MlpKind::Gated => {
                let [gate, up] = if names.fused_gate_up.is_empty() {
                    [self.linear(&name(names.gate), size, hidden)?, self.linear(&name(names.up), size, hidden)?]
                } else {
                    self.linears(&name(names.fused_gate_up), [size; 2], hidden)?
                };
                EncoderMlp::Gated(GatedMlp { gate, up, down: self.linear(&name(names.down), hidden, size)? })
            }
        };
        let norm = name(names.attention_norm);
        // Only a first layer without a norm has the same input with and without it: the normalised embedding.
        let is_absent = layer == 0 && config.norm_placement == NormPlacement::Before && !self.has(&norm);
        Ok(EncoderLayerWeights {
            query,
            key,
            value,
            output: self.linear(&name(names.attention_output), hidden, hidden)?,
            attention_norm: if is_absent { None } else { Some(self.norm(&norm)?) },
            mlp,
            mlp_norm: self.norm(&name(names.mlp_norm))?,
        })
    }

    /// Loads a classifier, whose names have no prefix in some folders.
    fn head(&mut self, config: ClassifierConfig) -> Result<ScoreHead, Error> {
        let EncoderBlueprint { config: EncoderConfig { hidden_size, norm_eps, .. }, names, .. } = self.blueprint;
        let norm = match names.head_norm {
            "" => None,
            name => {
                let name = self.name_of_head(name);
                let weight = self.floats(&format!("{name}.weight"), *hidden_size)?;
                Some((weight, self.bias_or_zeros(&format!("{name}.bias"), *hidden_size)?, *norm_eps))
            }
        };
        let dense = self.host_linear(names.head_dense, *hidden_size)?;
        // More than one label would not be a score.
        Ok(ScoreHead { config, dense, norm, classifier: self.host_linear(names.classifier, 1)? })
    }

    fn name_of_head(&self, name: &str) -> String {
        let own = format!("{}{name}", self.blueprint.prefix);
        if self.checkpoint.find_tensor(&format!("{own}.weight")).is_some() { own } else { name.to_owned() }
    }

    fn host_linear(&mut self, name: &str, rows: usize) -> Result<HostLinear, Error> {
        let cols = self.blueprint.config.hidden_size;
        let name = self.name_of_head(name);
        let tensor = self.shaped(&format!("{name}.weight"), &[rows, cols])?;
        let mut weight = vec![0.0; rows * cols];
        quant::decode(tensor.info.dtype, &tensor.bytes(), &mut weight);
        Ok(HostLinear { weight, bias: self.bias_or_zeros(&format!("{name}.bias"), rows)? })
    }

    fn bias_or_zeros(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        match self.checkpoint.find_tensor(name) {
            Some(_) => self.floats(name, len),
            None => Ok(vec![0.0; len]),
        }
    }

    fn full_name(&self, name: &str, ending: &str) -> String {
        format!("{}{name}.{ending}", self.blueprint.prefix)
    }

    fn has(&self, name: &str) -> bool {
        !name.is_empty() && self.checkpoint.find_tensor(&self.full_name(name, "weight")).is_some()
    }

    fn shaped(&mut self, name: &str, shape: &[usize]) -> Result<TensorView<'a>, Error> {
        let tensor = self.checkpoint.tensor(name)?;
        self.used.insert(name.to_owned());
        if tensor.info.shape == shape {
            return Ok(tensor);
        }
        Err(Error::BadShape { name: name.to_owned(), expected: shape.to_vec(), found: tensor.info.shape.clone() })
    }

    /// Loads a table of embeddings.
    fn table(&mut self, name: &str, rows: usize) -> Result<Tensor, Error> {
        let cols = self.blueprint.config.hidden_size;
        let tensor = self.shaped(&self.full_name(name, "weight"), &[rows, cols])?;
        Ok(self.backend.weight(HostWeight { dtype: tensor.info.dtype, rows, cols, bytes: tensor.bytes() })?)
    }

    /// Loads the table of learned positions, which must have a row for each position.
    fn positions(&mut self, name: &str) -> Result<Tensor, Error> {
        let EncoderConfig { context_len, hidden_size, .. } = self.blueprint.config;
        let name_in_file = self.full_name(name, "weight");
        let rows = self.checkpoint.tensor(&name_in_file)?.info.shape.first().copied().unwrap_or(0);
        if rows < context_len {
            let (expected, found) = (vec![context_len, hidden_size], vec![rows, hidden_size]);
            return Err(Error::BadShape { name: name_in_file, expected, found });
        }
        self.table(name, rows)
    }

    /// Loads a matrix, and its bias if the file has one.
    fn linear(&mut self, name: &str, rows: usize, cols: usize) -> Result<Linear, Error> {
        let [linear] = self.linears(name, [rows], cols)?;
        Ok(linear)
    }

    /// Loads a matrix that stacks several along the rows, and splits it and its bias.
    fn linears<const N: usize>(&mut self, name: &str, rows: [usize; N], cols: usize) -> Result<[Linear; N], Error> {
        let total: usize = rows.iter().sum();
        let tensor = self.shaped(&self.full_name(name, "weight"), &[total, cols])?;
        let dtype = tensor.info.dtype;
        let bias_name = self.full_name(name, "bias");
        let bias = match self.checkpoint.find_tensor(&bias_name) {
            Some(_) => Some(self.floats(&bias_name, total)?),
            None => None,
        };
        let bad_rows = || Error::BadShape { name: bias_name.clone(), expected: vec![total, cols], found: vec![cols] };
        let row_bytes = dtype.bytes_for(cols).ok_or_else(bad_rows)?;
        let whole = tensor.bytes();
        let mut parts = Vec::with_capacity(N);
        let mut start = 0;
        for rows in rows {
            let end = start + rows;
            let bytes = whole.slice(start * row_bytes..end * row_bytes).ok_or_else(bad_rows)?;
            let bias = bias.as_ref().map(|bias| self.vector(&bias[start..end])).transpose()?;
            parts.push(Linear { weight: self.backend.linear_weight(HostWeight { dtype, rows, cols, bytes })?, bias });
            start = end;
        }
        Ok(parts.try_into().expect("one part for each range"))
    }

    fn norm(&mut self, name: &str) -> Result<LayerNorm, Error> {
        let len = self.blueprint.config.hidden_size;
        let weight = self.floats(&self.full_name(name, "weight"), len)?;
        let bias = self.bias_or_zeros(&self.full_name(name, "bias"), len)?;
        Ok(LayerNorm { weight: self.vector(&weight)?, bias: self.vector(&bias)? })
    }

    /// Returns a vector as f32.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.shaped(name, &[len])?;
        let mut values = vec![0.0; len];
        quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
        Ok(values)
    }

    fn vector(&self, values: &[f32]) -> Result<Tensor, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let weight = HostWeight { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytes.into() };
        Ok(self.backend.weight(weight)?)
    }

    /// Refuses tensors that no part of the model uses: the vectors would silently be wrong.
    fn refuse_unused(self) -> Result<(), Error> {
        let EncoderBlueprint { config, names, prefix } = self.blueprint;
        let is_ignored = |name: &str| {
            let own = name.strip_prefix(prefix).unwrap_or(name);
            names.ignored.iter().any(|part| own.starts_with(part) || name.starts_with(part))
        };
        let all = self.checkpoint.tensors().iter().map(|tensor| tensor.name.as_str());
        let unused: Vec<&str> = all.filter(|name| !self.used.contains(*name) && !is_ignored(name)).collect();
        match unused.first() {
            None => Ok(()),
            Some(example) => Err(Error::UnusedTensors {
                architecture: config.architecture.clone(),
                count: unused.len(),
                example: (*example).into(),
            }),
        }
    }
}
