//! `bench --tasks`: what drafts are worth on real prompts. Every task is answered without drafts, with them, and with
//! a drafter that is always wrong, one after the other, so that other load on the machine affects all three alike.
//!
//! The tasks are in `tasks.toml`, by kind. The prompts are in the prefix cache before anything is measured, and the
//! time runs from the moment at which every request of a batch has its first token: prefill does not count.

use std::collections::HashSet;
use std::io::Write;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail};
use pellucid_engine::{DraftContext, DraftCounts, Drafter, Engine, EngineOptions, Overcommit, Request};
use pellucid_generate::{ChatPrompt, PromptEncoder, utc_now};
use pellucid_model::BLOCK_LEN;
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::{ChatTemplate, Tokenizer, message};
use serde::{Deserialize, Serialize};

use crate::commands::event_queue::EventQueue;
use crate::commands::model_on_device::ModelOnDevice;
use crate::flags::toml_file;

/// The tasks that the program contains.
const TASKS: &str = include_str!("tasks.toml");
/// Shows the form of a file of tasks.
const EXAMPLE: &str = "expected `[[task]]`, `kind = \"edit\"`, `name = \"a\"` and `ask = \"...\"`";
/// Maximum tasks in a file.
const MAX_TASKS: usize = 1000;

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TaskFile {
    task: Vec<Task>,
}

/// A prompt, and what kind of reply it gets: results are summed up by kind.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Task {
    pub(crate) kind: String,
    pub(crate) name: String,
    pub(crate) ask: String,
}

/// The results of one kind at one batch size.
#[derive(Debug, Serialize)]
pub(super) struct KindResult {
    pub(super) kind: String,
    pub(super) batch: usize,
    pub(super) tokens: usize,
    pub(super) plain_tokens_per_second: f64,
    pub(super) tokens_per_second: f64,
    /// Speed with drafts over speed without.
    pub(super) ratio: f64,
    /// Speed with drafts that are always wrong over speed without.
    pub(super) wrong_ratio: f64,
    pub(super) drafted: u64,
    pub(super) accepted: u64,
    /// Tokens of each sequence in a step.
    pub(super) tokens_per_step: f64,
}

/// Proposes tokens that are hardly ever right, as long as it is asked to.
struct WrongDrafter {
    vocab_size: usize,
}

impl Drafter for WrongDrafter {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        // Far apart and different at every position, so that no text consists of them.
        let token = |i: usize| ((context.tokens.len() + i) * 7919 % self.vocab_size) as u32;
        draft.extend((0..max_len).map(token));
    }
}

/// Reads a file of tasks; an empty name is the program's own.
pub(crate) fn read(file: &str) -> Result<Vec<Task>> {
    let TaskFile { task: tasks } = match file {
        "" => toml_file::parse(TASKS, EXAMPLE),
        file => toml_file::read(Path::new(file), EXAMPLE),
    }
    .context("--tasks")?;
    if !(1..=MAX_TASKS).contains(&tasks.len()) {
        bail!("--tasks: expected 1 to {MAX_TASKS} tasks, found {}", tasks.len());
    }
    let mut names = HashSet::new();
    for task in &tasks {
        if task.ask.trim().is_empty() || task.kind.trim().is_empty() || !names.insert(&task.name) {
            bail!("--tasks: {:?} must have a name of its own, a kind, and a text in `ask`", task.name);
        }
    }
    Ok(tasks)
}

/// Returns the token ids of the tasks' prompts: a conversation if the model has a chat template, else text to continue.
pub(crate) fn encode(tasks: &[Task], tokenizer: &Tokenizer, template: Option<&str>) -> Result<Vec<Vec<u32>>> {
    let template = template.map(|text| ChatTemplate::compile(text, tokenizer)).transpose()?;
    let prompts = PromptEncoder::new(tokenizer, template.as_ref(), utc_now);
    let encode = |task: &Task| -> Result<Vec<u32>> {
        let ask = task.ask.trim();
        Ok(match template {
            Some(_) => prompts.encode_chat(&ChatPrompt::new(&[message("user", ask)]))?,
            None => prompts.encode_text(ask)?,
        })
    };
    tasks.iter().map(encode).collect()
}

