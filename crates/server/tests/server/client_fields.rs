//! Requests as OpenAI's clients and frameworks send them: fields without effect, empty lists of tools, a random seed;
//! the same conversation in three routes; errors about routes.

use crate::support::{Server, Setup, tenant};
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";

/// A template with a variable.
const TEMPLATE: &str = "{% for m in messages %}[turn]{{ m.role }}: {{ m.content }}[end]{% endfor %}\
                        {% if mood is defined %}{{ mood }}{% endif %}{% if add_generation_prompt %}[turn]{% endif %}";

#[test]
fn fields_of_the_platform_are_checked_and_change_nothing() {
    let server = Server::start();
    let text = |reply: serde_json::Value| reply["choices"].clone();
    let plain = text(server.chat("\"seed\":3").ok());
    let plain_completion = text(server.complete("\"seed\":3").ok());
    let most = json!((0..16).map(|i| (format!("{i:064}"), json!("ä".repeat(512)))).collect::<serde_json::Map<_, _>>());
    for (field, value) in [
        ("metadata", json!({})),
        ("metadata", json!({ "topic": "demo" })),
        ("metadata", most),
        ("prompt_cache_key", json!("ä".repeat(64))),
        ("prompt_cache_key", json!("")),
        ("prompt_cache_retention", json!("in_memory")),
        ("prompt_cache_retention", json!("in-memory")),
        ("safety_identifier", json!("user-1")),
        ("user", json!("user-1")),
        ("store", json!(false)),
        ("service_tier", json!("auto")),
        ("service_tier", json!("default")),
    ] {
        let fields = format!("\"seed\":3,\"{field}\":{value}");
        assert_eq!(text(server.chat(&fields).ok()), plain, "{fields}");
        assert_eq!(text(server.complete(&fields).ok()), plain_completion, "{fields}");
    }
    // A request that names a tier learns which one was used; another one does not.
    for tier in ["auto", "default"] {
        let field = format!("\"service_tier\":\"{tier}\"");
        for reply in [server.chat(&field), server.complete(&field)] {
            assert_eq!(reply.ok()["service_tier"], "default", "{field}");
        }
        let chunks = server.chat(&format!("{field},\"stream\":true")).text().to_owned();
        let data: Vec<&str> = chunks.lines().filter(|line| line.starts_with("data: {")).collect();
        assert!(!data.is_empty() && data.iter().all(|line| line.contains("\"service_tier\":\"default\"")), "{chunks}");
    }
    assert!(server.chat("\"service_tier\":null").ok().get("service_tier").is_none());
    for field in [
        "\"parallel_tool_calls\":true",
        "\"parallel_tool_calls\":false",
        "\"tools\":[],\"tool_choice\":\"auto\",\"parallel_tool_calls\":true",
        "\"verbosity\":\"medium\"",
    ] {
        assert_eq!(text(server.chat(&format!("\"seed\":3,{field}")).ok()), plain, "{field}");
    }
    let stream = "\"stream\":true,\"stream_options\":{\"include_usage\":true,\"include_obfuscation\":false}";
    assert!(!server.chat(stream).text().contains("obfuscation"));
    let many = json!((0..17).map(|i| (i.to_string(), "a".into())).collect::<serde_json::Map<_, _>>());
    for (field, value, param, code) in [
        ("metadata", json!("a"), "metadata", "invalid_type"),
        ("metadata", json!({ "a": 1 }), "metadata.a", "invalid_type"),
        ("metadata", json!({ "a": { "b": "c" } }), "metadata.a", "invalid_type"),
        ("metadata", json!({ "a": "b".repeat(513) }), "metadata.a", "string_above_max_length"),
        ("metadata", json!({ "a".repeat(65): "b" }), "metadata", "string_above_max_length"),
        ("metadata", many, "metadata", "array_above_max_length"),
        ("prompt_cache_key", json!("a".repeat(65)), "prompt_cache_key", "string_above_max_length"),
        ("prompt_cache_key", json!(1), "prompt_cache_key", "invalid_type"),
        ("prompt_cache_retention", json!("24h"), "prompt_cache_retention", "unsupported_parameter"),
        ("safety_identifier", json!("a".repeat(65)), "safety_identifier", "string_above_max_length"),
        ("safety_identifier", json!(["a"]), "safety_identifier", "invalid_type"),
        ("store", json!(true), "store", "unsupported_parameter"),
        ("store", json!("false"), "store", "invalid_type"),
        ("service_tier", json!("priority"), "service_tier", "unsupported_parameter"),
        ("service_tier", json!(1), "service_tier", "invalid_type"),
    ] {
        let fields = format!("\"{field}\":{value}");
        for reply in [server.chat(&fields), server.complete(&fields)] {
            let (found, found_code) = reply.refused(400);
            assert_eq!((found.as_deref(), found_code.as_deref()), (Some(param), Some(code)), "{fields}");
        }
    }
    assert_eq!(server.chat("\"parallel_tool_calls\":1").refused(400).0.as_deref(), Some("parallel_tool_calls"));
}

