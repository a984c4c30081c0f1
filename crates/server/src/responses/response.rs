//! The response object: its fields before and after the output, and the reply to a request that is not streamed.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{SystemTime, UNIX_EPOCH};

use pellucid_generate::{Delta, Finish, LoadedModel, Summary};
use pellucid_tokenizer::Tokenizer;
use serde::Serialize;
use serde_json::{Value, json};
use utoipa::ToSchema;

use super::event_log::EventLog;
use super::output::{OutputItem, to_stored, write_item};
use super::request::Repeated;
use super::store::{NewResponse, StoredResponse};
use super::stream::EventWriter;
use super::tools::Namespaces;
use crate::http::caller::Caller;
use crate::http::error::ApiError;
use crate::http::routes::text_of;
use crate::limits::client_memory::HeldMemory;
use crate::limits::tenants::Tenant;
use crate::openai::sampling::effective_one;
use crate::openai::shared_fields::Streaming;
use crate::openai::usage::Extension;
use crate::random;
use crate::reply::form::{ReplyForm, StreamWriter};
use crate::reply::parts::JsonParts;
use crate::reply::{Sampling, Spec};
use crate::state::{App, SharedApp};

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct ResponseUsage {
    input_tokens: usize,
    input_tokens_details: InputDetails,
    output_tokens: usize,
    output_tokens_details: OutputDetails,
    total_tokens: usize,
}

/// Details of the input's tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct InputDetails {
    /// Tokens that were found in the tenant's prefix cache.
    cached_tokens: usize,
    /// Always 0: caching costs nothing beyond computing.
    cache_write_tokens: usize,
}

/// Details of the output's tokens.
#[derive(Debug, Clone, Copy, Serialize, ToSchema)]
pub(super) struct OutputDetails {
    reasoning_tokens: usize,
}

impl ResponseUsage {
    fn new(summary: &Summary) -> ResponseUsage {
        ResponseUsage {
            input_tokens: summary.prompt_tokens,
            input_tokens_details: InputDetails { cached_tokens: summary.cached_tokens, cache_write_tokens: 0 },
            output_tokens: summary.completion_tokens,
            output_tokens_details: OutputDetails { reasoning_tokens: summary.thought_tokens },
            total_tokens: summary.prompt_tokens + summary.completion_tokens,
        }
    }
}

/// State of a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Status<'a> {
    /// A background response waits for the engine.
    Queued,
    InProgress,
    Completed,
    /// The reply ended early, for OpenAI's reason.
    Incomplete(&'static str),
    /// The client ended a background response.
    Cancelled,
    Failed(&'a ApiErrorText<'a>),
}

/// An error as a response shows it.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ApiErrorText<'a> {
    code: &'static str,
    message: &'a str,
}

impl<'a> ApiErrorText<'a> {
    pub(super) fn new(error: &'a ApiError) -> ApiErrorText<'a> {
        let code = if error.status.as_u16() == 429 { "rate_limit_exceeded" } else { "server_error" };
        ApiErrorText { code, message: &error.detail.message }
    }
}

impl Status<'_> {
    /// Returns the state of a response that ended for the given reason.
    pub(super) fn of(finish: Option<&Finish>) -> Status<'static> {
        match finish {
            Some(Finish::ContentFilter { .. }) => Status::Incomplete("content_filter"),
            Some(Finish::MaxTokens | Finish::ContextFull | Finish::Deadline) => Status::Incomplete("max_output_tokens"),
            Some(
                Finish::EndToken(_)
                | Finish::StopToken(_)
                | Finish::StopString(_)
                | Finish::ToolCalls(_)
                | Finish::Repetition(_),
            )
            | None => Status::Completed,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Status::Queued => "queued",
            Status::InProgress => "in_progress",
            Status::Completed => "completed",
            Status::Incomplete(_) => "incomplete",
            Status::Cancelled => "cancelled",
            Status::Failed(_) => "failed",
        }
    }
}

/// Fields of the request that the response repeats, as JSON, with the memory that they take.
#[derive(Debug)]
struct Echo {
    json: String,
    _held: HeldMemory,
}

struct EchoText(Arc<Echo>);

