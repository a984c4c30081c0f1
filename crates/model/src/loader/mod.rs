//! Loads the weights of a checkpoint onto a device: finds each tensor by its name, checks its shape, splits fused
//! tensors.

pub(crate) mod delta_net;
mod dense_and_experts;
pub(crate) mod experts;
pub(crate) mod latent_attention;
mod layer_inputs;
pub(crate) mod mamba2;
mod predictor;
pub(crate) mod tensor_finder;
pub(crate) mod tensor_names;

use std::ops::Range;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, DType, GatedMlp, HostWeight, Linear, PlainMlp, Tensor, quant};

use crate::architectures::Blueprint;
use crate::config::{Experts, LayerConfig, Mixer, MlpKind, NormKind, Positions};
use crate::devices::DeviceIndex;
use crate::ranks::{Columns, Sharing, WeightRows};
use crate::weights::{
    AttentionWeights, DenseMlp, ExpertWeights, LayerWeights, MixerWeights, Mixture, MlpWeights, Norm, SharedExpert,
    ShortConvolutionWeights, Weights,
};
use crate::{Devices, Error, sinusoidal};

use delta_net::query_gate_rows;
use experts::{ExpertMatrix, ExpertStack};
use tensor_finder::{ModulePath, TensorFinder, transpose};

pub(crate) struct Loader<'a> {
    finder: TensorFinder<'a>,
    devices: &'a Devices,
    /// The device of the part that is loaded.
    backend: &'a dyn Backend,
    blueprint: &'a Blueprint,
    sharing: &'a Sharing,
}

