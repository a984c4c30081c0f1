//! `pellucid prove`: checks batch invariance to the bit, on the user's own model and machine.

mod comparison;
mod requests;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pellucid_checkpoint::Checkpoint;
use pellucid_model::Model;
use pellucid_tensor::{Backend, DType};
use serde_json::json;

use crate::commands::model_on_device::ModelOnDevice;
use crate::flags::compute::ComputeArgs;
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::format::grouped;
use crate::terminal::output::Output;
use comparison::SettingResult;

/// Check that replies do not depend on other requests
///
/// Random prompts are answered one at a time; then all again in batches, in
/// another order, in chunks of several sizes, with and without cached prefixes,
/// with preemption, and, on a CPU, on one thread. Half are greedy, half are
/// sampled. Tokens and log probabilities must agree to the bit. The last line is
/// the verdict; the exit status is 1 if a reply differs.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ProveArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    /// [default: qwen2.5-coder-1.5b, 1.1 GB, downloaded on first use]
    #[arg(verbatim_doc_comment)]
    model: Option<String>,

    /// Prompts to answer in each setting
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..=1_000_000))]
    prompts: u32,

    /// Tokens of the longest prompt
    #[arg(long, value_name = "TOKENS", default_value_t = 200, value_parser = clap::value_parser!(u32).range(2..))]
    longest: u32,

    /// Tokens of each reply
    #[arg(long, value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..))]
    reply: u32,

    /// Maximum requests in a batch
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(2..=1024))]
    together: u32,

    /// Seed of the random prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    compute: ComputeArgs,
}

/// The requests of a comparison, and the format of keys and values.
#[derive(Debug, Clone, Copy)]
struct Plan {
    prompts: u32,
    longest: u32,
    reply: u32,
    together: u32,
    seed: u64,
    kv_dtype: DType,
}

/// The comparison of `selftest`: seconds on a CPU.
const QUICK: Plan = Plan { prompts: 48, longest: 80, reply: 12, together: 8, seed: 0, kv_dtype: DType::F16 };

/// Compares replies of the tiny model that the program contains on a device. Fails if one differs; returns the number
/// of replies. `single_threaded` opens the CPU with one thread.
pub(crate) fn quick(
    backend: &Arc<dyn Backend>,
    folder: &Path,
    single_threaded: impl FnOnce() -> Result<Arc<dyn Backend>>,
) -> Result<usize> {
    let path = folder.join("tiny.gguf");
    std::fs::write(&path, pellucid::TINY_MODEL).with_context(|| format!("could not write {}", path.display()))?;
    let checkpoint = Checkpoint::open(&path)?;
    let open = |backend: Arc<dyn Backend>| -> Result<ModelOnDevice> {
        Ok(ModelOnDevice::new(pellucid::load_decoder(&checkpoint, None, &backend, &mut |_| ())?, backend))
    };
    let device = open(backend.clone())?;
    let requests = requests::random(QUICK, device.vocab_size());
    let single_threaded = (!backend.is_asynchronous()).then_some(|| open(single_threaded()?));
    let rows = comparison::run(QUICK, &requests, device, single_threaded, &mut |_| ())?;
    for row in &rows {
        if row.num_different > 0 {
            bail!("{}: {} of {} replies differ from those alone", row.name, row.num_different, row.num_replies);
        }
    }
    Ok(rows.iter().map(|row| row.num_replies).sum())
}

pub(crate) fn run(args: &ProveArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let checkpoint = args.compute.checkpoint(&hub.resolve(args.model.as_deref())?, hub)?;
    let backend = args.compute.backend()?;
    let model = args.compute.decoder(&checkpoint, &backend)?;
    let context = model.config().context_len;
    let positions = args.longest as usize + args.reply as usize;
    if positions > context {
        bail_usage!("--longest and --reply need {positions} tokens, but the model's context holds {context}");
    }
    let plan = Plan {
        prompts: args.prompts,
        longest: args.longest,
        reply: args.reply,
        together: args.together,
        seed: args.seed,
        kv_dtype: args.compute.kv_type.dtype(),
    };
    let requests = requests::random(plan, model.config().vocab_size);
    let device = backend.description();
    let shows = std::io::stderr().is_terminal();
    let mut tell = |text: &str| {
        if shows {
            let _ = write!(std::io::stderr(), "\r\u{1b}[K{text}");
        }
    };
    let single_threaded = || {
        let backend = args.compute.single_threaded()?;
        Ok(ModelOnDevice::new(args.compute.decoder(&checkpoint, &backend)?, backend))
    };
    // A GPU has no such setting, and another device may have other bits.
    let single_threaded = (!backend.is_asynchronous()).then_some(single_threaded);
    let rows = comparison::run(plan, &requests, ModelOnDevice::new(model, backend), single_threaded, &mut tell)?;
    tell("");
    let num_different = rows.iter().map(|row| row.num_different).sum::<usize>();
    if args.json {
        let result = json!({
            "device": device, "prompts": args.prompts, "reply_tokens": args.reply,
            "settings": rows, "different": num_different, "verdict": verdict_name(num_different),
        });
        output.write_json(&result)?;
    } else {
        print(output, args, &device, &rows)?;
        writeln!(output, "{}", verdict(num_different))?;
    }
    if num_different > 0 {
        output.flush()?;
        bail!("{num_different} replies differ from those of the requests alone; please report it with this output");
    }
    Ok(())
}

fn verdict_name(num_different: usize) -> &'static str {
    if num_different == 0 { "proved" } else { "refuted" }
}

/// Returns the last line of the report.
fn verdict(num_different: usize) -> String {
    match num_different {
        0 => "proved: no reply depended on the other requests, to the bit".to_owned(),
        count => format!("REFUTED: {} replies depended on the other requests", grouped(count as u64)),
    }
}

fn print(out: &mut impl Write, args: &ProveArgs, device: &str, rows: &[SettingResult]) -> Result<()> {
    writeln!(
        out,
        "{} prompts of 1 to {} tokens, {} tokens each, on {device}\n",
        args.prompts, args.longest, args.reply
    )?;
    writeln!(out, "{:<30}{:>10}{:>12}{:>12}{:>12}", "", "replies", "cached", "preempted", "different")?;
    for row in rows {
        let counts =
            [row.num_replies as u64, row.cached_tokens, row.preemptions, row.num_different as u64].map(grouped);
        let [replies, cached, preempted, different] = counts;
        writeln!(out, "{:<30}{replies:>10}{cached:>12}{preempted:>12}{different:>12}", row.name)?;
    }
    let replies: usize = rows.iter().map(|row| row.num_replies).sum();
    let tokens: usize = rows.iter().map(|row| row.num_tokens).sum();
    writeln!(
        out,
        "\n{} replies, {} tokens and their log probabilities compared as bits",
        grouped(replies as u64),
        grouped(tokens as u64)
    )?;
    Ok(())
}
