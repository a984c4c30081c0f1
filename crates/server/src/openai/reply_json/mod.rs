//! Replies as JSON, whole and in chunks, for chat and for completions. The OpenAPI document describes these types.

mod pieces;
mod prompt_ids;
mod stream;

use std::sync::Arc;

use pellucid_generate::{Delta, Finish, LoadedModel};
use pellucid_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::Value;
use utoipa::ToSchema;

use pieces::{ChatDelta, ChatPiece, CompletionPiece};
pub(crate) use prompt_ids::PromptIds;

use crate::http::error::ApiError;
use crate::openai::logprobs::{self, ChatLogprobs, CompletionLogprobs};
use crate::openai::shared_fields::Streaming;
use crate::openai::tools::{self, CallPiece, CalledTool};
use crate::openai::usage::{Extension, Usage};
use crate::random::{self, Padding};
use crate::reply::buffer::{OutOfMemory, ReplyBuffer, json_text_len};
use crate::reply::parts::JsonParts;
use crate::reply::{Dialect, Spec};

/// A whole chat reply.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct ChatCompletion {
    id: String,
    /// `chat.completion`.
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    /// `default`, if the request names a tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    choices: Vec<ChatChoice>,
    /// Ids of the prompt's tokens, if the request sets `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    usage: Usage,
    pellucid: Extension,
}

/// One choice of a chat reply.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct ChatChoice {
    index: usize,
    message: AssistantMessage,
    #[schema(required)]
    logprobs: Option<ChatLogprobs>,
    /// `stop`, `length`, `tool_calls`, or `repetition` if `loop_guard` ended the reply.
    #[schema(required)]
    finish_reason: Option<&'static str>,
    /// How each token was chosen, if the request sets `trace`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    trace: Vec<Value>,
    /// Ids of the reply's tokens and of the token that ended it, if the request sets `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// The assistant's message.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct AssistantMessage {
    /// `assistant`.
    role: &'static str,
    /// Null if the model calls tools and writes no text before.
    #[schema(required)]
    content: Option<String>,
    /// Thoughts before the answer, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    reasoning_content: Option<String>,
    /// Always null: models served here have no separate refusals.
    #[schema(required)]
    refusal: Option<String>,
    /// Calls of tools, for the client to run.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(required = false)]
    tool_calls: Vec<CalledTool>,
}

/// A whole completion.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct Completion {
    id: String,
    /// `text_completion`.
    object: &'static str,
    created: u64,
    model: String,
    system_fingerprint: String,
    /// `default`, if the request names a tier.
    #[serde(skip_serializing_if = "Option::is_none")]
    service_tier: Option<&'static str>,
    choices: Vec<CompletionChoice>,
    usage: Usage,
    pellucid: Extension,
}

/// One choice of a completion.
#[derive(Debug, Serialize, ToSchema)]
#[allow(dead_code)] // For the document, and for tests of `whole_reply`.
pub(crate) struct CompletionChoice {
    index: usize,
    text: String,
    #[schema(required)]
    logprobs: Option<CompletionLogprobs>,
    /// `stop`, `length`, or `repetition` if `loop_guard` ended the reply.
    #[schema(required)]
    finish_reason: Option<&'static str>,
    /// How each token was chosen, if the request sets `trace`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    #[schema(value_type = Vec<Object>)]
    trace: Vec<Value>,
    /// Ids of the prompt's tokens, if the request sets `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_token_ids: Option<Vec<u32>>,
    /// Ids of the reply's tokens and of the token that ended it, if the request sets `return_token_ids`.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_ids: Option<Vec<u32>>,
}

/// Returns OpenAI's finish reason. `repetition` is none of OpenAI's; only requests that set `loop_guard` get it.
pub(crate) fn finish_reason(finish: &Finish) -> &'static str {
    match finish {
        Finish::EndToken(_) | Finish::StopToken(_) | Finish::StopString(_) => "stop",
        Finish::MaxTokens | Finish::ContextFull | Finish::Deadline => "length",
        Finish::ToolCalls(_) => "tool_calls",
        Finish::Repetition(_) => "repetition",
        Finish::ContentFilter { .. } => "content_filter",
    }
}

