//! How a model calls tools: the format of its calls, and the shape of messages with tools that its chat template reads.
//!
//! The format is found in the template's text and in the vocabulary. Templates differ in the shape of calls in earlier
//! messages: some take arguments as an object, others as text, and some fail on a message without content. Each shape
//! is tried on a short conversation, once for each model. A model whose template knows no tools gets a generic format,
//! which a system message describes to it.

use std::borrow::Cow;

use pellucid_grammar::CallFormat;
use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Tokenizer, message};
use serde_json::{Value, json};

use crate::LoadedModel;

/// How one model calls tools.
#[derive(Debug, Clone, Copy)]
pub struct Calling {
    format: &'static CallFormat,
    /// Whether arguments in messages are JSON text instead of objects.
    takes_text: bool,
    /// Content of a message that has calls only.
    no_content: NoContent,
    /// Whether the template accepts a system message.
    has_system: bool,
}

/// Content of a message without any.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NoContent {
    Null,
    Empty,
    Missing,
}

/// Heading of harmony's answers, which a reply with calls has instead of theirs.
const HARMONY_ANSWER: &str = "<|channel|>final<|message|>";

impl Calling {
    /// Reads the template of a model.
    pub fn of(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Calling {
        let Some(template) = template else {
            let format = CallFormat::generic();
            return Calling { format, takes_text: false, no_content: NoContent::Empty, has_system: true };
        };
        let has_token = |text: &str| tokenizer.id_of(text).is_some();
        let format = CallFormat::of_template(template.source(), template.reads("tools"), has_token);
        let has_system = render(template, &[message("system", "s"), message("user", "u")], None)
            .is_some_and(|text| text.contains('s'));
        let usual = Calling { format, takes_text: false, no_content: NoContent::Null, has_system };
        let contents = [NoContent::Null, NoContent::Empty, NoContent::Missing];
        let shape = |takes_text| move |no_content| Calling { takes_text, no_content, ..usual };
        let shapes: Vec<Calling> = contents.map(shape(false)).into_iter().chain(contents.map(shape(true))).collect();
        // A template that drops calls gets a shape with which it does not fail.
        let written = shapes.iter().find(|shape| shape.is_written(template));
        let accepted = || shapes.iter().find(|shape| shape.rendered(template).is_some());
        written.or_else(accepted).copied().unwrap_or(usual)
    }

    /// Returns the format of calls.
    pub fn format(&self) -> &'static CallFormat {
        self.format
    }

    /// Returns the text that precedes an answer where calls are possible, if the format has one.
    pub(crate) fn answer_open(&self) -> Option<&'static str> {
        (self.format.name == "harmony").then_some(HARMONY_ANSWER)
    }

    /// Says how the model calls tools, for the report at loading.
    pub fn description(&self) -> String {
        match self.format.is_generic() {
            true => "generic (its chat template has none), described in a system message".into(),
            false => self.format.name.into(),
        }
    }

    /// Renders a short conversation with a call of this shape; `None` if the template fails on it.
    fn rendered(&self, template: &ChatTemplate) -> Option<String> {
        let tools = json!([{ "type": "function", "function": { "name": "probe", "description": "d", "parameters":
            { "type": "object", "properties": { "key": { "type": "string", "description": "k" } } } } }]);
        let arguments = "{\"key\": \"value\"}";
        let call = json!({ "id": "123456789", "type": "function",
            "function": { "name": "probe", "arguments": arguments } });
        let messages = [
            message("user", "u"),
            json!({ "role": "assistant", "content": null, "tool_calls": [call] }),
            json!({ "role": "tool", "tool_call_id": "123456789", "name": "probe", "content": "result" }),
        ];
        render(template, &self.messages((&messages[..]).into()), Some(&tools))
    }

    /// Whether the template writes calls of this shape as JSON, or in its own syntax.
    fn is_written(&self, template: &ChatTemplate) -> bool {
        self.rendered(template).is_some_and(|text| {
            // Python's form of a dictionary, and text that was encoded twice, are signs of the wrong shape.
            text.contains("value") && !text.contains("'key'") && !text.contains("\\\"key") && !text.contains("None")
        })
    }

    /// Returns messages in the shape that the template reads. Others stay as they are.
    pub(crate) fn messages<'c>(&self, messages: Cow<'c, [Value]>) -> Cow<'c, [Value]> {
        let is_about_tools = |message: &Value| message.get("tool_calls").is_some() || message["role"] == "tool";
        if !messages.iter().any(is_about_tools) {
            return messages;
        }
        if self.format.is_generic() {
            return generic_messages(&messages).into();
        }
        let mut names: Vec<(String, String)> = Vec::new();
        messages.iter().map(|message| self.shaped(message, &mut names)).collect::<Vec<Value>>().into()
    }

    /// Returns one message; `names` are the names of the calls by id.
    fn shaped(&self, message: &Value, names: &mut Vec<(String, String)>) -> Value {
        let mut message = message.clone();
        if let Some(calls) = message.get_mut("tool_calls").and_then(Value::as_array_mut) {
            for call in calls.iter_mut() {
                if let (Some(id), Some(name)) = (call["id"].as_str(), call["function"]["name"].as_str()) {
                    names.push((id.to_owned(), name.to_owned()));
                }
                let Some(arguments) = call.get_mut("function").and_then(|function| function.get_mut("arguments"))
                else {
                    continue;
                };
                match arguments {
                    Value::String(text) if !self.takes_text => {
                        // Text that is no object reaches the template as it is.
                        if let Ok(object @ Value::Object(_)) = serde_json::from_str(text) {
                            *arguments = object;
                        }
                    }
                    Value::Object(_) if self.takes_text => *arguments = Value::String(arguments.to_string()),
                    _ => {}
                }
            }
            let is_empty = |content: &Value| content.is_null() || content.as_str().is_some_and(str::is_empty);
            if message.get("content").is_none_or(is_empty) {
                match (self.no_content, message.as_object_mut()) {
                    (NoContent::Null, _) => message["content"] = Value::Null,
                    (NoContent::Empty, _) => message["content"] = "".into(),
                    (NoContent::Missing, Some(fields)) => drop(fields.shift_remove("content")),
                    (NoContent::Missing, None) => {}
                }
            }
        }
        // Templates of some formats print the name of the tool with its result.
        if message["role"] == "tool" && message.get("name").is_none() {
            let id = message["tool_call_id"].as_str().unwrap_or_default();
            if let Some((_, name)) = names.iter().rev().find(|(other, _)| other == id) {
                message["name"] = name.clone().into();
            }
        }
        message
    }

    /// Returns messages that describe tools to a model whose template does not.
    pub(crate) fn with_tools<'c>(&self, messages: Cow<'c, [Value]>, tools: &Value) -> Cow<'c, [Value]> {
        let text = tools_message(tools);
        let mut messages = messages.into_owned();
        let role = if self.has_system { "system" } else { "user" };
        match messages.iter_mut().find(|message| message["role"] == role) {
            Some(first) => match &mut first["content"] {
                Value::String(content) => *content = format!("{content}\n\n{text}").trim_start().to_owned(),
                Value::Array(parts) => parts.push(json!({ "type": "text", "text": format!("\n\n{text}") })),
                other => *other = text.into(),
            },
            None => messages.insert(0, message(role, &text)),
        }
        messages.into()
    }
}

