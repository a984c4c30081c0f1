//! One request of `pellucid run`: shows its replies as they arrive, and a line with counts and times at the end.

use std::io::{IsTerminal, Write as _};
use std::task::Poll;
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid::Speculation;
use pellucid_engine::{BeamParams, Error, Repetition, Request};
use pellucid_generate::{Delta, Finish, Generation, GenerationEvent, GenerationRequest, LoadedModel, ReplyPlan, Turn};
use pellucid_sampling::SamplingParams;

use crate::flags::prompt::Prompt;
use crate::flags::thinking::ThinkingChoice;
use crate::terminal::interrupt::Interrupt;
use crate::terminal::log;
use crate::terminal::output::Output;

use super::report::{Report, completes_grammar};
use super::screen::{Screen, ThoughtDisplay, end_output, take};

/// Time between two checks for Ctrl-C while waiting for the engine.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);

/// Maximum tokens of a reply if `--max-tokens` is not given, so that no reply runs on for minutes.
pub(super) const DEFAULT_MAX_TOKENS: usize = 2048;

pub(super) struct Answerer<'a> {
    pub(super) model: LoadedModel,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: SamplingParams,
    /// Value of `--max-tokens`; see [`DEFAULT_MAX_TOKENS`].
    pub(super) max_tokens: Option<usize>,
    pub(super) num_choices: usize,
    pub(super) loop_guard: bool,
    pub(super) best_of: usize,
    pub(super) beams: Option<BeamParams>,
    /// Tools and grammar of every reply.
    pub(super) plan: ReplyPlan,
    /// Settings of thinking, and how thoughts are shown.
    pub(super) thinking: ThinkingChoice,
    pub(super) thoughts: ThoughtDisplay,
    pub(super) stops: Vec<String>,
    /// With `--json`: the time that loading the model took.
    pub(super) json_load: Option<Duration>,
    /// Whether drafters propose tokens, if there are any.
    pub(super) speculate: bool,
    pub(super) drafters: Speculation,
    /// Whether to say what the prefix cache did not hold, and where the time went.
    pub(super) is_verbose: bool,
}

/// The result of a request.
pub(super) struct Answer {
    /// Text of a single reply; empty if there are several.
    pub(super) text: String,
    /// Tokens of the reply.
    pub(super) num_tokens: usize,
    /// Why the reply ended; of several, the first. `None` if Ctrl-C ended it.
    pub(super) finish: Option<Finish>,
    /// Whether Ctrl-C ended it.
    pub(super) interrupted: bool,
}

