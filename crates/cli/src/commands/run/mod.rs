//! `pellucid run`: one answer to a prompt, or a chat.

mod answer;
mod chat;
mod report;
mod screen;

use std::ffi::OsString;
use std::io::IsTerminal;
use std::path::Path;
use std::time::Instant;

use anyhow::{Error, Result, bail};
use pellucid_engine::MAX_WIDTH;
use pellucid_generate::LoadedModel;
use pellucid_sampling::{Sampler, SamplingParams, StepKind};

use crate::commands::open::page_arguments;
use crate::flags::compute::{ComputeArgs, memory_text};
use crate::flags::grammar::GrammarArgs;
use crate::flags::guard::GuardArgs;
use crate::flags::prompt::PromptArgs;
use crate::flags::sampling::{BeamArgs, SamplingArgs};
use crate::flags::speculation::SpeculationArgs;
use crate::flags::stop::StopArgs;
use crate::flags::thinking::ThinkingArgs;
use crate::flags::tools::{ToolArgs, plan_reply};
use crate::flags::usage_error::{OrUsage, bail_usage, without_os_codes};
use crate::hub::Hub;
use crate::terminal::interrupt::{Interrupt, Interrupted};
use crate::terminal::log;
use crate::terminal::output::Output;
use answer::Answerer;
use chat::{Chat, ChatEnd};
use screen::ThoughtDisplay;

/// Answer a prompt, or chat when there is none
///
/// The prompt is the argument, or else standard input, unless that is a terminal.
/// The reply is written to standard output while it is generated (with --raw,
/// after its prompt). The last line on standard error has the token counts and
/// the speed. Ctrl-C ends the reply: a chat goes on with the next message,
/// otherwise the exit status is 130.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct RunArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    /// Maximum tokens of a reply [default: 2048, or what the context holds]
    #[arg(long, short = 'n', value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: Option<u32>,

    /// Go on with a reply that repeats itself; otherwise it ends when its
    /// last 256 + 2p tokens repeat a passage of p tokens, up to 512
    #[arg(long, verbatim_doc_comment)]
    no_loop_guard: bool,

    #[command(flatten)]
    stop: StopArgs,

    /// Number of replies; reply i is sampled with the seed plus i
    #[arg(long, value_name = "N", default_value_t = 1)]
    choices: usize,

    /// Number of replies to generate, of which the most probable are
    /// shown [default: --choices]
    #[arg(long, verbatim_doc_comment, value_name = "N")]
    best_of: Option<usize>,

    /// Print one JSON object with text, tokens, times, seed and settings
    #[arg(long)]
    json: bool,

    /// Serve the model and open its page in the browser, as `pellucid open`
    /// does
    #[arg(long, verbatim_doc_comment)]
    page: bool,

    /// Say what the prefix cache did not hold and why, and where the time
    /// went
    #[arg(long, verbatim_doc_comment)]
    verbose: bool,

    /// Show the answer without the thoughts before it
    #[arg(long, help_heading = "Thinking")]
    hide_thinking: bool,

    #[command(flatten)]
    thinking: ThinkingArgs,

    #[command(flatten)]
    grammar: GrammarArgs,

    #[command(flatten)]
    tools: ToolArgs,

    #[command(flatten)]
    guard: GuardArgs,

    #[command(flatten)]
    sampling: SamplingArgs,

    #[command(flatten)]
    beams: BeamArgs,

    #[command(flatten)]
    speculation: SpeculationArgs,

    #[command(flatten)]
    pub(crate) compute: ComputeArgs,
}

impl RunArgs {
    /// Returns the command line of `serve` that `--page` stands for; `None` without it.
    pub(crate) fn page_arguments(&self) -> Result<Option<Vec<OsString>>> {
        Ok(if self.page { Some(page_arguments(self.prompt.model_alone()?.map(OsString::from))) } else { None })
    }
}

