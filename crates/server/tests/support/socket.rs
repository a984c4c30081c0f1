//! A WebSocket client.

use std::io::{Read, Write};
use std::net::TcpStream;

use serde_json::Value;

use super::Server;

/// A minimal WebSocket client: text messages below 64 KiB, masked as the protocol requires of clients.
pub struct Socket(TcpStream);

impl Socket {
    pub fn open(server: &Server, headers: &str) -> (u16, Socket) {
        let mut stream = server.connect();
        write!(
            stream,
            "GET /v1/stream HTTP/1.1\r\nHost: {}\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n{headers}\r\n",
            server.address
        )
        .unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            head.push(byte[0]);
        }
        let status = std::str::from_utf8(&head[9..12]).unwrap().parse().unwrap();
        (status, Socket(stream))
    }

    pub fn send(&mut self, text: &str) {
        let length = text.len();
        let mut frame = vec![0x81];
        if length < 126 {
            frame.push(0x80 | length as u8);
        } else {
            frame.push(0x80 | 126);
            frame.extend((length as u16).to_be_bytes());
        }
        frame.extend([0; 4]);
        frame.extend(text.as_bytes());
        self.0.write_all(&frame).unwrap();
    }

    /// Returns the next text message; `None` when the server closes.
    pub fn next(&mut self) -> Option<String> {
        let mut head = [0; 2];
        self.0.read_exact(&mut head).ok()?;
        let length = match head[1] & 0x7f {
            126 => {
                let mut bytes = [0; 2];
                self.0.read_exact(&mut bytes).unwrap();
                usize::from(u16::from_be_bytes(bytes))
            }
            127 => panic!("a message of more than 64 KiB"),
            length => usize::from(length),
        };
        let mut payload = vec![0; length];
        self.0.read_exact(&mut payload).unwrap();
        (head[0] & 0x0f == 1).then(|| String::from_utf8(payload).unwrap())
    }

    pub fn json(&mut self) -> Value {
        serde_json::from_str(&self.next().expect("a message")).unwrap()
    }
}
