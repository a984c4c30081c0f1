//! The request of `/v1/messages` and `/v1/messages/count_tokens`, read field by field into a chat request.

use pellucid_generate::{LoadedModel, REASONING_EFFORTS};

use super::{content, tools};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::openai::chat::ChatRequest;
use crate::translation::{ChatBody, Paths};

const MAX_WORD_LEN: usize = 512;
/// Maximum edits of `context_management`.
const MAX_EDITS: usize = 16;

/// Reads a request for a message.
pub(super) fn read(value: Json, model: &LoadedModel) -> Result<(ChatRequest, Paths), ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    body.set("max_completion_tokens", Some(fields.required("max_tokens")?), "max_tokens");
    body.set("stream", fields.take("stream"), "stream");
    body.set("stop", stop_sequences(&mut fields)?, "stop_sequences");
    body.set("temperature", fields.take("temperature"), "temperature");
    body.set("top_k", fields.take("top_k"), "top_k");
    body.set("top_p", fields.take("top_p"), "top_p");
    read_metadata(&mut fields, &mut body)?;
    read_tier(&mut fields)?;
    read_prompt(&mut fields, &mut body, model)?;
    read_ours(&mut fields, &mut body);
    fields.finish()?;
    let (mut chat, paths) = body.read_chat(model)?;
    chat.may_fill_context = true;
    Ok((chat, paths))
}

/// Reads a request to count the tokens of a prompt.
pub(super) fn read_count(value: Json, model: &LoadedModel) -> Result<(ChatRequest, Paths), ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    read_prompt(&mut fields, &mut body, model)?;
    fields.finish()?;
    body.read_chat(model)
}

/// Reads what becomes the prompt, and what constrains the reply.
fn read_prompt(fields: &mut Fields, body: &mut ChatBody, model: &LoadedModel) -> Result<(), ApiError> {
    body.set("model", Some(fields.required("model")?), "model");
    content::read_system(fields, body)?;
    content::read_messages(fields, body)?;
    if body.last_role() == Some("assistant") {
        body.set("continue_final_message", Some(Json::Bool(true)), "messages");
    }
    tools::read(fields, body)?;
    read_thinking(fields, body)?;
    content::read_cache_control(fields)?;
    read_output(fields, body, model)?;
    let is_empty = |value: &Json| {
        matches!(value, Json::Array(values) if values.is_empty())
            || matches!(value, Json::Object(entries) if entries.is_empty())
    };
    fields.refuse("mcp_servers", is_empty, "this server opens no outbound connections")?;
    let is_standard = |value: &Json| matches!(value, Json::String(word) if word == "standard");
    fields.refuse("speed", is_standard, "there is one speed")?;
    fields.refuse("inference_geo", |_| false, "the server computes where it runs")?;
    fields.refuse("diagnostics", |_| false, "usage tells what was found in the cache")?;
    fields.refuse("container", |_| false, "this server runs no code")?;
    read_context_management(fields)
}

/// Reads `stop_sequences`. Unlike OpenAI's `stop`, it is always a list.
fn stop_sequences(fields: &mut Fields) -> Result<Option<Json>, ApiError> {
    match fields.take("stop_sequences") {
        None => Ok(None),
        Some(Json::Array(values)) if values.is_empty() => Ok(None),
        Some(value @ Json::Array(_)) => Ok(Some(value)),
        Some(other) => Err(fields::wrong_type("stop_sequences", "an array of strings", &other)),
    }
}

/// Reads `metadata`, whose only entry identifies the end user.
fn read_metadata(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let Some(value) = fields.take("metadata") else { return Ok(()) };
    let mut metadata = Fields::within("metadata".into(), value)?;
    body.set("user", metadata.take("user_id"), "metadata.user_id");
    metadata.finish()
}

/// Checks `service_tier`. There is one tier, so both values mean it.
fn read_tier(fields: &mut Fields) -> Result<(), ApiError> {
    match fields.string("service_tier", MAX_WORD_LEN)?.as_deref() {
        None | Some("auto" | "standard_only") => Ok(()),
        Some(other) => {
            let message = format!("service_tier: expected auto or standard_only, found {}", shown(other));
            Err(ApiError::field("service_tier", message))
        }
    }
}

