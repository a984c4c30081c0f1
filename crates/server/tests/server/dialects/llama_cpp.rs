//! llama.cpp's routes, continued messages, gaps that are filled, and OpenAI's routes without `/v1`.

use pellucid_testing::TinyModel;
use serde_json::{Value, json};

use crate::support::{Response, Server, Setup, tenant};

fn post(server: &Server, path: &str, body: &Value) -> Response {
    server.post(path, &body.to_string())
}

#[test]
fn a_completion_has_the_text_of_openais() {
    let server = Server::start();
    let own = json!({ "prompt": "hello", "n_predict": 12, "seed": 7, "repeat_penalty": 1.2, "repeat_last_n": 4,
        "stop": ["Q"], "cache_prompt": true, "id_slot": -1 });
    let same = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 12, "seed": 7, "repetition_penalty": 1.2,
        "penalty_window": 4, "stop": ["Q"] });
    let whole = post(&server, "/completion", &own).ok();
    let expected = post(&server, "/v1/completions", &same).ok();
    assert_eq!(whole["content"], expected["choices"][0]["text"]);
    assert_eq!(whole["tokens_evaluated"], expected["usage"]["prompt_tokens"]);
    assert_eq!(whole["tokens_predicted"], expected["usage"]["completion_tokens"]);
    assert_eq!((&whole["stop"], &whole["stop_type"]), (&json!(true), &json!("limit")));
    let mut streamed = own;
    streamed["stream"] = json!(true);
    let events: Vec<Value> = server
        .stream("/completion", &streamed.to_string())
        .all()
        .iter()
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let joined: String = events.iter().map(|event| event["content"].as_str().unwrap()).collect();
    assert_eq!(whole["content"], joined);
    assert_eq!(events.last().unwrap()["tokens_predicted"], whole["tokens_predicted"]);
}

#[test]
fn biases_are_read_in_both_forms() {
    let server = Server::start();
    let reply = |bias: Value| {
        post(&server, "/completion", &json!({ "prompt": "hello", "n_predict": 6, "seed": 1, "logit_bias": bias })).ok()
            ["content"]
            .clone()
    };
    assert_eq!(reply(json!([[40, 100]])), reply(json!({ "40": 100 })));
    assert_ne!(reply(json!([[40, 100]])), reply(json!([[40, false]])));
}

