//! The part of ZeroMQ's protocol that a publisher needs: ZMTP 3.0 with the mechanism NULL, which authenticates nobody
//! (<https://rfc.zeromq.org/spec/23>). Peers are not trusted: every length is bounded before it is used.

use std::io::{self, Read, Write};

const GREETING_BYTES: usize = 64;
/// Maximum bytes of a frame from a subscriber: a topic, or its properties.
const MAX_FRAME: u64 = 4096;

const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// A message from a subscriber.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Incoming {
    Subscribe(Vec<u8>),
    Cancel(Vec<u8>),
    /// Something without a meaning here.
    Other,
}

fn invalid(reason: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, reason)
}

/// Exchanges greetings and properties with a peer, which must be a subscriber.
pub(super) fn handshake(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut greeting = [0; GREETING_BYTES];
    (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
    greeting[12..16].copy_from_slice(b"NULL");
    stream.write_all(&greeting)?;
    let mut theirs = [0; GREETING_BYTES];
    // Old peers send ten bytes and wait.
    stream.read_exact(&mut theirs[..11])?;
    if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 {
        return Err(invalid("the peer does not speak ZMTP 3"));
    }
    stream.read_exact(&mut theirs[11..])?;
    if &theirs[12..32] != b"NULL\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0" {
        return Err(invalid("the peer wants another mechanism than NULL"));
    }
    let mut ready = b"\x05READY".to_vec();
    ready.extend(b"\x0bSocket-Type\x00\x00\x00\x03PUB");
    let mut command = vec![COMMAND, ready.len() as u8];
    command.extend(ready);
    stream.write_all(&command)?;
    let (flags, body) = read_frame(stream)?;
    let properties = body.strip_prefix(b"\x05READY").filter(|_| flags & COMMAND != 0);
    match socket_type(properties.ok_or_else(|| invalid("expected READY"))?) {
        Some(b"SUB" | b"XSUB") => Ok(()),
        _ => Err(invalid("the peer is no subscriber")),
    }
}

/// Returns the value of `Socket-Type` among properties: each a length of one byte, a name, a length of four bytes, and
/// a value.
fn socket_type(mut properties: &[u8]) -> Option<&[u8]> {
    loop {
        let (&len, rest) = properties.split_first()?;
        let (name, rest) = rest.split_at_checked(len.into())?;
        let (len, rest) = rest.split_first_chunk()?;
        let (value, rest) = rest.split_at_checked(u32::from_be_bytes(*len) as usize)?;
        if name.eq_ignore_ascii_case(b"socket-type") {
            return Some(value);
        }
        properties = rest;
    }
}

fn read_frame(stream: &mut impl Read) -> io::Result<(u8, Vec<u8>)> {
    let mut flags = [0];
    stream.read_exact(&mut flags)?;
    let mut len = [0; 8];
    stream.read_exact(if flags[0] & LONG != 0 { &mut len[..] } else { &mut len[7..] })?;
    let len = u64::from_be_bytes(len);
    if len > MAX_FRAME {
        return Err(invalid("a frame is too long"));
    }
    let mut body = vec![0; len as usize];
    stream.read_exact(&mut body)?;
    Ok((flags[0], body))
}

/// Reads the next message of a subscriber.
pub(super) fn read(stream: &mut impl Read) -> io::Result<Incoming> {
    let (flags, body) = read_frame(stream)?;
    if flags & COMMAND != 0 {
        return Ok(Incoming::Other);
    }
    Ok(match body.split_first() {
        Some((1, topic)) => Incoming::Subscribe(topic.to_vec()),
        Some((0, topic)) => Incoming::Cancel(topic.to_vec()),
        _ => Incoming::Other,
    })
}

/// Returns the bytes of a message of several frames.
pub(super) fn message(frames: &[&[u8]]) -> Vec<u8> {
    let mut out = Vec::new();
    for (i, frame) in frames.iter().enumerate() {
        let more = if i + 1 < frames.len() { MORE } else { 0 };
        match u8::try_from(frame.len()) {
            Ok(len) => out.extend([more, len]),
            Err(_) => {
                out.push(more | LONG);
                out.extend((frame.len() as u64).to_be_bytes());
            }
        }
        out.extend(*frame);
    }
    out
}

#[cfg(test)]
mod tests {
    use std::io::Cursor;

    use super::*;

    /// A peer that has sent everything already.
    struct Peer(Cursor<Vec<u8>>);

    impl Read for Peer {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            self.0.read(buffer)
        }
    }

    impl Write for Peer {
        fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
            Ok(buffer.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn greeting(version: u8, mechanism: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; GREETING_BYTES];
        (bytes[0], bytes[9], bytes[10]) = (0xff, 0x7f, version);
        bytes[12..12 + mechanism.len()].copy_from_slice(mechanism);
        bytes
    }

    fn ready(socket: &[u8]) -> Vec<u8> {
        let mut body = b"\x05READY\x08Identity\x00\x00\x00\x00\x0bSocket-Type\x00\x00\x00".to_vec();
        body.push(socket.len() as u8);
        body.extend(socket);
        [&[COMMAND, body.len() as u8][..], &body].concat()
    }

    fn greets(bytes: Vec<u8>) -> bool {
        handshake(&mut Peer(Cursor::new(bytes))).is_ok()
    }

    #[test]
    fn only_subscribers_are_accepted() {
        assert!(greets([greeting(3, b"NULL"), ready(b"SUB")].concat()));
        assert!(greets([greeting(3, b"NULL"), ready(b"XSUB")].concat()));
        assert!(!greets([greeting(3, b"NULL"), ready(b"PUB")].concat()));
        assert!(!greets([greeting(3, b"CURVE"), ready(b"SUB")].concat()));
        assert!(!greets([greeting(2, b"NULL"), ready(b"SUB")].concat()));
        assert!(!greets(b"GET / HTTP/1.1\r\nHost: example\r\n\r\n".to_vec()));
        // Every truncation, and lengths beyond the frame.
        let whole = [greeting(3, b"NULL"), ready(b"SUB")].concat();
        assert!((0..whole.len()).all(|len| !greets(whole[..len].to_vec())));
        for i in GREETING_BYTES..whole.len() {
            let mut broken = whole.clone();
            broken[i] ^= 0xff;
            greets(broken);
        }
    }

    #[test]
    fn frames_are_bounded() {
        let huge = [&[LONG][..], &u64::MAX.to_be_bytes(), b"x"].concat();
        assert!(read(&mut Cursor::new(huge)).is_err());
        assert_eq!(read(&mut Cursor::new(b"\x00\x03\x01ab")).unwrap(), Incoming::Subscribe(b"ab".to_vec()));
        assert_eq!(read(&mut Cursor::new(b"\x00\x01\x00")).unwrap(), Incoming::Cancel(Vec::new()));
        assert_eq!(read(&mut Cursor::new(b"\x04\x05\x04PING")).unwrap(), Incoming::Other);
        let long = vec![7; 300];
        assert_eq!(message(&[b"", b"ab"]), b"\x01\x00\x00\x02ab");
        assert_eq!(message(&[&long])[..9], [2, 0, 0, 0, 0, 0, 0, 1, 44]);
    }
}
