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
use crate::config::Positions;
use crate::predictor::PredictorActivations;
use crate::probe::{LAYERS_AT_ONCE, Taps, attention_rows};
use crate::ranks::{Columns, Ranks, Sharing};
use crate::rope::RopeFrequencies;
use crate::weights::{LayerWeights, MixerWeights, TokenCost, Weights};
use crate::{
    AttentionRows, Batch, DecoderConfig, Error, Experts, GatherStats, KvMemory, Logits, Model, ProbeQuery, layer_input,
    loader, mixer, mlp, predictor,
};

/// Options for loading a model.
#[derive(Debug, Clone, Copy, Default)]
pub struct LoadOptions {
    /// Maximum tokens of a sequence, if fewer than the model supports.
    pub context_len: Option<usize>,
    /// Load the layer that predicts further tokens. Refused if the files or the device have none.
    pub predictor: bool,
}

/// The decoder of every supported family.
#[derive(Debug)]
pub struct Decoder {
    config: DecoderConfig,
    backend: Arc<dyn Backend>,
    weights: Weights,
    /// Names of the tensors that predict further tokens and are not loaded.
    predicting: Vec<String>,
    /// Present if the model was loaded with a predictor.
    predictor: Option<PredictorActivations>,
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
    read_config_with(checkpoint, LoadOptions::default())
}

/// Reads the configuration that a checkpoint has when it is loaded with these options.
pub fn read_config_with(checkpoint: &Checkpoint, options: LoadOptions) -> Result<DecoderConfig, Error> {
    Ok(blueprint(checkpoint, options)?.config)
}

