//! Anthropic's Messages API: the same texts as OpenAI's, events in the documented order, refusals in its own form.

use crate::support::{Response, Server, Setup, tenant};
use serde_json::{Value, json};

const VERSION: (&str, &str) = ("anthropic-version", "2023-06-01");
const PATH: &str = "/v1/messages";

fn post(server: &Server, path: &str, body: &Value) -> Response {
    server.request("POST", path, &[("Content-Type", "application/json"), VERSION], body.to_string().as_bytes())
}

/// Returns a request with `fields`, which replace the default ones of the same name.
fn body(fields: Value) -> Value {
    let mut body = json!({ "model": "tiny", "max_tokens": 8, "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Returns the events of a streamed message, each with its name.
fn events(server: &Server, body: &Value) -> Vec<(String, Value)> {
    let response = post(server, PATH, body);
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let text = response.text();
    let event = |event: &str| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        let name = name.strip_prefix("event: ").unwrap();
        assert_eq!(data["type"], name);
        (name.to_owned(), data)
    };
    text.split_terminator("\n\n").map(event).collect()
}

#[test]
fn a_message_has_the_text_of_a_chat() {
    let server = Server::start();
    for fields in [json!({ "seed": 7 }), json!({ "seed": 9, "temperature": 0.5, "top_k": 20, "top_p": 0.9 })] {
        let message = post(&server, PATH, &body(fields.clone())).ok();
        let chat = server.post("/v1/chat/completions", &body(fields).to_string()).ok();
        assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
        assert_eq!(message["content"].as_array().unwrap().len(), 1);
        assert_eq!((&message["type"], &message["role"]), (&json!("message"), &json!("assistant")));
        assert_eq!(message["stop_reason"], "max_tokens");
        assert_eq!(message["stop_sequence"], Value::Null);
        let usage = &message["usage"];
        let input = usage["input_tokens"].as_u64().unwrap() + usage["cache_read_input_tokens"].as_u64().unwrap();
        assert_eq!(input, chat["usage"]["prompt_tokens"]);
        assert_eq!(usage["output_tokens"], 8);
    }
}

#[test]
fn cached_tokens_are_counted_apart() {
    let server = Server::start();
    let long = "once upon a time ".repeat(8);
    let request = body(json!({ "messages": [{ "role": "user", "content": [
        { "type": "text", "text": long, "cache_control": { "type": "ephemeral", "ttl": "1h" } }] }] }));
    let first = post(&server, PATH, &request).ok()["usage"].clone();
    let second = post(&server, PATH, &request).ok()["usage"].clone();
    assert_eq!(first["cache_read_input_tokens"], 0);
    let cached = second["cache_read_input_tokens"].as_u64().unwrap();
    assert!(cached > 0, "{second}");
    assert_eq!(second["input_tokens"].as_u64().unwrap() + cached, first["input_tokens"]);
}

#[test]
fn events_come_in_the_documented_order_and_join_to_the_message() {
    let server = Server::start();
    for fields in [json!({ "seed": 7 }), json!({ "seed": 9, "max_tokens": 40, "stop_sequences": ["e", "Q"] })] {
        let whole = post(&server, PATH, &body(fields.clone())).ok();
        let mut streamed = fields;
        streamed["stream"] = json!(true);
        let events = events(&server, &body(streamed));
        let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
        let num_deltas = names.iter().filter(|name| **name == "content_block_delta").count();
        let mut expected = vec!["message_start", "ping", "content_block_start"];
        expected.extend(vec!["content_block_delta"; num_deltas]);
        expected.extend(["content_block_stop", "message_delta", "message_stop"]);
        assert_eq!(names, expected);
        let text: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
        assert_eq!(whole["content"][0]["text"], text);
        let last = &events[events.len() - 2].1;
        assert_eq!(last["delta"]["stop_reason"], whole["stop_reason"]);
        assert_eq!(last["delta"]["stop_sequence"], whole["stop_sequence"]);
        assert_eq!(last["usage"]["output_tokens"], whole["usage"]["output_tokens"]);
        let start = &events[0].1["message"];
        assert_eq!((&start["content"], &start["stop_reason"]), (&json!([]), &Value::Null));
        assert!(start["usage"]["input_tokens"].as_u64().unwrap() > 0);
    }
}

#[test]
fn conversations_are_rendered_like_those_of_a_chat() {
    let server = Server::start();
    let blocks = |texts: &[&str]| -> Value {
        texts.iter().map(|text| json!({ "type": "text", "text": text })).collect::<Vec<_>>().into()
    };
    // Consecutive messages of one role become one.
    let conversation = json!({ "temperature": 0, "system": blocks(&["Be brief.", "Be kind."]), "messages": [
        { "role": "user", "content": "hello" },
        { "role": "user", "content": blocks(&["there"]) },
        { "role": "assistant", "content": blocks(&["hi"]) },
        { "role": "user", "content": blocks(&["what", "is it"]) }] });
    let expected = json!([
        { "role": "system", "content": "Be brief.\nBe kind." },
        { "role": "user", "content": "hello\nthere" },
        { "role": "assistant", "content": "hi" },
        { "role": "user", "content": "what\nis it" }]);
    let message = post(&server, PATH, &body(conversation.clone())).ok();
    let chat = json!({ "model": "tiny", "max_tokens": 8, "temperature": 0, "messages": expected });
    let chat = server.post("/v1/chat/completions", &chat.to_string()).ok();
    assert_eq!(message["content"][0]["text"], chat["choices"][0]["message"]["content"]);
    let mut counted = conversation;
    counted["model"] = json!("tiny");
    counted.as_object_mut().unwrap().remove("temperature");
    let count = post(&server, "/v1/messages/count_tokens", &counted).ok();
    assert_eq!(count, json!({ "input_tokens": chat["usage"]["prompt_tokens"] }));
}

#[test]
fn hints_of_agents_change_nothing() {
    let server = Server::start();
    let plain = post(&server, PATH, &body(json!({ "seed": 7 }))).ok();
    let hinted = post(
        &server,
        PATH,
        &body(json!({ "seed": 7, "thinking": { "type": "adaptive" }, "output_config": { "effort": "xhigh" },
            "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] } })),
    );
    assert_eq!(hinted.ok()["content"], plain["content"]);
}

#[test]
fn the_context_ends_a_reply_that_may_be_longer() {
    let server = Server::with(Setup { context_len: 64, ..Setup::default() });
    let message = post(&server, PATH, &body(json!({ "max_tokens": 32_000, "temperature": 0 }))).ok();
    let usage = &message["usage"];
    let num_tokens = usage["input_tokens"].as_u64().unwrap() + usage["output_tokens"].as_u64().unwrap();
    match message["stop_reason"].as_str().unwrap() {
        "model_context_window_exceeded" => assert_eq!(num_tokens, 64),
        reason => assert_eq!(reason, "end_turn"),
    }
    let long = "once upon a time ".repeat(40);
    let refused = post(&server, PATH, &body(json!({ "messages": [{ "role": "user", "content": long }] })));
    assert_eq!(refused.status, 400, "{}", refused.text());
}

#[test]
fn refusals_name_the_field_that_was_sent() {
    let server = Server::start();
    let image = json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "" } });
    for (fields, named) in [
        (json!({ "max_tokens": null }), "max_tokens is missing"),
        (json!({ "max_tokens": 0 }), "max_tokens: expected 1 to"),
        (json!({ "stop_sequences": [1] }), "stop_sequences: expected a string"),
        (json!({ "stop_sequences": "a" }), "stop_sequences: expected an array of strings"),
        (json!({ "frequency_penalty": 1 }), "unknown field \"frequency_penalty\""),
        (json!({ "temperature": -1 }), "temperature"),
        (json!({ "messages": [] }), "messages: expected at least one message"),
        (json!({ "messages": [{ "role": "tool", "content": "a" }] }), "messages[0].role: expected user, assistant or"),
        (json!({ "speed": "fast" }), "speed is not supported"),
        (json!({ "messages": [{ "role": "user", "content": [image] }] }), "messages[0].content[0].type: this server"),
        (
            json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a", "x": 1 }] }] }),
            "messages[0].content[0].x",
        ),
        (json!({ "system": 5 }), "system: expected"),
        (json!({ "metadata": { "user": "a" } }), "metadata.user"),
        (json!({ "mcp_servers": [{}] }), "mcp_servers is not supported"),
        (json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }] }), "tools[0].type: this server"),
        (json!({ "thinking": { "type": "enabled" } }), "thinking.budget_tokens is missing"),
        (json!({ "output_config": { "effort": "huge" } }), "output_config.effort: expected one of"),
        (
            json!({ "context_management": { "edits": [{ "type": "clear_tool_uses_20250919" }] } }),
            "context_management.edits[0].type: this server drops nothing",
        ),
        (
            json!({ "context_management": { "edits": [{ "type": "clear_thinking_20251015" }] } }),
            "context_management.edits[0].keep: this server drops no thoughts",
        ),
        (
            json!({ "output_config": { "format": { "type": "json_schema", "schema": { "type": "no" } } } }),
            "output_config.format.schema",
        ),
    ] {
        let response = post(&server, PATH, &body(fields));
        assert_eq!(response.status, 400, "{named}: {}", response.text());
        let error = response.json();
        assert_eq!((&error["type"], &error["error"]["type"]), (&json!("error"), &json!("invalid_request_error")));
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains(named), "{message:?} does not contain {named:?}");
        assert_eq!(error["request_id"].as_str(), response.header("request-id"));
    }
}

