//! A response as a stream of events, in OpenAI's order: `response.created` and `response.in_progress`, for each output
//! item `output_item.added`, its content and `output_item.done`, then `response.completed` or `response.incomplete`.
//!
//! The end of an item repeats its text three times, and the end of the response once more. These events are queued as
//! parts that share one copy of the text, and are written while the client reads them.

use std::sync::Arc;

use pellucid_generate::{CallDelta, Delta, Finish, PartKind, ReplyToken, Summary};
use serde_json::{Value, json};

use super::output::{ItemText, OutputItem, OutputKind, write_item, write_logprobs, write_part};
use super::response::{ApiErrorText, Ending, ResponseForm, Status};
use crate::http::error::ApiError;
use crate::limits::client_memory::HeldMemory;
use crate::openai::logprobs::ChatToken;
use crate::openai::shared_fields::Streaming;
use crate::openai::whole_reply::delta_bytes;
use crate::random::Padding;
use crate::reply::Sampling;
use crate::reply::buffer::{OutOfMemory, ReplyBuffer};
use crate::reply::form::StreamWriter;
use crate::reply::parts::JsonParts;

/// Writes the events of one response.
pub(super) struct EventWriter {
    form: Arc<ResponseForm>,
    /// Events that are not written yet.
    queue: JsonParts,
    num_events: u64,
    /// Whether `response.in_progress` is still to come: the first piece of a background response ends its time in the
    /// queue.
    is_queued: bool,
    items: Vec<Arc<OutputItem>>,
    /// The item that is being generated.
    open: Option<OutputItem>,
    /// Tokens that came before the message that they belong to.
    early_tokens: Vec<ReplyToken>,
    finish: Option<Finish>,
    padding: Option<Padding>,
    /// Memory of `items` and `open`.
    held: HeldMemory,
    num_held: usize,
    /// Why there is no memory for the next piece.
    refusal: Option<ApiError>,
}

impl EventWriter {
    pub(super) fn new(form: Arc<ResponseForm>, streaming: Streaming) -> EventWriter {
        let held = HeldMemory::none(&form.app().client_memory, form.tenant());
        EventWriter {
            form,
            queue: JsonParts::default(),
            num_events: 0,
            is_queued: false,
            items: Vec::new(),
            open: None,
            early_tokens: Vec::new(),
            finish: None,
            padding: streaming.obfuscates.then(Padding::new),
            held,
            num_held: 0,
            refusal: None,
        }
    }

    /// Takes memory for a piece of the reply, which is kept until the end.
    fn hold(&mut self, delta: &Delta) -> Result<(), OutOfMemory> {
        self.num_held += delta_bytes(delta);
        self.held.grow_to(self.num_held).map_err(|error| {
            self.refusal = Some(error);
            OutOfMemory
        })
    }

    /// Writes all queued events.
    pub(super) fn take_events(&mut self, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.queue.write(usize::MAX, out).map(|_| ())
    }

    /// Queues the end of a response that its client cancelled, and stores what was generated.
    pub(super) fn cancel(&mut self) {
        self.leave_queue();
        self.close_item(false);
        self.response_event("response.cancelled", Status::Cancelled);
        self.form.store_unfinished(Status::Cancelled, &self.items);
    }

    fn leave_queue(&mut self) {
        if std::mem::take(&mut self.is_queued) {
            self.response_event("response.in_progress", Status::InProgress);
        }
    }

    /// Queues the beginning of an event, up to the fields that follow its number.
    fn begin(&mut self, name: &str) {
        let number = self.num_events;
        self.num_events += 1;
        self.queue.literal(&format!("event: {name}\ndata: {{\"type\":\"{name}\",\"sequence_number\":{number}"));
    }

    fn end(&mut self) {
        self.queue.literal("}\n\n");
    }

    /// Queues a small event.
    fn event(&mut self, name: &str, fields: &[(&str, Value)]) {
        self.begin(name);
        for (name, value) in fields {
            self.queue.literal(&format!(",\"{name}\":{value}"));
        }
        self.end();
    }

