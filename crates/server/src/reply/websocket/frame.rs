//! Frames of the WebSocket protocol (RFC 6455) as a server reads and writes them. Knows bytes only: no connection, no
//! limits on memory.

use super::close_reason::CloseReason;

/// Maximum bytes of a frame's head that a client sends: two, eight of an extended length, four of a mask.
pub(super) const MAX_HEAD_BYTES: usize = 14;
/// Maximum payload of a control frame.
pub(super) const MAX_CONTROL_BYTES: usize = 125;

/// Kinds of frames, with their numbers in the protocol.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Opcode {
    Continuation = 0,
    Text = 1,
    Binary = 2,
    Close = 8,
    Ping = 9,
    Pong = 10,
}

impl Opcode {
    fn of(byte: u8) -> Option<Opcode> {
        use Opcode::{Binary, Close, Continuation, Ping, Pong, Text};
        [Continuation, Text, Binary, Close, Ping, Pong].into_iter().find(|opcode| *opcode as u8 == byte & 0x0f)
    }

    pub(super) fn is_control(self) -> bool {
        self as u8 & 8 != 0
    }
}

/// The head of a frame from a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct FrameHead {
    /// Whether the frame is the last one of its message.
    pub(super) is_final: bool,
    pub(super) opcode: Opcode,
    pub(super) mask: [u8; 4],
    /// Bytes of the payload, as the client announces them.
    pub(super) len: u64,
}

impl FrameHead {
    /// Reads the head at the start of `bytes` and returns it with its length; `None` if more bytes are needed. An error
    /// says how the head violates the protocol.
    pub(super) fn read(bytes: &[u8]) -> Result<Option<(FrameHead, usize)>, &'static str> {
        let [first, second, rest @ ..] = bytes else { return Ok(None) };
        if first & 0x70 != 0 {
            return Err("a reserved bit is set, but no extension was agreed on");
        }
        let opcode = Opcode::of(*first).ok_or("the opcode is reserved")?;
        if second & 0x80 == 0 {
            return Err("a frame of a client must be masked");
        }
        let is_final = first & 0x80 != 0;
        let short = second & 0x7f;
        if opcode.is_control() && (!is_final || usize::from(short) > MAX_CONTROL_BYTES) {
            return Err("a control frame must be whole and have at most 125 bytes");
        }
        let (len, extended) = match short {
            126 => match rest.first_chunk::<2>() {
                None => return Ok(None),
                Some(bytes) => (u64::from(u16::from_be_bytes(*bytes)), 2),
            },
            127 => match rest.first_chunk::<8>() {
                None => return Ok(None),
                Some(bytes) => (u64::from_be_bytes(*bytes), 8),
            },
            short => (u64::from(short), 0),
        };
        if len >> 63 != 0 || (extended == 2 && len < 126) || (extended == 8 && len <= u64::from(u16::MAX)) {
            return Err("the length of a frame is not in its shortest form");
        }
        let Some(mask) = rest.get(extended..).and_then(|rest| rest.first_chunk::<4>()) else { return Ok(None) };
        let head_len = 2 + extended + 4;
        debug_assert!(head_len <= MAX_HEAD_BYTES);
        Ok(Some((FrameHead { is_final, opcode, mask: *mask, len }, head_len)))
    }
}

/// Removes the mask from a part of a payload that begins `offset` bytes after the payload's start.
pub(super) fn unmask(part: &mut [u8], mask: [u8; 4], offset: usize) {
    let mut mask = mask;
    mask.rotate_left(offset % 4);
    for bytes in part.chunks_mut(4) {
        bytes.iter_mut().zip(mask).for_each(|(byte, mask)| *byte ^= mask);
    }
}

/// Appends a whole frame of a server, which is not masked.
pub(super) fn write(opcode: Opcode, payload: &[u8], output: &mut Vec<u8>) {
    output.push(0x80 | opcode as u8);
    match payload.len() {
        len @ ..126 => output.push(len as u8),
        len => match u16::try_from(len) {
            Ok(len) => {
                output.push(126);
                output.extend(len.to_be_bytes());
            }
            Err(_) => {
                output.push(127);
                output.extend((len as u64).to_be_bytes());
            }
        },
    }
    output.extend(payload);
}

/// Returns the payload of a close frame. `reason` is truncated to the space in a control frame.
pub(super) fn close_payload(code: u16, reason: &str) -> Vec<u8> {
    let reason = &reason[..reason.floor_char_boundary(MAX_CONTROL_BYTES - 2)];
    [&code.to_be_bytes(), reason.as_bytes()].concat()
}