/// Runs the command. `wants_color` is the environment's setting.
pub(crate) fn run(
    args: &RunArgs,
    hub: &Hub,
    interrupt: &Interrupt,
    wants_color: bool,
    output: &mut Output,
) -> Result<()> {
    if args.compute.ranks.follows()? {
        return follow(args, hub);
    }
    let question = args.prompt.read(hub)?;
    let prompt = question.prompt;
    let path = hub.resolve(question.model.as_deref())?;
    let beams = args.beams.params().or_usage()?;
    let best_of = args.best_of.unwrap_or(args.choices);
    let width = beams.map_or(best_of.max(args.choices), |beams| beams.width);
    check_combination(args, width)?;
    let stops = args.stop.texts()?;
    args.sampling.check().or_usage()?;
    args.speculation.check()?;
    if let Some(beams) = beams {
        args.sampling.check_beside(beams, args.choices, best_of).or_usage()?;
    }
    if prompt.is_none() {
        check_chat_flags(args, width)?;
    }
    let grammar = args.grammar.source()?;
    let tools = args.tools.read()?;
    let guards = args.guard.open(&args.compute, hub)?;
    guards.notes.iter().for_each(|note| log::note(&format!("[{note}]")));
    let is_chat = prompt.is_none();
    let open = |path: &Path, flags: &SamplingArgs| -> Result<Answerer<'_>> {
        let begun = Instant::now();
        let loaded = args.compute.open_with(path, width, hub, &args.prompt.template, &args.speculation)?;
        let load = begun.elapsed();
        if std::io::stderr().is_terminal() || args.compute.kv_memory.is_some() {
            log::note(&format!("[{}]", memory_text(&loaded.info)));
        }
        let model = LoadedModel { guards: guards.guards.clone(), ..loaded.model };
        let drafters = loaded.info.speculation;
        if beams.is_some() && !drafters.is_off() {
            log::note("note: beam search runs without speculation");
        }
        let mut sampling = match beams {
            // Beam search takes the model's own probabilities.
            Some(_) => flags.without_defaults(&model.tokenizer).or_usage()?,
            None => flags.params(&model.tokenizer, &model.sampling).or_usage()?,
        };
        if width > 1 && sampling.temperature == 0.0 && !flags.is_greedy() {
            // The model recommends greedy decoding, with which all replies would be the same.
            sampling.temperature = 1.0;
        }
        if beams.is_none() && (is_chat || flags.is_given() || !model.sampling.model.is_empty()) {
            log::note(&format!("[{}]", chain_text(flags, &sampling, &model)?));
        }
        let plan = plan_reply(tools.as_ref(), grammar.as_ref(), &model)?;
        if tools.is_some() {
            log::note(&format!("[format of tool calls: {}]", model.calling().description()));
        }
        Ok(Answerer {
            interrupt,
            sampling,
            max_tokens: args.max_tokens.map(|tokens| tokens as usize),
            num_choices: args.choices,
            // Beam search ends by its own rules.
            loop_guard: !args.no_loop_guard && beams.is_none(),
            best_of,
            beams,
            plan,
            thinking: args.thinking.for_model(&model)?,
            thoughts: ThoughtDisplay::for_stdout(args.hide_thinking, wants_color),
            model,
            stops: stops.clone(),
            json_load: args.json.then_some(load),
            speculate: true,
            is_verbose: args.verbose,
            drafters,
        })
    };
    let mut answerer = open(&path, &args.sampling)?;
    if let Some(prompt) = prompt {
        let prompt = args.prompt.for_model(prompt, &answerer.model)?;
        return match answerer.answer(&prompt, output)?.interrupted {
            true => Err(Interrupted.into()),
            false => Ok(()),
        };
    }
    check_chat(&answerer.model)?;
    let history = hub.store.root().join("chat_history");
    let mut chat = Chat::open(history, args.prompt.system.clone(), args.sampling.clone())?;
    let mut path = path;
    while let ChatEnd::Model(name) = chat.run(&mut answerer, wants_color && std::io::stdout().is_terminal(), output)? {
        let (max_tokens, speculate) = (answerer.max_tokens, answerer.speculate);
        let _keep = chat.save_on_exit(&answerer.model.id, hub.store.root().join("chat_interrupted.json"), interrupt);
        // Two models may not fit into memory at once, so the old one is closed first.
        match hub.resolve(Some(&name)) {
            Ok(other) => {
                drop(answerer);
                let opened =
                    open(&other, &chat.sampling).and_then(|answerer| check_chat(&answerer.model).map(|()| answerer));
                answerer = match opened {
                    Ok(answerer) => {
                        path = other;
                        answerer
                    }
                    Err(error) => {
                        say_unchanged(&error);
                        open(&path, &chat.sampling)?
                    }
                };
                (answerer.max_tokens, answerer.speculate) = (max_tokens, speculate);
            }
            Err(error) => say_unchanged(&error),
        }
    }
    Ok(())
}

