//! Bad input to every API: the same faults, refused with the same status, each in the error shape of the API.

use serde_json::{Value, json};

use crate::support::{Response, Server, Setup, tenant};

const KEY: &str = "key-of-a-0123456789";

/// An API: a route, a good request, and the field that holds its prompt.
struct Api {
    path: &'static str,
    good: Value,
    prompt: &'static str,
    /// Checks the shape of an error and returns its message.
    message: fn(&Response) -> String,
}

fn openai(response: &Response) -> String {
    let error = response.json();
    let names: Vec<&String> = error["error"].as_object().unwrap().keys().collect();
    assert_eq!(names, ["message", "type", "param", "code"], "{error}");
    assert_eq!(error.as_object().unwrap().len(), 1, "{error}");
    error["error"]["message"].as_str().unwrap().to_owned()
}

fn anthropic(response: &Response) -> String {
    let error = response.json();
    let names: Vec<&String> = error.as_object().unwrap().keys().collect();
    assert_eq!(names, ["type", "error", "request_id"], "{error}");
    assert_eq!((&error["type"], error["error"]["type"].is_string()), (&json!("error"), true), "{error}");
    error["error"]["message"].as_str().unwrap().to_owned()
}

fn ollama(response: &Response) -> String {
    let error = response.json();
    assert_eq!(error.as_object().unwrap().len(), 1, "{error}");
    error["error"].as_str().unwrap().to_owned()
}

fn apis() -> Vec<Api> {
    let hello = json!([{ "role": "user", "content": "hello" }]);
    let chat = json!({ "model": "tiny", "messages": hello, "max_tokens": 2 });
    let api = |path, prompt, message: fn(&Response) -> String, good: Value| Api { path, good, prompt, message };
    let text = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 2 });
    vec![
        api("/v1/chat/completions", "messages", openai, chat.clone()),
        api("/v1/completions", "prompt", openai, text),
        api("/v1/responses", "input", openai, json!({ "model": "tiny", "input": hello, "max_output_tokens": 2 })),
        api("/v1/messages", "messages", anthropic, chat),
        api("/v1/messages/count_tokens", "messages", anthropic, json!({ "model": "tiny", "messages": hello })),
        api("/api/chat", "messages", ollama, json!({ "model": "tiny", "messages": hello, "stream": false })),
        api("/api/generate", "prompt", ollama, json!({ "model": "tiny", "prompt": "hello", "stream": false })),
        api("/completion", "prompt", openai, json!({ "prompt": "hello", "n_predict": 2 })),
    ]
}

fn server() -> Server {
    Server::with(Setup { tenants: vec![tenant("a", KEY)], ..Setup::default() })
}

fn send(server: &Server, api: &Api, body: &[u8]) -> Response {
    let headers = [("Content-Type", "application/json"), ("anthropic-version", "2023-06-01"), ("X-Api-Key", KEY)];
    server.request("POST", api.path, &headers, body)
}

#[test]
fn every_api_refuses_bad_fields_in_its_own_shape() {
    let server = server();
    for api in apis() {
        let with = |name: &str, value: Value| {
            let mut body = api.good.clone();
            body[name] = value;
            body.to_string()
        };
        assert_eq!(send(&server, &api, api.good.to_string().as_bytes()).status, 200, "{}", api.path);
        let long = "once upon a time ".repeat(200);
        let long = match &api.good[api.prompt] {
            Value::String(_) => json!(long),
            _ => json!([{ "role": "user", "content": long }]),
        };
        let good = api.good.to_string();
        for (body, named) in [
            (with("surprise", json!(1)), "\"surprise\""),
            (with(api.prompt, json!(true)), api.prompt),
            (with(api.prompt, json!({ "a": 1 })), api.prompt),
            (with("stream", json!("yes")), "stream"),
            ("[]".into(), "object"),
            ("7".into(), "object"),
            (String::new(), ""),
            (good[..good.len() - 1].to_owned(), ""),
            (good.replacen('{', "{\"stream\":false,\"stream\":false,", 1), "stream"),
        ] {
            // Counting tokens takes no stream.
            let response = send(&server, &api, body.as_bytes());
            assert_eq!(response.status, 400, "{}: {body}: {}", api.path, response.text());
            let message = (api.message)(&response);
            assert!(message.contains(named), "{}: {message:?} does not name {named:?}", api.path);
        }
        if api.path != "/v1/messages/count_tokens" {
            let response = send(&server, &api, with(api.prompt, long).as_bytes());
            assert_eq!(response.status, 400, "{}: {}", api.path, response.text());
            assert!((api.message)(&response).contains("maximum context length is 256 tokens"), "{}", response.text());
        }
        if api.good.get("model").is_some() {
            let response = send(&server, &api, with("model", json!("other")).as_bytes());
            assert_eq!(response.status, 404, "{}: {}", api.path, response.text());
            assert!((api.message)(&response).contains("\"other\""));
            let response = send(&server, &api, with("model", json!(3)).as_bytes());
            assert_eq!(response.status, 400, "{}: {}", api.path, response.text());
            assert!((api.message)(&response).contains("model"));
        }
    }
}

#[test]
fn every_api_refuses_wrong_keys_and_methods_in_its_own_shape() {
    let server = server();
    for api in apis() {
        let good = api.good.to_string();
        for key in [None, Some("wrong-key-0123456789")] {
            let mut headers = vec![("Content-Type", "application/json"), ("anthropic-version", "2023-06-01")];
            headers.extend(key.map(|key| ("X-Api-Key", key)));
            let response = server.request("POST", api.path, &headers, good.as_bytes());
            assert_eq!(response.status, 401, "{}", api.path);
            assert!(!(api.message)(&response).contains("wrong-key"));
        }
        let response = server.request("GET", api.path, &[("X-Api-Key", KEY)], b"");
        assert_eq!(response.status, 405, "{}", api.path);
        assert!((api.message)(&response).contains("POST"), "{}", response.text());
    }
}
