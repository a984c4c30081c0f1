//! Parses the syntax of a pattern into a tree. Classes and escapes are read by `regex-syntax`, so `\p{L}`, `[a&&b]` and
//! `(?i:...)` mean what they mean in the `regex` crate.
//!
//! Possessive quantifiers and atomic groups of one character become look-ahead: `a++` is `a+(?!a)`. Anchors and word
//! boundaries become look-around as well, so a [`Node`] has few variants. Constructs that no finite automaton can match
//! (back references), and those that no known tokenizer needs (long look-behind, atomic groups in general), are refused
//! with their name and position.

use regex_syntax::hir::{Class, ClassUnicode, ClassUnicodeRange, HirKind};

/// A set of characters: sorted ranges that do not touch.
pub(super) type CharSet = Vec<(char, char)>;

#[derive(Debug, Clone, PartialEq)]
pub(super) enum Node {
    /// One character of a set.
    Set(CharSet),
    Concat(Vec<Node>),
    /// The first alternative that leads to a match wins.
    Alternate(Vec<Node>),
    Repeat {
        node: Box<Node>,
        min: u32,
        max: Option<u32>,
        greedy: bool,
    },
    /// Whether the text from here begins with a match of `node`.
    Ahead {
        node: Box<Node>,
        negative: bool,
    },
    /// Whether the character before is in `set`. At the start of the text there is none.
    Behind {
        set: CharSet,
        negative: bool,
    },
}

/// A construct that is refused, and its position.
#[derive(Debug, PartialEq)]
pub(super) struct Refused {
    pub(super) what: String,
    /// Byte offset in the pattern.
    pub(super) at: usize,
}

/// Maximum depth of groups.
const MAX_DEPTH: usize = 50;
/// Maximum count in `{min,max}`.
const MAX_COUNT: u32 = 10_000;

#[derive(Debug, Clone, Copy, Default)]
struct Flags {
    ignore_case: bool,
    multi_line: bool,
    dot_matches_line_break: bool,
}

struct Parser<'p> {
    pattern: &'p str,
    at: usize,
    depth: usize,
}

pub(super) fn parse(pattern: &str) -> Result<Node, Refused> {
    let mut parser = Parser { pattern, at: 0, depth: 0 };
    let node = parser.alternation(Flags::default())?;
    match parser.peek() {
        None => Ok(node),
        Some(_) => Err(parser.refuse(parser.at, "a `)` without its `(`")),
    }
}

