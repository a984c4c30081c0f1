//! From a checkpoint to weights on a device: finds each tensor by its name, checks its shape, cuts fused ones apart.
//!
//! A tensor that no part of the decoder asked for is an error: a file that holds more than we compute would be silently wrong.

use std::collections::HashSet;
use std::ops::Range;

use pellucid_checkpoint::{Checkpoint, TensorView};
use pellucid_tensor::{Backend, DType, GatedMlp, HostWeight, Linear, SharedBytes, Tensor, quant};

use crate::architectures::Blueprint;
use crate::config::{DecoderConfig, MlpKind, NormKind, Positions};
use crate::weights::{AttentionWeights, LayerWeights, MlpWeights, Norm, Weights};
use crate::{Error, sinusoidal};

pub(crate) struct Loader<'a> {
    checkpoint: &'a Checkpoint,
    backend: &'a dyn Backend,
    blueprint: &'a Blueprint,
    prefix: &'static str,
    used: HashSet<String>,
}

/// Where in a file a part is: its name's template, the layer, and for experts the expert.
#[derive(Clone, Copy)]
struct Part {
    template: &'static str,
    layer: usize,
    expert: Option<usize>,
}

pub(crate) fn load(
    checkpoint: &Checkpoint,
    backend: &dyn Backend,
    blueprint: &Blueprint,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Weights, Error> {
    let names = &blueprint.names;
    let found = |prefix: &&&str| checkpoint.find_tensor(&format!("{prefix}{}.weight", names.token_embedding)).is_some();
    let prefix = names.prefixes.iter().find(found).copied().unwrap_or(names.prefixes[0]);
    let mut loader = Loader { checkpoint, backend, blueprint, prefix, used: HashSet::new() };
    let weights = loader.weights(progress)?;
    loader.refuse_unused()?;
    Ok(weights)
}

impl Loader<'_> {
    fn weights(&mut self, progress: &mut dyn FnMut(usize, usize)) -> Result<Weights, Error> {
        let Blueprint { config, names, tied, .. } = self.blueprint;
        let (vocab, hidden) = (config.vocab_size, config.hidden_size);
        let embedding = self.host(&self.name(names.token_embedding, "weight"), vocab, hidden)?;
        let output_name = format!("{}.weight", names.output);
        let output = match self.checkpoint.find_tensor(&output_name) {
            Some(_) if !tied => self.host(&output_name, vocab, hidden)?,
            _ => {
                self.used.insert(output_name);
                embedding.clone()
            }
        };
        let positions = match config.positions {
            Positions::Rope { .. } => None,
            Positions::Learned => {
                let name = self.name(names.position_embedding, "weight");
                let rows = self.find(&name)?.info.shape.first().copied().unwrap_or(0);
                if rows < config.context_len {
                    return Err(Error::BadShape {
                        name,
                        expected: vec![config.context_len, hidden],
                        found: vec![rows, hidden],
                    });
                }
                Some(self.host(&name, rows, hidden)?)
            }
            Positions::Sinusoidal => Some(sinusoidal::table(config.context_len, hidden)),
        };
        // The layers, and the embedding with the output as one more.
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
            final_norm: self.norm(self.part(names.final_norm, 0), hidden)?,
            output: Linear { weight: self.backend.linear_weight(output)?, bias: None },
        };
        progress(num_parts, num_parts);
        Ok(weights)
    }

    fn layer(&mut self, layer: usize) -> Result<LayerWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let hidden = config.hidden_size;
        Ok(LayerWeights {
            attention_norm: self.norm(self.part(names.attention_norm, layer), hidden)?,
            attention: self.attention(layer)?,
            attention_output_norm: self.norm_if(config.output_norms, names.attention_output_norm, layer, hidden)?,
            mlp_norm: self.norm(self.part(names.mlp_norm, layer), hidden)?,
            mlp: self.mlp(layer)?,
            mlp_output_norm: self.norm_if(config.output_norms, names.mlp_output_norm, layer, hidden)?,
        })
    }

    fn attention(&mut self, layer: usize) -> Result<AttentionWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, head_size) = (config.hidden_size, config.head_size);
        let (queries, keys) = (config.num_heads * head_size, config.num_kv_heads * head_size);
        let fused = self.part(names.fused_qkv, layer);
        let [query, key, value] = if self.exists(fused) {
            self.fused(fused, [queries, keys, keys], hidden)?
        } else {
            [
                self.linear(self.part(names.query, layer), queries, hidden)?,
                self.linear(self.part(names.key, layer), keys, hidden)?,
                self.linear(self.part(names.value, layer), keys, hidden)?,
            ]
        };
        Ok(AttentionWeights {
            query,
            key,
            value,
            output: self.linear(self.part(names.attention_output, layer), hidden, queries)?,
            query_norm: self.norm_if(config.qk_norm, names.query_norm, layer, head_size)?,
            key_norm: self.norm_if(config.qk_norm, names.key_norm, layer, head_size)?,
        })
    }

    fn mlp(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let (hidden, size) = (config.hidden_size, config.mlp_size);
        if config.layers[layer].experts {
            return self.experts(layer);
        }
        let down = self.linear(self.part(names.down, layer), hidden, size)?;
        if config.mlp == MlpKind::Plain {
            return Ok(MlpWeights::Plain { up: self.linear(self.part(names.up, layer), size, hidden)?, down });
        }
        let fused = self.part(names.fused_gate_up, layer);
        let [gate, up] = if self.exists(fused) {
            self.fused(fused, [size, size], hidden)?
        } else {
            [
                self.linear(self.part(names.gate, layer), size, hidden)?,
                self.linear(self.part(names.up, layer), size, hidden)?,
            ]
        };
        Ok(MlpWeights::Gated(GatedMlp { gate, up, down }))
    }

    fn experts(&mut self, layer: usize) -> Result<MlpWeights, Error> {
        let Blueprint { config, names, .. } = self.blueprint;
        let experts = config.experts.expect("checked with the configuration");
        let (hidden, size) = (config.hidden_size, experts.mlp_size);
        let router = self.linear(self.part(names.router, layer), experts.num_experts, hidden)?;
        let experts = (0..experts.num_experts)
            .map(|expert| {
                Ok(GatedMlp {
                    gate: self.expert(names.expert_gate, layer, expert, size, hidden)?,
                    up: self.expert(names.expert_up, layer, expert, size, hidden)?,
                    down: self.expert(names.expert_down, layer, expert, hidden, size)?,
                })
            })
            .collect::<Result<_, Error>>()?;
        Ok(MlpWeights::Experts { router, experts })
    }

    /// One expert's matrix: a tensor of its own, or a slice of one that stacks all experts.
    fn expert(
        &mut self,
        template: &'static str,
        layer: usize,
        expert: usize,
        rows: usize,
        cols: usize,
    ) -> Result<Linear, Error> {
        if template.contains("{expert}") {
            return self.linear(Part { template, layer, expert: Some(expert) }, rows, cols);
        }
        let num_experts = self.blueprint.config.experts.map_or(0, |experts| experts.num_experts);
        let name = self.name_of(self.part(template, layer), "weight");
        let tensor = self.find(&name)?;
        expect_shape(&tensor, &[num_experts, rows, cols])?;
        let dtype = tensor.info.dtype;
        let bytes = row_bytes(&tensor, expert * rows..(expert + 1) * rows, cols)?;
        Ok(Linear { weight: self.backend.linear_weight(HostWeight { dtype, rows, cols, bytes })?, bias: None })
    }

    /// A matrix with its bias, when the file has one.
    fn linear(&mut self, part: Part, rows: usize, cols: usize) -> Result<Linear, Error> {
        let [linear] = self.fused(part, [rows], cols)?;
        Ok(linear)
    }

    /// A matrix that stacks several, cut apart by rows, and its bias likewise.
    fn fused<const N: usize>(&mut self, part: Part, rows: [usize; N], cols: usize) -> Result<[Linear; N], Error> {
        let total = rows.iter().sum();
        let name = self.name_of(part, "weight");
        let weight = if self.blueprint.transposed {
            self.transposed(&name, total, cols)?
        } else {
            self.host(&name, total, cols)?
        };
        let bias = self.name_of(part, "bias");
        let bias = match self.checkpoint.find_tensor(&bias) {
            Some(_) => Some(self.floats(&bias, total)?),
            None => None,
        };
        let mut start = 0;
        let mut parts = Vec::with_capacity(N);
        for rows in rows {
            let range = start..start + rows;
            start = range.end;
            let bytes = slice_rows(&weight.bytes, weight.dtype, range.clone(), cols).expect("the shape was checked");
            let bias = bias.as_ref().map(|bias| self.vector(&bias[range])).transpose()?;
            parts.push(Linear {
                weight: self.backend.linear_weight(HostWeight { dtype: weight.dtype, rows, cols, bytes })?,
                bias,
            });
        }
        Ok(parts.try_into().expect("one part for each range"))
    }

    fn norm_if(
        &mut self,
        wanted: bool,
        template: &'static str,
        layer: usize,
        len: usize,
    ) -> Result<Option<Norm>, Error> {
        if wanted { self.norm(self.part(template, layer), len).map(Some) } else { Ok(None) }
    }

    fn norm(&mut self, part: Part, len: usize) -> Result<Norm, Error> {
        let mut weight = self.floats(&self.name_of(part, "weight"), len)?;
        if self.blueprint.norms_from_one {
            weight.iter_mut().for_each(|weight| *weight += 1.0);
        }
        let bias = match self.blueprint.config.norm {
            NormKind::Rms => None,
            NormKind::Layer => {
                let bias = self.floats(&self.name_of(part, "bias"), len)?;
                Some(self.vector(&bias)?)
            }
        };
        Ok(Norm { weight: self.vector(&weight)?, bias })
    }

    // Names and bytes.

    fn part(&self, template: &'static str, layer: usize) -> Part {
        Part { template, layer, expert: None }
    }

    fn name(&self, template: &str, ending: &str) -> String {
        format!("{}{template}.{ending}", self.prefix)
    }

    fn name_of(&self, part: Part, ending: &str) -> String {
        let name = part.template.replace("{}", &part.layer.to_string());
        let name = match part.expert {
            Some(expert) => name.replace("{expert}", &expert.to_string()),
            None => name,
        };
        self.name(&name, ending)
    }

    fn exists(&self, part: Part) -> bool {
        !part.template.is_empty() && self.checkpoint.find_tensor(&self.name_of(part, "weight")).is_some()
    }

    fn find(&mut self, name: &str) -> Result<TensorView<'_>, Error> {
        let tensor = self.checkpoint.tensor(name)?;
        self.used.insert(name.to_owned());
        Ok(tensor)
    }

    /// A matrix as it lies in the file.
    fn host(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostWeight, Error> {
        let tensor = self.find(name)?;
        expect_shape(&tensor, &[rows, cols])?;
        Ok(HostWeight { dtype: tensor.info.dtype, rows, cols, bytes: tensor.bytes })
    }

    /// A matrix that the file stores as `[in][out]`, turned round; its format is a plain one.
    fn transposed(&mut self, name: &str, rows: usize, cols: usize) -> Result<HostWeight, Error> {
        let tensor = self.find(name)?;
        expect_shape(&tensor, &[cols, rows])?;
        let dtype = tensor.info.dtype;
        if dtype.is_quantized() {
            return Err(Error::BadSetting {
                key: format!("tensor \"{name}\""),
                expected: "a plain format for a transposed matrix".into(),
                found: dtype.to_string(),
            });
        }
        let size = dtype.block_bytes();
        let mut bytes = vec![0; tensor.bytes.len()];
        for (i, number) in tensor.bytes.chunks_exact(size).enumerate() {
            let (col, row) = (i / rows, i % rows);
            let target = (row * cols + col) * size;
            bytes[target..target + size].copy_from_slice(number);
        }
        Ok(HostWeight { dtype, rows, cols, bytes: bytes.into() })
    }

    /// A vector as f32.
    fn floats(&mut self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let tensor = self.find(name)?;
        expect_shape(&tensor, &[len])?;
        let mut values = vec![0.0; len];
        quant::decode(tensor.info.dtype, &tensor.bytes, &mut values);
        Ok(values)
    }

    fn vector(&self, values: &[f32]) -> Result<Tensor, Error> {
        let bytes: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        let weight = HostWeight { dtype: DType::F32, rows: 1, cols: values.len(), bytes: bytes.into() };
        Ok(self.backend.weight(weight)?)
    }

    fn refuse_unused(&self) -> Result<(), Error> {
        let Blueprint { names, config: DecoderConfig { architecture, .. }, .. } = self.blueprint;
        let ignored = |name: &str| names.ignored.iter().any(|part| name.contains(part));
        let unused: Vec<&str> = (self.checkpoint.tensors().iter().map(|tensor| tensor.name.as_str()))
            .filter(|name| !self.used.contains(*name) && !ignored(name))
            .collect();
        match unused.first() {
            None => Ok(()),
            Some(&example) => Err(Error::UnusedTensors {
                architecture: architecture.clone(),
                count: unused.len(),
                example: example.into(),
            }),
        }
    }
}

fn expect_shape(tensor: &TensorView<'_>, expected: &[usize]) -> Result<(), Error> {
    if tensor.info.shape == expected {
        return Ok(());
    }
    Err(Error::BadShape {
        name: tensor.info.name.clone(),
        expected: expected.to_vec(),
        found: tensor.info.shape.clone(),
    })
}

fn slice_rows(bytes: &SharedBytes, dtype: DType, rows: Range<usize>, cols: usize) -> Option<SharedBytes> {
    let row = dtype.bytes_for(cols)?;
    bytes.slice(rows.start * row..rows.end * row)
}

fn row_bytes(tensor: &TensorView<'_>, rows: Range<usize>, cols: usize) -> Result<SharedBytes, Error> {
    slice_rows(&tensor.bytes, tensor.info.dtype, rows, cols).ok_or_else(|| Error::BadShape {
        name: tensor.info.name.clone(),
        expected: vec![cols],
        found: tensor.info.shape.clone(),
    })
}
