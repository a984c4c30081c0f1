//! The request of `/v1/messages` and `/v1/messages/count_tokens`, read field by field into a chat request.

use pellucid_generate::LoadedModel;

use super::{content, tools};
use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::openai::chat::ChatRequest;
use crate::translation::{ChatBody, Paths};

const MAX_WORD_LEN: usize = 512;

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
    read_prompt(&mut fields, &mut body)?;
    read_ours(&mut fields, &mut body);
    fields.finish()?;
    body.read_chat(model)
}

/// Reads a request to count the tokens of a prompt.
pub(super) fn read_count(value: Json, model: &LoadedModel) -> Result<(ChatRequest, Paths), ApiError> {
    let mut fields = Fields::of(value)?;
    let mut body = ChatBody::default();
    read_prompt(&mut fields, &mut body)?;
    fields.finish()?;
    body.read_chat(model)
}

/// Reads what becomes the prompt, and what constrains the reply.
fn read_prompt(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    body.set("model", Some(fields.required("model")?), "model");
    content::read_system(fields, body)?;
    content::read_messages(fields, body)?;
    if body.last_role() == Some("assistant") {
        body.set("continue_final_message", Some(Json::Bool(true)), "messages");
    }
    tools::read(fields, body)?;
    read_thinking(fields, body)?;
    content::read_cache_control(fields)?;
    read_output(fields, body)?;
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
    fields.refuse("context_management", is_empty, "the client decides what a conversation holds")
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
fn read_output(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let older = fields.take("output_format").map(|value| ("output_format", value));
    let mut format = older;
    if let Some(value) = fields.take("output_config") {
        let mut config = Fields::within("output_config".into(), value)?;
        body.set("reasoning_effort", config.take("effort"), "output_config.effort");
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

/// Reads fields of this server that Anthropic's API does not have: what repeats or explains a reply.
fn read_ours(fields: &mut Fields, body: &mut ChatBody) {
    for name in ["seed", "min_p", "chat_template_kwargs", "cache_salt", "priority", "timeout_ms", "speculate"] {
        body.set(name, fields.take(name), name);
    }
}
