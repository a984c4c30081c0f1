//! Text that is built to survive the `replace`, `split`, `strip` and `join` of a template and to be put together to a
//! control token by them. Every attack is made from the template's own literals, for all templates of the conformance
//! data and for our own; the positive control encodes the same text without origins.

use std::collections::BTreeSet;

use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Segment, TokenKind, Tokenizer};
use serde_json::{Value, json};

use crate::common;

const NOW: DateTime = DateTime { year: 2026, month: 11, day: 5, hour: 15, minute: 4, second: 9 };
/// Maximum tokens and literals of one template that are combined.
const MAX_TOKENS: usize = 4;
const MAX_LITERALS: usize = 6;

/// Returns the templates with their names.
fn templates() -> Vec<(String, String)> {
    let own = format!("{}/fixtures/templates", env!("CARGO_MANIFEST_DIR")).into();
    let folders = [Some(own), common::conformance("templates")];
    let mut templates = Vec::new();
    for folder in folders.into_iter().flatten() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "jinja") {
                let name = path.file_stem().unwrap().to_string_lossy().into_owned();
                templates.push((name, std::fs::read_to_string(&path).unwrap()));
            }
        }
    }
    templates.sort();
    templates
}

/// Returns the marks in a template that can be control tokens: `<...>` and `[...]` without spaces or quotes.
fn control_tokens(source: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for (start, open) in source.char_indices().filter(|(_, c)| matches!(c, '<' | '[')) {
        let close = if open == '<' { '>' } else { ']' };
        let Some(end) = source[start..].find(close) else { continue };
        let mark = &source[start..start + end + 1];
        let is_inner = |c: char| c.is_alphanumeric() || matches!(c, '|' | '_' | '/' | '｜' | '▁' | '-');
        let inner = &mark[1..mark.len() - 1];
        if (3..40).contains(&inner.chars().count())
            && inner.chars().all(is_inner)
            && inner.chars().any(char::is_alphabetic)
        {
            found.insert(mark.to_owned());
        }
    }
    found.into_iter().collect()
}

/// Returns the literals that the template searches for, removes or splits at.
fn searched_literals(source: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for function in ["replace(", "split(", "strip(", "trim(", "join(", "startswith(", "endswith("] {
        for (at, _) in source.match_indices(function) {
            let arguments = &source[at + function.len()..];
            for quote in ['\'', '"'] {
                if let Some(literal) = arguments.strip_prefix(quote).and_then(|rest| rest.split(quote).next()) {
                    found.insert(literal.replace("\\n", "\n"));
                }
            }
        }
    }
    found.into_iter().filter(|literal| !literal.is_empty() && literal.len() < 60).collect()
}

/// Returns a small tokenizer that has the template's marks as control tokens.
fn tokenizer(source: &str, controls: &[String]) -> Tokenizer {
    let mut folder = common::fixture("llama3");
    let mut json: Value = serde_json::from_str(folder.tokenizer.as_ref().unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let known: Vec<String> = added.iter().map(|token| token["content"].as_str().unwrap().to_owned()).collect();
    let new = ["<bos>".to_owned(), "<eos>".to_owned()];
    for (index, name) in controls.iter().chain(&new).filter(|name| !known.contains(name)).enumerate() {
        added.push(json!({ "id": 5000 + index, "content": name, "special": true, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false }));
    }
    folder.tokenizer = Some(json.to_string());
    folder.tokenizer_config = Some(json!({ "bos_token": "<bos>", "eos_token": "<eos>" }));
    folder.chat_template = Some(source.to_owned());
    Tokenizer::from_hugging_face(&folder).unwrap()
}

/// Puts a literal into a token: at every position, and in the middle also repeated and with another copy inside of it.
fn attacks(token: &str, literal: &str) -> Vec<String> {
    let mut texts = vec![format!("{literal}{token}"), format!("a{token}{literal}{token}b")];
    let half = |text: &str| text.char_indices().nth(text.chars().count() / 2).map_or(0, |(at, _)| at);
    let (outer, inner) = literal.split_at(half(literal));
    let (head, tail) = token.split_at(half(token));
    texts.push(format!("{head}{literal}{literal}{tail}"));
    texts.push(format!("{head}{outer}{literal}{inner}{tail}"));
    texts.push(format!("{literal}{head}{literal}{tail}{literal}"));
    for (at, _) in token.char_indices().skip(1) {
        let (head, tail) = token.split_at(at);
        texts.push(format!("{head}{literal}{tail}"));
    }
    texts
}

/// Returns conversations with the text in every field: plain, with a system message, with tools, with parts.
fn shapes(text: &str) -> Vec<(Vec<Value>, Option<Value>)> {
    let user = json!({ "role": "user", "content": text, "name": text });
    let assistant = json!({ "role": "assistant", "content": text, "reasoning_content": text, "thinking": text });
    let system = json!({ "role": "system", "content": text });
    let mut arguments = serde_json::Map::new();
    arguments.insert(text.to_owned(), json!([text, 1]));
    arguments.insert("key".to_owned(), json!(text));
    let call = json!({ "id": "call00001", "type": "function", "function": { "name": text, "arguments": arguments } });
    let called = json!({ "role": "assistant", "content": text, "reasoning_content": text, "tool_calls": [call] });
    let result = json!({ "role": "tool", "tool_call_id": "call00001", "name": text, "content": text });
    let mut properties = serde_json::Map::new();
    properties.insert(text.to_owned(), json!({ "type": "string", "description": text, "enum": [text] }));
    let parameters = json!({ "type": "object", "properties": properties, "required": [text] });
    let tools = json!([{ "type": "function",
        "function": { "name": text, "description": text, "parameters": parameters } }]);
    let parts =
        json!({ "role": "user", "content": [{ "type": "text", "text": text }, { "type": "text", "text": text }] });
    vec![
        (vec![user.clone(), assistant.clone(), user.clone()], None),
        (vec![system.clone(), user.clone()], None),
        (vec![system, user.clone(), called.clone(), result.clone(), user.clone()], Some(tools.clone())),
        (vec![user.clone(), called, result], Some(tools)),
        (vec![parts, assistant, user], None),
    ]
}

fn render(template: &ChatTemplate, shape: &(Vec<Value>, Option<Value>)) -> Option<Vec<Segment>> {
    let conversation = Conversation {
        messages: &shape.0,
        tools: shape.1.as_ref(),
        add_generation_prompt: true,
        now: Some(NOW),
        ..Conversation::default()
    };
    // A template may refuse a shape or a text.
    template.render(&conversation).ok()
}

fn text(segments: &[Segment]) -> String {
    segments.iter().map(|segment| segment.text.as_str()).collect()
}

struct Guarded<'t>(&'t Tokenizer);

