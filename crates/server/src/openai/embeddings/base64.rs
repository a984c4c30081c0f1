//! Base64 (RFC 4648, with padding), in which clients may ask for vectors: a third of the bytes of decimal numbers.

const ALPHABET: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";

pub(super) fn encode(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let value = |i: usize| u32::from(chunk.get(i).copied().unwrap_or(0));
        let bits = value(0) << 16 | value(1) << 8 | value(2);
        for i in 0..4 {
            let digit = ALPHABET[(bits >> (18 - 6 * i)) as usize & 63];
            text.push(if i > chunk.len() { '=' } else { char::from(digit) });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vectors of RFC 4648, section 10.
    #[test]
    fn known_answers() {
        let cases = [
            ("", ""),
            ("f", "Zg=="),
            ("fo", "Zm8="),
            ("foo", "Zm9v"),
            ("foob", "Zm9vYg=="),
            ("fooba", "Zm9vYmE="),
            ("foobar", "Zm9vYmFy"),
        ];
        for (plain, expected) in cases {
            assert_eq!(encode(plain.as_bytes()), expected);
        }
        assert_eq!(encode(&[0xfb, 0xff, 0xbf]), "+/+/");
    }
}
