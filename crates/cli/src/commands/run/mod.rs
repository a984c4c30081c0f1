//! `pellucid run`: one answer to a prompt, or a chat.

mod answer;
mod chat;

use std::io::Write;

use anyhow::{Result, bail};
use pellucid_sampling::{Sampler, SamplingParams};

use crate::hub::Hub;
use crate::interrupt::Interrupt;
use crate::loaded::{self, ComputeArgs, Loaded};
use crate::output::Output;
use crate::prompt::PromptArgs;
use crate::sampling_args::{BeamArgs, SamplingArgs};
use answer::Answerer;

/// Sequences that one request may run at once.
const MAX_REPLIES: usize = 128;

/// Answer a prompt, or chat when there is none
///
/// The prompt is the argument, or standard input when that is not a terminal.
/// The reply goes to standard output as it is made; a last line on standard
/// error says how many tokens went in and out, and how fast. Ctrl-C stops the
/// reply, not the program.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    /// Tokens to generate at most [default: until the context is full]
    #[arg(long, short = 'n', value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,

    /// End the reply before this text; may be given again
    #[arg(long, value_name = "TEXT")]
    stop: Vec<String>,

    /// Replies to give; the second draws with the seed plus 1, and so on
    #[arg(long, value_name = "N", default_value_t = 1)]
    choices: usize,

    /// Replies to make, of which the most probable ones are given
    /// [default: as many as are given]
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    best_of: Option<usize>,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    beams: BeamArgs,

    #[command(flatten)]
    compute: ComputeArgs,
}

pub(crate) fn run(args: &RunArgs, hub: &Hub, interrupt: &Interrupt, output: &mut Output) -> Result<()> {
    let prompt = args.prompt.read()?;
    let path = hub.resolve(args.prompt.model.as_deref())?;
    let beams = args.beams.params();
    let best_of = args.best_of.unwrap_or(args.choices);
    let width = beams.map_or(best_of.max(args.choices), |beams| beams.width);
    if !(1..=MAX_REPLIES).contains(&width) {
        bail!("{width} replies or beams at once: expected 1 to {MAX_REPLIES}");
    }
    let loaded = loaded::load(&path, &args.compute, width)?;
    // A search wants the model's own probabilities; a draw is greedy unless something else is asked for.
    let default_temperature = if beams.is_some() { 1.0 } else { 0.0 };
    let sampling = args.sampling.params(&loaded.tokenizer, default_temperature)?;
    if !args.sampling.is_plain() {
        show_chain(args, &sampling, &loaded)?;
    }
    let mut answerer = Answerer {
        loaded,
        interrupt,
        sampling,
        max_tokens: args.max_tokens.map(|tokens| tokens as usize),
        num_choices: args.choices,
        best_of,
        beams,
        stops: args.stop.clone(),
    };
    match prompt {
        Some(prompt) => {
            let prompt = args.prompt.shape(prompt, &answerer.loaded)?;
            answerer.answer(&prompt, output)?;
        }
        None if answerer.loaded.template.is_none() => {
            bail!("this model has no chat template, so it cannot chat; give it a PROMPT to continue")
        }
        None if args.prompt.raw => bail!("--raw continues a prompt: give one"),
        None if width > 1 => bail!("a chat has one reply at a time: give a PROMPT for several"),
        None => chat::chat(&mut answerer, args.prompt.system(), output)?,
    }
    Ok(())
}

/// The steps that are left after presets and flags, in their order.
fn show_chain(args: &RunArgs, sampling: &SamplingParams, loaded: &Loaded) -> Result<()> {
    let sampler = Sampler::new(sampling, loaded.config.vocab_size)?;
    let steps: Vec<String> = (sampler.steps())
        .map(
            |(kind, setting)| {
                if setting.is_empty() { kind.name().to_owned() } else { format!("{} {setting}", kind.name()) }
            },
        )
        .collect();
    let preset = args.sampling.preset().map_or_else(String::new, |preset| format!("preset {preset}: "));
    let _ = writeln!(std::io::stderr(), "[{preset}{}]", steps.join(", "));
    Ok(())
}
