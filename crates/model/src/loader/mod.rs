//! Loads the weights of a checkpoint onto a device: finds each tensor by its name, checks its shape, splits fused
//! tensors.

pub(crate) mod experts;
pub(crate) mod tensor_finder;
pub(crate) mod tensor_names;

use std::ops::Range;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, DType, GatedMlp, HostWeight, Linear, SharedBytes, Tensor, quant};

use crate::architectures::Blueprint;
use crate::config::{Experts, MlpKind, NormKind, Positions};
use crate::weights::{AttentionWeights, LayerWeights, MlpWeights, Norm, Weights};
use crate::{Error, sinusoidal};

use experts::{ExpertMatrix, ExpertStack};
use tensor_finder::{ModulePath, TensorFinder, transpose};

pub(crate) struct Loader<'a> {
    finder: TensorFinder<'a>,
    backend: &'a dyn Backend,
    blueprint: &'a Blueprint,
}

pub(crate) fn load(
    checkpoint: &Checkpoint,
    backend: &dyn Backend,
    blueprint: &Blueprint,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Weights, Error> {
    let mut loader = Loader { finder: TensorFinder::new(checkpoint, blueprint), backend, blueprint };
    let weights = loader.weights(progress)?;
    loader.finder.finish()?;
    Ok(weights)
}

impl Loader<'_> {
    fn weights(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Weights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = self.finder.name(ModulePath::new(names.token_embedding, 0), "weight");
        let embedding = self.host(&embedding, vocab, hidden)?;
        let output = match self.finder.output() {
            Some(name) => self.host(&name, vocab, hidden)?,
            None => embedding.clone(),
        };
        let positions = match config.positions {
            Positions::Rope { .. } => None,
            Positions::Learned => {
                let name = self.finder.name(ModulePath::new(names.position_embedding, 0), "weight");
                let rows = self.finder.num_positions(&name)?;
                Some(self.host(&name, rows, hidden)?)
            }
            Positions::Sinusoidal => Some(sinusoidal::table(config.context_len, hidden)?),
        };
        // Every layer is one part, and the embedding and output together are one more.
        let num_parts = config.num_layers() + 1;
        let layers = (0..config.num_layers())
            .map(|layer| {
                let weights = self.layer(layer);
                progress(layer + 1, num_parts);
                weights
            })
            .collect::<Result<_, Error>>()?;
        let weights = Weights {
            embedding: self.backend.weight(embedding)?,
            positions: positions.map(|table| self.backend.weight(table)).transpose()?,
            layers,
            final_norm: self.scaled_norm(ModulePath::new(names.final_norm, 0), hidden, 1.0 / config.logits_divisor)?,
            output: Linear { weight: self.backend.few_rows_weight(output)?, bias: None },
        };
        progress(num_parts, num_parts);
        Ok(weights)
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        Ok(LayerWeights {
            attention_norm: self.norm_if(config.input_norms.then_some(hidden), names.attention_norm, layer)?,
            attention: self.attention(layer)?,
            attention_output_norm: self.norm_if(
                config.output_norms.then_some(hidden),
                names.attention_output_norm,
                layer,
            )?,
            mlp_norm: self.norm_if(config.input_norms.then_some(hidden), names.mlp_norm, layer)?,
            mlp: self.mlp(layer)?,
            mlp_output_norm: self.norm_if(config.output_norms.then_some(hidden), names.mlp_output_norm, layer)?,
        })
    }

    fn attention(&mut self, layer: usize) -> Result<AttentionWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, queries, keys) = (config.hidden_size, config.query_size(), config.key_size());
        let norms = config.qk_norm_sizes();
        let fused = ModulePath::new(names.fused_qkv, layer);
        let [query, key, value] = if self.finder.exists(fused) {
            self.fused(fused, [queries, keys, keys], hidden)?
        } else {
            [
                self.linear(ModulePath::new(names.query, layer), queries, hidden)?,
                self.linear(ModulePath::new(names.key, layer), keys, hidden)?,
                self.linear(ModulePath::new(names.value, layer), keys, hidden)?,
            ]
        };
        Ok(AttentionWeights {
            query,
            key,
            value,
            output: self.linear(ModulePath::new(names.attention_output, layer), hidden, queries)?,
            query_norm: self.norm_if(norms.map(|norms| norms.0), names.query_norm, layer)?,
            key_norm: self.norm_if(norms.map(|norms| norms.1), names.key_norm, layer)?,
            sinks: self.sinks(layer)?,
        })
    }

    fn sinks(&mut self, layer: usize) -> Result<Option<Tensor>, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        if !config.attention_sinks {
            return Ok(None);
        }
        let name = self.finder.weight_or_bare(ModulePath::new(names.sinks, layer));
        let scores = self.floats(&name, config.num_heads)?;
        Ok(Some(self.vector(&scores)?))
    }

    fn mlp(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, size) = (config.hidden_size, config.mlp_size);
        if config.layers[layer].experts {
            return self.experts(layer);
        }
        let down = self.linear(ModulePath::new(names.down, layer), hidden, size)?;
        if config.mlp == MlpKind::Plain {
            return Ok(MlpWeights::Plain { up: self.linear(ModulePath::new(names.up, layer), size, hidden)?, down });
        }
        let fused = ModulePath::new(names.fused_gate_up, layer);
        let [gate, up] = if self.finder.exists(fused) {
            self.fused(fused, [size, size], hidden)?
        } else {
            [
                self.linear(ModulePath::new(names.gate, layer), size, hidden)?,
                self.linear(ModulePath::new(names.up, layer), size, hidden)?,
            ]
        };
        Ok(MlpWeights::Gated(GatedMlp { gate, up, down }))
    }

    fn experts(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let Experts { num_experts, shared_mlp_size, score_bias, .. } =
            config.experts.expect("checked with the configuration");
        let router = self.linear(ModulePath::new(names.router, layer), num_experts, config.hidden_size)?;
        let score_bias = if score_bias {
            let name = self.finder.name(ModulePath::new(names.score_bias, layer), "");
            let bias = self.floats(&name, num_experts)?;
            Some(self.vector(&bias)?)
        } else {
            None
        };
        let mut matrix = |matrix: ExpertMatrix| self.expert_matrices(matrix, layer);
        let gates = matrix(ExpertMatrix::Gate)?;
        let (ups, downs) = (matrix(ExpertMatrix::Up)?, matrix(ExpertMatrix::Down)?);
        let experts = gates.into_iter().zip(ups).zip(downs);
        let experts = experts.map(|((gate, up), down)| GatedMlp { gate, up, down }).collect();
        let shared = shared_mlp_size.map(|size| self.shared_expert(layer, size)).transpose()?;
        Ok(MlpWeights::Experts { router, score_bias, experts, shared })
    }

    /// Loads one of the matrices of every expert: its own tensor, or a part of a tensor for all experts.
    fn expert_matrices(&mut self, matrix: ExpertMatrix, layer: usize) -> Result<Vec<Linear>, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let Experts { num_experts, mlp_size, .. } = config.experts.expect("checked with the configuration");
        if let Some(stack) = ExpertStack::find(&mut self.finder, self.blueprint, matrix, layer)? {
            let tensor = self.finder.find(&stack.name)?;
            let biases = stack.biases(&mut self.finder, num_experts)?;
            let linear = |expert: usize| {
                let (dtype, rows, cols) = (stack.dtype, stack.rows, stack.cols);
                let bytes = stack.matrix(&tensor.bytes, expert);
                let weight = self.backend.few_rows_weight(HostWeight { dtype, rows, cols, bytes })?;
                let bias = biases.as_ref().map(|biases| self.vector(&biases[expert])).transpose()?;
                Ok(Linear { weight, bias })
            };
            return (0..num_experts).map(linear).collect();
        }
        let (template, rows, cols) = match matrix {
            ExpertMatrix::Gate => (names.expert_gate, mlp_size, config.hidden_size),
            ExpertMatrix::Up => (names.expert_up, mlp_size, config.hidden_size),
            ExpertMatrix::Down => (names.expert_down, config.hidden_size, mlp_size),
        };
        let path = |expert: usize| ModulePath { template, layer, expert: Some(expert) };
        (0..num_experts).map(|expert| self.linear(path(expert), rows, cols)).collect()
    }

    /// Loads the expert that every token uses.
    fn shared_expert(&mut self, layer: usize, size: usize) -> Result<GatedMlp, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        let fused = ModulePath::new(names.fused_shared_gate_up, layer);
        let [gate, up] = if self.finder.exists(fused) {
            self.fused(fused, [size, size], hidden)?
        } else {
            [
                self.linear(ModulePath::new(names.shared_gate, layer), size, hidden)?,
                self.linear(ModulePath::new(names.shared_up, layer), size, hidden)?,
            ]
        };
        Ok(GatedMlp { gate, up, down: self.linear(ModulePath::new(names.shared_down, layer), hidden, size)? })
    }

    /// Loads a matrix, and its bias if the file has one.
    fn linear(&mut self, path: ModulePath, rows: usize, cols: usize) -> Result<Linear, Error> {
        let [linear] = self.fused(path, [rows], cols)?;
        Ok(linear)
    }

    /// Loads a matrix that stacks several along the rows, and splits it and its bias.
    fn fused<const N: usize>(&mut self, path: ModulePath, rows: [usize; N], cols: usize) -> Result<[Linear; N], Error> {
        let total = rows.iter().sum();
        let name = self.finder.name(path, "weight");
        let weight = if self.blueprint.transposed {
            self.transposed(&name, total, cols)?
        } else {
            self.host(&name, total, cols)?
        };
        let bias = self.finder.name(path, "bias");
        let bias = if self.finder.has(&bias) { Some(self.floats(&bias, total)?) } else { None };
        let mut start = 0;
        let mut parts = Vec::with_capacity(N);
        for rows in rows {
            let range = start..start + rows;
            start = range.end;
            let bytes = slice_rows(&weight.bytes, weight.dtype, range.clone(), cols).expect("the shape was checked");
            let bias = bias.as_ref().map(|bias| self.vector(&bias[range])).transpose()?;
            let weight = HostWeight { dtype: weight.dtype, rows, cols, bytes };
            let weight = match path.expert {
                Some(_) => self.backend.few_rows_weight(weight)?,
                None => self.backend.linear_weight(weight)?,
            };
            parts.push(Linear { weight, bias });
        }
        Ok(parts.try_into().expect("one part for each range"))
    }

    /// Loads a norm of a layer, if the family has it.
    fn norm_if(&mut self, len: Option<usize>, template: &'static str, layer: usize) -> Result<Option<Norm>, Error> {
        len.map(|len| self.norm(ModulePath::new(template, layer), len)).transpose()
    }

    fn norm(&mut self, path: ModulePath, len: usize) -> Result<Norm, Error> {
        self.scaled_norm(path, len, 1.0)
    }

    /// Loads a norm whose result is multiplied by `factor`.
    fn scaled_norm(&mut self, path: ModulePath, len: usize, factor: f32) -> Result<Norm, Error> {
        let mut weight = self.floats(&self.finder.name(path, "weight"), len)?;
        if self.blueprint.norms_minus_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        weight.iter_mut().for_each(|weight| *weight *= factor);
        let bias = match self.blueprint.config.norm {
            NormKind::Rms => None,
            NormKind::Layer => {
                let mut bias = self.floats(&self.finder.name(path, "bias"), len)?;
                bias.iter_mut().for_each(|bias| *bias *= factor);
                Some(self.vector(&bias)?)
            }
        };
        Ok(Norm { weight: self.vector(&weight)?, bias })
    }

    /// Returns a matrix as it is stored in the file.
    fn host(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostWeight, Error> {
        let tensor = self.finder.shaped(name, &[rows, cols])?;
        Ok(HostWeight { dtype: tensor.info.dtype, rows, cols, bytes: tensor.bytes })
    }

    /// Returns a matrix that the file stores as `[in][out]` as `[out][in]`.
    fn transposed(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostWeight, Error> {
        let tensor = self.finder.transposed(name, rows, cols)?;
        let dtype = tensor.info.dtype;
        Ok(HostWeight { dtype, rows, cols, bytes: transpose(&tensor.bytes, dtype, rows, cols) })
    }

    /// Returns a vector as f32.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.finder.shaped(name, &[len])?;
        let mut values = vec![0.0; len];
        quant::decode(tensor.info.dtype, &tensor.bytes, &mut values);
        Ok(values)
    }

    fn vector(&self, values: &[f32]) -> Result<Tensor, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let weight = HostWeight { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytes.into() };
        Ok(self.backend.weight(weight)?)
    }
}

fn slice_rows(bytes: &SharedBytes, dtype: DType, rows: Range<usize>, cols: usize) -> Option<SharedBytes> {
    let row = dtype.bytes_for(cols)?;
    bytes.slice(rows.start * row..rows.end * row)
}
