//! The decoder: embed, layers of attention and MLP on a residual stream, norm, logits. Read [`Decoder::compute`] first.
//!
//! `engine` calls it with one [`Batch`] for each step. It knows no device, no request and no text.

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{
    Backend, Error as DeviceError, Pending, Residual, RowQuery, StepMemo, TableRows, Tensor, TokenSlots,
};

use crate::activations::{Activations, Entry, normed};
use crate::architectures::{self, Blueprint};
use crate::attention::LayerMemory;
use crate::config::Positions;
use crate::rope::RopeFrequencies;
use crate::weights::{TokenCost, Weights};
use crate::{Batch, DecoderConfig, Error, Experts, KvMemory, Logits, Model, attention, loader, mlp};

/// Options for loading a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Maximum tokens of a sequence, if fewer than the model supports.
    pub context_len: Option<usize>,
}

/// The decoder of every supported family.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    backend: Arc<dyn Backend>,
    weights: Weights,
    ropes: Vec<RopeFrequencies>,
    activations: Activations,
    memo: StepMemo,
    /// The backend's state of steps that end with the last norm, not with logits.
    hidden_memo: StepMemo,
    /// Digest queries of the step that was launched last.
    queries: Vec<RowQuery>,
}

/// Reads the configuration of a checkpoint, without loading its weights.
pub fn read_config(checkpoint: &Checkpoint) -> Result<DecoderConfig, Error> {
    Ok(architectures::blueprint(checkpoint, None)?.config)
}

/// Returns the memory of the activations and logits of a step of `num_rows` rows, of which `num_wanted` need logits, of
/// a model that is not loaded.
pub fn step_bytes(
    config: &DecoderConfig,
    backend: &dyn Backend,
    num_rows: usize,
    num_wanted: usize,
) -> Result<u64, Error> {
    Ok(Activations::new(config, backend, &ropes_of(config))?.bytes(num_rows, num_wanted))
}

/// Returns the frequencies of each rotary table.
fn ropes_of(config: &DecoderConfig) -> Vec<RopeFrequencies> {
    match &config.positions {
        Positions::Rope { tables, .. } => tables.iter().map(|rope| rope.frequencies(config.context_len)).collect(),
        _ => Vec::new(),
    }
}

impl Decoder {
    /// Loads a checkpoint. Calls `progress` with the number of loaded parts and of all parts. A part is a layer;
    /// embedding and output are one more.
    pub fn load(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        options: LoadOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let blueprint = architectures::blueprint(checkpoint, options.context_len)?;
        let mut needs = blueprint.config.extensions();
        if let Some(missing) = needs.find(|&extension| !backend.supports(extension)) {
            let architecture = blueprint.config.architecture.clone();
            return Err(Error::NotOnDevice { architecture, what: missing.name(), device: backend.description() });
        }
        drop(needs);
        let weights = loader::load(checkpoint, &*backend, &blueprint, progress)?;
        let Blueprint { config, .. } = blueprint;
        let ropes = ropes_of(&config);
        let activations = Activations::new(&config, &*backend, &ropes)?;
        let (memo, hidden_memo) = (StepMemo::default(), StepMemo::default());
        Ok(Decoder { config, backend, weights, ropes, activations, memo, hidden_memo, queries: Vec::new() })
    }

    /// Returns the minimum cost of one token.
    pub fn token_cost(&self) -> TokenCost {
        self.weights.token_cost(&self.config)
    }

    /// Returns the memory of the activations and logits of a step of `num_rows` rows, of which `num_wanted` need
    /// logits.
    pub fn step_bytes(&self, num_rows: usize, num_wanted: usize) -> u64 {
        self.activations.bytes(num_rows, num_wanted)
    }

    pub fn backend(&self) -> &Arc<dyn Backend> {
        &self.backend
    }

    /// `hidden = scale * embedding[id] (+ positions[position])`. The stream is kept divided by `residual_scale`.
    fn embed(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, backend, weights, activations, .. } = self;
        let Residual { hidden, update, pending } = &mut activations.residual;
        *pending = Pending::Nothing;
        backend.embed(&weights.embedding, TableRows::Tokens(&batch.ids), config.stream_embedding_scale(), hidden)?;
        if let Some(positions) = &weights.positions {
            backend.embed(positions, TableRows::Positions(&batch.positions), 1.0, update)?;
            backend.add(update, hidden)?;
        }
        for (rope, angles) in self.ropes.iter().zip(&mut activations.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        Ok(())
    }

