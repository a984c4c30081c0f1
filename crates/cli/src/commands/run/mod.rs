//! `pellucid run`: one answer to a prompt, or a chat.

mod answer;
mod chat;

use std::io::{IsTerminal, Write};

use anyhow::{Result, bail};
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::message;

use crate::hub::Hub;
use crate::interrupt::Interrupt;
use crate::loaded::{self, ComputeArgs};
use crate::output::Output;
use crate::stdin;
use answer::Answerer;

/// Answer a prompt, or chat when there is none
///
/// The prompt is the argument, or standard input when that is not a terminal.
/// The reply goes to standard output as it is made; a last line on standard
/// error says how many tokens went in and out, and how fast. Ctrl-C stops the
/// reply, not the program.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RunArgs {
    /// What to answer; without it, a chat begins
    prompt: Option<String>,

    /// Path of a GGUF file or Hugging Face folder, or name of a pulled model
    /// [default: smollm2, fetched on first use]
    #[arg(long, short, verbatim_doc_comment, value_name = "MODEL")]
    model: Option<String>,

    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT", conflicts_with = "raw")]
    system: Option<String>,

    /// Continue the prompt as plain text, without the model's chat template
    #[arg(long)]
    raw: bool,

    /// Tokens to generate at most [default: until the context is full]
    #[arg(long, short = 'n', value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,

    /// How freely to choose, 0 to 100: 0 takes the most probable token,
    /// 1 draws by the model's own probabilities
    #[arg(long, verbatim_doc_comment, value_name = "T", default_value_t = 0.0, allow_negative_numbers = true)]
    temperature: f32,

    /// Seed of the draw: the same seed gives the same reply
    /// [default: a random one, shown with the reply]
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    seed: Option<u64>,

    #[command(flatten)]
    compute: ComputeArgs,
}

pub(crate) fn run(args: &RunArgs, hub: &Hub, interrupt: &Interrupt, output: &mut Output) -> Result<()> {
    let sampling = SamplingParams { temperature: args.temperature, seed: args.seed.unwrap_or_else(random_seed) };
    sampling.check()?;
    let prompt = match &args.prompt {
        Some(prompt) => Some(prompt.clone()),
        None if std::io::stdin().is_terminal() => None,
        None => Some(stdin::read_text()?),
    };
    if prompt.as_ref().is_some_and(|prompt| prompt.trim().is_empty()) {
        bail!("the prompt is empty");
    }
    let path = hub.resolve(args.model.as_deref())?;
    let loaded = loaded::load(&path, &args.compute)?;
    let mut answerer =
        Answerer { loaded, interrupt, sampling, max_tokens: args.max_tokens.map(|tokens| tokens as usize) };
    let system = args.system.as_ref().map(|text| message("system", text));
    match (prompt, &answerer.loaded.template) {
        (Some(prompt), Some(_)) if !args.raw => {
            let messages: Vec<_> = system.into_iter().chain([message("user", &prompt)]).collect();
            answerer.answer(&messages, output)?;
        }
        (Some(prompt), template) => {
            if args.system.is_some() {
                bail!("--system: this model has no chat template, so there is no place for instructions");
            }
            if template.is_none() && !args.raw {
                let _ = writeln!(
                    std::io::stderr(),
                    "note: this model has no chat template; its reply continues the prompt"
                );
            }
            answerer.continue_text(&prompt, output)?;
        }
        (None, None) => bail!("this model has no chat template, so it cannot chat; give it a PROMPT to continue"),
        (None, Some(_)) if args.raw => bail!("--raw continues a prompt: give one"),
        (None, Some(_)) => chat::chat(&mut answerer, system, output)?,
    }
    Ok(())
}

/// A seed for requests that bring none, from the operating system's randomness, which keys the standard library's hash maps.
fn random_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    // Few enough digits to type again.
    RandomState::new().hash_one(0) % 1_000_000_000
}
