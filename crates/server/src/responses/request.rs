//! The request of `/v1/responses`, read field by field into a chat request.

use std::sync::Arc;

use axum::http::StatusCode;
use pellucid_generate::LoadedModel;
use pellucid_sampling::{MAX_LOGPROBS, OPTIONS};
use serde_json::{Map, Value, json};

use super::conversation::Conversation;
use super::items::{Item, ItemContent, MAX_ITEMS};
use super::store::{Found, NewResponse, ResponseStore, StoredItem, Turn};
use super::tools::{self, Namespaces};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::limits::client_memory::{HeldMemory, working_account};
use crate::limits::tenants::Tenant;
use crate::openai::chat::ChatRequest;
use crate::translation::{ChatBody, Paths};

const MAX_WORD_LEN: usize = 512;
/// Maximum values of `include`.
const MAX_INCLUDED: usize = 16;
/// Bytes that a byte of a stored item takes at most while it is read, rendered and encoded; see `http::body`.
const STORED_FACTOR: usize = 12;

/// Fields of this server that OpenAI's Responses API does not have, beside the sampling options.
const OWN_FIELDS: [&str; 10] = [
    "ignore_eos",
    "preset",
    "stop",
    "chat_template_kwargs",
    "thinking_budget",
    "cache_salt",
    "priority",
    "timeout_ms",
    "speculate",
    "loop_guard",
];

/// A request for a response that was read.
#[derive(Debug)]
pub(super) struct ResponseRequest {
    pub(super) chat: ChatRequest,
    pub(super) paths: Paths,
    pub(super) repeated: Repeated,
    /// Memory that the stored items take until the prompt is encoded.
    pub(super) memory: Option<HeldMemory>,
}

/// Parts of a request that its response repeats or is stored with.
#[derive(Debug)]
pub(super) struct Repeated {
    /// Fields of the request that the response repeats.
    pub(super) echo: Map<String, Value>,
    pub(super) namespaces: Namespaces,
    /// Whether to store the response.
    pub(super) stores: bool,
    /// Whether to generate the response without its client's connection.
    pub(super) in_background: bool,
    /// The items that it is stored with, without the output.
    pub(super) new: NewResponse,
}

/// Reads requests of one tenant.
#[derive(Debug, Clone, Copy)]
pub(super) struct Reader<'a> {
    pub(super) model: &'a LoadedModel,
    pub(super) store: &'a ResponseStore,
    pub(super) tenant: &'a Tenant,
}

