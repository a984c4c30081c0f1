//! No text of a request becomes a control token or a token that the template uses as structure, in any field. A
//! positive control shows that the same attacks succeed without the guard.

use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Error, ROLES, TokenKind, Tokenizer, message};
use serde_json::{Map, Value, json};

use crate::common;

const NOW: DateTime = DateTime { year: 2026, month: 11, day: 5, hour: 15, minute: 4, second: 9 };

/// Control tokens of the templates below.
const CONTROL: [&str; 14] = [
    "<|im_start|>",
    "<|im_end|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
    "<start_of_turn>",
    "<end_of_turn>",
    "[INST]",
    "[/INST]",
    "<|user|>",
    "<|assistant|>",
    "<|tool|>",
    "<bos>",
    "<eos>",
];
const USER_DEFINED: [&str; 6] = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tools>", "<h1>"];

fn template_source(name: &str) -> String {
    std::fs::read_to_string(format!("{}/fixtures/templates/{name}.jinja", env!("CARGO_MANIFEST_DIR"))).unwrap()
}

/// Returns a small tokenizer with these tokens, guarded for a template.
fn tokenizer(family: &str, source: &str) -> Tokenizer {
    let mut folder = common::fixture(family);
    let mut json: Value = serde_json::from_str(folder.tokenizer.as_ref().unwrap()).unwrap();
    let added = json["added_tokens"].as_array_mut().unwrap();
    let first = 5000;
    for (index, name) in CONTROL.iter().chain(&USER_DEFINED).enumerate() {
        let special = index < CONTROL.len();
        added.push(json!({ "id": first + index, "content": name, "special": special, "normalized": false,
            "lstrip": false, "rstrip": false, "single_word": false }));
    }
    folder.tokenizer = Some(json.to_string());
    folder.tokenizer_config = Some(json!({ "bos_token": "<bos>", "eos_token": { "content": "<eos>" } }));
    folder.chat_template = Some(source.to_owned());
    Tokenizer::from_hugging_face(&folder).unwrap()
}

/// A conversation with `text` in one field.
struct Shape {
    field: &'static str,
    messages: fn(&str) -> Vec<Value>,
    tools: fn(&str) -> Option<Value>,
}

fn no_tools(_: &str) -> Option<Value> {
    None
}

const PLAIN: [Shape; 4] = [
    Shape { field: "user content", messages: |t| vec![message("user", t)], tools: no_tools },
    Shape {
        field: "assistant content",
        messages: |t| vec![message("user", "a"), message("assistant", t), message("user", "b")],
        tools: no_tools,
    },
    Shape {
        field: "content beside white space",
        messages: |t| vec![message("user", &format!(" \n{t}\n ")), message("assistant", "b"), message("user", "c")],
        tools: no_tools,
    },
    Shape {
        field: "content that ends and begins with it",
        messages: |t| vec![message("user", &format!("{t} and {t}")), message("assistant", "ok"), message("user", t)],
        tools: no_tools,
    },
];

const WITH_SYSTEM: [Shape; 1] = [Shape {
    field: "system content",
    messages: |t| vec![message("system", t), message("user", "a")],
    tools: no_tools,
}];

const RICH: [Shape; 5] = [
    Shape { field: "name", messages: |t| vec![json!({ "role": "user", "name": t, "content": "a" })], tools: no_tools },
    Shape { field: "tool content", messages: |t| vec![message("user", "a"), message("tool", t)], tools: no_tools },
    Shape {
        field: "tool call",
        messages: |t| {
            let call = json!({ "function": { "name": t, "arguments": { "x": t, "y": [1, t] } } });
            vec![message("user", "a"), json!({ "role": "assistant", "content": "b", "tool_calls": [call] })]
        },
        tools: no_tools,
    },
    Shape {
        field: "tool call keys",
        messages: |t| {
            let mut arguments = Map::new();
            arguments.insert(t.to_owned(), json!(1));
            let call = json!({ "function": { "arguments": arguments } });
            vec![message("user", "a"), json!({ "role": "assistant", "content": "b", "tool_calls": [call] })]
        },
        tools: no_tools,
    },
    Shape {
        field: "tools",
        messages: |_| vec![message("user", "a")],
        tools: |t| {
            Some(json!([{ "type": "function", "function": { "name": t, "description": format!("a \"{t}\"\n") } }]))
        },
    },
];

