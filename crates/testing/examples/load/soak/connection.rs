//! A connection of the soak test: requests as bytes that were written once, with a key; whole replies, streams, and a
//! WebSocket. Any departure from the protocol is an error, which the test counts as a lost reply.

use std::io::{BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use crate::client::read_line;

/// Read timeout; a server that sends nothing for this long has lost the request.
const PATIENCE: Duration = Duration::from_secs(120);

pub(super) struct Connection {
    address: SocketAddr,
    reader: BufReader<TcpStream>,
}

/// A reply with its decoded body.
#[derive(Debug)]
pub(super) struct Reply {
    pub(super) status: u16,
    pub(super) body: String,
}

/// Returns the bytes of a request.
pub(super) fn request(method: &str, path: &str, key: &str, body: &[u8]) -> Vec<u8> {
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\n\
         Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    );
    [head.as_bytes(), body].concat()
}

fn malformed(what: impl Into<String>) -> Error {
    Error::new(ErrorKind::InvalidData, what.into())
}

impl Connection {
    pub(super) fn open(address: SocketAddr) -> Result<Connection> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Connection { address, reader: BufReader::new(stream) })
    }

    /// Sends a request and reads its whole reply.
    pub(super) fn ask(&mut self, request: &[u8]) -> Result<Reply> {
        self.reader.get_ref().write_all(request)?;
        let head = self.head()?;
        let mut body = Vec::new();
        if head.is_chunked {
            while self.chunk(&mut body)? {}
        } else {
            body.resize(head.length, 0);
            self.reader.read_exact(&mut body)?;
        }
        if head.closes {
            *self = Connection::open(self.address)?;
        }
        let body = String::from_utf8(body).map_err(|_| malformed("a body that is not UTF-8"))?;
        Ok(Reply { status: head.status, body })
    }

    /// Sends a request for a stream, reads up to `num_chunks` chunks, and closes the connection.
    pub(super) fn abandon(&mut self, request: &[u8], num_chunks: usize) -> Result<()> {
        self.reader.get_ref().write_all(request)?;
        if num_chunks > 0 {
            let head = self.head()?;
            let mut body = Vec::new();
            for _ in 1..num_chunks {
                if !head.is_chunked || !self.chunk(&mut body)? {
                    break;
                }
            }
        }
        *self = Connection::open(self.address)?;
        Ok(())
    }

    /// Opens a WebSocket on a connection of its own, sends a text and returns all text messages until the server
    /// closes.
    pub(super) fn dialogue(&self, key: &str, text: &str) -> Result<Vec<String>> {
        let mut socket = Connection::open(self.address)?;
        let head = format!(
            "GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nConnection: Upgrade\r\n\
             Upgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
        );
        socket.reader.get_ref().write_all(head.as_bytes())?;
        let head = socket.head()?;
        if head.status != 101 {
            return Err(malformed(format!("status {} for a WebSocket", head.status)));
        }
        socket.reader.get_ref().write_all(&frame(0x81, text.as_bytes()))?;
        let mut messages = Vec::new();
        loop {
            let (kind, payload) = socket.read_frame()?;
            match kind {
                0x81 => messages.push(String::from_utf8(payload).map_err(|_| malformed("a message not in UTF-8"))?),
                0x88 => {
                    // The answer to a close frame; the server may have closed already.
                    let _ = socket.reader.get_ref().write_all(&frame(0x88, &payload));
                    return Ok(messages);
                }
                0x89 => socket.reader.get_ref().write_all(&frame(0x8a, &payload))?,
                0x8a => {}
                other => return Err(malformed(format!("a frame that begins with {other:#x}"))),
            }
        }
    }

    fn read_frame(&mut self) -> Result<(u8, Vec<u8>)> {
        let mut head = [0; 2];
        self.reader.read_exact(&mut head)?;
        let length = match head[1] {
            126 => {
                let mut bytes = [0; 2];
                self.reader.read_exact(&mut bytes)?;
                usize::from(u16::from_be_bytes(bytes))
            }
            length @ 0..126 => usize::from(length),
            _ => return Err(malformed("a frame of more than 64 KiB")),
        };
        let mut payload = vec![0; length];
        self.reader.read_exact(&mut payload)?;
        Ok((head[0], payload))
    }

    fn head(&mut self) -> Result<Head> {
        let line = read_line(&mut self.reader)?;
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| malformed(&line))?;
        let mut head = Head { status, length: 0, is_chunked: false, closes: false };
        loop {
            let line = read_line(&mut self.reader)?.to_ascii_lowercase();
            match line.split_once(": ") {
                None => return Ok(head),
                Some(("content-length", value)) => head.length = value.parse().map_err(|_| malformed(&line))?,
                Some(("transfer-encoding", value)) => head.is_chunked = value == "chunked",
                Some(("connection", value)) => head.closes = value == "close",
                Some(_) => {}
            }
        }
    }

    /// Appends the next chunk; false at the end.
    fn chunk(&mut self, body: &mut Vec<u8>) -> Result<bool> {
        let line = read_line(&mut self.reader)?;
        let length = usize::from_str_radix(&line, 16).map_err(|_| malformed(&line))?;
        let start = body.len();
        body.resize(start + length + 2, 0);
        self.reader.read_exact(&mut body[start..])?;
        body.truncate(start + length);
        Ok(length > 0)
    }
}

struct Head {
    status: u16,
    length: usize,
    is_chunked: bool,
    closes: bool,
}

/// Returns a frame as clients send them: masked, here with zeros.
fn frame(first: u8, payload: &[u8]) -> Vec<u8> {
    let mut frame = vec![first];
    match payload.len() {
        length @ 0..126 => frame.push(0x80 | length as u8),
        length => {
            frame.push(0x80 | 126);
            frame.extend((length as u16).to_be_bytes());
        }
    }
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}
