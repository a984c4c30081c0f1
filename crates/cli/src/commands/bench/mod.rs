//! `pellucid bench`: the speed of a model compared with the machine's limits, and of serving many requests at once; and
//! its answers to ordinary questions.

mod acceptance;
mod model;
mod percentiles;
mod questions;
mod serving;
mod speed;
mod task_command;
pub(crate) mod tasks;
mod text;

use std::io::Write;
use std::ops::RangeInclusive;
use std::path::PathBuf;

use anyhow::Result;
use clap::builder::PossibleValuesParser;
use pellucid_model::Model;
use pellucid_model::{QuantScheme, SyntheticModel};
use serde_json::json;

use crate::flags::compute::ComputeArgs;
use crate::flags::sampling::SamplingArgs;
use crate::flags::speculation::SpeculationArgs;
use crate::flags::usage_error::bail_usage;
use crate::hub::Hub;
use crate::terminal::interrupt::Interrupt;
use crate::terminal::output::Output;

/// Names of the formats that random weights can have.
fn scheme_names() -> PossibleValuesParser {
    PossibleValuesParser::new(QuantScheme::ALL.into_iter().chain([QuantScheme::MXFP4]).map(QuantScheme::name))
}

/// Measure speed and compare it with the machine's limits
///
/// Without serving flags, measures prefill of whole prompts and decoding of
/// several sequences at several depths, without the engine. With --concurrency
/// or --rate, sends requests through the engine and reports latency percentiles;
/// speed is then measured only if one of its flags is given too.
///
/// The model is a file, or random weights with --shape: the speed does not depend
/// on the values of the weights.
///
/// With --questions, the model answers ordinary questions instead; a reply passes
/// if it contains an expected text, ends by itself and does not repeat itself.
///
/// With --tasks, it answers real prompts with and without drafts.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct BenchArgs {
    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    #[arg(conflicts_with = "shape")]
    model: Option<String>,

    /// Use random weights in the shape of a known model
    #[arg(
        long,
        value_name = "NAME",
        value_parser = PossibleValuesParser::new(SyntheticModel::ALL.map(|shape| shape.name))
    )]
    shape: Option<String>,

    /// Formats of the random weights [default: q4_k_m]
    #[arg(
        long = "type",
        value_name = "TYPE",
        ignore_case = true,
        value_parser = scheme_names()
    )]
    scheme: Option<String>,

    /// Give the random model its first N layers only, where memory cannot
    /// hold them all
    #[arg(long, value_name = "N", verbatim_doc_comment)]
    layers: Option<usize>,

    /// Write the random model to this GGUF file instead of measuring
    #[arg(long, value_name = "FILE")]
    write: Option<PathBuf>,

    #[command(flatten)]
    speed: SpeedArgs,

    #[command(flatten)]
    serving: ServingArgs,

    #[command(flatten)]
    forced: AcceptanceArgs,

    /// Answer ordinary questions and count the right answers: 40 built-in
    /// ones, or those of a TOML file (--questions=FILE)
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = ["shape", "load", "prompt", "batch", "depth"]
    )]
    questions: Option<String>,

    /// Answer real prompts with and without drafts, alternating, and print
    /// how much faster drafts are: built-in prompts that edit code, quote,
    /// write code and write text, or those of a TOML file (--tasks=FILE).
    /// --speculate names the drafters [default: ngram]
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        conflicts_with_all = ["shape", "load", "prompt", "depth", "questions"]
    )]
    tasks: Option<String>,

    /// Maximum tokens of an answer [default: 512, and 256 for a task]
    #[arg(
        long,
        short = 'n',
        conflicts_with_all = ["load", "prompt", "depth"],
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    max_tokens: Option<u32>,

    /// Print one JSON object
    #[arg(long)]
    json: bool,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    speculation: SpeculationArgs,

    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Speed")]
struct SpeedArgs {
    /// Lengths of prompts to prefill [default: 512]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..))]
    prompt: Option<Vec<u32>>,