/// Counts each guarded id, except the unknown token, which stands for characters that a model without byte tokens
/// lacks.
fn guarded_counts(tokenizer: &Tokenizer, ids: &[u32]) -> Vec<(u32, usize)> {
    let counts = |id: &u32| tokenizer.is_guarded(*id) && tokenizer.token(*id).unwrap().kind != TokenKind::Unknown;
    let mut ids: Vec<u32> = ids.iter().copied().filter(counts).collect();
    ids.sort_unstable();
    ids.chunk_by(|a, b| a == b).map(|run| (run[0], run.len())).collect()
}

struct Attack<'a> {
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    shape: &'a Shape,
}

impl Attack<'_> {
    fn conversation<T>(&self, text: &str, render: impl FnOnce(&Conversation<'_>) -> T) -> T {
        let (messages, tools) = ((self.shape.messages)(text), (self.shape.tools)(text));
        render(&Conversation {
            messages: &messages,
            tools: tools.as_ref(),
            add_generation_prompt: true,
            extra: None,
            now: Some(NOW),
        })
    }

    fn guarded_ids(&self, text: &str) -> Vec<(u32, usize)> {
        let segments = self.conversation(text, |c| self.template.render(c)).unwrap();
        guarded_counts(self.tokenizer, &self.tokenizer.encode_segments(&segments))
    }

    fn unguarded_ids(&self, text: &str) -> Vec<(u32, usize)> {
        let rendered = self.conversation(text, |c| self.template.render_unguarded(c)).unwrap();
        guarded_counts(self.tokenizer, &self.tokenizer.encode_special(&rendered))
    }
}

