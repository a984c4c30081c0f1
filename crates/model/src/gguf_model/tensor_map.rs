//! Maps the tensors of a folder's decoder to those of a GGUF file. Shapes are checked as when a model is loaded, and an
//! unused tensor is an error here too.

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{DType, RopeStyle, ValueHeadOrder};

use super::{GgufTensor, recipe::TensorRecipe};
use crate::Error;
use crate::architectures::Blueprint;
use crate::config::{Experts, LayerConfig, Mixer, MlpKind, NormKind, Positions};
use crate::loader::experts::{ExpertMatrix, ExpertStack};
use crate::loader::tensor_finder::{LeftOut, ModulePath, TensorFinder};
use crate::loader::tensor_names::TensorNames;

/// Describes the embedding table, from whose rows a reader gets the vocabulary size.
pub(super) fn embedding(checkpoint: &Checkpoint, source: &Blueprint) -> Result<GgufTensor, Error> {
    let (path, target) = (
        ModulePath::new(source.names.token_embedding, 0),
        ModulePath::new(crate::loader::tensor_names::GGUF.token_embedding, 0),
    );
    let mut finder = TensorFinder::new(checkpoint, source);
    let name = finder.name(path, "weight");
    let shape = vec![source.config.vocab_size, source.config.hidden_size];
    let dtype = finder.shaped(&name, &shape)?.info.dtype;
    Ok(GgufTensor { name: target.name("weight"), dtype, shape, recipe: TensorRecipe::Unchanged { name } })
}

/// Describes all other tensors, in the order in which a forward pass uses them. `target` is the file as its reader sees
/// it. The second list has the names of the tensors that are no part of the decoder.
pub(super) fn tensors(
    checkpoint: &Checkpoint,
    source: &Blueprint,
    target: &Blueprint,
) -> Result<(Vec<GgufTensor>, Vec<String>), Error> {
    let finder = TensorFinder::new(checkpoint, source);
    let (interleaved, order) = (interleaved(target), target.delta_net.order);
    let mut mapper = TensorMapper { finder, source, target: &target.names, interleaved, order, found: Vec::new() };
    mapper.decoder()?;
    let LeftOut { mut others, predicting } = mapper.finder.finish()?;
    others.extend(predicting);
    Ok((mapper.found, others))
}

/// Returns the rotary size if readers of the file expect rows that are reordered to rotate adjacent values.
fn interleaved(target: &Blueprint) -> Option<usize> {
    match &target.config.positions {
        Positions::Rope { tables, style: RopeStyle::Interleaved } => Some(tables[0].rotary_size),
        Positions::None if target.interleaves_unrotated => Some(target.config.head_size),
        _ => None,
    }
}

pub(super) struct TensorMapper<'a> {
    pub(super) finder: TensorFinder<'a>,
    pub(super) source: &'a Blueprint,
    pub(super) target: &'a TensorNames,
    interleaved: Option<usize>,
    /// Order of the value heads of delta nets in the file.
    pub(super) order: ValueHeadOrder,
    found: Vec<GgufTensor>,
}

/// The template of a module's name in the folder, and in the file.
pub(super) type Pair = (&'static str, &'static str);

