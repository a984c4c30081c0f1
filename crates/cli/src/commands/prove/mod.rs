//! `pellucid prove`: checks batch invariance to the bit, on the user's own model and machine.

mod against;
mod comparison;
mod drafts;
mod requests;

use std::io::{IsTerminal, Write};
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use pellucid::{LoadOptions, Speculation};
use pellucid_checkpoint::Checkpoint;
use pellucid_engine::{EngineOptions, Request};
use pellucid_model::{BLOCK_LEN, Model};
use pellucid_tensor::{Backend, DType};
use pellucid_tokenizer::{Tokenizer, VocabularyDifference};
use serde_json::json;

use crate::commands::bench::tasks;
use crate::commands::model_on_device::ModelOnDevice;
use crate::flags::compute::ComputeArgs;
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::server_client::ServerVariables;
use crate::terminal::format::grouped;
use crate::terminal::output::Output;
use comparison::SettingResult;
use drafts::DraftSpeed;

/// Check that replies do not depend on other requests
///
/// Random prompts are answered one at a time; then all again in batches, in
/// another order, in chunks of several sizes, with and without cached prefixes,
/// with preemption, with drafts, and, on a CPU, on one thread of one rank. Half are
/// greedy, half are sampled. Tokens and log probabilities must agree to the bit.
/// The last line is the verdict; the exit status is 1 if a reply differs.
///
/// With --draft, a draft model proposes tokens too, and its acceptance and its
/// speed-up on built-in prompts are measured at temperatures 0, 0.7 and 1.5.
///
/// With --against, running servers answer the prompts instead, each one at a time
/// and then several at once. All must have the same fingerprint and give the same
/// replies as the first one: then they can stand behind one gateway. MODEL is the
/// name that they serve, and the key is PELLUCID_API_KEY.
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

    /// Draft model, with the vocabulary of the model
    #[arg(long, value_name = "MODEL")]
    draft: Option<String>,

    /// Compare running servers, such as http://127.0.0.1:8000; may be
    /// given again
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "URL",
        num_args = 1..,
        conflicts_with = "draft",
        conflicts_with_all = ComputeArgs::FLAGS
    )]
    against: Vec<String>,

    /// Seed of the random prompts
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
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

/// Prompts on which a draft model is measured, and tokens of their replies.
const MEASURED_PROMPTS: usize = 8;
const MEASURED_REPLY: usize = 64;

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
        Ok(ModelOnDevice::new(
            pellucid::load_decoder(&checkpoint, LoadOptions::default(), &backend, &mut |_| ())?,
            backend,
        ))
    };
    let device = open(backend.clone())?;
    let requests = requests::random(QUICK, device.vocab_size());
    let single_threaded = (!backend.is_asynchronous()).then_some(|| open(single_threaded()?));
    let rows = comparison::run(QUICK, &requests, device, None, single_threaded, &mut |_| ())?;
    for row in &rows {
        if row.num_different > 0 {
            bail!("{}: {} of {} replies differ from those alone", row.name, row.num_different, row.num_replies);
        }
    }
    Ok(rows.iter().map(|row| row.num_replies).sum())
}

