//! A minimal HTTP client: one persistent connection, JSON requests, whole replies and server-sent events, with their
//! times.

use std::io::{BufRead, BufReader, Error, ErrorKind, Read, Result, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

/// Read timeout; longer than any reply takes.
const PATIENCE: Duration = Duration::from_secs(120);

pub(crate) struct Client {
    address: SocketAddr,
    reader: BufReader<TcpStream>,
    key: Option<&'static str>,
}

#[derive(Debug)]
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) body: String,
    pub(crate) retry_after_s: Option<u64>,
    /// Time from the last byte of the request to the first byte of the reply.
    pub(crate) answered_in: Duration,
}

fn malformed(what: &str) -> Error {
    Error::new(ErrorKind::InvalidData, format!("not a reply: {what}"))
}

/// Reads a line, without its end.
pub(crate) fn read_line(reader: &mut impl BufRead) -> Result<String> {
    let mut line = String::new();
    if reader.read_line(&mut line)? == 0 {
        return Err(ErrorKind::UnexpectedEof.into());
    }
    line.truncate(line.trim_end().len());
    Ok(line)
}

impl Client {
    pub(crate) fn connect(address: SocketAddr) -> Result<Client> {
        let stream = TcpStream::connect(address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(Client { address, reader: BufReader::new(stream), key: None })
    }

    /// Sends this key with each request.
    pub(crate) fn with_key(mut self, key: &'static str) -> Client {
        self.key = Some(key);
        self
    }

    /// Closes the connection, even during a reply, and opens a new one.
    pub(crate) fn hang_up(&mut self) -> Result<()> {
        *self = Client { key: self.key, ..Client::connect(self.address)? };
        Ok(())
    }

    pub(crate) fn get(&mut self, path: &str) -> Result<Reply> {
        self.ask("GET", path, b"", &mut |_| true)
    }

    pub(crate) fn post(&mut self, path: &str, body: &[u8]) -> Result<Reply> {
        self.ask("POST", path, body, &mut |_| true)
    }

    /// Sends a request. `event` receives the data of each server-sent event; if it returns false, the connection is
    /// closed.
    pub(crate) fn ask(
        &mut self,
        method: &str,
        path: &str,
        body: &[u8],
        event: &mut dyn FnMut(&str) -> bool,
    ) -> Result<Reply> {
        let length = body.len();
        let key = self.key.map(|key| format!("Authorization: Bearer {key}\r\n")).unwrap_or_default();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n{key}\
             Content-Length: {length}\r\n\r\n"
        );
        let mut stream = self.reader.get_ref();
        stream.write_all(&[head.as_bytes(), body].concat())?;
        let asked = Instant::now();
        let line = read_line(&mut self.reader)?;
        let answered_in = asked.elapsed();
        let status = line.split(' ').nth(1).and_then(|code| code.parse().ok()).ok_or_else(|| malformed(&line))?;
        let (mut length, mut is_chunked, mut retry_after_s, mut closes) = (0, false, None, false);
        loop {
            let line = read_line(&mut self.reader)?.to_ascii_lowercase();
            match line.split_once(": ") {
                None => break,
                Some(("content-length", value)) => length = value.parse().map_err(|_| malformed(&line))?,
                Some(("transfer-encoding", value)) => is_chunked = value == "chunked",
                Some(("retry-after", value)) => retry_after_s = value.parse().ok(),
                Some(("connection", value)) => closes = value == "close",
                Some(_) => {}
            }
        }
        let mut body = String::new();
        if is_chunked {
            let mut seen = 0;
            while self.chunk(&mut body)? {
                while let Some(end) = body[seen..].find("\n\n") {
                    let data = body[seen..seen + end].strip_prefix("data: ");
                    seen += end + 2;
                    if data.is_some_and(|data| !event(data)) {
                        self.hang_up()?;
                        return Ok(Reply { status, body, retry_after_s, answered_in });
                    }
                }
            }
        } else {
            let mut bytes = vec![0; length];
            self.reader.read_exact(&mut bytes)?;
            body = String::from_utf8(bytes).map_err(|_| malformed("not UTF-8"))?;
        }
        if closes {
            self.hang_up()?;
        }
        Ok(Reply { status, body, retry_after_s, answered_in })
    }

    /// Appends the next chunk; false at the end.
    fn chunk(&mut self, body: &mut String) -> Result<bool> {
        let line = read_line(&mut self.reader)?;
        let length = usize::from_str_radix(&line, 16).map_err(|_| malformed(&line))?;
        let mut bytes = vec![0; length + 2];
        self.reader.read_exact(&mut bytes)?;
        // The server never ends a chunk within a character.
        body.push_str(
            std::str::from_utf8(&bytes[..length]).map_err(|_| malformed("a chunk that ends within a character"))?,
        );
        Ok(length > 0)
    }
}
