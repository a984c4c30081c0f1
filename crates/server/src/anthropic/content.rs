//! Messages of content blocks: text, thoughts, calls of tools and their results become messages of OpenAI's API.

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::http::long_text::append;
use crate::translation::ChatBody;

/// Maximum messages, and blocks of one message.
const MAX_MESSAGES: usize = 4096;
const MAX_BLOCKS: usize = 1024;
const MAX_WORD_LEN: usize = 512;

/// Reads `system`, which becomes the first message.
pub(super) fn read_system(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let Some(value) = fields.take("system") else { return Ok(()) };
    let content = match value {
        text @ Json::String(_) => text,
        value => Json::Array(read_texts("system", value)?),
    };
    if !matches!(&content, Json::Array(parts) if parts.is_empty()) {
        body.message(message("system", content), "system");
        body.part_of_last("content", "system");
    }
    Ok(())
}

/// Reads `messages`.
pub(super) fn read_messages(fields: &mut Fields, body: &mut ChatBody) -> Result<(), ApiError> {
    let values = fields::array("messages", fields.required("messages")?, MAX_MESSAGES)?;
    if values.is_empty() {
        return Err(ApiError::field("messages", "messages: expected at least one message, found none"));
    }
    for (i, value) in values.into_iter().enumerate() {
        let mut fields = Fields::within(format!("messages[{i}]"), value)?;
        let role_path = fields.path("role");
        let role = fields::string(&role_path, fields.required("role")?, MAX_WORD_LEN)?;
        let content_path = fields.path("content");
        let content = fields.required("content")?;
        fields.finish()?;
        let blocks = read_blocks(&content_path, content)?;
        match role.as_str() {
            "user" => user(blocks, &format!("messages[{i}]"), body)?,
            "assistant" => assistant(blocks, &format!("messages[{i}]"), body)?,
            "system" => system(blocks, &format!("messages[{i}]"), body)?,
            _ => {
                let message = format!("{role_path}: expected user, assistant or system, found {}", shown(&role));
                return Err(ApiError::field(role_path, message));
            }
        }
    }
    Ok(())
}

/// A content block that was read.
enum Block {
    Text(String),
    Thinking(String),
    ToolUse { id: String, name: String, input: Json },
    ToolResult { id: String, content: Json, is_error: bool },
}

/// A block and its path.
type Located = (String, Block);

fn read_blocks(path: &str, value: Json) -> Result<Vec<Located>, ApiError> {
    let values = match value {
        Json::String(text) => return Ok(vec![(path.to_owned(), Block::Text(text))]),
        Json::Array(_) => fields::array(path, value, MAX_BLOCKS)?,
        other => return Err(fields::wrong_type(path, "a string or an array of content blocks", &other)),
    };
    let mut blocks = Vec::new();
    for (i, value) in values.into_iter().enumerate() {
        let path = format!("{path}[{i}]");
        blocks.push((path.clone(), read_block(path, value)?));
    }
    Ok(blocks)
}