pub(crate) fn run(args: &ProveArgs, hub: &Hub, variables: &ServerVariables, output: &mut Output) -> Result<()> {
    if !args.against.is_empty() {
        return against::run(args, variables, output);
    }
    let checkpoint = args.compute.checkpoint(&hub.resolve(args.model.as_deref())?, hub)?;
    let backend = args.compute.backend()?;
    let model = args.compute.decoder_for(&checkpoint, &backend, &Speculation::OFF)?;
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
    let device = pellucid::description(&model);
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
    // On one rank, whatever --ranks says. A GPU has no such setting, and another device may have other bits.
    let is_cpu = model.devices().backends().iter().all(|backend| !backend.is_asynchronous());
    let single_threaded = is_cpu.then_some(single_threaded);
    let target = ModelOnDevice::new(model, backend.clone());
    let draft = args.draft.as_deref().map(|name| open_draft(args, name, hub, &checkpoint, &backend)).transpose()?;
    let speeds = match &draft {
        Some(draft) => measure_draft(plan, &requests, &checkpoint, context, &target, draft, &mut tell)?,
        None => Vec::new(),
    };
    let rows = comparison::run(plan, &requests, target, draft.as_ref(), single_threaded, &mut tell)?;
    tell("");
    let num_different = rows.iter().map(|row| row.num_different).sum::<usize>()
        + speeds.iter().map(|speed| speed.num_different).sum::<usize>();
    if args.json {
        let result = json!({
            "device": device, "prompts": args.prompts, "reply_tokens": args.reply,
            "settings": rows, "draft_model": speeds, "different": num_different, "verdict": verdict_name(num_different),
        });
        output.write_json(&result)?;
    } else {
        print(output, args, &device, &rows)?;
        if !speeds.is_empty() {
            drafts::print(output, &speeds)?;
            writeln!(output)?;
        }
        writeln!(output, "{}", verdict(num_different))?;
    }
    if num_different > 0 {
        output.flush()?;
        bail!("{num_different} replies differ from those of the requests alone; please report it with this output");
    }
    Ok(())
}

/// Loads the draft model onto the model's device. Refuses one with another vocabulary.
fn open_draft(
    args: &ProveArgs,
    name: &str,
    hub: &Hub,
    target: &Checkpoint,
    backend: &Arc<dyn Backend>,
) -> Result<ModelOnDevice> {
    let checkpoint = args.compute.checkpoint(&hub.resolve(Some(name))?, hub)?;
    // Models without a vocabulary have nothing to compare; their drafts are checked like all others.
    if let (Ok(first), Ok(second)) = (Tokenizer::from_checkpoint(target), Tokenizer::from_checkpoint(&checkpoint))
        && let Some(difference) = VocabularyDifference::find(&first, &second)
    {
        bail_usage!(
            "--draft {name}: the vocabularies differ: {difference}; a draft model needs the model's vocabulary"
        );
    }
    Ok(ModelOnDevice::new(args.compute.decoder(&checkpoint, backend)?, backend.clone()))
}

/// Measures the draft model on the prompts of `bench --tasks`, or on the random ones if the model has no vocabulary.
fn measure_draft(
    plan: Plan,
    requests: &[Request],
    checkpoint: &Checkpoint,
    context: usize,
    target: &ModelOnDevice,
    draft: &ModelOnDevice,
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<DraftSpeed>> {
    let tasks = tasks::read("")?;
    let prompts = match Tokenizer::from_checkpoint(checkpoint) {
        Ok(tokenizer) => tasks::encode(&tasks, &tokenizer, checkpoint.chat_template())?,
        Err(_) => requests.iter().map(|request| request.prompt.clone()).collect(),
    };
    let max_tokens = MEASURED_REPLY.max(plan.reply as usize);
    let mut prompts: Vec<Vec<u32>> =
        prompts.into_iter().filter(|prompt| prompt.len() + max_tokens <= context).step_by(2).collect();
    prompts.truncate(MEASURED_PROMPTS);
    if prompts.is_empty() {
        bail_usage!("--draft: no prompt and {max_tokens} tokens of a reply fit into the context of {context}");
    }
    let blocks = |prompt: &Vec<u32>| (prompt.len() + max_tokens).div_ceil(BLOCK_LEN) + 1;
    let num_blocks = prompts.iter().map(blocks).sum::<usize>();
    let options = EngineOptions { num_blocks, max_sequences: 1, ..comparison::options(plan, requests) };
    drafts::measure(target, draft, options, &prompts, max_tokens, progress)
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
    writeln!(
        out,
        "{:<28}{:>9}{:>11}{:>11}{:>10}{:>11}",
        "", "replies", "cached", "preempted", "accepted", "different"
    )?;
    for row in rows {
        let counts =
            [row.num_replies as u64, row.cached_tokens, row.preemptions, row.accepted, row.num_different as u64];
        let [replies, cached, preempted, accepted, different] = counts.map(grouped);
        writeln!(out, "{:<28}{replies:>9}{cached:>11}{preempted:>11}{accepted:>10}{different:>11}", row.name)?;
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
