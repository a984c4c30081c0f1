//! The formats of thoughts that are known, and how the format of a model is found in its chat template.
//!
//! A format is recognized by its markers in the template's text. A template that builds its markers from parts, or that
//! has markers which are in no row of the table, is rendered with a thought, and the markers are read from the result.
//! A model without either may still have tokens for markers.

use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Tokenizer};
use serde_json::{Map, Value, json};

use super::thoughts::{Channels, ThoughtMarkers};

/// One format of thoughts.
struct ThoughtFormat {
    open: &'static str,
    close: &'static str,
    /// Texts that must all occur in the template's source.
    evidence: &'static [&'static str],
    channels: Option<ChannelTexts>,
}

/// Texts of a format in which each part of a reply has a heading; see [`Channels`].
struct ChannelTexts {
    turn: &'static str,
    answers: &'static [&'static str],
    answer_end: &'static str,
}

/// A format with a tag before and after the thoughts. The closing tag is evidence enough: many templates only remove
/// the thoughts of earlier turns.
const fn tags(open: &'static str, close: &'static str, evidence: &'static [&'static str]) -> ThoughtFormat {
    ThoughtFormat { open, close, evidence, channels: None }
}

/// The table of formats. The first row whose evidence is found applies.
const FORMATS: &[ThoughtFormat] = &[
    // The harmony format of gpt-oss.
    ThoughtFormat {
        open: "<|channel|>analysis<|message|>",
        close: "<|end|>",
        evidence: &["<|channel|>analysis<|message|>", "<|end|>"],
        channels: Some(ChannelTexts {
            turn: "<|start|>assistant",
            answers: &["<|channel|>final<|message|>", "<|channel|>commentary<|message|>"],
            answer_end: "<|end|>",
        }),
    },
    // Solar.
    ThoughtFormat {
        open: "<|think|>",
        close: "<|end|>",
        evidence: &["<|begin|>assistant<|think|>", "<|begin|>assistant<|content|>"],
        channels: Some(ChannelTexts { turn: "<|begin|>assistant", answers: &["<|content|>"], answer_end: "<|end|>" }),
    },
    // Muse.
    ThoughtFormat {
        open: " to=self<|message|>",
        close: "<|eom|>",
        evidence: &["assistant to=self<|message|>", "<|eom|>"],
        channels: Some(ChannelTexts {
            turn: "<|start|>assistant",
            answers: &[" to=user<|message|>"],
            answer_end: "<|eom|>",
        }),
    },
    // Kimi K3.
    ThoughtFormat {
        open: "<|open|>think<|sep|>",
        close: "<|close|>think<|sep|>",
        evidence: &["'<|open|>' + tag", "'<|close|>' + tag", "open_tag('think')"],
        channels: Some(ChannelTexts {
            turn: "",
            answers: &["<|open|>response<|sep|>"],
            answer_end: "<|close|>response<|sep|>",
        }),
    },
    // Granite, whose answer has tags as well if there are thoughts.
    ThoughtFormat {
        open: "<think>",
        close: "</think>",
        evidence: &["<think></think>", "<response></response>"],
        channels: Some(ChannelTexts { turn: "", answers: &["<response>"], answer_end: "</response>" }),
    },
    // Apriel, whose prompt opens the thoughts with a sentence.
    tags(
        "Here are my reasoning steps:",
        "[BEGIN FINAL RESPONSE]",
        &["Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"],
    ),
    // Gemma 4.
    tags("<|channel>thought\n", "<channel|>", &["<|channel>thought\\n", "<channel|>"]),
    // Cohere.
    tags("<|START_THINKING|>", "<|END_THINKING|>", &["<|END_THINKING|>"]),
    // Mistral.
    tags("[THINK]", "[/THINK]", &["[/THINK]"]),
    // Seed-OSS.
    tags("<seed:think>", "</seed:think>", &["</seed:think>"]),
    // MiniMax M3.
    tags("<mm:think>", "</mm:think>", &["</mm:think>"]),
    // Apertus.
    tags("<|inner_prefix|>", "<|inner_suffix|>", &["<|inner_prefix|>", "<|inner_suffix|>"]),
    // Qwen, DeepSeek, GLM, Kimi K2, Nemotron, SmolLM3 and most others.
    tags("<think>", "</think>", &["</think>"]),
    tags("<thinking>", "</thinking>", &["</thinking>"]),
    tags("<thought>", "</thought>", &["</thought>"]),
    tags("<reasoning>", "</reasoning>", &["</reasoning>"]),
];

/// Fields of messages in which templates read thoughts, in the order of preference.
pub(super) const THOUGHT_FIELDS: [&str; 4] = ["reasoning_content", "reasoning", "thinking", "thought"];

/// Texts that no template contains.
const THOUGHT: &str = "Tnought7";
const ANSWER: &str = "Answ3r";

