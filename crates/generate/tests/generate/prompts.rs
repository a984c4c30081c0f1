//! Messages to token ids: text that cannot fit is refused before it is rendered, and rendering can be cancelled.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use pellucid_checkpoint::HuggingFace;
use pellucid_generate::{ChatPrompt, Error, PromptEncoder};
use pellucid_tokenizer::{ChatTemplate, DateTime, Error as TokenizerError, Tokenizer, message};
use serde_json::{Value, json};

use crate::support;

const NOW: fn() -> DateTime = || DateTime { year: 2026, month: 11, day: 17, hour: 12, minute: 0, second: 0 };

/// Returns the tokenizer of [`support`] without tokens that absorb white space: with them, the length of a text says
/// nothing about the number of its ids.
fn tokenizer_without_stripping() -> Tokenizer {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tokenizer/fixtures/tokenizers/gpt2.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    for token in json["added_tokens"].as_array_mut().unwrap() {
        (token["lstrip"], token["rstrip"]) = (false.into(), false.into());
    }
    let folder = HuggingFace {
        config: json!({}),
        generation_config: None,
        tokenizer: Some(json.to_string()),
        tokenizer_config: None,
        chat_template: None,
        ..HuggingFace::default()
    };
    Tokenizer::from_hugging_face(&folder).unwrap()
}

#[test]
fn contents_that_cannot_fit_are_refused_before_rendering() {
    let tokenizer = tokenizer_without_stripping();
    assert!(tokenizer.min_ids(4 << 20) > 100);
    // A template that fails whenever it runs.
    let template = ChatTemplate::compile("{{ nothing.here }}", &tokenizer).unwrap();
    let encoder = PromptEncoder::new(&tokenizer, Some(&template), NOW).within(100);
    let long = "x".repeat(4 << 20);
    for messages in
        [[message("user", &long)], [json!({ "role": "user", "content": [{ "type": "text", "text": long }] })]]
    {
        let result = encoder.encode_chat(&ChatPrompt::new(&messages));
        assert!(matches!(result, Err(Error::PromptTooLong { context_len: 100, .. })), "{result:?}");
    }
    let short = [message("user", "x")];
    let result = encoder.encode_chat(&ChatPrompt::new(&short));
    assert!(matches!(result, Err(Error::Template(TokenizerError::TemplateRender(_)))), "{result:?}");
}

#[test]
fn rendering_ends_when_its_flag_is_set() {
    let tokenizer = support::tokenizer();
    let template = ChatTemplate::compile("{% for m in messages %}{{ m.content }}{% endfor %}", &tokenizer).unwrap();
    let cancel = AtomicBool::new(false);
    let encoder = PromptEncoder::new(&tokenizer, Some(&template), NOW).cancelled_by(&cancel);
    let messages = [message("user", "x")];
    assert!(encoder.encode_chat(&ChatPrompt::new(&messages)).is_ok());
    cancel.store(true, Ordering::Relaxed);
    let result = encoder.encode_chat(&ChatPrompt::new(&messages));
    assert!(matches!(result, Err(Error::Template(TokenizerError::Cancelled))), "{result:?}");
}

#[test]
fn names_that_the_template_does_not_write_are_found() {
    let tokenizer = support::tokenizer();
    let named = |role: &str, name: &str| json!({ "role": role, "content": "x", "name": name });
    let unwritten = |source: &str, messages: &[Value]| {
        let template = ChatTemplate::compile(source, &tokenizer).unwrap();
        PromptEncoder::new(&tokenizer, Some(&template), NOW).unwritten_name(&ChatPrompt::new(messages)).unwrap()
    };
    // As the template of Kimi K2 writes names, and as templates that know tools write them.
    let always = "{% for m in messages %}{{ m.get('name') or m['role'] }}: {{ m.content }}{% endfor %}";
    let system_only =
        "{% for m in messages %}{% if m.role == 'system' %}{{ m.name }}{% endif %}{{ m.content }}{% endfor %}";
    let never = "{% for m in messages %}{{ m.content }}{% if m.name == 'nobody' %}?{% endif %}{% endfor %}";
    let messages = [message("user", "x"), named("system", "rules"), named("user", "Ann"), named("user", "Bob")];
    assert_eq!(unwritten(always, &messages), None);
    assert_eq!(unwritten(system_only, &messages), Some(2));
    assert_eq!(unwritten(never, &messages), Some(1));
    assert_eq!(unwritten(never, &messages[..1]), None);
}