#[test]
fn a_cache_key_neither_widens_nor_narrows_the_prefix_cache() {
    let server =
        Server::with(Setup { tenants: vec![tenant("a", "key-of-a"), tenant("b", "key-of-b")], ..Setup::default() });
    let long = "the same text over and over ".repeat(4);
    let cached = |key: &str, cache_key: &str| {
        let message = json!([{ "role": "user", "content": long }]);
        let fields = format!("\"messages\":{message},\"seed\":1{cache_key}");
        let reply = server.post_as(key, CHAT, &crate::support::chat_body(&fields)).ok();
        reply["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
    };
    let (one, other) = (",\"prompt_cache_key\":\"k\"", ",\"prompt_cache_key\":\"other\"");
    assert_eq!(cached("key-of-a", one), 0);
    assert_eq!(cached("key-of-b", one), 0, "another tenant with the same key finds nothing");
    let again = cached("key-of-a", one);
    assert!(again >= 32, "the control: the same tenant finds {again} tokens");
    assert_eq!(cached("key-of-a", other), again);
    assert_eq!(cached("key-of-a", ""), again);
}

#[test]
fn a_seed_of_minus_one_is_random() {
    let server = Server::start();
    let seeds: Vec<u64> = (0..3)
        .map(|_| server.chat("\"seed\":-1,\"max_tokens\":1").ok()["pellucid"]["seed"].as_u64().unwrap())
        .collect();
    assert!(seeds[0] != seeds[1] || seeds[1] != seeds[2], "{seeds:?}");
    server.complete("\"seed\":-1").ok();
    let drawn = server.chat("\"seed\":-1").ok();
    let again = server.chat(&format!("\"seed\":{}", drawn["pellucid"]["seed"])).ok();
    assert_eq!(drawn["choices"], again["choices"], "the reply states the seed");
    assert_eq!(server.chat("\"seed\":-2").refused(400).0.as_deref(), Some("seed"));
}

#[test]
fn three_routes_read_a_conversation_alike() {
    let server = Server::with(Setup { template: TEMPLATE, ..Setup::default() });
    let routes = [CHAT, "/tokenize", "/apply-template"];
    let post = |path: &str, fields: &str| {
        let model = if path == CHAT { "\"model\":\"tiny\",\"max_tokens\":1," } else { "" };
        server.post(path, &format!("{{{model}\"messages\":[{{\"role\":\"user\",\"content\":\"hi\"}}]{fields}}}"))
    };
    for fields in [
        "",
        ",\"tools\":[]",
        ",\"tools\":null",
        ",\"tools\":[],\"tool_choice\":\"none\",\"parallel_tool_calls\":false",
        ",\"functions\":[],\"function_call\":\"auto\"",
        ",\"chat_template_kwargs\":{}",
        ",\"chat_template_kwargs\":{\"mood\":\"good\"}",
    ] {
        for path in routes {
            post(path, fields).ok();
        }
    }
    for (fields, param) in [
        (",\"tools\":[{\"type\":\"function\"}]", "tools[0].function"),
        (",\"tool_choice\":\"required\"", "tool_choice"),
        (",\"parallel_tool_calls\":\"no\"", "parallel_tool_calls"),
        (",\"chat_template\":\"{{ 1 }}\"", "chat_template"),
        (",\"chat_template_kwargs\":{\"other\":1}", "chat_template_kwargs.other"),
        (",\"chat_template_kwargs\":{\"mood\":[]}", "chat_template_kwargs.mood"),
        (",\"chat_template_kwargs\":[]", "chat_template_kwargs"),
    ] {
        for path in routes {
            assert_eq!(post(path, fields).refused(400).0.as_deref(), Some(param), "{path} {fields}");
        }
    }
    // The variable reaches the template in each of them.
    let good = ",\"chat_template_kwargs\":{\"mood\":\"good\"}";
    let count = |fields: &str| {
        let tokens = post("/tokenize", fields).ok()["count"].as_u64().unwrap();
        assert_eq!(post(CHAT, fields).ok()["usage"]["prompt_tokens"].as_u64(), Some(tokens), "{fields}");
        tokens
    };
    assert!(count(good) > count(""));
    assert_eq!(post("/apply-template", good).ok()["prompt"], "[turn]user: hi[end]good[turn]");
    // With a text there is no template.
    let text = |fields: &str| server.post("/tokenize", &format!("{{\"prompt\":\"hi\"{fields}}}"));
    text(",\"tools\":[]").ok();
    let tools = ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]";
    assert_eq!(text(tools).refused(400).0.as_deref(), Some("tools"));
    assert_eq!(text(good).refused(400).0.as_deref(), Some("chat_template_kwargs"));
}