/// The settings of a measurement.
pub(super) struct TaskBench<'a> {
    pub(super) device: &'a ModelOnDevice,
    pub(super) options: EngineOptions,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: usize,
    /// Gives an engine the drafters to measure.
    pub(super) add_drafters: &'a dyn Fn(&mut Engine) -> Result<()>,
    pub(super) progress: &'a mut dyn FnMut(&str),
}

/// Returns engine options that hold `batch` sequences of prompts up to `longest` tokens, and all prompts in the cache.
pub(super) fn options(
    prompts: &[Vec<u32>],
    max_tokens: usize,
    batch: usize,
    chunk_len: usize,
    kv_dtype: pellucid_tensor::DType,
) -> EngineOptions {
    let blocks = |prompt: &Vec<u32>| (prompt.len() + max_tokens).div_ceil(BLOCK_LEN) + 1;
    let longest = prompts.iter().map(blocks).max().unwrap_or(1);
    EngineOptions {
        num_blocks: longest * batch + 2 * prompts.iter().map(blocks).sum::<usize>(),
        block_len: BLOCK_LEN,
        kv_dtype,
        max_sequences: batch,
        step_tokens: chunk_len.max(batch),
        chunk_len,
        max_waiting: batch,
        overcommit: Overcommit::Never,
        secret: [0; 32],
        snapshot_distance: None,
    }
}

/// Replies, time and counts of one run of a batch.
struct Run {
    replies: Vec<Vec<u32>>,
    tokens: usize,
    seconds: f64,
    steps: u64,
    drafts: DraftCounts,
}