/// Says why a chat goes on with its model.
fn say_unchanged(error: &Error) {
    let error = without_os_codes(&format!("{error:#}"));
    log::note(&format!("error: the chat goes on with its model: {error}"));
}

/// Rejects a model that cannot chat.
fn check_chat(model: &LoadedModel) -> Result<()> {
    match (&model.template, &model.template_error) {
        (Some(_), _) => Ok(()),
        (None, Some(error)) => bail!("{error}"),
        (None, None) => bail_usage!("this model has no chat template, so it cannot chat; give a PROMPT to continue"),
    }
}

/// Rejects flags that a chat cannot have.
fn check_chat_flags(args: &RunArgs, width: usize) -> Result<()> {
    if args.json {
        bail_usage!("--json needs a PROMPT, because a chat has no single reply");
    }
    if args.prompt.raw {
        bail_usage!("--raw needs a PROMPT to continue");
    }
    if args.tools.flag().is_some() {
        bail_usage!("--tools needs a PROMPT, because a chat cannot answer the calls");
    }
    if width > 1 {
        bail_usage!("a chat has one reply at a time; several replies need a PROMPT");
    }
    Ok(())
}

/// Computes the steps of rank 0 until it ends. Only rank 0 reads the prompt, part of which may be standard input.
fn follow(args: &RunArgs, hub: &Hub) -> Result<()> {
    let path = hub.resolve(args.prompt.model(hub)?.as_deref())?;
    args.compute.open_with(&path, 1, hub, &args.prompt.template, &args.speculation).map(drop)
}

/// Rejects combinations of flags that the engine does not know of, or would reject after the prompt is on the screen.
fn check_combination(args: &RunArgs, width: usize) -> Result<()> {
    if !(1..=MAX_WIDTH).contains(&width) {
        bail_usage!("--choices, --best-of: expected 1 to {MAX_WIDTH}, found {width}");
    }
    if let Some(best_of) = args.best_of.filter(|&best_of| best_of < args.choices) {
        bail_usage!("--best-of ({best_of}) must not be less than --choices ({})", args.choices);
    }
    if args.best_of.is_some_and(|best_of| best_of > args.choices) && args.stop.is_given() {
        bail_usage!("--best-of cannot be combined with --stop, because it ranks whole replies");
    }
    if args.beams.is_given() && args.sampling.preset().is_some() {
        bail_usage!("--beams cannot be combined with --preset, because beam search does not sample");
    }
    if let Some(flag) = args.grammar.flag().filter(|_| args.beams.is_given()) {
        bail_usage!("--beams cannot be combined with {flag}, because beam search knows no grammars");
    }
    if let Some(flag) = args.tools.flag().filter(|_| args.beams.is_given()) {
        bail_usage!("--beams cannot be combined with {flag}, because beam search knows no grammars");
    }
    if let Some(flag) = args.tools.flag().filter(|_| args.prompt.raw) {
        bail_usage!("{flag} cannot be combined with --raw: tools belong to a chat");
    }
    if args.thinking.has_budget() && args.beams.is_given() {
        bail_usage!("--beams cannot be combined with --thinking-budget, because beam search samples no tokens");
    }
    if let Some(flag) = args.thinking.flag().filter(|_| args.prompt.raw) {
        bail_usage!("{flag} has no effect with --raw: thoughts belong to a chat");
    }
    match (args.sampling.min_tokens(), args.max_tokens) {
        (Some(min), Some(max)) if min > max => bail_usage!("--min-tokens ({min}) must not exceed --max-tokens ({max})"),
        _ => Ok(()),
    }
}

/// Returns the origin of the sampling options, and the sampling steps with their settings.
fn chain_text(args: &SamplingArgs, sampling: &SamplingParams, model: &LoadedModel) -> Result<String> {
    let sampler = Sampler::new(sampling, model.vocab_size)?;
    let name = |(kind, setting): (StepKind, String)| match setting.as_str() {
        "" => kind.name().to_owned(),
        setting => format!("{} {setting}", kind.name()),
    };
    // The mask of a grammar has no setting to show.
    let steps: Vec<String> = sampler.steps().filter(|(kind, _)| *kind != StepKind::Mask).map(name).collect();
    Ok(format!("{}: {}", args.origin(&model.sampling), steps.join(", ")))
}