/// Fields that all chunks of one reply have in common.
#[derive(Debug)]
pub(crate) struct Envelope {
    pub(crate) dialect: Dialect,
    pub(crate) logprobs: Option<u32>,
    pub(crate) id: String,
    pub(crate) created: u64,
    pub(crate) model: String,
    pub(crate) fingerprint: String,
    /// Tier that the reply names.
    pub(crate) service_tier: Option<&'static str>,
    /// Whether the reply may call tools.
    pub(crate) may_call: bool,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// Present if the reply reports the ids of tokens.
    pub(crate) prompt_ids: Option<PromptIds>,
}

impl Envelope {
    fn id_prefix(dialect: Dialect) -> &'static str {
        match dialect {
            Dialect::Chat => "chatcmpl-",
            Dialect::Completions => "cmpl-",
        }
    }

    /// Returns the envelope of the reply to a request. Fails if there is no memory for the ids of its prompts.
    pub(crate) fn of(spec: &Spec, model: &LoadedModel) -> Result<Envelope, ApiError> {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        Ok(Envelope {
            dialect: spec.dialect,
            logprobs: spec.logprobs,
            id: random::id(Envelope::id_prefix(spec.dialect)),
            created: now.map_or(0, |since| since.as_secs()),
            model: model.id.clone(),
            fingerprint: model.fingerprint.clone(),
            service_tier: spec.service_tier,
            may_call: spec.may_call,
            tokenizer: model.tokenizer.clone(),
            prompt_ids: PromptIds::of(spec)?,
        })
    }

    fn token_ids<'d>(&self, delta: &'d Delta) -> Option<&'d [u32]> {
        self.prompt_ids.as_ref().map(|_| &*delta.ids)
    }

    fn traces(&self, delta: &Delta) -> Result<Vec<Value>, OutOfMemory> {
        let mut shown = Vec::new();
        shown.try_reserve_exact(delta.traces.len())?;
        shown.extend(delta.traces.iter().map(|trace| logprobs::trace(trace, &self.tokenizer)));
        Ok(shown)
    }

    fn chat_logprobs(&self, delta: &Delta) -> Result<Option<ChatLogprobs>, OutOfMemory> {
        let mut shown = ChatLogprobs::default();
        shown.extend(&delta.tokens, &self.tokenizer)?;
        Ok(self.logprobs.map(|_| shown))
    }

    fn completion_logprobs(&self, delta: &Delta) -> Result<Option<CompletionLogprobs>, OutOfMemory> {
        let Some(num_top) = self.logprobs else { return Ok(None) };
        let mut shown = CompletionLogprobs::default();
        shown.extend(&delta.tokens, num_top, &self.tokenizer)?;
        Ok(Some(shown))
    }

    /// Returns the JSON of a whole reply, as `whole_reply` must write it.
    #[cfg(test)]
    pub(crate) fn whole(
        self,
        choices: Vec<Delta>,
        sampling: &crate::reply::Sampling,
        summary: &pellucid_generate::Summary,
    ) -> String {
        let (usage, pellucid) = (Usage::new(summary), Extension::new(sampling, summary));
        let reason = |delta: &Delta| delta.finish.as_ref().map(finish_reason);
        let json = match self.dialect {
            Dialect::Chat => {
                let choice = |delta: Delta| ChatChoice {
                    index: delta.choice,
                    logprobs: self.chat_logprobs(&delta).unwrap(),
                    finish_reason: reason(&delta),
                    trace: self.traces(&delta).unwrap(),
                    token_ids: self.token_ids(&delta).map(<[u32]>::to_vec),
                    message: AssistantMessage {
                        role: "assistant",
                        content: Some(delta.text).filter(|text| !text.is_empty() || delta.calls.is_empty()),
                        reasoning_content: Some(delta.thoughts).filter(|thoughts| !thoughts.is_empty()),
                        refusal: None,
                        tool_calls: delta.calls.into_iter().map(CalledTool::from).collect(),
                    },
                };
                serde_json::to_string(&ChatCompletion {
                    choices: choices.into_iter().map(choice).collect(),
                    prompt_token_ids: self.prompt_ids.as_ref().map(|ids| ids.of_choice(0).to_vec()),
                    object: "chat.completion",
                    id: self.id,
                    created: self.created,
                    model: self.model,
                    system_fingerprint: self.fingerprint,
                    service_tier: self.service_tier,
                    usage,
                    pellucid,
                })
            }
            Dialect::Completions => {
                let choice = |delta: Delta| CompletionChoice {
                    index: delta.choice,
                    logprobs: self.completion_logprobs(&delta).unwrap(),
                    finish_reason: reason(&delta),
                    trace: self.traces(&delta).unwrap(),
                    prompt_token_ids: self.prompt_ids.as_ref().map(|ids| ids.of_choice(delta.choice).to_vec()),
                    token_ids: self.token_ids(&delta).map(<[u32]>::to_vec),
                    text: delta.text,
                };
                serde_json::to_string(&Completion {
                    choices: choices.into_iter().map(choice).collect(),
                    object: "text_completion",
                    id: self.id,
                    created: self.created,
                    model: self.model,
                    system_fingerprint: self.fingerprint,
                    service_tier: self.service_tier,
                    usage,
                    pellucid,
                })
            }
        };
        json.unwrap_or_default()
    }
}