    /// Computes the logits of the wanted rows only: the output projection is the largest matrix of many models.
    fn project(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, backend, weights, activations, .. } = self;
        let Activations { residual, last, last_normed, logits, .. } = activations;
        let last = wanted_rows(&**backend, batch, &residual.hidden, last)?;
        let input = normed(&**backend, config, &weights.final_norm, last, last_normed)?;
        backend.linears(input, &mut [(&weights.output, logits)])?;
        match config.logits_soft_cap {
            Some(cap) => backend.soft_cap(cap, &mut activations.logits),
            None => Ok(()),
        }
    }

    /// Computes logits from ids and, if there are queries, digests of the logits, all on the device. Steps of the same
    /// size run the same operations on the same tensors, so that a device can record and replay them.
    fn compute(&mut self, batch: &Batch, queries: &[RowQuery], kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.compute_layers(batch, kv)?;
        self.project(batch)?;
        match queries {
            [] => Ok(()),
            queries => self.backend.digest(&self.activations.logits, queries),
        }
    }

    /// Computes the residual stream after the last layer.
    fn compute_layers(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.embed(batch)?;
        let block_len = kv.block_len();
        let Decoder { config, backend, weights, activations: a, .. } = self;
        let backend = &**backend;
        let mut entry = match weights.layers.first() {
            Some(first) => a.enter(backend, config, first.attention_norm.as_ref())?,
            None => Entry::Stream,
        };
        for (i, layer) in weights.layers.iter().enumerate() {
            let memory = LayerMemory { index: i, layer: &mut kv.layers[i], block_len };
            let output_norm = layer.attention_output_norm.as_ref();
            attention::forward(backend, config, &layer.attention, batch, memory, (entry, output_norm), a)?;
            entry = a.join(backend, config, output_norm, layer.mlp_norm.as_ref())?;

            let output_norm = layer.mlp_output_norm.as_ref();
            mlp::forward(backend, config, &layer.mlp, (entry, output_norm), a)?;
            let next = weights.layers.get(i + 1).and_then(|layer| layer.attention_norm.as_ref());
            entry = a.join(backend, config, output_norm, next)?;
        }
        Ok(())
    }

    /// Computes the batch's rows, stores their keys and values, and appends the wanted rows after the last norm to
    /// `out`: the rows from which logits would be computed.
    pub(crate) fn hidden_rows(&mut self, batch: &Batch, kv: &mut KvMemory, out: &mut Vec<f32>) -> Result<(), Error> {
        batch.check(&self.config, 0)?;
        let backend = self.backend.clone();
        self.activations.resize(&*backend, batch, false)?;
        let mut memo = std::mem::take(&mut self.hidden_memo);
        let index = batch.index(kv, &[]);
        let result = backend.step(&index, &mut memo, &mut || {
            self.compute_layers(batch, kv)?;
            let Decoder { config, weights, activations, .. } = &mut *self;
            let Activations { residual, last, last_normed, .. } = activations;
            let last = wanted_rows(&*backend, batch, &residual.hidden, last)?;
            backend.input(normed(&*backend, config, &weights.final_norm, last, last_normed)?).map(drop)
        });
        self.hidden_memo = memo;
        result?;
        let start = out.len();
        out.resize(start + self.activations.last_normed.len(), 0.0);
        backend.read(&self.activations.last_normed, &mut out[start..])?;
        // The weight of the last norm contains the division of the logits, which these rows must not have.
        if self.config.logits_divisor != 1.0 {
            out[start..].iter_mut().for_each(|value| *value *= self.config.logits_divisor);
        }
        Ok(())
    }

    /// Starts the operations of a step.
    fn launch_step(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), Error> {
        // `self.queries` are those of the step before.
        batch.check(&self.config, self.queries.len())?;
        let backend = self.backend.clone();
        self.activations.resize(&*backend, batch, true)?;
        let (mut memo, mut queries) = (std::mem::take(&mut self.memo), std::mem::take(&mut self.queries));
        batch.write_queries(&mut queries);
        let index = batch.index(kv, &queries);
        let result = backend.step(&index, &mut memo, &mut || self.compute(batch, &queries, kv));
        self.memo = memo;
        self.queries = queries;
        Ok(result?)
    }
}

/// Returns the wanted rows, which are gathered unless they are all rows.
fn wanted_rows<'a>(
    backend: &dyn Backend,
    batch: &Batch,
    hidden: &'a Tensor,
    gathered: &'a mut Tensor,
) -> Result<&'a Tensor, DeviceError> {
    // Wanted rows are in the order of the batch, so equal numbers mean all rows.
    if batch.num_wanted() == hidden.rows() {
        return Ok(hidden);
    }
    backend.gather_rows(hidden, &batch.wanted, gathered)?;
    Ok(gathered)
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
        self.launch_step(batch, kv)?;
        Ok(logits.await_rows(&*self.backend, &batch.queries, self.config.vocab_size)?)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        Ok(logits.fill(&*self.backend, &mut self.activations.logits)?)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        let experts_are_asynchronous =
            |experts: Experts| self.backend.experts_are_asynchronous(num_rows, experts.num_experts, experts.routing);
        self.backend.is_asynchronous() && self.config.experts.is_none_or(experts_are_asynchronous)
    }

    fn supports_digests(&self) -> bool {
        self.backend.digest_len(self.config.vocab_size).is_some()
    }

    fn token_slots(&self) -> TokenSlots {
        self.backend.token_slots()
    }

    fn launch_draft(&mut self, batch: &Batch, kv: &mut KvMemory, slot: usize) -> Result<(), Error> {
        assert!(batch.queries.iter().all(Option::is_some), "every wanted row of a draft step has a query");
        self.launch_step(batch, kv)?;
        Ok(self.backend.keep_assumed(batch.num_wanted(), slot)?)
    }

    fn fetch_drafts(&mut self, num_slots: usize) -> Result<(), Error> {
        Ok(self.backend.fetch_kept(num_slots)?)
    }

    fn read_drafts(&mut self, out: &mut Vec<u32>) -> Result<(), Error> {
        Ok(self.backend.read_kept(out)?)
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        Ok(self.backend.read_row(&self.activations.logits, row, out)?)
    }
}
