//! One request of `pellucid run`: shows its replies as they arrive, and a line with counts and times at the end.

use std::io::{IsTerminal, Write};
use std::task::Poll;
use std::time::Duration;

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_engine::{BeamParams, Error, Repetition, Request};
use pellucid_generate::{Delta, Finish, Generation, GenerationEvent, GenerationRequest, LoadedModel, PromptRequest};
use pellucid_sampling::SamplingParams;

use crate::flags::prompt::Prompt;
use crate::terminal::interrupt::Interrupt;
use crate::terminal::log;
use crate::terminal::output::Output;
use crate::terminal::word_wrap::WordWrap;

/// Time between two checks for Ctrl-C while waiting for the engine.
const INTERRUPT_CHECK: Duration = Duration::from_millis(50);

pub(super) struct Answerer<'a> {
    pub(super) model: LoadedModel,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: Option<usize>,
    pub(super) num_choices: usize,
    pub(super) loop_guard: bool,
    pub(super) best_of: usize,
    pub(super) beams: Option<BeamParams>,
    pub(super) stops: Vec<String>,
}

/// The result of a request.
pub(super) struct Answer {
    /// Text of a single reply; empty if there are several.
    pub(super) text: String,
    /// Tokens of the reply.
    pub(super) num_tokens: usize,
    /// Whether Ctrl-C ended it.
    pub(super) interrupted: bool,
}

impl Answerer<'_> {
    /// Answers a prompt. A single continuation follows its prompt, so that the whole reads as one text.
    pub(super) fn answer(&mut self, prompt: &Prompt, output: &mut Output) -> Result<Answer> {
        let ids = prompt.ids(&self.model)?;
        let request = Request {
            max_tokens: self.max_tokens,
            num_choices: self.num_choices,
            loop_guard: self.loop_guard,
            best_of: self.best_of,
            beams: self.beams,
            ..Request::new(ids, self.sampling.clone())
        };
        let request = match prompt {
            Prompt::Chat(_) => PromptRequest::chat(request),
            Prompt::Text(_) => PromptRequest::text(request),
        };
        let request = GenerationRequest { prompts: vec![request], stop: self.stops.clone(), reports_progress: true };
        let mut generation = Generation::submit(&self.model, request)?;
        let mut replies: Vec<Delta> = (0..generation.num_choices()).map(Delta::new).collect();
        let mut screen = Screen { output, wrap: WordWrap::for_stdout() };
        if let (Prompt::Text(text), [_]) = (prompt, &replies[..]) {
            screen.write(text)?;
        }
        let interrupted = self.follow(&mut generation, &mut replies, &mut screen)?;
        if interrupted {
            for delta in generation.flush() {
                take(delta, &mut replies, &mut screen)?;
            }
        }
        let text = end_output(&replies, &mut screen)?;
        self.note_loops(&generation);
        log::note(&self.summary(&generation));
        Ok(Answer { text, num_tokens: generation.summary().completion_tokens, interrupted })
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

    /// Returns the last line: token counts, time to the first token and per token, and the seed.
    fn summary(&self, generation: &Generation) -> String {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let summary = generation.summary();
        let stats = generation.stats(0);
        let cached = match summary.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        let num_output = stats.map_or(0, |stats| stats.output_tokens).max(summary.completion_tokens);
        let mut parts = vec![format!("{} prompt{cached} + {num_output} output tokens", summary.prompt_tokens)];
        // A beam search sends no tokens, but the engine measures its first step.
        let first = stats.map(|stats| stats.time_to_first_token).or(summary.time_to_first_token);
        if let Some(first) = first.filter(|first| !first.is_zero()) {
            parts.push(format!("first {:.0} ms", milliseconds(first)));
        }
        if let Some(each) = summary.time_per_output_token {
            parts.push(format!("next {:.1} ms each", milliseconds(each)));
        }
        if self.sampling.temperature > 0.0 && self.beams.is_none() {
            parts.push(format!("seed {}", self.sampling.seed));
        }
        match summary.finishes.iter().flatten().next() {
            Some(Finish::EndToken(_) | Finish::StopToken(_)) => {}
            Some(Finish::MaxTokens) => parts.push("ended at --max-tokens".into()),
            Some(Finish::ContextFull) => parts.push("ended because the context is full".into()),
            Some(Finish::Deadline) => parts.push("ended at its time limit".into()),
            Some(Finish::StopString(_)) => parts.push("ended at --stop".into()),
            Some(Finish::Repetition(_)) => parts.push("ended because it repeated itself".into()),
            None => parts.push("stopped".into()),
        }
        format!("[{}]", parts.join(", "))
    }
}

/// Standard output, wrapped between words if it is a terminal.
struct Screen<'o> {
    output: &'o mut Output,
    wrap: WordWrap,
}

impl Screen<'_> {
    fn write(&mut self, text: &str) -> Result<()> {
        self.output.write_all(self.wrap.push(text).as_bytes())?;
        Ok(self.output.flush()?)
    }

    /// Writes the last word, and ends the line.
    fn end_line(&mut self) -> Result<()> {
        let rest = self.wrap.finish();
        writeln!(self.output, "{rest}")?;
        Ok(self.output.flush()?)
    }
}

/// Adds a piece to its reply, and shows it where there is only one.
fn take(delta: Delta, replies: &mut [Delta], screen: &mut Screen<'_>) -> Result<()> {
    if replies.len() == 1 {
        screen.write(&delta.text)?;
    }
    replies[delta.choice].append(delta);
    Ok(())
}

/// Ends the line of a single reply, or shows several replies. Returns the text of a single one.
fn end_output(replies: &[Delta], screen: &mut Screen<'_>) -> Result<String> {
    if let [only] = replies {
        screen.end_line()?;
        return Ok(only.text.clone());
    }
    for (i, reply) in replies.iter().enumerate() {
        let score = reply.score.map_or_else(String::new, |score| format!(" (score {score:.4})"));
        screen.write(&format!("--- {}{score}\n{}", i + 1, reply.text))?;
        screen.end_line()?;
    }
    Ok(String::new())
}

/// Progress of a long prompt, on a terminal only.
struct PrefillBar {
    bar: Option<ProgressBar>,
}

impl PrefillBar {
    fn new() -> Self {
        PrefillBar { bar: None }
    }

    fn at(&mut self, done: usize, total: usize) {
        if !std::io::stderr().is_terminal() {
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
