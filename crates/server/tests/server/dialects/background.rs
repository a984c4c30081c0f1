//! Background responses: generated without their client's connection, polled, streamed again, cancelled and deleted.

use std::time::Duration;

use crate::support::{Response, Server, Setup, tenant};
use pellucid_server::Limits;
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";

fn body(fields: Value) -> String {
    let mut body = json!({ "model": "tiny", "max_output_tokens": 8, "input": "hello", "seed": 1, "background": true });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body.to_string()
}

/// Starts a response and returns its id.
fn start(server: &Server, fields: Value) -> String {
    let response = server.post(PATH, &body(fields)).ok();
    assert_eq!((&response["status"], &response["background"]), (&json!("queued"), &json!(true)), "{response}");
    assert_eq!((&response["output"], &response["store"]), (&json!([]), &json!(true)));
    response["id"].as_str().unwrap().to_owned()
}

fn show(server: &Server, id: &str) -> Value {
    server.get(&format!("{PATH}/{id}")).ok()
}

/// Waits until a response has a status.
#[track_caller]
fn until(server: &Server, id: &str, status: &str) -> Value {
    for _ in 0..1000 {
        let response = show(server, id);
        if response["status"] == status {
            return response;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the response is still {}", show(server, id)["status"]);
}

fn cancel(server: &Server, id: &str) -> Response {
    server.post(&format!("{PATH}/{id}/cancel"), "")
}

/// Returns the events of a stream, the first of which has the number `first`.
fn events(response: &Response, first: usize) -> Vec<Value> {
    assert_eq!(response.status, 200, "{}", response.text());
    assert_eq!(response.header("content-type"), Some("text/event-stream; charset=utf-8"));
    let event = |(i, event): (usize, &str)| {
        let (name, data) = event.split_once('\n').unwrap();
        let data: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name.strip_prefix("event: ").unwrap());
        assert_eq!(data["sequence_number"], first + i);
        data
    };
    response.text().split_terminator("\n\n").enumerate().map(event).collect()
}

fn stream(server: &Server, id: &str, query: &str) -> Response {
    server.get(&format!("{PATH}/{id}?stream=true{query}"))
}

#[test]
fn a_background_response_is_generated_while_nobody_is_connected() {
    let server = Server::start();
    let expected = server.post(PATH, &body(json!({ "background": false }))).ok();
    server.hold_steps();
    let id = start(&server, json!({}));
    assert_eq!(show(&server, &id)["status"], "queued");
    // It cannot be continued yet, and has no input to show.
    let early = server.post(PATH, &body(json!({ "previous_response_id": id })));
    assert_eq!(early.refused(409).1.as_deref(), Some("response_in_progress"));
    server.get(&format!("{PATH}/{id}/input_items")).refused(409);
    server.release_steps();
    let response = until(&server, &id, expected["status"].as_str().unwrap());
    assert_eq!(response["output"][0]["content"], expected["output"][0]["content"]);
    assert_eq!(response["usage"]["output_tokens"], expected["usage"]["output_tokens"]);
    assert_eq!((&response["background"], &response["id"]), (&json!(true), &json!(id)));
    // A response that has ended stays as it is.
    assert_eq!(cancel(&server, &id).ok(), response);
    let next = server.post(PATH, &body(json!({ "background": false, "previous_response_id": id }))).ok();
    assert_eq!(next["previous_response_id"], id);
    server.until("pellucid_client_memory_bytes", 0.0);
}

#[test]
fn its_events_can_be_read_again_from_any_number() {
    let server = Server::start();
    let live = server.post(PATH, &body(json!({ "stream": true })));
    let all = events(&live, 0);
    let names: Vec<&str> = all.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names[..3], ["response.created", "response.queued", "response.in_progress"]);
    assert_eq!(*names.last().unwrap(), "response.incomplete", "the limit of 8 tokens");
    assert_eq!(all[0]["response"]["status"], "queued");
    let response = &all.last().unwrap()["response"];
    let id = response["id"].as_str().unwrap();
    assert_eq!(&show(&server, id), response);
    assert_eq!(stream(&server, id, "").text(), live.text());
    for number in [0, 4, all.len() - 2] {
        let rest = events(&stream(&server, id, &format!("&starting_after={number}")), number + 1);
        assert_eq!(rest, all[number + 1..]);
    }
    assert!(events(&stream(&server, id, &format!("&starting_after={}", all.len() - 1)), all.len()).is_empty());
    for (query, param) in [("&starting_after=1000", "starting_after"), ("&starting_after=-1", "starting_after")] {
        assert_eq!(stream(&server, id, query).refused(400).0.as_deref(), Some(param));
    }
    for (query, param) in [("?starting_after=1", "starting_after"), ("?stream=1", "stream")] {
        assert_eq!(server.get(&format!("{PATH}/{id}{query}")).refused(400).0.as_deref(), Some(param));
    }
    // A reader that comes while the response is generated gets what was written and what follows.
    server.hold_steps();
    let id = start(&server, json!({}));
    let reader = std::thread::scope(|scope| {
        let reader = scope.spawn(|| stream(&server, &id, "&starting_after=0"));
        std::thread::sleep(Duration::from_millis(30));
        server.release_steps();
        reader.join().unwrap()
    });
    let late = events(&reader, 1);
    assert_eq!(late.last().unwrap()["response"], show(&server, &id));
    assert!(late.iter().any(|event| event["type"] == "response.output_text.delta"));
}

