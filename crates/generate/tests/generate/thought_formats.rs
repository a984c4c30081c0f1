//! The markers of thoughts that are found in published chat templates, those of the conformance data.

use std::path::{Path, PathBuf};

use pellucid_generate::{ThinkingSettings, ThoughtMarkers};
use pellucid_tokenizer::{ChatTemplate, Conversation, Tokenizer};
use serde_json::{Value, json};

use crate::support;

/// Returns the published templates; see `.ci/fetch-conformance`.
fn templates() -> Option<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let named = std::env::var_os("PELLUCID_CONFORMANCE").map(PathBuf::from);
    let places = named.into_iter().chain([root.join("target/conformance")]);
    let found = places.map(|place| place.join("templates")).find(|place| place.is_dir());
    if found.is_none() {
        assert!(std::env::var_os("PELLUCID_REQUIRE_CONFORMANCE").is_none(), "no conformance data");
        eprintln!("SKIPPED: no conformance data; run .ci/fetch-conformance to run this test");
    }
    found
}

/// Markers by a part of the file's name. Every template that is not listed has none.
const EXPECTED: &[(&str, &str, &str)] = &[
    ("Apertus", "<|inner_prefix|>", "<|inner_suffix|>"),
    ("Apriel-1.6", "Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]"),
    ("Apriel-1.5", "<thinking>", "</thinking>"),
    ("Bielik", "<think>", "</think>"),
    ("ByteDance-Seed-OSS", "<seed:think>", "</seed:think>"),
    ("Cohere2MoE", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("command-r7b", "<|START_THINKING|>", "<|END_THINKING|>"),
    ("GLM-4", "<think>", "</think>"),
    ("SmolLM3", "<think>", "</think>"),
    ("Kimi-K2-Thinking", "<think>", "</think>"),
    ("Kimi-K3", "<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ("LFM2.5", "<think>", "</think>"),
    ("MiniMax-M2", "<think>", "</think>"),
    ("MiniMax-M3", "<mm:think>", "</mm:think>"),
    ("Nemotron", "<think>", "</think>"),
    ("QwQ", "<think>", "</think>"),
    ("Qwen3-0.6B", "<think>", "</think>"),
    ("Qwen3.5", "<think>", "</think>"),
    ("Reka-Edge", "<think>", "</think>"),
    ("Spark2.5", "<think>", "</think>"),
    ("StepFun3.5", "<think>", "</think>"),
    ("deepseek", "<think>", "</think>"),
    ("gemma-4", "<|channel>thought\n", "<channel|>"),
    ("granite-3.3", "<think>", "</think>"),
    ("ling-3.0", "<think>", "</think>"),
    ("rwkv-world", "<think>", "</think>"),
    ("Ministral-3-14B-Reasoning", "[THINK]", "[/THINK]"),
    ("muse-glimmer", " to=self<|message|>", "<|eom|>"),
    ("gpt-oss", "<|channel|>analysis<|message|>", "<|end|>"),
    ("MiniCPM5", "<think>", "</think>"),
    ("Laguna", "<think>", "</think>"),
    ("Hy3", "<think:opensource>", "</think:opensource>"),
    ("Solar-Open", "<|think|>", "<|end|>"),
];

#[test]
fn markers_of_published_templates() {
    let Some(folder) = templates() else { return };
    let tokenizer = support::tokenizer();
    let mut wrong = Vec::new();
    let mut used = vec![false; EXPECTED.len()];
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        let row = EXPECTED.iter().position(|(part, ..)| name.contains(part));
        let expected = row.map(|row| {
            used[row] = true;
            (EXPECTED[row].1.to_owned(), EXPECTED[row].2.to_owned())
        });
        let template = ChatTemplate::compile(&std::fs::read_to_string(&path).unwrap(), &tokenizer).unwrap();
        let found = ThoughtMarkers::of(Some(&template), &tokenizer).map(|markers| (markers.open, markers.close));
        if found != expected {
            wrong.push(format!("{name}: found {found:?}, expected {expected:?}"));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
    let unused: Vec<&str> = EXPECTED.iter().zip(used).filter(|(_, used)| !used).map(|(row, _)| row.0).collect();
    assert!(unused.is_empty(), "no template matches {unused:?}");
}

fn compile(source: &str) -> (ChatTemplate, std::sync::Arc<Tokenizer>) {
    let tokenizer = support::tokenizer();
    (ChatTemplate::compile(source, &tokenizer).unwrap(), tokenizer)
}

#[test]
fn unknown_tags_are_found_by_rendering() {
    let source = "{% for m in messages %}{{ m.role }}: {% if m.thinking %}{{ '<' ~ 'ponder' ~ '>' ~ m.thinking ~ '</' \
                  ~ 'ponder' ~ '>' }}{% endif %}{{ m.content }}{% endfor %}";
    let (template, tokenizer) = compile(source);
    let markers = ThoughtMarkers::of(Some(&template), &tokenizer).unwrap();
    assert_eq!((markers.open.as_str(), markers.close.as_str()), ("<ponder>", "</ponder>"));
    assert_eq!(markers.closing_text(), "</ponder>", "the template writes no white space around it");
    let (template, _) = compile("{% for m in messages %}{{ m.thinking }} {{ m.content }}{% endfor %}");
    assert_eq!(ThoughtMarkers::of(Some(&template), &tokenizer), None);
    assert_eq!(ThoughtMarkers::of(None, &tokenizer), None);
}

/// Settings by a part of the file's name: variables for the efforts `none` and `high`, or the reason why there are
/// none, and the field of earlier thoughts.
const SETTINGS: &[(&str, &str, &str, &str)] = &[
    ("Qwen3-0.6B", r#"{"enable_thinking":false}"#, r#"{"enable_thinking":true}"#, "reasoning_content"),
    ("GLM-4.6", r#"{"enable_thinking":false}"#, r#"{"enable_thinking":true}"#, "reasoning_content"),
    ("SmolLM3", r#"{"enable_thinking":false}"#, r#"{"enable_thinking":true}"#, ""),
    ("granite-3.3", r#"{"thinking":false}"#, r#"{"thinking":true}"#, ""),
    ("gpt-oss", "AlwaysThinks", r#"{"reasoning_effort":"high"}"#, "thinking"),
    ("Solar-Open", "AlwaysThinks", r#"{"reasoning_effort":"high"}"#, "reasoning"),
    ("Hy3", r#"{"reasoning_effort":"no_think"}"#, r#"{"reasoning_effort":"high"}"#, "reasoning_content"),
    ("Cohere2MoE", r#"{"reasoning_effort":"none"}"#, r#"{"reasoning_effort":"high"}"#, "reasoning_content"),
    ("Kimi-K3", r#"{"thinking":false}"#, r#"{"thinking":true,"thinking_effort":"high"}"#, "reasoning_content"),
    ("Kimi-K2-Thinking", "NoSetting", "NoSetting", "reasoning_content"),
    ("MiniMax-M3", r#"{"thinking_mode":"disabled"}"#, r#"{"thinking_mode":"enabled"}"#, "reasoning_content"),
    ("LFM2.5-8B", "NoSetting", "NoSetting", "thinking"),
    ("LFM2-8B", "NoSetting", "NoSetting", ""),
    ("GigaChat3-", "NoSetting", "NoSetting", ""),
    ("R1-Distill-Llama", "NoSetting", "NoSetting", ""),
    ("Qwen2.5", "NoSetting", "NoSetting", ""),
    ("Ministral-3-14B-Reasoning", "NoSetting", "NoSetting", "content"),
];

#[test]
fn settings_of_published_templates() {
    let Some(folder) = templates() else { return };
    let tokenizer = support::tokenizer();
    for &(part, none, high, field) in SETTINGS {
        let mut files = std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path());
        let path = files.find(|path| path.file_name().unwrap().to_string_lossy().contains(part)).unwrap();
        let template = ChatTemplate::compile(&std::fs::read_to_string(&path).unwrap(), &tokenizer).unwrap();
        let settings = ThinkingSettings::of(&template);
        let variables = |effort: &str| match settings.variables(effort) {
            Ok(variables) => Value::Object(variables).to_string(),
            Err(error) => format!("{error:?}"),
        };
        assert_eq!((variables("none").as_str(), variables("high").as_str()), (none, high), "{part}");
        let plain = json!({ "role": "assistant", "content": "42" });
        let mut message = plain.clone();
        settings.set_thoughts(&mut message, "Six times seven".into());
        let changed = message.as_object().unwrap().iter().find(|(name, value)| plain.get(name) != Some(value));
        assert_eq!(changed.map_or("", |(name, _)| name), field, "{part}: {message}");
    }
}

/// Thoughts of the turn that the model goes on with reach the prompt in the format of the template.
#[test]
fn earlier_thoughts_reach_the_prompt() {
    let source = "{% for m in messages %}{{ m.role }}: {% if m.reasoning %}<think>{{ m.reasoning }}</think>{% endif %}\
                  {{ m.content }}{% endfor %}";
    let (template, _) = compile(source);
    let mut message = json!({ "role": "assistant", "content": "42" });
    ThinkingSettings::of(&template).set_thoughts(&mut message, "Hm.".into());
    let conversation = Conversation { messages: &[message], ..Conversation::default() };
    let segments = template.render(&conversation).unwrap();
    let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
    assert_eq!(text, "assistant: <think>Hm.</think>42");
    assert!(segments.iter().all(|segment| !segment.trusted || !segment.text.contains("Hm.")), "{segments:?}");
}
