//! Requests in flight: disconnects, a full queue, slow readers, shutdown, and control messages.

use std::io::{BufReader, Write};
use std::net::TcpStream;
use std::time::Duration;

use crate::support::socket::Socket;
use crate::support::{Response, Server, Setup, chat_body, check_error, tenant};
use pellucid_server::{Ended, Limits, TenantConfig};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const JSON: [(&str, &str); 1] = [("Content-Type", "application/json")];

/// A chat of 200 steps: drafts would make them fewer where steps are slow.
fn long_chat(more: &str) -> String {
    chat_body(&format!("\"ignore_eos\":true,\"speculate\":false,\"max_tokens\":200,\"seed\":3{more}"))
}

#[test]
fn a_disconnected_client_frees_its_blocks() {
    let server = Server::with(Setup { max_sequences: 2, context_len: 512, ..Setup::default() });
    server.slow_down(50);
    // Two requests in decode, one streamed and one whole, and a third in the queue, which then disconnects in prefill.
    let mut streamed = server.stream(CHAT, &long_chat(",\"stream\":true"));
    for _ in 0..4 {
        streamed.next_data().unwrap();
    }
    let whole = server.send("POST", CHAT, &JSON, long_chat("").as_bytes());
    server.until("pellucid_sequences_running", 2.0);
    let prompt = format!("\"messages\":[{{\"role\":\"user\",\"content\":\"{}\"}}]", "a".repeat(200));
    let body = chat_body(&format!("{prompt},\"ignore_eos\":true,\"speculate\":false,\"max_tokens\":100"));
    let waiting = server.send("POST", CHAT, &JSON, body.as_bytes());
    server.until("pellucid_requests_waiting", 1.0);
    assert!(server.metric("pellucid_kv_blocks_in_use") > 0.0, "blocks must be in use before the disconnects");
    drop((streamed, whole));
    // The request in the queue starts, and disconnects while its prompt is computed.
    server.until("pellucid_requests_waiting", 0.0);
    server.until("pellucid_sequences_running", 1.0);
    // A client that is gone is noticed within seconds; its reply must not end before.
    server.slow_down(400);
    drop(waiting);
    server.until("pellucid_engine_cancels_total", 3.0);
    server.settles();
    assert_eq!(server.metric("pellucid_requests_waiting"), 0.0);
    server.slow_down(0);
    server.chat("").ok();
}

#[test]
fn reserved_blocks_count_as_used() {
    let server = Server::start();
    server.slow_down(20);
    let used_by = |more: &str| {
        let mut stream = server.stream(CHAT, &chat_body(&format!("\"ignore_eos\":true,\"stream\":true{more}")));
        (0..3).for_each(|_| drop(stream.next_data().unwrap()));
        let text = server.get("/metrics").text();
        drop(stream);
        server.settles();
        let number = |name: &str| {
            let line = text.lines().find(|line| line.split([' ', '{']).next() == Some(name)).unwrap();
            line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()
        };
        let held = number("pellucid_kv_blocks_in_use") + number("pellucid_kv_blocks_reserved");
        let ratio = held / number("pellucid_kv_blocks");
        assert_eq!((number("pellucid_kv_use_ratio"), number("vllm:kv_cache_usage_perc")), (ratio, ratio));
        held
    };
    // Blocks of 32 tokens: one for the prompt, and those reserved for the reply.
    assert_eq!(used_by(",\"max_tokens\":200"), 7.0);
    assert_eq!(used_by(",\"max_tokens\":null"), 3.0, "without `max_tokens`, two blocks are reserved");
    assert_eq!(server.metric("pellucid_kv_use_ratio"), 0.0);
}

#[test]
fn a_full_queue_is_refused_at_once() {
    let server = Server::with(Setup { max_sequences: 1, max_waiting: 2, ..Setup::default() });
    // 200 tokens take ten seconds, so the reply does not end before the steps are held.
    server.slow_down(50);
    let running = server.send("POST", CHAT, &JSON, long_chat("").as_bytes());
    server.until("pellucid_sequences_running", 1.0);
    // No step ends from here on, so a refusal that waited for the engine would never arrive.
    server.hold_steps();
    let waiting = [0, 1].map(|_| server.send("POST", CHAT, &JSON, long_chat("").as_bytes()));
    server.until("pellucid_requests_waiting", 2.0);
    for more in ["", ",\"stream\":true"] {
        let reply = server.post(CHAT, &long_chat(more));
        assert_eq!(reply.refused(429).1.as_deref(), Some("queue_full"));
        let message = reply.json()["error"]["message"].as_str().unwrap().to_owned();
        assert!(
            !message.contains(|c: char| c.is_ascii_digit()),
            "a count would show other tenants' activity: {message}"
        );
        assert!(reply.header("retry-after").is_some());
    }
    // A request with more prompts than the queue holds is refused for good.
    let reply = server.complete("\"prompt\":[\"a\",\"b\",\"c\"]");
    assert_eq!(reply.refused(400).0.as_deref(), Some("prompt"));
    drop((running, waiting));
    server.release_steps();
    server.settles();
}

