//! The text of a prompt, as guards see it.

use std::sync::Arc;

use pellucid_engine::{Request, Scope};
use pellucid_tokenizer::Tokenizer;
use serde_json::Value;

/// A prompt as the model reads it, and the conversation that it was made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PromptText {
    /// Tenant and salt of the request. A guard that keeps something of a text must keep it apart for each scope.
    pub scope: Scope,
    /// Text of all tokens, without control tokens: messages, tools and what the chat template wrote between them.
    pub text: String,
    /// The messages. A prompt that is no conversation is one message of the user.
    pub turns: Vec<Turn>,
    /// The header `traceparent` of the request, for guards that call another service.
    pub traceparent: Option<Arc<str>>,
}

/// A message of a conversation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Turn {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// Its content; calls and thoughts of the assistant follow as text.
    pub text: String,
}

impl Turn {
    /// Returns the turns of messages with `role` and `content`, as chat templates read them.
    pub fn of_messages(messages: &[Value]) -> Vec<Turn> {
        messages.iter().map(Turn::of_message).collect()
    }

    fn of_message(message: &Value) -> Turn {
        let mut texts = Vec::new();
        texts.extend(message["reasoning_content"].as_str());
        match &message["content"] {
            Value::String(text) => texts.push(text),
            Value::Array(parts) => texts.extend(parts.iter().filter_map(|part| part["text"].as_str())),
            _ => {}
        }
        let calls: Vec<String> = message["tool_calls"].as_array().into_iter().flatten().map(call_text).collect();
        texts.extend(calls.iter().map(String::as_str));
        Turn { role: message["role"].as_str().unwrap_or("user").to_owned(), text: texts.join("\n") }
    }
}

/// Returns name and arguments of a call. Templates take arguments as an object, clients send them as a string.
fn call_text(call: &Value) -> String {
    let function = &call["function"];
    let arguments = match &function["arguments"] {
        Value::String(text) => text.clone(),
        Value::Null => String::new(),
        other => other.to_string(),
    };
    format!("{} {arguments}", function["name"].as_str().unwrap_or_default())
}

impl PromptText {
    /// Returns the text of a prompt. Without `turns`, the whole text is one turn of the user.
    pub(crate) fn new(request: &Request, turns: Vec<Turn>, tokenizer: &Tokenizer) -> Result<PromptText, crate::Error> {
        let text = tokenizer.try_decode(&request.prompt, true)?;
        let turns = if turns.is_empty() { vec![Turn { role: "user".into(), text: text.clone() }] } else { turns };
        Ok(PromptText { scope: request.scope, text, turns, traceparent: None })
    }

    /// Drops the texts, for guards that need no prompt to judge a reply.
    pub(super) fn without_text(self) -> PromptText {
        PromptText { text: String::new(), turns: Vec::new(), ..self }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn turns_hold_every_text_of_a_message() {
        let messages = [
            json!({ "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] }),
            json!({ "role": "assistant", "content": null, "reasoning_content": "why",
                    "tool_calls": [{ "function": { "name": "f", "arguments": { "x": 1 } } },
                                   { "function": { "name": "g", "arguments": "{}" } }] }),
        ];
        let turns = Turn::of_messages(&messages);
        assert_eq!(turns[0], Turn { role: "user".into(), text: "a\nb".into() });
        assert_eq!(turns[1], Turn { role: "assistant".into(), text: "why\nf {\"x\":1}\ng {}".into() });
    }
}