    /// Queues an event with the response as it is before its end.
    fn response_event(&mut self, name: &str, status: Status<'_>) {
        self.begin(name);
        self.queue.literal(",\"response\":");
        self.form.write_unfinished(status, &self.items, &mut self.queue);
        self.end();
    }

    /// Returns the fields that tell which part of the output an event is about.
    fn place(&self, item_id: &str, has_parts: bool) -> Vec<(&'static str, Value)> {
        let mut place = vec![("item_id", json!(item_id)), ("output_index", json!(self.items.len()))];
        if has_parts {
            place.push(("content_index", json!(0)));
        }
        place
    }

    /// Makes `kind` the open item. Calls are told apart by their number.
    fn open_item(&mut self, kind: OutputKind) {
        let is_open = self.open.as_ref().is_some_and(|item| match (&item.kind, &kind) {
            (OutputKind::Call { index, .. }, OutputKind::Call { index: next, .. }) => index == next,
            (open, next) => open == next,
        });
        if is_open {
            return;
        }
        self.close_item(true);
        let item = OutputItem::new(kind);
        let added = [("output_index", json!(self.items.len())), ("item", item.announced())];
        self.event("response.output_item.added", &added);
        if let Some(part) = item.announced_part() {
            let mut fields = self.place(&item.id, true);
            fields.push(("part", part));
            self.event("response.content_part.added", &fields);
        }
        self.open = Some(item);
    }

    /// Ends the open item, if there is one.
    fn close_item(&mut self, is_complete: bool) {
        let Some(mut item) = self.open.take() else { return };
        item.is_complete = is_complete;
        let item = Arc::new(item);
        let (done, text_field) = match item.kind {
            OutputKind::Reasoning => ("response.reasoning_text.done", "text"),
            OutputKind::Message => ("response.output_text.done", "text"),
            OutputKind::Call { .. } => ("response.function_call_arguments.done", "arguments"),
        };
        let has_parts = !matches!(item.kind, OutputKind::Call { .. });
        self.begin_placed(done, &item, has_parts);
        if let OutputKind::Call { name, .. } = &item.kind {
            self.queue.literal(&format!(",\"name\":{}", json!(name)));
        }
        self.queue.literal(&format!(",\"{text_field}\":\""));
        self.queue.text(ItemText(item.clone()));
        self.queue.literal("\"");
        if item.kind == OutputKind::Message {
            self.queue.literal(",\"logprobs\":[");
            write_logprobs(&item, self.form.tokenizer(), &mut self.queue);
            self.queue.literal("]");
        }
        self.end();
        if has_parts {
            self.begin_placed("response.content_part.done", &item, true);
            self.queue.literal(",\"part\":");
            write_part(&item, self.form.tokenizer(), &mut self.queue);
            self.end();
        }
        self.begin("response.output_item.done");
        self.queue.literal(&format!(",\"output_index\":{},\"item\":", self.items.len()));
        write_item(&item, self.form.tokenizer(), &mut self.queue);
        self.end();
        self.items.push(item);
    }

    fn begin_placed(&mut self, name: &str, item: &OutputItem, has_parts: bool) {
        let place = self.place(&item.id, has_parts);
        self.begin(name);
        for (name, value) in place {
            self.queue.literal(&format!(",\"{name}\":{value}"));
        }
    }

    /// Adds text to the open item and queues the event that carries it.
    fn text_delta(&mut self, name: &str, text: &str, tokens: Vec<ReplyToken>) -> Result<(), OutOfMemory> {
        let Some(mut item) = self.open.take() else { return Ok(()) };
        let is_message = item.kind == OutputKind::Message;
        let has_parts = !matches!(item.kind, OutputKind::Call { .. });
        item.text.try_reserve(text.len())?;
        item.text.push_str(text);
        let delta = json!(text).to_string();
        let mut num_varying = delta.len() - 2;
        self.begin_placed(name, &item, has_parts);
        self.queue.literal(&format!(",\"delta\":{delta}"));
        if is_message {
            let shown: Vec<ChatToken> = match self.form.tokenizer() {
                Some(tokenizer) => tokens.iter().filter_map(|token| ChatToken::new(token, tokenizer)).collect(),
                None => Vec::new(),
            };
            // A `Value` would show an f32 with digits that have no meaning.
            let shown = serde_json::to_string(&shown).unwrap_or_else(|_| "[]".into());
            num_varying += shown.len() - 2;
            self.queue.literal(&format!(",\"logprobs\":{shown}"));
            item.tokens.try_reserve(tokens.len())?;
            item.tokens.extend(tokens);
        }
        if let Some(padding) = &mut self.padding {
            self.queue.literal(&format!(",\"obfuscation\":\"{}\"", padding.for_len(num_varying)));
        }
        self.end();
        self.open = Some(item);
        Ok(())
    }