#[test]
fn the_last_message_is_continued() {
    let server = Server::start();
    let messages = json!([{ "role": "user", "content": "hello" }, { "role": "assistant", "content": "once upon" }]);
    let fields = json!({ "model": "tiny", "messages": messages, "max_tokens": 8, "seed": 7 });
    let with = |name: &str, value: Value| {
        let mut body = fields.clone();
        body[name] = value;
        body
    };
    let continued = post(&server, "/v1/chat/completions", &with("continue_final_message", json!(true))).ok();
    // The prompt is what the template writes up to the end of the text.
    let rendered = json!({ "messages": messages, "add_generation_prompt": false });
    let rendered = post(&server, "/apply-template", &rendered).ok()["prompt"].as_str().unwrap().to_owned();
    let cut = rendered.rfind("once upon").unwrap() + "once upon".len();
    assert!(cut < rendered.len(), "the template ends the message: {rendered:?}");
    let closed = post(&server, "/v1/chat/completions", &with("add_generation_prompt", json!(false))).ok();
    let answered = post(&server, "/v1/chat/completions", &fields).ok();
    let prompt = |reply: &Value| reply["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(prompt(&continued) < prompt(&closed) && prompt(&closed) < prompt(&answered));
    // Anthropic's API continues a last message of the assistant without a field for it.
    let headers = [("Content-Type", "application/json"), ("anthropic-version", "2023-06-01")];
    let message = server.request("POST", "/v1/messages", &headers, fields.to_string().as_bytes()).ok();
    assert_eq!(message["content"][0]["text"], continued["choices"][0]["message"]["content"]);
    let refused = |body: &Value| post(&server, "/v1/chat/completions", body).refused(400).0;
    let mut both = with("continue_final_message", json!(true));
    both["add_generation_prompt"] = json!(true);
    assert_eq!(refused(&both).as_deref(), Some("continue_final_message"));
    let mut user = with("continue_final_message", json!(true));
    user["messages"] = json!([{ "role": "user", "content": "hello" }]);
    assert_eq!(refused(&user).as_deref(), Some("continue_final_message"));
}

#[test]
fn gaps_are_filled_by_models_that_know_how() {
    let tiny = TinyModel { fills_gaps: true, ..TinyModel::default() };
    let server = Server::with(Setup { tiny, ..Setup::default() });
    let body = json!({ "model": "tiny", "prompt": "abc", "suffix": "xyz", "max_tokens": 8, "seed": 7 });
    let filled = post(&server, "/v1/completions", &body).ok();
    let ids = |text: &str| post(&server, "/tokenize", &json!({ "prompt": text, "add_special_tokens": false })).ok();
    let count = |text: &str| ids(text)["count"].as_u64().unwrap();
    let bos = post(&server, "/tokenize", &json!({ "prompt": "abc" })).ok()["count"].as_u64().unwrap() - count("abc");
    assert_eq!(filled["usage"]["prompt_tokens"], bos + count("abc") + count("xyz") + 3);
    let infill = json!({ "input_prefix": "ab", "prompt": "c", "input_suffix": "xyz", "n_predict": 8, "seed": 7 });
    assert_eq!(post(&server, "/infill", &infill).ok()["content"], filled["choices"][0]["text"]);
    // Another suffix is another prompt.
    let mut other = body.clone();
    other["suffix"] = json!("zyx");
    assert_ne!(post(&server, "/v1/completions", &other).ok()["choices"], filled["choices"]);
    let mut echoed = body.clone();
    echoed["echo"] = json!(true);
    assert_eq!(post(&server, "/v1/completions", &echoed).refused(400).0.as_deref(), Some("echo"));
    let plain = Server::start();
    assert_eq!(post(&plain, "/v1/completions", &body).refused(400).0.as_deref(), Some("suffix"));
}

#[test]
fn refusals_name_the_field() {
    let server = Server::start();
    for (fields, named) in [
        (json!({ "n_probs": 5 }), "n_probs"),
        (json!({ "samplers": ["top_k"] }), "samplers"),
        (json!({ "min_keep": 2 }), "min_keep"),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "grammar": "root ::= [" }), "grammar"),
        (json!({ "grammar": "root ::= \"a\"", "json_schema": {} }), "json_schema"),
        (json!({ "n_predict": -5 }), "n_predict"),
        (json!({ "unheard": 1 }), "unheard"),
    ] {
        let mut body = json!({ "prompt": "hello" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        assert_eq!(post(&server, "/completion", &body).refused(400).0.as_deref(), Some(named));
    }
}

#[test]
fn routes_without_v1_and_properties_are_served() {
    let server = Server::start();
    let chat = json!({ "model": "tiny", "messages": [{ "role": "user", "content": "a" }], "max_tokens": 4, "seed": 1 });
    let text = |reply: Value| reply["choices"][0].clone();
    assert_eq!(
        text(post(&server, "/chat/completions", &chat).ok()),
        text(post(&server, "/v1/chat/completions", &chat).ok())
    );
    let completion = json!({ "model": "tiny", "prompt": "a", "max_tokens": 4, "seed": 1 });
    assert_eq!(
        text(post(&server, "/completions", &completion).ok()),
        text(post(&server, "/v1/completions", &completion).ok())
    );
    assert_eq!(server.get("/models").ok(), server.get("/v1/models").ok());
    let props = server.get("/props").ok();
    assert_eq!((&props["total_slots"], &props["default_generation_settings"]["n_ctx"]), (&json!(8), &json!(256)));
    assert_eq!(props["default_generation_settings"]["params"]["temperature"], json!(1.0));
    assert_eq!(server.get("/slots").ok().as_array().unwrap().len(), 8);
    // With several tenants, slots need the right to metrics.
    let keys =
        Server::with(Setup { tenants: vec![tenant("a", "key-of-a"), tenant("b", "key-of-b")], ..Setup::default() });
    let slots = keys.request("GET", "/slots", &[("Authorization", "Bearer key-of-a")], b"");
    assert_eq!(slots.status, 403, "{}", slots.text());
}
