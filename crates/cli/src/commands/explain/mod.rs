//! `pellucid explain`: how each token of a reply was chosen, step by step.

mod first_pass;
mod json;
pub(crate) use json::parameters as sampling_json;
mod page;
mod probe;
mod table;

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Result, anyhow};
use pellucid_engine::{Event, Probe, ProbeRequest, Request, TokenEvent, TokenStream};
use pellucid_generate::{Finish, LoadedModel, ReplyPlan};
use pellucid_sampling::{MAX_LOGPROBS, Preset, Sampler, SamplingParams, StepKind};
use pellucid_tokenizer::{TextStream, Tokenizer};
use serde_json::Value;

use crate::flags::compute::ComputeArgs;
use crate::flags::grammar::GrammarArgs;
use crate::flags::guard::GuardArgs;
use crate::flags::prompt::{Prompt, PromptArgs};
use crate::flags::sampling::SamplingArgs;
use crate::flags::speculation::SpeculationArgs;
use crate::flags::stop::StopArgs;
use crate::flags::thinking::{ThinkingArgs, ThinkingChoice};
use crate::flags::tools::{ToolArgs, plan_reply};
use crate::flags::usage_error::{OrUsage, bail_usage};
use crate::hub::Hub;
use crate::terminal::cells::Paint;
use crate::terminal::interrupt::{Interrupt, Interrupted};
use crate::terminal::output::Output;
use crate::terminal::{format, log};
use first_pass::FirstPass;
use page::{Page, Written};

/// Columns of a page that is written to a file or pipe.
const DEFAULT_COLUMNS: usize = 80;

/// Time between two checks for Ctrl-C while waiting for the engine.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);

/// Show how each token of a reply is chosen
///
/// Each token gets a table: a row for each candidate and a column for each step
/// of the sampling chain with the probability after it, `cut` where the step
/// removed the candidate, and bars for the model's own probability and for the
/// final one. Below it are the draw, the model's own rank of the token, and the
/// text so far. With the same flags, the tokens are those of `pellucid run`.
#[derive(Debug, clap::Args)]
#[command(verbatim_doc_comment)]
pub(crate) struct ExplainArgs {
    #[command(flatten)]
    prompt: PromptArgs,

    /// Maximum tokens to explain
    #[arg(
        long,
        short = 'n',
        value_name = "TOKENS",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..)
    )]
    max_tokens: u32,

    /// Candidates to show for each token, 1 to 20
    #[arg(
        long,
        value_name = "N",
        default_value_t = 8,
        value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_LOGPROBS))
    )]
    candidates: u32,

    /// Write JSON lines: a header, an object for each token with the
    /// whole trace, and the end
    #[arg(long, verbatim_doc_comment)]
    json: bool,

    /// Columns of the page, 50 to 200
    /// [default: COLUMNS, or the terminal's, else 80]
    #[arg(long, verbatim_doc_comment, value_name = "COLUMNS", value_parser = clap::value_parser!(u16).range(50..=200))]
    width: Option<u16>,

    /// When to use colour; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: ColorWhen,

    #[command(flatten)]
    probe: probe::ProbeArgs,

    /// Go on with a reply that repeats itself
    #[arg(long)]
    no_loop_guard: bool,

    #[command(flatten)]
    stop: StopArgs,

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
    speculation: SpeculationArgs,

    #[command(flatten)]
    compute: ComputeArgs,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum ColorWhen {
    Auto,
    Always,
    Never,
}

