//! The decoder: embed, layers of attention and MLP on a residual stream, norm, logits. Read this first.
//!
//! Called by `engine` with one [`Batch`] a step. Knows no device, no request and no text.

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{
    Backend, DType, Error as DeviceError, Input, Output, Pending, Residual, RmsNorm, RowQuery, StepMemo, TableRows,
    Tensor,
};

use crate::architectures::{self, Blueprint};
use crate::attention::LayerMemory;
use crate::config::{NormKind, Positions};
use crate::rope::Frequencies;
use crate::weights::{Norm, TokenCost, Weights};
use crate::{Batch, DecoderConfig, Error, Experts, KvMemory, Logits, attention, loader, mlp};

/// Ids to logits.
pub trait Model: Send {
    fn config(&self) -> &DecoderConfig;

    /// Computes the batch's rows, stores their keys and values, and fills `logits` with those of the wanted rows, or with the digests
    /// that will do in their place.
    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error>;

    /// Begins what `forward` does and returns while the device computes, where it is one that does so by itself. `logits` are there after
    /// [`Model::finish`]; at most two steps are under way, and the one that was launched first is finished first.
    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.forward(batch, kv, logits)
    }

    /// Waits for the logits of a step that was launched.
    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        let _ = logits;
        Ok(())
    }

    /// Whether [`Model::launch`] of a step of `num_rows` rows returns while the device still computes it.
    fn is_asynchronous(&self, num_rows: usize) -> bool {
        let _ = num_rows;
        false
    }

    /// Whether a batch may ask for digests.
    fn digests(&self) -> bool {
        false
    }

    /// A wanted row of the batch that was launched last, of which only the digest was given.
    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        let _ = (row, out);
        unreachable!("a model without digests gives every row")
    }
}

/// How to load a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Load for fewer tokens than the model was made for.
    pub context_len: Option<usize>,
}

/// The decoder of every supported family.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    backend: Arc<dyn Backend>,
    weights: Weights,
    ropes: Vec<Frequencies>,
    activations: Activations,
    memo: StepMemo,
    /// What the step launched last was asked for.
    queries: Vec<RowQuery>,
}

/// The rows of a step on their way through the layers; kept from step to step so that a step allocates nothing.
#[derive(Debug)]
pub(crate) struct Activations {
    pub(crate) residual: Residual,
    pub(crate) normed: Tensor,
    pub(crate) queries: Tensor,
    pub(crate) keys: Tensor,
    /// Where normalised keys are written before they change places with `keys`.
    pub(crate) spare_keys: Tensor,
    pub(crate) values: Tensor,
    pub(crate) attended: Tensor,
    pub(crate) gate: Tensor,
    pub(crate) up: Tensor,
    pub(crate) router: Tensor,
    /// One for each rotary table.
    pub(crate) angles: Vec<Tensor>,
    /// The wanted rows.
    last: Tensor,
    last_normed: Tensor,
    logits: Tensor,
}

/// Input of attention or of an MLP.
#[derive(Clone, Copy)]
pub(crate) enum Entry<'w> {
    /// The rows of `normed`.
    Normed,
    /// The RMSNorm, by this weight, of the residual stream with its pending update.
    Joined(&'w Norm),
}

impl<'w> Entry<'w> {
    pub(crate) fn input<'a>(
        self,
        config: &DecoderConfig,
        residual: &'a mut Residual,
        normed: &'a mut Tensor,
    ) -> Input<'a>
    where
        'w: 'a,
    {
        match self.norm(config) {
            None => Input::Rows(normed),
            Some(RmsNorm { weight, eps }) => Input::Joined { residual, weight, eps, normed },
        }
    }

    /// The norm that is still to be computed.
    pub(crate) fn norm(self, config: &DecoderConfig) -> Option<RmsNorm<'w>> {
        match self {
            Entry::Normed => None,
            Entry::Joined(norm) => Some(RmsNorm { weight: &norm.weight, eps: config.norm_eps }),
        }
    }
}

/// Where attention or an MLP leaves its result: in the residual stream, or in `update` if `output_norm` is applied to it first.
pub(crate) fn output<'a>(residual: &'a mut Residual, output_norm: Option<&Norm>) -> Output<'a> {
    match output_norm {
        Some(_) => Output::Rows(&mut residual.update),
        None => Output::Residual(residual),
    }
}

/// The configuration of a checkpoint, without loading its weights.
pub fn read_config(checkpoint: &Checkpoint) -> Result<DecoderConfig, Error> {
    Ok(architectures::blueprint(checkpoint, None)?.config)
}

