//! Attacks and accidents over the WebSocket: floods, unfinished and large messages, silence, and the close code of each
//! ending.

use std::time::Duration;

use crate::support::socket::{BINARY, CLOSE, CONTINUATION, FINAL, PING, PONG, Socket, TEXT, frame};
use crate::support::{Server, Setup, chat_body, tenant};
use pellucid_server::{Limits, TenantConfig};
use serde_json::{Value, json};

/// Control frames and empty fragments that a client may send at once.
const MAX_FRAMES: usize = 600;
const MAX_CONTROL_MESSAGE: usize = 64 << 10;

/// Returns a server whose tenants have the keys `key-of-a` and `key-of-b`; both may read metrics.
fn two_tenants(limits: Limits) -> Server {
    let config = |name: &str| TenantConfig { metrics: true, ..tenant(name, &format!("key-of-{name}")) };
    Server::with(Setup { tenants: vec![config("a"), config("b")], limits, ..Setup::default() })
}

/// Returns the number of sockets that were closed for `reason`.
fn closed(server: &Server, reason: &str) -> f64 {
    let line = format!("pellucid_websockets_closed_total{{reason=\"{reason}\"}} ");
    let text = server.get("/metrics").text();
    text.lines().find_map(|entry| entry.strip_prefix(&line)).map_or(0.0, |value| value.parse().unwrap())
}