/// Runs the command. `wants_color` and `columns` are the environment's settings; flags take precedence.
pub(crate) fn run(
    args: &ExplainArgs,
    hub: &Hub,
    interrupt: &Interrupt,
    wants_color: bool,
    columns: Option<usize>,
    output: &mut Output,
) -> Result<()> {
    let question = args.prompt.read(hub)?;
    let Some(prompt) = question.prompt else { bail_usage!("there is no prompt to explain: give a PROMPT") };
    let path = hub.resolve(question.model.as_deref())?;
    args.sampling.check().or_usage()?;
    args.speculation.check()?;
    let stops = args.stop.texts()?;
    if let Some(flag) = args.thinking.flag().filter(|_| args.prompt.raw) {
        bail_usage!("{flag} has no effect with --raw: thoughts belong to a chat");
    }
    if let Some(flag) = args.tools.flag().filter(|_| args.prompt.raw) {
        bail_usage!("{flag} cannot be combined with --raw: tools belong to a chat");
    }
    let tools = args.tools.read()?;
    let grammar = args.grammar.source()?;
    let guards = args.guard.open(&args.compute, hub)?;
    guards.notes.iter().for_each(|note| log::note(&format!("[{note}]")));
    let loaded = args.compute.open_with(&path, 1, hub, &args.prompt.template, &args.speculation)?;
    let (model, drafters) = (LoadedModel { guards: guards.guards, ..loaded.model }, loaded.info.speculation);
    let params = args.sampling.params(&model.tokenizer, &model.sampling).or_usage()?;
    let prompt = args.prompt.for_model(prompt, &model)?;
    let explanation = Explanation {
        name: path.file_name().map_or_else(String::new, |name| format::escaped(&name.to_string_lossy())),
        params,
        plan: plan_reply(tools.as_ref(), grammar.as_ref(), &model)?,
        thinking: args.thinking.for_model(&model)?,
        preset: args.sampling.preset(),
        origin: args.sampling.origin(&model.sampling),
        max_tokens: args.max_tokens as usize,
        limit: Limit::MaxTokens,
        loop_guard: !args.no_loop_guard,
        stops,
        speculate: true,
        has_drafters: !drafters.is_off(),
        num_candidates: args.candidates as usize,
        probe: args.probe.request(args.candidates),
        is_colored: match args.color {
            ColorWhen::Auto => wants_color && std::io::stdout().is_terminal(),
            when => when == ColorWhen::Always,
        },
        is_json: args.json,
        columns: args.width.map(usize::from).or(columns),
    };
    explanation.write(&model, &prompt, interrupt, output)
}

/// Why an explanation ends after [`Explanation::max_tokens`] tokens.
#[derive(Debug, Clone)]
pub(crate) enum Limit {
    /// The reply has no more, because of `--max-tokens`.
    MaxTokens,
    /// Only the first tokens of a reply with `total` tokens are to be shown.
    First { total: usize },
    /// The reply was given before and ended there; `None` if Ctrl-C stopped it.
    End(Option<Finish>),
}

/// A reply to generate and to explain.
#[derive(Debug)]
pub(crate) struct Explanation {
    /// Name of the model, for the title.
    pub(crate) name: String,
    pub(crate) params: SamplingParams,
    /// Tools and grammar of the reply.
    pub(crate) plan: ReplyPlan,
    pub(crate) thinking: ThinkingChoice,
    /// The preset that the user gave.
    pub(crate) preset: Option<Preset>,
    /// Origin of the options, in words.
    pub(crate) origin: String,
    pub(crate) max_tokens: usize,
    pub(crate) limit: Limit,
    pub(crate) loop_guard: bool,
    /// Texts before which the reply ends.
    pub(crate) stops: Vec<String>,
    /// Whether drafters propose tokens, if there are any.
    pub(crate) speculate: bool,
    pub(crate) has_drafters: bool,
    /// Candidates to show for each token.
    pub(crate) num_candidates: usize,
    /// One token to look into.
    pub(crate) probe: Option<ProbeRequest>,
    pub(crate) is_colored: bool,
    pub(crate) is_json: bool,
    /// Columns of the page; `None` is the width of the terminal.
    pub(crate) columns: Option<usize>,
}

impl Explanation {
    /// Generates the reply and writes how each of its tokens was chosen.
    pub(crate) fn write(
        self,
        model: &LoadedModel,
        prompt: &Prompt,
        interrupt: &Interrupt,
        output: &mut Output,
    ) -> Result<()> {
        let params = SamplingParams { logprobs: Some(MAX_LOGPROBS), ..self.params };
        let request = self.thinking.request(prompt, model, &self.plan, |ids| Request {
            max_tokens: Some(self.max_tokens),
            loop_guard: self.loop_guard,
            trace: true,
            probe: self.probe,
            speculate: self.speculate,
            ..Request::new(ids, params.clone())
        })?;
        let first_pass = FirstPass::new(model, &request, &self.stops)?;
        let mut request = request.request;
        if let Some(reply) = first_pass.as_ref().filter(|reply| reply.is_blocked()) {
            // The engine accepts no request for zero tokens; `follow` shows none of a reply that is blocked at once.
            request.max_tokens = Some(reply.tokens.len().max(1));
            request.probe = None;
        }
        let ids = request.prompt.clone();
        let chain: Vec<(StepKind, String)> = (Sampler::new(&params, model.vocab_size)?.steps())
            // Without a grammar, its step has nothing to do.
            .filter(|(kind, _)| *kind != StepKind::Mask || request.constraint.is_some())
            .collect();
        let terminal = || terminal_size::terminal_size_of(std::io::stdout()).map(|(width, _)| usize::from(width.0));
        let columns = self.columns.or_else(terminal).unwrap_or(DEFAULT_COLUMNS);
        let explainer = Explainer {
            page: Page {
                tokenizer: &model.tokenizer,
                params: &params,
                vocab_size: model.vocab_size,
                num_rows: self.num_candidates,
                paint: Paint { is_on: self.is_colored },
                shows_proposals: self.speculate && self.has_drafters,
                width: columns.clamp(*page::WIDTHS.start(), *page::WIDTHS.end()),
            },
            is_json: self.is_json,
            limit: self.limit,
            interrupt,
            first_pass,
        };
        // A request that is refused leaves no half of a page.
        let stream = model.engine.submit(request).map_err(probe::in_flags)?;
        if self.is_json {
            let preset = self.preset.map(Preset::name);
            write_line(output, &json::header(&self.name, &ids, preset, &self.origin, &params, &chain))?;
        } else {
            let seed = if params.temperature == 0.0 { String::new() } else { format!(" · seed {}", params.seed) };
            let title = format!("{}{seed} · {}", self.name, self.origin);
            write!(output, "{}", explainer.page.head(&title, &ids, &chain))?;
        }
        output.flush()?;
        // The reply of a chat is a new text; otherwise it continues the prompt's text.
        let (text, before) = match prompt {
            Prompt::Chat(_) if !self.plan.has_grammar() => (model.tokenizer.stream(false), String::new()),
            Prompt::Chat(_) => (TextStream::after(&*model.tokenizer, false, &ids), String::new()),
            Prompt::Text(text) => (TextStream::after(&*model.tokenizer, false, &ids), text.clone()),
        };
        explainer.follow(&stream, text, before, output)
    }
}

