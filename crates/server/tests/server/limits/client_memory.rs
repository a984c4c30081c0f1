//! The budget for all bytes that clients make the server hold: bodies that do not end, and replies that are not read.

use std::io::{BufReader, Write};
use std::net::TcpStream;

use crate::support::{Response, Server, Setup, chat_body, tenant};
use pellucid_server::Limits;
use serde_json::json;

const CHAT: &str = "/v1/chat/completions";
const MEMORY: &str = "pellucid_client_memory_bytes";
/// The right to read metrics, for the key whose use of memory is watched.
const A: [(&str, &str); 1] = [("Authorization", "Bearer key-of-a")];

fn two_tenants(max_client_memory: usize) -> Server {
    let limits = Limits { max_client_memory, ..Limits::default() };
    let mut a = tenant("a", "key-of-a");
    a.metrics = true;
    Server::with(Setup { tenants: vec![a, tenant("b", "key-of-b")], limits, ..Setup::default() })
}

/// Waits until the server holds at least `bytes` for clients, as key `a` sees it.
#[track_caller]
fn until_held(server: &Server, is_reached: impl Fn(f64) -> bool) {
    for _ in 0..3000 {
        if is_reached(server.metric_as(MEMORY, &A)) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{MEMORY} is still {}", server.metric_as(MEMORY, &A));
}

/// Announces a body of 4 MiB and sends `sent` bytes of it.
fn stalled(server: &Server, key: &str, sent: usize) -> TcpStream {
    let mut stream = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: {}\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        server.address,
        4 << 20
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses the body may close the connection.
    let _ = stream.write_all(&vec![b' '; sent]);
    stream
}

#[test]
fn stalled_bodies_of_one_tenant_leave_memory_for_another() {
    let server = two_tenants(16 << 20);
    // Far more than fits: tenant `a` gets half of the memory, and its other bodies are refused.
    let bodies: Vec<TcpStream> = (0..70).map(|_| stalled(&server, "key-of-a", 1 << 20)).collect();
    until_held(&server, |held| held > (7 << 20) as f64);
    let refused = server.post_as("key-of-a", CHAT, &format!("{}{}", chat_body(""), " ".repeat(2 << 20)));
    assert_eq!(refused.refused(429).1.as_deref(), Some("client_memory_share"));
    assert!(refused.header("retry-after").is_some());
    for _ in 0..10 {
        server.post_as("key-of-b", CHAT, &chat_body("")).ok();
        server.post_as("key-of-b", CHAT, &format!("{}{}", chat_body(""), " ".repeat(2 << 20))).ok();
    }
    assert!(server.metric_as(MEMORY, &A) <= (8 << 20) as f64, "at most half of the memory");
    drop(bodies);
    until_held(&server, |held| held == 0.0);
    server.post_as("key-of-a", CHAT, &chat_body("")).ok();
}

#[test]
fn without_shares_stalled_bodies_take_all_memory() {
    // A single tenant has no share: its bodies take all memory, and the next request is told that the server is short.
    let limits = Limits { max_client_memory: 16 << 20, ..Limits::default() };
    let mut a = tenant("a", "key-of-a");
    a.metrics = true;
    let server = Server::with(Setup { tenants: vec![a], limits, ..Setup::default() });
    let _bodies: Vec<TcpStream> = (0..70).map(|_| stalled(&server, "key-of-a", 1 << 20)).collect();
    until_held(&server, |held| held > (15 << 20) as f64);
    let refused = server.post_as("key-of-a", CHAT, &format!("{}{}", chat_body(""), " ".repeat(2 << 20)));
    assert_eq!(refused.refused(503).1.as_deref(), Some("client_memory"));
    assert!(refused.header("retry-after").is_some());
}

#[test]
fn an_announced_length_takes_no_memory() {
    let server = two_tenants(16 << 20);
    // One unit of growth for each body, not 4 MiB: together they stay below the tenant's share.
    let bodies: Vec<TcpStream> = (0..100).map(|_| stalled(&server, "key-of-a", 1)).collect();
    until_held(&server, |held| held == (100 * (64 << 10)) as f64);
    server.post_as("key-of-b", CHAT, &chat_body("")).ok();
    drop(bodies);
    until_held(&server, |held| held == 0.0);
}

/// Strings that a chat template holds while it renders count, beyond those of the body and the prompt.
#[test]
fn a_template_takes_memory_while_it_renders() {
    let body = json!({ "messages": [{ "role": "user", "content": "a".repeat(70_000) }] }).to_string();
    let server = |max_client_memory: usize| {
        Server::with(Setup { limits: Limits { max_client_memory, ..Limits::default() }, ..Setup::default() })
    };
    // The body, its parsed values and the prompt take 12 bytes for each character, the template several more.
    let small = server(1 << 20);
    let refused = small.post("/apply-template", &body);
    assert_eq!(refused.refused(413).1.as_deref(), Some("request_too_large"));
    assert_eq!(refused.header("retry-after"), None, "it can never succeed");
    small.until(MEMORY, 0.0);
    // Positive control: a text of the same length without a template fits.
    small.post("/tokenize", &json!({ "prompt": "a".repeat(70_000) }).to_string()).ok();
    let large = server(4 << 20);
    large.post("/apply-template", &body).ok();
    large.until(MEMORY, 0.0);
}

/// Asks for a reply that is larger than the buffers of a connection, and reads nothing of it.
fn unread(server: &Server, num_bytes: usize) -> TcpStream {
    let body = json!({ "prompt": "a".repeat(num_bytes), "return_token_strs": true }).to_string();
    let headers = [("Content-Type", "application/json"), ("Authorization", "Bearer key-of-a")];
    server.send("POST", "/tokenize", &headers, body.as_bytes())
}

/// Waits until `count` replies of `/tokenize` have begun.
#[track_caller]
fn until_answered(server: &Server, count: usize) {
    let line = format!("pellucid_http_requests_total{{route=\"/tokenize\",status=\"200\"}} {count}");
    for _ in 0..3000 {
        if server.request("GET", "/metrics", &A, b"").text().lines().any(|other| other == line) {
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("{count} replies have not begun");
}

#[test]
fn an_unread_reply_counts_until_its_last_byte() {
    let mut a = tenant("a", "key-of-a");
    a.metrics = true;
    a.concurrent_requests = Some(2);
    let server = Server::with(Setup { tenants: vec![a, tenant("b", "key-of-b")], ..Setup::default() });
    let readers = [(); 2].map(|()| unread(&server, 4_000_000));
    until_answered(&server, 2);
    let is_held = || server.metric_as(MEMORY, &A) > 2.0 * 4.0 * 1e6;
    assert!(is_held(), "ids of 4 bytes");
    let short = json!({ "prompt": "a" }).to_string();
    let refused = server.post_as("key-of-a", "/tokenize", &short);
    assert_eq!(refused.refused(429).1.as_deref(), Some("concurrent_requests"));
    server.post_as("key-of-b", "/tokenize", &short).ok();
    assert!(is_held(), "the replies are still unread");
    // The replies are whole, however late they are read.
    for stream in readers {
        let reply = Response::read(&mut BufReader::new(stream)).ok();
        assert_eq!(reply["count"].as_u64().unwrap() as usize, reply["token_strs"].as_array().unwrap().len());
        assert!(reply["count"].as_u64().unwrap() >= 1_000_000);
    }
    until_held(&server, |held| held == 0.0);
    server.post_as("key-of-a", "/tokenize", &short).ok();
}

#[test]
fn a_client_that_disconnects_gives_its_memory_back() {
    let server = two_tenants(256 << 20);
    let readers = [(); 3].map(|()| unread(&server, 2_000_000));
    until_answered(&server, 3);
    drop(readers);
    until_held(&server, |held| held == 0.0);
}

#[test]
fn a_draining_server_waits_for_an_unread_reply() {
    let server = two_tenants(256 << 20);
    let reader = unread(&server, 4_000_000);
    until_answered(&server, 1);
    server.drain.signal();
    let refused = server.post_as("key-of-b", "/tokenize", "{\"prompt\":\"a\"}");
    assert_eq!(refused.refused(503).1.as_deref(), Some("draining"));
    assert!(Response::read(&mut BufReader::new(reader)).ok()["count"].as_u64().unwrap() >= 1_000_000);
    assert_eq!(server.ended(), pellucid_server::Ended::Drained);
}

#[test]
fn replies_with_log_probabilities_are_charged() {
    let limits = Limits { max_client_memory: 256 << 10, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let ask = |more: &str| server.complete(&format!("\"max_tokens\":1,\"echo\":true,\"ignore_eos\":true{more}"));
    let prompt = format!(",\"prompt\":\"{}\"", "a".repeat(200));
    ask(&prompt).ok();
    server.until(MEMORY, 0.0);
    ask(&format!("{prompt},\"logprobs\":20")).ok();
    server.until(MEMORY, 0.0);
    // Eight choices repeat the log probabilities of the prompt.
    let refused = ask(&format!("{prompt},\"logprobs\":20,\"n\":8"));
    assert_eq!(refused.refused(413).1.as_deref(), Some("request_too_large"));
    assert!(refused.json()["error"]["message"].as_str().unwrap().contains("can have 262144;"), "{}", refused.text());
    assert_eq!(refused.header("retry-after"), None, "it can never succeed");
    server.until(MEMORY, 0.0);
}

#[test]
fn predictions_are_charged_for_each_choice() {
    let limits = Limits { max_client_memory: 160 << 10, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let prediction = format!(",\"prediction\":{{\"type\":\"content\",\"content\":\"{}\"}}", "a".repeat(250));
    for affordable in ["\"n\":8", &format!("\"n\":1{prediction}")] {
        server.chat(&format!("\"max_tokens\":2,{affordable}")).ok();
        server.until(MEMORY, 0.0);
    }
    // Each choice has an index of the prediction.
    let refused = server.chat(&format!("\"max_tokens\":2,\"n\":8{prediction}"));
    assert_eq!(refused.refused(413).1.as_deref(), Some("request_too_large"));
    server.until(MEMORY, 0.0);
}
