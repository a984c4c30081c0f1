//! The messages and replies of a chat, and the file that keeps them.

use pellucid_tokenizer::message;
use serde_json::{Value, json};

/// Instructions, and messages with their replies.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Conversation {
    pub(super) system: Option<String>,
    turns: Vec<Turn>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Turn {
    message: String,
    reply: String,
}

impl Conversation {
    pub(super) fn new(system: Option<String>) -> Conversation {
        Conversation { system, turns: Vec::new() }
    }

    pub(super) fn num_turns(&self) -> usize {
        self.turns.len()
    }

    pub(super) fn add(&mut self, message: String, reply: String) {
        self.turns.push(Turn { message, reply });
    }

    /// Removes the last message with its reply, and returns the message.
    pub(super) fn undo(&mut self) -> Option<String> {
        self.turns.pop().map(|turn| turn.message)
    }

    /// Removes the oldest message with its reply. Returns false if there is none.
    pub(super) fn drop_oldest(&mut self) -> bool {
        let is_any = !self.turns.is_empty();
        self.turns.drain(..usize::from(is_any));
        is_any
    }

    pub(super) fn clear(&mut self) {
        self.turns.clear();
    }

    /// Returns the conversation as messages for a chat template.
    pub(super) fn messages(&self) -> Vec<Value> {
        let system = self.system.iter().map(|text| message("system", text));
        let turns = |turn: &Turn| [message("user", &turn.message), message("assistant", &turn.reply)];
        system.chain(self.turns.iter().flat_map(turns)).collect()
    }

    /// Returns the messages, and one more that is to be answered.
    pub(super) fn messages_and(&self, question: &str) -> Vec<Value> {
        let mut messages = self.messages();
        messages.push(message("user", question));
        messages
    }

    /// Returns the conversation for a file. A request to the API has the same `messages`.
    pub(super) fn to_json(&self, model: &str) -> Value {
        json!({ "model": model, "messages": self.messages() })
    }

    /// Reads the value of a file: an object with `messages`, or the messages alone.
    pub(super) fn from_json(value: &Value) -> Result<Conversation, String> {
        let messages = value.get("messages").unwrap_or(value).as_array();
        let messages = messages.ok_or("expected an object with `messages`, or a list of messages")?;
        let mut conversation = Conversation::default();
        let mut asked: Option<String> = None;
        for (index, message) in messages.iter().enumerate() {
            let (Some(role), Some(content)) = (message["role"].as_str(), message["content"].as_str()) else {
                return Err(format!("messages[{index}]: expected a role and a content that is text"));
            };
            match (role, asked.take()) {
                ("system" | "developer", None) if index == 0 => conversation.system = Some(content.to_owned()),
                ("user", None) => asked = Some(content.to_owned()),
                ("assistant", Some(question)) => conversation.add(question, content.to_owned()),
                _ => return Err(format!("messages[{index}]: expected user and assistant in turn, found {role:?}")),
            }
        }
        match asked {
            Some(_) => Err("the last message has no reply".into()),
            None => Ok(conversation),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Conversation {
        let mut conversation = Conversation::new(Some("Be brief.".into()));
        conversation.add("Hi".into(), "Hello".into());
        conversation.add("Why?".into(), "Because.".into());
        conversation
    }

    #[test]
    fn a_file_brings_the_same_conversation_back() {
        assert_eq!(Conversation::from_json(&sample().to_json("tiny")), Ok(sample()));
        assert_eq!(Conversation::from_json(&sample().messages().into()), Ok(sample()));
    }

    #[test]
    fn a_file_that_is_no_conversation_is_refused_with_the_place() {
        let error = |value: Value| Conversation::from_json(&value).unwrap_err();
        assert!(error(json!({})).starts_with("expected an object with `messages`"));
        assert!(error(json!([{ "role": "user" }])).starts_with("messages[0]: expected a role"));
        assert_eq!(error(json!([message("user", "a")])), "the last message has no reply");
        let twice = json!([message("user", "a"), message("user", "b")]);
        assert_eq!(error(twice), "messages[1]: expected user and assistant in turn, found \"user\"");
    }

    #[test]
    fn turns_are_forgotten_from_either_end() {
        let mut conversation = sample();
        assert_eq!(conversation.undo().as_deref(), Some("Why?"));
        assert_eq!(conversation.messages_and("Who?").len(), 4);
        assert!(conversation.drop_oldest() && !conversation.drop_oldest());
        assert_eq!(conversation.messages(), [message("system", "Be brief.")]);
        assert_eq!(conversation.undo(), None);
    }
}