impl AsRef<str> for EchoText {
    fn as_ref(&self) -> &str {
        &self.0.json
    }
}

/// Counts and details that a response has when its reply is complete.
pub(super) struct Ending<'a> {
    pub(super) sampling: &'a Sampling,
    pub(super) summary: &'a Summary,
}

/// The fields of a response that are known before anything is generated.
pub(super) struct ResponseForm {
    app: SharedApp,
    tenant: Arc<Tenant>,
    id: String,
    created_at: u64,
    echo: Arc<Echo>,
    namespaces: Namespaces,
    /// Whether the response is to be stored.
    stores: bool,
    /// Events of a background response.
    events: Option<Arc<EventLog>>,
    /// The items that it is stored with, until it is.
    new: Mutex<NewResponse>,
    /// For the texts of log probabilities, if the request asks for them.
    tokenizer: Option<Arc<Tokenizer>>,
    /// Id of the model.
    model: String,
}

impl ResponseForm {
    /// Returns the form of the response to a request. Takes memory for the fields that it repeats.
    pub(super) fn new(
        (app, model): (&SharedApp, &LoadedModel),
        caller: &Caller,
        repeated: Repeated,
        spec: &Spec,
    ) -> Result<ResponseForm, ApiError> {
        let Repeated { mut echo, namespaces, stores, in_background: _, new } = repeated;
        if let Some(prompt) = spec.prompts.first() {
            for name in ["temperature", "top_p"] {
                echo.insert(name.into(), effective_one(name, &prompt.request.sampling));
            }
        }
        let json = Value::Object(echo).to_string();
        let mut held = HeldMemory::none(&app.client_memory, &caller.tenant);
        held.grow_to(json.len() + new.input.iter().map(|item| item.json.len()).sum::<usize>())?;
        Ok(ResponseForm {
            app: app.clone(),
            tenant: caller.tenant.clone(),
            id: random::id("resp_"),
            created_at: now(),
            echo: Arc::new(Echo { json, _held: held }),
            namespaces,
            stores,
            events: None,
            new: Mutex::new(new),
            tokenizer: spec.logprobs.map(|_| model.tokenizer.clone()),
            model: model.id.clone(),
        })
    }

    /// Returns the form of a background response with these events.
    pub(super) fn in_background(self, events: Arc<EventLog>) -> ResponseForm {
        ResponseForm { events: Some(events), ..self }
    }

    pub(super) fn is_background(&self) -> bool {
        self.events.is_some()
    }

    pub(super) fn id(&self) -> &str {
        &self.id
    }

    pub(super) fn app(&self) -> &App {
        &self.app
    }

    pub(super) fn shared_app(&self) -> SharedApp {
        self.app.clone()
    }

    pub(super) fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    pub(super) fn shared_tenant(&self) -> Arc<Tenant> {
        self.tenant.clone()
    }

    pub(super) fn namespaces(&self) -> &Namespaces {
        &self.namespaces
    }

    pub(super) fn tokenizer(&self) -> Option<&Arc<Tokenizer>> {
        self.tokenizer.as_ref()
    }

    /// Returns the JSON before the output items.
    fn before(&self, status: Status<'_>) -> String {
        let error = match status {
            Status::Failed(ApiErrorText { code, message }) => json!({ "code": code, "message": message }),
            _ => Value::Null,
        };
        let details = match status {
            Status::Incomplete(reason) => json!({ "reason": reason }),
            _ => Value::Null,
        };
        let (id, model) = (&self.id, json!(self.model));
        format!(
            "{{\"id\":\"{id}\",\"object\":\"response\",\"created_at\":{},\"status\":\"{}\",\"background\":{},\
             \"error\":{error},\"incomplete_details\":{details},\"model\":{model},\"output\":[",
            self.created_at,
            status.name(),
            self.is_background(),
        )
    }

    /// Returns the JSON between the output items and the fields that repeat the request.
    fn between(&self, is_stored: bool, ending: Option<&Ending<'_>>) -> String {
        let Some(Ending { sampling, summary }) = ending else {
            return format!("],\"completed_at\":null,\"store\":{is_stored},\"usage\":null");
        };
        let (usage, extension) = (text_of(&ResponseUsage::new(summary)), text_of(&Extension::new(sampling, summary)));
        format!("],\"completed_at\":{},\"store\":{is_stored},\"usage\":{usage},\"pellucid\":{extension}", now())
    }

