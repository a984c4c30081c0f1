//! Items of a response's output: thoughts, a message, calls of functions.

use std::sync::Arc;

use pellucid_generate::{CallDelta, Delta, PartKind, ReplyToken};
use pellucid_tokenizer::Tokenizer;
use serde_json::{Value, json};

use super::store::StoredItem;
use super::tools::Namespaces;
use crate::openai::logprobs::ChatToken;
use crate::random;
use crate::reply::parts::JsonParts;

/// The type of an output item.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum OutputKind {
    Reasoning,
    Message,
    /// A call, with its number in the reply.
    Call {
        index: usize,
        call_id: String,
        namespace: Option<String>,
        name: String,
    },
}

impl OutputKind {
    pub(super) fn of_call(call: &CallDelta, namespaces: &Namespaces) -> OutputKind {
        let call_id = call.id.clone().unwrap_or_default();
        let (namespace, name) = namespaces.split(call.name.clone().unwrap_or_default());
        OutputKind::Call { index: call.index, call_id, namespace, name }
    }
}

/// An item of the output.
#[derive(Debug)]
pub(super) struct OutputItem {
    pub(super) id: String,
    pub(super) kind: OutputKind,
    /// Thoughts, the text of a message, or the arguments of a call.
    pub(super) text: String,
    /// Tokens of a message whose log probabilities are reported.
    pub(super) tokens: Vec<ReplyToken>,
    /// False if the reply ended within the item for lack of tokens.
    pub(super) is_complete: bool,
}

/// The text of an item, shared with the parts of JSON that show it.
pub(super) struct ItemText(pub(super) Arc<OutputItem>);

impl AsRef<str> for ItemText {
    fn as_ref(&self) -> &str {
        &self.0.text
    }
}

impl OutputItem {
    pub(super) fn new(kind: OutputKind) -> OutputItem {
        let prefix = match kind {
            OutputKind::Reasoning => "rs_",
            OutputKind::Message => "msg_",
            OutputKind::Call { .. } => "fc_",
        };
        OutputItem { id: random::id(prefix), kind, text: String::new(), tokens: Vec::new(), is_complete: true }
    }

    /// Returns the items of a whole reply, in the order in which they are streamed. A reply that is complete has a
    /// message or a call, so that clients find an answer.
    pub(super) fn of_reply(delta: Delta, is_complete: bool, namespaces: &Namespaces) -> Vec<OutputItem> {
        let mut items = Vec::new();
        let has_message =
            !delta.text.is_empty() || delta.calls.is_empty() && (is_complete || delta.thoughts.is_empty());
        if !delta.thoughts.is_empty() {
            items.push(OutputItem { text: delta.thoughts, ..OutputItem::new(OutputKind::Reasoning) });
        }
        if has_message {
            let is_shown = |token: &ReplyToken| token.part == PartKind::Answer;
            let tokens = delta.tokens.into_iter().filter(is_shown).collect();
            items.push(OutputItem { text: delta.text, tokens, ..OutputItem::new(OutputKind::Message) });
        }
        for call in delta.calls {
            let kind = OutputKind::of_call(&call, namespaces);
            items.push(OutputItem { text: call.arguments, ..OutputItem::new(kind) });
        }
        items
    }

    fn status(&self) -> &'static str {
        if self.is_complete { "completed" } else { "incomplete" }
    }

    /// Returns the item as it is announced before its first piece.
    pub(super) fn announced(&self) -> Value {
        let id = &self.id;
        match &self.kind {
            OutputKind::Reasoning => {
                json!({ "id": id, "type": "reasoning", "status": "in_progress", "summary": [], "content": [] })
            }
            OutputKind::Message => {
                json!({ "id": id, "type": "message", "status": "in_progress", "role": "assistant", "content": [] })
            }
            OutputKind::Call { call_id, namespace, name, .. } => {
                let mut item = json!({ "id": id, "type": "function_call", "status": "in_progress", "call_id": call_id,
                    "name": name, "arguments": "" });
                if let Some(namespace) = namespace {
                    item["namespace"] = json!(namespace);
                }
                item
            }
        }
    }

    /// Returns the content part of the item before its first piece; calls have none.
    pub(super) fn announced_part(&self) -> Option<Value> {
        match &self.kind {
            OutputKind::Reasoning => Some(json!({ "type": "reasoning_text", "text": "" })),
            OutputKind::Message => {
                Some(json!({ "type": "output_text", "text": "", "annotations": [], "logprobs": [] }))
            }
            OutputKind::Call { .. } => None,
        }
    }
}