impl ThoughtMarkers {
    /// Returns the markers of the thoughts that a model with this template and vocabulary writes; `None` for a model
    /// that writes none.
    pub fn of(template: Option<&ChatTemplate>, tokenizer: &Tokenizer) -> Option<ThoughtMarkers> {
        let source = template.map_or("", ChatTemplate::source);
        let is_found = |format: &&ThoughtFormat| format.evidence.iter().all(|text| source.contains(text));
        let in_source = FORMATS.iter().find(is_found).map(ThoughtFormat::markers);
        let found = in_source.or_else(|| rendered_markers(template?)).or_else(|| token_markers(tokenizer));
        found.map(|markers| match template.and_then(|template| white_space(template, &markers.close)) {
            Some(around_close) => ThoughtMarkers { around_close, ..markers },
            None => markers,
        })
    }
}

impl ThoughtFormat {
    fn markers(&self) -> ThoughtMarkers {
        let channels = self.channels.as_ref().map(|channels| Channels {
            turn: channels.turn.into(),
            answers: channels.answers.iter().map(|&text| text.into()).collect(),
            answer_end: channels.answer_end.into(),
        });
        ThoughtMarkers { channels, ..ThoughtMarkers::new(self.open, self.close) }
    }
}

/// Returns the markers of a format with tags for which the vocabulary has one token each.
fn token_markers(tokenizer: &Tokenizer) -> Option<ThoughtMarkers> {
    let has_tokens = |format: &&ThoughtFormat| {
        let markers = [format.open, format.close];
        format.channels.is_none() && markers.iter().all(|marker| tokenizer.id_of(marker).is_some())
    };
    FORMATS.iter().find(has_tokens).map(ThoughtFormat::markers)
}

/// Returns the tags around the thoughts in a message that the template renders.
fn rendered_markers(template: &ChatTemplate) -> Option<ThoughtMarkers> {
    let text = THOUGHT_FIELDS.iter().find_map(|&field| rendered_thought(template, field))?;
    let (before, after) = text.split_once(THOUGHT)?;
    let open = &before[before.rfind('<')?..];
    let close = after.trim_start();
    let close = &close[..=close.find('>')?];
    let is_tag =
        |tag: &str| tag.starts_with('<') && tag.trim_end().ends_with('>') && !tag.contains(char::is_whitespace);
    let is_pair = is_tag(open.trim_end()) && is_tag(close) && close.replacen('/', "", 1) == open.trim_end();
    is_pair.then(|| ThoughtMarkers::new(open.trim_end(), close))
}

/// Returns the white space that the template writes before and after the closing marker.
fn white_space(template: &ChatTemplate, close: &str) -> Option<(String, String)> {
    let text = THOUGHT_FIELDS.iter().find_map(|&field| rendered_thought(template, field))?;
    let (_, text) = text.split_once(THOUGHT)?;
    let (before, rest) = text.split_once(close)?;
    let after = &rest[..rest.len() - rest.trim_start().len()];
    before.trim().is_empty().then(|| (before.to_owned(), after.to_owned()))
}

/// Renders a conversation whose last message has thoughts in the field `field`; `None` if the template does not write
/// them.
pub(super) fn rendered_thought(template: &ChatTemplate, field: &str) -> Option<String> {
    if !template.source().contains(field) {
        return None;
    }
    let mut plain = json!({ "role": "assistant", "content": ANSWER });
    plain[field] = THOUGHT.into();
    // Some templates write thoughts only before calls of tools.
    let call = json!({ "type": "function", "id": "123456789", "function": { "name": "f", "arguments": {} } });
    let mut calling = json!({ "role": "assistant", "content": "", "tool_calls": [call] });
    calling[field] = THOUGHT.into();
    [plain, calling]
        .into_iter()
        .find_map(|message| render_with(template, message).filter(|text| text.contains(THOUGHT)))
}

/// Renders a question and its answer; `None` if the template refuses them.
fn render_with(template: &ChatTemplate, answer: Value) -> Option<String> {
    let messages = [json!({ "role": "user", "content": "Question" }), answer];
    let extra: Map<String, Value> = [("enable_thinking", true), ("thinking", true)]
        .into_iter()
        .filter(|(name, _)| template.reads(name))
        .map(|(name, value)| (name.to_owned(), value.into()))
        .collect();
    let now = DateTime { year: 2026, month: 1, day: 1, hour: 0, minute: 0, second: 0 };
    let conversation =
        Conversation { messages: &messages, extra: Some(&extra), now: Some(now), ..Conversation::default() };
    template.render_unguarded(&conversation).ok()
}

/// Whether the template writes thoughts that are a part of the content.
pub(super) fn rendered_block(template: &ChatTemplate) -> bool {
    let content = json!([{ "type": "thinking", "thinking": THOUGHT }, { "type": "text", "text": ANSWER }]);
    let text = render_with(template, json!({ "role": "assistant", "content": content }));
    // A template that prints lists as they are shows the name of the field as well.
    let is_raw = |text: &str| text.contains("thinking'") || text.contains("thinking\"");
    text.is_some_and(|text| text.contains(THOUGHT) && text.contains(ANSWER) && !is_raw(&text))
}