    /// Sequences to decode at once [default: 1]
    #[arg(long, value_name = "N", value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: Option<Vec<u32>>,

    /// Tokens of each sequence before decoding [default: 0]
    #[arg(long, value_name = "TOKENS", value_delimiter = ',')]
    depth: Option<Vec<u32>>,

    /// Steps to decode: tokens to generate for each sequence
    #[arg(long, value_name = "N", default_value_t = 32, value_parser = clap::value_parser!(u32).range(1..))]
    generate: u32,

    /// Rounds; each round measures every case once
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Speculation")]
struct AcceptanceArgs {
    /// Rates at which the model accepts drafted tokens, forced by the
    /// benchmark: random weights would accept none. Measures --batch and
    /// --depth [default: 128] with and without drafts, through the engine.
    /// --draft-tokens is the length of each draft [default: 4]
    #[arg(
        long,
        verbatim_doc_comment,
        value_name = "RATE",
        value_delimiter = ',',
        requires_all = ["shape", "draft_shape"],
        conflicts_with_all = ["load", "prompt", "speculate"]
    )]
    acceptance: Vec<f64>,

    /// Shape of a draft model with random weights
    #[arg(
        long,
        value_name = "NAME",
        requires = "acceptance",
        value_parser = PossibleValuesParser::new(SyntheticModel::ALL.map(|shape| shape.name))
    )]
    draft_shape: Option<String>,

    /// Formats of the draft model's weights [default: that of --type]
    #[arg(
        long,
        value_name = "TYPE",
        requires = "draft_shape",
        ignore_case = true,
        value_parser = scheme_names()
    )]
    draft_type: Option<String>,
}

#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Serving", group(clap::ArgGroup::new("load").multiple(true)))]
struct ServingArgs {
    /// Concurrent requests; a list measures each number
    #[arg(
        long,
        group = "load",
        value_name = "N",
        value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=1024)
    )]
    concurrency: Vec<u32>,

    /// Requests per second, arriving at random times
    #[arg(long, group = "load", value_name = "PER_SECOND", value_delimiter = ',')]
    rate: Vec<f64>,

    /// Number of requests for each concurrency or rate
    /// [default: 4 times the concurrency; 64 for a rate]
    #[arg(
        long,
        requires = "load",
        verbatim_doc_comment,
        value_name = "N",
        value_parser = clap::value_parser!(u32).range(1..=100_000)
    )]
    requests: Option<u32>,

    /// Tokens of a prompt: a number or a range such as 64-512
    #[arg(long, requires = "load", value_name = "TOKENS", default_value = "256", value_parser = length)]
    input: Length,

    /// Tokens of a reply: a number or a range
    #[arg(long, requires = "load", value_name = "TOKENS", default_value = "64", value_parser = length)]
    output: Length,

    /// Tokens of the prefix that all prompts share
    #[arg(long, requires = "load", value_name = "TOKENS", default_value_t = 0)]
    shared_prefix: u32,

    /// Maximum rows of a step; at least one for each running request
    #[arg(
        long,
        requires = "load",
        value_name = "N",
        default_value_t = 512,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    step_tokens: u32,
}

/// A range from which the length of each request is drawn.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Length(RangeInclusive<u32>);

fn length(text: &str) -> Result<Length, String> {
    let (low, high) = text.split_once('-').unwrap_or((text, text));
    let number = |text: &str| text.trim().parse::<u32>().ok().filter(|&number| number > 0);
    match (number(low), number(high)) {
        (Some(low), Some(high)) if low <= high => Ok(Length(low..=high)),
        _ => Err("expected a number above 0, or two with a dash between them".into()),
    }
}

