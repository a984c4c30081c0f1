//! The requests of `/api/chat` and `/api/generate`, read into requests of OpenAI's API.

use pellucid_generate::{LoadedModel, ThoughtMarkers};

use super::{messages, options};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields};
use crate::http::json::Json;
use crate::limits::tenants::Tenant;
use crate::models::KeepAlive;
use crate::models::lease::TextLease;
use crate::openai::shared_fields::check_model;
use crate::reply::Spec;
use crate::state::Limits;
use crate::translation::{ChatBody, Paths};

const MAX_WORD_LEN: usize = 512;

/// A request that was read.
pub(super) enum Task {
    /// Generate a reply.
    Reply(Box<Spec>),
    /// Load the model, which is loaded, or unload it: a request without messages or prompt.
    Load { keep_alive: Option<KeepAlive> },
}

/// Reads a request of `/api/chat`.
pub(super) fn chat(value: Json, model: &TextLease, limits: &Limits, tenant: &Tenant) -> Result<Task, ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    let keep_alive = read_common(&mut fields, model, &mut body)?;
    let num_messages = messages::read(&mut fields, &mut body)?;
    body.set("tools", fields.take("tools"), "tools");
    messages::read_think(&mut fields, can_think(model), &mut body)?;
    let num_ctx = options::read(&mut fields, "max_completion_tokens", &mut body)?;
    fields.finish()?;
    if num_messages == 0 {
        return Ok(Task::Load { keep_alive });
    }
    let (request, paths) = body.read_chat(model)?;
    finish(request.spec(model, limits, tenant), num_ctx, model, &paths)
}

/// Reads a request of `/api/generate`: a chat of one message, or with `raw` the continuation of a text.
pub(super) fn generate(value: Json, model: &TextLease, limits: &Limits, tenant: &Tenant) -> Result<Task, ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    let keep_alive = read_common(&mut fields, model, &mut body)?;
    messages::refuse_images(&mut fields)?;
    let is_empty = |value: &Json| match value {
        Json::String(text) => text.is_empty(),
        Json::Array(values) => values.is_empty(),
        _ => false,
    };
    fields.refuse("template", is_empty, "templates come with the model or with --chat-template of the server")?;
    fields.refuse("context", is_empty, "send the conversation to /api/chat; its beginning is found in the cache")?;
    let prompt = fields.string("prompt", usize::MAX)?.unwrap_or_default();
    let suffix = fields.take("suffix").filter(|value| !is_empty(value));
    let system = fields.take("system").filter(|value| !is_empty(value));
    if fields.boolean("raw")? == Some(true) || suffix.is_some() {
        if system.is_some() {
            let message = "system has no effect on a raw prompt or with a suffix: no template is applied";
            return Err(ApiError::field("system", message));
        }
        messages::read_think(&mut fields, false, &mut body)?;
        let num_ctx = options::read(&mut fields, "max_tokens", &mut body)?;
        fields.finish()?;
        if prompt.is_empty() && suffix.is_none() {
            return Ok(Task::Load { keep_alive });
        }
        return raw(prompt, suffix, num_ctx, body, (model, limits, tenant));
    }
    messages::read_think(&mut fields, can_think(model), &mut body)?;
    let num_ctx = options::read(&mut fields, "max_completion_tokens", &mut body)?;
    fields.finish()?;
    if prompt.is_empty() {
        return Ok(Task::Load { keep_alive });
    }
    for (role, content) in [("system", system), ("user", Some(Json::String(prompt)))] {
        let Some(content) = content else { continue };
        let source = if role == "user" { "prompt" } else { role };
        body.message(
            Json::Object(vec![("role".into(), Json::String(role.into())), ("content".into(), content)]),
            source,
        );
        body.part_of_last("content", source);
    }
    let (request, paths) = body.read_chat(model)?;
    finish(request.spec(model, limits, tenant), num_ctx, model, &paths)
}

