//! `pellucid quantize`: writes a model with fewer bits for each weight.

use std::io::{BufWriter, IsTerminal, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::builder::PossibleValuesParser;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_checkpoint::{Checkpoint, HuggingFace, Metadata, NewTensor, Source, TensorInfo, Value, write_converted};
use pellucid_model::{GgufModel, GgufTensor, QuantScheme, TensorRole};
use pellucid_sampling::{OPTIONS, Value as OptionValue};
use pellucid_tensor::{DType, quant};
use pellucid_tokenizer::write_gguf;
use serde_json::json;

use crate::atomic_file::{self, AtomicFile};
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::format::{bytes_text, escaped, grouped};
use crate::terminal::interrupt::Interrupt;
use crate::terminal::log;
use crate::terminal::output::Output;

/// Quantize a model to a GGUF file
///
/// Reads a GGUF file or a Hugging Face folder (safetensors) in F32, F16 or BF16
/// and writes a GGUF file of the given type, with the folder's tokenizer, chat
/// template and recommended sampling options. A model that GGUF cannot represent is rejected; lost settings are
/// listed.
///
/// The _m types give more bits to the tensors that matter most. The table shows
/// the rounding error of each tensor: the root mean square error relative to the
/// root mean square of its values.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct QuantizeArgs {
    /// Path of a GGUF file or of a Hugging Face folder, or name of a pulled model
    model: String,

    /// GGUF file to write; it must not exist
    out: PathBuf,

    /// Format of most tensors
    #[arg(
        long = "type",
        value_name = "TYPE",
        ignore_case = true,
        value_parser = PossibleValuesParser::new(QuantScheme::ALL.map(QuantScheme::name))
    )]
    scheme: String,

    /// Accept a file that is quantized already; rounding errors add up
    #[arg(long)]
    requantize: bool,

    /// CPU threads [default: every core]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// One line of the table.
struct Line {
    name: String,
    from: DType,
    to: DType,
    bytes: usize,
    relative_error: f64,
}

pub(crate) fn run(args: &QuantizeArgs, hub: &Hub, interrupt: &Interrupt, output: &mut Output) -> Result<()> {
    // Checked before the model is read, which takes long.
    atomic_file::check_target(&args.out)?;
    let checkpoint = Checkpoint::open(&hub.resolve(Some(&args.model))?)?;
    let model = GgufModel::new(&checkpoint)?;
    let scheme = QuantScheme::named(&args.scheme).with_context(|| format!("--type {}: unknown format", args.scheme))?;
    let tensors = plan(&model, scheme, args.requantize)?;
    if !args.requantize {
        refuse_decoded(&checkpoint, &tensors)?;
    }
    let num_threads =
        args.threads.map_or_else(|| std::thread::available_parallelism().map_or(1, usize::from), usize::from);
    let (metadata, mut notes) = described(&checkpoint, model.metadata(), scheme)?;
    if let Some(example) = model.left_out().first() {
        let count = model.left_out().len();
        notes.push(format!("{count} tensors that are not part of the decoder are left out, such as {example}"));
    }
    for note in &notes {
        log::note(&format!("note: {}", escaped(note)));
    }
    let lines = write(&model, &metadata, &tensors, num_threads, &args.out, interrupt)?;
    report(args, scheme, &checkpoint, &notes, &lines, output)
}

/// Returns the format of every tensor. Rejects tensors that are quantized already, unless `--requantize` is given.
fn plan(model: &GgufModel<'_>, scheme: QuantScheme, requantize: bool) -> Result<Vec<NewTensor>> {
    let metadata = model.metadata();
    let num_layers = metadata.u32(&format!("{}.block_count", metadata.str("general.architecture")?))? as usize;
    let is_tied = !model.tensors().iter().any(|tensor| tensor.name == "output.weight");
    let planned = |tensor: &GgufTensor| {
        let GgufTensor { name, dtype, shape, .. } = tensor;
        let role = TensorRole { name, shape, num_layers, is_tied };
        let wanted = if name.ends_with(".weight") { scheme.dtype(role) } else { DType::F32 };
        if dtype.is_quantized() && *dtype != wanted && !requantize {
            refuse_quantized(name, dtype.name())?;
        }
        debug_assert!(quant::has_encoder(wanted), "every scheme has encoders");
        Ok(NewTensor { name: name.clone(), dtype: wanted, shape: shape.clone() })
    };
    model.tensors().iter().map(planned).collect()
}

/// Rejects a folder whose quantized weights are decoded when they are read, if the new file would round them again.
fn refuse_decoded(checkpoint: &Checkpoint, tensors: &[NewTensor]) -> Result<()> {
    if !tensors.iter().any(|tensor| tensor.dtype.is_quantized()) {
        return Ok(());
    }
    let is_decoded = |tensor: &&TensorInfo| tensor.encoding().is_some() && !tensor.dtype.is_quantized();
    let Some(tensor) = checkpoint.tensors().iter().find(is_decoded) else { return Ok(()) };
    refuse_quantized(&tensor.name, tensor.encoding().unwrap_or_default())
}

fn refuse_quantized(name: &str, format: &str) -> Result<()> {
    let name = escaped(name);
    bail_usage!("tensor {name} is {format} already: use a model in F32, F16 or BF16, or --requantize to round it again")
}