/// Loads the rows of all weights that a rank has. Returns also the names of the tensors that predict further tokens,
/// which are not loaded.
pub(crate) fn load(
    checkpoint: &Checkpoint,
    devices: &Devices,
    blueprint: &Blueprint,
    sharing: &Sharing,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<(Weights, Vec<String>), Error> {
    let (finder, backend) = (TensorFinder::new(checkpoint, blueprint), &**devices.output());
    let mut loader = Loader { finder, devices, backend, blueprint, sharing };
    let weights = loader.weights(progress)?;
    let left_out = loader.finder.finish()?;
    Ok((weights, left_out.predicting))
}

impl Loader<'_> {
    /// Loads what follows onto a device.
    fn onto(&mut self, device: DeviceIndex) {
        self.backend = &*self.devices.backends()[device];
    }

    fn weights(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Weights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = self.finder.name(ModulePath::new(names.token_embedding, 0), "weight");
        let embedding = self.host(&embedding, vocab, hidden)?;
        let output = match self.finder.output() {
            Some(name) => self.host(&name, vocab, hidden)?,
            None => embedding.clone(),
        };
        let output = slice_rows(&output, &self.sharing.rows(Columns::Logits).own);
        let positions = match config.positions {
            Positions::Rope { .. } | Positions::None => None,
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
        self.onto(self.devices.of_embedding());
        let embedding = self.backend.weight(embedding)?;
        let positions = positions.map(|table| self.backend.weight(table)).transpose()?;
        let layer_inputs = config.layer_input_size.map(|size| self.layer_input_tables(size)).transpose()?;
        self.onto(self.devices.of_output());
        let weights = Weights {
            embedding,
            positions,
            layer_inputs,
            layers,
            final_norm: self.scaled_norm(ModulePath::new(names.final_norm, 0), hidden, 1.0 / config.logits_divisor)?,
            output: Linear { weight: self.backend.few_rows_weight(output)?, bias: None },
            predictor: config.predictor.is_some().then(|| self.predictor()).transpose()?,
        };
        progress(num_parts, num_parts);
        Ok(weights)
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let LayerConfig { mixer, has_mlp, .. } = config.layer(layer);
        let has_mixer = mixer != Mixer::None;
        let size_if = |has_norm: bool| has_norm.then_some(config.hidden_size);
        self.onto(self.devices.of_mixer(layer));
        let [before, after] = [has_mixer && config.input_norms, has_mixer && config.output_norms].map(size_if);
        let attention_norm = self.norm_if(before, names.attention_norm, layer)?;
        let attention_output_norm = self.norm_if(after, names.attention_output_norm, layer)?;
        let mixer = self.mixer(layer)?;
        self.onto(self.devices.of_mlp(layer));
        let [before, after] = [has_mlp && config.input_norms, has_mlp && config.output_norms].map(size_if);
        Ok(LayerWeights {
            attention_norm,
            attention_output_norm,
            mixer,
            mlp_norm: self.norm_if(before, names.mlp_norm, layer)?,
            mlp_output_norm: self.norm_if(after, names.mlp_output_norm, layer)?,
            mlp: has_mlp.then(|| self.mlp(layer)).transpose()?,
            input: config.layer_input_size.map(|size| self.layer_input(layer, size)).transpose()?,
            scale: config.layer_scales.then(|| self.layer_scale(layer)).transpose()?,
        })
    }

    fn mixer(&mut self, layer: usize) -> Result<Option<MixerWeights>, Error> {
        Ok(Some(match self.blueprint.config.layer(layer).mixer {
            Mixer::Attention if self.blueprint.config.latent_attention.is_some() => {
                MixerWeights::LatentAttention(Box::new(self.latent_attention(layer)?))
            }
            Mixer::Attention => MixerWeights::Attention(Box::new(self.attention(layer)?)),
            Mixer::ShortConvolution => MixerWeights::ShortConvolution(Box::new(self.short_convolution(layer)?)),
            Mixer::DeltaNet => MixerWeights::DeltaNet(Box::new(self.delta_net(layer)?)),
            Mixer::Mamba2 => MixerWeights::Mamba2(Box::new(self.mamba2(layer)?)),
            Mixer::None => return Ok(None),
        }))
    }

    fn short_convolution(&mut self, layer: usize) -> Result<ShortConvolutionWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let num_taps = config.short_convolution.expect("checked with the configuration").num_taps;
        let (hidden, sharing) = (config.hidden_size, self.sharing);
        let channels = sharing.rows(Columns::RecurrentOutput);
        let path = |template: &'static str| ModulePath::new(template, layer);
        let input = self.linear(path(names.convolution_input), sharing.rows(Columns::RecurrentInput), hidden)?;
        Ok(ShortConvolutionWeights {
            input,
            taps: self.taps(path(names.convolution), &channels, num_taps)?,
            bias: self.bias(path(names.convolution), &channels)?,
            output: self.linear(path(names.convolution_output), sharing.rows(Columns::Hidden), channels.total)?,
        })
    }

    /// Loads a module's bias, if the file has one.
    fn bias(&mut self, path: ModulePath, rows: &WeightRows) -> Result<Option<Tensor>, Error> {
        let name = self.finder.name(path, "bias");
        if !self.finder.has(&name) {
            return Ok(None);
        }
        let bias = self.floats(&name, rows.total)?;
        self.vector(&rows.select(&bias)).map(Some)
    }

    fn attention(&mut self, layer: usize) -> Result<AttentionWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, sharing) = (config.hidden_size, self.sharing);
        let queries = sharing.head_rows(config.key_heads(layer).head_size);
        let keys = sharing.rows(Columns::Keys(layer));
        let LayerConfig { kv_from, keys_as_values, .. } = config.layer(layer);
        let norms = config.qk_norm_sizes(layer);
        let key_norm = norms.map(|norms| norms.1).filter(|_| kv_from.is_none());
        let fused = ModulePath::new(names.fused_qkv, layer);
        let mut gate = None;
        let (query, key, value) = if self.finder.exists(fused) {
            let [query, key, value] = self.fused(fused, [queries, keys.clone(), keys], hidden)?;
            (query, Some(key), Some(value))
        } else {
            let (has_key, has_value) = (kv_from.is_none(), kv_from.is_none() && !keys_as_values);
            let path = ModulePath::new(names.query, layer);
            let query = if config.attention_gate {
                let (heads, size) = (config.num_heads, config.head_size);
                let all = || query_gate_rows(heads, size);
                let [query, of_output] = self.parts(path, [queries.clone(), queries], all, hidden)?;
                gate = Some(of_output);
                query
            } else {
                self.linear(path, queries, hidden)?
            };
            (
                query,
                self.linear_if(has_key.then(|| keys.clone()), names.key, layer)?,
                self.linear_if(has_value.then_some(keys), names.value, layer)?,
            )
        };
        if kv_from.is_some() {
            // Published files have these for the layers that read the keys and values of others.
            let unused = [names.key, names.value, names.key_norm];
            unused.into_iter().for_each(|template| self.finder.skip(ModulePath::new(template, layer)));
        }
        let value_norm = (config.value_norm && kv_from.is_none()).then(|| self.ones(config.key_heads(layer).head_size));
        Ok(AttentionWeights {
            query,
            key,
            value,
            output: self.linear(
                ModulePath::new(names.attention_output, layer),
                sharing.rows(Columns::Hidden),
                config.query_size(layer),
            )?,
            gate,
            query_norm: self.norm_if(norms.map(|norms| norms.0), names.query_norm, layer)?,
            key_norm: self.norm_if(key_norm, names.key_norm, layer)?,
            value_norm: value_norm.transpose()?,
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
        Ok(Some(self.vector(&scores[self.sharing.heads()])?))
    }

    fn mlp(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        if config.layer(layer).experts {
            return if config.dense_beside_experts { self.dense_and_experts(layer) } else { self.experts(layer) };
        }
        if config.mlp == MlpKind::Gated {
            return Ok(MlpWeights::Gated(self.gated(layer)?));
        }
        Ok(MlpWeights::Plain(self.plain([names.up, names.down], layer, Columns::Mlp(layer))?))
    }

    fn plain(&mut self, [up, down]: [&'static str; 2], layer: usize, columns: Columns) -> Result<PlainMlp, Error> {
        let rows = self.sharing.rows(columns);
        Ok(PlainMlp {
            down: self.linear(ModulePath::new(down, layer), self.sharing.rows(Columns::Hidden), rows.total)?,
            up: self.linear(ModulePath::new(up, layer), rows, self.blueprint.config.hidden_size)?,
        })
    }

    fn gated(&mut self, layer: usize) -> Result<GatedMlp, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, rows) = (config.hidden_size, self.sharing.rows(Columns::Mlp(layer)));
        let down = self.linear(ModulePath::new(names.down, layer), self.sharing.rows(Columns::Hidden), rows.total)?;
        let fused = ModulePath::new(names.fused_gate_up, layer);
        let [gate, up] = if self.finder.exists(fused) {
            self.fused(fused, [rows.clone(), rows], hidden)?
        } else {
            [
                self.linear(ModulePath::new(names.gate, layer), rows.clone(), hidden)?,
                self.linear(ModulePath::new(names.up, layer), rows, hidden)?,
            ]
        };
        Ok(GatedMlp { gate, up, down })
    }

    fn experts(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let Experts { num_experts, shared_mlp_size, shared_gate, score_bias, .. } =
            config.experts.expect("checked with the configuration");
        let router = self.linear(ModulePath::new(names.router, layer), num_experts, config.hidden_size)?;
        let score_bias = if score_bias {
            let name = self.finder.name(ModulePath::new(names.score_bias, layer), "");
            let bias = self.floats(&name, num_experts)?;
            Some(self.vector(&bias)?)
        } else {
            None
        };
        let projections = config.expert_input_size.map(|size| self.expert_projections(layer, size)).transpose()?;
        let experts = match config.mlp {
            MlpKind::Gated => ExpertWeights::Gated(self.selected_experts(layer)?),
            MlpKind::Plain => ExpertWeights::Plain(self.plain_experts(layer)?),
        };
        let shared = shared_mlp_size.map(|_| self.shared_expert(layer, shared_gate)).transpose()?;
        Ok(MlpWeights::Experts(Box::new(Mixture { router, score_bias, projections, experts, shared })))
    }

    /// Loads the projections of the input of experts, which is whole on every rank, and of their sum.
    fn expert_projections(&mut self, layer: usize, size: usize) -> Result<[Linear; 2], Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        let before = self.linear(ModulePath::new(names.expert_input, layer), size, hidden)?;
        let rows = self.sharing.rows(Columns::Hidden);
        Ok([before, self.linear(ModulePath::new(names.expert_output, layer), rows, size)?])
    }

    fn plain_experts(&mut self, layer: usize) -> Result<Vec<PlainMlp>, Error> {
        let ups = self.expert_matrices(ExpertMatrix::Up, layer)?;
        let downs = self.expert_matrices(ExpertMatrix::Down, layer)?;
        Ok(ups.into_iter().zip(downs).map(|(up, down)| PlainMlp { up, down }).collect())
    }

    fn selected_experts(&mut self, layer: usize) -> Result<Vec<GatedMlp>, Error> {
        let mut matrix = |matrix: ExpertMatrix| self.expert_matrices(matrix, layer);
        let gates = matrix(ExpertMatrix::Gate)?;
        let (ups, downs) = (matrix(ExpertMatrix::Up)?, matrix(ExpertMatrix::Down)?);
        let experts = gates.into_iter().zip(ups).zip(downs);
        Ok(experts.map(|((gate, up), down)| GatedMlp { gate, up, down }).collect())
    }

    /// Loads one of the matrices of every expert: its own tensor, or a part of a tensor for all experts.
    fn expert_matrices(&mut self, matrix: ExpertMatrix, layer: usize) -> Result<Vec<Linear>, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let Experts { num_experts, mlp_size, .. } = config.experts.expect("checked with the configuration");
        let rows = match matrix {
            ExpertMatrix::Gate | ExpertMatrix::Up => self.sharing.rows(Columns::Expert),
            ExpertMatrix::Down => self.sharing.rows(Columns::ExpertOutput),
        };
        if let Some(stack) = ExpertStack::find(&mut self.finder, self.blueprint, matrix, layer)? {
            let tensor = self.finder.find(&stack.name)?.bytes();
            let biases = stack.biases(&mut self.finder, num_experts)?;
            let linear = |expert: usize| {
                let bytes = stack.matrix(&tensor, expert);
                let weight = HostWeight { dtype: stack.dtype, rows: stack.rows, cols: stack.cols, bytes };
                let weight = self.backend.few_rows_weight(slice_rows(&weight, &rows.own))?;
                let bias = biases.as_ref().map(|biases| self.vector(&rows.select(&biases[expert]))).transpose()?;
                Ok(Linear { weight, bias })
            };
            return (0..num_experts).map(linear).collect();
        }
        let (template, cols) = match matrix {
            ExpertMatrix::Gate => (names.expert_gate, config.expert_width()),
            ExpertMatrix::Up => (names.expert_up, config.expert_width()),
            ExpertMatrix::Down => (names.expert_down, mlp_size),
        };
        let path = |expert: usize| ModulePath { template, layer, expert: Some(expert) };
        (0..num_experts).map(|expert| self.linear(path(expert), rows.clone(), cols)).collect()
    }

    /// Loads the expert that every token uses.
    fn shared_expert(&mut self, layer: usize, has_gate: bool) -> Result<SharedExpert, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, rows) = (config.hidden_size, self.sharing.rows(Columns::SharedExpert));
        let output_gate = if has_gate { Some(self.shared_output_gate(layer)?) } else { None };
        if config.mlp == MlpKind::Plain {
            let mlp = self.plain([names.shared_up, names.shared_down], layer, Columns::SharedExpert)?;
            return Ok(SharedExpert { mlp: DenseMlp::Plain(mlp), gate: output_gate });
        }
        let fused = ModulePath::new(names.fused_shared_gate_up, layer);
        let [gate, up] = if self.finder.exists(fused) {
            self.fused(fused, [rows.clone(), rows.clone()], hidden)?
        } else {
            [
                self.linear(ModulePath::new(names.shared_gate, layer), rows.clone(), hidden)?,
                self.linear(ModulePath::new(names.shared_up, layer), rows.clone(), hidden)?,
            ]
        };
        let down = ModulePath::new(names.shared_down, layer);
        let down = self.linear(down, self.sharing.rows(Columns::Hidden), rows.total)?;
        Ok(SharedExpert { mlp: DenseMlp::Gated(GatedMlp { gate, up, down }), gate: output_gate })
    }

    /// Loads the gate of the shared expert's output, a matrix of one row. Some files have it as a vector.
    fn shared_output_gate(&mut self, layer: usize) -> Result<Linear, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let name = self.finder.name(ModulePath::new(names.shared_output_gate, layer), "weight");
        let cols = config.hidden_size;
        let is_vector = self.finder.find(&name)?.info.shape.len() == 1;
        let tensor =
            if is_vector { self.finder.shaped(&name, &[cols])? } else { self.finder.shaped(&name, &[1, cols])? };
        let weight = HostWeight { dtype: tensor.info.dtype, rows: 1, cols, bytes: tensor.bytes() };
        Ok(Linear { weight: self.backend.linear_weight(weight)?, bias: None })
    }

    /// Loads a matrix, and its bias if the file has one. A number of rows means all of them.
    fn linear(&mut self, path: ModulePath, rows: impl Into<WeightRows>, cols: usize) -> Result<Linear, Error> {
        let [linear] = self.fused(path, [rows.into()], cols)?;
        Ok(linear)
    }

    /// Loads a matrix of a layer, if the layer has it.
    fn linear_if(
        &mut self,
        rows: Option<WeightRows>,
        template: &'static str,
        layer: usize,
    ) -> Result<Option<Linear>, Error> {
        let cols = self.blueprint.config.hidden_size;
        rows.map(|rows| self.linear(ModulePath::new(template, layer), rows, cols)).transpose()
    }

    /// Loads a matrix that stacks several along the rows, and splits it and its bias.
    fn fused<const N: usize>(
        &mut self,
        path: ModulePath,
        rows: [WeightRows; N],
        cols: usize,
    ) -> Result<[Linear; N], Error> {
        let total = rows.iter().map(|rows| rows.total).sum();
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
            let own: Vec<Range<usize>> = rows.own.iter().map(|rows| start + rows.start..start + rows.end).collect();
            let weight = slice_rows(&weight, &own);
            let bias = bias.as_ref().map(|bias| self.vector(&rows.select(&bias[start..start + rows.total])));
            let bias = bias.transpose()?;
            start += rows.total;
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

    /// Returns a norm without weights.
    fn ones(&self, len: usize) -> Result<Norm, Error> {
        Ok(Norm { weight: self.vector(&vec![1.0; len])?, bias: None })
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
        Ok(HostWeight { dtype: tensor.info.dtype, rows, cols, bytes: tensor.bytes() })
    }

    /// Returns a matrix that the file stores as `[in][out]` as `[out][in]`.
    fn transposed(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostWeight, Error> {
        let tensor = self.finder.transposed(name, rows, cols)?;
        let dtype = tensor.info.dtype;
        Ok(HostWeight { dtype, rows, cols, bytes: transpose(&tensor.bytes(), dtype, rows, cols) })
    }

    /// Returns a vector as f32.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.finder.shaped(name, &[len])?;
        let mut values = vec![0.0; len];
        quant::decode(tensor.info.dtype, &tensor.bytes(), &mut values);
        Ok(values)
    }

    fn vector(&self, values: &[f32]) -> Result<Tensor, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let weight = HostWeight { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytes.into() };
        Ok(self.backend.weight(weight)?)
    }
}

/// Returns some rows of a matrix whose shape was checked. No byte is read if they are adjacent.
fn slice_rows(weight: &HostWeight, rows: &[Range<usize>]) -> HostWeight {
    let &HostWeight { dtype, cols, ref bytes, .. } = weight;
    let row = dtype.bytes_for(cols).expect("rows are whole blocks");
    let bytes = match rows {
        [rows] => bytes.slice(rows.start * row..rows.end * row).expect("rows of the matrix"),
        _ => rows.iter().flat_map(|rows| &bytes[rows.start * row..rows.end * row]).copied().collect::<Vec<u8>>().into(),
    };
    HostWeight { dtype, rows: rows.iter().map(Range::len).sum(), cols, bytes }
}
