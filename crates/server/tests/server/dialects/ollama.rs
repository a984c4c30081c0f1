//! Ollama's API: the same texts as OpenAI's, lines of JSON, refusals as one string.

use serde_json::{Value, json};

use crate::support::{Response, Server, Setup, tenant};

fn post(server: &Server, path: &str, body: &Value) -> Response {
    server.post(path, &body.to_string())
}

/// Returns a request of `/api/chat` with `fields`, which replace the default ones of the same name.
fn chat(fields: Value) -> Value {
    let mut body = json!({ "model": "tiny", "stream": false, "messages": [{ "role": "user", "content": "hello" }],
        "options": { "num_predict": 8, "seed": 7 } });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

fn openai(server: &Server, fields: Value) -> Value {
    let mut body = json!({ "model": "tiny", "max_tokens": 8, "seed": 7,
        "messages": [{ "role": "user", "content": "hello" }] });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    post(server, "/v1/chat/completions", &body).ok()
}

fn lines(response: &Response) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("application/x-ndjson"));
    response.text().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_chat_has_the_text_of_openais() {
    let server = Server::start();
    let reply = post(&server, "/api/chat", &chat(json!({}))).ok();
    let expected = openai(&server, json!({}));
    assert_eq!(reply["message"]["content"], expected["choices"][0]["message"]["content"]);
    assert_eq!((&reply["done"], &reply["done_reason"]), (&json!(true), &json!("length")));
    assert_eq!(reply["prompt_eval_count"], expected["usage"]["prompt_tokens"]);
    assert_eq!(reply["eval_count"], 8);
    assert!(reply["total_duration"].as_u64().unwrap() >= reply["eval_duration"].as_u64().unwrap());
    // Options have their effect under Ollama's names.
    let options = json!({ "num_predict": 20, "seed": 3, "temperature": 1.5, "top_k": 9, "repeat_penalty": 1.3,
        "repeat_last_n": 5, "stop": ["e", "Q"], "num_thread": 3, "num_gpu": 0, "mirostat_tau": 2 });
    let reply = post(&server, "/api/chat", &chat(json!({ "options": options }))).ok();
    let expected = openai(
        &server,
        json!({ "max_tokens": 20, "seed": 3, "temperature": 1.5, "top_k": 9,
        "repetition_penalty": 1.3, "penalty_window": 5, "stop": ["e", "Q"] }),
    );
    assert_eq!(reply["message"]["content"], expected["choices"][0]["message"]["content"]);
    assert_eq!(reply["eval_count"], expected["usage"]["completion_tokens"]);
}

#[test]
fn lines_join_to_the_whole_reply() {
    let server = Server::start();
    for (path, body) in [
        ("/api/chat", chat(json!({}))),
        (
            "/api/generate",
            json!({ "model": "tiny:latest", "prompt": "hello", "stream": false, "system": "Be brief.",
            "options": { "num_predict": 8, "seed": 7 } }),
        ),
        (
            "/api/generate",
            json!({ "model": "tiny", "prompt": "hello", "stream": false, "raw": true,
            "options": { "num_predict": 8, "seed": 7 } }),
        ),
    ] {
        let text =
            |reply: &Value| reply["message"]["content"].as_str().or(reply["response"].as_str()).unwrap().to_owned();
        let whole = post(&server, path, &body).ok();
        // Streaming is the default.
        let mut streamed = body;
        streamed.as_object_mut().unwrap().remove("stream");
        let lines = lines(&post(&server, path, &streamed));
        let (last, before) = lines.split_last().unwrap();
        assert!(before.iter().all(|line| line["done"] == false && line["model"] == "tiny"));
        assert_eq!(before.iter().map(text).collect::<String>(), text(&whole), "{path}");
        assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &whole["done_reason"]));
        assert_eq!(last["eval_count"], whole["eval_count"]);
    }
}

#[test]
fn a_raw_prompt_is_continued_as_it_is() {
    let server = Server::start();
    let raw = json!({ "model": "tiny", "prompt": "hello", "raw": true, "stream": false,
        "options": { "num_predict": 8, "seed": 7 } });
    let reply = post(&server, "/api/generate", &raw).ok();
    let body = json!({ "model": "tiny", "prompt": "hello", "max_tokens": 8, "seed": 7 });
    let expected = post(&server, "/v1/completions", &body).ok();
    assert_eq!(reply["response"], expected["choices"][0]["text"]);
    // Without a limit the reply fills the context, or what num_ctx leaves of it.
    let mut unlimited = raw;
    unlimited["options"] = json!({ "seed": 7, "num_ctx": 40, "temperature": 1.0 });
    let reply = post(&server, "/api/generate", &unlimited).ok();
    let total = reply["prompt_eval_count"].as_u64().unwrap() + reply["eval_count"].as_u64().unwrap();
    assert!(total == 40 || reply["done_reason"] == "stop", "{reply}");
}

#[test]
fn a_body_needs_no_content_type_unless_a_page_sends_it() {
    let server = Server::start();
    let body = chat(json!({})).to_string();
    let status = |path: &str, headers: &[(&str, &str)]| server.request("POST", path, headers, body.as_bytes()).status;
    let form = ("Content-Type", "application/x-www-form-urlencoded");
    assert_eq!(status("/api/chat", &[]), 200);
    assert_eq!(status("/api/chat", &[form]), 200);
    for page in [("Origin", "http://evil.example"), ("Sec-Fetch-Site", "cross-site")] {
        assert_eq!(status("/api/chat", &[page]), 415);
        assert_eq!(status("/api/chat", &[form, page]), 415);
    }
    assert_eq!(status("/v1/chat/completions", &[form]), 415);
}

