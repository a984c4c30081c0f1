//! Searches the arguments of a call with the escapes of JSON decoded: a client that parses `\u0066oo` reads `foo`.

use super::scanner::TextScan;

/// Characters of the longest escape, a pair of surrogates: `\ud83d\ude00`.
const MAX_ESCAPE: usize = 12;

/// A search of JSON text whose escapes are decoded.
#[derive(Debug)]
pub(super) struct DecodedScan {
    scan: TextScan,
    /// An escape that is not complete; empty outside of escapes.
    escape: String,
    /// Number of the piece in which the escape began.
    began: usize,
}

impl DecodedScan {
    /// Goes on behind `scan`, whose text had no escapes.
    pub(super) fn after(scan: &TextScan) -> DecodedScan {
        DecodedScan { scan: scan.fork(), escape: String::new(), began: 0 }
    }

    pub(super) fn found(&self) -> Option<(usize, usize)> {
        self.scan.found()
    }

    /// Number of the first piece that may belong to a match that is not complete.
    pub(super) fn held_from(&self) -> Option<usize> {
        let escape = (!self.escape.is_empty()).then_some(self.began);
        self.scan.held_from().into_iter().chain(escape).min()
    }

    pub(super) fn push(&mut self, piece: usize, text: &str) {
        text.chars().for_each(|character| self.step(piece, character));
    }

    pub(super) fn finish(&mut self) {
        self.escape.clear();
        self.scan.finish();
    }

    fn step(&mut self, piece: usize, character: char) {
        if self.escape.is_empty() && character != '\\' {
            return self.scan.push_character(piece, character);
        }
        if self.escape.is_empty() {
            self.began = piece;
        }
        self.escape.push(character);
        let Some((decoded, num_bytes)) = decode(&self.escape) else { return };
        self.scan.push_character(self.began, decoded);
        // Behind half a pair of surrogates, the text goes on with another character or another escape.
        let rest = self.escape.split_off(num_bytes);
        self.escape.clear();
        rest.chars().for_each(|character| self.step(piece, character));
    }
}

/// Returns the character of the escape at the beginning of `text` and the bytes of the escape; `None` while it is not
/// complete. Half a pair of surrogates, and an escape that JSON does not have, is a replacement character.
fn decode(text: &str) -> Option<(char, usize)> {
    let unknown = char::REPLACEMENT_CHARACTER;
    let kind = text.chars().nth(1)?;
    let simple = match kind {
        'u' => None,
        'n' => Some('\n'),
        't' => Some('\t'),
        'r' => Some('\r'),
        'b' => Some('\u{8}'),
        'f' => Some('\u{c}'),
        '"' | '\\' | '/' => Some(kind),
        _ => Some(unknown),
    };
    if let Some(character) = simple {
        return Some((character, 1 + kind.len_utf8()));
    }
    let Some(first) = text.get(2..).and_then(code_unit)? else { return Some((unknown, text.len())) };
    if !(0xD800..0xDC00).contains(&first) {
        return Some((char::from_u32(first.into()).unwrap_or(unknown), 6));
    }
    let rest = &text[6..];
    if !r"\u".starts_with(&rest[..rest.len().min(2)]) {
        return Some((unknown, 6));
    }
    let Some(second) = rest.get(2..).and_then(code_unit)? else { return Some((unknown, 6)) };
    let pair = char::decode_utf16([first, second]).next().and_then(Result::ok);
    Some(pair.map_or((unknown, 6), |character| (character, MAX_ESCAPE)))
}

/// Returns the four hexadecimal digits at the beginning of `text` as a number: `None` while there are fewer, and
/// `Some(None)` if other characters stand there.
fn code_unit(text: &str) -> Option<Option<u16>> {
    if text.chars().take(4).any(|digit| !digit.is_ascii_hexdigit()) {
        return Some(None);
    }
    text.get(..4).map(|digits| u16::from_str_radix(digits, 16).ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn escapes_are_those_of_json() {
        for (text, decoded) in [
            (r"\u0066", Some(('f', 6))),
            (r"\u00", None),
            (r"\", None),
            (r"\n", Some(('\n', 2))),
            (r"\/", Some(('/', 2))),
            (r"\ud83d\ude00", Some(('😀', 12))),
            (r"\ud83d", None),
            (r"\ud83d\u", None),
            (r"\ud83dx", Some((char::REPLACEMENT_CHARACTER, 6))),
            (r"\ud83d\n", Some((char::REPLACEMENT_CHARACTER, 6))),
            (r"\ud83d\u0041", Some((char::REPLACEMENT_CHARACTER, 6))),
            (r"\ude00", Some((char::REPLACEMENT_CHARACTER, 6))),
            (r"\u00é", Some((char::REPLACEMENT_CHARACTER, 6))),
        ] {
            assert_eq!(decode(text), decoded, "{text}");
            // The standard library of JSON agrees wherever it accepts the text.
            if let (Ok(oracle), Some((character, _))) =
                (serde_json::from_str::<String>(&format!("\"{text}\"")), decoded)
            {
                assert_eq!(oracle, character.to_string(), "{text}");
            }
        }
    }
}
