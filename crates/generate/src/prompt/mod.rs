//! Messages and text to token ids. This is the only place that renders chat templates for prompts.
//!
//! Text of messages can never become a control token: the template renders to segments, and only segments that the
//! template itself wrote may contain one.

mod fill_in;

use std::borrow::Cow;
use std::sync::atomic::AtomicBool;

use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, MemoryGrant, ROLES, RenderLimits, Segment, Tokenizer};
use serde_json::{Map, Value};

use crate::{Calling, Error};

pub use fill_in::FillInTokens;

/// Variables that [`PromptEncoder::render`] sets itself.
const RESERVED_VARIABLES: [&str; 5] = ["messages", "tools", "documents", "add_generation_prompt", "strftime_now"];

/// Characters of [`EncodedChat::ending`], more than any marker has.
const MAX_ENDING: usize = 128;

/// Makes the token ids of prompts.
#[derive(Debug, Clone, Copy)]
pub struct PromptEncoder<'m> {
    tokenizer: &'m Tokenizer,
    template: Option<&'m ChatTemplate>,
    now: fn() -> DateTime,
    max_tokens: Option<usize>,
    cancel: Option<&'m AtomicBool>,
    grant: Option<&'m MemoryGrant>,
    calling: Option<Calling>,
}

/// The end of a conversation's prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum PromptEnd {
    /// The beginning of an assistant's message, which the reply is.
    #[default]
    Reply,
    /// The last message and what ends it.
    Closed,
    /// The last message without what ends it: the reply continues its text.
    Open,
}

/// A conversation to render.
#[derive(Debug, Clone, Copy)]
pub struct ChatPrompt<'c> {
    /// Objects with `role` and `content`, as [`pellucid_tokenizer::message`] makes them.
    pub messages: &'c [Value],
    /// The end of the prompt, behind the last message.
    pub end: PromptEnd,
    /// Further variables of the template, such as `enable_thinking`.
    pub variables: Option<&'c Map<String, Value>>,
    /// Tools that the model may call, as [`ReplyPlan::tools`](crate::ReplyPlan::tools) returns them.
    pub tools: Option<&'c Value>,
}

/// A conversation as ids.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct EncodedChat {
    /// The token ids.
    pub ids: Vec<u32>,
    /// The end of the text, as far as the template wrote it. It may hold a marker that the reply continues.
    pub ending: String,
}

impl<'c> ChatPrompt<'c> {
    /// Returns a conversation that the model is to answer.
    pub fn new(messages: &'c [Value]) -> ChatPrompt<'c> {
        ChatPrompt { messages, end: PromptEnd::Reply, variables: None, tools: None }
    }
}

impl<'m> PromptEncoder<'m> {
    /// Returns an encoder without a length limit.
    pub fn new(
        tokenizer: &'m Tokenizer,
        template: Option<&'m ChatTemplate>,
        now: fn() -> DateTime,
    ) -> PromptEncoder<'m> {
        PromptEncoder { tokenizer, template, now, max_tokens: None, cancel: None, grant: None, calling: None }
    }

