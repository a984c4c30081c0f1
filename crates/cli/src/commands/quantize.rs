//! `pellucid quantize`: a model once more, in fewer bits.

use std::fs::File;
use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_checkpoint::{Checkpoint, Metadata, NewTensor, Source, TensorInfo, Value, recode};
use pellucid_model::{TensorPlace, WeightMix};
use pellucid_tensor::{DType, quant};
use serde_json::json;

use crate::format::{bytes_text, grouped, plain};
use crate::hub::Hub;
use crate::output::Output;

/// Write a model in fewer bits
///
/// Takes a GGUF file in F32, F16 or BF16 and writes one of the given type.
/// The _m mixes give more bits to the tensors that matter most. The table says
/// what rounding did to each tensor: the root of the mean squared error, as a
/// share of the tensor's own size.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct QuantizeArgs {
    /// Path of a GGUF file, or name of a pulled model
    model: String,

    /// GGUF file to write; it must not exist
    out: PathBuf,

    /// What most tensors become
    #[arg(long = "type", value_name = "TYPE", value_parser = PossibleValuesParser::new(WeightMix::ALL.map(WeightMix::name)))]
    mix: String,

    /// Take a file that is quantized already; errors add up
    #[arg(long)]
    requantize: bool,

    /// Threads [default: every core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// A line of the table.
struct Line {
    name: String,
    from: DType,
    to: DType,
    bytes: usize,
    relative_error: f64,
}

pub(crate) fn run(args: &QuantizeArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let checkpoint = Checkpoint::open(&hub.resolve(Some(&args.model))?)?;
    let Source::Gguf(metadata) = checkpoint.source() else {
        bail!("{}: a Hugging Face folder; quantize takes a GGUF file, convert it first", checkpoint.path().display());
    };
    let mix = WeightMix::named(&args.mix).with_context(|| format!("--type {} is not known", args.mix))?;
    let tensors = plan(&checkpoint, metadata, mix, args.requantize)?;
    let num_threads =
        args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let lines = write(&checkpoint, &described(metadata, mix), &tensors, num_threads, &args.out)?;
    report(args, &checkpoint, &lines, output)
}

/// The format of every tensor. Refuses what is quantized already, unless that is wanted.
fn plan(checkpoint: &Checkpoint, metadata: &Metadata, mix: WeightMix, requantize: bool) -> Result<Vec<NewTensor>> {
    let num_layers = metadata.u32(&format!("{}.block_count", checkpoint.architecture()?))? as usize;
    let is_tied = checkpoint.find_tensor("output.weight").is_none();
    let planned = |tensor: &TensorInfo| {
        let TensorInfo { name, dtype, shape, .. } = tensor;
        let place = TensorPlace { name, shape, num_layers, is_tied };
        let wanted = if name.ends_with(".weight") { mix.dtype(place) } else { DType::F32 };
        if dtype.is_quantized() && *dtype != wanted && !requantize {
            bail!(
                "tensor {} is {dtype}: quantize starts from F32, F16 or BF16, or with --requantize from what is there",
                plain(name)
            );
        }
        debug_assert!(quant::has_encoder(wanted), "every mix has encoders");
        Ok(NewTensor { name: name.clone(), dtype: wanted, shape: shape.clone() })
    };
    checkpoint.tensors().iter().map(planned).collect()
}

/// The file's own keys, with what it is now. Keys that count the parts of a split file go: this is one file.
fn described(metadata: &Metadata, mix: WeightMix) -> Metadata {
    const CHANGED: [&str; 2] = ["general.file_type", "general.quantization_version"];
    let mut new = Metadata::default();
    for (key, value) in metadata.iter().filter(|(key, _)| !CHANGED.contains(key) && !key.starts_with("split.")) {
        new.insert(key.to_owned(), value.clone());
    }
    // The numbers by which GGUF files know these mixes.
    let file_type = match mix.name() {
        "f32" => 0,
        "f16" => 1,
        "q4_0" => 2,
        "q4_1" => 3,
        "q8_0" => 7,
        "q5_0" => 8,
        "q5_1" => 9,
        "q4_k" => 14,
        "q4_k_m" => 15,
        "q5_k" => 16,
        "q5_k_m" => 17,
        "q6_k" => 18,
        _ => 32,
    };
    new.insert(CHANGED[0].into(), Value::U32(file_type));
    new.insert(CHANGED[1].into(), Value::U32(2));
    new
}

/// Writes beside the target and renames at the end: a file that has the name is whole.
fn write(
    checkpoint: &Checkpoint,
    metadata: &Metadata,
    tensors: &[NewTensor],
    num_threads: usize,
    target: &Path,
) -> Result<Vec<Line>> {
    let failed = || format!("could not write {}", target.display());
    if target.exists() {
        bail!("{} exists already; name another file, or remove it first", target.display());
    }
    let part = target.with_extension("part");
    let file = File::create_new(&part).with_context(|| format!("could not create {}", part.display()))?;
    let bar = bar(tensors.iter().map(NewTensor::num_bytes).sum());
    let mut lines = Vec::new();
    let written = recode(checkpoint, metadata, tensors, num_threads, (&part, BufWriter::new(file)), &mut |recoded| {
        bar.inc(recoded.tensor.num_bytes() as u64);
        lines.push(Line {
            name: recoded.tensor.name.clone(),
            from: recoded.from,
            to: recoded.tensor.dtype,
            bytes: recoded.tensor.num_bytes(),
            relative_error: recoded.relative_error,
        });
    });
    bar.finish_and_clear();
    let finished = written.map_err(anyhow::Error::from).and_then(|out| {
        let file = out.into_inner().map_err(|error| error.into_error()).with_context(failed)?;
        file.sync_all().with_context(failed)?;
        std::fs::rename(&part, target).with_context(failed)
    });
    if finished.is_err() {
        // What is left of a failed run is of no use; that it cannot be removed would only hide why it failed.
        let _ = std::fs::remove_file(&part);
    }
    finished.map(|()| lines)
}

fn report(args: &QuantizeArgs, checkpoint: &Checkpoint, lines: &[Line], output: &mut Output) -> Result<()> {
    let (before, after) = (checkpoint.file_bytes(), std::fs::metadata(&args.out)?.len());
    if args.json {
        let tensors: Vec<_> = (lines.iter())
            .map(|line| {
                json!({ "name": line.name, "from": line.from.name(), "to": line.to.name(), "bytes": line.bytes,
                        "relative_error": line.relative_error })
            })
            .collect();
        let result = json!({ "type": args.mix, "file_bytes_before": before, "file_bytes": after, "tensors": tensors });
        return Ok(output.write_json(&result)?);
    }
    writeln!(output, "{:<38}{:<14}{:>14}{:>10}", "tensor", "type", "bytes", "error")?;
    for line in lines {
        let kind =
            if line.from == line.to { line.to.name().to_owned() } else { format!("{} > {}", line.from, line.to) };
        let error = format!("{:.3} %", line.relative_error * 100.0);
        let bytes = grouped(line.bytes as u64);
        writeln!(output, "{:<38}{kind:<14}{bytes:>14}{error:>10}", plain(&line.name))?;
    }
    writeln!(output, "\n{} from {}", bytes_text(after), bytes_text(before))?;
    Ok(())
}

fn bar(num_bytes: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(num_bytes as u64), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("quantizing {bar:24} {bytes}/{total_bytes} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
