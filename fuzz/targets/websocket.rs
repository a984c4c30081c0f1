//! A dialogue over a WebSocket with a server in this process and the tiny model.
//!
//! Each line of the input is one action of the client; its first byte says which: `t` a text message, `f` the beginning
//! of a message in fragments, `c` a further fragment, `e` the last one, `b` a binary message, `p` a ping, `q` a pong,
//! `x` a close frame, `r` raw bytes, `w` waits for the next message of the server. Then the client closes its half of
//! the connection, reads what is left, and every dialogue must end: the connection closes, the messages are JSON, and
//! the server holds nothing for the client any more.

#![no_main]

#[path = "../../crates/server/tests/server/support/mod.rs"]
mod support;

use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use libfuzzer_sys::fuzz_target;
use support::Server;

/// Actions of one dialogue; more would only take longer.
const MAX_ACTIONS: usize = 24;
/// Maximum time in which the server must send something or close, and then release everything.
const PATIENCE: Duration = Duration::from_secs(20);

static SERVER: LazyLock<Server> = LazyLock::new(Server::start);

fuzz_target!(|data: &[u8]| {
    let mut client = SERVER.connect();
    let head = format!(
        "GET /v1/stream HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
         Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
        SERVER.address
    );
    client.write_all(head.as_bytes()).expect("an open connection");
    let mut received = Received::default();
    assert!(received.until(&mut client, PATIENCE, |received| received.head_len().is_some()), "no reply to the upgrade");
    for line in data.split(|&byte| byte == b'\n').take(MAX_ACTIONS) {
        let Some((&action, payload)) = line.split_first() else { continue };
        if action == b'w' {
            let seen = received.messages();
            // In vain before a request was sent.
            received.until(&mut client, Duration::from_millis(100), |received| received.messages() > seen);
            continue;
        }
        let frame = match action {
            b't' => frame(0x81, payload),
            b'f' => frame(0x01, payload),
            b'c' => frame(0x00, payload),
            b'e' => frame(0x80, payload),
            b'b' => frame(0x82, payload),
            b'p' => frame(0x89, payload),
            b'q' => frame(0x8a, payload),
            b'x' => frame(0x88, payload),
            _ => payload.to_vec(),
        };
        // The server may have closed the connection.
        if client.write_all(&frame).is_err() {
            break;
        }
    }
    let _ = client.shutdown(Shutdown::Write);
    let has_ended = received.until(&mut client, PATIENCE, |_| false);
    assert!(has_ended, "the dialogue does not end after {}", received.bytes.escape_ascii());
    received.check();
    drop(client);
    released();
});

/// Returns a frame as clients send them: masked, here with zeros.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        len @ 0..126 => frame.push(0x80 | len as u8),
        len => {
            frame.push(0x80 | 126);
            frame.extend((len.min(0xffff) as u16).to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.extend(&payload[..payload.len().min(0xffff)]);
    frame
}

/// Bytes from the server.
#[derive(Debug, Default)]
struct Received {
    bytes: Vec<u8>,
    is_over: bool,
}

impl Received {
    /// Reads until a condition holds or the server closes; false if nothing arrives for `patience`.
    fn until(&mut self, client: &mut TcpStream, patience: Duration, holds: impl Fn(&Received) -> bool) -> bool {
        let _ = client.set_read_timeout(Some(patience));
        while !holds(self) && !self.is_over {
            let mut buffer = [0; 4096];
            match client.read(&mut buffer) {
                Ok(len @ 1..) => self.bytes.extend(&buffer[..len]),
                Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => return false,
                // libFuzzer's alarm rings every 16 seconds, and a read with a time limit is not restarted after it.
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                // The end, or a reset: the server closed while our bytes were on their way.
                Ok(0) | Err(_) => self.is_over = true,
            }
        }
        true
    }

    fn head_len(&self) -> Option<usize> {
        self.bytes.windows(4).position(|window| window == b"\r\n\r\n").map(|at| at + 4)
    }

    /// Returns the number of complete frames.
    fn messages(&self) -> usize {
        frames(&self.bytes[self.head_len().unwrap_or(self.bytes.len())..]).0.len()
    }

    /// Checks the upgrade, and that each message is JSON or the end of a stream.
    fn check(&self) {
        let Some(head) = self.head_len() else { panic!("no reply to the upgrade") };
        assert!(self.bytes.starts_with(b"HTTP/1.1 101"), "{:?}", self.bytes.escape_ascii());
        let (frames, _) = frames(&self.bytes[head..]);
        for (first, payload) in frames {
            match first {
                0x81 if payload == b"[DONE]" => {}
                0x81 => {
                    let value: serde_json::Value = serde_json::from_slice(payload).expect("JSON");
                    assert!(value.is_object(), "{value}");
                }
                0x88 => assert!(payload.is_empty() || payload.len() >= 2, "{payload:?}"),
                0x89 | 0x8a => {}
                other => panic!("a frame that begins with {other:#x}"),
            }
        }
    }
}

/// Divides bytes into frames with their first byte and payload. Also returns the bytes that they take.
fn frames(bytes: &[u8]) -> (Vec<(u8, &[u8])>, usize) {
    let (mut frames, mut at) = (Vec::new(), 0);
    while let Some(&[first, len]) = bytes.get(at..at + 2) {
        assert_eq!(len & 0x80, 0, "the server masked a frame");
        let (start, len) = match len {
            126 => match bytes.get(at + 2..at + 4) {
                Some(&[high, low]) => (at + 4, usize::from(u16::from_be_bytes([high, low]))),
                _ => break,
            },
            127 => match bytes.get(at + 2..at + 10) {
                Some(len) => (at + 10, u64::from_be_bytes(len.try_into().expect("eight bytes")) as usize),
                None => break,
            },
            len => (at + 2, usize::from(len)),
        };
        let Some(payload) = bytes.get(start..start + len) else { break };
        frames.push((first, payload));
        at = start + len;
    }
    (frames, at)
}

/// Waits until the server holds nothing for a client.
fn released() {
    let started = Instant::now();
    loop {
        let metrics = SERVER.get("/metrics").text();
        let gauges = [
            "pellucid_kv_blocks_in_use",
            "pellucid_sequences_running",
            "pellucid_requests_waiting",
            "pellucid_client_memory_bytes",
        ];
        let held = |line: &&str| {
            let (name, value) = line.split_once(' ').unwrap_or((line, ""));
            gauges.contains(&name) && value != "0" && value != "0.0"
        };
        let Some(held) = metrics.lines().find(held) else { return };
        assert!(started.elapsed() < PATIENCE, "after the dialogue: {held}");
        std::thread::sleep(Duration::from_millis(1));
    }
}