impl Decoder {
    /// Loads a checkpoint. `progress` is told (parts done, parts in all); a part is a layer, or embedding and output.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        options: LoadOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let blueprint = architectures::blueprint(checkpoint, options.context_len)?;
        let weights = loader::load(checkpoint, &*backend, &blueprint, progress)?;
        let Blueprint { config, .. } = blueprint;
        let ropes = match &config.positions {
            Positions::Rope { tables, .. } => tables.iter().map(|rope| rope.frequencies(config.context_len)).collect(),
            _ => Vec::new(),
        };
        let activations = Activations::new(&config, &*backend, &ropes)?;
        Ok(Decoder { config, backend, weights, ropes, activations, memo: StepMemo::default(), queries: Vec::new() })
    }

    /// What one token costs at least.
    pub fn token_cost(&self) -> TokenCost {
        self.weights.token_cost(&self.config)
    }

    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// `hidden = scale * embedding[id] (+ positions[position])`
    fn embed(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, backend, weights, activations, .. } = self;
        let Residual { hidden, update, pending } = &mut activations.residual;
        *pending = Pending::Nothing;
        backend.embed(&weights.embedding, TableRows::Tokens(&batch.ids), config.embedding_scale, hidden)?;
        if let Some(positions) = &weights.positions {
            backend.embed(positions, TableRows::Positions(&batch.positions), 1.0, update)?;
            backend.add(update, hidden)?;
        }
        for (rope, angles) in self.ropes.iter().zip(&mut activations.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        Ok(())
    }

    /// Logits of the wanted rows alone: the output projection is the largest matrix of many models.
    fn project(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, backend, weights, activations, .. } = self;
        let hidden = &activations.residual.hidden;
        // Wanted rows are in the order of the batch, so if it wants as many as it has, it wants all of them.
        let wants_all = batch.num_wanted() == hidden.rows();
        if !wants_all {
            backend.gather_rows(hidden, &batch.wanted, &mut activations.last)?;
        }
        let last = if wants_all { hidden } else { &activations.last };
        let input = normed(&**backend, config, &weights.final_norm, last, &mut activations.last_normed)?;
        backend.linears(input, &mut [(&weights.output, &mut activations.logits)])?;
        match config.logits_soft_cap {
            Some(cap) => backend.soft_cap(cap, &mut activations.logits),
            None => Ok(()),
        }
    }

    /// From ids to logits and, where digests of them will do, to those, on the device: the same operations on the same tensors for every
    /// step of the same size.
    fn compute(&mut self, batch: &Batch, queries: &[RowQuery], kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.embed(batch)?;
        let block_len = kv.block_len();
        let Decoder { config, backend, weights, activations: a, .. } = self;
        let backend = &**backend;
        let mut entry = match weights.layers.first() {
            Some(first) => a.enter(backend, config, Some(&first.attention_norm))?,
            None => Entry::Normed,
        };
        for (i, layer) in weights.layers.iter().enumerate() {
            let memory = LayerMemory { index: i, layer: &mut kv.layers[i], block_len };
            let output_norm = layer.attention_output_norm.as_ref();
            attention::forward(backend, config, &layer.attention, batch, memory, (entry, output_norm), a)?;
            entry = a.join(backend, config, output_norm, Some(&layer.mlp_norm))?;

            let output_norm = layer.mlp_output_norm.as_ref();
            mlp::forward(backend, config, &layer.mlp, (entry, output_norm), a)?;
            let next = weights.layers.get(i + 1).map(|layer| &layer.attention_norm);
            entry = a.join(backend, config, output_norm, next)?;
        }
        self.project(batch)?;
        match queries {
            [] => Ok(()),
            queries => self.backend.digest(&self.activations.logits, queries),
        }
    }
}

