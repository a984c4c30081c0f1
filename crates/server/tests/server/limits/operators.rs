//! The operators' list of running requests, and cancelling one of them.

use std::io::BufReader;

use crate::support::socket::Socket;
use crate::support::{Response, Server, Setup, chat_body, tenant};
use pellucid_server::TenantConfig;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];
/// Text of the prompts, which must not be in the list.
const PROMPT: &str = "hello";

/// A chat that lasts for 200 steps.
fn long_chat(more: &str) -> String {
    chat_body(&format!("\"ignore_eos\":true,\"max_tokens\":200{more}"))
}

fn list(server: &Server) -> Vec<Value> {
    server.get("/requests").ok()["data"].as_array().unwrap().clone()
}

/// Waits until `num` requests are listed.
#[track_caller]
fn until_listed(server: &Server, num: usize) -> Vec<Value> {
    for _ in 0..1000 {
        let found = list(server);
        if found.len() == num {
            return found;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("expected {num} requests: {:?}", list(server));
}

fn cancel(server: &Server, request: &Value) -> Response {
    server.request("DELETE", &format!("/requests/{}", request["id"].as_str().unwrap()), &[], b"")
}

/// Returns how many requests of a tenant an operator has cancelled, by the metrics.
fn num_cancelled(text: &str, tenant: &str) -> usize {
    let series = format!("pellucid_requests_total{{tenant=\"{tenant}\",outcome=\"cancelled_by_operator\"}} ");
    text.lines().find_map(|line| line.strip_prefix(&series)).map_or(0, |count| count.parse().unwrap())
}

#[test]
fn an_operator_sees_running_requests_and_cancels_them() {
    let server = Server::with(Setup { max_sequences: 1, ..Setup::default() });
    assert_eq!(server.get("/requests").ok(), json!({ "object": "list", "data": [], "total": 0, "may_cancel": true }));
    server.slow_down(50);
    let mut running = server.stream(CHAT, &long_chat(",\"stream\":true"));
    (0..4).for_each(|_| drop(running.next_data().unwrap()));
    server.hold_steps();
    let waiting = server.send("POST", CHAT, &JSON, long_chat("").as_bytes());
    let found = until_listed(&server, 2);
    let (first, second) = (&found[0], &found[1]);
    for request in &found {
        assert_eq!((&request["tenant"], &request["model"]), (&json!("everybody"), &json!("tiny")));
        assert_eq!(request["waits_for_client"], json!(false));
        assert!(request["prompt_tokens"].as_u64().unwrap() > 0 && request["age_ms"].is_u64(), "{request}");
        assert!(!request.to_string().contains(PROMPT), "{request}");
    }
    assert_eq!((&first["state"], first["since_last_token_ms"].is_u64()), (&json!("decode"), true), "{first}");
    assert!(first["tokens"].as_u64().unwrap() >= 2, "{first}");
    assert_eq!((&second["state"], &second["tokens"]), (&json!("queued"), &json!(0)), "{second}");
    assert_eq!(second["since_last_token_ms"], Value::Null);

    // No step ends now, so the clients are told without the engine.
    assert_eq!(cancel(&server, second).ok()["state"], "cancelled");
    let refused = Response::read(&mut BufReader::new(waiting)).refused(403);
    assert_eq!(refused.1.as_deref(), Some("cancelled_by_operator"));
    cancel(&server, first).ok();
    let last: Value = serde_json::from_str(running.all().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "cancelled_by_operator", "a stream ends with the error and without [DONE]");
    server.release_steps();
    server.settles();
    until_listed(&server, 0);
    assert_eq!(num_cancelled(&server.get("/metrics").text(), "everybody"), 2);
    assert_eq!(cancel(&server, first).refused(404).1.as_deref(), Some("request_not_found"));
    server.slow_down(0);
    server.chat("").ok();
}

#[test]
fn every_api_tells_that_an_operator_cancelled() {
    let server = Server::start();
    // No reply can end by itself.
    server.hold_steps();
    let cancel_only = || {
        cancel(&server, &until_listed(&server, 1)[0]).ok();
    };
    let messages = json!([{ "role": "user", "content": PROMPT }]);
    let body = json!({ "model": "tiny", "max_tokens": 200, "messages": messages }).to_string();
    let headers = [JSON[0], ("anthropic-version", "2023-06-01")];
    let anthropic = server.send("POST", "/v1/messages", &headers, body.as_bytes());
    cancel_only();
    let reply = Response::read(&mut BufReader::new(anthropic));
    assert_eq!((reply.status, &reply.json()["error"]["type"]), (403, &json!("permission_error")));

    until_listed(&server, 0);
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&long_chat(""));
    cancel_only();
    let (last, _) = socket.ending();
    assert_eq!(last.unwrap()["error"]["code"], "cancelled_by_operator");

    until_listed(&server, 0);
    let body = json!({ "model": "tiny", "input": PROMPT, "background": true, "max_output_tokens": 200 }).to_string();
    let id = server.post("/v1/responses", &body).ok()["id"].as_str().unwrap().to_owned();
    cancel_only();
    until_listed(&server, 0);
    let mut response = Value::Null;
    for _ in 0..1000 {
        response = server.get(&format!("/v1/responses/{id}")).ok();
        if response["status"] == "failed" {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    assert_eq!(response["status"], "failed", "{response}");
    assert!(response["error"]["message"].as_str().unwrap().contains("operator"), "{response}");
}

#[test]
fn the_list_and_its_cancellations_need_rights() {
    let watcher = TenantConfig { metrics: true, ..tenant("watcher", "key-of-watcher") };
    let operator = TenantConfig { metrics: true, manage_requests: true, ..tenant("operator", "key-of-operator") };
    let tenants = vec![tenant("a", "key-of-a"), watcher, operator];
    let server = Server::with(Setup { tenants, ..Setup::default() });
    let ask = |method: &str, path: &str, name: &str| {
        server.request(method, path, &[("X-Api-Key", &format!("key-of-{name}"))], b"")
    };
    server.slow_down(50);
    let headers = [("Authorization", "Bearer key-of-a")];
    let mut stream = server.stream_with(&headers, CHAT, &long_chat(",\"stream\":true"));
    stream.next_data().unwrap();
    server.hold_steps();
    assert_eq!(ask("GET", "/requests", "a").refused(403).1.as_deref(), Some("metrics_not_allowed"));
    let shown = ask("GET", "/requests", "watcher").ok();
    assert_eq!((&shown["data"][0]["tenant"], &shown["may_cancel"]), (&json!("a"), &json!(false)));
    let path = format!("/requests/{}", shown["data"][0]["id"].as_str().unwrap());
    for name in ["a", "watcher"] {
        assert_eq!(ask("DELETE", &path, name).refused(403).1.as_deref(), Some("manage_requests_not_allowed"));
    }
    let shown = ask("GET", "/requests", "operator").ok();
    assert_eq!(shown["may_cancel"], true);
    assert_ne!(shown["data"][0]["state"], "cancelled", "a refused cancellation changes nothing");
    // During shutdown, the list tells what the server waits for.
    server.drain.signal();
    assert_eq!(ask("GET", "/requests", "operator").ok()["total"], 1);
    ask("DELETE", &path, "operator").ok();
    let last: Value = serde_json::from_str(stream.all().last().unwrap()).unwrap();
    assert_eq!(last["error"]["code"], "cancelled_by_operator");
    server.release_steps();
    server.ended();
}