impl Reader<'_> {
    /// Reads a request for a response.
    pub(super) fn read(self, value: Json) -> Result<ResponseRequest, ApiError> {
        let mut fields = Fields::of(value)?;
        let mut echo = Map::new();
        let stores = self.read_store(&mut fields)?;
        let in_background = fields.boolean("background")?.unwrap_or(false);
        if in_background && !stores {
            let message = "background: true needs store: true, and a key that may store responses: the response is \
                           found by its id";
            return Err(ApiError::field("background", message));
        }
        let mut prompt = self.read_prompt(&mut fields, &mut echo, stores)?;
        let body = &mut prompt.body;
        repeat(&mut fields, body, &mut echo, "max_output_tokens", "max_completion_tokens");
        let max_tool_calls: Option<i64> = fields.integer("max_tool_calls", 1..=i64::from(i32::MAX))?;
        echo.insert("max_tool_calls".into(), json!(max_tool_calls));
        body.set("stream", fields.take("stream"), "stream");
        body.set("stream_options", read_stream_options(&mut fields)?, "stream_options");
        read_logprobs(&mut fields, body, &mut echo)?;
        for name in ["metadata", "user", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"] {
            repeat(&mut fields, body, &mut echo, name, name);
        }
        if echo.get("metadata").is_none_or(Value::is_null) {
            echo.insert("metadata".into(), json!({}));
        }
        body.set("service_tier", fields.take("service_tier"), "service_tier");
        echo.insert("service_tier".into(), json!("default"));
        for name in OPTIONS.iter().map(|option| option.json_name()).chain(OWN_FIELDS) {
            body.set(name, fields.take(name), name);
        }
        read_client_metadata(&mut fields)?;
        refuse_others(&mut fields)?;
        fields.finish()?;
        let Prompt { body, namespaces, previous, input, memory } = prompt;
        let (chat, paths) = body.read_chat(self.model)?;
        let new = NewResponse { previous, input, ..NewResponse::default() };
        let new = if stores { new } else { NewResponse::default() };
        let repeated = Repeated { echo, namespaces, stores, in_background, new };
        Ok(ResponseRequest { chat, paths, repeated, memory })
    }

    /// Reads a request to count the tokens of a prompt.
    pub(super) fn read_count(self, value: Json) -> Result<(ChatRequest, Paths, Option<HeldMemory>), ApiError> {
        let mut fields = Fields::of(value)?;
        let prompt = self.read_prompt(&mut fields, &mut Map::new(), false)?;
        fields.finish()?;
        let (chat, paths) = prompt.body.read_chat(self.model)?;
        Ok((chat, paths, prompt.memory))
    }

    /// Reads `store`. Responses are stored unless the request or the tenant's limit says otherwise.
    fn read_store(self, fields: &mut Fields) -> Result<bool, ApiError> {
        let store = fields.boolean("store")?;
        let can_store = ResponseStore::max_responses(self.tenant) > 0;
        if store == Some(true) && !can_store {
            let message = "store: true is not supported: the limit of stored responses of this key is 0";
            return Err(ApiError::field("store", message).code("unsupported_value"));
        }
        Ok(store.unwrap_or(can_store))
    }

    /// Reads what becomes the prompt, and what constrains the reply. `stores` says whether the input is to be stored.
    fn read_prompt(self, fields: &mut Fields, echo: &mut Map<String, Value>, stores: bool) -> Result<Prompt, ApiError> {
        let mut conversation = Conversation::default();
        conversation.body.set("model", Some(fields.required("model")?), "model");
        conversation.body.rename("messages", "input");
        let instructions = fields.string("instructions", usize::MAX)?;
        echo.insert("instructions".into(), json!(instructions));
        if let Some(text) = instructions {
            conversation.add_instructions(text);
        }
        let mut memory = StoredBytes { account: working_account(), num_bytes: 0 };
        let previous = self.read_previous(fields, &mut conversation, &mut memory, echo)?;
        let input = self.read_input(fields, &mut conversation, &mut memory, stores)?;
        let mut body = conversation.finish()?;
        let namespaces = tools::read(fields, &mut body, echo)?;
        read_reasoning(fields, &mut body, echo)?;
        read_text(fields, &mut body, echo)?;
        read_truncation(fields, echo)?;
        fields.refuse("conversation", |_| false, "use previous_response_id")?;
        Ok(Prompt { body, namespaces, previous, input, memory: memory.account })
    }

    /// Reads `previous_response_id`, whose conversation precedes the input.
    fn read_previous(
        self,
        fields: &mut Fields,
        conversation: &mut Conversation,
        memory: &mut StoredBytes,
        echo: &mut Map<String, Value>,
    ) -> Result<Vec<Arc<Turn>>, ApiError> {
        const NAME: &str = "previous_response_id";
        let id = fields.string(NAME, MAX_WORD_LEN)?;
        echo.insert(NAME.into(), json!(id));
        let Some(id) = id else { return Ok(Vec::new()) };
        let found = self.store.find(self.tenant, &id);
        if matches!(found, Some(Found::Running(_))) {
            let message = format!("{NAME}: the response {} is not complete yet", shown(&id));
            return Err(ApiError::refused(StatusCode::CONFLICT, "response_in_progress", message).param(NAME));
        }
        let Some(Found::Stored(response)) = found else {
            let message = format!("{NAME}: no response {} is stored; send its items as input", shown(&id));
            return Err(ApiError::refused(StatusCode::NOT_FOUND, "previous_response_not_found", message).param(NAME));
        };
        memory.add(response.turns().iter().map(|turn| turn.num_bytes()).sum())?;
        for item in response.turns().iter().flat_map(|turn| turn.items()) {
            conversation.add(parse_stored(NAME, item)?, NAME)?;
        }
        Ok(response.turns().to_vec())
    }

    /// Reads `input`: a text, or items. Returns the items if `stores` is true.
    fn read_input(
        self,
        fields: &mut Fields,
        conversation: &mut Conversation,
        memory: &mut StoredBytes,
        stores: bool,
    ) -> Result<Vec<StoredItem>, ApiError> {
        let items = match fields.required("input")? {
            Json::String(text) => vec![("input".to_owned(), Item::of_text(text))],
            value @ Json::Array(_) => {
                let values = fields::array("input", value, MAX_ITEMS)?;
                let path = |i: usize| format!("input[{i}]");
                let items = values.into_iter().enumerate();
                items.map(|(i, value)| Ok((path(i), Item::read(path(i), value)?))).collect::<Result<_, ApiError>>()?
            }
            other => return Err(fields::wrong_type("input", "a string or an array of items", &other)),
        };
        if items.is_empty() {
            return Err(ApiError::field("input", "input: expected at least one item, found none").code("empty_array"));
        }
        let mut stored = Vec::new();
        for (path, item) in items {
            let item = match item.content {
                ItemContent::Reference => self.resolve(&path, &item.id, memory)?,
                _ => item,
            };
            if stores {
                stored.push(StoredItem { id: item.id.clone(), json: item.to_json().to_string() });
            }
            conversation.add(item, &path)?;
        }
        Ok(stored)
    }

    /// Returns the stored item that the reference at `path` names.
    fn resolve(self, path: &str, id: &str, memory: &mut StoredBytes) -> Result<Item, ApiError> {
        let Some(stored) = self.store.item(self.tenant, id) else {
            let message = format!("{path}.id: no item {} is stored; send the item itself", shown(id));
            let error = ApiError::refused(StatusCode::NOT_FOUND, "item_not_found", message);
            return Err(error.param(format!("{path}.id")));
        };
        memory.add(stored.json.len())?;
        parse_stored(path, &stored)
    }
}