/// Waits until one socket was closed for `reason`.
#[track_caller]
fn until_closed(server: &Server, reason: &str) {
    for _ in 0..3000 {
        if closed(server, reason) == 1.0 {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("no socket was closed for {reason}: {}", server.get("/metrics").text());
}

/// A chat that takes long.
fn endless() -> String {
    chat_body("\"ignore_eos\":true,\"max_tokens\":200")
}

/// Opens a socket and starts a reply that is paused.
fn paused(server: &Server) -> Socket {
    // The reply must not be over before it is paused.
    server.slow_down(20);
    let (_, mut socket) = Socket::open(server, "");
    socket.send(&endless());
    socket.send("{\"type\":\"pause\"}");
    while socket.json()["type"] != "paused" {}
    socket
}

#[test]
fn a_flood_of_pings_ends_the_connection() {
    let server = Server::start();
    // Positive control: a client that reads gets its pongs, in order.
    let (_, mut socket) = Socket::open(&server, "");
    for index in 0..100_u8 {
        socket.send_frame(FINAL | PING, &[index]);
        assert_eq!(socket.next_frame(), Some((PONG, vec![index])));
    }
    socket.send(&chat_body(""));
    assert_eq!(socket.ending().1, Some(1000));
    // 64 MiB of pings, of which the client reads no pong until it has sent all, or cannot send any more.
    let (_, mut socket) = Socket::open(&server, "");
    let pings = frame(FINAL | PING, &[b'x'; 125]).repeat(4096);
    for _ in 0..125 {
        if !socket.send_bytes(&pings) {
            break;
        }
    }
    let mut num_pongs = 0;
    while let Some((opcode, payload)) = socket.next_frame() {
        match opcode {
            PONG => num_pongs += 1,
            CLOSE => assert_eq!(payload[..2], 1008_u16.to_be_bytes()),
            _ => panic!("opcode {opcode}"),
        }
    }
    // The bucket refills while the test runs.
    assert!(num_pongs <= 2 * MAX_FRAMES, "{num_pongs} pongs");
    until_closed(&server, "too_many_frames");
    server.until("pellucid_websockets", 0.0);
}

/// Messages that are never finished take memory from the budget for all clients, within the tenant's share.
#[test]
fn unfinished_messages_are_bounded_and_leave_memory_for_others() {
    const TOTAL: usize = 1 << 20;
    let server = two_tenants(Limits { max_client_memory: TOTAL, ..Limits::default() });
    let used = || server.metric_as("pellucid_client_memory_bytes", &[("X-Api-Key", "key-of-a")]) as usize;
    let part = vec![b' '; 100_000];
    let mut sockets: Vec<Socket> = (0..20).map(|_| Socket::open_as(&server, "key-of-a")).collect();
    for socket in &mut sockets {
        // The server may have closed the connection before all bytes are sent.
        socket.send_bytes(&frame(TEXT, &part));
        // The answer to a ping shows that the server has processed the part, or has refused it.
        socket.send_bytes(&frame(FINAL | PING, b""));
    }
    let (mut held, mut num_refused) = (Vec::new(), 0);
    for mut socket in sockets {
        match socket.next_frame() {
            Some((PONG, _)) => held.push(socket),
            Some((TEXT, message)) => {
                let message: Value = serde_json::from_slice(&message).unwrap();
                assert_eq!(message["error"]["code"], "client_memory_share", "{message}");
                assert_eq!(socket.ending().1, Some(1013));
                num_refused += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert!(!held.is_empty() && num_refused > 0, "{} held, {num_refused} refused", held.len());
    assert!((held.len() * part.len()..=TOTAL / 2 + part.len()).contains(&used()), "{} bytes used", used());
    // The other tenant is served, over both protocols.
    assert_eq!(server.post_as("key-of-b", "/v1/chat/completions", &chat_body("")).status, 200);
    let mut socket = Socket::open_as(&server, "key-of-b");
    socket.send(&chat_body(&format!("\"user\":\"{}\"", "x".repeat(500))));
    let (messages, code) = socket.ending();
    assert_eq!(code, Some(1000), "{messages:?}");
    // Positive control: a message that is held can be finished, when there is memory to process it.
    let mut socket = held.pop().unwrap();
    drop(held);
    while used() > 2 * part.len() {
        std::thread::sleep(Duration::from_millis(10));
    }
    let body = chat_body("");
    socket.send_frame(CONTINUATION, &body.as_bytes()[..5]);
    socket.send_frame(FINAL | CONTINUATION, &body.as_bytes()[5..]);
    assert_eq!(socket.ending().1, Some(1000));
    while used() > 0 {
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// The limits of a tenant apply when a message begins, before it is read.
#[test]
fn an_unfinished_message_counts_as_a_request() {
    let config = TenantConfig { concurrent_requests: Some(1), ..tenant("a", "key-of-a") };
    let server = Server::with(Setup { tenants: vec![config], ..Setup::default() });
    let mut first = Socket::open_as(&server, "key-of-a");
    first.send_frame(TEXT, b"{");
    first.send_frame(FINAL | PING, b"");
    assert_eq!(first.next_frame().unwrap().0, PONG);
    let mut second = Socket::open_as(&server, "key-of-a");
    second.send_frame(TEXT, b"{");
    let (error, code) = second.ending();
    assert_eq!((&error.unwrap()["error"]["code"], code), (&json!("concurrent_requests"), Some(1013)));
    first.send_frame(FINAL | CONTINUATION, &chat_body("").as_bytes()[1..]);
    assert_eq!(first.ending().1, Some(1000));
}

#[test]
fn control_messages_are_bounded() {
    let server = Server::start();
    let mut socket = paused(&server);
    // Messages of the maximum size that arrive at once are all answered, one after another.
    let unknown = |len: usize| {
        let message = json!({ "type": "update", "unknown": "x".repeat(len) }).to_string();
        let excess = message.len() - len;
        json!({ "type": "update", "unknown": "x".repeat(len - excess) }).to_string()
    };
    let largest = unknown(MAX_CONTROL_MESSAGE);
    assert_eq!(largest.len(), MAX_CONTROL_MESSAGE);
    for _ in 0..20 {
        socket.send(&largest);
    }
    for _ in 0..20 {
        assert_eq!(socket.json()["error"]["param"], "unknown");
        // One message is being read or processed, which takes a multiple of its text; the next ones wait in the
        // connection. Twenty messages would take far more.
        assert!(server.metric("pellucid_client_memory_bytes") <= 16.0 * MAX_CONTROL_MESSAGE as f64);
    }
    socket.send(&unknown(MAX_CONTROL_MESSAGE + 1));
    let (error, code) = socket.ending();
    assert_eq!((&error.unwrap()["error"]["code"], code), (&json!("request_too_large"), Some(1009)));
    server.settles();
    // A message that is larger in sum, or announced as larger, is refused before it arrives.
    let mut socket = paused(&server);
    socket.send_bytes(&[TEXT | FINAL, 0xff, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0, 0, 0]);
    assert_eq!(socket.ending().1, Some(1009));
    let mut socket = paused(&server);
    socket.send_frame(TEXT, &[b' '; MAX_CONTROL_MESSAGE]);
    socket.send_frame(CONTINUATION, b" ");
    assert_eq!(socket.ending().1, Some(1009));
    server.settles();
}

#[test]
fn control_messages_are_charged_like_requests() {
    let config = TenantConfig { requests_per_minute: Some(3), ..tenant("a", "key-of-a") };
    let server = Server::with(Setup { tenants: vec![config], ..Setup::default() });
    let mut socket = Socket::open_as(&server, "key-of-a");
    server.hold_steps();
    socket.send(&chat_body(""));
    for message in ["{\"type\":\"pause\"}", "{\"type\":\"resume\"}", "{\"type\":\"pause\"}", "nonsense"] {
        socket.send(message);
    }
    // Refusals come at once; acknowledgements when a step has ended, or before the first step begins.
    let (mut refused, mut types) = (0, Vec::new());
    while refused < 2 {
        let message = socket.json();
        if message.get("error").is_some() {
            assert_eq!(message["error"]["code"], "requests_per_minute", "{message}");
            refused += 1;
        }
        types.extend(message["type"].as_str().map(str::to_owned));
    }
    server.release_steps();
    while let Some(message) = socket.next() {
        if message.starts_with("{\"type\"") {
            let message: Value = serde_json::from_str(&message).unwrap();
            types.push(message["type"].as_str().unwrap().to_owned());
        }
    }
    assert_eq!(types, ["paused", "resumed"], "the reply goes on");
    assert_eq!(socket.closed, Some((1000, String::new())));
    // A request is refused for the same reason.
    let refused = server.post_as("key-of-a", "/v1/chat/completions", &chat_body(""));
    assert_eq!(refused.refused(429).1.as_deref(), Some("requests_per_minute"));
}

/// A client can cancel its reply when it has no requests left; other messages are refused.
#[test]
fn a_reply_can_be_cancelled_beyond_the_limit_of_requests() {
    let mut a = tenant("a", "key-of-a");
    a.requests_per_minute = Some(1);
    a.metrics = true;
    let server = Server::with(Setup { tenants: vec![a], ..Setup::default() });
    server.hold_steps();
    let (_, mut socket) = Socket::open(&server, "Authorization: Bearer key-of-a\r\n");
    socket.send(&chat_body(""));
    for refused in ["{\"type\":\"pause\"}", "{\"type\":\"cancel\",\"more\":1}", "nonsense"] {
        socket.send(refused);
        let error = std::iter::from_fn(|| Some(socket.json())).find(|message| message.get("error").is_some()).unwrap();
        assert_eq!(error["error"]["code"], "requests_per_minute", "{refused}");
    }
    socket.send(" { \"type\" : \"cancel\" } ");
    let last = std::iter::from_fn(|| Some(socket.json())).find(|message| message.get("type").is_some()).unwrap();
    assert_eq!(last, json!({ "type": "cancelled" }));
    assert_eq!(socket.ending().1, Some(1000));
    server.release_steps();
}

/// Rules that exclude every token are refused by name, in a request and in an update.
#[test]
fn banning_all_tokens_is_refused() {
    let server = Server::start();
    // Ids outside the vocabulary are refused, with its size.
    let outside = server.chat("\"banned_token_ids\":[1000000]").json();
    let message = outside["error"]["message"].as_str().unwrap();
    let vocab_size: usize = message.split("vocabulary of ").nth(1).unwrap().parse().unwrap();
    let all: Vec<usize> = (0..vocab_size).collect();
    let ban = format!("\"banned_token_ids\":{}", json!(all));
    let reply = server.chat(&ban);
    reply.refused(400);
    assert_eq!(reply.json()["error"]["param"], "banned_token_ids");
    let mut socket = paused(&server);
    for (change, param) in [
        (ban.as_str(), "banned_token_ids"),
        ("\"allowed_token_ids\":[6],\"banned_token_ids\":[6]", "banned_token_ids"),
        ("\"allowed_token_ids\":[6],\"stop_token_ids\":[6],\"min_tokens\":2", "min_tokens"),
    ] {
        socket.send(&format!("{{\"type\":\"update\",{change}}}"));
        assert_eq!(socket.json()["error"]["param"], param, "{change}");
    }
    // Positive control: a ban that leaves one token is applied, and the reply goes on. 6 is "a".
    let others: Vec<usize> = all.into_iter().filter(|id| *id != 6).collect();
    socket.send(&format!("{{\"type\":\"update\",\"banned_token_ids\":{}}}", json!(others)));
    assert_eq!(socket.json()["type"], "updated");
    socket.send("{\"type\":\"resume\"}");
    assert_eq!(socket.json()["type"], "resumed");
    assert_eq!(socket.json()["choices"][0]["delta"]["content"], "a");
}

#[test]
fn every_ending_has_its_close_code() {
    let limits = Limits { max_body_bytes: 2000, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let valid = chat_body("");
    let rows: Vec<(&str, Vec<u8>, u16, Option<&str>)> = vec![
        ("completed", frame(FINAL | TEXT, valid.as_bytes()), 1000, None),
        ("client", frame(FINAL | CLOSE, &3456_u16.to_be_bytes()), 3456, None),
        ("client", frame(FINAL | CLOSE, b""), 1000, None),
        ("protocol", frame(0x40 | FINAL | TEXT, b"{}"), 1002, None),
        ("protocol", vec![FINAL | TEXT, 2, b'{', b'}'], 1002, None),
        ("binary", frame(FINAL | BINARY, b"{}"), 1003, Some("expected a text message, found a binary message")),
        ("invalid_utf8", frame(FINAL | TEXT, b"{\"\xff\":1}"), 1007, None),
        ("refused", frame(FINAL | TEXT, b"[]"), 1008, Some("the body is an array, expected an object")),
        ("too_large", frame(FINAL | TEXT, &[b' '; 2001]), 1009, Some("the message is larger than 2000 bytes")),
    ];
    for (label, bytes, code, message) in rows {
        let before = closed(&server, label);
        let (_, mut socket) = Socket::open(&server, "");
        socket.send_bytes(&bytes);
        let (last, found) = socket.ending();
        assert_eq!(found, Some(code), "{label}");
        if let Some(message) = message {
            assert_eq!(last.unwrap()["error"]["message"], message, "{label}");
        }
        assert_eq!(closed(&server, label), before + 1.0, "{label}");
    }
    // Inside a reply, too.
    for (bytes, code) in [
        (frame(FINAL | BINARY, b""), 1003),
        (frame(FINAL | TEXT, b"\xff"), 1007),
        (frame(0x83, b""), 1002),
        (frame(FINAL | TEXT, b"{\"type\":\"cancel\"}"), 1000),
    ] {
        let mut socket = paused(&server);
        socket.send_bytes(&bytes);
        assert_eq!(socket.ending().1, Some(code), "{bytes:x?}");
        server.settles();
    }
    server.until("pellucid_websockets", 0.0);
}

#[test]
fn late_clients_are_told() {
    let soon = Duration::from_millis(500);
    let server =
        Server::with(Setup { limits: Limits { header_timeout: soon, ..Limits::default() }, ..Setup::default() });
    let (_, socket) = Socket::open(&server, "");
    let (error, code) = socket.ending();
    assert_eq!((&error.unwrap()["error"]["message"], code), (&json!("no request arrived in time"), Some(1008)));
    let server = Server::with(Setup { limits: Limits { body_timeout: soon, ..Limits::default() }, ..Setup::default() });
    let (_, mut socket) = Socket::open(&server, "");
    socket.send_frame(TEXT, b"{");
    let (error, code) = socket.ending();
    assert_eq!((&error.unwrap()["error"]["code"], code), (&json!("body_timeout"), Some(1008)));
}

#[test]
fn a_shutdown_is_told() {
    let server = Server::start();
    let (_, idle) = Socket::open(&server, "");
    let running = paused(&server);
    server.drain.signal();
    let (error, code) = idle.ending();
    assert_eq!((&error.unwrap()["error"]["code"], code), (&json!("draining"), Some(1001)));
    server.drain.signal();
    let (error, code) = running.ending();
    assert_eq!((&error.unwrap()["error"]["code"], code), (&json!("shutting_down"), Some(1001)));
}

/// A client that vanishes is noticed, and its reply cancelled, though nothing is written to it.
#[test]
fn a_silent_client_is_given_up() {
    let limits = Limits { write_timeout: Duration::from_millis(1500), ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let mut silent = paused(&server);
    assert_eq!(silent.next_frame(), Some((PING, Vec::new())));
    assert_eq!(silent.next_frame(), None, "the connection ends without an answer");
    until_closed(&server, "no_pong");
    server.settles();
    // Positive control: a client that answers pings keeps its paused reply.
    let mut alive = paused(&server);
    for _ in 0..2 {
        assert_eq!(alive.next_frame(), Some((PING, Vec::new())));
        alive.send_frame(FINAL | PONG, b"");
    }
    // A reply that was paused before its first step holds no KV block yet.
    assert!(server.metric("pellucid_sequences_running") + server.metric("pellucid_requests_waiting") > 0.0);
    alive.send("{\"type\":\"cancel\"}");
    assert_eq!(alive.ending().1, Some(1000));
}

/// The protocol has its own way to end a direction, so the end of TCP without a close frame is a disconnected client.
#[test]
fn a_half_closed_connection_ends_the_reply() {
    let server = Server::start();
    let mut socket = paused(&server);
    socket.half_close();
    until_closed(&server, "disconnected");
    server.settles();
}