impl LoadedModel {
    /// Returns how the model calls tools, read from its chat template on first use.
    pub fn calling(&self) -> &Calling {
        self.calling.get_or_init(|| Calling::of(self.template.as_ref(), &self.tokenizer))
    }
}

/// Describes tools and the generic format of calls.
fn tools_message(tools: &Value) -> String {
    let lines: Vec<String> = tools.as_array().into_iter().flatten().map(Value::to_string).collect();
    format!(
        "You can call functions. These are their signatures, one in each line:\n<tools>\n{}\n</tools>\n\n\
         To call a function, write its name and arguments as JSON between tags, and nothing after it:\n\
         <tool_call>\n{{\"name\": \"function name\", \"arguments\": {{\"argument\": \"value\"}}}}\n</tool_call>",
        lines.join("\n")
    )
}

/// Writes calls and results as text, for a template that knows neither.
fn generic_messages(messages: &[Value]) -> Vec<Value> {
    let text_of = |content: &Value| match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect(),
        _ => String::new(),
    };
    let mut written: Vec<Value> = Vec::new();
    let mut was_result = false;
    for source in messages {
        let is_result = source["role"] == "tool";
        if is_result {
            let text = format!("<tool_response>\n{}\n</tool_response>", text_of(&source["content"]));
            match written.last_mut().filter(|_| was_result) {
                // Results of one turn are one message, because many templates require roles to alternate.
                Some(last) => last["content"] = format!("{}\n{text}", text_of(&last["content"])).into(),
                None => written.push(message("user", &text)),
            }
        } else if let Some(calls) = source.get("tool_calls").and_then(Value::as_array) {
            let mut text = text_of(&source["content"]);
            for call in calls {
                let function = &call["function"];
                let arguments = match &function["arguments"] {
                    Value::String(text) => text.clone(),
                    other => other.to_string(),
                };
                let gap = if text.is_empty() { "" } else { "\n" };
                text += &format!(
                    "{gap}<tool_call>\n{{\"name\": {}, \"arguments\": {arguments}}}\n</tool_call>",
                    function["name"]
                );
            }
            let mut copy = source.clone();
            copy["content"] = text.into();
            if let Some(fields) = copy.as_object_mut() {
                fields.shift_remove("tool_calls");
            }
            written.push(copy);
        } else {
            written.push(source.clone());
        }
        was_result = is_result;
    }
    written
}

/// Renders a short conversation; `None` if the template refuses it.
fn render(template: &ChatTemplate, messages: &[Value], tools: Option<&Value>) -> Option<String> {
    let now = DateTime { year: 2026, month: 1, day: 1, hour: 0, minute: 0, second: 0 };
    let conversation =
        Conversation { messages, tools, add_generation_prompt: true, now: Some(now), ..Conversation::default() };
    template.render_unguarded(&conversation).ok()
}