fn read_block(path: String, value: Json) -> Result<Block, ApiError> {
    let mut fields = Fields::within(path, value)?;
    let kind_path = fields.path("type");
    let kind = fields::string(&kind_path, fields.required("type")?, MAX_WORD_LEN)?;
    read_cache_control(&mut fields)?;
    let mut text = |name: &str, max_len: usize| {
        let path = fields.path(name);
        fields::string(&path, fields.required(name)?, max_len)
    };
    let block = match kind.as_str() {
        "text" => {
            let text = text("text", usize::MAX)?;
            let has_none = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
            fields.refuse("citations", has_none, "citations are not rendered")?;
            Block::Text(text)
        }
        "thinking" => {
            let thinking = text("thinking", usize::MAX)?;
            // Anthropic's servers check it. Here thoughts come from any model, so there is nothing to check.
            fields.string("signature", usize::MAX)?;
            Block::Thinking(thinking)
        }
        "tool_use" => {
            let (id, name) = (text("id", MAX_WORD_LEN)?, text("name", MAX_WORD_LEN)?);
            let input_path = fields.path("input");
            match fields.required("input")? {
                input @ Json::Object(_) => Block::ToolUse { id, name, input },
                other => return Err(fields::wrong_type(&input_path, "an object", &other)),
            }
        }
        "tool_result" => {
            let id = text("tool_use_id", MAX_WORD_LEN)?;
            let is_error = fields.boolean("is_error")?.unwrap_or(false);
            let content_path = fields.path("content");
            let content = match fields.take("content") {
                None => Json::String(String::new()),
                Some(text @ Json::String(_)) => text,
                Some(value) => Json::Array(read_texts(&content_path, value)?),
            };
            Block::ToolResult { id, content, is_error }
        }
        _ => {
            let expected = "text, thinking, tool_use or tool_result";
            let message = format!("{kind_path}: this server reads {expected}, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
    };
    fields.finish()?;
    Ok(block)
}

/// Reads blocks of text as OpenAI's parts.
fn read_texts(path: &str, value: Json) -> Result<Vec<Json>, ApiError> {
    let mut parts = Vec::new();
    for (path, block) in read_blocks(path, value)? {
        match block {
            Block::Text(text) => parts.push(part(text)),
            _ => return Err(ApiError::field(&path, format!("{path}: expected a block of text"))),
        }
    }
    Ok(parts)
}

/// Checks a mark for caching. Prefixes are cached without marks, at every block of tokens, so a mark changes nothing.
pub(super) fn read_cache_control(fields: &mut Fields) -> Result<(), ApiError> {
    let Some(value) = fields.take("cache_control") else { return Ok(()) };
    let mut control = Fields::within(fields.path("cache_control"), value)?;
    let kind_path = control.path("type");
    let kind = fields::string(&kind_path, control.required("type")?, MAX_WORD_LEN)?;
    if kind != "ephemeral" {
        let message = format!("{kind_path}: expected ephemeral, found {}", shown(&kind));
        return Err(ApiError::field(kind_path, message));
    }
    let ttl_path = control.path("ttl");
    if let Some(ttl) = control.string("ttl", MAX_WORD_LEN)?
        && !["5m", "1h"].contains(&&*ttl)
    {
        return Err(ApiError::field(&ttl_path, format!("{ttl_path}: expected 5m or 1h, found {}", shown(&ttl))));
    }
    control.finish()
}

/// Adds a user's message: results of tools become messages of their own, in their order.
fn user(blocks: Vec<Located>, source: &str, body: &mut ChatBody) -> Result<(), ApiError> {
    for (path, block) in blocks {
        match block {
            Block::Text(text) => add_text("user", text, source, &path, body),
            Block::ToolResult { id, content, is_error } => {
                let content = if is_error { marked_as_error(content)? } else { content };
                let mut result = message("tool", content);
                put(&mut result, "tool_call_id", Json::String(id));
                body.message(result, &path);
                body.part_of_last("tool_call_id", &format!("{path}.tool_use_id"));
            }
            Block::Thinking(_) | Block::ToolUse { .. } => {
                return Err(ApiError::field(&path, format!("{path}: only messages of the assistant have such blocks")));
            }
        }
    }
    Ok(())
}

/// Adds a system message within the conversation, which has text only.
fn system(blocks: Vec<Located>, source: &str, body: &mut ChatBody) -> Result<(), ApiError> {
    for (path, block) in blocks {
        match block {
            Block::Text(text) => add_text("system", text, source, &path, body),
            _ => return Err(ApiError::field(&path, format!("{path}: expected a block of text"))),
        }
    }
    Ok(())
}

/// Adds a message of the assistant: text, thoughts and calls in one message.
fn assistant(blocks: Vec<Located>, source: &str, body: &mut ChatBody) -> Result<(), ApiError> {
    if body.last_role() != Some("assistant") {
        body.message(Json::Object(vec![("role".into(), Json::String("assistant".into()))]), source);
    }
    for (path, block) in blocks {
        match block {
            Block::Text(text) => add_text("assistant", text, source, &path, body),
            Block::Thinking(text) => {
                let Some(last) = body.last_message() else { continue };
                match field_mut(last, "reasoning_content") {
                    Some(Json::String(before)) => append(before, &["\n", &text])?,
                    _ => put(last, "reasoning_content", Json::String(text)),
                }
                body.part_of_last("reasoning_content", &path);
            }
            Block::ToolUse { id, name, input } => add_call(id, name, input, &path, body),
            Block::ToolResult { .. } => {
                return Err(ApiError::field(&path, format!("{path}: only messages of the user have such blocks")));
            }
        }
    }
    Ok(())
}

/// Adds text to the last message if its role is `role`, else a message. The API joins consecutive messages of a role.
fn add_text(role: &str, text: String, source: &str, path: &str, body: &mut ChatBody) {
    if body.last_role() != Some(role) {
        body.message(message(role, Json::Array(Vec::new())), source);
    }
    let Some(last) = body.last_message() else { return };
    if field_mut(last, "content").is_none() {
        put(last, "content", Json::Array(Vec::new()));
    }
    if let Some(Json::Array(parts)) = field_mut(last, "content") {
        parts.push(part(text));
        let name = format!("content[{}]", parts.len() - 1);
        body.part_of_last(&name, path);
    }
}

fn add_call(id: String, name: String, input: Json, path: &str, body: &mut ChatBody) {
    let Some(last) = body.last_message() else { return };
    if field_mut(last, "tool_calls").is_none() {
        put(last, "tool_calls", Json::Array(Vec::new()));
    }
    if let Some(Json::Array(calls)) = field_mut(last, "tool_calls") {
        let arguments = Json::String(input.into_value().to_string());
        let function = Json::Object(vec![("name".into(), Json::String(name)), ("arguments".into(), arguments)]);
        calls.push(Json::Object(vec![
            ("id".into(), Json::String(id)),
            ("type".into(), Json::String("function".into())),
            ("function".into(), function),
        ]));
        let place = format!("tool_calls[{}]", calls.len() - 1);
        body.part_of_last(&place, path);
        body.part_of_last(&format!("{place}.function.name"), &format!("{path}.name"));
        body.part_of_last(&format!("{place}.function.arguments"), &format!("{path}.input"));
    }
}

/// Marks the result of a tool that failed. OpenAI's API has no field for it, so the text says it.
fn marked_as_error(content: Json) -> Result<Json, ApiError> {
    const MARK: &str = "Error: ";
    match content {
        Json::String(text) => {
            let mut marked = String::new();
            append(&mut marked, &[MARK, &text])?;
            Ok(Json::String(marked))
        }
        Json::Array(mut parts) => {
            parts.insert(0, part(MARK.to_owned()));
            Ok(Json::Array(parts))
        }
        other => Ok(other),
    }
}

fn message(role: &str, content: Json) -> Json {
    Json::Object(vec![("role".into(), Json::String(role.into())), ("content".into(), content)])
}

fn part(text: String) -> Json {
    Json::Object(vec![("type".into(), Json::String("text".into())), ("text".into(), Json::String(text))])
}

fn put(object: &mut Json, name: &str, value: Json) {
    if let Json::Object(entries) = object {
        entries.push((name.into(), value));
    }
}

fn field_mut<'a>(object: &'a mut Json, name: &str) -> Option<&'a mut Json> {
    match object {
        Json::Object(entries) => entries.iter_mut().find(|(key, _)| key == name).map(|(_, value)| value),
        _ => None,
    }
}
