//! Thoughts through the API: apart from the answer, whole and streamed, with a budget, a grammar and earlier thoughts.

use crate::support::{Server, Setup, chat_body};
use pellucid_testing::TinyModel;
use serde_json::{Value, json};

/// Begins the thoughts in the prompt, unless thinking is off, and writes earlier ones.
const TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: \
    {% if m.reasoning_content %}<think>\n{{ m.reasoning_content }}\n</think>\n\n{% endif %}\
    {{ m.content }}[end]{% endfor %}\
    {% if add_generation_prompt %}[turn]{% if enable_thinking is defined and not enable_thinking %}<think></think>\
    {% else %}<think>\n{% endif %}{% endif %}";

const BRACKETS: TinyModel<'static> =
    TinyModel { template: None, context_len: None, has_words: false, has_brackets: true, fills_gaps: false };

fn thinker() -> Server {
    Server::with(Setup { context_len: 1024, template: TEMPLATE, tiny: BRACKETS, ..Setup::default() })
}

/// Returns thoughts and answer of a whole reply.
fn parts(reply: &Value) -> (String, String) {
    let message = &reply["choices"][0]["message"];
    let text = |name: &str| message[name].as_str().unwrap_or_default().to_owned();
    (text("reasoning_content"), text("content"))
}

const SAMPLED: &str = r#""temperature":1.0,"seed":5,"max_tokens":60,"thinking_budget":6"#;

#[test]
fn thoughts_are_apart_from_the_answer_whole_and_streamed() {
    let server = thinker();
    let reply = server.chat(SAMPLED).ok();
    let (thoughts, answer) = parts(&reply);
    assert!(!thoughts.is_empty() && !answer.is_empty(), "{reply}");
    assert!(thoughts.chars().count() <= 6, "every character is a token: {thoughts:?}");
    assert!(!answer.contains("think>"), "{answer:?}");
    let details = &reply["usage"]["completion_tokens_details"];
    // Six tokens, and the marker with white space, of which every character is a token.
    assert_eq!(details["reasoning_tokens"], 6 + "\n</think>\n\n".len(), "{reply}");
    let body = chat_body(&format!("{SAMPLED},\"stream\":true"));
    let chunks = server.stream("/v1/chat/completions", &body).chunks();
    let joined = |name: &str| -> String {
        let deltas = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"][name].as_str());
        deltas.collect()
    };
    assert_eq!((joined("reasoning_content"), joined("content")), (thoughts.clone(), answer));
    assert_eq!(joined("reasoning"), thoughts);
}