impl Parser<'_> {
    fn rest(&self) -> &str {
        &self.pattern[self.at..]
    }

    fn peek(&self) -> Option<char> {
        self.rest().chars().next()
    }

    fn eat(&mut self, text: &str) -> bool {
        let found = self.rest().starts_with(text);
        if found {
            self.at += text.len();
        }
        found
    }

    fn refuse(&self, at: usize, what: impl Into<String>) -> Refused {
        Refused { what: what.into(), at }
    }

    fn alternation(&mut self, mut flags: Flags) -> Result<Node, Refused> {
        let mut alternatives = Vec::new();
        let mut parts = Vec::new();
        loop {
            match self.peek() {
                None | Some(')') => break,
                Some('|') => {
                    self.at += 1;
                    alternatives.push(concat(std::mem::take(&mut parts)));
                }
                Some(_) => {
                    if let Some(node) = self.term(&mut flags)? {
                        parts.push(node);
                    }
                }
            }
        }
        if alternatives.is_empty() {
            return Ok(concat(parts));
        }
        alternatives.push(concat(parts));
        Ok(Node::Alternate(alternatives))
    }

    /// Parses an item and its quantifiers; `None` for a comment or flags, which change the rest of the group.
    fn term(&mut self, flags: &mut Flags) -> Result<Option<Node>, Refused> {
        let begin = self.at;
        let Some(mut node) = self.item(flags)? else { return Ok(None) };
        while let Some((min, max)) = self.quantifier()? {
            if matches!(node, Node::Ahead { .. } | Node::Behind { .. }) {
                return Err(self.refuse(begin, "a repeated look-around or anchor"));
            }
            if self.eat("+") {
                node = possessive(node, min, max)
                    .ok_or_else(|| self.refuse(begin, "a possessive quantifier of more than one character"))?;
            } else {
                let greedy = !self.eat("?");
                node = Node::Repeat { node: Box::new(node), min, max, greedy };
            }
        }
        Ok(Some(node))
    }

    fn quantifier(&mut self) -> Result<Option<(u32, Option<u32>)>, Refused> {
        let begin = self.at;
        let counts = match self.peek() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') => return self.counts(begin),
            _ => return Ok(None),
        };
        self.at += 1;
        Ok(Some(counts))
    }

    /// Parses `{n}`, `{n,}`, `{,m}` or `{n,m}`; anything else after `{` is text.
    fn counts(&mut self, begin: usize) -> Result<Option<(u32, Option<u32>)>, Refused> {
        let Some(len) = self.rest().find('}') else { return Ok(None) };
        let inside = &self.rest()[1..len];
        let number = |digits: &str| digits.parse::<u32>().ok().filter(|_| digits.bytes().all(|b| b.is_ascii_digit()));
        let counts = match inside.split_once(',') {
            None => number(inside).map(|count| (count, Some(count))),
            Some(("", max)) => number(max).map(|max| (0, Some(max))),
            Some((min, "")) => number(min).map(|min| (min, None)),
            Some((min, max)) => number(min).zip(number(max)).map(|(min, max)| (min, Some(max))),
        };
        let digits = inside.bytes().all(|b| b.is_ascii_digit() || b == b',') && inside.bytes().any(|b| b != b',');
        match counts {
            Some((min, max)) if min.max(max.unwrap_or(0)) <= MAX_COUNT && max.is_none_or(|max| min <= max) => {
                self.at += len + 1;
                Ok(Some((min, max)))
            }
            None if !digits => Ok(None),
            _ => Err(self.refuse(begin, format!("a repetition that is not within 0 and {MAX_COUNT}"))),
        }
    }

    fn item(&mut self, flags: &mut Flags) -> Result<Option<Node>, Refused> {
        let begin = self.at;
        let Some(c) = self.peek() else { return Ok(None) };
        let node = match c {
            '(' => return self.group(flags),
            '^' | '$' => {
                self.at += 1;
                line_end(c == '^', line(*flags))
            }
            '[' => {
                let len = class_len(self.rest()).ok_or_else(|| self.refuse(begin, "a `[` without its `]`"))?;
                self.leaf(len, *flags)?
            }
            '\\' => self.escape(*flags)?,
            '*' | '+' | '?' => return Err(self.refuse(begin, "a quantifier of nothing")),
            '.' => self.leaf(1, *flags)?,
            // `regex-syntax` does not take these as text.
            '{' => {
                self.at += 1;
                Node::Set(vec![('{', '{')])
            }
            _ => self.leaf(c.len_utf8(), *flags)?,
        };
        Ok(Some(node))
    }

    fn group(&mut self, flags: &mut Flags) -> Result<Option<Node>, Refused> {
        let begin = self.at;
        self.at += 1;
        if self.eat("?#") {
            let len = self.rest().find(')').ok_or_else(|| self.refuse(begin, "a comment without its end"))?;
            self.at += len + 1;
            return Ok(None);
        }
        let node = if self.eat("?=") {
            Node::Ahead { node: Box::new(self.inside(begin, *flags)?), negative: false }
        } else if self.eat("?!") {
            Node::Ahead { node: Box::new(self.inside(begin, *flags)?), negative: true }
        } else if self.eat("?<=") {
            self.behind(begin, *flags, false)?
        } else if self.eat("?<!") {
            self.behind(begin, *flags, true)?
        } else if self.eat("?>") {
            let node = self.inside(begin, *flags)?;
            atomic(node).ok_or_else(|| self.refuse(begin, "an atomic group of more than one repeated character"))?
        } else if self.eat("?:") {
            self.inside(begin, *flags)?
        } else if self.eat("?<") || self.eat("?P<") {
            let name = self.rest().find('>').ok_or_else(|| self.refuse(begin, "a group without its name"))?;
            self.at += name + 1;
            self.inside(begin, *flags)?
        } else if self.eat("?") {
            return self.flags(begin, flags);
        } else {
            self.inside(begin, *flags)?
        };
        Ok(Some(node))
    }

    /// Parses the rest of a group, after its opening.
    fn inside(&mut self, begin: usize, flags: Flags) -> Result<Node, Refused> {
        self.depth += 1;
        if self.depth > MAX_DEPTH {
            return Err(self.refuse(begin, format!("groups that are nested deeper than {MAX_DEPTH}")));
        }
        let node = self.alternation(flags)?;
        self.depth -= 1;
        if !self.eat(")") {
            return Err(self.refuse(begin, "a `(` without its `)`"));
        }
        Ok(node)
    }

    fn behind(&mut self, begin: usize, flags: Flags, negative: bool) -> Result<Node, Refused> {
        let node = self.inside(begin, flags)?;
        match as_set(&node) {
            Some(set) => Ok(Node::Behind { set, negative }),
            None => Err(self.refuse(begin, "a look-behind of more than one character")),
        }
    }

    /// Parses `(?i)` or `(?i:...)`.
    fn flags(&mut self, begin: usize, flags: &mut Flags) -> Result<Option<Node>, Refused> {
        let mut new = *flags;
        let mut value = true;
        loop {
            match self.peek() {
                Some('-') if value => value = false,
                Some('i') => new.ignore_case = value,
                Some('m') => new.multi_line = value,
                Some('s') => new.dot_matches_line_break = value,
                Some('u') if value => {}
                Some(')') => {
                    self.at += 1;
                    *flags = new;
                    return Ok(None);
                }
                Some(':') => {
                    self.at += 1;
                    return self.inside(begin, new).map(Some);
                }
                _ => {
                    return Err(self.refuse(begin, "a group of an unsupported kind (conditional, recursion, flag)"));
                }
            }
            self.at += 1;
        }
    }

    fn escape(&mut self, flags: Flags) -> Result<Node, Refused> {
        let begin = self.at;
        let mut chars = self.rest()[1..].chars();
        let Some(c) = chars.next() else { return Err(self.refuse(begin, "a `\\` without a character")) };
        let next = chars.next();
        let simple = |parser: &mut Self, node| {
            parser.at += 2;
            Ok(node)
        };
        match c {
            '0'..='9' | 'k' => Err(self.refuse(begin, "a back reference")),
            'G' | 'K' | 'R' | 'X' | 'Z' | 'g' => Err(self.refuse(begin, format!("the unsupported escape \\{c}"))),
            'A' | 'z' => simple(self, line_end(c == 'A', any())),
            'b' | 'B' => simple(self, word_boundary(c == 'B')),
            'h' => simple(self, Node::Set(vec![('0', '9'), ('A', 'F'), ('a', 'f')])),
            'p' | 'P' | 'x' | 'u' | 'U' if next == Some('{') => {
                let len = self.rest().find('}').ok_or_else(|| self.refuse(begin, "a `{` without its `}`"))?;
                self.leaf(len + 1, flags)
            }
            'p' | 'P' => self.leaf(2 + next.map_or(0, char::len_utf8), flags),
            'x' => self.leaf(4, flags),
            'u' => self.leaf(6, flags),
            'U' => self.leaf(10, flags),
            _ => self.leaf(1 + c.len_utf8(), flags),
        }
    }

    /// Parses the next `len` bytes, which match one character, with `regex-syntax`.
    fn leaf(&mut self, len: usize, flags: Flags) -> Result<Node, Refused> {
        let begin = self.at;
        let text = self.pattern.get(begin..begin + len);
        let set = text.and_then(|text| {
            let mut parser = regex_syntax::ParserBuilder::new();
            parser.case_insensitive(flags.ignore_case).dot_matches_new_line(flags.dot_matches_line_break);
            char_set(parser.build().parse(text).ok()?.kind())
        });
        match set {
            Some(set) => {
                self.at += len;
                Ok(Node::Set(set))
            }
            None => {
                let shown: String = self.rest().chars().take(20).collect();
                Err(self.refuse(begin, format!("the unsupported class or escape {shown:?}")))
            }
        }
    }
}

