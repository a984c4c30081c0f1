//! Items of a conversation: messages, calls of functions and their outputs, and thoughts. Clients send them, and the
//! store keeps them in the same form.

use serde_json::{Value, json};

use crate::http::error::ApiError;
use crate::http::fields::{self, Fields, shown};
use crate::http::json::Json;
use crate::http::long_text::append;
use crate::random;

/// Maximum items of one request, and parts of one item.
pub(super) const MAX_ITEMS: usize = 4096;
const MAX_PARTS: usize = 1024;
const MAX_WORD_LEN: usize = 512;

/// An item of a conversation.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Item {
    pub(super) id: String,
    pub(super) content: ItemContent,
}

/// The content of an item, by its type.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum ItemContent {
    Message {
        role: Role,
        texts: Vec<String>,
    },
    Call {
        call_id: String,
        namespace: Option<String>,
        name: String,
        arguments: String,
    },
    CallOutput {
        call_id: String,
        texts: Vec<String>,
    },
    Reasoning {
        text: String,
    },
    /// An item that the store has, by its id.
    Reference,
}

/// The author of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    User,
    Assistant,
    System,
    Developer,
}

impl Role {
    pub(super) fn name(self) -> &'static str {
        match self {
            Role::User => "user",
            Role::Assistant => "assistant",
            Role::System => "system",
            Role::Developer => "developer",
        }
    }
}

impl Item {
    /// Returns the message of a user that a plain text stands for.
    pub(super) fn of_text(text: String) -> Item {
        Item { id: random::id("msg_"), content: ItemContent::Message { role: Role::User, texts: vec![text] } }
    }

    /// Reads the item at `path`.
    pub(super) fn read(path: String, value: Json) -> Result<Item, ApiError> {
        let mut fields = Fields::within(path, value)?;
        let kind_path = fields.path("type");
        let kind = fields.string("type", MAX_WORD_LEN)?;
        let id = fields.string("id", MAX_WORD_LEN)?;
        read_status(&mut fields)?;
        let (content, prefix) = match kind.as_deref() {
            Some("item_reference") => (ItemContent::Reference, ""),
            // OpenAI's API lets references and messages go without a type.
            None if fields.is_empty() && id.is_some() => (ItemContent::Reference, ""),
            None | Some("message") => (read_message(&mut fields)?, "msg_"),
            Some("function_call") => (read_call(&mut fields)?, "fc_"),
            Some("function_call_output") => (read_call_output(&mut fields)?, "fco_"),
            Some("reasoning") => (read_reasoning(&mut fields)?, "rs_"),
            Some(other) => {
                let expected = "message, function_call, function_call_output, reasoning or item_reference";
                let message = format!("{kind_path}: this server reads {expected}, found {}", shown(other));
                return Err(ApiError::field(kind_path, message).code("unsupported_value"));
            }
        };
        let id_path = fields.path("id");
        fields.finish()?;
        match id {
            Some(id) if id.is_empty() => Err(ApiError::field(&id_path, format!("{id_path}: expected an id"))),
            None if content == ItemContent::Reference => {
                Err(ApiError::field(&id_path, format!("{id_path} is missing")).code("missing_required_parameter"))
            }
            id => Ok(Item { id: id.unwrap_or_else(|| random::id(prefix)), content }),
        }
    }

    /// Returns the item as the API shows it and the store keeps it.
    pub(super) fn to_json(&self) -> Value {
        let id = &self.id;
        match &self.content {
            ItemContent::Message { role, texts } => {
                let part = |text: &String| match role {
                    Role::Assistant => json!({ "type": "output_text", "text": text, "annotations": [] }),
                    _ => json!({ "type": "input_text", "text": text }),
                };
                let parts: Vec<Value> = texts.iter().map(part).collect();
                json!({ "id": id, "type": "message", "status": "completed", "role": role.name(), "content": parts })
            }
            ItemContent::Call { call_id, namespace, name, arguments } => {
                let mut item = json!({ "id": id, "type": "function_call", "status": "completed", "call_id": call_id,
                    "name": name, "arguments": arguments });
                if let Some(namespace) = namespace {
                    item["namespace"] = json!(namespace);
                }
                item
            }
            ItemContent::CallOutput { call_id, texts } => {
                let output = match texts.as_slice() {
                    [text] => json!(text),
                    texts => texts.iter().map(|text| json!({ "type": "input_text", "text": text })).collect(),
                };
                json!({ "id": id, "type": "function_call_output", "status": "completed", "call_id": call_id,
                        "output": output })
            }
            ItemContent::Reasoning { text } => {
                json!({ "id": id, "type": "reasoning", "status": "completed", "summary": [],
                        "content": [{ "type": "reasoning_text", "text": text }] })
            }
            ItemContent::Reference => json!({ "id": id, "type": "item_reference" }),
        }
    }
}