struct Explainer<'a> {
    page: Page<'a>,
    is_json: bool,
    limit: Limit,
    interrupt: &'a Interrupt,
    /// The reply as `run` gives it, if guards or stop texts may end it.
    first_pass: Option<FirstPass>,
}

impl Explainer<'_> {
    /// Explains tokens while they are generated.
    fn follow(
        &self,
        stream: &TokenStream,
        mut text: TextStream<&Tokenizer>,
        before: String,
        output: &mut Output,
    ) -> Result<()> {
        let stop = self.interrupt.stop_on_interrupt();
        let start = before.len();
        let mut written = Written { before, fresh: String::new() };
        let mut num_tokens = 0;
        let mut probe: Option<Box<Probe>> = None;
        let finish = loop {
            if stop.is_requested() {
                break None;
            }
            if let Some(reply) = self.first_pass.as_ref().filter(|reply| reply.tokens.len() == num_tokens) {
                break reply.finish.clone();
            }
            let Ok(event) = stream.next_within(INTERRUPT_CHECK) else { continue };
            match event {
                None => return Err(anyhow!("the engine stopped in the middle of a reply")),
                Some(Event::Failed(error)) => return Err(error.into()),
                Some(Event::ChoiceEnd { reason, token, .. }) => {
                    let own = Finish::new(reason, token.as_ref());
                    let finish = self.first_pass.as_ref().map_or(Some(own), |reply| reply.finish.clone());
                    if let Some(token) = token {
                        num_tokens += 1;
                        written.fresh = text.push(token.id);
                        self.explain(&token, num_tokens, finish.as_ref(), &written, output)?;
                        self.show_probe(probe.take(), output)?;
                    }
                    break finish;
                }
                Some(Event::Token(token)) => {
                    num_tokens += 1;
                    written.fresh = text.push(token.id);
                    self.explain(&token, num_tokens, None, &written, output)?;
                    self.show_probe(probe.take(), output)?;
                    written.before += &written.fresh;
                }
                Some(Event::Probed(found)) => probe = Some(found),
                Some(_) => {}
            }
        };
        // The token that ends a reply is not part of its text.
        let reply = written.before[start..].to_owned() + &text.finish();
        let num_last_bytes = written.fresh.len().min(reply.len());
        let reply = match &self.first_pass {
            Some(first_pass) => first_pass.without_stop(&reply, num_last_bytes),
            None => &reply,
        };
        if self.is_json {
            write_line(output, &json::end(finish_name(finish.as_ref()), reply, num_tokens))?;
        } else {
            let again = match self.page.params.temperature {
                0.0 => String::new(),
                _ => format!(" With --seed {} the tokens are the same again.", self.page.params.seed),
            };
            write!(
                output,
                "{}",
                self.page.foot(&format!("{}{again}", finish_sentence(finish.as_ref(), &self.limit)), reply)
            )?;
        }
        output.flush()?;
        if stop.is_requested() { Err(Interrupted.into()) } else { Ok(()) }
    }

    /// Writes the probe of the token that was just written.
    fn show_probe(&self, probe: Option<Box<Probe>>, output: &mut Output) -> Result<()> {
        let Some(probe) = probe else { return Ok(()) };
        let Page { tokenizer, num_rows, paint, .. } = self.page;
        if self.is_json {
            write_line(output, &probe::json(tokenizer, &probe))?;
        } else {
            write!(output, "{}", probe::text(tokenizer, &probe, num_rows, paint))?;
        }
        Ok(output.flush()?)
    }

    /// Writes one token, as a table or as a line of JSON.
    fn explain(
        &self,
        token: &TokenEvent,
        number: usize,
        finish: Option<&Finish>,
        written: &Written,
        output: &mut Output,
    ) -> Result<()> {
        let (Some(trace), Some(logprobs)) = (&token.trace, &token.logprobs) else {
            return Err(anyhow!("the engine returned a token without the trace that was requested"));
        };
        let verdicts = self.first_pass.as_ref().and_then(|reply| reply.tokens.get(number - 1));
        if self.is_json {
            let end = finish.map(|finish| finish_name(Some(finish)));
            let mut shown = json::token(self.page.tokenizer, number - 1, token, trace, end);
            if let Some(verdicts) = verdicts {
                shown["guards"] = json::verdicts(verdicts);
            }
            write_line(output, &shown)?;
        } else {
            let verdicts = verdicts.map_or(&[][..], Vec::as_slice);
            write!(output, "{}", self.page.token(number, trace, logprobs, token.proposal, verdicts, written))?;
        }
        Ok(output.flush()?)
    }
}