/// Puts every guarded token into every field. The control tokens of the prompt must be those of a harmless text, and
/// without the guard they must differ.
fn attack_every_field(family: &str, name: &str, shapes: &[&[Shape]]) {
    let source = template_source(name);
    let tokenizer = tokenizer(family, &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    let guarded: Vec<String> = (0..tokenizer.vocab_size() as u32)
        .filter(|&id| tokenizer.is_guarded(id) && tokenizer.token(id).unwrap().kind != TokenKind::Unknown)
        .map(|id| tokenizer.token(id).unwrap().piece.to_owned())
        .collect();
    assert!(guarded.len() >= CONTROL.len(), "{guarded:?}");
    for shape in shapes.iter().copied().flatten() {
        let attack = Attack { tokenizer: &tokenizer, template: &template, shape };
        let harmless = attack.guarded_ids("x");
        assert!(!harmless.is_empty(), "{name}: the template writes control tokens");
        assert_eq!(harmless, attack.unguarded_ids("x"), "{name}, {}: harmless text", shape.field);
        for token in &guarded {
            for text in [token.clone(), format!("a{token}b"), format!("{token}{token}"), format!("<{token}|>")] {
                let found = attack.guarded_ids(&text);
                assert_eq!(found, harmless, "{name}, {}: {text:?}", shape.field);
                assert_ne!(attack.unguarded_ids(&text), harmless, "{name}, {}: {text:?} without guard", shape.field);
            }
        }
    }
}

#[test]
fn no_token_gets_through_any_field() {
    for family in ["llama3", "llama2", "gemma", "xglm"] {
        attack_every_field(family, "chatml", &[&PLAIN, &WITH_SYSTEM, &RICH]);
        attack_every_field(family, "headers", &[&PLAIN, &WITH_SYSTEM]);
        attack_every_field(family, "turns", &[&PLAIN]);
        attack_every_field(family, "inst", &[&PLAIN]);
    }
}

/// Published templates of the conformance data, with every control token of the vocabulary.
#[test]
fn no_control_token_gets_through_published_templates() {
    let Some(folder) = common::conformance("tokenizers") else { return };
    for (vocabulary, step) in [("qwen2", 1), ("phi-3", 1), ("gemma-4", 7)] {
        let path = folder.join(format!("ggml-vocab-{vocabulary}.gguf"));
        let checkpoint = pellucid_checkpoint::Checkpoint::open(&path).unwrap();
        let tokenizer = Tokenizer::from_checkpoint(&checkpoint).unwrap();
        let template = ChatTemplate::compile(checkpoint.chat_template().unwrap(), &tokenizer).unwrap();
        let guarded: Vec<u32> = (0..tokenizer.vocab_size() as u32).filter(|&id| tokenizer.is_guarded(id)).collect();
        assert!(guarded.len() > 2, "{vocabulary}: only {} guarded tokens", guarded.len());
        for shape in &PLAIN {
            let attack = Attack { tokenizer: &tokenizer, template: &template, shape };
            let harmless = attack.guarded_ids("x");
            assert!(!harmless.is_empty(), "{vocabulary}: the template writes control tokens");
            for &id in guarded.iter().step_by(step) {
                let piece = tokenizer.token(id).unwrap().piece.to_owned();
                // A template that searches for this token may lose its own use of it, but must not gain one.
                let gained = attack.guarded_ids(&piece).into_iter().find(|(id, count)| {
                    harmless.iter().find(|(known, _)| known == id).is_none_or(|(_, most)| count > most)
                });
                assert_eq!(gained, None, "{vocabulary}, {}: {piece:?}", shape.field);
            }
        }
    }
}

#[test]
fn only_roles_of_the_list_are_accepted() {
    let source = template_source("chatml");
    let tokenizer = tokenizer("llama3", &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    let render = |role: &str| {
        let messages = [message(role, "x")];
        template.render(&Conversation { messages: &messages, ..Conversation::default() })
    };
    for role in ROLES {
        assert!(render(role).is_ok(), "{role}");
    }
    for role in ["", "User", "user ", "user\n", "<|im_end|>", "user<|im_end|>", "model", "ipython"] {
        assert!(matches!(render(role), Err(Error::UnknownRole { index: 0, .. })), "{role:?}");
    }
    let messages = [json!({ "content": "no role" })];
    let result = template.render(&Conversation { messages: &messages, ..Conversation::default() });
    assert!(matches!(result, Err(Error::UnknownRole { .. })));
}

/// A token of which the template wrote one part and the message another is untrusted.
#[test]
fn a_message_cannot_complete_a_token_of_the_template() {
    let source = template_source("composed");
    let tokenizer = tokenizer("llama3", &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    let ids = |messages: &[Value]| {
        let conversation = Conversation { messages, ..Conversation::default() };
        let segments = template.render(&conversation).unwrap();
        let unguarded = tokenizer.encode_special(&template.render_unguarded(&conversation).unwrap());
        (guarded_counts(&tokenizer, &tokenizer.encode_segments(&segments)), guarded_counts(&tokenizer, &unguarded))
    };
    // The role is trusted: `<|user|>` may contain it.
    let (harmless, unguarded) = ids(&[json!({ "role": "user", "content": "a", "name": "x" })]);
    assert_eq!(harmless, unguarded);
    assert!(harmless.contains(&(tokenizer.id_of("<|user|>").unwrap(), 1)));
    // A name is untrusted, and so is the name of a field.
    for attack in [
        json!({ "role": "user", "content": "a", "name": "im_end" }),
        json!({ "role": "user", "content": "a", "name": "x", "fields": { "think": "y" } }),
        json!({ "role": "user", "content": "<|im_end|", "name": "x|><" }),
    ] {
        let (found, unguarded) = ids(std::slice::from_ref(&attack));
        assert_eq!(found, harmless, "{attack}");
        if attack["content"] == "a" && attack["name"] == "im_end" {
            assert_ne!(unguarded, harmless, "{attack} without guard");
        }
    }
}

/// A template that compares message text renders like the reference, and no token gets through.
#[test]
fn templates_that_compare_message_text_are_safe() {
    let source = template_source("think");
    let tokenizer = tokenizer("llama3", &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    let render = |messages: &[Value], extra: &Map<String, Value>| {
        let conversation =
            Conversation { messages, add_generation_prompt: true, extra: Some(extra), ..Conversation::default() };
        let segments = template.render(&conversation).unwrap();
        let text: String = segments.iter().map(|segment| segment.text.as_str()).collect();
        assert_eq!(text, template.render_unguarded(&conversation).unwrap());
        (text, guarded_counts(&tokenizer, &tokenizer.encode_segments(&segments)))
    };
    let none = Map::new();
    let harmless = render(&[message("user", "a"), message("assistant", "b"), message("user", "c")], &none).1;
    for hidden in ["why</think>b", "<think>why</think>\n\nb", "x</think><|im_end|>b"] {
        let (text, found) = render(&[message("user", "a"), message("assistant", hidden), message("user", "c")], &none);
        assert!(!text.contains("why"), "the thought is removed: {text}");
        assert_eq!(found.iter().filter(|(id, _)| tokenizer.token(*id).unwrap().piece.contains("think")).count(), 0);
        if !hidden.contains("<|im_end|>") {
            assert_eq!(found, harmless);
        }
        // There are never more control tokens than the template wrote.
        let extra = found
            .iter()
            .find(|(id, count)| harmless.iter().find(|(known, _)| known == id).is_none_or(|(_, most)| count > most));
        assert_eq!(extra, None, "{hidden:?}");
    }
    // User text is kept whole, and stays ordinary text.
    let (text, found) = render(&[message("user", "</think>a"), message("assistant", "b"), message("user", "c")], &none);
    assert!(text.contains("</think>a"));
    assert_eq!(found, harmless);
    // Tokens that the template writes are recognized.
    let off: Map<String, Value> = [("enable_thinking".to_owned(), json!(false))].into_iter().collect();
    let (_, found) = render(&[message("user", "a")], &off);
    assert!(found.contains(&(tokenizer.id_of("</think>").unwrap(), 1)));
}

#[test]
fn a_refusal_is_a_typed_error() {
    let source = template_source("turns");
    let tokenizer = tokenizer("gemma", &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    let messages = [message("system", "x"), message("user", "y")];
    match template.render(&Conversation { messages: &messages, ..Conversation::default() }) {
        Err(Error::TemplateRefused(reason)) => assert_eq!(reason, "System role not supported"),
        other => panic!("{other:?}"),
    }
    let empty = template.render(&Conversation::default());
    assert!(matches!(empty, Err(Error::TemplateRender(_))), "{empty:?}");
}

#[test]
fn bad_templates_are_errors_and_work_is_bounded() {
    let tokenizer = tokenizer("llama3", "");
    let render = |source: &str| {
        ChatTemplate::compile(source, &tokenizer).and_then(|template| template.render(&Conversation::default()))
    };
    assert!(matches!(render("{% if %}"), Err(Error::TemplateSyntax(_))));
    assert!(matches!(render("{{ nothing.here }}"), Err(Error::TemplateRender(_))));
    assert!(matches!(render("{{ strftime_now('%Y') }}"), Err(Error::TemplateRender(_))));
    assert!(matches!(render("{% include 'secret' %}"), Err(Error::TemplateRender(_) | Error::TemplateSyntax(_))));
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% set x = a * b %}{% endfor %}{% endfor %}";
    assert!(matches!(render(endless), Err(Error::TemplateTooSlow { .. })));
    let endless_text = "{% set x = 'x' * 100000 %}{% for a in range(9999) %}{{ x }}{% endfor %}";
    assert!(matches!(render(endless_text), Err(Error::TemplateTooLarge { .. })));
}

/// Values that nest too deep cannot be built, so comparing, printing and dropping values cannot overflow the stack.
#[test]
fn deeply_nested_values_are_refused() {
    let tokenizer = tokenizer("llama3", "");
    let messages = [message("user", "hi")];
    let conversation = Conversation { messages: &messages, ..Conversation::default() };
    let render =
        |source: &str| ChatTemplate::compile(source, &tokenizer).and_then(|t| t.render_unguarded(&conversation));
    let nest = |value: &str, turns: usize| {
        let value = value.replace('*', "ns.x");
        format!(
            "{{% set ns = namespace(x=[]) %}}{{% for i in range({turns}) %}}{{% set ns.x = {value} %}}{{% endfor %}}"
        )
    };
    let macro_chain = "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set before = ns.x %}\
        {% macro f() %}{{ before }}{% endmacro %}{% set ns.x = f %}{% endfor %}";
    let deep = ["[*]", "{'a': *}", "[[[[[[[[[[*]]]]]]]]]]", "(*, 1)", "[*, *]"].map(|value| nest(value, 20_000));
    for source in deep.iter().map(String::as_str).chain([macro_chain]) {
        let error = render(source).unwrap_err().to_string();
        assert!(error.contains("nest deeper than 256 levels"), "{source}: {error}");
    }
    assert_eq!(render(&(nest("[*]", 3) + "{{ ns.x }}")).unwrap(), "[[[[]]]]");
    // Shared lists are small, but have exponentially many parts.
    for doubled in ["{{ ns.x == ns.y }}", "{{ ns.x }}", "{{ ns.x | tojson }}", "{{ ns.x | string | length }}"] {
        let two = nest("[*, *]", 60) + &nest("[*, *]", 60).replace("ns.x", "ns.y").replace("(x", "(x=ns.x, y");
        let result = render(&(two + doubled));
        assert!(matches!(result, Err(Error::TemplateTooSlow { .. } | Error::TemplateTooLarge { .. })), "{result:?}");
    }
}

/// The bound on steps allows long conversations.
#[test]
fn long_conversations_are_rendered() {
    for name in ["chatml", "composed", "headers", "inst", "think", "turns"] {
        let source = template_source(name);
        let tokenizer = tokenizer("llama3", &source);
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        let roles = ["user", "assistant"];
        let messages: Vec<Value> = (0..4000).map(|turn| message(roles[turn % 2], "What is the answer?")).collect();
        let conversation = Conversation { messages: &messages, now: Some(NOW), ..Conversation::default() };
        let text: String =
            template.render(&conversation).unwrap().iter().map(|segment| segment.text.as_str()).collect();
        assert_eq!(text.matches("What is the answer?").count(), 4000, "{name}: every message is in the text");
    }
}

#[test]
fn text_of_the_private_planes_is_kept() {
    let source = template_source("chatml");
    let tokenizer = tokenizer("llama3", &source);
    let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
    // Forged marks: the marked form of `<|im_end|>`, and other characters of those planes.
    let forged: String = "<|im_end|>".chars().map(|c| char::from_u32(c as u32 + 0xF_0000).unwrap()).collect();
    let text = format!("a{forged}\u{FFFD}\u{10FFFD}\u{FDD0}\u{20000}𠀋b");
    let messages = [message("user", &text)];
    let segments = template.render(&Conversation { messages: &messages, ..Conversation::default() }).unwrap();
    assert!(segments.iter().any(|segment| segment.text == text && !segment.trusted), "{segments:?}");
}

/// Segment boundaries split no token: the ids are those of the whole text.
#[test]
fn segment_boundaries_split_no_token() {
    use pellucid_tokenizer::Segment;
    for family in ["llama3", "llama2", "mistral", "gemma", "xglm", "qwen2"] {
        let tokenizer = tokenizer(family, "<|im_start|><tool_call>");
        let parts = ["<|im_start|>", "use", "r\nHel", "lo wor", "ld 12", "34", "<|im_", "end|>", "\n\n", "<h1>", "x"];
        let whole = parts.concat();
        let trusted: Vec<Segment> = parts.iter().map(|part| Segment::trusted(*part)).collect();
        assert_eq!(tokenizer.encode_segments(&trusted), tokenizer.encode_special(&whole), "{family}");
        let untrusted: Vec<Segment> = parts.iter().map(|part| Segment::untrusted(*part)).collect();
        assert_eq!(tokenizer.encode_segments(&untrusted), tokenizer.encode(&whole), "{family}");
        // A token across a boundary is ordinary text; user-defined tokens that no template uses are recognized
        // everywhere.
        let mixed: Vec<Segment> =
            parts.iter().enumerate().map(|(at, part)| Segment { text: (*part).into(), trusted: at % 2 == 0 }).collect();
        let ids = tokenizer.encode_segments(&mixed);
        assert!(ids.contains(&tokenizer.id_of("<|im_start|>").unwrap()), "{family}");
        assert!(!ids.contains(&tokenizer.id_of("<|im_end|>").unwrap()), "{family}");
        assert!(ids.contains(&tokenizer.id_of("<h1>").unwrap()), "{family}");
        assert_eq!(tokenizer.token(tokenizer.id_of("<h1>").unwrap()).unwrap().kind, TokenKind::UserDefined);
    }
}

/// A guarded token that matches normalized text is traced back to the original text.
#[test]
fn normalized_tokens_are_guarded_too() {
    use pellucid_tokenizer::Segment;
    let mut tokenizer = Tokenizer::from_hugging_face(&common::fixture("llama2")).unwrap();
    tokenizer.guard("<mask>");
    let mask = tokenizer.id_of("<mask>").unwrap();
    let count = |segments: &[Segment]| tokenizer.encode_segments(segments).iter().filter(|&&id| id == mask).count();
    assert_eq!(count(&[Segment::trusted("a b ▁<mask> c")]), 1);
    assert_eq!(count(&[Segment::trusted("a b "), Segment::untrusted("x ▁<mask> c")]), 0);
    assert_eq!(count(&[Segment::trusted("a ▁<mask> b "), Segment::untrusted("x ▁<mask> c")]), 1);
}
