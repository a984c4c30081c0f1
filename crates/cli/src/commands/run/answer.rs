//! One request: messages to ids, ids to text as they come, and the line of numbers at the end.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_engine::{Beam, BeamParams, Event, FinishReason, Request, RequestStats, TokenStream};
use pellucid_generate::LoadedModel;
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::{StopFilter, TextStream, Tokenizer};

use crate::interrupt::Interrupt;
use crate::output::Output;
use crate::prompt::Prompt;

/// How long to wait for the engine before looking whether Ctrl-C has come.
const GLANCE: Duration = Duration::from_millis(50);

pub(super) struct Answerer<'a> {
    pub(super) model: LoadedModel,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: Option<usize>,
    pub(super) num_choices: usize,
    pub(super) best_of: usize,
    pub(super) beams: Option<BeamParams>,
    pub(super) stops: Vec<String>,
}

/// What was answered.
pub(super) struct Answer {
    /// Of a single reply.
    pub(super) text: String,
    /// Whether Ctrl-C ended it.
    pub(super) interrupted: bool,
}

/// How a reply ended, as the user sees it.
enum Ending {
    Finished(FinishReason),
    StopText,
    Cancelled,
}

impl Answerer<'_> {
    /// Answers a prompt. A single continuation follows its prompt, so that the whole reads as one.
    pub(super) fn answer(&mut self, prompt: &Prompt, output: &mut Output) -> Result<Answer> {
        let ids = prompt.ids(&self.model)?;
        let request = Request {
            max_tokens: self.max_tokens,
            num_choices: self.num_choices,
            best_of: self.best_of,
            beams: self.beams,
            ..Request::new(ids.clone(), self.sampling.clone())
        };
        let mut measured = Measured { start: Instant::now(), first: None, last: None };
        let stream = self.model.engine.submit(request)?;
        // A reply begins a text of its own; a continuation goes on in the prompt's, whose last space may be its first.
        let tokenizer = &*self.model.tokenizer;
        let text = || match prompt {
            Prompt::Chat(_) => tokenizer.stream(true),
            Prompt::Text(_) => TextStream::after(tokenizer, true, &ids),
        };
        let num_shown = self.beams.map_or(self.num_choices, |beams| beams.num_returned);
        let mut replies: Vec<Reply<'_>> =
            (0..num_shown).map(|_| Reply::new(text(), &self.stops, self.sampling.min_tokens as usize)).collect();
        if let (Prompt::Text(text), 1) = (prompt, num_shown) {
            output.write_all(text.as_bytes())?;
        }
        let stats = self.follow(&stream, &mut replies, &mut measured, output)?;
        // Dropping the stream tells the engine that nobody listens any more.
        drop(stream);
        let text = show_the_rest(&mut replies, output)?;
        let interrupted = stats.is_none() && !all_stopped(&replies);
        let ending = replies.iter().find_map(|reply| reply.ending.as_ref()).unwrap_or(&Ending::Cancelled);
        let num_output = replies.iter().map(|reply| reply.num_tokens).sum();
        let stats = stats.unwrap_or_else(|| measured.stats(num_output));
        let _ = writeln!(std::io::stderr(), "{}", self.summary(stats, ids.len(), num_output, ending));
        Ok(Answer { text, interrupted })
    }

    /// Shows a reply as it comes. Gives the engine's numbers, or nothing when the reply was cut short from here.
    fn follow(
        &self,
        stream: &TokenStream,
        replies: &mut [Reply<'_>],
        measured: &mut Measured,
        output: &mut Output,
    ) -> Result<Option<RequestStats>> {
        let stop = self.interrupt.stopping();
        let mut reading = ReadingBar::new();
        let only = replies.len() == 1;
        loop {
            if stop.asked() {
                return Ok(None);
            }
            let Ok(event) = stream.next_within(GLANCE) else { continue };
            match event {
                None => return Err(anyhow!("the engine stopped in the middle of a reply")),
                Some(Event::PromptProgress { computed, total }) => reading.at(computed, total),
                Some(Event::Token(token)) => {
                    reading.clear();
                    measured.token();
                    let reply = &mut replies[token.choice];
                    let text = reply.push(token.id);
                    if only {
                        output.write_all(text.as_bytes())?;
                        output.flush()?;
                    }
                    if all_stopped(replies) {
                        return Ok(None);
                    }
                }
                Some(Event::ChoiceEnd { choice, reason, .. }) => {
                    replies[choice].ending.get_or_insert(Ending::Finished(reason));
                }
                Some(Event::Beams { beams, reason }) => {
                    for (reply, beam) in replies.iter_mut().zip(&beams) {
                        self.take_beam(reply, beam, reason);
                    }
                    if only {
                        output.write_all(replies[0].text.as_bytes())?;
                    }
                }
                Some(Event::Started { .. } | Event::PromptLogprobs(_) | Event::ControlApplied { .. }) => {}
                Some(Event::Done(stats)) => return Ok(Some(stats)),
                Some(Event::Failed(error)) => return Err(error.into()),
            }
        }
    }

    fn take_beam(&self, reply: &mut Reply<'_>, beam: &Beam, reason: FinishReason) {
        for &id in &beam.ids {
            reply.push(id);
        }
        reply.score = Some(beam.score);
        let has_ended = beam.ids.last().is_some_and(|last| self.sampling.end_ids.contains(last));
        let reason = if has_ended { FinishReason::End } else { reason };
        reply.ending.get_or_insert(Ending::Finished(reason));
    }

    /// The last line: tokens in and out, the two times that people compare, and what is needed to repeat the reply.
    fn summary(&self, stats: RequestStats, prompt_tokens: usize, num_output: usize, ending: &Ending) -> String {
        let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
        let cached = match stats.cached_tokens {
            0 => String::new(),
            cached => format!(" ({cached} cached)"),
        };
        let num_output = stats.output_tokens.max(num_output);
        let mut parts = vec![format!("{prompt_tokens} prompt{cached} + {num_output} output tokens")];
        if !stats.time_to_first_token.is_zero() {
            parts.push(format!("first {:.0} ms", milliseconds(stats.time_to_first_token)));
        }
        if let Some(each) = stats.time_per_output_token() {
            parts.push(format!("next {:.1} ms each", milliseconds(each)));
        }
        if self.sampling.temperature > 0.0 && self.beams.is_none() {
            parts.push(format!("seed {}", self.sampling.seed));
        }
        match ending {
            Ending::Finished(FinishReason::End | FinishReason::Stop) => {}
            Ending::Finished(FinishReason::MaxTokens) => parts.push("ended at --max-tokens".into()),
            Ending::Finished(FinishReason::Context) => parts.push("ended because the context is full".into()),
            Ending::Finished(FinishReason::Deadline) => parts.push("ended because its time was over".into()),
            Ending::StopText => parts.push("ended at --stop".into()),
            Ending::Cancelled => parts.push("stopped".into()),
        }
        format!("[{}]", parts.join(", "))
    }
}

