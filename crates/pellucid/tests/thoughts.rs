//! Thoughts of the tiny model with a chat template that has them.

use pellucid::{Device, Pellucid, Request};

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/models/tiny.gguf");
const PROMPT: &str = "Once upon a time";
/// Begins the thoughts in the prompt.
const THINKING: &str = "{% for m in messages %}{{ m.content.split('</think>')[-1] }}\n{% endfor %}<think>\n";

#[test]
fn thoughts_are_apart_from_the_text_and_have_a_budget() {
    let model = Pellucid::builder(TINY).device(Device::Cpu).threads(1).chat_template(THINKING).open().unwrap();
    let reply = model.generate(Request::chat(PROMPT).thinking_budget(5).max_tokens(60)).unwrap();
    assert!(!reply.thoughts().is_empty() && !reply.text().is_empty(), "{reply:?}");
    assert!(!reply.text().contains("think>"), "{reply:?}");
    assert!(reply.summary.thought_tokens >= 5, "{reply:?}");
    // The tiny model does not end its thoughts.
    let free = model.generate(Request::chat(PROMPT).max_tokens(60)).unwrap();
    assert!(free.thoughts().starts_with(reply.thoughts()) && free.text().is_empty(), "{free:?}");
    let refused = |request: Request| model.generate(request).unwrap_err().to_string();
    assert!(refused(Request::chat(PROMPT).reasoning_effort("low")).contains("no setting of its reasoning"));
    assert!(refused(Request::text(PROMPT).thinking_budget(5)).contains("a chat"));
    assert!(refused(Request::chat(PROMPT).reasoning_effort("much")).contains("one of none, minimal"));
}