/// Returns the name of the finish reason in JSON; a reply without one was interrupted.
fn finish_name(finish: Option<&Finish>) -> &'static str {
    match finish {
        Some(Finish::EndToken(_)) => "end",
        Some(Finish::StopToken(_)) => "stop",
        Some(Finish::StopString(_)) => "stop_text",
        Some(Finish::MaxTokens) => "max_tokens",
        Some(Finish::ContextFull) => "context",
        Some(Finish::Repetition(_)) => "repetition",
        Some(Finish::ToolCalls(_)) => "tool_calls",
        Some(Finish::ContentFilter { .. }) => "content_filter",
        Some(Finish::Deadline) | None => "interrupted",
    }
}

/// Returns why there are no more tokens.
fn finish_sentence(finish: Option<&Finish>, limit: &Limit) -> String {
    let sentence = match (finish, limit) {
        (Some(Finish::MaxTokens), Limit::First { total }) => return format!("The reply has {total} tokens."),
        (Some(Finish::MaxTokens), Limit::End(None)) => "Ctrl-C stopped the reply here.",
        (Some(Finish::MaxTokens), Limit::End(Some(end))) if *end != Finish::MaxTokens => {
            return finish_sentence(Some(end), &Limit::MaxTokens);
        }
        (Some(Finish::MaxTokens), _) => {
            "The reply ended at the limit of tokens (--max-tokens); the model would continue."
        }
        (Some(Finish::EndToken(Some(_))), _) => "The model chose an end token.",
        (Some(Finish::EndToken(None)), _) => "The grammar is complete, so the reply ends.",
        (Some(Finish::StopToken(_)), _) => "The model chose a token of --stop-token.",
        (Some(Finish::StopString(_)), _) => "The reply reached a text of --stop, which is not part of it.",
        (Some(Finish::ContextFull), _) => "The context is full.",
        (Some(Finish::Repetition(_)), _) => "The reply repeated itself; --no-loop-guard lets it go on.",
        (Some(Finish::ToolCalls(_)), _) => "The model called a tool.",
        (Some(Finish::ContentFilter { .. }), _) => "A guard blocked the rest of the reply.",
        (Some(Finish::Deadline), _) => "The reply reached its time limit.",
        (None, _) => "Stopped.",
    };
    sentence.to_owned()
}

/// Writes a JSON value on one line.
fn write_line(output: &mut Output, value: &Value) -> Result<()> {
    Ok(writeln!(output, "{value}")?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_sentence_says_why_the_reply_has_no_more_tokens() {
        let sentence = |finish, limit| finish_sentence(Some(&finish), &limit);
        assert!(sentence(Finish::MaxTokens, Limit::MaxTokens).starts_with("The reply ended at the limit"));
        assert_eq!(sentence(Finish::MaxTokens, Limit::First { total: 9 }), "The reply has 9 tokens.");
        assert_eq!(sentence(Finish::MaxTokens, Limit::End(None)), "Ctrl-C stopped the reply here.");
        assert_eq!(sentence(Finish::MaxTokens, Limit::End(Some(Finish::ContextFull))), "The context is full.");
        let cut = Limit::End(Some(Finish::MaxTokens));
        assert!(sentence(Finish::MaxTokens, cut).starts_with("The reply ended at the limit"));
        assert_eq!(sentence(Finish::EndToken(Some(2)), Limit::End(None)), "The model chose an end token.");
        assert!(sentence(Finish::EndToken(None), Limit::MaxTokens).starts_with("The grammar is complete"));
    }
}