impl Answerer<'_> {
    /// Answers a prompt. A single continuation follows its prompt, so that the whole reads as one text.
    pub(super) fn answer(&mut self, prompt: &Prompt, output: &mut Output) -> Result<Answer> {
        let mut request = self.thinking.request(prompt, &self.model, &self.plan, |ids| Request {
            max_tokens: self.limit(ids.len()),
            num_choices: self.num_choices,
            loop_guard: self.loop_guard,
            best_of: self.best_of,
            beams: self.beams,
            speculate: self.speculate,
            explain_cache: self.is_verbose,
            ..Request::new(ids, self.sampling.clone())
        })?;
        if let Prompt::Chat(messages) = prompt {
            request.turns = Turn::of_messages(messages);
        }
        let mut request =
            GenerationRequest { prompts: vec![request], stop: self.stops.clone(), reports_progress: true };
        self.model.judge(&mut request)?;
        let mut generation = Generation::submit(&self.model, request)?;
        let mut replies: Vec<Delta> = (0..generation.num_choices()).map(Delta::new).collect();
        let mut screen = Screen::new(output, self.thoughts, self.json_load.is_some());
        if let (Prompt::Text(text), [_], false) = (prompt, &replies[..], screen.is_silent) {
            screen.write(text)?;
        }
        let interrupted = self.follow(&mut generation, &mut replies, &mut screen)?;
        if interrupted {
            for delta in generation.flush() {
                take(delta, &mut replies, &mut screen)?;
            }
        }
        let report = Report {
            model: &self.model,
            generation: &generation,
            sampling: &self.sampling,
            has_grammar: self.plan.has_grammar(),
            has_tools: self.plan.has_calls(),
            not_enforced: self.plan.not_enforced(),
            is_drafted: self.speculate && !self.drafters.is_off() && self.beams.is_none(),
            is_sampled: self.sampling.temperature > 0.0 && self.beams.is_none(),
        };
        let text = match self.json_load {
            Some(load) => {
                screen.output.write_json(&report.json(&replies, load))?;
                screen.output.flush()?;
                String::new()
            }
            None => end_output(&replies, &mut screen)?,
        };
        self.note_loops(&generation);
        self.note_blocked(&generation);
        self.note_hidden_thoughts(&generation);
        log::note(&report.line());
        if self.is_verbose {
            report.details().iter().for_each(|line| log::note(line));
        }
        let is_cut = generation.summary().finishes.iter().flatten().any(|finish| *finish == Finish::MaxTokens);
        if is_cut && self.max_tokens.is_none() {
            log::note(&format!("the reply was cut after {DEFAULT_MAX_TOKENS} tokens; --max-tokens N allows more"));
        }
        let has_ended = generation.summary().finishes.iter().flatten().all(|finish| completes_grammar(Some(finish)));
        if self.plan.has_grammar() && !has_ended {
            log::note("[the reply ended before its grammar did, so it is not complete]");
        }
        let summary = generation.summary();
        let finish = summary.finishes.into_iter().next().flatten();
        Ok(Answer { text, num_tokens: summary.completion_tokens, finish, interrupted })
    }

    /// Returns the maximum tokens of a reply. `None` is what the context holds, if that is less than the default.
    fn limit(&self, num_prompt_tokens: usize) -> Option<usize> {
        let default = DEFAULT_MAX_TOKENS.max(self.sampling.min_tokens as usize);
        let fits = num_prompt_tokens + default <= self.model.context_len;
        self.max_tokens.or_else(|| fits.then_some(default))
    }

    /// Collects the replies, and shows a single one as it arrives. Returns whether Ctrl-C ended it.
    fn follow(&self, generation: &mut Generation, replies: &mut [Delta], screen: &mut Screen<'_>) -> Result<bool> {
        let stop = self.interrupt.stop_on_interrupt();
        let mut prefill = PrefillBar::new();
        loop {
            if stop.is_requested() {
                return Ok(true);
            }
            let Poll::Ready(event) = generation.next_within(INTERRUPT_CHECK) else { continue };
            match event.transpose() {
                Ok(None) => return Ok(false),
                Ok(Some(GenerationEvent::PromptProgress { computed, total, .. })) => prefill.at(computed, total),
                Ok(Some(GenerationEvent::Delta(delta))) => {
                    prefill.clear();
                    take(delta, replies, screen)?;
                }
                Ok(Some(GenerationEvent::ControlApplied { .. })) => {}
                Err(Error::Stopped) => return Err(anyhow!("the engine stopped in the middle of a reply")),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Says that there are thoughts which are not on the screen.
    fn note_hidden_thoughts(&self, generation: &Generation) {
        let num_tokens = generation.summary().thought_tokens;
        if num_tokens > 0 && self.thoughts == ThoughtDisplay::Hidden && self.json_load.is_none() {
            log::note(&format!("[{num_tokens} tokens of thoughts are not shown]"));
        }
    }

    /// Says which replies a guard blocked, and by which rule.
    fn note_blocked(&self, generation: &Generation) {
        for (i, finish) in generation.summary().finishes.iter().enumerate() {
            if let Some(Finish::ContentFilter { guard, rule }) = finish {
                let reply = if self.num_choices > 1 { format!("reply {}", i + 1) } else { "the reply".into() };
                log::note(&format!("[the guard {guard} blocked the rest of {reply}: {rule}]"));
            }
        }
    }

    /// Says which replies the loop guard ended, and how to switch it off.
    fn note_loops(&self, generation: &Generation) {
        for (i, finish) in generation.summary().finishes.iter().enumerate() {
            if let Some(Finish::Repetition(Repetition { period, repeats })) = finish {
                let reply = if self.num_choices > 1 { format!("reply {}", i + 1) } else { "the reply".into() };
                let passage = if *period == 1 { "token".into() } else { format!("{period} tokens") };
                log::note(&format!(
                    "[{reply} was ended because it repeated itself, the same {passage} {repeats} times; \
                     --no-loop-guard switches this off]"
                ));
            }
        }
    }
}

/// Time of a prefill after which its progress is shown.
const PREFILL_PATIENCE: Duration = Duration::from_secs(1);

/// Progress of a long prompt, on a terminal only.
struct PrefillBar {
    begun: Instant,
    bar: Option<ProgressBar>,
}

impl PrefillBar {
    fn new() -> Self {
        PrefillBar { begun: Instant::now(), bar: None }
    }

    fn at(&mut self, done: usize, total: usize) {
        if !std::io::stderr().is_terminal() || self.begun.elapsed() < PREFILL_PATIENCE {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("prefilling the prompt {bar:24} {pos}/{len} tokens {eta}");
            bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            bar
        });
        bar.set_position(done as u64);
    }

    fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Drop for PrefillBar {
    fn drop(&mut self) {
        self.clear();
    }
}