pub(crate) fn run(args: &BenchArgs, hub: &Hub, interrupt: &Interrupt, output: &mut Output) -> Result<()> {
    let flags_of_shapes =
        [("--type", args.scheme.is_some()), ("--layers", args.layers.is_some()), ("--write", args.write.is_some())];
    for (flag, is_given) in flags_of_shapes {
        if is_given && args.shape.is_none() {
            bail_usage!("{flag} applies to random weights and needs --shape");
        }
    }
    if let Some(path) = &args.write {
        return model::write(args, path, interrupt);
    }
    if args.forced.acceptance.is_empty() {
        args.speculation.check()?;
    }
    if let Some(file) = &args.questions {
        return questions::run(args, file, hub, interrupt, output);
    }
    if let Some(file) = &args.tasks {
        return task_command::run(args, file, hub, output);
    }
    if args.max_tokens.is_some() {
        bail_usage!("--max-tokens applies to --questions and --tasks");
    }
    if args.sampling.is_given() {
        bail_usage!("sampling flags apply to --questions and --tasks; speed does not depend on them");
    }
    let serves = !(args.serving.concurrency.is_empty() && args.serving.rate.is_empty());
    let measures_speed =
        !serves || args.speed.prompt.is_some() || args.speed.batch.is_some() || args.speed.depth.is_some();
    if !serves && args.compute.kv_memory.is_some() {
        bail_usage!("--kv-memory applies to the engine and needs --concurrency or --rate");
    }
    if !serves && args.forced.acceptance.is_empty() && args.speculation.is_given() {
        bail_usage!("--speculate applies to the engine and needs --concurrency, --rate or --questions");
    }
    let mut ready = model::load(args, hub)?;
    if let Some(shape) = &args.forced.draft_shape {
        let scheme = args.forced.draft_type.as_ref().or(args.scheme.as_ref());
        let draft = model::random_draft(args, shape, scheme.map(String::as_str), &ready.backend)?;
        return speculation(args, ready, draft, output);
    }
    let context = ready.model.config().context_len;
    // Wrong flags are rejected before anything is measured.
    let cases = if measures_speed { speed::cases(&args.speed, context)? } else { Vec::new() };
    if serves {
        serving::check(&args.serving, context)?;
    }
    let machine = ready.machine()?;
    if !args.json {
        text::machine(output, &machine)?;
        output.flush()?;
    }
    let mut result = json!({ "machine": machine });
    if measures_speed {
        let rows = speed::run(&args.speed, &cases, &mut ready, machine.read_bytes_per_second)?;
        if !args.json {
            text::speed(output, &rows)?;
            output.flush()?;
        }
        result["speed"] = json!(rows);
    }
    if serves {
        let drafters = model::drafters(args, hub, &ready)?;
        let levels = serving::run(&args.serving, ready, drafters)?;
        if !args.json {
            text::serving(output, &levels)?;
        }
        result["serving"] = json!(levels);
    }
    if args.json {
        output.write_json(&result)?;
    }
    Ok(())
}

/// Length of drafts with `--acceptance`, unless `--draft-tokens` says otherwise.
const FORCED_DRAFT_TOKENS: usize = 4;

/// Measures a model with a draft model.
fn speculation(args: &BenchArgs, ready: model::Ready, draft: model::Ready, output: &mut Output) -> Result<()> {
    let forced = acceptance::Forced {
        acceptance: args.forced.acceptance.clone(),
        draft_tokens: args.speculation.draft_tokens().unwrap_or(FORCED_DRAFT_TOKENS),
    };
    acceptance::check(&forced, &args.speed, &ready, &draft)?;
    let machines = [ready.machine()?, draft.machine()?];
    if !args.json {
        machines.iter().try_for_each(|machine| text::machine(output, machine))?;
        output.flush()?;
    }
    let results = acceptance::run(&forced, &args.speed, ready, draft)?;
    if args.json {
        let [machine, draft] = machines;
        output.write_json(&json!({ "machine": machine, "draft": draft, "acceptance": results }))?;
    } else {
        acceptance::print(output, &results)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths() {
        assert_eq!(length("64"), Ok(Length(64..=64)));
        assert_eq!(length("64-512"), Ok(Length(64..=512)));
        for wrong in ["", "0", "-5", "512-64", "a", "1.5"] {
            assert!(length(wrong).is_err(), "{wrong}");
        }
    }
}