    /// Adds the JSON of the response to `parts`.
    fn write(&self, status: Status<'_>, items: &[Arc<OutputItem>], between: &str, parts: &mut JsonParts) {
        parts.literal(&self.before(status));
        self.write_items(items, parts);
        parts.literal(between);
        // The opening brace of the repeated fields becomes a comma.
        parts.literal(",");
        parts.raw(EchoText(self.echo.clone()), 1);
    }

    /// Adds the JSON of the output items.
    fn write_items(&self, items: &[Arc<OutputItem>], parts: &mut JsonParts) {
        for (i, item) in items.iter().enumerate() {
            parts.literal(if i > 0 { "," } else { "" });
            write_item(item, self.tokenizer(), parts);
        }
    }

    /// Adds the JSON of a response that is not complete.
    pub(super) fn write_unfinished(&self, status: Status<'_>, items: &[Arc<OutputItem>], parts: &mut JsonParts) {
        let is_stored = self.stores && (self.is_background() || status == Status::InProgress);
        self.write(status, items, &self.between(is_stored, None), parts);
    }

    /// Stores a complete response if the request asks for it, and adds its JSON to `parts`.
    pub(super) fn write_complete(
        &self,
        status: Status<'_>,
        items: &[Arc<OutputItem>],
        ending: &Ending<'_>,
        parts: &mut JsonParts,
    ) {
        let stored = if self.stores { self.store(status, items, Some(ending)) } else { None };
        match stored {
            // The texts that are stored are the reply's, so they are written once. Log probabilities are not stored.
            Some(stored) if self.tokenizer.is_none() => stored.write(parts),
            Some(stored) => stored.write_around(parts, |parts| self.write_items(items, parts)),
            None => self.write(status, items, &self.between(false, Some(ending)), parts),
        }
    }

    /// Stores a background response that was cancelled or failed.
    pub(super) fn store_unfinished(&self, status: Status<'_>, items: &[Arc<OutputItem>]) {
        if self.is_background() {
            self.store(status, items, None);
        }
    }

    /// Stores the response; `None` if it is too large.
    fn store(
        &self,
        status: Status<'_>,
        items: &[Arc<OutputItem>],
        ending: Option<&Ending<'_>>,
    ) -> Option<Arc<StoredResponse>> {
        let output = items.iter().map(to_stored).collect::<Option<Vec<_>>>()?;
        let new = std::mem::take(&mut *self.new.lock().unwrap_or_else(PoisonError::into_inner));
        let after = format!("{},{}", self.between(true, ending), &self.echo.json[1..]);
        let new = NewResponse { output, before: self.before(status), after, events: self.events.clone(), ..new };
        let stored = self.app.responses.insert(&self.tenant, &self.id, new);
        if stored.is_none() {
            tracing::warn!(response = self.id, "a response is too large to be stored");
        }
        stored
    }
}

/// Returns items with the last one marked as incomplete if the response is.
pub(super) fn shared(mut items: Vec<OutputItem>, status: Status<'_>) -> Vec<Arc<OutputItem>> {
    if let (Some(last), Status::Incomplete(_)) = (items.last_mut(), status) {
        last.is_complete = false;
    }
    items.into_iter().map(Arc::new).collect()
}

impl ReplyForm for ResponseForm {
    fn whole(&self, choices: Vec<Delta>, sampling: &Sampling, summary: &Summary) -> JsonParts {
        let delta = choices.into_iter().next().unwrap_or_default();
        let status = Status::of(delta.finish.as_ref());
        let items = shared(OutputItem::of_reply(delta, status == Status::Completed, &self.namespaces), status);
        let mut parts = JsonParts::default();
        self.write_complete(status, &items, &Ending { sampling, summary }, &mut parts);
        parts
    }

    fn stream(self: Box<Self>, streaming: Streaming) -> Box<dyn StreamWriter> {
        Box::new(EventWriter::new(Arc::new(*self), streaming))
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