/// The prompt of a request that was read.
struct Prompt {
    body: ChatBody,
    namespaces: Namespaces,
    previous: Vec<Arc<Turn>>,
    input: Vec<StoredItem>,
    memory: Option<HeldMemory>,
}

/// Memory for stored items: a short request can name a long conversation.
struct StoredBytes {
    account: Option<HeldMemory>,
    num_bytes: usize,
}

impl StoredBytes {
    fn add(&mut self, num_bytes: usize) -> Result<(), ApiError> {
        self.num_bytes = self.num_bytes.saturating_add(num_bytes);
        let needed = self.num_bytes.saturating_mul(STORED_FACTOR);
        self.account.as_mut().map_or(Ok(()), |account| account.grow_to(needed))
    }
}

/// Returns an item of the store, which has the form in which clients send items.
fn parse_stored(path: &str, item: &StoredItem) -> Result<Item, ApiError> {
    let value = Json::parse(item.json.as_bytes()).map_err(|error| error.of("stored item"))?;
    Item::read(path.to_owned(), value)
}

/// Passes a field on under the name `target`, and repeats it in the response.
fn repeat(fields: &mut Fields, body: &mut ChatBody, echo: &mut Map<String, Value>, name: &str, target: &str) {
    let value = fields.take(name);
    echo.insert(name.into(), value.clone().map_or(Value::Null, Json::into_value));
    body.set(target, value, name);
}

fn read_stream_options(fields: &mut Fields) -> Result<Option<Json>, ApiError> {
    let Some(value) = fields.take("stream_options") else { return Ok(None) };
    let mut options = Fields::within("stream_options".into(), value)?;
    let obfuscates = options.take("include_obfuscation");
    options.finish()?;
    Ok(Some(Json::Object(obfuscates.map(|value| ("include_obfuscation".into(), value)).into_iter().collect())))
}

/// Reads `include` and `top_logprobs`.
fn read_logprobs(fields: &mut Fields, body: &mut ChatBody, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut has_logprobs = false;
    for (i, value) in fields.array("include", MAX_INCLUDED)?.into_iter().flatten().enumerate() {
        let path = format!("include[{i}]");
        match fields::string(&path, value, MAX_WORD_LEN)?.as_str() {
            "message.output_text.logprobs" => has_logprobs = true,
            // Serves clients that send thoughts back; here the content of reasoning items is not encrypted.
            "reasoning.encrypted_content" => {}
            other => {
                let expected = "message.output_text.logprobs or reasoning.encrypted_content";
                let message = format!("{path}: this server has {expected}, found {}", shown(other));
                return Err(ApiError::field(path, message).code("unsupported_value"));
            }
        }
    }
    let num_top = fields.integer("top_logprobs", 0..=i64::from(MAX_LOGPROBS))?;
    echo.insert("top_logprobs".into(), json!(num_top.unwrap_or(0)));
    if has_logprobs {
        body.set("logprobs", Some(Json::Bool(true)), "include");
        body.set("top_logprobs", num_top.map(|count| Json::Integer(count.into())), "top_logprobs");
    } else if num_top.is_some_and(|count| count > 0) {
        let message = "top_logprobs has no effect without include: [\"message.output_text.logprobs\"]";
        return Err(ApiError::field("top_logprobs", message));
    }
    Ok(())
}