impl TaskBench<'_> {
    /// Measures every kind at every batch size, `rounds` times.
    pub(super) fn run(
        &mut self,
        tasks: &[Task],
        prompts: &[Vec<u32>],
        batches: &[usize],
        rounds: usize,
    ) -> Result<Vec<KindResult>> {
        let mut kinds: Vec<&str> = Vec::new();
        for task in tasks {
            if !kinds.contains(&task.kind.as_str()) {
                kinds.push(&task.kind);
            }
        }
        let mut drafting = self.device.engine(self.options)?;
        (self.add_drafters)(&mut drafting)?;
        let mut wrong = self.device.engine(self.options)?;
        wrong.set_speculation(pellucid_engine::SpeculationOptions::OFF);
        wrong.add_drafter(Box::new(WrongDrafter { vocab_size: self.device.vocab_size() }));
        let mut results = Vec::new();
        for &batch in batches {
            for kind in &kinds {
                let of_kind: Vec<&Vec<u32>> = tasks
                    .iter()
                    .zip(prompts)
                    .filter(|(task, _)| task.kind == *kind)
                    .map(|(_, prompt)| prompt)
                    .collect();
                let groups: Vec<Vec<&Vec<u32>>> = match batch {
                    1 => of_kind.iter().map(|&prompt| vec![prompt]).collect(),
                    // A batch larger than the kind has tasks gets some of them again.
                    _ => vec![of_kind.iter().copied().cycle().take(batch).collect()],
                };
                let mut sums: [(usize, f64); 3] = Default::default();
                let (mut counts, mut steps) = (DraftCounts::default(), 0);
                for round in 0..rounds {
                    for (i, group) in groups.iter().enumerate() {
                        (self.progress)(&format!(
                            "{kind}, batch {batch}: round {} of {rounds}, {i} of {} groups",
                            round + 1,
                            groups.len()
                        ));
                        // The drafter of the tenant's recent output must not know the reply from an earlier run.
                        let tenant = (1 + results.len() * rounds * groups.len() + round * groups.len() + i) as u32;
                        let plain = self.answer(&mut drafting, group, 3 * tenant, false)?;
                        let drafted = self.answer(&mut drafting, group, 3 * tenant + 1, true)?;
                        let misled = self.answer(&mut wrong, group, 3 * tenant + 2, true)?;
                        if drafted.replies != plain.replies || misled.replies != plain.replies {
                            bail!("a reply of kind {kind} differs with drafts, batch {batch}; please report it");
                        }
                        counts += drafted.drafts;
                        steps += drafted.steps * group.len() as u64;
                        for (sum, run) in sums.iter_mut().zip([&plain, &drafted, &misled]) {
                            sum.0 += run.tokens;
                            sum.1 += run.seconds;
                        }
                    }
                }
                let [plain, drafted, misled] = sums.map(|(tokens, seconds)| tokens as f64 / seconds);
                results.push(KindResult {
                    kind: (*kind).to_owned(),
                    batch,
                    tokens: sums[0].0,
                    plain_tokens_per_second: plain,
                    tokens_per_second: drafted,
                    ratio: drafted / plain,
                    wrong_ratio: misled / plain,
                    drafted: counts.drafted,
                    accepted: counts.accepted,
                    tokens_per_step: sums[1].0 as f64 / steps as f64,
                });
            }
        }
        Ok(results)
    }

    /// Answers prompts at once and measures from the moment at which all have their first token.
    fn answer(&self, engine: &mut Engine, prompts: &[&Vec<u32>], tenant: u32, speculate: bool) -> Result<Run> {
        let scope = pellucid_engine::Scope::of(pellucid_engine::TenantId(tenant));
        let request = |prompt: &Vec<u32>, max_tokens| Request {
            scope,
            max_tokens: Some(max_tokens),
            speculate,
            ..Request::new(prompt.clone(), self.sampling.clone())
        };
        for prompt in prompts {
            let (sink, _events) = EventQueue::new();
            engine.submit(request(prompt, 1), Box::new(sink))?;
            while engine.step() {}
        }
        let mut queues = Vec::new();
        for prompt in prompts {
            let (sink, events) = EventQueue::new();
            engine.submit(request(prompt, self.max_tokens), Box::new(sink))?;
            queues.push(events);
        }
        let mut replies: Vec<Vec<u32>> = vec![Vec::new(); prompts.len()];
        let before = engine.stats();
        let mut start = None;
        loop {
            let goes_on = engine.step();
            for (events, reply) in queues.iter().zip(&mut replies) {
                crate::commands::event_queue::append_tokens(events, reply)?;
            }
            if start.is_none() && replies.iter().all(|reply| !reply.is_empty()) {
                let tokens: usize = replies.iter().map(Vec::len).sum();
                start = Some((Instant::now(), tokens, engine.stats().steps));
            }
            if !goes_on {
                break;
            }
        }
        let Some((started, first_tokens, first_steps)) = start else { bail!("a reply has no token") };
        let seconds = started.elapsed().as_secs_f64();
        let after = engine.stats();
        let (old, new) = (before.speculation.total(), after.speculation.total());
        Ok(Run {
            tokens: replies.iter().map(Vec::len).sum::<usize>() - first_tokens,
            seconds,
            steps: after.steps - first_steps,
            drafts: DraftCounts { drafted: new.drafted - old.drafted, accepted: new.accepted - old.accepted },
            replies,
        })
    }
}

/// Writes the results as a table of 80 columns.
pub(super) fn print(out: &mut impl Write, results: &[KindResult]) -> std::io::Result<()> {
    let line = |out: &mut dyn Write, cells: [String; 8]| {
        let [kind, batch, plain, drafted, ratio, wrong, accepted, per_step] = cells;
        writeln!(out, "{kind:<12}{batch:>6}{plain:>10}{drafted:>10}{ratio:>9}{wrong:>10}{accepted:>11}{per_step:>12}")
    };
    line(out, ["", "batch", "plain t/s", "drafts", "ratio", "if wrong", "accepted", "tokens/step"].map(str::to_owned))?;
    for result in results {
        let share = 100.0 * result.accepted as f64 / result.drafted.max(1) as f64;
        line(
            out,
            [
                result.kind.clone(),
                result.batch.to_string(),
                format!("{:.1}", result.plain_tokens_per_second),
                format!("{:.1}", result.tokens_per_second),
                format!("{:.2} x", result.ratio),
                format!("{:.2} x", result.wrong_ratio),
                format!("{share:.0} %"),
                format!("{:.2}", result.tokens_per_step),
            ],
        )?;
    }
    Ok(())
}