/// Pieces with this number of tokens, or of bytes of text, are written in several steps.
const LONG_PIECE_TOKENS: usize = 256;
const LONG_PIECE_BYTES: usize = 8 << 10;

/// A piece of a stream that is written in several steps.
#[derive(Debug)]
pub(crate) struct LongPiece {
    parts: JsonParts,
    /// Bytes written so far.
    len: usize,
}

/// Writes the chunks of a stream.
#[derive(Debug)]
pub(crate) struct ChunkWriter {
    envelope: Envelope,
    /// The JSON of a chunk up to the list of choices.
    head: String,
    include_usage: bool,
    padding: Option<Padding>,
    /// Whether a piece of each choice was written. Empty unless the reply reports the ids of tokens.
    has_begun: Vec<bool>,
}

impl ChunkWriter {
    pub(crate) fn new(envelope: Envelope, streaming: Streaming) -> ChunkWriter {
        let object = match envelope.dialect {
            Dialect::Chat => "chat.completion.chunk",
            Dialect::Completions => "text_completion",
        };
        let word = |text: &str| Value::from(text).to_string();
        let tier = envelope.service_tier.map_or_else(String::new, |tier| format!("\"service_tier\":\"{tier}\","));
        let head = format!(
            "{{\"id\":{},\"object\":\"{object}\",\"created\":{},\"model\":{},\"system_fingerprint\":{},{tier}\
             \"choices\":[",
            word(&envelope.id),
            envelope.created,
            word(&envelope.model),
            word(&envelope.fingerprint),
        );
        let padding = streaming.obfuscates.then(Padding::new);
        let has_begun = envelope.prompt_ids.as_ref().map_or_else(Vec::new, |ids| vec![false; ids.num_choices()]);
        ChunkWriter { envelope, head, include_usage: streaming.include_usage, padding, has_begun }
    }

    /// Writes the first chunk of a chat choice, which gives the role. Completions have none and return false.
    pub(crate) fn opening(&mut self, index: usize, chunk: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        if self.envelope.dialect == Dialect::Completions {
            return Ok(false);
        }
        // Text may follow, but clients that join the pieces show null, as in a whole reply, if none does.
        let content = if self.envelope.may_call { None } else { Some("") };
        let delta = ChatDelta { role: Some("assistant"), content: Some(content), ..ChatDelta::default() };
        chunk.push(&self.head)?;
        let (trace, token_ids) = (Vec::new(), None);
        chunk.json(&ChatPiece { index, delta, logprobs: None, finish_reason: None, trace, token_ids })?;
        chunk.push("]")?;
        // All choices have one prompt.
        if let Some(ids) = self.envelope.prompt_ids.as_ref().filter(|_| index == 0) {
            chunk.push(",\"prompt_token_ids\":")?;
            chunk.json(&ids.of_choice(0))?;
        }
        self.end(0, None, chunk)?;
        Ok(true)
    }

    /// Returns true for the first piece of a choice, if the reply reports the ids of tokens.
    fn begins(&mut self, choice: usize) -> bool {
        self.has_begun.get_mut(choice).is_some_and(|has_begun| !std::mem::replace(has_begun, true))
    }