/// Reads `thinking`: how long the model may think before it answers.
fn read_thinking(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let Some(value) = fields.take("thinking") else { return Ok(()) };
    let mut thinking = Fields::within("thinking".into(), value)?;
    let kind = fields::string("thinking.type", thinking.required("type")?, MAX_WORD_LEN)?;
    match kind.as_str() {
        "enabled" => {
            body.set("thinking_budget", Some(thinking.required("budget_tokens")?), "thinking.budget_tokens");
        }
        "adaptive" => {}
        "disabled" => body.set("reasoning_effort", Some(Json::String("none".into())), "thinking"),
        _ => {
            let message = format!("thinking.type: expected enabled, adaptive or disabled, found {}", shown(&kind));
            return Err(ApiError::field("thinking.type", message));
        }
    }
    if let Some(display) = thinking.string("display", MAX_WORD_LEN)?
        && display != "summarized"
    {
        let message = format!("thinking.display: thoughts are always sent, found {}", shown(&display));
        return Err(ApiError::field("thinking.display", message).code("unsupported_value"));
    }
    thinking.finish()
}

/// Reads `output_config` and its older form `output_format`: effort, and a schema for the answer.
fn read_output(fields: &mut Fields, body: &mut ChatBody, model: &LoadedModel) -> Result<(), ApiError> {
    let older = fields.take("output_format").map(|value| ("output_format", value));
    let mut format = older;
    if let Some(value) = fields.take("output_config") {
        let mut config = Fields::within("output_config".into(), value)?;
        let effort = config.string("effort", MAX_WORD_LEN)?.and_then(|effort| known_effort(effort, model));
        body.set("reasoning_effort", effort.map(Json::String), "output_config.effort");
        if let Some(value) = config.take("format") {
            if format.is_some() {
                let message = "output_format and output_config.format mean the same: give one of them";
                return Err(ApiError::field("output_format", message));
            }
            format = Some(("output_config.format", value));
        }
        config.finish()?;
    }
    let Some((path, value)) = format else { return Ok(()) };
    let mut format = Fields::within(path.into(), value)?;
    let kind_path = format.path("type");
    let kind = fields::string(&kind_path, format.required("type")?, MAX_WORD_LEN)?;
    if kind != "json_schema" {
        let message = format!("{kind_path}: expected json_schema, found {}", shown(&kind));
        return Err(ApiError::field(kind_path, message));
    }
    let schema = vec![("name".into(), Json::String("answer".into())), ("schema".into(), format.required("schema")?)];
    format.finish()?;
    let response_format = vec![("type".into(), Json::String(kind)), ("json_schema".into(), Json::Object(schema))];
    body.set("response_format", Some(Json::Object(response_format)), path);
    body.rename("response_format.json_schema.schema", &format!("{path}.schema"));
    Ok(())
}

/// Returns the effort that the model is given. Anthropic's API documents effort as a hint, so a model without such a
/// setting ignores it, and one that does not know the highest levels thinks at its own highest.
fn known_effort(effort: String, model: &LoadedModel) -> Option<String> {
    if !REASONING_EFFORTS.contains(&effort.as_str()) {
        // The reader of the chat request refuses it.
        return Some(effort);
    }
    let settings = &model.thinking().settings;
    [effort, "high".into()].into_iter().find(|effort| settings.variables(effort).is_ok())
}

/// Reads `context_management`. The client decides what a conversation holds; the only edit that it may name is the one
/// that keeps all thoughts.
fn read_context_management(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(value) = fields.take("context_management") else { return Ok(()) };
    let mut management = Fields::within("context_management".into(), value)?;
    for (i, value) in management.array("edits", MAX_EDITS)?.into_iter().flatten().enumerate() {
        let mut edit = Fields::within(format!("context_management.edits[{i}]"), value)?;
        let kind_path = edit.path("type");
        let kind = fields::string(&kind_path, edit.required("type")?, MAX_WORD_LEN)?;
        if kind != "clear_thinking_20251015" {
            let why = "this server drops nothing from a conversation";
            let message = format!("{kind_path}: {why}; expected clear_thinking_20251015, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
        let keeps_all = |value: &Json| *value == Json::String("all".into());
        let keep = edit.path("keep");
        match edit.take("keep") {
            Some(value) if keeps_all(&value) => {}
            _ => {
                let message = format!("{keep}: this server drops no thoughts; expected \"all\"");
                return Err(ApiError::field(keep, message).code("unsupported_value"));
            }
        }
        edit.finish()?;
    }
    management.finish()
}

/// Reads fields of this server that Anthropic's API does not have: what repeats or explains a reply.
fn read_ours(fields: &mut Fields, body: &mut ChatBody) {
    const OURS: [&str; 8] =
        ["seed", "min_p", "chat_template_kwargs", "cache_salt", "priority", "timeout_ms", "speculate", "loop_guard"];
    for name in OURS {
        body.set(name, fields.take(name), name);
    }
}
