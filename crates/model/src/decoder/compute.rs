//! One step of a decoder: embed, layers, norm, logits, on one device after the other.

use std::ops::Range;

use pellucid_tensor::{Backend, Error as DeviceError, Pending, Residual, StepMemo, TableRows, Tensor};

use super::Decoder;
use crate::activations::{Activations, normed};
use crate::batch::StepTables;
use crate::devices::{DeviceIndex, Part};
use crate::probe::LAYERS_AT_ONCE;
use crate::ranks::{Columns, Ranks};
use crate::weights::{Norm, Weights};
use crate::{Batch, DecoderConfig, Error, KvMemory, layer_input, mixer, mlp, predictor};

/// The end of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    /// The logits of the wanted rows.
    Logits,
    /// The wanted rows after the last norm.
    Rows,
    /// The logits of the layer that predicts further tokens, without the decoder's own.
    Prediction,
}

/// Parts of the model that follow each other on one device.
#[derive(Debug)]
pub(super) struct Segment {
    device: DeviceIndex,
    parts: Range<Part>,
    /// Whether this is the first segment of its device.
    enters_device: bool,
    /// The backend's state of these operations, for each end of a step.
    memos: [StepMemo; 3],
}

impl Segment {
    pub(super) fn of(parts: Vec<(DeviceIndex, Range<Part>)>) -> Vec<Segment> {
        let mut entered = Vec::new();
        let segment = |(device, parts): (DeviceIndex, Range<Part>)| {
            let enters_device = !entered.contains(&device);
            entered.push(device);
            Segment { device, parts, enters_device, memos: <[StepMemo; 3]>::default() }
        };
        parts.into_iter().map(segment).collect()
    }
}

impl Decoder {
    /// Computes the batch's rows, stores their keys and values, and appends the wanted rows after the last norm to
    /// `out`: the rows from which logits would be computed.
    pub(crate) fn hidden_rows(&mut self, batch: &Batch, kv: &mut KvMemory, out: &mut Vec<f32>) -> Result<(), Error> {
        assert_eq!(self.config.num_ranks, 1, "rows are pooled on one rank");
        batch.check(&self.config, 0)?;
        self.resize_activations(batch, false)?;
        self.run_segments(batch, kv, &StepTables::default(), End::Rows)?;
        let start = out.len();
        let rows = &self.activations[self.devices.of_output()].last_normed;
        out.resize(start + rows.len(), 0.0);
        self.devices.output().read(rows, &mut out[start..])?;
        // The weight of the last norm contains the division of the logits, which these rows must not have.
        if self.config.logits_divisor != 1.0 {
            out[start..].iter_mut().for_each(|value| *value *= self.config.logits_divisor);
        }
        Ok(())
    }

    /// Starts the operations of a step, on every rank.
    pub(crate) fn launch_step(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), Error> {
        assert!(!self.config.has_state() || !kv.states.is_empty(), "`KvMemory::with_states` allocates the states");
        // `self.tables` are those of the step before.
        batch.check(&self.config, self.tables.queries.len())?;
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
        self.resize_activations(batch, true)?;
        let mut tables = std::mem::take(&mut self.tables);
        batch.write_queries(&mut tables.queries);
        predictor::write_previous_slots(batch, kv, &mut tables.previous_slots);
        let result = self.run_segments(batch, kv, &tables, End::Logits);
        self.tables = tables;
        Ok(result?)
    }

    /// Computes the logits of the layer that predicts further tokens. The model is on one device.
    pub(super) fn run_predictor(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), DeviceError> {
        self.resize_activations(batch, true)?;
        let mut tables = StepTables::default();
        predictor::write_previous_slots(batch, kv, &mut tables.previous_slots);
        self.run_segments(batch, kv, &tables, End::Prediction)
    }

    /// Gives the activations of every device the rows of a step. Only the device of the output needs logits.
    fn resize_activations(&mut self, batch: &Batch, needs_logits: bool) -> Result<(), DeviceError> {
        let output = self.devices.of_output();
        let of_devices = self.devices.backends().iter().zip(&mut self.activations).enumerate();
        for (device, (backend, activations)) in of_devices {
            activations.resize(&**backend, batch, needs_logits && device == output)?;
        }
        Ok(())
    }