/// Checks `status`, which items of earlier responses have and which changes nothing.
fn read_status(fields: &mut Fields) -> Result<(), ApiError> {
    let path = fields.path("status");
    match fields.string("status", MAX_WORD_LEN)?.as_deref() {
        None | Some("in_progress" | "completed" | "incomplete") => Ok(()),
        Some(other) => {
            let message = format!("{path}: expected in_progress, completed or incomplete, found {}", shown(other));
            Err(ApiError::field(path, message))
        }
    }
}

fn required_string(fields: &mut Fields, name: &str, max_len: usize) -> Result<String, ApiError> {
    let path = fields.path(name);
    fields::string(&path, fields.required(name)?, max_len)
}

fn read_message(fields: &mut Fields) -> Result<ItemContent, ApiError> {
    let role_path = fields.path("role");
    let role = match required_string(fields, "role", MAX_WORD_LEN)?.as_str() {
        "user" => Role::User,
        "assistant" => Role::Assistant,
        "system" => Role::System,
        "developer" => Role::Developer,
        other => {
            let message = format!("{role_path}: expected user, assistant, system or developer, found {}", shown(other));
            return Err(ApiError::field(role_path, message));
        }
    };
    // Tells an answer from a remark between calls; no chat template writes it.
    let phase_path = fields.path("phase");
    if let Some(phase) = fields.string("phase", MAX_WORD_LEN)?
        && !["commentary", "final_answer"].contains(&&*phase)
    {
        let message = format!("{phase_path}: expected commentary or final_answer, found {}", shown(&phase));
        return Err(ApiError::field(phase_path, message));
    }
    let path = fields.path("content");
    let content = fields.required("content")?;
    Ok(ItemContent::Message { role, texts: read_texts(&path, content, &["input_text", "output_text"])? })
}

fn read_call(fields: &mut Fields) -> Result<ItemContent, ApiError> {
    let call_id = required_string(fields, "call_id", MAX_WORD_LEN)?;
    let name = required_string(fields, "name", MAX_WORD_LEN)?;
    let arguments = required_string(fields, "arguments", usize::MAX)?;
    let namespace = fields.string("namespace", MAX_WORD_LEN)?;
    refuse_caller(fields)?;
    Ok(ItemContent::Call { call_id, namespace, name, arguments })
}

fn read_call_output(fields: &mut Fields) -> Result<ItemContent, ApiError> {
    let call_id = required_string(fields, "call_id", MAX_WORD_LEN)?;
    let path = fields.path("output");
    let output = fields.required("output")?;
    refuse_caller(fields)?;
    Ok(ItemContent::CallOutput { call_id, texts: read_texts(&path, output, &["input_text"])? })
}

fn refuse_caller(fields: &mut Fields) -> Result<(), ApiError> {
    fields.refuse("caller", |_| false, "this server runs no programs that call functions")
}

fn read_reasoning(fields: &mut Fields) -> Result<ItemContent, ApiError> {
    let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
    fields.refuse("summary", is_empty, "this server writes thoughts whole, into content, and no summaries")?;
    let is_blank = |value: &Json| matches!(value, Json::String(text) if text.is_empty());
    fields.refuse("encrypted_content", is_blank, "this server writes thoughts into content and encrypts nothing")?;
    let path = fields.path("content");
    let texts = match fields.take("content") {
        None => Vec::new(),
        Some(value) => read_texts(&path, value, &["reasoning_text"])?,
    };
    Ok(ItemContent::Reasoning { text: joined(&texts)? })
}

/// Joins the texts of several parts by line ends, as the parts of a chat message are.
fn joined(texts: &[String]) -> Result<String, ApiError> {
    let mut whole = String::new();
    for (i, text) in texts.iter().enumerate() {
        append(&mut whole, &[if i > 0 { "\n" } else { "" }, text])?;
    }
    Ok(whole)
}