fn concat(mut parts: Vec<Node>) -> Node {
    if parts.len() == 1 { parts.remove(0) } else { Node::Concat(parts) }
}

fn char_set(kind: &HirKind) -> Option<CharSet> {
    match kind {
        HirKind::Class(Class::Unicode(class)) => Some(class.iter().map(|r| (r.start(), r.end())).collect()),
        HirKind::Class(Class::Bytes(class)) => {
            class.to_unicode_class().map(|class| class.iter().map(|r| (r.start(), r.end())).collect())
        }
        HirKind::Literal(literal) => {
            let mut chars = std::str::from_utf8(&literal.0).ok()?.chars();
            let c = chars.next()?;
            chars.next().is_none().then(|| vec![(c, c)])
        }
        _ => None,
    }
}

/// Returns the bytes of a class in brackets, which may contain others; `None` without an end.
fn class_len(text: &str) -> Option<usize> {
    let bytes = text.as_bytes();
    let (mut at, mut depth) = (0, 0usize);
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 1,
            b'[' if bytes[at..].starts_with(b"[:") && depth > 0 && text[at..].contains(":]") => {
                at += text[at..].find(":]")? + 1;
            }
            b'[' => {
                depth += 1;
                // A `]` at the start of a class is text.
                if bytes.get(at + 1) == Some(&b'^') {
                    at += 1;
                }
                if bytes.get(at + 1) == Some(&b']') {
                    at += 1;
                }
            }
            b']' => {
                depth -= 1;
                if depth == 0 {
                    return Some(at + 1);
                }
            }
            _ => {}
        }
        at += 1;
    }
    None
}

