//! The decoder: embed, layers of attention and MLP on a residual stream, norm, logits. `compute` has the arithmetic.
//!
//! `engine` calls it with one [`Batch`] for each step. It knows no device, no request and no text.

mod compute;

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_tensor::{Backend, TokenSlots};

use crate::activations::Activations;
use crate::architectures::{self, Blueprint};
use crate::batch::StepTables;
use crate::config::Positions;
use crate::predictor::PredictorActivations;
use crate::probe::{Taps, attention_rows};
use crate::ranks::{Ranks, Sharing};
use crate::rope::RopeFrequencies;
use crate::weights::{MixerWeights, TokenCost, Weights};
use crate::{
    AttentionRows, Batch, DecoderConfig, Devices, Error, Experts, GatherStats, KvMemory, Logits, Model, Placement,
    ProbeQuery, loader, predictor,
};

use compute::Segment;

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
    devices: Devices,
    /// Each on the device of its part.
    weights: Weights,
    /// Names of the tensors that predict further tokens and are not loaded.
    predicting: Vec<String>,
    /// Present if the model was loaded with a predictor.
    predictor: Option<PredictorActivations>,
    ropes: Vec<RopeFrequencies>,
    /// Those on each device.
    activations: Vec<Activations>,
    segments: Vec<Segment>,
    /// The residual stream on its way from one device to another.
    in_transit: Vec<f32>,
    /// Tables of the step that was launched last.
    tables: StepTables,
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
        let sharing = Sharing::new(&blueprint, 0, 1)?;
        Decoder::load_shares(checkpoint, backend.into(), blueprint, sharing, progress)
    }

    /// Loads each part of a checkpoint onto its device, like [`Decoder::load`].
    pub fn load_on(
        checkpoint: &Checkpoint,
        backends: Vec<Arc<dyn Backend>>,
        placement: Placement,
        options: LoadOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let blueprint = blueprint(checkpoint, options)?;
        let devices = Devices::new(backends, placement, &blueprint.config)?;
        let sharing = Sharing::new(&blueprint, 0, 1)?;
        Decoder::load_shares(checkpoint, devices, blueprint, sharing, progress)
    }

    /// Loads the share of one of several ranks.
    pub(crate) fn load_shares(
        checkpoint: &Checkpoint,
        devices: Devices,
        blueprint: Blueprint,
        sharing: Sharing,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Decoder, Error> {
        let config = sharing.of_rank(&blueprint.config);
        check_devices(&config, &devices)?;
        let (weights, predicting) = loader::load(checkpoint, &devices, &blueprint, &sharing, progress)?;
        let ropes = ropes_of(&config);
        let activations = |backend: &Arc<dyn Backend>| Activations::new(&config, &**backend, &ropes);
        let activations = devices.backends().iter().map(activations).collect::<Result<_, _>>()?;
        let predictor = PredictorActivations::new(&config, &**devices.output())?;
        let segments = Segment::of(devices.segments(&config));
        Ok(Decoder {
            config,
            devices,
            weights,
            predicting,
            predictor,
            ropes,
            activations,
            segments,
            in_transit: Vec::new(),
            tables: StepTables::default(),
        })
    }

    /// Returns the names of the checkpoint's tensors that predict further tokens and are not loaded.
    pub fn predicting_tensors(&self) -> &[String] {
        &self.predicting
    }

    /// Returns the gathers of this rank; `None` if it is the only one.
    pub fn gather_stats(&self) -> Option<GatherStats> {
        self.activations[self.devices.of_output()].ranks.as_deref().map(Ranks::stats)
    }

    /// Connects the decoder with those of other ranks.
    pub(crate) fn join_ranks(&mut self, ranks: Ranks) {
        self.activations[self.devices.of_output()].ranks = Some(Box::new(ranks));
    }

    pub(crate) fn ranks_mut(&mut self) -> Option<&mut Ranks> {
        self.activations[self.devices.of_output()].ranks.as_deref_mut()
    }

    /// Returns the minimum cost of one token. If several ranks compute the model, that of this rank.
    pub fn token_cost(&self) -> TokenCost {
        self.weights.token_cost(&self.config)
    }

    /// Returns the memory of the activations and logits of a step of `num_rows` rows, of which `num_wanted` need
    /// logits, on the device of the output. Each further device has the same without logits.
    pub fn step_bytes(&self, num_rows: usize, num_wanted: usize) -> u64 {
        self.activations[self.devices.of_output()].bytes(num_rows, num_wanted)
    }

    /// Returns the devices with the parts of the model.
    pub fn devices(&self) -> &Devices {
        &self.devices
    }

    /// Returns the device, that of the output if there are several.
    pub fn backend(&self) -> &Arc<dyn Backend> {
        self.devices.output()
    }
}

