//! Chat templates: they render a conversation to the text that the model was trained on, as segments with their origin.
//!
//! The template is the model's own Jinja source, run by [`jinja`] with the settings and functions of the reference
//! implementation. It cannot read files or the environment and has no clock. Its work, its memory and its depth are
//! bounded, and every character of its output has an origin: text that the template wrote literally is trusted, text
//! from the request is not.

mod date_time;
mod jinja;
mod segment;

use std::fmt;

use serde_json::{Map, Value};

use crate::error::Error;
use crate::tokenizer::Tokenizer;

pub use date_time::DateTime;
pub use jinja::{MemoryGrant, RenderLimits};
pub use segment::Segment;

/// The roles of messages. Templates write roles into the prompt as trusted text, so no other value is accepted.
pub const ROLES: &[&str] = &["system", "developer", "user", "assistant", "tool", "function"];

/// The variables that a template is rendered with.
#[derive(Debug, Clone, Default)]
pub struct Conversation<'c> {
    /// Objects with a `role` of [`ROLES`], a `content`, and whatever else the template reads (`name`, `tool_calls`).
    pub messages: &'c [Value],
    /// Tool descriptions, as the OpenAI API has them.
    pub tools: Option<&'c Value>,
    /// Whether the text ends with the beginning of a reply.
    pub add_generation_prompt: bool,
    /// Further variables, such as `enable_thinking`. Their text is untrusted like that of messages.
    pub extra: Option<&'c Map<String, Value>>,
    /// The date for `strftime_now`. Without it, a template that calls `strftime_now` fails: this crate has no clock.
    pub now: Option<DateTime>,
}

/// Returns a message with a text as its content.
pub fn message(role: &str, content: &str) -> Value {
    serde_json::json!({ "role": role, "content": content })
}

/// A compiled chat template.
pub struct ChatTemplate {
    template: jinja::Template,
    /// `bos_token`, `eos_token` and others, with their pieces.
    tokens: Vec<(&'static str, String)>,
    source: String,
}

impl fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ChatTemplate({} bytes)", self.source.len())
    }
}

impl ChatTemplate {
    /// Compiles a template for this tokenizer. For a template that is not the model's own, call [`Tokenizer::guard`]
    /// first.
    pub fn compile(source: &str, tokenizer: &Tokenizer) -> Result<ChatTemplate, Error> {
        let template = jinja::Template::compile(source)?;
        let piece = |id: Option<u32>| id.and_then(|id| tokenizer.token(id)).map(|token| token.piece.to_owned());
        let tokens = [
            ("bos_token", tokenizer.bos()),
            ("eos_token", tokenizer.eos()),
            ("unk_token", tokenizer.unknown()),
            ("pad_token", tokenizer.padding()),
        ];
        let tokens = tokens.into_iter().filter_map(|(name, id)| piece(id).map(|piece| (name, piece))).collect();
        Ok(ChatTemplate { template, tokens, source: source.to_owned() })
    }

    /// Returns the template's text.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether the template reads a variable of this name without setting it.
    pub fn reads(&self, variable: &str) -> bool {
        self.template.reads(variable)
    }

    /// Returns the variables that the template reads without setting them, in no order.
    pub fn variables(&self) -> impl Iterator<Item = &str> {
        self.template.variables()
    }

    /// Whether the template's source contains this text in quotes. A template that never quotes a role does not treat
    /// it specially.
    pub fn quotes(&self, text: &str) -> bool {
        ['\'', '"'].iter().any(|quote| self.source.contains(&format!("{quote}{text}{quote}")))
    }

    /// Whether a rendering so far took more work than the length of its conversation explains.
    pub fn is_costly(&self) -> bool {
        self.template.is_costly()
    }

    /// Renders a conversation within the usual limits for its size; see [`ChatTemplate::render_within`].
    pub fn render(&self, conversation: &Conversation<'_>) -> Result<Vec<Segment>, Error> {
        self.render_within(conversation, RenderLimits::for_size(conversation.num_bytes()))
    }

    /// Renders a conversation. The joined text of all segments equals that of the reference implementation. Text from
    /// messages, tools and extra variables is untrusted, all other text is trusted. Nothing is prepended: a template
    /// writes the beginning-of-sequence token itself.
    pub fn render_within(
        &self,
        conversation: &Conversation<'_>,
        limits: RenderLimits<'_>,
    ) -> Result<Vec<Segment>, Error> {
        check_roles(conversation.messages)?;
        self.template.render(conversation, &self.tokens, limits)
    }

    /// Renders the text of the reference implementation, without origins. Encoded as trusted text, it would let message
    /// text become control tokens; use it for display and tests only.
    pub fn render_unguarded(&self, conversation: &Conversation<'_>) -> Result<String, Error> {
        Ok(self.render(conversation)?.into_iter().map(|segment| segment.text).collect())
    }
}

impl Conversation<'_> {
    /// Returns the bytes of text in the messages, tools and extra variables.
    pub fn num_bytes(&self) -> usize {
        let messages: usize = self.messages.iter().map(num_bytes).sum();
        let extra = self.extra.into_iter().flatten().map(|(name, value)| name.len() + num_bytes(value)).sum::<usize>();
        messages + self.tools.map_or(0, num_bytes) + extra
    }
}

fn num_bytes(value: &Value) -> usize {
    match value {
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(num_bytes).sum::<usize>() + items.len(),
        Value::Object(fields) => fields.iter().map(|(name, value)| name.len() + num_bytes(value) + 1).sum(),
        _ => 8,
    }
}

fn check_roles(messages: &[Value]) -> Result<(), Error> {
    for (index, message) in messages.iter().enumerate() {
        let role = message["role"].as_str().unwrap_or_default();
        if !ROLES.contains(&role) {
            return Err(Error::UnknownRole { index, role: role.chars().take(40).collect(), allowed: ROLES });
        }
    }
    Ok(())
}