/// Reads a text, or parts of text whose types are among `kinds`.
fn read_texts(path: &str, value: Json, kinds: &[&str]) -> Result<Vec<String>, ApiError> {
    let values = match value {
        Json::String(text) => return Ok(vec![text]),
        Json::Array(_) => fields::array(path, value, MAX_PARTS)?,
        other => return Err(fields::wrong_type(path, "a string or an array of parts", &other)),
    };
    let mut texts = Vec::new();
    for (i, value) in values.into_iter().enumerate() {
        let mut fields = Fields::within(format!("{path}[{i}]"), value)?;
        let kind_path = fields.path("type");
        let kind = required_string(&mut fields, "type", MAX_WORD_LEN)?;
        if !kinds.contains(&kind.as_str()) {
            let expected = kinds.join(" or ");
            let message =
                format!("{kind_path}: this server reads text only; expected {expected}, found {}", shown(&kind));
            return Err(ApiError::field(kind_path, message).code("unsupported_value"));
        }
        texts.push(required_string(&mut fields, "text", usize::MAX)?);
        let is_empty = |value: &Json| matches!(value, Json::Array(values) if values.is_empty());
        fields.refuse("annotations", is_empty, "citations are not rendered")?;
        // Output of an earlier response may be sent back with its log probabilities; no prompt holds them.
        if kind == "output_text" {
            fields.array("logprobs", usize::MAX)?;
        }
        fields.finish()?;
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Item, ApiError> {
        Item::read("input[0]".into(), Json::parse(text.as_bytes()).unwrap())
    }

    #[test]
    fn items_read_back_as_they_were_written() {
        let message =
            |role, texts: &[&str]| ItemContent::Message { role, texts: texts.iter().map(|&t| t.into()).collect() };
        let call = |namespace: Option<&str>| ItemContent::Call {
            call_id: "call_1".into(),
            namespace: namespace.map(str::to_owned),
            name: "f".into(),
            arguments: "{\"a\":1}".into(),
        };
        for content in [
            message(Role::User, &["a", "b"]),
            message(Role::Assistant, &["é\""]),
            message(Role::Developer, &[]),
            call(None),
            call(Some("tools")),
            ItemContent::CallOutput { call_id: "call_1".into(), texts: vec!["x".into()] },
            ItemContent::CallOutput { call_id: "call_1".into(), texts: vec!["x".into(), "y".into()] },
            ItemContent::Reasoning { text: "hm\nm".into() },
            ItemContent::Reference,
        ] {
            let item = Item { id: "id_1".into(), content };
            assert_eq!(read(&item.to_json().to_string()), Ok(item));
        }
    }

    #[test]
    fn items_without_a_type_are_messages_or_references() {
        let reference = Item { id: "msg_1".into(), content: ItemContent::Reference };
        assert_eq!(read(r#"{"id":"msg_1"}"#), Ok(reference));
        let item = read(r#"{"role":"user","content":"a"}"#).unwrap();
        assert_eq!(item.content, Item::of_text("a".into()).content);
        assert!(item.id.starts_with("msg_"));
    }

    #[test]
    fn refusals_name_the_field() {
        for (text, param) in [
            (r#"{"type":"web_search_call","id":"a"}"#, "input[0].type"),
            (r#"{"type":"item_reference"}"#, "input[0].id"),
            (r#"{"role":"tool","content":"a"}"#, "input[0].role"),
            (r#"{"role":"user","content":[{"type":"input_image","image_url":"a"}]}"#, "input[0].content[0].type"),
            (r#"{"role":"user","content":[{"type":"input_text","text":"a","x":1}]}"#, "input[0].content[0].x"),
            (r#"{"type":"function_call","call_id":"a","name":"f"}"#, "input[0].arguments"),
            (r#"{"type":"function_call_output","call_id":"a","output":1}"#, "input[0].output"),
            (r#"{"type":"reasoning","summary":[{"type":"summary_text","text":"a"}]}"#, "input[0].summary"),
            (r#"{"type":"reasoning","encrypted_content":"a"}"#, "input[0].encrypted_content"),
            (r#"{"role":"user","content":"a","status":"done"}"#, "input[0].status"),
        ] {
            assert_eq!(read(text).unwrap_err().detail.param.as_deref(), Some(param), "{text}");
        }
    }
}
