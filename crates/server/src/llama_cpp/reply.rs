//! Replies of `/completion` and `/infill`: one object, or an event for each piece and a last one with all numbers.

use std::time::Duration;

use pellucid_generate::{Delta, Finish, LoadedModel, Summary};
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::Extension;
use crate::reply::Sampling;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::{ReplyForm, StreamWriter};
use crate::reply::parts::JsonParts;

/// The form of one reply.
#[derive(Debug)]
pub(super) struct ContentForm {
    model: String,
    finish: Option<Finish>,
}

impl ContentForm {
    pub(super) fn new(model: &LoadedModel) -> ContentForm {
        ContentForm { model: model.id.clone(), finish: None }
    }

    /// Returns the object that ends a reply.
    fn end(&self, content: &str, finish: Option<&Finish>, sampling: &Sampling, summary: &Summary) -> Value {
        let (stop_type, stopping_word) = match finish {
            Some(Finish::StopString(text)) => ("word", text.as_str()),
            Some(Finish::EndToken(_) | Finish::StopToken(_)) => ("eos", ""),
            Some(_) => ("limit", ""),
            None => ("none", ""),
        };
        json!({
            "index": 0, "content": content, "stop": true, "model": self.model,
            "stop_type": stop_type, "stopping_word": stopping_word, "truncated": false,
            "tokens_predicted": summary.completion_tokens, "tokens_evaluated": summary.prompt_tokens,
            "tokens_cached": summary.cached_tokens, "timings": timings(summary),
            "pellucid": Extension::new(sampling, summary),
        })
    }
}

impl ReplyForm for ContentForm {
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        let delta = choices.into_iter().next().unwrap_or_default();
        let mut parts = JsonParts::default();
        parts.value(&self.end(&delta.text, delta.finish.as_ref(), sampling, summary));
        parts
    }

    fn stream(self: Box<Self>, _: Streaming) -> Box<dyn StreamWriter> {
        self
    }
}

impl StreamWriter for ContentForm {
    fn open(&mut self, _: usize, _: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn delta(&mut self, delta: Delta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.finish = delta.finish.or(self.finish.take());
        if delta.text.is_empty() {
            return Ok(());
        }
        event(&json!({ "index": 0, "content": delta.text, "stop": false }), out)
    }

    fn finish(&mut self, sampling: &Sampling, summary: &Summary, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        event(&self.end("", self.finish.as_ref(), sampling, summary), out)
    }

    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        for text in ["error: ", &error.to_json(), "\n\n"] {
            out.push(text)?;
        }
        Ok(())
    }
}

/// Returns times under llama.cpp's names, in milliseconds and tokens per second.
fn timings(summary: &Summary) -> Value {
    let prefill = summary.time_to_first_token.unwrap_or_default().saturating_sub(summary.queue_time);
    let computed = summary.prompt_tokens - summary.cached_tokens;
    let milliseconds = |time: Duration| time.as_micros() as f64 / 1e3;
    let per_token = |time: Duration, count: usize| milliseconds(time) / count.max(1) as f64;
    let per_second = |time: Duration, count: usize| match time.as_secs_f64() {
        seconds if seconds > 0.0 => count as f64 / seconds,
        _ => 0.0,
    };
    let predicted = summary.completion_tokens;
    json!({
        "cache_n": summary.cached_tokens,
        "prompt_n": computed, "prompt_ms": milliseconds(prefill),
        "prompt_per_token_ms": per_token(prefill, computed), "prompt_per_second": per_second(prefill, computed),
        "predicted_n": predicted, "predicted_ms": milliseconds(summary.decode_time),
        "predicted_per_token_ms": per_token(summary.decode_time, predicted),
        "predicted_per_second": per_second(summary.decode_time, predicted),
    })
}

fn event(value: &Value, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    out.push("data: ")?;
    out.json(value)?;
    out.push("\n\n")
}