    fn call(&mut self, call: &CallDelta) -> Result<(), OutOfMemory> {
        self.open_item(OutputKind::of_call(call, self.form.namespaces()));
        if call.arguments.is_empty() {
            return Ok(());
        }
        self.text_delta("response.function_call_arguments.delta", &call.arguments, Vec::new())
    }
}

impl StreamWriter for EventWriter {
    fn open(&mut self, _: usize, _: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.is_queued = self.form.is_background();
        if self.is_queued {
            self.response_event("response.created", Status::Queued);
            self.response_event("response.queued", Status::Queued);
        } else {
            self.response_event("response.created", Status::InProgress);
            self.response_event("response.in_progress", Status::InProgress);
        }
        Ok(())
    }

    fn delta(&mut self, delta: Delta, _: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.leave_queue();
        self.hold(&delta)?;
        if !delta.thoughts.is_empty() {
            self.open_item(OutputKind::Reasoning);
            self.text_delta("response.reasoning_text.delta", &delta.thoughts, Vec::new())?;
        }
        let mut tokens = delta.tokens;
        tokens.retain(|token| token.part == PartKind::Answer);
        let is_message = matches!(&self.open, Some(OutputItem { kind: OutputKind::Message, .. }));
        if !delta.text.is_empty() || is_message && !tokens.is_empty() {
            self.open_item(OutputKind::Message);
            tokens.splice(..0, self.early_tokens.drain(..));
            self.text_delta("response.output_text.delta", &delta.text, tokens)?;
        } else {
            self.early_tokens.extend(tokens);
        }
        for call in &delta.calls {
            self.call(call)?;
        }
        self.finish = delta.finish.or(self.finish.take());
        Ok(())
    }

    fn continue_long(&mut self, limit: usize, out: &mut ReplyBuffer) -> Result<bool, OutOfMemory> {
        if !self.has_rest() {
            return Ok(false);
        }
        self.queue.write(limit, out)?;
        Ok(true)
    }

    fn has_rest(&self) -> bool {
        !self.queue.is_empty()
    }

    fn finish(&mut self, sampling: &Sampling, summary: &Summary, _: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        self.leave_queue();
        let status = Status::of(self.finish.as_ref());
        let mut kinds = self.items.iter().map(|item| &item.kind).chain(self.open.iter().map(|item| &item.kind));
        let has_answer = kinds.clone().any(|kind| *kind != OutputKind::Reasoning);
        if !has_answer && (status == Status::Completed || kinds.next().is_none()) {
            self.open_item(OutputKind::Message);
        }
        self.close_item(status == Status::Completed);
        self.begin(if status == Status::Completed { "response.completed" } else { "response.incomplete" });
        self.queue.literal(",\"response\":");
        self.form.write_complete(status, &self.items, &Ending { sampling, summary }, &mut self.queue);
        self.end();
        Ok(())
    }

    fn fail(&mut self, error: &ApiError, out: &mut ReplyBuffer) -> Result<(), OutOfMemory> {
        let error = &self.refusal.take().unwrap_or_else(|| error.clone());
        let detail = &error.detail;
        let fields = [("code", json!(detail.code)), ("message", json!(detail.message)), ("param", json!(detail.param))];
        self.event("error", &fields);
        let status = ApiErrorText::new(error);
        self.response_event("response.failed", Status::Failed(&status));
        self.form.store_unfinished(Status::Failed(&status), &self.items);
        if self.form.is_background() {
            return Ok(());
        }
        self.queue.write(usize::MAX, out).map(|_| ())
    }
}
