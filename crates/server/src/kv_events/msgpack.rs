//! The few forms of MessagePack that events need (<https://github.com/msgpack/msgpack/blob/master/spec.md>).

/// Writes MessagePack. Lengths are of arrays and texts that this crate writes, so they fit 32 bits.
#[derive(Debug, Default)]
pub(super) struct MessagePack(pub(super) Vec<u8>);

impl MessagePack {
    pub(super) fn nil(&mut self) {
        self.0.push(0xc0);
    }

    pub(super) fn uint(&mut self, value: u64) {
        match value {
            0..=0x7f => self.0.push(value as u8),
            0x80..=0xff => self.0.extend([0xcc, value as u8]),
            0x100..=0xffff => self.tagged(0xcd, &(value as u16).to_be_bytes()),
            0x1_0000..=0xffff_ffff => self.tagged(0xce, &(value as u32).to_be_bytes()),
            _ => self.tagged(0xcf, &value.to_be_bytes()),
        }
    }

    pub(super) fn float(&mut self, value: f64) {
        self.tagged(0xcb, &value.to_be_bytes());
    }

    /// Writes a text of at most 255 bytes.
    pub(super) fn text(&mut self, text: &str) {
        match text.len() {
            len @ 0..32 => self.0.push(0xa0 | len as u8),
            len => self.0.extend([0xd9, len as u8]),
        }
        self.0.extend(text.as_bytes());
    }

    /// Begins an array of `len` items.
    pub(super) fn array(&mut self, len: usize) {
        match len {
            0..16 => self.0.push(0x90 | len as u8),
            16..0x1_0000 => self.tagged(0xdc, &(len as u16).to_be_bytes()),
            _ => self.tagged(0xdd, &(len as u32).to_be_bytes()),
        }
    }

    /// Begins a map of at most 15 pairs.
    pub(super) fn map(&mut self, len: u8) {
        debug_assert!(len < 16);
        self.0.push(0x80 | len);
    }

    fn tagged(&mut self, tag: u8, bytes: &[u8]) {
        self.0.push(tag);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl Fn(&mut MessagePack)) -> Vec<u8> {
        let mut out = MessagePack::default();
        write(&mut out);
        out.0
    }

    /// Bytes from the specification's table of formats.
    #[test]
    fn values_have_the_shortest_form() {
        let cases: [(u64, &[u8]); 6] = [
            (0x7f, &[0x7f]),
            (0x80, &[0xcc, 0x80]),
            (0x100, &[0xcd, 1, 0]),
            (0xffff, &[0xcd, 0xff, 0xff]),
            (0x1_0000, &[0xce, 0, 1, 0, 0]),
            (u64::MAX, &[0xcf, 255, 255, 255, 255, 255, 255, 255, 255]),
        ];
        for (value, bytes) in cases {
            assert_eq!(written(|out| out.uint(value)), bytes);
        }
        assert_eq!(written(|out| out.array(15)), [0x9f]);
        assert_eq!(written(|out| out.array(16)), [0xdc, 0, 16]);
        assert_eq!(written(|out| out.array(0x1_0000)), [0xdd, 0, 1, 0, 0]);
        assert_eq!(written(|out| out.text("abc")), [0xa3, b'a', b'b', b'c']);
        assert_eq!(written(|out| out.text(&"x".repeat(40)))[..2], [0xd9, 40]);
        assert_eq!(written(|out| out.float(1.0)), [0xcb, 0x3f, 0xf0, 0, 0, 0, 0, 0, 0]);
        assert_eq!(written(|out| (out.nil(), out.map(2)).0), [0xc0, 0x82]);
    }
}
