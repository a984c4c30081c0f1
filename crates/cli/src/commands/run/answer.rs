//! One request: messages to ids, ids to text as they come, and the line of numbers at the end.

use std::io::{IsTerminal, Write};
use std::time::Duration;

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_engine::{Beam, BeamParams, Event, FinishReason, Request, RequestStats, TokenStream};
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::{StopFilter, TextStream, Tokenizer};

use crate::interrupt::Interrupt;
use crate::loaded::Loaded;
use crate::output::Output;
use crate::prompt::Prompt;

/// How long to wait for the engine before looking whether Ctrl-C has come.
const GLANCE: Duration = Duration::from_millis(50);

pub(super) struct Answerer<'a> {
    pub(super) loaded: Loaded,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: Option<usize>,
    pub(super) num_choices: usize,
    pub(super) best_of: usize,
    pub(super) beams: Option<BeamParams>,
    pub(super) stops: Vec<String>,
}

/// How a reply ended, as the user sees it.
enum Ending {
    Finished(FinishReason),
    StopText,
    Cancelled,
}

impl Answerer<'_> {
    /// Answers a prompt and gives the reply's text. Text that is continued is shown first, so that the whole reads as one.
    pub(super) fn answer(&mut self, prompt: &Prompt, output: &mut Output) -> Result<String> {
        let ids = self.loaded.prompt_ids(prompt)?;
        if let Prompt::Text(text) = prompt {
            output.write_all(text.as_bytes())?;
        }
        self.generate(ids, output)
    }

    fn generate(&mut self, prompt: Vec<u32>, output: &mut Output) -> Result<String> {
        let request = Request {
            max_tokens: self.max_tokens,
            num_choices: self.num_choices,
            best_of: self.best_of,
            beams: self.beams,
            ..Request::new(prompt, self.sampling.clone())
        };
        let prompt_tokens = request.prompt.len();
        let stream = self.loaded.engine.submit(request)?;
        let mut replies: Vec<Reply<'_>> =
            (0..self.num_choices).map(|_| Reply::new(&self.loaded.tokenizer, &self.stops)).collect();
        let stats = self.follow(&stream, &mut replies, output)?;
        // Dropping the stream tells the engine that nobody listens any more.
        drop(stream);
        let text = match &mut replies[..] {
            [only] => {
                let rest = only.finish();
                writeln!(output, "{rest}")?;
                only.text.clone()
            }
            several => {
                for (i, reply) in several.iter_mut().enumerate() {
                    reply.finish();
                    writeln!(output, "--- {}\n{}", i + 1, reply.text)?;
                }
                String::new()
            }
        };
        output.flush()?;
        let ending = replies.iter().find_map(|reply| reply.ending.as_ref()).unwrap_or(&Ending::Cancelled);
        let num_output = replies.iter().map(|reply| reply.num_tokens).sum();
        let summary = self.summary(stats.unwrap_or_default(), prompt_tokens, num_output, ending);
        let _ = writeln!(std::io::stderr(), "{summary}");
        Ok(text)
    }

    /// Shows a reply as it comes. Gives the engine's numbers, or nothing when the reply was cut short from here.
    fn follow(
        &self,
        stream: &TokenStream,
        replies: &mut [Reply<'_>],
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
                Some(Event::Prompt { computed, total }) => reading.at(computed, total),
                Some(Event::Token(token)) => {
                    reading.clear();
                    let reply = &mut replies[token.choice];
                    let text = reply.push(token.id);
                    if only {
                        output.write_all(text.as_bytes())?;
                        output.flush()?;
                    }
                    if replies.iter().all(|reply| matches!(reply.ending, Some(Ending::StopText))) {
                        return Ok(None);
                    }
                }
                Some(Event::ChoiceEnd { choice, reason, .. }) => {
                    replies[choice].ending.get_or_insert(Ending::Finished(reason));
                }
                Some(Event::Beams(beams)) => {
                    self.show_beams(&beams, output)?;
                    replies[0].ending = Some(Ending::Finished(FinishReason::End));
                }
                Some(Event::PromptLogprobs(_)) => {}
                Some(Event::Done(stats)) => return Ok(Some(stats)),
                Some(Event::Failed(error)) => return Err(error.into()),
            }
        }
    }

    fn show_beams(&self, beams: &[Beam], output: &mut Output) -> Result<()> {
        for (i, beam) in beams.iter().enumerate() {
            let text = self.loaded.tokenizer.decode(&beam.ids, true);
            if beams.len() == 1 {
                write!(output, "{text}")?;
            } else {
                let line_end = if i + 1 == beams.len() { "" } else { "\n" };
                write!(output, "--- {} (score {:.4})\n{text}{line_end}", i + 1, beam.score)?;
            }
        }
        Ok(())
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

/// One reply's text as it grows.
struct Reply<'t> {
    stream: Option<TextStream<'t>>,
    stops: StopFilter,
    text: String,
    num_tokens: usize,
    ending: Option<Ending>,
}

impl<'t> Reply<'t> {
    fn new(tokenizer: &'t Tokenizer, stops: &[String]) -> Reply<'t> {
        Reply {
            stream: Some(tokenizer.stream(true)),
            stops: StopFilter::new(stops),
            text: String::new(),
            num_tokens: 0,
            ending: None,
        }
    }

    /// The text that this token makes safe to show.
    fn push(&mut self, id: u32) -> String {
        self.num_tokens += 1;
        let piece = self.stream.as_mut().map_or_else(String::new, |stream| stream.push(id));
        let shown = self.stops.push(&piece);
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