/// Continues a text as it is. Without `num_predict` the reply may fill the context.
fn raw(
    prompt: String,
    suffix: Option<Json>,
    num_ctx: Option<usize>,
    mut body: ChatBody,
    (model, limits, tenant): (&LoadedModel, &Limits, &Tenant),
) -> Result<Task, ApiError> {
    body.set("prompt", Some(Json::String(prompt)), "prompt");
    body.set("suffix", suffix, "suffix");
    let is_limited = body.has("max_tokens");
    if !is_limited {
        // A placeholder: OpenAI's route has a default of 16 tokens, this one has none.
        body.set("max_tokens", Some(Json::Integer(1)), "prompt");
    }
    let (request, paths) = body.read_completion(model)?;
    let mut spec = request.spec(model, limits, tenant);
    if let Ok(spec) = &mut spec
        && !is_limited
    {
        spec.prompts.iter_mut().for_each(|prompt| prompt.request.max_tokens = None);
    }
    finish(spec, num_ctx, model, &paths)
}

/// Reads the fields that both routes have. Returns how long the model is to stay loaded.
fn read_common(fields: &mut Fields, model: &TextLease, body: &mut ChatBody) -> Result<Option<KeepAlive>, ApiError> {
    let name = fields::string("model", fields.required("model")?, MAX_WORD_LEN)?;
    let name = known_name(name, model);
    // Loading and unloading need no more than the name.
    check_model(&name, model)?;
    body.set("model", Some(Json::String(name)), "model");
    // This API streams unless told otherwise.
    body.set("stream", Some(Json::Bool(fields.boolean("stream")?.unwrap_or(true))), "stream");
    messages::read_format(fields, body)?;
    let is_false = |value: &Json| *value == Json::Bool(false);
    fields.refuse("logprobs", is_false, "use /v1/chat/completions")?;
    fields.refuse("top_logprobs", |value| *value == Json::Integer(0), "use /v1/chat/completions")?;
    fields.refuse("truncate", is_false, "a prompt that does not fit is refused, never cut")?;
    fields.refuse("shift", is_false, "a reply ends when the context is full")?;
    let keep_alive = options::read_keep_alive(fields)?;
    keep_alive.into_iter().for_each(|keep_alive| model.set_keep_alive(keep_alive));
    Ok(keep_alive)
}

/// Returns a name without the tag `latest`, which clients add, if that is how the model is called.
fn known_name(name: String, model: &LoadedModel) -> String {
    let plain = name.strip_suffix(":latest").unwrap_or(&name);
    if model.names().any(|own| own == name) || !model.names().any(|own| own == plain) {
        return name;
    }
    plain.to_owned()
}

/// Whether the model's template separates thoughts from the answer.
pub(super) fn can_think(model: &LoadedModel) -> bool {
    ThoughtMarkers::of(model.template.as_ref(), &model.tokenizer).is_some()
}

/// Applies `num_ctx`, which limits prompt and reply together.
fn finish(
    spec: Result<Spec, ApiError>,
    num_ctx: Option<usize>,
    model: &LoadedModel,
    paths: &Paths,
) -> Result<Task, ApiError> {
    let mut spec = paths.translate_spec(spec)?;
    let Some(num_ctx) = num_ctx else { return Ok(Task::Reply(Box::new(spec))) };
    let path = "options.num_ctx";
    if num_ctx > model.context_len {
        let message = format!("{path}: this server's context has {} tokens, found {num_ctx}", model.context_len);
        return Err(ApiError::field(path, message).code("context_length_exceeded"));
    }
    for prompt in &mut spec.prompts {
        let request = &mut prompt.request;
        let Some(room) = num_ctx.checked_sub(request.prompt.len()).filter(|&room| room > 0) else {
            let message = format!("{path} is {num_ctx} tokens, but the prompt has {}", request.prompt.len());
            return Err(ApiError::field(path, message).code("context_length_exceeded"));
        };
        request.max_tokens = Some(request.max_tokens.map_or(room, |most| most.min(room)));
    }
    Ok(Task::Reply(Box::new(spec)))
}