impl Model for Decoder {
    fn config(&self) -> &DecoderConfig {
        &self.config
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.launch(batch, kv, logits)?;
        self.finish(logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        // The queries kept are those of the step before.
        batch.check(&self.config, self.queries.len())?;
        let backend = self.backend.clone();
        self.activations.resize(&*backend, batch)?;
        let (mut memo, mut queries) = (std::mem::take(&mut self.memo), std::mem::take(&mut self.queries));
        batch.write_queries(&mut queries);
        let index = batch.index(kv, &queries);
        let result = backend.step(&index, &mut memo, &mut || self.compute(batch, &queries, kv));
        self.memo = memo;
        self.queries = queries;
        result?;
        Ok(logits.await_rows(&*backend, &batch.queries, self.config.vocab_size)?)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        Ok(logits.fill(&*self.backend, &mut self.activations.logits)?)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        let experts_run_ahead =
            |experts: Experts| self.backend.experts_are_asynchronous(num_rows, experts.num_experts, experts.routing);
        self.backend.is_asynchronous() && self.config.experts.is_none_or(experts_run_ahead)
    }

    fn digests(&self) -> bool {
        self.backend.digest_len(self.config.vocab_size).is_some()
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        Ok(self.backend.read_row(&self.activations.logits, row, out)?)
    }
}

impl Activations {
    fn new(config: &DecoderConfig, backend: &dyn Backend, ropes: &[Frequencies]) -> Result<Self, Error> {
        let dtype = backend.activation_dtype();
        let rows = |cols: usize| backend.zeros(dtype, 0, cols);
        let (hidden, head_size) = (config.hidden_size, config.head_size);
        // Always f32: rotations are computed once a step, and logits leave the device.
        let angles = |rope: &Frequencies| backend.zeros(DType::F32, 0, 2 * rope.frequencies.len());
        Ok(Activations {
            residual: Residual { hidden: rows(hidden)?, update: rows(hidden)?, pending: Pending::Nothing },
            normed: rows(hidden)?,
            queries: rows(config.num_heads * head_size)?,
            keys: rows(config.num_kv_heads * head_size)?,
            spare_keys: rows(config.num_kv_heads * head_size)?,
            values: rows(config.num_kv_heads * head_size)?,
            attended: rows(config.num_heads * head_size)?,
            gate: rows(config.mlp_size)?,
            up: rows(config.mlp_size)?,
            router: rows(config.experts.map_or(1, |experts| experts.num_experts))?,
            angles: ropes.iter().map(angles).collect::<Result<_, _>>()?,
            last: rows(hidden)?,
            last_normed: rows(hidden)?,
            logits: backend.zeros(DType::F32, 0, config.vocab_size)?,
        })
    }

    fn resize(&mut self, backend: &dyn Backend, batch: &Batch) -> Result<(), DeviceError> {
        let tensors = [
            &mut self.residual.hidden,
            &mut self.residual.update,
            &mut self.normed,
            &mut self.queries,
            &mut self.keys,
            &mut self.spare_keys,
            &mut self.values,
            &mut self.attended,
            &mut self.gate,
            &mut self.up,
            &mut self.router,
        ];
        for tensor in tensors.into_iter().chain(&mut self.angles) {
            backend.resize_rows(tensor, batch.num_rows())?;
        }
        for tensor in [&mut self.last, &mut self.last_normed, &mut self.logits] {
            backend.resize_rows(tensor, batch.num_wanted())?;
        }
        Ok(())
    }

    /// Completes `hidden += output_norm(update)` and prepares `next_norm(hidden)`. Without an output norm the sum is left to whoever reads
    /// the residual stream: a device may compute it with the norm and the linear maps that follow.
    fn join<'w>(
        &mut self,
        backend: &dyn Backend,
        config: &DecoderConfig,
        output_norm: Option<&Norm>,
        next_norm: Option<&'w Norm>,
    ) -> Result<Entry<'w>, DeviceError> {
        if let Some(norm) = output_norm {
            apply_norm(backend, config, norm, &self.residual.update, &mut self.normed)?;
            backend.add(&self.normed, &mut self.residual.hidden)?;
        }
        self.enter(backend, config, next_norm)
    }

    /// Prepares `next_norm(hidden)`. An RMSNorm is computed with the linear maps that read it.
    fn enter<'w>(
        &mut self,
        backend: &dyn Backend,
        config: &DecoderConfig,
        next_norm: Option<&'w Norm>,
    ) -> Result<Entry<'w>, DeviceError> {
        match next_norm {
            Some(next) if config.norm == NormKind::Rms => return Ok(Entry::Joined(next)),
            Some(next) => {
                backend.join(&mut self.residual)?;
                apply_norm(backend, config, next, &self.residual.hidden, &mut self.normed)?;
            }
            None => backend.join(&mut self.residual)?,
        }
        Ok(Entry::Normed)
    }
}

fn apply_norm(
    backend: &dyn Backend,
    config: &DecoderConfig,
    norm: &Norm,
    x: &Tensor,
    out: &mut Tensor,
) -> Result<(), DeviceError> {
    match (config.norm, &norm.bias) {
        (NormKind::Layer, Some(bias)) => backend.layer_norm(x, &norm.weight, bias, config.norm_eps, out),
        _ => backend.rms_norm(x, &norm.weight, config.norm_eps, out),
    }
}

/// The norm of x as the input of linear maps; an RMSNorm is computed with them.
fn normed<'a>(
    backend: &dyn Backend,
    config: &DecoderConfig,
    norm: &'a Norm,
    x: &'a Tensor,
    out: &'a mut Tensor,
) -> Result<Input<'a>, DeviceError> {
    if config.norm == NormKind::Rms {
        return Ok(Input::Normed { x, weight: &norm.weight, eps: config.norm_eps, normed: out });
    }
    apply_norm(backend, config, norm, x, out)?;
    Ok(Input::Rows(out))
}