/// Adds the JSON of an item. Log probabilities are written if there is a tokenizer for their texts.
pub(super) fn write_item(item: &Arc<OutputItem>, tokenizer: Option<&Arc<Tokenizer>>, parts: &mut JsonParts) {
    let (id, status) = (Value::from(item.id.as_str()), item.status());
    match &item.kind {
        OutputKind::Reasoning => {
            parts.literal(&format!(
                "{{\"id\":{id},\"type\":\"reasoning\",\"status\":\"{status}\",\"summary\":[],\"content\":["
            ));
            write_part(item, tokenizer, parts);
            parts.literal("]}");
        }
        OutputKind::Message => {
            parts.literal(&format!(
                "{{\"id\":{id},\"type\":\"message\",\"status\":\"{status}\",\"role\":\"assistant\",\"content\":["
            ));
            write_part(item, tokenizer, parts);
            parts.literal("]}");
        }
        OutputKind::Call { call_id, namespace, name, .. } => {
            parts.literal(&format!("{{\"id\":{id},\"type\":\"function_call\",\"status\":\"{status}\",\"call_id\":"));
            parts.value(call_id);
            if let Some(namespace) = namespace {
                parts.literal(",\"namespace\":");
                parts.value(namespace);
            }
            parts.literal(",\"name\":");
            parts.value(name);
            parts.literal(",\"arguments\":\"");
            parts.text(ItemText(item.clone()));
            parts.literal("\"}");
        }
    }
}

/// Adds the JSON of the content part of a message or of thoughts.
pub(super) fn write_part(item: &Arc<OutputItem>, tokenizer: Option<&Arc<Tokenizer>>, parts: &mut JsonParts) {
    let is_message = item.kind == OutputKind::Message;
    parts.literal(if is_message {
        "{\"type\":\"output_text\",\"text\":\""
    } else {
        "{\"type\":\"reasoning_text\",\"text\":\""
    });
    parts.text(ItemText(item.clone()));
    parts.literal("\"");
    if is_message {
        parts.literal(",\"annotations\":[],\"logprobs\":[");
        write_logprobs(item, tokenizer, parts);
        parts.literal("]");
    }
    parts.literal("}");
}

/// Adds the log probabilities of a message, without brackets.
pub(super) fn write_logprobs(item: &Arc<OutputItem>, tokenizer: Option<&Arc<Tokenizer>>, parts: &mut JsonParts) {
    let Some(tokenizer) = tokenizer else { return };
    let (item, tokenizer) = (item.clone(), tokenizer.clone());
    let mut index = 0;
    let next = move || loop {
        let shown = ChatToken::new(item.tokens.get(index)?, &tokenizer);
        index += 1;
        if shown.is_some() {
            return shown;
        }
    };
    parts.list(std::iter::from_fn(next), |token, out| out.json(&token));
}

/// Returns an item for the store, without log probabilities. `None` if there is no memory for it.
pub(super) fn to_stored(item: &Arc<OutputItem>) -> Option<StoredItem> {
    let mut parts = JsonParts::default();
    write_item(item, None, &mut parts);
    Some(StoredItem { id: item.id.clone(), json: parts.into_text().ok()? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_written_as_documented() {
        let call =
            CallDelta { index: 0, id: Some("call_1".into()), name: Some("f".into()), arguments: "{\"a\":1}".into() };
        let delta = Delta { thoughts: "hm".into(), text: "é\"\n".into(), calls: vec![call], ..Delta::default() };
        let shown: Vec<Value> = OutputItem::of_reply(delta, true, &Namespaces::default())
            .into_iter()
            .map(|item| serde_json::from_str(&to_stored(&Arc::new(item)).unwrap().json).unwrap())
            .collect();
        let ids: Vec<&str> = shown.iter().map(|item| item["id"].as_str().unwrap()).collect();
        let expected = json!([
            { "id": ids[0], "type": "reasoning", "status": "completed", "summary": [],
              "content": [{ "type": "reasoning_text", "text": "hm" }] },
            { "id": ids[1], "type": "message", "status": "completed", "role": "assistant",
              "content": [{ "type": "output_text", "text": "é\"\n", "annotations": [], "logprobs": [] }] },
            { "id": ids[2], "type": "function_call", "status": "completed", "call_id": "call_1", "name": "f",
              "arguments": "{\"a\":1}" },
        ]);
        assert_eq!(Value::Array(shown.clone()), expected);
        let prefixes = ["rs_", "msg_", "fc_"];
        assert!(ids.iter().zip(prefixes).all(|(id, prefix)| id.starts_with(prefix)), "{ids:?}");
        // An empty reply is an empty message.
        let kinds = |thoughts: &str, is_complete| -> Vec<OutputKind> {
            let delta = Delta { thoughts: thoughts.into(), ..Delta::default() };
            OutputItem::of_reply(delta, is_complete, &Namespaces::default()).into_iter().map(|item| item.kind).collect()
        };
        assert_eq!(kinds("", true), [OutputKind::Message]);
        assert_eq!(kinds("", false), [OutputKind::Message]);
        assert_eq!(kinds("hm", true), [OutputKind::Reasoning, OutputKind::Message]);
        assert_eq!(kinds("hm", false), [OutputKind::Reasoning]);
    }
}
