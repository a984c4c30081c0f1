//! The model to measure: from a file, or random weights in a known shape.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result};
use pellucid_checkpoint::{Checkpoint, GgufWriter, NewTensor, Source};
use pellucid_engine::SpeculationOptions;
use pellucid_model::{Decoder, Model, QuantScheme, SyntheticModel};
use pellucid_tensor::{Backend, DType};
use serde::Serialize;

use super::BenchArgs;
use crate::atomic_file::{self, AtomicFile};
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::hub::Hub;
use crate::terminal::interrupt::Interrupt;

/// A model on its device.
pub(super) struct Ready {
    pub(super) name: String,
    pub(super) file_bytes: u64,
    pub(super) model: Decoder,
    pub(super) backend: Arc<dyn Backend>,
    pub(super) kv_dtype: DType,
}

/// The model and the machine of a measurement.
#[derive(Debug, Serialize)]
pub(super) struct Machine {
    pub(super) model: String,
    pub(super) model_bytes: u64,
    /// Bytes of weights that a step of one token reads.
    pub(super) step_bytes: u64,
    pub(super) device: String,
    pub(super) kv_type: &'static str,
    /// Read bandwidth, measured with a buffer of `step_bytes`.
    pub(super) read_bytes_per_second: f64,
}

/// Minimum and maximum buffer for the read bandwidth: larger than any cache, and small enough to allocate.
const READ_SIZES: (u64, u64) = (16 << 20, 1 << 30);

impl Ready {
    pub(super) fn machine(&self) -> Result<Machine> {
        let step_bytes = self.model.token_cost().weight_bytes;
        let read_bytes_per_second =
            self.backend.read_bandwidth(step_bytes.clamp(READ_SIZES.0, READ_SIZES.1) as usize)?;
        Ok(Machine {
            model: self.name.clone(),
            model_bytes: self.file_bytes,
            step_bytes,
            device: pellucid::description(&self.model),
            kv_type: self.kv_dtype.name(),
            read_bytes_per_second,
        })
    }
}

pub(super) fn load(args: &BenchArgs, hub: &Hub) -> Result<Ready> {
    let checkpoint = match &args.shape {
        Some(shape) => random(shape, args.scheme.as_deref(), args.layers)?,
        None => args.compute.checkpoint(&hub.resolve(args.model.as_deref())?, hub)?,
    };
    let backend = args.compute.backend()?;
    ready(args, &checkpoint, &backend)
}

/// Loads random weights of a draft model onto a device that is open already.
pub(super) fn random_draft(
    args: &BenchArgs,
    shape: &str,
    scheme: Option<&str>,
    backend: &Arc<dyn Backend>,
) -> Result<Ready> {
    ready(args, &random(shape, scheme, None)?, backend)
}

fn ready(args: &BenchArgs, checkpoint: &Checkpoint, backend: &Arc<dyn Backend>) -> Result<Ready> {
    let (model, backend) = (decoder(args, checkpoint, backend)?, backend.clone());
    let path = checkpoint.path();
    let name = path.file_name().map_or_else(|| path.display().to_string(), |name| name.to_string_lossy().into_owned());
    Ok(Ready { name, file_bytes: checkpoint.file_bytes(), model, backend, kv_dtype: args.compute.kv_type.dtype() })
}

fn decoder(args: &BenchArgs, checkpoint: &Checkpoint, backend: &Arc<dyn Backend>) -> Result<Decoder> {
    args.compute.decoder_for(checkpoint, backend, &args.speculation.named()?)
}

/// Drafters of the engine that is measured.
pub(super) struct Drafters {
    pub(super) options: SpeculationOptions,
    /// The draft model.
    pub(super) model: Option<Decoder>,
}

/// Returns the drafters of `--speculate`, with the draft model on the device of the model.
pub(super) fn drafters(args: &BenchArgs, hub: &Hub, ready: &Ready) -> Result<Drafters> {
    let speculation = args.speculation.resolve(hub)?;
    let options = speculation.options();
    let Some(path) = speculation.draft_path() else { return Ok(Drafters { options, model: None }) };
    let checkpoint = args.compute.checkpoint(path, hub)?;
    let model = args.compute.decoder(&checkpoint, &ready.backend)?;
    let (own, target) = (model.config().vocab_size, ready.model.config().vocab_size);
    if own != target {
        bail_usage!("--speculate: the draft model has {own} tokens, expected {target}, those of {}", ready.name);
    }
    Ok(Drafters { options, model: Some(model) })
}

/// Creates random weights, and shows progress on a terminal.
fn random(name: &str, scheme: Option<&str>, num_layers: Option<usize>) -> Result<Checkpoint> {
    let mut shape = SyntheticModel::named(name).with_context(|| format!("--shape {name}: unknown model"))?;
    if let Some(num_layers) = num_layers {
        shape = shape.with_layers(num_layers).map_err(|all| {
            UsageError::because(format!("--layers {num_layers}: {name} has {all} layers; expected 1 to {all}"))
        })?;
    }
    let scheme = scheme.unwrap_or("q4_k_m");
    let scheme = QuantScheme::named(scheme).with_context(|| format!("--type {scheme}: unknown format"))?;
    let shows = std::io::stderr().is_terminal();
    let checkpoint = shape.checkpoint(scheme, 1, &mut |done, all| {
        if shows {
            let end = if done == all { "\r\u{1b}[K" } else { "" };
            let _ = write!(std::io::stderr(), "\rrandom weights: {done} of {all} tensors{end}");
        }
    })?;
    Ok(checkpoint)
}

/// Writes the random model to a file, so that other engines can be measured with it.
pub(super) fn write(args: &BenchArgs, path: &Path, interrupt: &Interrupt) -> Result<()> {
    atomic_file::check_target(path)?;
    let checkpoint = random(args.shape.as_deref().unwrap_or_default(), args.scheme.as_deref(), args.layers)?;
    let Source::Gguf(metadata) = checkpoint.source() else { unreachable!("a shape has GGUF keys") };
    let tensors: Vec<NewTensor> = (checkpoint.tensors().iter())
        .map(|tensor| NewTensor { name: tensor.name.clone(), dtype: tensor.dtype, shape: tensor.shape.clone() })
        .collect();
    let (new, file) = AtomicFile::create(path, interrupt)?;
    let written = || -> std::io::Result<File> {
        let mut writer = GgufWriter::new(BufWriter::new(file), metadata, &tensors)?;
        for tensor in &tensors {
            writer.write_tensor(&checkpoint.tensor(&tensor.name).expect("a tensor of its own").bytes())?;
        }
        Ok(writer.finish()?.into_inner()?)
    };
    new.finish(&written().with_context(|| format!("could not write {}", path.display()))?)
}