/// Returns the reason that a client's close frame means.
pub(super) fn read_close(payload: &[u8]) -> CloseReason {
    let (code, reason) = match payload {
        [] => return CloseReason::ByClient(None),
        [high, low, reason @ ..] => (u16::from_be_bytes([*high, *low]), reason),
        _ => return CloseReason::Protocol("a close frame has a code of one byte"),
    };
    match code {
        1000..=1003 | 1007..=1014 | 3000..=4999 if std::str::from_utf8(reason).is_ok() => {
            CloseReason::ByClient(Some(code))
        }
        1000..=1003 | 1007..=1014 | 3000..=4999 => CloseReason::NotUtf8,
        _ => CloseReason::Protocol("a close frame has a code that must not be sent"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_read_at_any_length() {
        let mask = [1, 2, 3, 4];
        for (len, bytes) in [
            (0_u64, vec![0x81, 0x80]),
            (125, vec![0x81, 0x80 | 125]),
            (126, vec![0x81, 0xfe, 0, 126]),
            (65_535, vec![0x81, 0xfe, 0xff, 0xff]),
            (65_536, vec![0x81, 0xff, 0, 0, 0, 0, 0, 1, 0, 0]),
            (u64::MAX >> 1, vec![0x81, 0xff, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff]),
        ] {
            let bytes = [bytes, mask.to_vec()].concat();
            let head = FrameHead { is_final: true, opcode: Opcode::Text, mask, len };
            assert_eq!(FrameHead::read(&bytes), Ok(Some((head, bytes.len()))));
            assert_eq!(FrameHead::read(&[&bytes[..], b"payload"].concat()), Ok(Some((head, bytes.len()))));
            for cut in 0..bytes.len() {
                assert_eq!(FrameHead::read(&bytes[..cut]), Ok(None), "{cut} bytes of the head of {len}");
            }
        }
    }

    #[test]
    fn heads_that_violate_the_protocol_are_refused() {
        for (bytes, reason) in [
            (vec![0xc1, 0x80], "reserved bit"),
            (vec![0xa1, 0x80], "reserved bit"),
            (vec![0x91, 0x80], "reserved bit"),
            (vec![0x83, 0x80], "opcode"),
            (vec![0x87, 0x80], "opcode"),
            (vec![0x8b, 0x80], "opcode"),
            (vec![0x8f, 0x80], "opcode"),
            (vec![0x81, 0x05], "masked"),
            (vec![0x09, 0x80], "control frame"),
            (vec![0x89, 0xfe], "control frame"),
            (vec![0x88, 0xff], "control frame"),
            (vec![0x81, 0xfe, 0, 125], "shortest"),
            (vec![0x81, 0xff, 0, 0, 0, 0, 0, 0, 0xff, 0xff], "shortest"),
            (vec![0x81, 0xff, 0x80, 0, 0, 0, 0, 0, 0, 0], "shortest"),
        ] {
            let error = FrameHead::read(&bytes).unwrap_err();
            assert!(error.contains(reason), "{bytes:x?}: {error}");
        }
    }

    #[test]
    fn a_mask_is_removed_in_parts() {
        let (text, mask) = (b"the quick brown fox", [7, 77, 177, 250]);
        let masked: Vec<u8> = text.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
        for cut in 0..=text.len() {
            let mut bytes = masked.clone();
            unmask(&mut bytes[..cut], mask, 0);
            unmask(&mut bytes[cut..], mask, cut);
            assert_eq!(bytes, text);
        }
    }

    #[test]
    fn close_frames_are_checked() {
        assert_eq!(read_close(b""), CloseReason::ByClient(None));
        for code in [1000, 1001, 1002, 1003, 1007, 1011, 1013, 1014, 3000, 3999, 4000, 4999] {
            assert_eq!(read_close(&close_payload(code, "for a reason")), CloseReason::ByClient(Some(code)));
        }
        for code in [0_u16, 999, 1004, 1005, 1006, 1015, 1016, 1100, 2000, 2999, 5000, 65_535] {
            assert_eq!(read_close(&code.to_be_bytes()).code(), Some(1002), "{code}");
        }
        assert_eq!(read_close(b"\x03").code(), Some(1002));
        assert_eq!(read_close(b"\x03\xe8\xff"), CloseReason::NotUtf8);
        let long = close_payload(1000, &"ä".repeat(100));
        let read = read_close(&long);
        assert_eq!((long.len(), read), (124, CloseReason::ByClient(Some(1000))), "no character is cut in two");
    }

    #[test]
    fn frames_of_all_lengths_are_written() {
        for (len, head) in [
            (5_usize, vec![0x81, 5]),
            (125, vec![0x81, 125]),
            (126, vec![0x81, 126, 0, 126]),
            (65_535, vec![0x81, 126, 0xff, 0xff]),
            (65_536, vec![0x81, 127, 0, 0, 0, 0, 0, 1, 0, 0]),
        ] {
            let mut output = Vec::new();
            write(Opcode::Text, &vec![b'x'; len], &mut output);
            assert_eq!((&output[..head.len()], output.len()), (&head[..], head.len() + len));
        }
    }
}
