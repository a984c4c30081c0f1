//! `bench --questions`: ordinary questions with simple checks, so that models and sampling options can be compared.
//!
//! The questions are in `questions.toml`. All are submitted at once and answered in batches, which changes no reply.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use pellucid_engine::Request;
use pellucid_generate::{Delta, Finish, Generation, GenerationEvent, GenerationRequest, LoadedModel, PromptRequest};
use pellucid_sampling::{Sampler, SamplingParams, StepKind};
use pellucid_tokenizer::message;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::BenchArgs;
use crate::flags::prompt::Prompt;
use crate::flags::toml_file;
use crate::flags::usage_error::OrUsage;
use crate::hub::Hub;
use crate::terminal::format::grouped;
use crate::terminal::interrupt::{Interrupt, Interrupted};
use crate::terminal::output::Output;

/// The questions that the program contains.
const QUESTIONS: &str = include_str!("questions.toml");
/// Shows the form of a file of questions.
const EXAMPLE: &str = "expected `[[question]]`, `name = \"a\"`, `ask = \"...\"` and `expect = [[\"...\"]]`";
/// Maximum questions in a file.
const MAX_QUESTIONS: usize = 1000;
/// Sequences that are answered at once.
const NUM_SEQUENCES: usize = 8;
/// Maximum tokens of a reply unless `--max-tokens` says otherwise: several times what a good answer needs.
const DEFAULT_MAX_TOKENS: u32 = 512;
/// Time between two checks for Ctrl-C while waiting for the engine.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);
/// Characters of a wrong reply that the table shows.
const SHOWN_CHARS: usize = 60;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct QuestionFile {
    question: Vec<Question>,
}

/// A question and its check.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Question {
    name: String,
    ask: String,
    /// The reply must contain one text of each list, ignoring case.
    expect: Vec<Vec<String>>,
}

/// Why a reply passed or failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Verdict {
    Pass,
    /// An expected text is missing.
    Wrong,
    /// The reply repeats itself.
    Loop,
    /// The reply did not end by itself.
    Cut,
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Verdict::Pass => "pass",
            Verdict::Wrong => "wrong",
            Verdict::Loop => "loop",
            Verdict::Cut => "cut",
        }
    }
}

/// The reply to a question, checked.
#[derive(Debug, Serialize)]
struct Checked {
    name: String,
    verdict: Verdict,
    tokens: usize,
    reply: String,
}

pub(super) fn run(args: &BenchArgs, file: &str, hub: &Hub, interrupt: &Interrupt, output: &mut Output) -> Result<()> {
    let questions = read(file).or_usage()?;
    args.sampling.check().or_usage()?;
    let path = hub.resolve(args.model.as_deref())?;
    let builder = args.compute.builder_on_ranks(&path, hub)?.max_sequences(NUM_SEQUENCES).max_waiting(questions.len());
    let model = args.compute.load(args.speculation.apply(builder, hub)?)?.model;
    let sampling = args.sampling.params(&model.tokenizer, &model.sampling).or_usage()?;
    let max_tokens = args.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS) as usize;
    let settings = format!("{}: {}", args.sampling.origin(&model.sampling), steps(&sampling, &model)?);
    let started = Instant::now();
    let replies = answer(&model, &questions, &sampling, max_tokens, interrupt)?;
    let seconds = started.elapsed().as_secs_f64();
    let checked: Vec<Checked> = questions.iter().zip(replies).map(|(question, reply)| check(question, reply)).collect();
    let passed = count(&checked, Verdict::Pass);
    let percent = 100.0 * passed as f64 / checked.len() as f64;
    if args.json {
        output.write_json(&json!({
            "model": model.id, "settings": settings, "seed": sampling.seed, "max_tokens": max_tokens,
            "passed": passed, "total": checked.len(), "percent": percent, "seconds": seconds, "questions": checked,
        }))?;
        return Ok(());
    }
    writeln!(output, "{}, {settings}, seed {}\n", model.id, sampling.seed)?;
    for reply in &checked {
        writeln!(output, "{:<28}{:<7}{:>6} tokens{}", reply.name, reply.verdict.name(), reply.tokens, shown(reply))?;
    }
    let tokens: usize = checked.iter().map(|reply| reply.tokens).sum();
    let [wrong, loops, cut] = [Verdict::Wrong, Verdict::Loop, Verdict::Cut].map(|verdict| count(&checked, verdict));
    writeln!(
        output,
        "\n{passed} of {} passed ({percent:.1} %): {wrong} wrong, {loops} loops, {cut} cut at {max_tokens} tokens; \
         {} tokens in {seconds:.0} s",
        checked.len(),
        grouped(tokens as u64)
    )?;
    Ok(())
}

/// Reads a file of questions; an empty name is the program's own.
fn read(file: &str) -> Result<Vec<Question>> {
    let QuestionFile { question: questions } = match file {
        "" => toml_file::parse(QUESTIONS, EXAMPLE),
        file => toml_file::read(Path::new(file), EXAMPLE),
    }
    .context("--questions")?;
    if !(1..=MAX_QUESTIONS).contains(&questions.len()) {
        bail!("--questions: expected 1 to {MAX_QUESTIONS} questions, found {}", questions.len());
    }
    let mut names = HashSet::new();
    for question in &questions {
        let is_empty = question.ask.trim().is_empty() || question.expect.iter().any(Vec::is_empty);
        if is_empty || !names.insert(&question.name) {
            bail!(
                "--questions: {:?} must have a name of its own, a text in `ask`, and no empty list in `expect`",
                question.name
            );
        }
    }
    Ok(questions)
}