#[test]
fn a_background_response_can_be_cancelled_and_deleted() {
    let server = Server::start();
    server.slow_down(20);
    let id = start(&server, json!({ "max_output_tokens": 200, "ignore_eos": true }));
    until(&server, &id, "in_progress");
    let cancelled = cancel(&server, &id).ok();
    assert_eq!(cancelled["status"], "cancelled");
    assert_eq!(cancelled["output"][0]["status"], "incomplete");
    assert_eq!(show(&server, &id), cancelled);
    let last = events(&stream(&server, &id, ""), 0).pop().unwrap();
    assert_eq!((&last["type"], &last["response"]["status"]), (&json!("response.cancelled"), &json!("cancelled")));
    assert_eq!(cancel(&server, &id).ok(), cancelled, "cancelling again changes nothing");
    let id = start(&server, json!({ "max_output_tokens": 200, "ignore_eos": true }));
    let deleted = server.request("DELETE", &format!("{PATH}/{id}"), &[], b"").ok();
    assert_eq!(deleted["deleted"], true);
    server.until("pellucid_sequences_running", 0.0);
    server.get(&format!("{PATH}/{id}")).refused(404);
    cancel(&server, &id).refused(404);
}

#[test]
fn a_background_response_that_fails_says_why() {
    let server = Server::start();
    let count = json!({ "model": "tiny", "input": "hello" });
    let count = server.post("/v1/responses/input_tokens", &count.to_string()).ok();
    server.fail_from(count["input_tokens"].as_u64().unwrap() as u32 + 2);
    let id = start(&server, json!({ "max_output_tokens": 20, "ignore_eos": true }));
    let failed = until(&server, &id, "failed");
    assert_eq!(failed["error"]["code"], "server_error");
    let all = events(&stream(&server, &id, ""), 0);
    assert_eq!(all.last().unwrap()["type"], "response.failed");
    assert_eq!(all.last().unwrap()["response"]["error"], failed["error"]);
}

#[test]
fn background_responses_need_the_store_and_belong_to_their_tenant() {
    let mut none = tenant("none", "key-of-none");
    none.stored_responses = Some(0);
    let tenants = vec![tenant("a", "key-of-a"), tenant("b", "key-of-b"), none];
    let server = Server::with(Setup { tenants, ..Setup::default() });
    for (key, fields) in [("key-of-a", json!({ "store": false })), ("key-of-none", json!({}))] {
        let refused = server.post_as(key, PATH, &body(fields));
        assert_eq!(refused.refused(400).0.as_deref(), Some("background"));
    }
    server.hold_steps();
    let created = server.post_as("key-of-a", PATH, &body(json!({}))).ok();
    let path = format!("{PATH}/{}", created["id"].as_str().unwrap());
    let other = [("Authorization", "Bearer key-of-b")];
    server.request("GET", &path, &other, b"").refused(404);
    server.request("GET", &format!("{path}?stream=true"), &other, b"").refused(404);
    server.request("DELETE", &path, &other, b"").refused(404);
    server.request("POST", &format!("{path}/cancel"), &other, b"").refused(404);
    server.release_steps();
}

#[test]
fn events_that_do_not_fit_are_dropped_and_the_response_goes_on() {
    let limits = Limits { max_stored_bytes: 24 << 10, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let id = start(&server, json!({ "max_output_tokens": 200, "ignore_eos": true }));
    let response = until(&server, &id, "incomplete");
    assert_eq!(response["usage"]["output_tokens"], 200);
    let refused = stream(&server, &id, "");
    assert_eq!(refused.refused(400).0.as_deref(), Some("stream"));
    assert!(refused.text().contains("lack of memory"), "{}", refused.text());
}