    /// Makes the encoder refuse text that cannot fit into `context_len` tokens before it encodes it: encoding a very
    /// long text takes long.
    pub fn within(self, context_len: usize) -> PromptEncoder<'m> {
        PromptEncoder { max_tokens: Some(context_len), ..self }
    }

    /// Makes rendering a template end with [`pellucid_tokenizer::Error::Cancelled`] once the flag is set.
    pub fn cancelled_by(self, cancel: &'m AtomicBool) -> PromptEncoder<'m> {
        PromptEncoder { cancel: Some(cancel), ..self }
    }

    /// Makes rendering a template ask for memory; [`Error::OutOfMemory`] ends it when the memory is refused.
    pub fn granted_by(self, grant: &'m MemoryGrant) -> PromptEncoder<'m> {
        PromptEncoder { grant: Some(grant), ..self }
    }

    /// Makes the encoder write calls and tools in the shape that the model's template reads.
    pub fn with_calling(self, calling: Calling) -> PromptEncoder<'m> {
        PromptEncoder { calling: Some(calling), ..self }
    }

    /// Returns the ids of a conversation. The template writes the model's first token itself.
    pub fn encode_chat(&self, prompt: &ChatPrompt<'_>) -> Result<Vec<u32>, Error> {
        Ok(self.encode_with_ending(prompt)?.ids)
    }

    /// Returns the ids of a conversation with the end of its text.
    pub fn encode_with_ending(&self, prompt: &ChatPrompt<'_>) -> Result<EncodedChat, Error> {
        // Templates print the contents, so contents that cannot fit are refused before they are rendered.
        self.check_length(prompt.messages.iter().map(|message| text_bytes(&message["content"])).sum())?;
        let segments = self.render(prompt)?;
        let num_bytes = segments.iter().map(|segment| segment.text.len()).sum();
        self.check_length(num_bytes)?;
        Ok(EncodedChat { ids: self.tokenizer.try_encode_segments(&segments)?, ending: ending(&segments) })
    }

    /// Returns the ids of a text to continue, after the ids that the model expects before every text.
    pub fn encode_text(&self, text: &str) -> Result<Vec<u32>, Error> {
        self.check_length(text.len())?;
        let (prefix, mut ids) = (self.tokenizer.prefix(), self.tokenizer.try_encode(text)?);
        ids.try_reserve(prefix.len()).map_err(|_| Error::OutOfMemory)?;
        ids.splice(..0, prefix.iter().copied());
        Ok(ids)
    }

    /// Returns a conversation as the template writes it.
    pub fn render(&self, prompt: &ChatPrompt<'_>) -> Result<Vec<Segment>, Error> {
        let template = self.template.ok_or(Error::NoChatTemplate)?;
        let mut messages = with_known_roles(prompt.messages, template)?;
        let mut tools = prompt.tools;
        if let Some(calling) = &self.calling {
            messages = calling.messages(messages);
            if let Some(shown) = tools.take_if(|_| calling.format().is_generic()) {
                messages = calling.with_tools(messages, shown);
            }
        }
        let conversation = Conversation {
            messages: &messages,
            tools,
            add_generation_prompt: prompt.end == PromptEnd::Reply,
            extra: prompt.variables,
            now: Some((self.now)()),
        };
        let usual = RenderLimits::for_size(conversation.num_bytes());
        let limits = RenderLimits { cancel: self.cancel, grant: self.grant, ..usual };
        let segments = template.render_within(&conversation, limits)?;
        match prompt.end {
            PromptEnd::Reply | PromptEnd::Closed => Ok(segments),
            PromptEnd::Open => opened(segments, prompt.messages.last()),
        }
    }

    /// Returns the ids of a prompt whose reply belongs between two texts.
    pub fn encode_fill_in(&self, before: &str, after: &str) -> Result<Vec<u32>, Error> {
        self.check_length(before.len() + after.len())?;
        FillInTokens::of(self.tokenizer).ok_or(Error::NoFillIn)?.encode(before, after, self.tokenizer)
    }

    /// Whether the template reads a variable of this name that callers may set.
    pub fn accepts_variable(&self, name: &str) -> bool {
        let is_reserved = name.is_empty() || name.ends_with("_token") || RESERVED_VARIABLES.contains(&name);
        !is_reserved && self.template.is_some_and(|template| template.reads(name))
    }

    /// Returns the variables of the template that callers may set, sorted.
    pub fn variables(&self) -> Vec<&str> {
        let read = self.template.into_iter().flat_map(ChatTemplate::variables);
        let mut variables: Vec<&str> = read.filter(|name| self.accepts_variable(name)).collect();
        variables.sort_unstable();
        variables
    }

    /// Returns the first message whose `name` does not reach the prompt, because the template does not write names of
    /// messages of its role. The conversation is rendered once more for each role that has names. Results of tools are
    /// left out: their name is known from the call that they answer.
    pub fn unwritten_name(&self, prompt: &ChatPrompt<'_>) -> Result<Option<usize>, Error> {
        let is_named = |message: &Value, role: &str| message.get("name").is_some() && message["role"] == role;
        let mut written = None;
        let mut unwritten: Option<usize> = None;
        for &role in ROLES.iter().filter(|role| **role != "tool") {
            let Some(first) = prompt.messages.iter().position(|message| is_named(message, role)) else { continue };
            let written = match &written {
                Some(segments) => segments,
                None => written.insert(self.render(prompt)?),
            };
            let mut nameless = prompt.messages.to_vec();
            for message in nameless.iter_mut().filter(|message| is_named(message, role)) {
                message.as_object_mut().map(|fields| fields.remove("name"));
            }
            if self.render(&ChatPrompt { messages: &nameless, ..*prompt })? == *written {
                unwritten = Some(unwritten.map_or(first, |other| other.min(first)));
            }
        }
        Ok(unwritten)
    }

    fn check_length(&self, num_bytes: usize) -> Result<(), Error> {
        let at_least = self.tokenizer.min_ids(num_bytes);
        match self.max_tokens {
            Some(context_len) if at_least >= context_len => Err(Error::PromptTooLong { at_least, context_len }),
            _ => Ok(()),
        }
    }
}