#[test]
fn a_budget_gives_the_same_bytes_in_a_batch_and_with_drafts() {
    let server = thinker();
    for budget in [0, 1, 5] {
        let fields = format!(r#""temperature":1.2,"seed":9,"max_tokens":50,"thinking_budget":{budget}"#);
        let alone = parts(&server.chat(&fields).ok());
        assert!(alone.0.chars().count() <= budget, "{alone:?}");
        assert!(!alone.1.is_empty(), "{alone:?}");
        let drafted = format!(r#"{fields},"prediction":{{"type":"content","content":"{}"}}"#, "the end of hello");
        assert_eq!(parts(&server.chat(&drafted).ok()), alone);
        std::thread::scope(|scope| {
            let others = (0..4).map(|seed| {
                let server = &server;
                let other = format!(r#""temperature":1.0,"seed":{seed},"max_tokens":40,"thinking_budget":{seed}"#);
                scope.spawn(move || server.chat(&other).ok())
            });
            let others: Vec<_> = others.collect();
            assert_eq!(parts(&server.chat(&fields).ok()), alone);
            others.into_iter().for_each(|other| drop(other.join().unwrap()));
        });
    }
}

#[test]
fn a_grammar_applies_to_the_answer() {
    let server = thinker();
    for seed in 0..10 {
        let format = r#""response_format":{"type":"json_schema","json_schema":{"name":"n","strict":true,"schema":
            {"type":"object","properties":{"a":{"type":"integer","minimum":0,"maximum":99}},"required":["a"],
             "additionalProperties":false}}}"#;
        let fields = format!(
            r#"{format},"temperature":1.5,"seed":{seed},"max_tokens":120,"thinking_budget":10"#,
            format = format.replace('\n', " ")
        );
        let reply = server.chat(&fields).ok();
        let (thoughts, answer) = parts(&reply);
        let value: Value = serde_json::from_str(&answer).unwrap_or_else(|error| panic!("{error}: {reply}"));
        assert!(value["a"].as_u64().is_some_and(|a| a <= 99), "{answer}");
        assert!(!thoughts.contains("</think>"), "{thoughts:?}");
        assert_eq!(reply["choices"][0]["finish_reason"], "stop", "{reply}");
    }
}

#[test]
fn log_probabilities_are_those_of_the_answer() {
    let server = thinker();
    let reply = server.chat(&format!("{SAMPLED},\"logprobs\":true,\"trace\":true")).ok();
    let choice = &reply["choices"][0];
    let tokens = choice["logprobs"]["content"].as_array().unwrap();
    let text: String = tokens.iter().map(|token| token["token"].as_str().unwrap()).collect();
    assert_eq!(text, parts(&reply).1);
    assert!(choice["trace"].as_array().unwrap().len() > tokens.len(), "{reply}");
    assert!(choice["trace"].to_string().contains("thinking_budget (6)"), "{reply}");
}

#[test]
fn the_effort_sets_a_variable_of_the_template() {
    let server = thinker();
    let reply = server.chat(r#""reasoning_effort":"none","max_tokens":12"#).ok();
    let (thoughts, answer) = parts(&reply);
    assert!(thoughts.is_empty() && !answer.is_empty(), "{reply}");
    assert!(reply["choices"][0]["message"].get("reasoning_content").is_none(), "{reply}");
    assert_eq!(reply["usage"]["completion_tokens_details"]["reasoning_tokens"], 0);
    let render = |fields: &str| {
        let body = format!(r#"{{"messages":[{{"role":"user","content":"hello"}}],{fields}}}"#);
        server.post("/apply-template", &body).ok()["prompt"].as_str().unwrap().to_owned()
    };
    assert!(render(r#""reasoning_effort":"none""#).ends_with("<think></think>"));
    assert!(render(r#""reasoning_effort":"high""#).ends_with("<think>\n"));
    let both = r#""reasoning_effort":"low","chat_template_kwargs":{"enable_thinking":true}"#;
    assert_eq!(server.chat(both).refused(400).0.as_deref(), Some("reasoning_effort"));
    assert_eq!(server.chat(r#""reasoning_effort":"much""#).refused(400).0.as_deref(), Some("reasoning_effort"));
    let beams = r#""thinking_budget":3,"beam_width":2"#;
    assert_eq!(server.chat(beams).refused(400).0.as_deref(), Some("thinking_budget"));
}

#[test]
fn earlier_thoughts_reach_the_template() {
    let server = thinker();
    let rendered = |message: Value| {
        let messages = json!([{ "role": "user", "content": "a" }, message, { "role": "user", "content": "b" }]);
        server.post("/apply-template", &json!({ "messages": messages }).to_string())
    };
    let answer = |name: &str| json!({ "role": "assistant", "content": "x", name: "Hm [end]" });
    for name in ["reasoning_content", "reasoning"] {
        let prompt = rendered(answer(name)).ok()["prompt"].as_str().unwrap().to_owned();
        assert!(prompt.contains("assistant: <think>\nHm [end]\n</think>\n\nx[end]"), "{prompt}");
    }
    let user = json!({ "role": "user", "content": "x", "reasoning_content": "Hm" });
    assert_eq!(rendered(user).refused(400).0.as_deref(), Some("messages[1].reasoning_content"));
}

#[test]
fn a_model_without_thoughts_refuses_settings_by_name() {
    let server = Server::start();
    for (field, name) in
        [(r#""reasoning_effort":"low""#, "reasoning_effort"), (r#""thinking_budget":3"#, "thinking_budget")]
    {
        let (param, code) = server.chat(field).refused(400);
        assert_eq!((param.as_deref(), code.as_deref()), (Some(name), Some("unsupported_parameter")));
    }
    let body = chat_body(
        r#""messages":[{"role":"assistant","content":"x","reasoning_content":"Hm"},{"role":"user","content":"a"}]"#,
    );
    let (param, _) = server.post("/v1/chat/completions", &body).refused(400);
    assert_eq!(param.as_deref(), Some("messages[0].reasoning_content"));
}
