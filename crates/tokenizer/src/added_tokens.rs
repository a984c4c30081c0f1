//! Added tokens: control tokens and user-defined tokens, which are cut out of the text before everything else.
//!
//! One mechanism serves all encoders. At each position the longest token wins. The caller decides which token may match
//! where ([`Accept`]); so untrusted text never becomes a control token.

use std::ops::Range;

use crate::unicode_categories::{Categories, LETTER, MARK, NUMBER};

/// An added token with the matching options of tokenizer.json.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct AddedToken {
    pub(crate) id: u32,
    pub(crate) content: String,
    /// Absorbs the white space before it.
    pub(crate) lstrip: bool,
    /// Absorbs the white space after it.
    pub(crate) rstrip: bool,
    /// Matches only if no word character is adjacent.
    pub(crate) single_word: bool,
}

impl AddedToken {
    pub(crate) fn plain(id: u32, content: &str) -> AddedToken {
        AddedToken { id, content: content.to_owned(), lstrip: false, rstrip: false, single_word: false }
    }
}

/// Decides whether a token may be cut out at the bytes `at` of the text.
pub(crate) trait Accept {
    fn accept(&self, id: u32, at: Range<usize>) -> bool;
}

/// Part of a text: a token that was cut out, or the text between two such tokens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Fragment {
    Token(u32),
    Text(Range<usize>),
}

const NO_NODE: u32 = u32::MAX;

#[derive(Default)]
struct Node {
    children: Vec<(u8, u32)>,
    /// The token that ends here, as an index into `tokens`.
    token: Option<u32>,
}

pub(crate) struct AddedTokens {
    tokens: Vec<AddedToken>,
    nodes: Vec<Node>,
    /// The node for each first byte; most positions of a text need only this one lookup.
    first: Box<[u32; 256]>,
}

impl AddedTokens {
    pub(crate) fn new(tokens: Vec<AddedToken>) -> AddedTokens {
        let mut trie = AddedTokens { tokens: Vec::new(), nodes: Vec::new(), first: Box::new([NO_NODE; 256]) };
        for token in tokens {
            trie.insert(token);
        }
        trie
    }

    fn insert(&mut self, token: AddedToken) {
        let mut bytes = token.content.bytes();
        let Some(first) = bytes.next() else { return };
        if self.first[first as usize] == NO_NODE {
            self.first[first as usize] = self.new_node();
        }
        let mut at = self.first[first as usize];
        for byte in bytes {
            at = match self.child(at, byte) {
                Some(child) => child,
                None => {
                    let child = self.new_node();
                    self.nodes[at as usize].children.push((byte, child));
                    child
                }
            };
        }
        let index = self.tokens.len() as u32;
        self.nodes[at as usize].token.get_or_insert(index);
        self.tokens.push(token);
    }

    fn new_node(&mut self) -> u32 {
        self.nodes.push(Node::default());
        self.nodes.len() as u32 - 1
    }

    fn child(&self, node: u32, byte: u8) -> Option<u32> {
        self.nodes[node as usize].children.iter().find(|(b, _)| *b == byte).map(|(_, child)| *child)
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }

    pub(crate) fn tokens(&self) -> &[AddedToken] {
        &self.tokens
    }

    /// Returns the longest token at `at` that `accept` allows, and its end.
    fn longest(&self, text: &str, at: usize, accept: &dyn Accept) -> Option<(&AddedToken, usize)> {
        let bytes = text.as_bytes();
        let mut node = self.first[bytes[at] as usize];
        let mut end = at + 1;
        let mut found = None;
        while node != NO_NODE {
            if let Some(index) = self.nodes[node as usize].token {
                let token = &self.tokens[index as usize];
                if accept.accept(token.id, at..end) {
                    found = Some((token, end));
                }
            }
            node = bytes.get(end).and_then(|&byte| self.child(node, byte)).unwrap_or(NO_NODE);
            end += 1;
        }
        found
    }

    /// Splits the text at added tokens. Fragments of text are never empty.
    pub(crate) fn split(&self, text: &str, accept: &dyn Accept, emit: &mut dyn FnMut(Fragment)) {
        let mut gap = 0;
        let mut at = 0;
        while !self.is_empty() && at < text.len() {
            if self.first[text.as_bytes()[at] as usize] == NO_NODE {
                at += 1;
                continue;
            }
            let Some((token, end)) = self.longest(text, at, accept) else {
                at += 1;
                continue;
            };
            if token.single_word && !is_whole_word(text, at..end) {
                // The reference skips the whole match here.
                at = end;
                continue;
            }
            let start = if token.lstrip { gap + text[gap..at].trim_end().len() } else { at };
            let stop = if token.rstrip { text.len() - text[end..].trim_start().len() } else { end };
            if gap < start {
                emit(Fragment::Text(gap..start));
            }
            emit(Fragment::Token(token.id));
            at = stop;
            gap = stop;
        }
        if gap < text.len() {
            emit(Fragment::Text(gap..text.len()));
        }
    }
}

/// Whether no word character is adjacent to the match.
fn is_whole_word(text: &str, at: Range<usize>) -> bool {
    let categories = Categories::get();
    // `\w` without the join controls, which no tokenizer in use has beside a single-word token.
    let is_word = |c: char| c == '_' || categories.of(c) & (LETTER | MARK | NUMBER) != 0;
    !text[..at.start].chars().next_back().is_some_and(is_word) && !text[at.end..].chars().next().is_some_and(is_word)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Always;
    impl Accept for Always {
        fn accept(&self, _: u32, _: Range<usize>) -> bool {
            true
        }
    }
    struct Not(u32);
    impl Accept for Not {
        fn accept(&self, id: u32, _: Range<usize>) -> bool {
            id != self.0
        }
    }

    fn cut(tokens: &AddedTokens, text: &str, accept: &dyn Accept) -> Vec<Result<String, u32>> {
        let mut out = Vec::new();
        tokens.split(text, accept, &mut |fragment| {
            out.push(match fragment {
                Fragment::Token(id) => Err(id),
                Fragment::Text(range) => Ok(text[range].to_owned()),
            })
        });
        out
    }

    fn text(s: &str) -> Result<String, u32> {
        Ok(s.to_owned())
    }

    #[test]
    fn the_longest_accepted_token_wins() {
        let tokens = AddedTokens::new(vec![AddedToken::plain(1, "<a"), AddedToken::plain(2, "<ab>")]);
        assert_eq!(cut(&tokens, "x<ab>y<a", &Always), [text("x"), Err(2), text("y"), Err(1)]);
        assert_eq!(cut(&tokens, "x<ab>", &Not(2)), [text("x"), Err(1), text("b>")]);
        assert_eq!(cut(&tokens, "", &Always), []);
    }

    #[test]
    fn stripping_and_single_words() {
        let mut left = AddedToken::plain(1, "<l>");
        left.lstrip = true;
        let mut right = AddedToken::plain(2, "<r>");
        right.rstrip = true;
        let mut word = AddedToken::plain(3, "day");
        word.single_word = true;
        let tokens = AddedTokens::new(vec![left, right, word]);
        assert_eq!(cut(&tokens, "a \n<l> b", &Always), [text("a"), Err(1), text(" b")]);
        assert_eq!(cut(&tokens, "a <r>\u{3000} <l>", &Always), [text("a "), Err(2), Err(1)]);
        assert_eq!(cut(&tokens, "day monday day.", &Always), [Err(3), text(" monday "), Err(3), text(".")]);
    }
}