    /// Writes a piece of a choice. `last` adds counts and times to the last piece, unless they have a chunk of their
    /// own.
    pub(crate) fn delta(
        &mut self,
        delta: &Delta,
        last: Option<&Extension>,
        chunk: &mut ReplyBuffer,
    ) -> Result<(), OutOfMemory> {
        let finish_reason = delta.finish.as_ref().map(finish_reason);
        let trace = self.envelope.traces(delta)?;
        let is_first = self.begins(delta.choice);
        let token_ids = self.envelope.token_ids(delta);
        let envelope = &self.envelope;
        chunk.push(&self.head)?;
        let start = chunk.len();
        match envelope.dialect {
            Dialect::Chat => {
                let thoughts = Some(&*delta.thoughts).filter(|thoughts| !thoughts.is_empty());
                let is_plain = finish_reason.is_none() && delta.calls.is_empty() && thoughts.is_none();
                let has_content = !delta.text.is_empty() || is_plain;
                chunk.json(&ChatPiece {
                    index: delta.choice,
                    delta: ChatDelta {
                        role: None,
                        content: has_content.then_some(Some(&*delta.text)),
                        reasoning_content: thoughts,
                        reasoning: thoughts,
                        tool_calls: delta.calls.iter().map(CallPiece::from).collect(),
                    },
                    logprobs: envelope.chat_logprobs(delta)?.filter(|shown| !shown.content.is_empty()),
                    finish_reason,
                    trace,
                    token_ids,
                })?;
            }
            Dialect::Completions => chunk.json(&CompletionPiece {
                index: delta.choice,
                text: &delta.text,
                logprobs: envelope.completion_logprobs(delta)?.filter(|_| !delta.tokens.is_empty()),
                finish_reason,
                trace,
                prompt_token_ids: envelope
                    .prompt_ids
                    .as_ref()
                    .filter(|_| is_first)
                    .map(|ids| ids.of_choice(delta.choice)),
                token_ids,
            })?,
        }
        chunk.push("]")?;
        // The part of the chunk whose length depends on the text, in bytes of JSON.
        let varying = match delta.tokens.is_empty() && delta.traces.is_empty() && token_ids.is_none() {
            // Thoughts are written under two names.
            true => json_text_len(&delta.text) + 2 * json_text_len(&delta.thoughts) + tools::texts_len(&delta.calls),
            false => chunk.len() - start - 1,
        };
        self.end(varying, last, chunk)
    }

    /// Writes usage as a chunk of its own, for streams that set `include_usage`.
    pub(crate) fn usage(
        &mut self,
        usage: &Usage,
        extension: &Extension,
        chunk: &mut ReplyBuffer,
    ) -> Result<(), OutOfMemory> {
        chunk.push(&self.head)?;
        chunk.push("],\"usage\":")?;
        chunk.json(usage)?;
        chunk.push(",\"pellucid\":")?;
        chunk.json(extension)?;
        chunk.push("}")
    }

    pub(crate) fn includes_usage(&self) -> bool {
        self.include_usage
    }

    /// Whether a piece is too long to be written at once. Only the echo of a prompt is.
    pub(crate) fn is_long(&self, delta: &Delta) -> bool {
        let is_long = delta.tokens.len() >= LONG_PIECE_TOKENS || delta.text.len() >= LONG_PIECE_BYTES;
        is_long && self.envelope.dialect == Dialect::Completions
    }

    /// Begins the chunk of a long piece.
    pub(crate) fn begin_long(&mut self, delta: Delta, chunk: &mut ReplyBuffer) -> Result<LongPiece, OutOfMemory> {
        chunk.push(&self.head)?;
        let mut parts = JsonParts::default();
        parts.literal("{");
        let is_first = self.begins(delta.choice);
        self.envelope.choice(&Arc::new(delta), is_first, &mut parts);
        parts.literal("}");
        Ok(LongPiece { parts, len: 0 })
    }

    /// Continues a long piece until `chunk` has `limit` bytes or a little more. Returns whether the chunk is complete.
    pub(crate) fn continue_long(
        &mut self,
        piece: &mut LongPiece,
        limit: usize,
        chunk: &mut ReplyBuffer,
    ) -> Result<bool, OutOfMemory> {
        let start = chunk.len();
        let is_complete = piece.parts.write(limit, chunk)?;
        piece.len += chunk.len() - start;
        if is_complete {
            chunk.push("]")?;
            self.end(piece.len, None, chunk)?;
        }
        Ok(is_complete)
    }

    /// Writes the fields behind the list of choices, and the end.
    fn end(
        &mut self,
        varying: usize,
        extension: Option<&Extension>,
        chunk: &mut ReplyBuffer,
    ) -> Result<(), OutOfMemory> {
        if self.include_usage {
            chunk.push(",\"usage\":null")?;
        }
        if let Some(extension) = extension {
            chunk.push(",\"pellucid\":")?;
            chunk.json(extension)?;
        }
        if let Some(padding) = &mut self.padding {
            chunk.push(",\"obfuscation\":\"")?;
            chunk.push(&padding.for_len(varying))?;
            chunk.push("\"")?;
        }
        chunk.push("}")
    }
}
