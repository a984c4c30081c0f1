//! The OpenAPI document agrees with the parser, at the limits of every range.

use crate::support::{Server, Setup, chat_body, completion_body};
use serde_json::Value;

#[test]
fn the_parser_knows_every_field_and_has_its_range() {
    let server = Server::start();
    let document = server.get("/openapi.json").ok();
    assert!(document["openapi"].as_str().unwrap().starts_with("3.1"));
    let schemas = &document["components"]["schemas"];
    let routes = [
        ("ChatRequest", "/v1/chat/completions", chat_body as fn(&str) -> String),
        ("CompletionRequest", "/v1/completions", completion_body),
    ];
    for (name, path, body) in routes {
        let schema = &schemas[name];
        assert_eq!(schema["additionalProperties"], serde_json::json!({ "type": "null" }), "{name}");
        let required: Vec<&str> =
            schema["required"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
        assert_eq!(required.len(), 2, "{required:?}");
        let properties = schema["properties"].as_object().unwrap();
        assert!(properties.len() > 40, "{}", properties.len());
        for (field, shape) in properties {
            let ask = |value: &str| {
                let reply = server.post(path, &body(&format!("\"{field}\":{value}")));
                let error = if reply.status == 200 { Value::Null } else { reply.json()["error"].clone() };
                (reply.status, error["param"] == field.as_str(), error["code"].as_str().map(str::to_owned))
            };
            let (status, _, code) = ask("null");
            assert_ne!(
                code.as_deref(),
                Some("unknown_parameter"),
                "{field} is in the document but unknown to the parser"
            );
            assert_eq!(status == 200, !required.contains(&field.as_str()), "{field}: null means absent");
            let number = |name: &str| shape[name].as_f64();
            let (Some(low), Some(high)) = (number("minimum"), number("maximum")) else { continue };
            for outside in [low - 1.0, high + 1.0 + high.abs() / 4.0] {
                let (status, is_own, _) = ask(&format!("{outside:e}"));
                assert!(status == 400 && is_own, "{field}: {outside} is outside {low} to {high}");
            }
            for edge in [low, high] {
                // Near 2^63 a float does not identify one integer.
                let edge = if edge > 9e15 { "9223372036854775807".into() } else { edge.to_string() };
                let (status, is_own, code) = ask(&edge);
                let is_refused = status == 400 && is_own && code.as_deref() == Some("out_of_range");
                assert!(!is_refused && status < 500, "{field}: {edge} is within {low} to {high}");
            }
        }
    }
}

#[test]
fn every_route_documents_its_responses() {
    let server = Server::start();
    let document = server.get("/openapi.json").ok();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            let statuses: Vec<&String> = operation["responses"].as_object().unwrap().keys().collect();
            assert!(
                statuses.iter().any(|status| status.starts_with('2') || *status == "101"),
                "{method} {path}: {statuses:?}"
            );
            // A cancellation has no body.
            if method == "post" && !path.ends_with("/cancel") {
                for status in ["400", "401", "404", "408", "413", "415", "429", "500", "503"] {
                    assert!(statuses.iter().any(|one| *one == status), "{method} {path}: {statuses:?}");
                }
                assert!(operation["requestBody"]["content"]["application/json"]["schema"].is_object());
            }
        }
    }
}

#[test]
fn names_of_messages_are_documented_where_the_template_writes_them() {
    let is_limited = |server: &Server| {
        let document = server.get("/openapi.json").ok();
        let name = &document["components"]["schemas"]["ChatMessage"]["properties"]["name"];
        assert_eq!(name["type"], serde_json::json!(["string", "null"]));
        name["description"].as_str().unwrap().contains("does not write names")
    };
    assert!(is_limited(&Server::start()));
    let template = "{% for m in messages %}[turn]{{ m.name or m.role }}: {{ m.content }}[end]{% endfor %}";
    assert!(!is_limited(&Server::with(Setup { template, ..Setup::default() })));
}

#[test]
fn three_routes_document_a_conversation_alike() {
    let document = Server::start().get("/openapi.json").ok();
    let field = |request: &str, name: &str| document["components"]["schemas"][request]["properties"][name].clone();
    for name in ["messages", "tools", "tool_choice", "parallel_tool_calls", "chat_template_kwargs"] {
        assert!(field("ChatRequest", name).is_object(), "{name}");
        let mut tokenize = field("TokenizeRequest", name);
        if name == "messages" {
            // Beside a prompt they may be null.
            assert_eq!(tokenize["type"].take(), serde_json::json!(["array", "null"]));
            tokenize["type"] = "array".into();
        }
        assert_eq!(field("ChatRequest", name), tokenize, "{name}");
        assert_eq!(field("ChatRequest", name), field("TemplateRequest", name), "{name}");
    }
    let tool_choice = &field("ChatRequest", "tool_choice")["anyOf"];
    assert_eq!(tool_choice[2]["properties"]["allowed_tools"]["required"], serde_json::json!(["mode", "tools"]));
}

#[test]
fn variables_of_the_template_are_documented() {
    let template =
        "{% if enable_thinking %}think{% endif %}{% set own = 1 %}{{ messages[0].content ~ own ~ bos_token }}";
    let server = Server::with(Setup { template, ..Setup::default() });
    let document = server.get("/openapi.json").ok();
    for name in ["ChatRequest", "TokenizeRequest", "TemplateRequest"] {
        let variables = &document["components"]["schemas"][name]["properties"]["chat_template_kwargs"];
        let names: Vec<&String> = variables["properties"].as_object().unwrap().keys().collect();
        assert_eq!(names, ["enable_thinking"], "{name}");
        assert_eq!(variables["additionalProperties"], false, "{name}");
    }
    let ask = |variable: &str| {
        let body =
            format!(r#"{{"messages":[{{"role":"user","content":"a"}}],"chat_template_kwargs":{{"{variable}":true}}}}"#);
        server.post("/tokenize", &body).status
    };
    assert_eq!((ask("enable_thinking"), ask("own"), ask("other")), (200, 400, 400));
}
