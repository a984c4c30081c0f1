//! `pellucid prove`: checks batch invariance to the bit, on the user's own model and machine.

mod comparison;
mod requests;

use std::io::{IsTerminal, Write};

use anyhow::{Result, bail};
use pellucid_model::Model;
use serde_json::json;

use crate::flags::compute::ComputeArgs;
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::format::grouped;
use crate::terminal::output::Output;
use comparison::{ModelOnDevice, SettingResult};

/// Check that replies do not depend on other requests
///
/// Random prompts are answered one at a time; then all again in batches, in
/// another order, in chunks of several sizes, with and without cached prefixes,
/// with preemption, and, on a CPU, on one thread. Half are greedy, half are
/// sampled. Tokens and log probabilities must agree to the bit.
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

pub(crate) fn run(args: &ProveArgs, hub: &Hub, output: &mut Output) -> Result<()> {
    let checkpoint = args.compute.checkpoint(&hub.resolve(args.model.as_deref())?, hub)?;
    let backend = args.compute.backend()?;
    let model = args.compute.decoder(&checkpoint, &backend)?;
    let context = model.config().context_len;
    let positions = args.longest as usize + args.reply as usize;
    if positions > context {
        bail_usage!("--longest and --reply need {positions} tokens, but the model's context holds {context}");
    }
    let requests = requests::random(args, model.config().vocab_size);
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
    let rows = comparison::run(args, &requests, ModelOnDevice::new(model, backend), single_threaded, &mut tell)?;
    tell("");
    let num_different = rows.iter().map(|row| row.num_different).sum::<usize>();
    if args.json {
        let result = json!({
            "device": device, "prompts": args.prompts, "reply_tokens": args.reply,
            "settings": rows, "different": num_different,
        });
        output.write_json(&result)?;
    } else {
        print(output, args, &device, &rows)?;
    }
    if num_different > 0 {
        output.flush()?;
        bail!("{num_different} replies differ from those of the requests alone; please report it");
    }
    Ok(())
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

#[cfg(test)]
impl ProveArgs {
    /// Returns the flags of a test.
    fn sample(prompts: u32, longest: u32, reply: u32) -> ProveArgs {
        #[derive(clap::Parser)]
        struct Parsed {
            #[command(flatten)]
            args: ProveArgs,
        }
        let numbers = [("--prompts", prompts), ("--longest", longest), ("--reply", reply), ("--together", 8)];
        let flags = numbers.iter().flat_map(|(flag, number)| [flag.to_string(), number.to_string()]);
        <Parsed as clap::Parser>::parse_from(std::iter::once("prove".to_owned()).chain(flags)).args
    }
}
