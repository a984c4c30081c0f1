//! Comments and string literals of Rust, CUDA, Python and shell sources, with their lines.
//!
//! This is no parser: it knows just enough of the syntax not to take a string for a comment or the reverse.

use super::tree::extension;

/// A block of comment lines of one kind, or one string literal.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Passage {
    pub(super) kind: Kind,
    /// Line number and text of each line, without comment marks.
    pub(super) lines: Vec<(usize, String)>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// `//!`, at the head of a file.
    ModuleDoc,
    /// `///`
    Doc,
    /// `//`, `/* */` or `#`
    Comment,
    /// Text between quotes.
    Literal,
}

/// Returns the comments and string literals of a source file.
pub(super) fn passages(path: &str, text: &str) -> Vec<Passage> {
    match extension(path) {
        Some("rs" | "cu" | "cjs") => slashes(text, extension(path) == Some("rs")),
        Some("ts" | "tsx" | "mjs") => comment_lines(text),
        _ => hashes(text),
    }
}

/// Comments that begin with `#` and fill their line, as in Python and shell.
fn hashes(text: &str) -> Vec<Passage> {
    let mut collected = Vec::new();
    for (index, line) in text.lines().enumerate() {
        if let Some(comment) = line.trim_start().strip_prefix('#') {
            push(&mut collected, Kind::Comment, index + 1, comment);
        }
    }
    collected
}

/// Comments that fill their line, as in TypeScript. Literals are not collected: text between JSX tags may hold single
/// quotes.
fn comment_lines(text: &str) -> Vec<Passage> {
    let mut collected = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let line = line.trim();
        let comment = ["/**", "//", "* "].into_iter().find_map(|mark| line.strip_prefix(mark));
        if let Some(comment) = comment {
            push(&mut collected, Kind::Comment, index + 1, comment.trim_end_matches("*/"));
        }
    }
    collected
}

/// Adds a line of a comment to the block before it if that ended on the line above and is of the same kind.
fn push(passages: &mut Vec<Passage>, kind: Kind, line: usize, text: &str) {
    let text = text.trim().to_owned();
    if let Some(last) = passages.last_mut() {
        let follows = last.lines.last().is_some_and(|(number, _)| number + 1 == line);
        if kind != Kind::Literal && last.kind == kind && follows {
            last.lines.push((line, text));
            return;
        }
    }
    passages.push(Passage { kind, lines: vec![(line, text)] });
}

/// Comments and literals of a language with `//` and `/* */`. Rust also has raw strings, and lifetimes that look like
/// the beginning of a character.
fn slashes(text: &str, is_rust: bool) -> Vec<Passage> {
    let bytes = text.as_bytes();
    let mut collected = Vec::new();
    let (mut at, mut line) = (0, 1);
    while at < bytes.len() {
        let start = at;
        let rest = &text[at..];
        if rest.starts_with("//") {
            at += rest.find('\n').unwrap_or(rest.len());
            let (kind, marks) = match rest {
                _ if rest.starts_with("//!") => (Kind::ModuleDoc, 3),
                _ if rest.starts_with("///") => (Kind::Doc, 3),
                _ => (Kind::Comment, 2),
            };
            push(&mut collected, kind, line, &text[start + marks..at]);
            continue;
        }
        if rest.starts_with("/*") {
            at += rest.find("*/").map_or(rest.len(), |end| end + 2);
            for (index, comment) in text[start + 2..at].trim_end_matches("*/").lines().enumerate() {
                push(&mut collected, Kind::Comment, line + index, comment.trim_start_matches([' ', '*']));
            }
        } else if bytes[at] == b'"' {
            at = end_of_string(bytes, at + 1);
            push_literal(&mut collected, line, &text[start + 1..at.saturating_sub(1).max(start + 1)]);
        } else if is_rust && let Some((content, length)) = raw_string(rest) {
            at += length;
            push_literal(&mut collected, line, content);
        } else if bytes[at] == b'\'' {
            at += character(rest);
        } else {
            // A name is skipped whole, so that its last letter is not taken for the `r` of a raw string.
            at += rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len()).max(1);
            while !text.is_char_boundary(at) {
                at += 1;
            }
        }
        line += text[start..at].matches('\n').count();
    }
    collected
}

fn push_literal(passages: &mut Vec<Passage>, line: usize, text: &str) {
    let lines = text.lines().enumerate().map(|(index, text)| (line + index, text.trim().to_owned())).collect();
    passages.push(Passage { kind: Kind::Literal, lines });
}

/// Returns the position after the quote that ends the string whose content begins at `at`.
fn end_of_string(bytes: &[u8], mut at: usize) -> usize {
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            b'"' => return at + 1,
            _ => at += 1,
        }
    }
    bytes.len()
}

/// Returns the content and the whole length of the raw string that `rest` begins with, such as `r#"..."#`.
fn raw_string(rest: &str) -> Option<(&str, usize)> {
    let marks = rest.strip_prefix("br").or_else(|| rest.strip_prefix('r'))?;
    let hashes = marks.len() - marks.trim_start_matches('#').len();
    if !marks[hashes..].starts_with('"') {
        return None;
    }
    let start = rest.len() - marks.len() + hashes + 1;
    let end = format!("\"{}", "#".repeat(hashes));
    let length = rest[start..].find(&end).unwrap_or(rest.len() - start);
    Some((&rest[start..start + length], (start + length + end.len()).min(rest.len())))
}

/// Returns the length of the character literal that `rest` begins with, or 1 for a lifetime.
fn character(rest: &str) -> usize {
    let mut characters = rest.char_indices().skip(1);
    match characters.next() {
        Some((_, '\\')) => {
            // The escaped character may itself be a quote.
            characters.next();
            characters.find(|(_, c)| *c == '\'').map_or(1, |(at, _)| at + 1)
        }
        Some(_) => match characters.next() {
            Some((at, '\'')) => at + 1,
            _ => 1,
        },
        None => 1,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn texts(path: &str, text: &str) -> Vec<(Kind, usize, String)> {
        let joined = |passage: &Passage| {
            let lines: Vec<&str> = passage.lines.iter().map(|(_, text)| text.as_str()).collect();
            (passage.kind, passage.lines.first().map_or(0, |line| line.0), lines.join("|"))
        };
        passages(path, text).iter().map(joined).collect()
    }

    #[test]
    fn rust_comments_and_strings_are_told_apart() {
        let source = concat!(
            "//! Head.\n//! More.\nfn f<'a>(x: &'a str) -> char { '\"' }\n",
            "/// Doc.\nlet s = \"a // b \\\" c\"; // after\n",
            "let r = r#\"raw \"quoted\"\"#; /* block\n * two */ let q = '\\'';\n\n// last"
        );
        assert_eq!(
            texts("a.rs", source),
            [
                (Kind::ModuleDoc, 1, "Head.|More.".to_owned()),
                (Kind::Doc, 4, "Doc.".to_owned()),
                (Kind::Literal, 5, "a // b \\\" c".to_owned()),
                (Kind::Comment, 5, "after".to_owned()),
                (Kind::Literal, 6, "raw \"quoted\"".to_owned()),
                (Kind::Comment, 6, "block|two".to_owned()),
                (Kind::Comment, 9, "last".to_owned()),
            ]
        );
    }

    #[test]
    fn shell_comments_are_whole_lines() {
        assert_eq!(texts(".ci/run", "# one\n# two\nx=1 # no\n"), [(Kind::Comment, 1, "one|two".to_owned())]);
    }
}