    /// Computes all parts of the model, each on its device.
    fn run_segments(
        &mut self,
        batch: &Batch,
        kv: &mut KvMemory,
        tables: &StepTables,
        end: End,
    ) -> Result<(), DeviceError> {
        for i in 0..self.segments.len() {
            if let Some(before) = i.checked_sub(1) {
                self.hand_over(before, i)?;
            }
            let backend = self.devices.backends()[self.segments[i].device].clone();
            let mut index = batch.index(kv, tables);
            // Digests are made of the logits.
            if i + 1 < self.segments.len() {
                index.queries = &[];
            }
            let mut memo = std::mem::take(&mut self.segments[i].memos[end as usize]);
            let result = backend.step(&index, &mut memo, &mut || self.compute_segment(i, batch, tables, kv, end));
            self.segments[i].memos[end as usize] = memo;
            result?;
        }
        Ok(())
    }

    /// Copies the residual stream from the device of one segment to that of the next one, through the host.
    fn hand_over(&mut self, from: usize, to: usize) -> Result<(), DeviceError> {
        let (enters_device, from, to) =
            (self.segments[to].enters_device, self.segments[from].device, self.segments[to].device);
        let [source, target] = self.activations.get_disjoint_mut([from, to]).expect("segments of two devices");
        let [from, to] = [from, to].map(|device| &*self.devices.backends()[device]);
        let mut copy = |source: &Tensor, target: &mut Tensor| {
            self.in_transit.resize(source.len(), 0.0);
            from.read(source, &mut self.in_transit)?;
            to.write(&self.in_transit, target)
        };
        copy(&source.residual.hidden, &mut target.residual.hidden)?;
        target.residual.pending = Pending::Nothing;
        // The inputs that each layer has in addition do not change.
        if enters_device && self.config.layer_input_size.is_some() {
            copy(&source.layer_inputs.inputs, &mut target.layer_inputs.inputs)?;
        }
        Ok(())
    }

    /// Computes one segment. In a model on one device that is everything, from ids to logits and, if there are queries,
    /// their digests. Steps of the same size run the same operations on the same tensors, so that a device can record
    /// and replay them.
    fn compute_segment(
        &mut self,
        i: usize,
        batch: &Batch,
        tables: &StepTables,
        kv: &mut KvMemory,
        end: End,
    ) -> Result<(), DeviceError> {
        if end == End::Prediction {
            return self.compute_prediction(batch, tables, kv);
        }
        if i == 0 {
            self.embed(batch)?;
        }
        self.compute_parts(i, batch, kv)?;
        if i + 1 < self.segments.len() {
            return Ok(());
        }
        let Decoder { config, devices, weights, activations, predictor, .. } = self;
        let (backend, a) = (&**devices.output(), &mut activations[devices.of_output()]);
        let Activations { residual, last, last_normed, logits, ranks, .. } = &mut *a;
        let last = wanted_rows(backend, batch, &residual.hidden, last)?;
        if end == End::Rows {
            return backend.input(normed(backend, config, &weights.final_norm, last, last_normed)?).map(drop);
        }
        // The logits of the wanted rows only: the output projection is the largest matrix of many models.
        project_rows(backend, (config, weights), ranks.as_deref_mut(), last, [last_normed, logits])?;
        if !tables.queries.is_empty() {
            backend.digest(logits, &tables.queries)?;
        }
        match predictor {
            Some(own) => predictor::follow(backend, config, weights, (batch, tables), kv, (a, own)),
            None => Ok(()),
        }
    }

    fn compute_prediction(&mut self, batch: &Batch, tables: &StepTables, kv: &mut KvMemory) -> Result<(), DeviceError> {
        let Decoder { config, devices, weights, activations, predictor, ropes, .. } = self;
        let (backend, a) = (&**devices.output(), &mut activations[devices.of_output()]);
        let own = predictor.as_mut().expect("the model was loaded with a predictor");
        for (rope, angles) in ropes.iter().zip(&mut a.angles) {
            backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
        }
        predictor::forward(backend, config, weights, (batch, tables), kv, (a, own))
    }