/// Refuses devices that lack something which the model needs.
fn check_devices(config: &DecoderConfig, devices: &Devices) -> Result<(), Error> {
    let missing = |what: &'static str, device: String| {
        Err(Error::NotOnDevice { architecture: config.architecture.clone(), what, device })
    };
    if devices.are_several() && config.predictor.is_some() {
        return missing("a layer that predicts further tokens (--speculate mtp)", "a group of devices".into());
    }
    for backend in devices.backends() {
        if config.num_ranks > 1 && backend.is_asynchronous() {
            return missing("a device that exchanges rows with other ranks", backend.description());
        }
        if let Some(extension) = config.extensions().find(|&extension| !backend.supports(extension)) {
            return missing(extension.name(), backend.description());
        }
    }
    Ok(())
}

impl Model for Decoder {
    fn config(&self) -> &DecoderConfig {
        &self.config
    }

    fn placed_on(&self) -> Option<&Devices> {
        Some(&self.devices)
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.launch(batch, kv, logits)?;
        self.finish(logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.launch_step(batch, kv)?;
        Ok(logits.await_rows(&**self.devices.output(), &batch.queries, self.config.vocab_size)?)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        Ok(logits.fill(&**self.devices.output(), &mut self.activations[self.devices.of_output()].logits)?)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        let experts_are_asynchronous = |experts: Experts| {
            self.devices.output().experts_are_asynchronous(num_rows, experts.num_experts, experts.routing)
        };
        // A step that is launched ahead may compute a position twice, but a state advances only once. Without such
        // steps, a row whose digest is not enough is still there to be read.
        !self.config.has_state()
            && !self.devices.are_several()
            && self.devices.output().is_asynchronous()
            && self.config.experts.is_none_or(experts_are_asynchronous)
    }

    fn supports_digests(&self) -> bool {
        self.devices.output().digest_len(self.config.vocab_size).is_some()
    }

    fn token_slots(&self) -> TokenSlots {
        match self.devices.are_several() {
            true => TokenSlots::default(),
            false => self.devices.output().token_slots(),
        }
    }

    fn predict(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        batch.check(&self.config, 0)?;
        self.run_predictor(batch, kv)?;
        let (backend, a) = (&**self.devices.output(), &mut self.activations[self.devices.of_output()]);
        Ok(predictor::read(backend, batch, &mut a.logits, self.config.vocab_size, logits)?)
    }

    fn launch_draft(&mut self, batch: &Batch, kv: &mut KvMemory, slot: usize) -> Result<(), Error> {
        assert!(batch.queries.iter().all(Option::is_some), "every wanted row of a draft step has a query");
        self.launch_step(batch, kv)?;
        Ok(self.devices.output().keep_assumed(batch.num_wanted(), slot)?)
    }

    fn fetch_drafts(&mut self, num_slots: usize) -> Result<(), Error> {
        Ok(self.devices.output().fetch_kept(num_slots)?)
    }

    fn read_drafts(&mut self, out: &mut Vec<u32>) -> Result<(), Error> {
        Ok(self.devices.output().read_kept(out)?)
    }

    fn probe(
        &mut self,
        batch: &Batch,
        kv: &mut KvMemory,
        query: &ProbeQuery,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<Option<AttentionRows>, Error> {
        if self.config.num_ranks > 1 || self.devices.are_several() {
            return Err(Error::NoProbe);
        }
        batch.check(&self.config, 0)?;
        assert!(batch.sequences.len() == 1 && batch.num_rows() > 0, "a probe is of one sequence");
        assert!(!self.config.has_state(), "a probe computes rows again, but a state advances only once");
        let backend = self.devices.output().clone();
        // Its own activations: those of the decoder hold the logits of a step that may be on the device.
        let mut own = Activations::new(&self.config, &*backend, &self.ropes)?;
        own.resize(&*backend, batch, false)?;
        own.taps = Some(Taps::new(&self.config, &*backend, batch, query)?);
        let steps = std::mem::replace(&mut self.activations[0], own);
        let outcome = self.compute_layers(batch, kv);
        let mut own = std::mem::replace(&mut self.activations[0], steps);
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
        Ok(self.devices.output().read_row(&self.activations[self.devices.of_output()].logits, row, out)?)
    }
}