/// Whether every reply has met a text of `--stop`.
fn all_stopped(replies: &[Reply<'_>]) -> bool {
    replies.iter().all(|reply| matches!(reply.ending, Some(Ending::StopText)))
}

/// What is left of a single reply, or several replies whole. Gives the text of a single one.
fn show_the_rest(replies: &mut [Reply<'_>], output: &mut Output) -> Result<String> {
    let mut text = String::new();
    if let [only] = replies {
        let rest = only.finish();
        writeln!(output, "{rest}")?;
        text.clone_from(&only.text);
    } else {
        for (i, reply) in replies.iter_mut().enumerate() {
            reply.finish();
            let score = reply.score.map_or_else(String::new, |score| format!(" (score {score:.4})"));
            writeln!(output, "--- {}{score}\n{}", i + 1, reply.text)?;
        }
    }
    output.flush()?;
    Ok(text)
}

/// Times as they are seen from here, for replies that are cut short from here: the engine does not report those.
struct Measured {
    start: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
}

impl Measured {
    fn token(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }

    fn stats(&self, num_tokens: usize) -> RequestStats {
        let between =
            |from: Option<Instant>, to: Option<Instant>| from.zip(to).map_or(Duration::ZERO, |(from, to)| to - from);
        RequestStats {
            output_tokens: num_tokens,
            time_to_first_token: between(Some(self.start), self.first),
            decode_time: between(self.first, self.last),
            decode_steps: num_tokens.saturating_sub(1),
            ..RequestStats::default()
        }
    }
}

/// One reply's text as it grows.
struct Reply<'t> {
    stream: Option<TextStream<&'t Tokenizer>>,
    stops: StopFilter,
    /// Stop strings count from this token on.
    min_tokens: usize,
    text: String,
    num_tokens: usize,
    ending: Option<Ending>,
    /// Of a beam.
    score: Option<f64>,
}

impl<'t> Reply<'t> {
    fn new(stream: TextStream<&'t Tokenizer>, stops: &[String], min_tokens: usize) -> Reply<'t> {
        Reply {
            stream: Some(stream),
            stops: StopFilter::new(stops),
            min_tokens,
            text: String::new(),
            num_tokens: 0,
            ending: None,
            score: None,
        }
    }

    /// The text that this token makes safe to show.
    fn push(&mut self, id: u32) -> String {
        self.num_tokens += 1;
        let piece = self.stream.as_mut().map_or_else(String::new, |stream| stream.push(id));
        let shown = if self.num_tokens < self.min_tokens { piece } else { self.stops.push(&piece) };
        self.text.push_str(&shown);
        if self.stops.is_stopped() {
            self.ending.get_or_insert(Ending::StopText);
        }
        shown
    }

    /// What was held back and is text after all.
    fn finish(&mut self) -> String {
        let rest = self.stream.take().map_or_else(String::new, TextStream::finish);
        let mut shown = self.stops.push(&rest);
        if !self.stops.is_stopped() {
            shown.push_str(&std::mem::replace(&mut self.stops, StopFilter::new(&[])).finish());
        }
        self.text.push_str(&shown);
        shown
    }
}

/// Shown while a long prompt is read, on a terminal only.
struct ReadingBar {
    bar: Option<ProgressBar>,
}

impl ReadingBar {
    fn new() -> Self {
        ReadingBar { bar: None }
    }

    fn at(&mut self, done: usize, total: usize) {
        if !std::io::stderr().is_terminal() {
            return;
        }
        let bar = self.bar.get_or_insert_with(|| {
            let bar = ProgressBar::with_draw_target(Some(total as u64), ProgressDrawTarget::stderr());
            let style = ProgressStyle::with_template("reading the prompt {bar:24} {pos}/{len} tokens {eta}");
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

impl Drop for ReadingBar {
    fn drop(&mut self) {
        self.clear();
    }
}