impl TensorMapper<'_> {
    fn decoder(&mut self) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, vocab, hidden) = (self.target, config.vocab_size, config.hidden_size);
        // Already described by `embedding`.
        let embedding = self.finder.name(ModulePath::new(names.token_embedding, 0), "weight");
        self.finder.find(&embedding)?;
        if config.positions == Positions::Learned {
            let name = self.finder.name(ModulePath::new(names.position_embedding, 0), "weight");
            let rows = self.finder.num_positions(&name)?;
            self.take(name, ModulePath::new(to.position_embedding, 0).name("weight"), &[rows, hidden])?;
        }
        if let Some(size) = config.layer_input_size {
            self.layer_input_tables(size)?;
        }
        for layer in 0..config.num_layers() {
            let LayerConfig { mixer, has_mlp, .. } = config.layers[layer];
            if config.input_norms && mixer != Mixer::None {
                self.norm((names.attention_norm, to.attention_norm), layer, hidden)?;
            }
            match mixer {
                Mixer::Attention => match config.latent_attention {
                    Some(latent) => self.latent_attention(layer, latent)?,
                    None => self.attention(layer)?,
                },
                Mixer::ShortConvolution => self.short_convolution(layer)?,
                Mixer::DeltaNet => self.delta_net(layer)?,
                Mixer::Mamba2 => self.mamba2(layer)?,
                Mixer::None => {}
            }
            if config.output_norms && mixer != Mixer::None {
                self.norm((names.attention_output_norm, to.attention_output_norm), layer, hidden)?;
            }
            if config.input_norms && has_mlp {
                self.norm((names.mlp_norm, to.mlp_norm), layer, hidden)?;
            }
            if has_mlp {
                self.mlp(layer)?;
            }
            if config.output_norms && has_mlp {
                self.norm((names.mlp_output_norm, to.mlp_output_norm), layer, hidden)?;
            }
            if let Some(size) = config.layer_input_size {
                self.linear((names.layer_input_gate, to.layer_input_gate), layer, size, hidden)?;
                self.linear((names.layer_input_output, to.layer_input_output), layer, hidden, size)?;
                self.norm((names.layer_input_norm, to.layer_input_norm), layer, hidden)?;
            }
            if config.layer_scales {
                let name = self.finder.weight_or_bare(ModulePath::new(names.layer_scale, layer));
                self.take(name, ModulePath::new(to.layer_scale, layer).name("weight"), &[1])?;
            }
        }
        self.norm((names.final_norm, to.final_norm), 0, hidden)?;
        if let Some(name) = self.finder.output() {
            self.take(name, ModulePath::new(to.output, 0).name("weight"), &[vocab, hidden])?;
        }
        Ok(())
    }

    fn short_convolution(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, hidden) = (self.target, config.hidden_size);
        let num_taps = config.short_convolution.expect("checked with the configuration").num_taps;
        let path = ModulePath::new(names.convolution, layer);
        let dtype = self.finder.taps(path, hidden, num_taps)?.info.dtype;
        let recipe = TensorRecipe::Unchanged { name: self.finder.name(path, "weight") };
        self.push(ModulePath::new(to.convolution, layer).name("weight"), dtype, &[hidden, num_taps], recipe);
        self.linear((names.convolution_input, to.convolution_input), layer, 3 * hidden, hidden)?;
        self.linear((names.convolution_output, to.convolution_output), layer, hidden, hidden)
    }

    fn attention(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, hidden) = (self.target, config.hidden_size);
        let (queries, keys) = (config.query_size(layer), config.key_size(layer));
        let LayerConfig { kv_from, keys_as_values, .. } = config.layers[layer];
        if self.finder.exists(ModulePath::new(names.fused_qkv, layer)) {
            self.linear((names.fused_qkv, to.fused_qkv), layer, queries + 2 * keys, hidden)?;
        } else {
            if config.attention_gate {
                self.linear((names.query, to.query), layer, 2 * queries, hidden)?;
            } else {
                self.heads((names.query, to.query), layer, config.num_heads)?;
            }
            if kv_from.is_none() {
                self.heads((names.key, to.key), layer, config.key_heads(layer).num_kv_heads)?;
            }
            if kv_from.is_none() && !keys_as_values {
                self.linear((names.value, to.value), layer, keys, hidden)?;
            }
        }
        if kv_from.is_some() {
            let unused = [names.key, names.value, names.key_norm];
            unused.into_iter().for_each(|template| self.finder.skip(ModulePath::new(template, layer)));
        }
        self.linear((names.attention_output, to.attention_output), layer, hidden, queries)?;
        if config.attention_sinks {
            let name = self.finder.weight_or_bare(ModulePath::new(names.sinks, layer));
            self.take(name, ModulePath::new(to.sinks, layer).name("weight"), &[config.num_heads])?;
        }
        if let Some((query_len, key_len)) = config.qk_norm_sizes(layer) {
            self.norm((names.query_norm, to.query_norm), layer, query_len)?;
            if kv_from.is_none() {
                self.norm((names.key_norm, to.key_norm), layer, key_len)?;
            }
        }
        Ok(())
    }

    fn mlp(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, hidden, size) = (self.target, config.hidden_size, config.mlp_size_of(layer));
        if config.layers[layer].experts {
            if !config.dense_beside_experts {
                return self.experts(layer);
            }
            self.experts_beside_dense(layer)?;
        }
        let fused = ModulePath::new(names.fused_gate_up, layer);
        if self.finder.exists(fused) && to.fused_gate_up.is_empty() {
            self.halves(fused, [to.gate, to.up], size)?;
        } else if self.finder.exists(fused) {
            self.linear((names.fused_gate_up, to.fused_gate_up), layer, 2 * size, hidden)?;
        } else {
            if config.mlp == MlpKind::Gated {
                self.linear((names.gate, to.gate), layer, size, hidden)?;
            }
            self.linear((names.up, to.up), layer, size, hidden)?;
        }
        self.linear((names.down, to.down), layer, hidden, size)
    }

    fn experts(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let experts = config.experts.expect("checked with the configuration");
        let (to, hidden, size, count) = (self.target, config.hidden_size, experts.mlp_size, experts.num_experts);
        let width = config.expert_width();
        self.linear((names.router, to.router), layer, count, hidden)?;
        if config.expert_input_size.is_some() {
            self.linear((names.expert_input, to.expert_input), layer, width, hidden)?;
            self.linear((names.expert_output, to.expert_output), layer, hidden, width)?;
        }
        if experts.score_bias {
            let name = self.finder.name(ModulePath::new(names.score_bias, layer), "");
            self.take(name, ModulePath::new(to.score_bias, layer).name(""), &[count])?;
        }
        let matrices = [
            (ExpertMatrix::Gate, (names.expert_gate, to.expert_gate), [count, size, width]),
            (ExpertMatrix::Up, (names.expert_up, to.expert_up), [count, size, width]),
            (ExpertMatrix::Down, (names.expert_down, to.expert_down), [count, width, size]),
        ];
        let has_gate = config.mlp == MlpKind::Gated;
        for (matrix, pair, shape) in matrices.into_iter().skip(if has_gate { 0 } else { 1 }) {
            match ExpertStack::find(&mut self.finder, self.source, matrix, layer)? {
                None => self.stack(pair, layer, shape)?,
                Some(stack) => {
                    if let Some(biases) = stack.biases(&mut self.finder, count)? {
                        let (name, shape) = (ModulePath::new(pair.1, layer).name("bias"), [count, stack.rows]);
                        let values = biases.concat();
                        self.push(name, DType::F32, &shape, TensorRecipe::FromConfig { values });
                    }
                    let (name, dtype) = (ModulePath::new(pair.1, layer).name("weight"), stack.dtype);
                    self.push(name, dtype, &shape, TensorRecipe::OfExperts { stack, num_experts: count });
                }
            }
        }
        if experts.shared_gate {
            self.linear((names.shared_output_gate, to.shared_output_gate), layer, 1, hidden)?;
        }
        match experts.shared_mlp_size {
            Some(size) => self.shared_expert(layer, size),
            None => Ok(()),
        }
    }

    /// Adds the experts beside a dense MLP. The file has gate and up of all experts in one tensor, as the folder.
    fn experts_beside_dense(&mut self, layer: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let Experts { num_experts, mlp_size, .. } = config.experts.expect("checked with the configuration");
        let (to, hidden) = (self.target, config.hidden_size);
        self.linear((names.router, to.router), layer, num_experts, hidden)?;
        for (pair, len) in
            [((names.router_scale, to.router_scale), hidden), ((names.expert_scales, to.expert_scales), num_experts)]
        {
            let name = self.finder.name(ModulePath::new(pair.0, layer), "");
            self.take(name, ModulePath::new(pair.1, layer).name(""), &[len])?;
        }
        for (pair, shape) in [
            ((names.fused_expert_gate_up, to.fused_expert_gate_up), [num_experts, 2 * mlp_size, hidden]),
            ((names.expert_down, to.expert_down), [num_experts, hidden, mlp_size]),
        ] {
            let name = self.finder.weight_or_bare(ModulePath::new(pair.0, layer));
            self.take(name, ModulePath::new(pair.1, layer).name("weight"), &shape)?;
        }
        let norms = [
            (names.dense_output_norm, to.dense_output_norm),
            (names.expert_norm, to.expert_norm),
            (names.expert_output_norm, to.expert_output_norm),
        ];
        norms.into_iter().try_for_each(|pair| self.norm(pair, layer, hidden))
    }

    fn layer_input_tables(&mut self, size: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, all) = (self.target, size * config.num_layers());
        let table = self.finder.name(ModulePath::new(names.layer_input_table, 0), "weight");
        self.take(table, ModulePath::new(to.layer_input_table, 0).name("weight"), &[config.vocab_size, all])?;
        self.linear((names.layer_inputs, to.layer_inputs), 0, all, config.hidden_size)?;
        self.norm((names.layer_inputs_norm, to.layer_inputs_norm), 0, size)
    }

    fn shared_expert(&mut self, layer: usize, size: usize) -> Result<(), Error> {
        let Blueprint { config, names, .. } = self.source;
        let (to, hidden) = (self.target, config.hidden_size);
        let fused = ModulePath::new(names.fused_shared_gate_up, layer);
        if self.finder.exists(fused) {
            self.halves(fused, [to.shared_gate, to.shared_up], size)?;
        } else {
            if config.mlp == MlpKind::Gated {
                self.linear((names.shared_gate, to.shared_gate), layer, size, hidden)?;
            }
            self.linear((names.shared_up, to.shared_up), layer, size, hidden)?;
        }
        self.linear((names.shared_down, to.shared_down), layer, hidden, size)
    }

    /// Adds the halves of a matrix that stacks a gate and the matrix beside it, `size` rows each.
    fn halves(&mut self, fused: ModulePath, targets: [&'static str; 2], size: usize) -> Result<(), Error> {
        let hidden = self.source.config.hidden_size;
        let name = self.finder.name(fused, "weight");
        let dtype = self.finder.shaped(&name, &[2 * size, hidden])?.info.dtype;
        for (first_row, target) in [0, size].into_iter().zip(targets) {
            let recipe = TensorRecipe::Rows { name: name.clone(), rows: first_row..first_row + size };
            self.push(ModulePath::new(target, fused.layer).name("weight"), dtype, &[size, hidden], recipe);
        }
        Ok(())
    }

    /// Adds a tensor whose values do not change.
    pub(super) fn take(&mut self, name: String, target: String, shape: &[usize]) -> Result<(), Error> {
        let dtype = self.finder.shaped(&name, shape)?.info.dtype;
        self.push(target, dtype, shape, TensorRecipe::Unchanged { name });
        Ok(())
    }

    pub(super) fn push(&mut self, name: String, dtype: DType, shape: &[usize], recipe: TensorRecipe) {
        self.found.push(GgufTensor { name, dtype, shape: shape.to_vec(), recipe });
    }

    /// Adds a matrix, and its bias if the folder has one.
    pub(super) fn linear(&mut self, (from, to): Pair, layer: usize, rows: usize, cols: usize) -> Result<(), Error> {
        let (from, to) = (ModulePath::new(from, layer), ModulePath::new(to, layer));
        let name = self.finder.name(from, "weight");
        if self.source.transposed {
            let dtype = self.finder.transposed(&name, rows, cols)?.info.dtype;
            self.push(to.name("weight"), dtype, &[rows, cols], TensorRecipe::Transposed { name });
        } else {
            self.take(name, to.name("weight"), &[rows, cols])?;
        }
        let bias = self.finder.name(from, "bias");
        if self.finder.has(&bias) { self.take(bias, to.name("bias"), &[rows]) } else { Ok(()) }
    }

    /// Adds the matrix and the bias of queries or keys, with their rows in the order that readers of the file expect.
    fn heads(&mut self, pair: Pair, layer: usize, num_heads: usize) -> Result<(), Error> {
        let (first, config) = (self.found.len(), &self.source.config);
        self.linear(pair, layer, num_heads * config.key_heads(layer).head_size, config.hidden_size)?;
        let Some(rotary_size) = self.interleaved else { return Ok(()) };
        for tensor in &mut self.found[first..] {
            if let TensorRecipe::Unchanged { name } = &mut tensor.recipe {
                let name = std::mem::take(name);
                tensor.recipe = TensorRecipe::Interleaved { name, num_heads, rotary_size };
            }
        }
        Ok(())
    }

    pub(super) fn norm(&mut self, (from, to): Pair, layer: usize, len: usize) -> Result<(), Error> {
        let (from, to) = (ModulePath::new(from, layer), ModulePath::new(to, layer));
        let name = self.finder.name(from, "weight");
        if self.source.norms_minus_one {
            let dtype = self.finder.shaped(&name, &[len])?.info.dtype;
            self.push(to.name("weight"), dtype, &[len], TensorRecipe::PlusOne { name });
        } else {
            self.take(name, to.name("weight"), &[len])?;
        }
        match self.source.config.norm {
            NormKind::Rms => Ok(()),
            NormKind::Layer => self.take(self.finder.name(from, "bias"), to.name("bias"), &[len]),
        }
    }

    /// Adds the stack of one matrix of every expert, each of which is a tensor in the folder.
    fn stack(&mut self, (from, to): Pair, layer: usize, shape: [usize; 3]) -> Result<(), Error> {
        let mut names = Vec::with_capacity(shape[0]);
        let mut dtype = None;
        for expert in 0..shape[0] {
            let name = self.finder.name(ModulePath { expert: Some(expert), ..ModulePath::new(from, layer) }, "weight");
            let found = self.finder.shaped(&name, &shape[1..])?.info.dtype;
            let expected = *dtype.get_or_insert(found);
            if found != expected {
                return Err(Error::BadSetting {
                    key: format!("tensor \"{name}\""),
                    expected: format!("{expected}, like the experts before it"),
                    found: found.to_string(),
                });
            }
            names.push(name);
        }
        let dtype = dtype.expect("a mixture has experts");
        self.push(ModulePath::new(to, layer).name("weight"), dtype, &shape, TensorRecipe::Stacked { names });
        Ok(())
    }
}
