//! Describes in words what a grammar allows next, for traces.

use pellucid_sampling::TokenMatcher;

use crate::matcher::GrammarMatcher;

/// Maximum characters of forced text that are shown.
const MAX_FORCED: usize = 60;
/// Maximum ranges of characters that are listed.
const MAX_RANGES: usize = 12;

/// Describes the text that must come next, or the characters with which it may begin.
pub(crate) fn describe(matcher: &mut GrammarMatcher) -> String {
    if matcher.is_complete() {
        return "expected the end".into();
    }
    let forced = matcher.inner.compute_ff_bytes();
    if !forced.is_empty() {
        let text = String::from_utf8_lossy(&forced);
        let shown: String = text.chars().take(MAX_FORCED).collect();
        let rest = if shown.len() < text.len() { "…" } else { "" };
        return format!("expected {shown:?}{rest}");
    }
    let Ok(mask) = matcher.inner.compute_mask() else { return "expected nothing: no token fits".into() };
    let trie = matcher.env.tok_trie();
    let mut is_first = [false; 256];
    mask.iter_set_entries(|id| {
        if let Some(&byte) = trie.token(id as u32).first().filter(|_| !trie.eos_tokens().contains(&(id as u32))) {
            is_first[usize::from(byte)] = true;
        }
    });
    let mut parts = ranges(&is_first);
    if matcher.may_end() {
        parts.push("the end".into());
    }
    let num_more = parts.len().saturating_sub(MAX_RANGES);
    parts.truncate(MAX_RANGES);
    let more = if num_more > 0 { format!(" or {num_more} others") } else { String::new() };
    format!("expected {}{more}", parts.join(" or "))
}

/// Returns the first bytes of texts in words: single characters, and ranges of three and more.
fn ranges(is_first: &[bool; 256]) -> Vec<String> {
    let mut parts = Vec::new();
    let mut byte = 0;
    while byte < 0x80 {
        let end = (byte..0x80).find(|&byte| !is_first[byte]).unwrap_or(0x80);
        match end - byte {
            0 => {}
            1 | 2 => parts.extend((byte..end).map(name)),
            _ => parts.push(format!("{} to {}", name(byte), name(end - 1))),
        }
        byte = end.max(byte) + 1;
    }
    if is_first[0x80..].contains(&true) {
        parts.push("a character beyond ASCII".into());
    }
    parts
}

fn name(byte: usize) -> String {
    match byte as u8 {
        b' ' => "a space".into(),
        b'\n' => "a line break".into(),
        byte => format!("{:?}", char::from(byte)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_bytes_are_listed_as_ranges() {
        let mut is_first = [false; 256];
        for byte in b"0123456789-\n ab".iter().chain(&[0xC3]) {
            is_first[usize::from(*byte)] = true;
        }
        let expected = ["a line break", "a space", "'-'", "'0' to '9'", "'a'", "'b'", "a character beyond ASCII"];
        assert_eq!(ranges(&is_first), expected);
    }
}
