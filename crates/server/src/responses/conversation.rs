//! Items become the messages of a chat request: thoughts, text and calls of one answer become one message of the
//! assistant, as chat templates expect them.

use super::items::{Item, ItemContent, Role};
use super::tools::Namespaces;
use crate::http::error::ApiError;
use crate::http::json::Json;
use crate::translation::ChatBody;

/// Adds items to the messages of a chat request.
#[derive(Debug, Default)]
pub(super) struct Conversation {
    pub(super) body: ChatBody,
    /// Path of the thoughts that the next item of the assistant belongs to.
    dangling: Option<String>,
}

impl Conversation {
    /// Adds `instructions`, which precede all items.
    pub(super) fn add_instructions(&mut self, text: String) {
        self.body.message(message("system", Json::String(text)), "instructions");
        self.body.part_of_last("content", "instructions");
    }

    /// Adds an item that the client sent at `path`.
    pub(super) fn add(&mut self, item: Item, path: &str) -> Result<(), ApiError> {
        let is_assistant = match &item.content {
            ItemContent::Message { role, .. } => *role == Role::Assistant,
            ItemContent::Call { .. } => true,
            _ => false,
        };
        if is_assistant {
            self.dangling = None;
        } else {
            self.check_dangling()?;
        }
        match item.content {
            ItemContent::Message { role: Role::Assistant, texts } => {
                self.open_assistant(&["content", "tool_calls"], path);
                self.put("content", texts_json(texts), &format!("{path}.content"));
            }
            ItemContent::Message { role, texts } => {
                self.body.message(message(role.name(), texts_json(texts)), path);
            }
            ItemContent::Reasoning { text } if text.is_empty() => {}
            ItemContent::Reasoning { text } => {
                self.open_assistant(&["content", "tool_calls", "reasoning_content"], path);
                self.put("reasoning_content", Json::String(text), &format!("{path}.content"));
                self.dangling = Some(path.to_owned());
            }
            ItemContent::Call { call_id, namespace, name, arguments } => {
                self.add_call(call_id, Namespaces::join(namespace.as_deref(), &name), arguments, path);
            }
            ItemContent::CallOutput { call_id, texts } => {
                let mut result = message("tool", texts_json(texts));
                if let Json::Object(entries) = &mut result {
                    entries.push(("tool_call_id".into(), Json::String(call_id)));
                }
                self.body.message(result, path);
                self.body.part_of_last("tool_call_id", &format!("{path}.call_id"));
                self.body.part_of_last("content", &format!("{path}.output"));
            }
            // The caller has resolved references.
            ItemContent::Reference => {}
        }
        Ok(())
    }

    /// Returns the request after its last item.
    pub(super) fn finish(self) -> Result<ChatBody, ApiError> {
        self.check_dangling()?;
        Ok(self.body)
    }

    /// Refuses thoughts without the answer or call that they led to: no chat template has a place for them.
    fn check_dangling(&self) -> Result<(), ApiError> {
        let Some(path) = &self.dangling else { return Ok(()) };
        let message =
            format!("{path}: a reasoning item must be followed by the message or the function_call that it led to");
        Err(ApiError::field(path, message))
    }

    /// Begins a message of the assistant, unless the last message is one and has none of the fields `ending`.
    fn open_assistant(&mut self, ending: &[&str], path: &str) {
        let ends = |(name, _): &(String, Json)| ending.contains(&name.as_str());
        let is_open = self.body.last_role() == Some("assistant")
            && matches!(self.body.last_message(), Some(Json::Object(entries)) if !entries.iter().any(ends));
        if !is_open {
            self.body.message(Json::Object(vec![("role".into(), Json::String("assistant".into()))]), path);
        }
    }

    /// Sets a field of the last message, which the client sent at `path`.
    fn put(&mut self, name: &str, value: Json, path: &str) {
        if let Some(Json::Object(entries)) = self.body.last_message() {
            entries.push((name.into(), value));
        }
        self.body.part_of_last(name, path);
    }

    fn add_call(&mut self, call_id: String, name: String, arguments: String, path: &str) {
        self.open_assistant(&[], path);
        let Some(Json::Object(entries)) = self.body.last_message() else { return };
        if !entries.iter().any(|(name, _)| name == "tool_calls") {
            entries.push(("tool_calls".into(), Json::Array(Vec::new())));
        }
        let calls = entries.iter_mut().find(|(name, _)| name == "tool_calls");
        let Some((_, Json::Array(calls))) = calls else { return };
        let function = vec![("name".into(), Json::String(name)), ("arguments".into(), Json::String(arguments))];
        calls.push(Json::Object(vec![
            ("id".into(), Json::String(call_id)),
            ("type".into(), Json::String("function".into())),
            ("function".into(), Json::Object(function)),
        ]));
        let place = format!("tool_calls[{}]", calls.len() - 1);
        self.body.part_of_last(&place, path);
        self.body.part_of_last(&format!("{place}.id"), &format!("{path}.call_id"));
        self.body.part_of_last(&format!("{place}.function"), path);
    }
}

fn message(role: &str, content: Json) -> Json {
    Json::Object(vec![("role".into(), Json::String(role.into())), ("content".into(), content)])
}

/// Returns texts as the content of a chat message. One text stays plain, so that it is not joined to others.
fn texts_json(mut texts: Vec<String>) -> Json {
    if texts.len() == 1 {
        return Json::String(texts.remove(0));
    }
    let part =
        |text| Json::Object(vec![("type".into(), Json::String("text".into())), ("text".into(), Json::String(text))]);
    Json::Array(texts.into_iter().map(part).collect())
}
