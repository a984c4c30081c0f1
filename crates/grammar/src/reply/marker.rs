//! Markers in the bytes of a reply, and the tokens that spell them.

use llguidance::toktrie::TokTrie;
use pellucid_tokenizer::{TokenKind, Tokenizer};

/// A token that completes a marker and goes on behind it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Overshoot {
    pub(crate) token: u32,
    /// Bytes of the marker that precede the token; `None` if the token holds the whole marker behind other text.
    pub(crate) before: Option<usize>,
    /// Bytes behind the marker.
    pub(crate) rest: Vec<u8>,
}

/// Returns the bytes that a token adds to the text in which markers are found, and whether it is a control token.
pub(crate) fn text_of(tokenizer: &Tokenizer, id: u32) -> (Vec<u8>, bool) {
    match tokenizer.token(id) {
        Some(token) if token.kind == TokenKind::Control => (token.piece.as_bytes().to_vec(), true),
        Some(token) => (token.bytes.into_owned(), false),
        None => (Vec::new(), false),
    }
}

/// Returns the position of the first marker in a text and its index: the leftmost, and of those the longest.
pub(crate) fn find(text: &[u8], markers: &[String]) -> Option<(usize, usize)> {
    let positions = markers.iter().enumerate().filter_map(|(index, marker)| {
        let at = text.windows(marker.len().max(1)).position(|window| window == marker.as_bytes())?;
        Some((at, std::cmp::Reverse(marker.len()), index))
    });
    positions.min().map(|(at, _, index)| (at, index))
}

/// Returns the length of the longest end of a text with which a marker begins, but not all of it.
pub(crate) fn partial(text: &[u8], markers: &[String]) -> usize {
    let longest = |marker: &String| {
        let marker = marker.as_bytes();
        let most = text.len().min(marker.len().saturating_sub(1));
        (1..=most).rev().find(|&len| text.ends_with(&marker[..len])).unwrap_or(0)
    };
    markers.iter().map(longest).max().unwrap_or(0)
}

/// Returns the text without white space at its beginning.
pub(crate) fn trimmed(text: &[u8]) -> &[u8] {
    let start = text.iter().position(|byte| !byte.is_ascii_whitespace()).unwrap_or(text.len());
    &text[start..]
}

/// Returns every token that completes the marker and goes on behind it.
pub(crate) fn overshoots(trie: &TokTrie, marker: &str) -> Vec<Overshoot> {
    let marker = marker.as_bytes();
    let mut found = Vec::new();
    for token in 0..trie.vocab_size() as u32 {
        let bytes = trie.token(token);
        for before in 0..marker.len() {
            if let Some(rest) = bytes.strip_prefix(&marker[before..]).filter(|rest| !rest.is_empty()) {
                found.push(Overshoot { token, before: Some(before), rest: rest.to_vec() });
            }
        }
        if bytes.len() > marker.len() + 1
            && let Some(at) = bytes[1..].windows(marker.len()).position(|window| window == marker)
        {
            let rest = bytes[1 + at + marker.len()..].to_vec();
            if !rest.is_empty() {
                found.push(Overshoot { token, before: None, rest });
            }
        }
    }
    found
}

/// Returns tokens that spell a text, those that mark structure where there are some.
pub(crate) fn spell(tokenizer: &Tokenizer, trie: &TokTrie, text: &str) -> Vec<u32> {
    let (mut ids, mut plain, mut rest) = (Vec::new(), String::new(), text);
    let flush = |plain: &mut String, ids: &mut Vec<u32>| {
        let text = std::mem::take(plain);
        let usual = tokenizer.encode_within(&text);
        let bytes: Vec<u8> = usual.iter().flat_map(|&id| trie.token(id).to_vec()).collect();
        ids.extend(if bytes == text.as_bytes() { usual } else { trie.greedy_tokenize(text.as_bytes()) });
    };
    while let Some(first) = rest.chars().next() {
        match super::calls::structure_token(tokenizer, rest) {
            Some((piece, id)) => {
                flush(&mut plain, &mut ids);
                ids.push(id);
                rest = &rest[piece.len()..];
            }
            None => {
                plain.push(first);
                rest = &rest[first.len_utf8()..];
            }
        }
    }
    flush(&mut plain, &mut ids);
    ids
}

/// Returns the tokens with which a text may go on to be `rest`.
pub(crate) fn next_tokens(tokenizer: &Tokenizer, trie: &TokTrie, rest: &[u8]) -> Vec<u32> {
    let mut ids = Vec::new();
    for end in 1..=rest.len() {
        ids.extend(trie.token_id(&rest[..end]));
        let piece = std::str::from_utf8(&rest[..end]).ok();
        ids.extend(piece.and_then(|piece| super::calls::structure_token(tokenizer, piece)).and_then(|(piece, id)| {
            // Only a token of exactly this text, which is no end of the reply.
            (piece.len() == end && !tokenizer.end_ids().contains(&id)).then_some(id)
        }));
    }
    ids
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_are_found_leftmost_and_longest() {
        let markers = ["<a>".to_owned(), "<a>b".to_owned(), "c".to_owned()];
        assert_eq!(find(b"x<a>bc", &markers), Some((1, 1)));
        assert_eq!(find(b"xc<a>", &markers), Some((1, 2)));
        assert_eq!(find(b"<a", &markers), None);
        assert_eq!((partial(b"x<a", &markers), partial(b"<<", &markers), partial(b"x", &markers)), (2, 1, 0));
        assert_eq!(trimmed(b" \n x "), b"x ");
    }
}
