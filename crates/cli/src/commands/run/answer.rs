//! One reply: messages to ids, ids to text as they come, and the line of numbers at the end.

use std::io::{IsTerminal, Write};
use std::ops::ControlFlow;
use std::time::Duration;

use anyhow::{Result, anyhow};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use pellucid_engine::{Event, FinishReason, Reply, Request};
use pellucid_sampling::SamplingParams;
use pellucid_tokenizer::Conversation;
use serde_json::Value;

use crate::clock;
use crate::interrupt::Interrupt;
use crate::loaded::Loaded;
use crate::output::Output;

pub(super) struct Answerer<'a> {
    pub(super) loaded: Loaded,
    pub(super) interrupt: &'a Interrupt,
    pub(super) sampling: SamplingParams,
    pub(super) max_tokens: Option<usize>,
}

impl Answerer<'_> {
    /// Answers the last of `messages` and gives the reply's text.
    pub(super) fn answer(&mut self, messages: &[Value], output: &mut Output) -> Result<String> {
        let template = self.loaded.template.as_ref().expect("the caller checked that there is a template");
        let conversation =
            Conversation { messages, add_generation_prompt: true, now: Some(clock::now()), ..Conversation::default() };
        let prompt = self.loaded.tokenizer.encode_segments(&template.render(&conversation)?);
        self.generate(prompt, output)
    }

    /// Continues plain text, which is shown first so that the whole reads as one.
    pub(super) fn continue_text(&mut self, text: &str, output: &mut Output) -> Result<String> {
        let tokenizer = &self.loaded.tokenizer;
        let prompt = [tokenizer.prefix(), &tokenizer.encode(text)].concat();
        output.write_all(text.as_bytes())?;
        self.generate(prompt, output)
    }

    fn generate(&mut self, prompt: Vec<u32>, output: &mut Output) -> Result<String> {
        let Loaded { tokenizer, session, .. } = &mut self.loaded;
        let request = Request {
            prompt,
            sampling: self.sampling,
            max_tokens: self.max_tokens,
            end_ids: tokenizer.end_ids().to_vec(),
        };
        let stop = self.interrupt.stopping();
        let mut reading = ReadingBar::new();
        let mut stream = tokenizer.stream(true);
        let mut text = String::new();
        let mut written = Ok(());
        let reply = session.generate(&request, |event| {
            match event {
                Event::Prefill { done, total } => reading.at(done, total),
                Event::Token(id) => {
                    reading.clear();
                    let piece = stream.push(id);
                    written = output.write_all(piece.as_bytes()).and_then(|()| output.flush());
                    text.push_str(&piece);
                }
            }
            if stop.asked() || written.is_err() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        drop(reading);
        written?;
        let rest = stream.finish();
        writeln!(output, "{rest}")?;
        output.flush()?;
        text.push_str(&rest);
        let reply = reply.map_err(|error| anyhow!(error))?;
        let _ = writeln!(std::io::stderr(), "{}", summary(&reply, &self.sampling));
        Ok(text)
    }
}

/// The last line: tokens in and out, the two times that people compare, and what is needed to repeat the reply.
fn summary(reply: &Reply, sampling: &SamplingParams) -> String {
    let stats = &reply.stats;
    let milliseconds = |time: Duration| time.as_secs_f64() * 1e3;
    let cached = match stats.cached_tokens {
        0 => String::new(),
        cached => format!(" ({cached} cached)"),
    };
    let mut parts = vec![
        format!("{} prompt tokens{cached}", stats.prompt_tokens),
        format!("{} output tokens", stats.output_tokens),
        format!("first {:.0} ms", milliseconds(stats.time_to_first_token)),
    ];
    if let Some(each) = stats.time_per_output_token() {
        parts.push(format!("next {:.1} ms each", milliseconds(each)));
    }
    if sampling.temperature > 0.0 {
        parts.push(format!("seed {}", sampling.seed));
    }
    match reply.finish {
        FinishReason::End => {}
        FinishReason::MaxTokens => parts.push("ended at --max-tokens".into()),
        FinishReason::Context => parts.push("ended because the context is full".into()),
        FinishReason::Cancelled => parts.push("stopped".into()),
    }
    format!("[{}]", parts.join(", "))
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
