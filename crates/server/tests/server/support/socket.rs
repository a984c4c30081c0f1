//! A WebSocket client that can send any frame.

use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};

use serde_json::Value;

use super::Server;

pub const CONTINUATION: u8 = 0;
pub const TEXT: u8 = 1;
pub const BINARY: u8 = 2;
pub const CLOSE: u8 = 8;
pub const PING: u8 = 9;
pub const PONG: u8 = 10;
/// Bit of the last frame of a message.
pub const FINAL: u8 = 0x80;

/// A minimal WebSocket client. Frames are masked, as the protocol requires of clients.
pub struct Socket {
    stream: TcpStream,
    /// Code and reason of the server's close frame.
    pub closed: Option<(u16, String)>,
}

/// Returns a frame of a client. `first` is its first byte: opcode, final bit and reserved bits.
pub fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    const MASK: [u8; 4] = [0x12, 0x34, 0x56, 0x78];
    let mut frame = vec![first];
    match payload.len() {
        len @ ..126 => frame.push(0x80 | len as u8),
        len @ 126..=0xffff => {
            frame.push(0x80 | 126);
            frame.extend((len as u16).to_be_bytes());
        }
        len => {
            frame.push(0x80 | 127);
            frame.extend((len as u64).to_be_bytes());
        }
    }
    frame.extend(MASK);
    frame.extend(payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    frame
}

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
        (status, Socket { stream, closed: None })
    }

    /// Opens a socket with a key.
    pub fn open_as(server: &Server, key: &str) -> Socket {
        let (status, socket) = Socket::open(server, &format!("X-Api-Key: {key}\r\n"));
        assert_eq!(status, 101);
        socket
    }

    pub fn send(&mut self, text: &str) {
        self.send_frame(FINAL | TEXT, text.as_bytes());
    }

    pub fn send_frame(&mut self, first: u8, payload: &[u8]) {
        self.stream.write_all(&frame(first, payload)).unwrap();
    }

    /// Sends bytes as they are; returns whether the connection took them.
    pub fn send_bytes(&mut self, bytes: &[u8]) -> bool {
        self.stream.write_all(bytes).is_ok()
    }

    /// Closes the client's side of the TCP connection.
    pub fn half_close(&mut self) {
        self.stream.shutdown(Shutdown::Write).unwrap();
    }

    /// Returns the next frame; `None` at the end of the connection.
    pub fn next_frame(&mut self) -> Option<(u8, Vec<u8>)> {
        let mut head = [0; 2];
        self.stream.read_exact(&mut head).ok()?;
        assert_eq!(head[0] & 0xf0, FINAL, "the server sends whole messages");
        assert_eq!(head[1] & 0x80, 0, "the server's frames are not masked");
        let length = match head[1] {
            126 => {
                let mut bytes = [0; 2];
                self.stream.read_exact(&mut bytes).unwrap();
                usize::from(u16::from_be_bytes(bytes))
            }
            127 => {
                let mut bytes = [0; 8];
                self.stream.read_exact(&mut bytes).unwrap();
                u64::from_be_bytes(bytes) as usize
            }
            length => usize::from(length),
        };
        let mut payload = vec![0; length];
        self.stream.read_exact(&mut payload).unwrap();
        Some((head[0] & 0x0f, payload))
    }

    /// Returns the next text message and answers pings before it; `None` when the server closes.
    pub fn next(&mut self) -> Option<String> {
        loop {
            let (opcode, payload) = self.next_frame()?;
            match opcode {
                TEXT => return Some(String::from_utf8(payload).unwrap()),
                PING => self.send_frame(FINAL | PONG, &payload),
                CLOSE => {
                    let (code, reason) = payload.split_first_chunk::<2>().expect("a close code");
                    let reason = String::from_utf8(reason.to_vec()).unwrap();
                    self.closed = Some((u16::from_be_bytes(*code), reason));
                    return None;
                }
                _ => {}
            }
        }
    }

    pub fn json(&mut self) -> Value {
        serde_json::from_str(&self.next().expect("a message")).unwrap()
    }

    /// Reads up to the end; returns the last message and the close code, if the server sent one.
    pub fn ending(mut self) -> (Option<Value>, Option<u16>) {
        let mut last = None;
        while let Some(message) = self.next() {
            last = serde_json::from_str(&message).ok();
        }
        (last, self.closed.map(|(code, _)| code))
    }
}
