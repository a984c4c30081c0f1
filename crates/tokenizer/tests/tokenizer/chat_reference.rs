//! Published templates with published vocabularies give the ids of the reference implementation on ordinary
//! conversations. Templates and vocabularies come from the conformance data; the expected ids from
//! `fixtures/make_chat_fixtures.py`.

use pellucid_checkpoint::Checkpoint;
use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Error, Tokenizer};
use serde_json::Value;

use crate::common;

const NOW: DateTime = DateTime { year: 2026, month: 11, day: 5, hour: 15, minute: 4, second: 9 };

fn fnv1a(text: &str) -> String {
    let hash =
        text.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01B3));
    format!("{hash:016x}")
}

fn read(file: &str) -> Value {
    let path = format!("{}/fixtures/chat/{file}", env!("CARGO_MANIFEST_DIR"));
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn ids_of_the_reference_implementation() {
    let Some(vocabularies) = common::conformance("tokenizers") else { return };
    let templates = common::conformance("templates");
    let (conversations, expected) = (read("conversations.json"), read("expected.json"));
    let mut checked = 0;
    for entry in expected.as_array().unwrap() {
        let vocabulary = vocabularies.join(format!("ggml-vocab-{}.gguf", entry["vocabulary"].as_str().unwrap()));
        let checkpoint = Checkpoint::open(&vocabulary).unwrap();
        let mut tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
        let source = match (entry["template"].as_str(), &templates) {
            (None, _) => checkpoint.chat_template().unwrap().to_owned(),
            (Some(name), Some(folder)) => std::fs::read_to_string(folder.join(name)).unwrap(),
            (Some(_), None) => continue,
        };
        tokenizer.guard(&source);
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        let rows = entry["rows"].as_array().unwrap();
        for (conversation, row) in conversations.as_array().unwrap().iter().zip(rows) {
            let messages = conversation["messages"].as_array().unwrap();
            let conversation = Conversation {
                messages,
                tools: conversation.get("tools"),
                add_generation_prompt: messages.last().unwrap()["role"] != "assistant",
                now: Some(NOW),
                ..Conversation::default()
            };
            let name = format!("{} with {}: {messages:?}", entry["template"], entry["vocabulary"]);
            let segments = match template.render(&conversation) {
                Ok(segments) => segments,
                Err(Error::TemplateRefused(reason)) => {
                    assert_eq!(row["refused"].as_str(), Some(reason.as_str()), "{name}");
                    continue;
                }
                Err(error) => panic!("{name}: {error}"),
            };
            let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
            assert_eq!(fnv1a(&text), row["text"].as_str().unwrap(), "{name}\n{text}");
            let ids: Vec<u32> = row["ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect();
            assert_eq!(tokenizer.encode_segments(&segments), ids, "{name}\n{segments:?}");
            checked += 1;
        }
    }
    println!("{checked} conversations");
    assert!(checked >= 30);
}

/// A template that reads variables which only its own server sets; the reference fails on it too.
const NEEDS_ITS_SERVER: &str = "fireworks-ai-llama-3-firefunction-v2.jinja";

/// Every template of the conformance data compiles and renders.
#[test]
fn every_published_template_renders() {
    let (Some(templates), Some(vocabularies)) = (common::conformance("templates"), common::conformance("tokenizers"))
    else {
        return;
    };
    let checkpoint = Checkpoint::open(&vocabularies.join("ggml-vocab-qwen2.gguf")).unwrap();
    let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
    let conversations = read("conversations.json");
    let mut failures = Vec::new();
    let mut num_rendered = 0;
    for entry in std::fs::read_dir(templates).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") || path.ends_with(NEEDS_ITS_SERVER) {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        let template = match ChatTemplate::compile(&source, &tokenizer) {
            Ok(template) => template,
            Err(error) => {
                failures.push(format!("{}: {error}", path.display()));
                continue;
            }
        };
        // Not every template supports tools.
        for conversation in conversations.as_array().unwrap().iter().filter(|c| c.get("tools").is_none()) {
            let messages = conversation["messages"].as_array().unwrap();
            let conversation =
                Conversation { messages, add_generation_prompt: true, now: Some(NOW), ..Conversation::default() };
            match template.render(&conversation) {
                Ok(segments) if segments.is_empty() => failures.push(format!("{}: no text", path.display())),
                Ok(_) => num_rendered += 1,
                Err(Error::TemplateRefused(_)) => {}
                Err(error) => failures.push(format!("{}: {error}", path.display())),
            }
        }
    }
    failures.dedup();
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(num_rendered >= 50, "only {num_rendered} conversations were rendered");
}

/// Templates take a setting of the caller, or their own default, under the same name: `set x = x | default(...)`.
/// Callers may set it.
#[test]
fn settings_with_a_default_can_be_set() {
    let Some(templates) = common::conformance("templates") else { return };
    let tokenizer = Tokenizer::from_hugging_face(&common::fixture("llama2")).unwrap();
    let mut num_settings = 0;
    for entry in std::fs::read_dir(templates).unwrap() {
        let path = entry.unwrap().path();
        let source = std::fs::read_to_string(&path).unwrap();
        // Assignments at the left edge are outside of loops.
        let assignments = source.lines().filter_map(|line| line.strip_prefix("{%- set ")?.split_once(" = "));
        let settings: Vec<&str> = assignments
            .filter(|(name, value)| {
                let rest = value.strip_prefix(name).map(str::trim_start);
                rest.is_some_and(|rest| {
                    rest.starts_with(&format!("if {name} is defined")) || rest.starts_with("| default")
                })
            })
            .map(|(name, _)| name)
            .collect();
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        for name in settings {
            assert!(template.reads(name), "{}: {name}", path.display());
            num_settings += 1;
        }
    }
    assert!(num_settings >= 20, "only {num_settings} settings were found");
}

#[test]
fn a_tag_that_closes_itself_is_refused() {
    let tokenizer = Tokenizer::from_hugging_face(&common::fixture("llama2")).unwrap();
    for source in ["{%}", "a {{%} b %}", "{%%}"] {
        assert!(matches!(ChatTemplate::compile(source, &tokenizer), Err(Error::TemplateSyntax(_))), "{source}");
    }
}