/// Returns the replies in the order of the questions, each with its number of tokens.
fn answer(
    model: &LoadedModel,
    questions: &[Question],
    sampling: &SamplingParams,
    max_tokens: usize,
    interrupt: &Interrupt,
) -> Result<Vec<(Delta, usize)>> {
    let mut prompts = Vec::with_capacity(questions.len());
    for question in questions {
        let ask = question.ask.trim();
        let prompt = match model.template {
            Some(_) => Prompt::Chat(vec![message("user", ask)]),
            None => Prompt::Text(ask.to_owned()),
        };
        let ids = prompt.ids(model)?;
        let request = Request { max_tokens: Some(max_tokens), loop_guard: true, ..Request::new(ids, sampling.clone()) };
        prompts.push(match prompt {
            Prompt::Chat(_) => PromptRequest::chat(request),
            Prompt::Text(_) => PromptRequest::text(request),
        });
    }
    let request = GenerationRequest { prompts, ..GenerationRequest::default() };
    let mut generation = Generation::submit(model, request)?;
    let mut replies: Vec<Delta> = (0..generation.num_choices()).map(Delta::new).collect();
    let stop = interrupt.stop_on_interrupt();
    loop {
        if stop.is_requested() {
            return Err(Interrupted.into());
        }
        let Poll::Ready(event) = generation.next_within(INTERRUPT_CHECK) else { continue };
        match event.transpose()? {
            None => {
                let num_tokens = |index| generation.stats(index).map_or(0, |stats| stats.output_tokens);
                return Ok(replies.into_iter().enumerate().map(|(index, reply)| (reply, num_tokens(index))).collect());
            }
            Some(GenerationEvent::Delta(delta)) => replies[delta.choice].append(delta)?,
            Some(_) => {}
        }
    }
}

fn check(question: &Question, (reply, tokens): (Delta, usize)) -> Checked {
    let text = reply.text.to_lowercase();
    let is_right =
        question.expect.iter().all(|texts| texts.iter().any(|expected| text.contains(&expected.to_lowercase())));
    let verdict = match &reply.finish {
        Some(Finish::Repetition(_)) => Verdict::Loop,
        Some(Finish::EndToken(_) | Finish::StopToken(_)) if is_right => Verdict::Pass,
        Some(Finish::EndToken(_) | Finish::StopToken(_)) => Verdict::Wrong,
        _ => Verdict::Cut,
    };
    Checked { name: question.name.clone(), verdict, tokens, reply: reply.text }
}

fn count(checked: &[Checked], verdict: Verdict) -> usize {
    checked.iter().filter(|reply| reply.verdict == verdict).count()
}

/// Returns the beginning of a reply that failed, on one line.
fn shown(reply: &Checked) -> String {
    if reply.verdict == Verdict::Pass {
        return String::new();
    }
    let line: Vec<&str> = reply.reply.split_whitespace().collect();
    let line: String = line.join(" ").chars().filter(|c| !c.is_control()).take(SHOWN_CHARS).collect();
    format!("  {line}")
}

/// Returns the sampling steps with their settings.
fn steps(sampling: &SamplingParams, model: &LoadedModel) -> Result<String> {
    let sampler = Sampler::new(sampling, model.vocab_size)?;
    let steps = sampler.steps().filter(|(kind, _)| *kind != StepKind::Mask);
    let steps: Vec<String> =
        steps.map(|(kind, setting)| format!("{} {setting}", kind.name()).trim_end().to_owned()).collect();
    Ok(steps.join(", "))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_are_forty_questions_with_checks() {
        let questions = read("").unwrap();
        assert_eq!(questions.len(), 40);
        assert!(questions.iter().all(|question| !question.expect.is_empty() && question.name.len() < 28));
    }

    /// `docs/questions.md` tells how to run them.
    #[test]
    fn there_are_files_to_copy() {
        let copies = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/commands/bench/copies.toml");
        let copies = read(copies.to_str().unwrap()).unwrap();
        assert_eq!(copies.len(), 12);
        assert!(copies.iter().all(|copy| copy.expect[0][0].lines().count() > 10 && copy.expect[0][0].contains("\n  ")));
    }

    #[test]
    fn a_reply_must_be_right_and_end_by_itself() {
        let question = Question {
            name: "x".into(),
            ask: "x".into(),
            expect: vec![vec!["Rome".into(), "Roma".into()], vec!["it".into()]],
        };
        let verdict = |text: &str, finish: Option<Finish>| {
            check(&question, (Delta { text: text.into(), finish, ..Delta::new(0) }, 3)).verdict
        };
        let end = || Some(Finish::EndToken(None));
        assert_eq!(verdict("ROMA, Italy", end()), Verdict::Pass);
        assert_eq!(verdict("Rome", end()), Verdict::Wrong);
        assert_eq!(verdict("Rome, Italy", Some(Finish::MaxTokens)), Verdict::Cut);
        assert_eq!(verdict("Rome, Italy", None), Verdict::Cut);
    }

    #[test]
    fn files_are_checked() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("q.toml");
        let refused = |text: &str| {
            std::fs::write(&path, text).unwrap();
            format!("{:#}", read(path.to_str().unwrap()).unwrap_err())
        };
        assert!(refused("question = []").contains("expected 1 to 1000 questions, found 0"));
        assert!(refused("[[question]]\nname = 'a'\nask = ' '\nexpect = [['b']]").contains("a text in `ask`"));
        assert!(refused("[[question]]\nname = 'a'\nask = 'b'\nexpect = [[]]").contains("no empty list"));
        assert!(
            refused("[[question]]\nname = 'a'\nask = 'b'\nexpects = []")
                .contains("line 4, column 1: there is no `expects`")
        );
        assert!(read("no/such/file").is_err());
    }
}