/// Reads `reasoning`: how much the model thinks before it answers.
fn read_reasoning(fields: &mut Fields, body: &mut ChatBody, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    let mut effort = None;
    if let Some(value) = fields.take("reasoning") {
        let mut reasoning = Fields::within("reasoning".into(), value)?;
        effort = reasoning.take("effort");
        let is = |word: &'static str| move |value: &Json| *value == Json::String(word.into());
        let no_summaries = "thoughts are sent whole and are not summarized; auto means this";
        reasoning.refuse("summary", is("auto"), no_summaries)?;
        reasoning.refuse("generate_summary", is("auto"), no_summaries)?;
        reasoning.refuse("context", is("auto"), "the model's chat template decides which thoughts it shows again")?;
        reasoning.refuse("mode", is("standard"), "there is one mode, standard")?;
        reasoning.finish()?;
    }
    let shown = effort.clone().map_or(Value::Null, Json::into_value);
    echo.insert("reasoning".into(), json!({ "effort": shown, "summary": null }));
    body.set("reasoning_effort", effort, "reasoning.effort");
    Ok(())
}

/// Reads `text`: the format and the verbosity of the answer.
fn read_text(fields: &mut Fields, body: &mut ChatBody, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    let (mut format, mut verbosity) = (None, None);
    if let Some(value) = fields.take("text") {
        let mut text = Fields::within("text".into(), value)?;
        format = text.take("format");
        verbosity = text.take("verbosity");
        text.finish()?;
    }
    let shown_format = format.clone().map_or_else(|| json!({ "type": "text" }), Json::into_value);
    let shown_verbosity = verbosity.clone().map_or_else(|| json!("medium"), Json::into_value);
    echo.insert("text".into(), json!({ "format": shown_format, "verbosity": shown_verbosity }));
    body.set("verbosity", verbosity, "text.verbosity");
    if let Some(format) = format {
        body.set("response_format", Some(read_format(format)?), "text.format");
        body.rename("response_format.json_schema", "text.format");
    }
    Ok(())
}

/// Returns `text.format` as `response_format`, which has the fields of a schema in an object of their own.
fn read_format(value: Json) -> Result<Json, ApiError> {
    let Json::Object(entries) = value else { return Err(fields::wrong_type("text.format", "an object", &value)) };
    let is_schema = entries.iter().any(|(name, value)| name == "type" && *value == Json::String("json_schema".into()));
    if !is_schema {
        return Ok(Json::Object(entries));
    }
    let (kind, schema): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(name, _)| name == "type");
    Ok(Json::Object(kind.into_iter().chain([("json_schema".to_owned(), Json::Object(schema))]).collect()))
}

fn read_truncation(fields: &mut Fields, echo: &mut Map<String, Value>) -> Result<(), ApiError> {
    let is_disabled = |value: &Json| *value == Json::String("disabled".into());
    fields.refuse("truncation", is_disabled, "no item of a conversation is dropped; expected disabled")?;
    echo.insert("truncation".into(), json!("disabled"));
    Ok(())
}

/// Checks `client_metadata`: texts that a client keeps about itself, which concern nobody else.
fn read_client_metadata(fields: &mut Fields) -> Result<(), ApiError> {
    const NAME: &str = "client_metadata";
    match fields.take(NAME) {
        None => Ok(()),
        Some(Json::Object(entries)) => {
            let is_other = |(_, value): &&(String, Json)| !matches!(value, Json::String(_));
            match entries.iter().find(is_other) {
                Some((name, value)) => Err(fields::wrong_type(&format!("{NAME}.{name}"), "a string", value)),
                None => Ok(()),
            }
        }
        Some(other) => Err(fields::wrong_type(NAME, "an object", &other)),
    }
}

/// Refuses fields of OpenAI's API that are not supported, unless their value asks for the default behaviour.
fn refuse_others(fields: &mut Fields) -> Result<(), ApiError> {
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    fields.refuse("prompt", |_| false, "this server stores no prompt templates")?;
    fields.refuse("context_management", is_empty, "the client decides what a conversation holds")?;
    fields.refuse("moderation", |_| false, "this server has no moderation model")?;
    fields.refuse("prompt_cache_options", |_| false, "prefixes are cached automatically and kept while there is memory")
}
