//! The reply as a message of content blocks.

use std::sync::Arc;

use pellucid_generate::{CallDelta, Delta, Finish, LoadedModel, Summary};
use serde::Serialize;
use utoipa::ToSchema;

use super::stream::MessageWriter;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::Extension;
use crate::random;
use crate::reply::form::{ReplyForm, StreamWriter};
use crate::reply::parts::JsonParts;
use crate::reply::{Sampling, Spec};

/// Tokens of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub(super) struct Usage {
    /// Tokens of the prompt that were computed.
    input_tokens: usize,
    /// Always 0: caching costs nothing beyond computing.
    cache_creation_input_tokens: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    cache_read_input_tokens: usize,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
}

/// Parts of the output.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
struct OutputDetails {
    thinking_tokens: usize,
}

impl Usage {
    pub(super) fn new(summary: &Summary) -> Usage {
        Usage {
            input_tokens: summary.prompt_tokens - summary.cached_tokens,
            cache_creation_input_tokens: 0,
            cache_read_input_tokens: summary.cached_tokens,
            output_tokens: summary.completion_tokens,
            output_tokens_details: OutputDetails { thinking_tokens: summary.thought_tokens },
        }
    }

    /// Returns what is known before the first token.
    pub(super) fn of_prompt(prompt_tokens: usize) -> Usage {
        Usage::new(&Summary { prompt_tokens, ..Summary::default() })
    }
}

/// Returns Anthropic's `stop_reason`, and the `stop_sequence` that was found.
pub(super) fn stop_reason(finish: &Finish) -> (&'static str, Option<&str>) {
    match finish {
        Finish::StopString(text) => ("stop_sequence", Some(text)),
        Finish::ToolCalls(_) => ("tool_use", None),
        Finish::ContentFilter { .. } => ("refusal", None),
        Finish::ContextFull => ("model_context_window_exceeded", None),
        Finish::MaxTokens | Finish::Deadline => ("max_tokens", None),
        Finish::EndToken(_) | Finish::StopToken(_) | Finish::Repetition(_) => ("end_turn", None),
    }
}

/// The fields of a message that are known before anything is generated.
#[derive(Debug)]
pub(super) struct MessageForm {
    pub(super) id: String,
    pub(super) model: String,
    pub(super) prompt_tokens: usize,
    pub(super) request_id: String,
}

impl MessageForm {
    pub(super) fn new(spec: &Spec, model: &LoadedModel, request_id: &str) -> MessageForm {
        MessageForm {
            id: random::id("msg_"),
            model: model.id.clone(),
            prompt_tokens: spec.num_prompt_tokens(),
            request_id: request_id.to_owned(),
        }
    }
}

/// A text of a choice, shared with the part that shows it.
struct Shared(Arc<Delta>, fn(&Delta) -> &str);

impl AsRef<str> for Shared {
    fn as_ref(&self) -> &str {
        (self.1)(&self.0)
    }
}

impl ReplyForm for MessageForm {
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        let delta = Arc::new(choices.into_iter().next().unwrap_or_default());
        let mut parts = JsonParts::default();
        parts.literal("{\"id\":");
        parts.value(&self.id);
        parts.literal(",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
        parts.value(&self.model);
        parts.literal(",\"content\":[");
        write_blocks(&delta, &mut parts);
        let (reason, sequence) = delta.finish.as_ref().map(stop_reason).unzip();
        parts.literal("],\"stop_reason\":");
        parts.value(&reason);
        parts.literal(",\"stop_sequence\":");
        parts.value(&sequence.flatten());
        parts.literal(",\"usage\":");
        parts.value(&Usage::new(summary));
        parts.literal(",\"pellucid\":");
        parts.value(&Extension::new(sampling, summary));
        parts.literal("}");
        parts
    }

    fn stream(self: Box<Self>, _: Streaming) -> Box<dyn StreamWriter> {
        Box::new(MessageWriter::new(*self))
    }
}

/// Writes the content blocks of a reply, in the order in which they are streamed: thoughts, text, calls.
fn write_blocks(delta: &Arc<Delta>, parts: &mut JsonParts) {
    let mut is_first = true;
    let mut begin = |parts: &mut JsonParts| {
        if !std::mem::take(&mut is_first) {
            parts.literal(",");
        }
    };
    if !delta.thoughts.is_empty() {
        begin(parts);
        parts.literal("{\"type\":\"thinking\",\"thinking\":\"");
        parts.text(Shared(delta.clone(), |delta| &delta.thoughts));
        parts.literal("\",\"signature\":\"\"}");
    }
    if !delta.text.is_empty() {
        begin(parts);
        parts.literal("{\"type\":\"text\",\"text\":\"");
        parts.text(Shared(delta.clone(), |delta| &delta.text));
        parts.literal("\"}");
    }
    for CallDelta { id, name, arguments, .. } in &delta.calls {
        begin(parts);
        parts.literal("{\"type\":\"tool_use\",\"id\":");
        parts.value(&id.as_deref().unwrap_or_default());
        parts.literal(",\"name\":");
        parts.value(&name.as_deref().unwrap_or_default());
        parts.literal(",\"input\":");
        // The grammar of the reply makes them a JSON object, unless the reply ended within it.
        parts.literal(if is_object(arguments) { arguments } else { "{}" });
        parts.literal("}");
    }
}

/// Whether arguments are complete. A reply that `max_tokens` ended may hold the beginning of a call.
fn is_object(arguments: &str) -> bool {
    matches!(serde_json::from_str(arguments), Ok(serde_json::Value::Object(_)))
}
