//! The character map of SentencePiece (`precompiled_charsmap`): texts of a few bytes and their replacements.
//!
//! A map is a little-endian length in bytes, a double-array trie of 32-bit units, and the replacement texts, each ended
//! by a zero byte. Model files are untrusted: [`CharacterMap::new`] walks every step that a text could take, so that no
//! lookup leaves the map.

/// Maximum bytes of a replacement. Unicode's longest normal form has 33.
const MAX_REPLACEMENT: usize = 64;

/// A checked map.
#[derive(Debug)]
pub(crate) struct CharacterMap {
    units: Vec<u32>,
    texts: String,
}

impl CharacterMap {
    /// Reads a map; the error says what is wrong. `base64` is the field of tokenizer.json.
    pub(crate) fn new(base64: &str) -> Result<CharacterMap, &'static str> {
        let bytes = decode_base64(base64).ok_or("not base64")?;
        let (length, rest) = bytes.split_first_chunk().ok_or("shorter than its length field")?;
        let length = u32::from_le_bytes(*length) as usize;
        let trie = rest.get(..length).ok_or("a trie longer than the map")?;
        let texts = std::str::from_utf8(&rest[length / 4 * 4..]).map_err(|_| "replacement texts are not UTF-8")?;
        if texts.split('\0').any(|text| text.len() > MAX_REPLACEMENT) {
            return Err("a replacement of more than 64 bytes");
        }
        let unit = |unit: &[u8]| u32::from_le_bytes([unit[0], unit[1], unit[2], unit[3]]);
        let map = CharacterMap { units: trie.chunks_exact(4).map(unit).collect(), texts: texts.to_owned() };
        map.check()?;
        Ok(map)
    }

    /// Checks that no text leads outside of the map.
    fn check(&self) -> Result<(), &'static str> {
        let root = *self.units.first().ok_or("an empty trie")?;
        let mut seen = vec![false; self.units.len()];
        let mut open = vec![offset(root)];
        while let Some(base) = open.pop() {
            for byte in 1..=255usize {
                let index = base ^ byte;
                let unit = *self.units.get(index).ok_or("a step outside of the trie")?;
                if !is_child(unit, byte) || std::mem::replace(&mut seen[index], true) {
                    continue;
                }
                let children = index ^ offset(unit);
                if has_leaf(unit) {
                    let value = self.units.get(children).ok_or("a leaf outside of the trie")? & !(1 << 31);
                    if !self.texts.is_char_boundary(value as usize) {
                        return Err("a replacement outside of the texts");
                    }
                }
                open.push(children);
            }
        }
        Ok(())
    }

    /// Returns the replacement of the shortest entry that `text` begins with. The reference replaces the whole text by
    /// it, also where the entry is shorter.
    pub(super) fn replacement(&self, text: &str) -> Option<&str> {
        let mut at = offset(*self.units.first()?);
        for byte in text.bytes().take_while(|byte| *byte != 0) {
            at ^= usize::from(byte);
            let unit = *self.units.get(at)?;
            if !is_child(unit, usize::from(byte)) {
                return None;
            }
            at ^= offset(unit);
            if has_leaf(unit) {
                let start = self.units.get(at)? & !(1 << 31);
                return self.texts.get(start as usize..)?.split('\0').next();
            }
        }
        None
    }
}

/// Returns the start of a unit's children, relative to its own index.
fn offset(unit: u32) -> usize {
    ((unit >> 10) << ((unit & (1 << 9)) >> 6)) as usize
}

fn is_child(unit: u32, byte: usize) -> bool {
    unit & (1 << 31 | 0xFF) == byte as u32
}

fn has_leaf(unit: u32) -> bool {
    unit >> 8 & 1 == 1
}

fn decode_base64(text: &str) -> Option<Vec<u8>> {
    let text = text.trim_end_matches('=');
    let mut out = Vec::with_capacity(text.len() / 4 * 3 + 3);
    let mut bits = 0u32;
    let mut num_bits = 0;
    for byte in text.bytes() {
        let digit = match byte {
            b'A'..=b'Z' => byte - b'A',
            b'a'..=b'z' => byte - b'a' + 26,
            b'0'..=b'9' => byte - b'0' + 52,
            b'+' => 62,
            b'/' => 63,
            _ => return None,
        };
        bits = bits << 6 | u32::from(digit);
        num_bits += 6;
        if num_bits >= 8 {
            num_bits -= 8;
            out.push((bits >> num_bits) as u8);
            bits &= (1 << num_bits) - 1;
        }
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_decoded() {
        assert_eq!(decode_base64("TWFu").unwrap(), b"Man");
        assert_eq!(decode_base64("TWE=").unwrap(), b"Ma");
        assert_eq!(decode_base64("+/8=").unwrap(), [0xFB, 0xFF]);
        assert_eq!(decode_base64("T*"), None);
    }

    #[test]
    fn maps_that_lead_outside_are_rejected() {
        assert!(CharacterMap::new("").is_err());
        // A length of 2^32 - 1.
        assert_eq!(CharacterMap::new("/////w==").unwrap_err(), "a trie longer than the map");
        // No trie, and 66 bytes of text.
        let long = "AAAAAGFh".to_owned() + &"YWFh".repeat(21) + "YQ==";
        assert_eq!(CharacterMap::new(&long).unwrap_err(), "a replacement of more than 64 bytes");
        let walk = |units: &[u32], texts: &str| CharacterMap { units: units.to_vec(), texts: texts.to_owned() }.check();
        assert_eq!(walk(&[0], ""), Err("a step outside of the trie"));
        let mut units = vec![0u32; 512];
        assert_eq!(walk(&units, ""), Ok(()));
        // The root's child for 'a' is a leaf whose value lies past the texts.
        units[0] = 256 << 10;
        units[256 ^ 97] = 97 | 1 << 8 | 1 << 10;
        units[256 ^ 97 ^ 1] = 1 << 31 | 5;
        assert_eq!(walk(&units, "abc"), Err("a replacement outside of the texts"));
        assert_eq!(walk(&units, "abcdef\0"), Ok(()));
        // The child's own children begin far outside of the trie.
        units[256 ^ 97] = 97 | 0xFFFF << 10;
        assert_eq!(walk(&units, "abc"), Err("a step outside of the trie"));
    }
}