pub(crate) fn blueprint(checkpoint: &Checkpoint, options: LoadOptions) -> Result<Blueprint, Error> {
    let mut blueprint = architectures::blueprint(checkpoint, options.context_len)?;
    if options.predictor {
        blueprint.use_predictor(checkpoint)?;
    }
    Ok(blueprint)
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
        let blueprint = blueprint(checkpoint, options)?;
        let sharing = Sharing::new(&blueprint.config, 0, 1)?;
        Decoder::load_shares(checkpoint, backend, blueprint, sharing, progress)
    }

    /// Loads the share of one of several ranks.
    pub(crate) fn load_shares(
        checkpoint: &Checkpoint,
        backend: Arc<dyn Backend>,
        blueprint: Blueprint,
        sharing: Sharing,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let config = sharing.of_rank(&blueprint.config);
        if config.num_ranks > 1 && backend.is_asynchronous() {
            let architecture = config.architecture.clone();
            let what = "a device that exchanges rows with other ranks";
            return Err(Error::NotOnDevice { architecture, what, device: backend.description() });
        }
        if config.predictor.is_some() && backend.is_asynchronous() {
            let architecture = config.architecture.clone();
            let what = "a layer that predicts further tokens (--speculate mtp)";
            return Err(Error::NotOnDevice { architecture, what, device: backend.description() });
        }
        let mut needs = config.extensions();
        if let Some(missing) = needs.find(|&extension| !backend.supports(extension)) {
            let architecture = config.architecture.clone();
            return Err(Error::NotOnDevice { architecture, what: missing.name(), device: backend.description() });
        }
        drop(needs);
        let (weights, predicting) = loader::load(checkpoint, &*backend, &blueprint, &sharing, progress)?;
        let ropes = ropes_of(&config);
        let activations = Activations::new(&config, &*backend, &ropes)?;
        let predictor = PredictorActivations::new(&config, &*backend)?;
        Ok(Decoder {
            config,
            backend,
            weights,
            predicting,
            predictor,
            ropes,
            activations,
            memo: StepMemo::default(),
            hidden_memo: StepMemo::default(),
            queries: Vec::new(),
        })
    }

    /// Returns the names of the checkpoint's tensors that predict further tokens and are not loaded.
    pub fn predicting_tensors(&self) -> &[String] {
        &self.predicting
    }

    /// Returns the gathers of this rank; `None` if it is the only one.
    pub fn gather_stats(&self) -> Option<GatherStats> {
        self.activations.ranks.as_deref().map(Ranks::stats)
    }

    /// Connects the decoder with those of other ranks.
    pub(crate) fn join_ranks(&mut self, ranks: Ranks) {
        self.activations.ranks = Some(Box::new(ranks));
    }

    pub(crate) fn ranks_mut(&mut self) -> Option<&mut Ranks> {
        self.activations.ranks.as_deref_mut()
    }

    /// Returns the minimum cost of one token. If several ranks compute the model, that of this rank.
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
        if let Some(tables) = &weights.layer_inputs {
            layer_input::prepare(&**backend, config, tables, batch, activations)?;
        }
        for (rope, angles) in self.ropes.iter().zip(&mut activations.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        Ok(())
    }

    /// Computes the logits of the wanted rows only: the output projection is the largest matrix of many models.
    fn project(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, backend, weights, activations, .. } = self;
        let Activations { residual, last, last_normed, logits, ranks, .. } = activations;
        let last = wanted_rows(&**backend, batch, &residual.hidden, last)?;
        project_rows(&**backend, (config, weights), ranks.as_deref_mut(), last, [last_normed, logits])
    }

    /// Computes logits from ids and, if there are queries, digests of the logits, all on the device. Steps of the same
    /// size run the same operations on the same tensors, so that a device can record and replay them.
    fn compute(&mut self, batch: &Batch, queries: &[RowQuery], kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.compute_layers(batch, kv)?;
        self.project(batch)?;
        if !queries.is_empty() {
            self.backend.digest(&self.activations.logits, queries)?;
        }
        let Decoder { config, backend, weights, activations, predictor, .. } = self;
        match predictor {
            Some(own) => predictor::follow(&**backend, config, weights, batch, kv, (activations, own)),
            None => Ok(()),
        }
    }

    /// Computes the residual stream after the last layer.
    fn compute_layers(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.embed(batch)?;
        let Decoder { config, backend, weights, activations: a, .. } = self;
        let backend = &**backend;
        let mut entry = match weights.layers.first() {
            Some(first) => a.enter(backend, config, first.first_norm())?,
            None => Entry::Stream,
        };
        for (i, layer) in weights.layers.iter().enumerate() {
            let next = weights.layers.get(i + 1).and_then(LayerWeights::first_norm);
            if let Some(mixer) = &layer.mixer {
                let output_norm = layer.attention_output_norm.as_ref();
                mixer::forward(backend, config, (i, mixer), batch, kv, (entry, output_norm), a)?;
                let after = if layer.mlp.is_some() { layer.mlp_norm.as_ref() } else { next };
                entry = a.join(backend, config, output_norm, after)?;
            }
            let Some(mlp) = &layer.mlp else { continue };
            let output_norm = layer.mlp_output_norm.as_ref();
            mlp::forward(backend, config, (i, mlp), (entry, output_norm), a)?;
            if layer.input.is_some() || layer.scale.is_some() {
                a.join(backend, config, output_norm, None)?;
                layer_input::finish_layer(backend, config, (i, layer), a)?;
                entry = a.enter(backend, config, next)?;
            } else {
                entry = a.join(backend, config, output_norm, next)?;
            }
        }
        match &mut a.taps {
            Some(taps) => taps.after_layer(backend, weights.layers.len() - 1, &a.residual.hidden),
            None => Ok(()),
        }
    }

    /// Computes the logits of each row of `streams`, a few rows at a time, and hands them to `on_layer`.
    fn project_layers(
        &self,
        streams: &Tensor,
        a: &mut Activations,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<(), DeviceError> {
        let backend = &*self.backend;
        let rows: Vec<u32> = (0..streams.rows() as u32).collect();
        let mut row = vec![0.0; self.config.vocab_size];
        for rows in rows.chunks(LAYERS_AT_ONCE) {
            for tensor in [&mut a.last, &mut a.last_normed, &mut a.logits] {
                backend.resize_rows(tensor, rows.len())?;
            }
            backend.copy_rows(streams, rows, &mut a.last, 0)?;
            let Activations { last, last_normed, logits, .. } = &mut *a;
            project_rows(backend, (&self.config, &self.weights), None, last, [last_normed, logits])?;
            for i in 0..rows.len() {
                backend.read_row(&a.logits, i, &mut row)?;
                on_layer(&row);
            }
        }
        Ok(())
    }

    /// Computes the batch's rows, stores their keys and values, and appends the wanted rows after the last norm to
    /// `out`: the rows from which logits would be computed.
    pub(crate) fn hidden_rows(&mut self, batch: &Batch, kv: &mut KvMemory, out: &mut Vec<f32>) -> Result<(), Error> {
        assert_eq!(self.config.num_ranks, 1, "rows are pooled on one rank");
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

    /// Starts the operations of a step, on every rank.
    pub(crate) fn launch_step(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), Error> {
        assert!(!self.config.has_state() || !kv.states.is_empty(), "`KvMemory::with_states` allocates the states");
        // `self.queries` are those of the step before.
        batch.check(&self.config, self.queries.len())?;
        if let Some(ranks) = self.ranks_mut() {
            ranks.begin_step(batch, kv)?;
        }
        let outcome = self.compute_step(batch, kv);
        match self.ranks_mut() {
            Some(ranks) => ranks.end_step(outcome),
            None => outcome,
        }
    }

    fn compute_step(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), Error> {
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

/// Computes the logits of rows of the residual stream.
fn project_rows(
    backend: &dyn Backend,
    (config, weights): (&DecoderConfig, &Weights),
    ranks: Option<&mut Ranks>,
    rows: &Tensor,
    [rows_normed, logits]: [&mut Tensor; 2],
) -> Result<(), DeviceError> {
    let input = normed(backend, config, &weights.final_norm, rows, rows_normed)?;
    match ranks {
        None => backend.linears(input, &mut [(&weights.output, &mut *logits)])?,
        Some(ranks) => ranks.linear(backend, input, (&weights.output, Columns::Logits), logits)?,
    }
    match config.logits_soft_cap {
        Some(cap) => backend.soft_cap(cap, logits),
        None => Ok(()),
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
        // A step that is launched ahead may compute a position twice, but a state advances only once. Without such
        // steps, a row whose digest is not enough is still there to be read.
        !self.config.has_state()
            && self.backend.is_asynchronous()
            && self.config.experts.is_none_or(experts_are_asynchronous)
    }

    fn supports_digests(&self) -> bool {
        self.backend.digest_len(self.config.vocab_size).is_some()
    }

    fn token_slots(&self) -> TokenSlots {
        self.backend.token_slots()
    }

    fn predict(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        batch.check(&self.config, 0)?;
        let Decoder { config, backend, weights, activations, predictor, ropes, .. } = self;
        let backend = &**backend;
        let own = predictor.as_mut().expect("the model was loaded with a predictor");
        activations.resize(backend, batch, true)?;
        for (rope, angles) in ropes.iter().zip(&mut activations.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        predictor::forward(backend, config, weights, batch, kv, (activations, own))?;
        Ok(predictor::read(backend, batch, &mut activations.logits, config.vocab_size, logits)?)
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

    fn probe(
        &mut self,
        batch: &Batch,
        kv: &mut KvMemory,
        query: &ProbeQuery,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<Option<AttentionRows>, Error> {
        if self.config.num_ranks > 1 {
            return Err(Error::NoProbe);
        }
        batch.check(&self.config, 0)?;
        assert!(batch.sequences.len() == 1 && batch.num_rows() > 0, "a probe is of one sequence");
        assert!(!self.config.has_state(), "a probe computes rows again, but a state advances only once");
        let backend = self.backend.clone();
        // Its own activations: those of the decoder hold the logits of a step that may be on the device.
        let mut own = Activations::new(&self.config, &*backend, &self.ropes)?;
        own.resize(&*backend, batch, false)?;
        own.taps = Some(Taps::new(&self.config, &*backend, batch, query)?);
        let steps = std::mem::replace(&mut self.activations, own);
        let outcome = self.compute_layers(batch, kv);
        let mut own = std::mem::replace(&mut self.activations, steps);
        outcome?;
        if query.layers {
            let taps = own.taps.take().expect("the taps of this probe");
            self.project_layers(&taps.streams, &mut own, on_layer)?;
            own.taps = Some(taps);
        }
        let Some(query) = query.attention else { return Ok(None) };
        let Some(MixerWeights::Attention(weights)) = &self.weights.layers[query.layer].mixer else {
            unreachable!("attention of models with states and of latents is not probed")
        };
        Ok(Some(attention_rows(&*backend, &self.config, (query, weights), (batch, kv), &mut own)?))
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        Ok(self.backend.read_row(&self.activations.logits, row, out)?)
    }
}
