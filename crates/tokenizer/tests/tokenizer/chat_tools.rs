//! Conversations with tools render as the reference implementation renders them, with every published template. The
//! templates come from the conformance data; the hashes of the expected texts from `fixtures/make_tool_fixtures.py`.

use pellucid_tokenizer::{ChatTemplate, Conversation, DateTime, Tokenizer};
use serde_json::Value;

use crate::common;

const NOW: DateTime = DateTime { year: 2026, month: 11, day: 5, hour: 15, minute: 4, second: 9 };

/// Conversations that the reference refuses because the template loops over `None`, which has no items here.
const LENIENT: &[(&str, &str)] = &[("LFM2.5-8B-A1B.jinja", "call without content")];

fn fnv1a(text: &str) -> String {
    let hash =
        text.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| (hash ^ byte as u64).wrapping_mul(0x100_0000_01B3));
    format!("{hash:016x}")
}

#[test]
fn tools_and_calls_render_like_the_reference() {
    let Some(templates) = common::conformance("templates") else { return };
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/fixtures/chat/tools.json");
    let fixture: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    // Its first tokens are those of the fixture: `<s>`, `</s>` and `<unk>`.
    let mut folder = common::fixture("llama2");
    folder.tokenizer_config =
        Some(serde_json::json!({ "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>" }));
    let tokenizer = Tokenizer::from_hugging_face(&folder).unwrap();
    let (mut num_rendered, mut failures) = (0, Vec::new());
    for (name, rows) in fixture["templates"].as_object().unwrap() {
        let source = std::fs::read_to_string(templates.join(name)).unwrap();
        let template = ChatTemplate::compile(&source, &tokenizer).unwrap();
        for (kind, expected) in rows.as_object().unwrap() {
            let conversation = &fixture["conversations"][kind];
            let rendered = template.render_unguarded(&Conversation {
                messages: conversation["messages"].as_array().unwrap(),
                tools: conversation.get("tools"),
                add_generation_prompt: true,
                now: Some(NOW),
                ..Conversation::default()
            });
            match rendered {
                Err(_) if *expected == "refused" => {}
                Ok(text) if *expected == fnv1a(&text).as_str() => num_rendered += 1,
                Ok(_) if *expected == "refused" && LENIENT.contains(&(name.as_str(), kind.as_str())) => {}
                Ok(_) => failures.push(format!("{name}, {kind}: another text")),
                Err(error) => failures.push(format!("{name}, {kind}: {error}")),
            }
        }
    }
    println!("{num_rendered} conversations");
    assert!(failures.is_empty(), "{}", failures.join("\n"));
    assert!(num_rendered >= 300, "{num_rendered}");
}