/// Returns the metadata of the new file, and notes for the user. Keys of split files are dropped: this is one file.
fn described(checkpoint: &Checkpoint, metadata: &Metadata, scheme: QuantScheme) -> Result<(Metadata, Vec<String>)> {
    const CHANGED: [&str; 2] = ["general.file_type", "general.quantization_version"];
    let mut new = Metadata::default();
    for (key, value) in metadata.iter().filter(|(key, _)| !CHANGED.contains(key) && !key.starts_with("split.")) {
        new.insert(key.to_owned(), value.clone());
    }
    // Values of `general.file_type` in GGUF.
    let file_type = match scheme.name() {
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
    let notes = match checkpoint.source() {
        Source::Gguf(_) => Vec::new(),
        Source::HuggingFace(folder) => {
            let mut notes = add_folder(folder, checkpoint.path(), &mut new)?;
            notes.extend(add_sampling(checkpoint, &mut new));
            notes
        }
    };
    Ok((new, notes))
}

/// Adds the sampling options that a folder recommends, under the names of llama.cpp. Returns notes about those that
/// have none.
fn add_sampling(checkpoint: &Checkpoint, metadata: &mut Metadata) -> Vec<String> {
    const KEYS: [(&str, &str); 5] = [
        ("temperature", "temp"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "penalty_repeat"),
    ];
    let recommended = pellucid::recommended_sampling(checkpoint);
    let mut notes: Vec<String> = recommended.warning.into_iter().collect();
    for option in OPTIONS {
        let Some(value) = recommended.options.get(option.param()) else { continue };
        let key = KEYS.iter().find(|(param, _)| *param == option.param());
        let value = match value {
            OptionValue::Number(number) => Some(Value::F32(*number)),
            OptionValue::Count(count) => i32::try_from(*count).ok().map(Value::I32),
            _ => None,
        };
        match (key, value) {
            (Some((_, key)), Some(value)) => {
                metadata.insert(format!("general.sampling.{key}"), value);
            }
            _ => notes.push(format!("the recommended {} is not written to the file", option.param())),
        }
    }
    notes
}

/// Adds the name and the tokenizer of a folder to the metadata.
fn add_folder(folder: &HuggingFace, path: &Path, metadata: &mut Metadata) -> Result<Vec<String>> {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let folder_path = if whole.is_dir() { Some(whole.as_path()) } else { whole.parent() };
    if let Some(name) = folder_path.and_then(Path::file_name) {
        metadata.insert("general.name".into(), Value::String(name.to_string_lossy().into_owned()));
    }
    metadata.insert("general.type".into(), Value::String("model".into()));
    if folder.tokenizer.is_none() {
        metadata.insert("tokenizer.ggml.model".into(), Value::String("none".into()));
        return Ok(vec![
            "the folder has no tokenizer.json, so the file has no vocabulary: ids go in and ids come out".into(),
        ]);
    }
    let vocab_size = metadata.u32(&format!("{}.vocab_size", metadata.str("general.architecture")?))?;
    Ok(write_gguf(folder, vocab_size as usize, metadata)?)
}

/// Writes the tensors to a temporary file that is renamed at the end, so that the target is always complete.
fn write(
    model: &GgufModel<'_>,
    metadata: &Metadata,
    tensors: &[NewTensor],
    num_threads: usize,
    target: &Path,
    interrupt: &Interrupt,
) -> Result<Vec<Line>> {
    let (new, file) = AtomicFile::create(target, interrupt)?;
    let bar = bar(tensors.iter().map(NewTensor::num_bytes).sum());
    let mut lines = Vec::new();
    let written =
        write_converted(model, metadata, tensors, num_threads, (new.part(), BufWriter::new(file)), &mut |converted| {
            bar.inc(converted.tensor.num_bytes() as u64);
            lines.push(Line {
                name: converted.tensor.name.clone(),
                from: model.tensors()[lines.len()].dtype,
                to: converted.tensor.dtype,
                bytes: converted.tensor.num_bytes(),
                relative_error: converted.relative_error,
            });
        });
    bar.finish_and_clear();
    let file = written?.into_inner().map_err(|error| error.into_error());
    let file = file.with_context(|| format!("could not write {}", target.display()))?;
    new.finish(&file)?;
    Ok(lines)
}

fn report(
    args: &QuantizeArgs,
    scheme: QuantScheme,
    checkpoint: &Checkpoint,
    notes: &[String],
    lines: &[Line],
    output: &mut Output,
) -> Result<()> {
    let (before, after) = (checkpoint.file_bytes(), std::fs::metadata(&args.out)?.len());
    if args.json {
        let tensors: Vec<_> = (lines.iter())
            .map(|line| {
                json!({ "name": line.name, "from": line.from.name(), "to": line.to.name(), "bytes": line.bytes,
                        "relative_error": line.relative_error })
            })
            .collect();
        let result = json!({
            "type": scheme.name(),
            "file_bytes_before": before,
            "file_bytes": after,
            "notes": notes,
            "tensors": tensors,
        });
        return Ok(output.write_json(&result)?);
    }
    writeln!(output, "{:<38}{:<14}{:>14}{:>10}", "tensor", "type", "bytes", "error")?;
    for line in lines {
        let kind =
            if line.from == line.to { line.to.name().to_owned() } else { format!("{} > {}", line.from, line.to) };
        let error = format!("{:.3} %", line.relative_error * 100.0);
        let bytes = grouped(line.bytes as u64);
        writeln!(output, "{:<38}{kind:<14}{bytes:>14}{error:>10}", escaped(&line.name))?;
    }
    writeln!(output, "\n{} from {}", bytes_text(after), bytes_text(before))?;
    Ok(())
}

fn bar(num_bytes: usize) -> ProgressBar {
    if !std::io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::with_draw_target(Some(num_bytes as u64), ProgressDrawTarget::stderr_with_hz(10));
    let style = ProgressStyle::with_template("quantizing {bar:24} {decimal_bytes}/{decimal_total_bytes} {eta}");
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