#[test]
fn errors_about_routes_name_what_was_asked_and_what_there_is() {
    let server = Server::start();
    let message = |method: &str, path: &str, status: u16| {
        let reply = server.request(method, path, &[], b"");
        reply.refused(status);
        reply.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let unknown = message("GET", "/v1/engines?key=secret", 404);
    assert!(unknown.starts_with("unknown route: GET /v1/engines; this server has "), "{unknown}");
    for route in ["POST /v1/chat/completions", "GET /v1/models/{id}", "GET /openapi.json", "GET /metrics"] {
        assert!(unknown.contains(route), "{unknown}");
    }
    for (path, meant) in [
        ("/responses", "/v1/responses"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1/tokenize", "/tokenize"),
    ] {
        let unknown = message("POST", path, 404);
        assert!(unknown.contains(&format!("did you mean {meant}?")), "{unknown}");
    }
    let long = format!("/{}", "%22a".repeat(2000));
    let unknown = message("GET", &long, 404);
    assert!(unknown.contains("%22...;") && unknown.len() < 2000, "{unknown}");
    for (method, path, allow, has) in [
        ("GET", "/tokenize", "POST", "POST"),
        ("DELETE", "/v1/models/tiny", "GET,HEAD", "GET and HEAD"),
        ("PUT", "/openapi.json", "GET,HEAD", "GET and HEAD"),
    ] {
        assert_eq!(server.request(method, path, &[], b"").header("allow"), Some(allow));
        let expected = format!("{method} {path}: this route does not support the method; it has {has}");
        assert_eq!(message(method, path, 405), expected);
    }
}

#[test]
fn a_model_answers_to_its_aliases_and_replies_under_its_own_name() {
    let aliases = vec!["gpt-4o".to_owned(), "a/b".to_owned()];
    let server = Server::with(Setup { aliases, ..Setup::default() });
    let listed = server.get("/v1/models").ok();
    let names: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|card| card["id"].as_str().unwrap()).collect();
    assert_eq!(names, ["tiny", "gpt-4o", "a/b"]);
    for name in names {
        assert_eq!(server.chat(&format!("\"model\":\"{name}\"")).ok()["model"], "tiny");
        assert_eq!(server.complete(&format!("\"model\":\"{name}\"")).ok()["model"], "tiny");
        let streamed = server.chat(&format!("\"model\":\"{name}\",\"stream\":true")).text();
        assert!(streamed.contains("\"model\":\"tiny\""), "{streamed}");
        server.post("/tokenize", &format!("{{\"model\":\"{name}\",\"prompt\":\"a\"}}")).ok();
        let card = server.get(&format!("/v1/models/{name}")).ok();
        assert_eq!((card["id"].as_str(), card["root"].as_str()), (Some(name), Some("tiny")));
    }
    let reply = server.chat("\"model\":\"gpt-4\"");
    assert_eq!(reply.refused(404).1.as_deref(), Some("model_not_found"));
    assert!(reply.text().contains(r#"this server has \"tiny\", \"gpt-4o\", \"a/b\""#), "{}", reply.text());
    let document = server.get("/openapi.json").ok();
    let names = &document["components"]["schemas"]["ChatRequest"]["properties"]["model"]["enum"];
    assert_eq!(*names, json!(["tiny", "gpt-4o", "a/b"]));
}