    /// `hidden = scale * embedding[id] (+ positions[position])`. The stream is kept divided by `residual_scale`.
    fn embed(&mut self, batch: &Batch) -> Result<(), DeviceError> {
        let Decoder { config, devices, weights, activations, .. } = self;
        let device = devices.of_embedding();
        let (backend, a) = (&*devices.backends()[device], &mut activations[device]);
        let Residual { hidden, update, pending } = &mut a.residual;
        *pending = Pending::Nothing;
        backend.embed(&weights.embedding, TableRows::Tokens(&batch.ids), config.stream_embedding_scale(), hidden)?;
        if let Some(positions) = &weights.positions {
            backend.embed(positions, TableRows::Positions(&batch.positions), 1.0, update)?;
            backend.add(update, hidden)?;
        }
        match &weights.layer_inputs {
            Some(tables) => layer_input::prepare(backend, config, tables, batch, a),
            None => Ok(()),
        }
    }

    /// Computes the residual stream after the last layer, on one device.
    pub(super) fn compute_layers(&mut self, batch: &Batch, kv: &mut KvMemory) -> Result<(), DeviceError> {
        assert_eq!(self.segments.len(), 1, "one device has all layers");
        self.embed(batch)?;
        self.compute_parts(0, batch, kv)
    }

    /// Computes the layers of a segment, as far as they belong to it.
    fn compute_parts(&mut self, i: usize, batch: &Batch, kv: &mut KvMemory) -> Result<(), DeviceError> {
        let Decoder { config, devices, weights, activations, ropes, segments, .. } = self;
        let Segment { device, ref parts, enters_device, .. } = segments[i];
        let (backend, a) = (&*devices.backends()[device], &mut activations[device]);
        if enters_device {
            for (rope, angles) in ropes.iter().zip(&mut a.angles) {
                backend.rope_angles(&batch.positions, &rope.frequencies, rope.factor, angles)?;
            }
        }
        let mut entry = a.enter(backend, config, first_norm(weights, parts.clone()))?;
        for part in parts.start..parts.end.min(2 * weights.layers.len()) {
            let (index, layer) = (part / 2, &weights.layers[part / 2]);
            let next = first_norm(weights, part + 1..parts.end);
            match (part % 2 == 0, &layer.mixer, &layer.mlp) {
                (true, Some(mixer), _) => {
                    let output_norm = layer.attention_output_norm.as_ref();
                    mixer::forward(backend, config, (index, mixer), batch, kv, (entry, output_norm), a)?;
                    entry = a.join(backend, config, output_norm, next)?;
                }
                (false, _, Some(mlp)) => {
                    let output_norm = layer.mlp_output_norm.as_ref();
                    mlp::forward(backend, config, (index, mlp), (entry, output_norm), a)?;
                    if layer.input.is_some() || layer.scale.is_some() {
                        a.join(backend, config, output_norm, None)?;
                        layer_input::finish_layer(backend, config, (index, layer), a)?;
                        entry = a.enter(backend, config, next)?;
                    } else {
                        entry = a.join(backend, config, output_norm, next)?;
                    }
                }
                // A layer may have one of the two alone.
                _ => {}
            }
        }
        match &mut a.taps {
            Some(taps) => taps.after_layer(backend, weights.layers.len() - 1, &a.residual.hidden),
            None => Ok(()),
        }
    }

    /// Computes the logits of each row of `streams`, a few rows at a time, and hands them to `on_layer`.
    pub(super) fn project_layers(
        &self,
        streams: &Tensor,
        a: &mut Activations,
        on_layer: &mut dyn FnMut(&[f32]),
    ) -> Result<(), DeviceError> {
        let backend = &**self.devices.output();
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
}

/// Returns the norm before the first of these parts that the model has. The output has its norm itself.
fn first_norm(weights: &Weights, parts: Range<Part>) -> Option<&Norm> {
    let mut norms = parts.filter_map(|part| {
        let layer = weights.layers.get(part / 2)?;
        match part % 2 {
            0 => layer.mixer.is_some().then_some(layer.attention_norm.as_ref()),
            _ => layer.mlp.is_some().then_some(layer.mlp_norm.as_ref()),
        }
    });
    norms.next().flatten()
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