#[test]
fn one_tenant_cannot_fill_the_queue_for_another() {
    let a = TenantConfig { metrics: true, ..tenant("a", "key-of-a") };
    let tenants = vec![a, tenant("b", "key-of-b")];
    let server = Server::with(Setup { tenants, max_sequences: 1, max_waiting: 4, ..Setup::default() });
    let key = |key: &'static str| [JSON[0], ("Authorization", key)];
    let (key_a, key_b) = (key("Bearer key-of-a"), key("Bearer key-of-b"));
    let until = |name: &str, expected: f64| {
        while server.metric_as(name, &key_a[1..]) != expected {
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    server.slow_down(50);
    let running = server.send("POST", CHAT, &key_a, long_chat("").as_bytes());
    until("pellucid_sequences_running", 1.0);
    // No step ends from here on.
    server.hold_steps();
    let waiting = [0, 1].map(|_| server.send("POST", CHAT, &key_a, long_chat("").as_bytes()));
    until("pellucid_requests_waiting", 2.0);
    let refused = server.request("POST", CHAT, &key_a, long_chat("").as_bytes());
    assert_eq!(refused.refused(429).1.as_deref(), Some("queue_full"), "half of the queue is its share");
    let message = refused.json()["error"]["message"].to_string();
    assert!(!message.contains(|c: char| c.is_ascii_digit()), "the length of the queue is shown: {message}");
    let other = server.send("POST", CHAT, &key_b, chat_body("\"max_tokens\":2").as_bytes());
    until("pellucid_requests_waiting", 3.0);
    drop((running, waiting));
    server.slow_down(0);
    server.release_steps();
    assert_eq!(Response::read(&mut BufReader::new(other)).status, 200);
}

#[test]
fn a_slow_reader_does_not_delay_others() {
    let limits = Limits { write_timeout: Duration::from_millis(500), ..Limits::default() };
    let server = Server::with(Setup { limits, max_sequences: 4, ..Setup::default() });
    // Two clients request replies that fill every buffer on the way, and read nothing.
    let body = chat_body(
        "\"stream\":true,\"ignore_eos\":true,\"max_tokens\":230,\"n\":3,\"trace\":true,\"logprobs\":true,\"top_logprobs\":20",
    );
    let slow: Vec<TcpStream> = (0..2).map(|_| server.send("POST", CHAT, &JSON, body.as_bytes())).collect();
    let alone = server.chat("\"seed\":5").ok()["choices"].clone();
    for _ in 0..5 {
        assert_eq!(server.chat("\"seed\":5").ok()["choices"], alone);
    }
    // Whether they were disconnected or the buffers held everything, no block stays in use.
    server.settles();
    drop(slow);
}

#[test]
fn the_first_signal_completes_replies_in_flight() {
    let server = Server::start();
    server.slow_down(50);
    let mut stream =
        server.stream(CHAT, &chat_body("\"stream\":true,\"ignore_eos\":true,\"max_tokens\":40,\"seed\":3"));
    stream.next_data().unwrap();
    server.drain.signal();
    let refused = server.chat("");
    assert_eq!(refused.refused(503).1.as_deref(), Some("draining"));
    assert!(refused.header("retry-after").is_some());
    assert_eq!(server.get("/health").status, 200);
    server.get("/ready").refused(503);
    let chunks = stream.chunks();
    assert_eq!(chunks.last().unwrap()["choices"][0]["finish_reason"], "length", "a reply in flight is completed");
    assert_eq!(server.ended(), Ended::Drained);
}

#[test]
fn a_request_that_is_being_read_is_answered_before_shutdown() {
    let server = Server::start();
    let body = chat_body("\"max_tokens\":4,\"seed\":3");
    let (first, second) = body.split_at(body.len() / 2);
    let mut connection = server.connect();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\nExpect: 100-continue\r\n\r\n",
        server.address,
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    // The interim response shows that the server waits for the body.
    let mut connection = BufReader::new(connection);
    assert_eq!(Response::read(&mut connection).status, 100);
    connection.get_mut().write_all(first.as_bytes()).unwrap();
    // An idle WebSocket does not delay the shutdown, and a request over it is refused.
    let (status, mut socket) = Socket::open(&server, "");
    assert_eq!(status, 101);
    server.drain.signal();
    socket.send(&chat_body(""));
    let refused: Value = serde_json::from_str(&socket.next().unwrap()).unwrap();
    assert_eq!(check_error(&refused).1.as_deref(), Some("draining"));
    connection.get_mut().write_all(second.as_bytes()).unwrap();
    Response::read(&mut connection).ok();
    assert_eq!(server.ended(), Ended::Drained);
}

#[test]
fn a_websocket_counts_as_a_connection() {
    let limits = Limits { max_connections: 1, ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    let (status, socket) = Socket::open(&server, "");
    assert_eq!(status, 101);
    assert_eq!(server.get("/v1/models").refused(503).1.as_deref(), Some("too_many_connections"));
    drop(socket);
    server.until_status("/v1/models", 200);
}

#[test]
fn the_second_signal_ends_replies_with_an_error() {
    let server = Server::start();
    server.slow_down(50);
    let mut stream = server.stream(CHAT, &long_chat(",\"stream\":true"));
    stream.next_data().unwrap();
    let whole = server.send("POST", CHAT, &JSON, long_chat("").as_bytes());
    server.until("pellucid_sequences_running", 2.0);
    server.drain.signal();
    server.drain.signal();
    let data = stream.all();
    let last: Value = serde_json::from_str(data.last().unwrap()).unwrap();
    assert_eq!(check_error(&last).1.as_deref(), Some("shutting_down"), "an error event, and no [DONE] after it");
    assert_eq!(Response::read(&mut BufReader::new(whole)).refused(503).1.as_deref(), Some("shutting_down"));
    assert_eq!(server.ended(), Ended::CutShort);
}

#[test]
fn a_step_that_hangs_makes_ready_fail() {
    let limits = Limits { watchdog: Duration::from_millis(100), ..Limits::default() };
    let server = Server::with(Setup { limits, ..Setup::default() });
    assert_eq!(server.get("/ready").status, 200);
    server.hold_steps();
    let held = server.send("POST", CHAT, &JSON, chat_body("\"max_tokens\":1").as_bytes());
    server.until_status("/ready", 503);
    assert_eq!(server.get("/ready").refused(503).1.as_deref(), Some("engine_stalled"));
    assert_eq!(server.get("/health").status, 200);
    server.release_steps();
    Response::read(&mut BufReader::new(held)).ok();
    server.until_status("/ready", 200);
}

#[test]
fn a_websocket_returns_the_same_text() {
    let server = Server::start();
    let whole = server.chat("\"seed\":3,\"max_tokens\":20").ok();
    let (status, mut socket) = Socket::open(&server, "");
    assert_eq!(status, 101);
    socket.send(&chat_body("\"seed\":3,\"max_tokens\":20"));
    let mut text = String::new();
    let mut last = Value::Null;
    while let Some(message) = socket.next() {
        if message == "[DONE]" {
            break;
        }
        last = serde_json::from_str(&message).unwrap();
        text += last["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
    }
    assert_eq!(text, whole["choices"][0]["message"]["content"]);
    assert_eq!(last["usage"]["completion_tokens"], whole["usage"]["completion_tokens"]);
    assert_eq!(socket.next(), None);
    for bad in ["hello", "{}", "[]", &chat_body("\"tools\":[1]"), &chat_body("\"stream\":false")] {
        let (_, mut socket) = Socket::open(&server, "");
        socket.send(bad);
        check_error(&socket.json());
        assert_eq!(socket.next(), None);
    }
    let plain = server.get("/v1/stream");
    assert_eq!(plain.refused(426).1.as_deref(), Some("upgrade_required"));
    let (status, _) = Socket::open(&server, "Origin: https://other.example\r\n");
    assert_eq!(status, 403, "a page of another origin");
}

#[test]
fn a_stop_string_does_not_disturb_acknowledgements() {
    let server = Server::start();
    let long = "\"seed\":3,\"n\":3,\"max_tokens\":100,\"ignore_eos\":true";
    let whole = server.chat(long).ok();
    let text = |choice: usize| whole["choices"][choice]["message"]["content"].as_str().unwrap().to_owned();
    let (first, others) = (text(0), [text(1), text(2)]);
    let chars: Vec<char> = first.chars().skip(4).take(20).collect();
    let pair = chars.windows(2).map(|pair| pair.iter().collect::<String>());
    let stop = pair.clone().find(|pair| !others.iter().any(|text| text.contains(pair))).expect("the texts differ");
    server.slow_down(5);
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&chat_body(&format!("{long},\"stop\":{}", json!(stop))));
    let (mut acknowledged, mut has_ended) = (Vec::new(), false);
    while let Some(message) = socket.next().filter(|message| message != "[DONE]") {
        let message: Value = serde_json::from_str(&message).unwrap();
        if !message["type"].is_null() {
            acknowledged.push(message["type"].as_str().unwrap().to_owned());
        }
        // The engine receives the end of the choice first, and these messages after it.
        if message["choices"][0]["finish_reason"] == "stop" && !std::mem::replace(&mut has_ended, true) {
            socket.send("{\"type\":\"pause\"}");
            socket.send("{\"type\":\"resume\"}");
        }
    }
    assert!(has_ended, "the first choice must reach its stop string");
    assert_eq!(acknowledged, ["paused", "resumed"]);
}

#[test]
fn control_messages_pause_resume_update_and_cancel() {
    let server = Server::start();
    server.slow_down(5);
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&long_chat(""));
    socket.json();
    socket.json();
    socket.send("{\"type\":\"pause\"}");
    let paused = loop {
        let message = socket.json();
        if message["type"] == "paused" {
            break message;
        }
    };
    let count = paused["output_tokens"].as_u64().unwrap();
    assert!(count < 200);
    std::thread::sleep(Duration::from_millis(60));
    let in_use = server.metric("pellucid_kv_blocks_in_use");
    assert!(in_use > 0.0, "a paused request keeps its blocks");
    // After the update only one token can be sampled: 6 is "a".
    socket.send("{\"type\":\"update\",\"allowed_token_ids\":[6],\"temperature\":0}");
    assert_eq!(socket.json()["type"], "updated", "no token is computed while paused");
    for bad in [
        "{\"type\":\"update\"}",
        "{\"type\":\"update\",\"temperature\":9}",
        "{\"type\":\"update\",\"seed\":1}",
        "{\"type\":\"dance\"}",
        "{\"type\":\"pause\",\"x\":1}",
        "x",
    ] {
        socket.send(bad);
        check_error(&socket.json());
    }
    socket.send("{\"type\":\"resume\"}");
    assert_eq!(socket.json(), json!({ "type": "resumed", "output_tokens": count }));
    for _ in 0..5 {
        assert_eq!(socket.json()["choices"][0]["delta"]["content"], "a");
    }
    socket.send("{\"type\":\"cancel\"}");
    loop {
        let message = socket.json();
        if message["type"] == "cancelled" {
            break;
        }
    }
    assert_eq!(socket.next(), None);
    server.settles();
    // Beam search does not sample, so sampling fields cannot be updated.
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&chat_body("\"ignore_eos\":true,\"max_tokens\":200,\"beam_width\":2"));
    for bad in ["{\"type\":\"update\",\"temperature\":0.5}", "{\"type\":\"update\",\"max_tokens\":5}"] {
        socket.send(bad);
        loop {
            let message = socket.json();
            if message.get("error").is_some() {
                check_error(&message);
                break;
            }
        }
    }
    drop(socket);
    server.settles();
    // A client that disconnects without closing the WebSocket.
    let (_, mut socket) = Socket::open(&server, "");
    socket.send(&long_chat(""));
    socket.json();
    drop(socket);
    server.settles();
}

/// An update replaces fields that the client gave; defaults that depend on them are derived again.
#[test]
fn an_update_replaces_given_fields() {
    let server = Server::start();
    server.slow_down(5);
    // Sends an update and returns the extension of the last chunk.
    let update = |fields: &str, change: &str| {
        let (_, mut socket) = Socket::open(&server, "");
        socket.send(&chat_body(&format!("\"ignore_eos\":true,\"max_tokens\":60,\"seed\":3,{fields}")));
        socket.json();
        socket.json();
        socket.send(&format!("{{\"type\":\"update\",{change}}}"));
        let (mut answer, mut last) = (Value::Null, Value::Null);
        while let Some(message) = socket.next().filter(|message| message != "[DONE]") {
            last = serde_json::from_str(&message).unwrap();
            if last.get("choices").is_none() {
                answer = last.clone();
            }
        }
        assert_eq!(answer["type"], "updated", "{fields}, {change}: {answer}");
        last["pellucid"].clone()
    };
    let done = update("\"dry_multiplier\":1,\"dry_sequence_breakers\":[]", "\"temperature\":0.5");
    assert_eq!(done["parameters"]["dry_sequence_breakers"], json!([]), "an empty list was given");
    let done = update("\"dry_multiplier\":1", "\"dry_multiplier\":0");
    assert_eq!(done["parameters"]["dry_multiplier"], 0.0, "default breakers are dropped with the multiplier");
    let done = update("\"mirostat_tau\":5", "\"mirostat_eta\":0.25");
    assert_eq!((&done["parameters"]["mirostat_tau"], &done["parameters"]["mirostat_eta"]), (&json!(5.0), &json!(0.25)));
    assert_eq!(done["seed"], 3);
    // Only one token can be sampled: 6 is "a". The stop string takes effect from the update on.
    let only = "\"allowed_token_ids\":[6],\"stop\":\"aa\"";
    let done = update(&format!("{only},\"min_tokens\":60"), "\"min_tokens\":0");
    assert_eq!(done["endings"][0]["reason"], "stop_string", "{done}");
}
