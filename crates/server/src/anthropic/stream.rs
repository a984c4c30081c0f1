//! A message as a stream of events: `message_start`, for each block `content_block_start`, deltas and
//! `content_block_stop`, then `message_delta` with the reason and the usage, and `message_stop`.

use pellucid_generate::{CallDelta, Delta, Finish, Summary};
use serde_json::{Value, json};

use super::message::{MessageForm, Usage, stop_reason};
use crate::http::error::ApiError;
use crate::http::error::form::ErrorForm;
use crate::openai::usage::Extension;
use crate::reply::Sampling;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::StreamWriter;

/// The kind of a content block; calls are told apart by their number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BlockKind {
    Thinking,
    Text,
    ToolUse(usize),
}

/// Writes the events of one message.
#[derive(Debug)]
pub(super) struct MessageWriter {
    form: MessageForm,
    /// The block that is open.
    open: Option<BlockKind>,
    /// Blocks that were begun.
    num_blocks: usize,
    finish: Option<Finish>,
}

impl MessageWriter {
    pub(super) fn new(form: MessageForm) -> MessageWriter {
        MessageWriter { form, open: None, num_blocks: 0, finish: None }
    }

    /// Makes `kind` the open block, which `content_block` begins.
    fn open_block(&mut self, kind: BlockKind, content_block: Value, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if self.open == Some(kind) {
            return Ok(());
        }
        self.close_block(out)?;
        let index = self.num_blocks;
        event("content_block_start", &json!({ "index": index, "content_block": content_block }), out)?;
        self.open = Some(kind);
        self.num_blocks += 1;
        Ok(())
    }

    fn close_block(&mut self, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if self.open.take().is_none() {
            return Ok(());
        }
        event("content_block_stop", &json!({ "index": self.num_blocks - 1 }), out)
    }

    fn block_delta(&mut self, delta: &Value, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        event("content_block_delta", &json!({ "index": self.num_blocks - 1, "delta": delta }), out)
    }

    fn call(&mut self, call: &CallDelta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let CallDelta { index, id, name, arguments } = call;
        let block = json!({ "type": "tool_use", "id": id, "name": name, "input": {} });
        self.open_block(BlockKind::ToolUse(*index), block, out)?;
        if arguments.is_empty() {
            return Ok(());
        }
        self.block_delta(&json!({ "type": "input_json_delta", "partial_json": arguments }), out)
    }
}

impl StreamWriter for MessageWriter {
    fn open(&mut self, _: usize, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let MessageForm { id, model, prompt_tokens, .. } = &self.form;
        let message = json!({ "id": id, "type": "message", "role": "assistant", "model": model, "content": [],
            "stop_reason": null, "stop_sequence": null, "usage": Usage::of_prompt(*prompt_tokens) });
        event("message_start", &json!({ "message": message }), out)?;
        event("ping", &json!({}), out)
    }

    fn delta(&mut self, delta: Delta, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        if !delta.thoughts.is_empty() {
            let block = json!({ "type": "thinking", "thinking": "", "signature": "" });
            self.open_block(BlockKind::Thinking, block, out)?;
            self.block_delta(&json!({ "type": "thinking_delta", "thinking": delta.thoughts }), out)?;
        }
        if !delta.text.is_empty() {
            self.open_block(BlockKind::Text, json!({ "type": "text", "text": "" }), out)?;
            self.block_delta(&json!({ "type": "text_delta", "text": delta.text }), out)?;
        }
        for call in &delta.calls {
            self.call(call, out)?;
        }
        self.finish = delta.finish.or(self.finish.take());
        Ok(())
    }

    fn finish(&mut self, sampling: &Sampling, summary: &Summary, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.close_block(out)?;
        let (reason, sequence) = self.finish.as_ref().map(stop_reason).unzip();
        let delta = json!({ "stop_reason": reason, "stop_sequence": sequence.flatten() });
        let extension = Extension::new(sampling, summary);
        event("message_delta", &json!({ "delta": delta, "usage": Usage::new(summary), "pellucid": extension }), out)?;
        event("message_stop", &json!({}), out)
    }

    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        write_event("error", &ErrorForm::Anthropic.json(error, &self.form.request_id), out)
    }

    fn keep_alive(&self) -> &'static str {
        "event: ping\ndata: {\"type\":\"ping\"}\n\n"
    }
}

/// Writes an event whose data has its name as `type`.
fn event(name: &str, fields: &Value, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    let mut data = json!({ "type": name });
    if let (Value::Object(data), Value::Object(fields)) = (&mut data, fields) {
        data.extend(fields.clone());
    }
    write_event(name, &data.to_string(), out)
}

fn write_event(name: &str, data: &str, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
    for text in ["event: ", name, "\ndata: ", data, "\n\n"] {
        out.push(text)?;
    }
    Ok(())
}