#[test]
fn every_refusal_has_anthropics_form() {
    let server = Server::with(Setup { tenants: vec![tenant("a", "key-a-0123456789")], ..Setup::default() });
    let json_type = ("Content-Type", "application/json");
    let key = ("x-api-key", "key-a-0123456789");
    let request = body(json!({})).to_string();
    let other = body(json!({ "model": "other" })).to_string();
    for (headers, body, status, kind) in [
        (vec![json_type, VERSION], &request, 401, "authentication_error"),
        (vec![json_type, VERSION, ("x-api-key", "wrong")], &request, 401, "authentication_error"),
        (vec![json_type, key], &request, 400, "invalid_request_error"),
        (vec![VERSION, key], &request, 415, "invalid_request_error"),
        (vec![json_type, VERSION, key], &other, 404, "not_found_error"),
    ] {
        let response = server.request("POST", PATH, &headers, body.as_bytes());
        assert_eq!((response.status, &response.json()["error"]["type"]), (status, &json!(kind)), "{}", response.text());
    }
    let response = server.request("GET", PATH, &[VERSION, key], b"");
    assert_eq!((response.status, &response.json()["type"]), (405, &json!("error")));
    assert_eq!(server.request("POST", PATH, &[json_type, VERSION, key], request.as_bytes()).status, 200);
}

#[test]
fn a_reply_that_fails_ends_with_an_error_event() {
    let server = Server::start();
    let prompt = post(
        &server,
        "/v1/messages/count_tokens",
        &json!({ "model": "tiny",
        "messages": [{ "role": "user", "content": "hello" }] }),
    );
    let position = prompt.ok()["input_tokens"].as_u64().unwrap() as u32 + 2;
    server.fail_from(position);
    let events = events(&server, &body(json!({ "stream": true, "max_tokens": 20, "temperature": 0 })));
    let (name, error) = events.last().unwrap();
    assert_eq!((name.as_str(), &error["error"]["type"]), ("error", &json!("api_error")));
    assert!(!events.iter().any(|(name, _)| name == "message_stop"));
}
