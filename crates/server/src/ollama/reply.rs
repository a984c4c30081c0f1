//! Replies of `/api/chat` and `/api/generate`: one JSON object, or a line of JSON for each piece.

use std::time::Duration;

use pellucid_generate::{CallDelta, Delta, Finish, LoadedModel, Summary, utc_now};
use serde::Serialize;
use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::http::error::form::ErrorForm;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::Extension;
use crate::reply::Sampling;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::{ReplyForm, StreamWriter};
use crate::reply::parts::JsonParts;

/// The route that was called; it decides where the text is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Route {
    Chat,
    Generate,
}

/// The fields of a reply that are known before anything is generated.
#[derive(Debug)]
pub(super) struct ReplyLines {
    route: Route,
    model: String,
    /// Calls whose arguments are not complete yet; a call is sent whole, because its arguments are an object.
    calls: Vec<CallDelta>,
    finish: Option<Finish>,
}

impl ReplyLines {
    pub(super) fn new(route: Route, model: &LoadedModel) -> ReplyLines {
        ReplyLines { route, model: model.id.clone(), calls: Vec::new(), finish: None }
    }

    /// Returns the fields of a piece without its end.
    fn piece(&self, thoughts: &str, text: &str, calls: &[CallDelta]) -> Value {
        let mut piece = json!({ "model": self.model, "created_at": now() });
        let calls: Vec<Value> = calls.iter().map(call).collect();
        match self.route {
            Route::Chat => {
                let mut message = json!({ "role": "assistant", "content": text });
                if !thoughts.is_empty() {
                    message["thinking"] = thoughts.into();
                }
                if !calls.is_empty() {
                    message["tool_calls"] = calls.into();
                }
                piece["message"] = message;
            }
            Route::Generate => {
                piece["response"] = text.into();
                if !thoughts.is_empty() {
                    piece["thinking"] = thoughts.into();
                }
            }
        }
        piece["done"] = false.into();
        piece
    }
}

impl ReplyForm for ReplyLines {
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        let delta = choices.into_iter().next().unwrap_or_default();
        let mut reply = self.piece(&delta.thoughts, &delta.text, &delta.calls);
        end(&mut reply, delta.finish.as_ref(), sampling, summary);
        let mut parts = JsonParts::default();
        parts.value(&reply);
        parts
    }

    fn stream(self: Box<Self>, _: Streaming) -> Box<dyn StreamWriter> {
        self
    }
}

impl StreamWriter for ReplyLines {
    fn content_type(&self) -> &'static str {
        "application/x-ndjson"
    }

    fn open(&mut self, _: usize, _: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        Ok(())
    }

    fn delta(&mut self, delta: Delta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        for call in delta.calls {
            match self.calls.last_mut() {
                Some(last) if last.index == call.index => last.arguments.push_str(&call.arguments),
                _ => self.calls.push(call),
            }
        }
        self.finish = delta.finish.or(self.finish.take());
        if delta.thoughts.is_empty() && delta.text.is_empty() {
            return Ok(());
        }
        line(&self.piece(&delta.thoughts, &delta.text, &[]), out)
    }

    fn finish(&mut self, sampling: &Sampling, summary: &Summary, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let calls = std::mem::take(&mut self.calls);
        if !calls.is_empty() {
            line(&self.piece("", "", &calls), out)?;
        }
        let mut last = self.piece("", "", &[]);
        end(&mut last, self.finish.as_ref(), sampling, summary);
        line(&last, out)
    }

    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        out.push(&ErrorForm::Ollama.json(error, ""))?;
        out.push("\n")
    }

    /// An empty line, which readers of JSON lines skip.
    fn keep_alive(&self) -> &'static str {
        "\n"
    }
}

/// Adds the fields of the last piece.
fn end(reply: &mut Value, finish: Option<&Finish>, sampling: &Sampling, summary: &Summary) {
    let prefill = summary.time_to_first_token.unwrap_or_default().saturating_sub(summary.queue_time);
    reply["done"] = true.into();
    reply["done_reason"] = finish.map(done_reason).into();
    reply["total_duration"] = nanoseconds(summary.total_time);
    // The model was loaded before the request came.
    reply["load_duration"] = 0.into();
    reply["prompt_eval_count"] = summary.prompt_tokens.into();
    reply["prompt_eval_duration"] = nanoseconds(prefill);
    reply["eval_count"] = summary.completion_tokens.into();
    reply["eval_duration"] = nanoseconds(summary.decode_time);
    reply["pellucid"] = json!(Extension::new(sampling, summary));
}

/// Returns Ollama's reason, or `content_filter`, which Ollama has none for. Others are told in `pellucid.endings`.
fn done_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::MaxTokens | Finish::ContextFull | Finish::Deadline => "length",
        Finish::ContentFilter { .. } => "content_filter",
        _ => "stop",
    }
}

/// Returns a call, whose arguments are an object in this API.
fn call(call: &CallDelta) -> Value {
    let arguments = serde_json::from_str(&call.arguments).unwrap_or_else(|_| json!({}));
    let function: Value = json!({ "index": call.index, "name": call.name, "arguments": arguments });
    json!({ "id": call.id, "function": function })
}

fn nanoseconds(time: Duration) -> Value {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX).into()
}

/// Returns the present time as these replies have it.
pub(super) fn now() -> String {
    models_time(utc_now())
}

/// Returns a time in the form of RFC 3339.
pub(super) fn models_time(time: pellucid_tokenizer::DateTime) -> String {
    let pellucid_tokenizer::DateTime { year, month, day, hour, minute, second } = time;
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

fn line(value: &impl Serialize, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    out.json(value)?;
    out.push("\n")
}