#[test]
fn a_request_without_a_prompt_loads_the_model() {
    let server = Server::start();
    for (path, field) in [("/api/chat", "message"), ("/api/generate", "response")] {
        let reply = post(&server, path, &json!({ "model": "tiny", "keep_alive": "5m" })).ok();
        assert_eq!((&reply["done_reason"], reply[field].is_null()), (&json!("load"), false), "{reply}");
        let unknown = post(&server, path, &json!({ "model": "none", "keep_alive": "5m" }));
        assert_eq!(unknown.status, 404, "a model that does not exist is not loaded");
        let unload = post(&server, path, &json!({ "model": "tiny", "keep_alive": 0 }));
        assert_eq!(unload.status, 400);
    }
}

#[test]
fn the_model_is_listed_and_described() {
    let server = Server::with(Setup { aliases: vec!["other".into()], ..Setup::default() });
    let tags = server.get("/api/tags").ok();
    let names: Vec<&str> =
        tags["models"].as_array().unwrap().iter().map(|model| model["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "other"]);
    assert_eq!(tags["models"][0]["details"]["family"], "llama");
    assert_eq!(server.get("/api/ps").ok()["models"][0]["context_length"], 256);
    let shown = post(&server, "/api/show", &json!({ "model": "other:latest" })).ok();
    assert_eq!(shown["model_info"]["llama.context_length"], 256);
    assert!(shown["template"].as_str().unwrap().contains("messages"));
    assert_eq!(post(&server, "/api/show", &json!({ "model": "none" })).status, 404);
    assert!(server.get("/api/version").ok()["version"].is_string());
}

#[test]
fn refusals_are_one_string_that_names_the_field() {
    let server = Server::start();
    for (fields, named) in [
        (json!({ "options": { "temperature": -1 } }), "options.temperature: expected"),
        (json!({ "options": { "num_ctx": 1000 } }), "options.num_ctx: this server's context has 256 tokens"),
        (json!({ "options": { "num_ctx": 3 } }), "options.num_ctx is 3 tokens, but the prompt has"),
        (json!({ "options": { "tfs_z": 0.5 } }), "options.tfs_z is not supported"),
        (json!({ "options": { "mirostat": 1 } }), "options.mirostat: expected 0 or 2"),
        (json!({ "options": { "unknown": 1 } }), "unknown field \"options.unknown\""),
        (json!({ "format": "yaml" }), "format: expected json or a schema"),
        (json!({ "format": { "type": "no" } }), "format"),
        (json!({ "think": true }), "think: this model has no thoughts"),
        (json!({ "keep_alive": "soon" }), "keep_alive: expected a duration"),
        (json!({ "messages": [{ "role": "user", "content": "a", "images": ["x"] }] }), "messages[0].images is not"),
        (json!({ "messages": [{ "role": "king", "content": "a" }] }), "messages[0].role"),
        (json!({ "temperature": 1 }), "unknown field \"temperature\""),
    ] {
        let response = post(&server, "/api/chat", &chat(fields));
        assert_eq!(response.status, 400, "{named}: {}", response.text());
        let error = response.json();
        let message = error["error"].as_str().unwrap();
        assert!(message.contains(named), "{message:?} does not contain {named:?}");
    }
    let generate = |fields: Value| {
        let mut body = json!({ "model": "tiny", "prompt": "a" });
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        post(&server, "/api/generate", &body).json()["error"].as_str().unwrap().to_owned()
    };
    assert!(generate(json!({ "context": [1, 2] })).contains("context is not supported"));
    assert!(generate(json!({ "raw": true, "system": "a" })).contains("system has no effect"));
    let keys = Server::with(Setup { tenants: vec![tenant("a", "key-a-0123456789")], ..Setup::default() });
    let refused = post(&keys, "/api/chat", &chat(json!({})));
    assert_eq!((refused.status, refused.json()["error"].is_string()), (401, true));
}

#[test]
fn a_reply_that_fails_ends_with_an_error_line() {
    let server = Server::start();
    let prompt = post(&server, "/api/chat", &chat(json!({}))).ok()["prompt_eval_count"].as_u64().unwrap();
    server.fail_from(prompt as u32 + 2);
    let body = chat(json!({ "stream": true, "options": { "num_predict": 20, "seed": 8 } }));
    let lines = lines(&post(&server, "/api/chat", &body));
    assert!(lines.last().unwrap()["error"].is_string(), "{lines:?}");
}

#[test]
fn routes_that_are_not_offered_say_what_takes_their_place() {
    let server = Server::start();
    for (method, path, named) in [
        ("DELETE", "/api/delete", "`pellucid rm`"),
        ("POST", "/api/copy", "`--alias`"),
        ("POST", "/api/create", "`--chat-template`"),
        ("POST", "/api/push", "uploads nothing"),
        ("POST", "/api/blobs/sha256:00", "/api/pull"),
        ("POST", "/api/embeddings", "/api/embed"),
    ] {
        let response = server.request(method, path, &[], b"");
        assert_eq!(response.status, 501, "{path}: {}", response.text());
        assert!(response.text().contains(named), "{path}: {}", response.text());
    }
    let unknown = server.request("POST", "/api/pushes", &[], b"");
    assert_eq!(unknown.status, 404);
    // Without keys, nobody has the right to fill the operator's disk.
    let refused = server.post("/api/pull", r#"{"model": "smollm2"}"#);
    assert_eq!((refused.status, refused.json().as_object().unwrap().len()), (403, 1), "{}", refused.text());
}