fn any() -> CharSet {
    vec![('\0', char::MAX)]
}

/// Characters after which `^` does not match, and before which `$` does not match.
fn line(flags: Flags) -> CharSet {
    if flags.multi_line { vec![('\0', '\x09'), ('\x0B', char::MAX)] } else { any() }
}

/// Asserts that no character of `set` comes before (`begin`), or after.
fn line_end(begin: bool, set: CharSet) -> Node {
    if begin {
        Node::Behind { set, negative: true }
    } else {
        Node::Ahead { node: Box::new(Node::Set(set)), negative: true }
    }
}

/// `\b` or `\B` as look-around of single characters.
fn word_boundary(negative: bool) -> Node {
    let parsed = regex_syntax::parse(r"\w").ok();
    let word = parsed.and_then(|hir| char_set(hir.kind())).unwrap_or_default();
    let pair = |behind: bool, ahead: bool| {
        Node::Concat(vec![
            Node::Behind { set: word.clone(), negative: !behind },
            Node::Ahead { node: Box::new(Node::Set(word.clone())), negative: !ahead },
        ])
    };
    Node::Alternate(vec![pair(true, negative), pair(false, !negative)])
}

/// Returns the set of a node that matches exactly one character, whatever follows.
fn as_set(node: &Node) -> Option<CharSet> {
    match node {
        Node::Set(set) => Some(set.clone()),
        Node::Alternate(nodes) => {
            let mut union = ClassUnicode::empty();
            for node in nodes {
                for (first, last) in as_set(node)? {
                    union.push(ClassUnicodeRange::new(first, last));
                }
            }
            Some(union.iter().map(|r| (r.start(), r.end())).collect())
        }
        _ => None,
    }
}

/// Returns `node{min,max}+` without backtracking: `a{1,3}+` is `a{3}|a{1,2}(?!a)`.
fn possessive(node: Node, min: u32, max: Option<u32>) -> Option<Node> {
    let set = Node::Set(as_set(&node)?);
    let repeat = |min, max| Node::Repeat { node: Box::new(set.clone()), min, max, greedy: true };
    let stop = Node::Ahead { node: Box::new(set.clone()), negative: true };
    Some(match max {
        None => Node::Concat(vec![repeat(min, None), stop]),
        Some(max) if max == min => repeat(min, Some(max)),
        Some(max) => {
            Node::Alternate(vec![repeat(max, Some(max)), Node::Concat(vec![repeat(min, Some(max - 1)), stop])])
        }
    })
}

/// Returns the body of an atomic group without backtracking.
fn atomic(node: Node) -> Option<Node> {
    match node {
        Node::Repeat { node, min, max, greedy: true } if as_set(&node).is_some() => possessive(*node, min, max),
        node if has_one_way(&node) => Some(node),
        _ => None,
    }
}

/// Whether a node can match a text from a position in one way only: there is nothing to backtrack into.
fn has_one_way(node: &Node) -> bool {
    match node {
        Node::Set(_) | Node::Ahead { .. } | Node::Behind { .. } => true,
        Node::Concat(nodes) => nodes.iter().all(has_one_way),
        Node::Alternate(_) => as_set(node).is_some(),
        Node::Repeat { node, min, max, .. } => Some(*min) == *max && has_one_way(node),
    }
}