/// Returns the last characters of the text that the template wrote behind the last message.
fn ending(segments: &[Segment]) -> String {
    let first = segments.iter().rposition(|segment| !segment.trusted).map_or(0, |last| last + 1);
    let text: String = segments[first..].iter().map(|segment| segment.text.as_str()).collect();
    let skipped = text.chars().count().saturating_sub(MAX_ENDING);
    text.chars().skip(skipped).collect()
}

/// Removes what a template writes behind the text of the last message. Templates may trim the text.
fn opened(mut segments: Vec<Segment>, last: Option<&Value>) -> Result<Vec<Segment>, Error> {
    while segments.last().is_some_and(|segment| segment.trusted) {
        segments.pop();
    }
    let text = last.and_then(|message| message["content"].as_str()).unwrap_or_default().trim_end();
    match segments.last_mut() {
        Some(segment) if !text.is_empty() && segment.text.trim_end().ends_with(text) => Ok(segments),
        _ => Err(Error::LastMessageChanged),
    }
}

/// Returns the bytes of a message's content: a text, or parts with texts.
fn text_bytes(content: &Value) -> usize {
    match content {
        Value::String(text) => text.len(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).map(str::len).sum(),
        _ => 0,
    }
}

/// Makes developer messages system messages where the template has no role `developer`.
fn with_known_roles<'c>(messages: &'c [Value], template: &ChatTemplate) -> Result<Cow<'c, [Value]>, Error> {
    let is_developer = |message: &Value| message["role"] == "developer";
    if template.quotes("developer") || !messages.iter().any(is_developer) {
        return Ok(messages.into());
    }
    let mut renamed = Vec::new();
    renamed.try_reserve_exact(messages.len()).map_err(|_| Error::OutOfMemory)?;
    for message in messages {
        let mut copy = copy_of(message)?;
        if is_developer(message) {
            copy["role"] = "system".into();
        }
        renamed.push(copy);
    }
    Ok(renamed.into())
}

/// Returns a copy of a JSON value. Its texts and lists may be as large as a request, so there may be no memory for
/// them.
fn copy_of(value: &Value) -> Result<Value, Error> {
    Ok(match value {
        Value::String(text) => {
            let mut copy = String::new();
            copy.try_reserve_exact(text.len()).map_err(|_| Error::OutOfMemory)?;
            copy.push_str(text);
            Value::String(copy)
        }
        Value::Array(values) => {
            let mut copies = Vec::new();
            copies.try_reserve_exact(values.len()).map_err(|_| Error::OutOfMemory)?;
            for value in values {
                copies.push(copy_of(value)?);
            }
            Value::Array(copies)
        }
        Value::Object(entries) => {
            let mut copies = Map::new();
            for (name, value) in entries {
                copies.insert(name.clone(), copy_of(value)?);
            }
            Value::Object(copies)
        }
        small => small.clone(),
    })
}