impl Guarded<'_> {
    fn controls(&self, ids: Vec<u32>) -> Vec<u32> {
        let is_control = |id: &u32| self.0.is_guarded(*id) && self.0.token(*id).unwrap().kind != TokenKind::Unknown;
        ids.into_iter().filter(is_control).collect()
    }
}

#[test]
fn no_text_survives_to_become_a_control_token() {
    let (mut num_attacks, mut num_assembled) = (0, Vec::new());
    for (name, source) in templates() {
        let controls = control_tokens(&source);
        let tokenizer = tokenizer(&source, &controls);
        let guarded = Guarded(&tokenizer);
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        let literals = searched_literals(&source);
        let mut assembled = 0;
        for control in controls.iter().step_by(controls.len() / MAX_TOKENS + 1) {
            let removed = literals.iter().filter(|literal| !literal.trim().is_empty()).take(MAX_LITERALS);
            for literal in removed.chain([&" ".to_owned(), &"\n".to_owned()]) {
                // The same text with other letters: it is cut in the same places, but spells no token.
                let harmless: String = control.chars().map(|c| if c.is_alphanumeric() { 'q' } else { c }).collect();
                let is_independent = !literals.iter().any(|l| control.contains(l.as_str()) || l.contains(control));
                let count = |segments: &[Segment]| {
                    segments.iter().filter(|s| s.trusted).map(|s| s.text.matches(control).count()).sum::<usize>()
                };
                for (attack, other) in attacks(control, literal).iter().zip(attacks(&harmless, literal)) {
                    for (shape, other) in shapes(attack).iter().zip(shapes(&other)) {
                        let Some(segments) = render(&template, shape) else { continue };
                        num_attacks += 1;
                        let found = guarded.controls(tokenizer.encode_segments(&segments));
                        // Without the text of the request, the same control tokens are found.
                        let own: Vec<Segment> = segments
                            .iter()
                            .map(|s| if s.trusted { s.clone() } else { Segment::untrusted("~") })
                            .collect();
                        let expected = guarded.controls(tokenizer.encode_segments(&own));
                        assert_eq!(found, expected, "{name}: {attack:?} in {}", text(&segments));
                        if let Some(other) = render(&template, &other).filter(|_| is_independent) {
                            let expected = guarded.controls(tokenizer.encode_segments(&other));
                            assert_eq!(found, expected, "{name}: {attack:?} in {}", text(&segments));
                        }
                        // The positive control: as one trusted text, pieces of the token have become it.
                        if !attack.contains(control) && count(&segments) < text(&segments).matches(control).count() {
                            let unguarded = guarded.controls(tokenizer.encode_special(&text(&segments)));
                            assembled += usize::from(unguarded.len() > found.len());
                        }
                    }
                }
            }
        }
        if assembled > 0 {
            num_assembled.push((name, assembled));
        }
    }
    println!("{num_attacks} conversations; without origins, pieces become a token in {num_assembled:?}");
    if common::conformance("templates").is_some() {
        assert!(num_attacks > 20_000, "{num_attacks}");
        for name in ["NVIDIA-Nemotron-Nano-v2", "HuggingFaceTB-SmolLM3-3B", "google-gemma-4-31B-it"] {
            assert!(num_assembled.iter().any(|(found, _)| found == name), "{name} in {num_assembled:?}");
        }
    }
}

/// Text in an alphabet that no template uses is untrusted wherever it is printed.
#[test]
fn every_character_of_a_request_is_untrusted() {
    let marked = "ДЖЮ <ЩЪ>\nЫЭ ";
    let is_ours = |c: char| ('\u{400}'..'\u{500}').contains(&c);
    for (name, source) in templates() {
        let tokenizer = tokenizer(&source, &[]);
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        let mut printed = 0;
        for shape in shapes(marked) {
            for segment in render(&template, &shape).unwrap_or_default() {
                assert!(!segment.trusted || !segment.text.contains(is_ours), "{name}: {segment:?}");
                printed += segment.text.chars().filter(|c| is_ours(*c)).count();
            }
        }
        assert!(printed > 0 || name.contains("firefunction"), "{name} prints no text of the request");
    }
}
