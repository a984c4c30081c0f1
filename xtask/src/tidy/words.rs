//! Rules on words: the avoid-list and the openings of `docs/style.md`, and a `TODO` without a reason.
//!
//! Comments, string literals of the product and prose of documents are read; tests may quote anything in their
//! literals.

use anyhow::{Result, ensure};

use super::Finding;
use super::source::{Kind, Passage, passages};
use super::tree::{Tree, extension};

/// The file that holds the lists; it has to name the words, so it is not checked itself.
const STYLE: &str = "docs/style.md";

/// The lists of `docs/style.md`.
#[derive(Debug)]
struct Lists {
    /// Phrase to avoid and what to write instead.
    avoid: Vec<(String, String)>,
    /// First words that a comment must not begin with, and what to write instead.
    openings: Vec<(String, String)>,
}

impl Lists {
    fn read(style: &str) -> Result<Self> {
        let lists = Self { avoid: marked_table(style, "avoid-list"), openings: marked_table(style, "openings") };
        ensure!(!lists.avoid.is_empty(), "{STYLE} has no table after `<!-- avoid-list -->`");
        ensure!(!lists.openings.is_empty(), "{STYLE} has no table after `<!-- openings -->`");
        Ok(lists)
    }
}

/// Reads the table after `<!-- name -->`: each phrase in backticks of the first column, with the second column.
fn marked_table(style: &str, name: &str) -> Vec<(String, String)> {
    let mark = format!("<!-- {name} -->");
    let lines = style.lines().skip_while(|line| *line != mark).skip(1).skip_while(|line| line.is_empty());
    let mut phrases = Vec::new();
    for line in lines.take_while(|line| line.starts_with('|')).skip(2) {
        let mut cells = line.trim_matches('|').split('|').map(str::trim);
        let (Some(avoid), Some(instead)) = (cells.next(), cells.next()) else { continue };
        // Text between backticks is at odd positions.
        let quoted = avoid.split('`').skip(1).step_by(2);
        phrases.extend(quoted.map(|phrase| (phrase.to_lowercase(), instead.to_owned())));
    }
    phrases
}

pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let lists = Lists::read(tree.text(STYLE)?)?;
    let mut findings = Vec::new();
    for (path, text) in tree.files() {
        if path == STYLE || path.starts_with("xtask/") && extension(path) == Some("toml") || is_data(path) {
            continue;
        }
        let checked = match extension(path) {
            Some("md") => prose(text),
            Some("rs" | "cu" | "py" | "cjs" | "mjs" | "ts" | "tsx") => passages(path, text),
            _ if path.starts_with(".ci/") => passages(path, text),
            _ => continue,
        };
        // Literals of tests are data, and xtask's own samples break the rules on purpose.
        let literals = path.contains("/src/") && !path.starts_with("xtask/") && !path.contains("tests");
        for passage in checked.iter().filter(|passage| literals || passage.kind != Kind::Literal) {
            findings.extend(avoided(&lists, path, passage));
            findings.extend(opening(&lists, path, passage));
            findings.extend(unexplained_todo(path, passage));
        }
    }
    Ok(findings)
}

fn is_data(path: &str) -> bool {
    path.contains("/fixtures/") && !matches!(extension(path), Some("py" | "md"))
}

/// Paragraphs of Markdown, without code blocks and `inline code`.
fn prose(text: &str) -> Vec<Passage> {
    let mut paragraphs = Vec::new();
    let mut lines = Vec::new();
    let mut is_code = false;
    for (index, line) in text.lines().enumerate() {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        if is_code || is_fence || line.trim().is_empty() {
            paragraphs.push(std::mem::take(&mut lines));
        } else {
            lines.push((index + 1, without_code(line)));
        }
    }
    paragraphs.push(lines);
    let filled = paragraphs.into_iter().filter(|lines| !lines.is_empty());
    filled.map(|lines| Passage { kind: Kind::Comment, lines }).collect()
}

/// Replaces text between backticks by one character, so that the words around it do not become adjacent.
fn without_code(line: &str) -> String {
    let outside = line.split('`').enumerate().map(|(index, part)| if index % 2 == 0 { part } else { "\u{2022}" });
    outside.collect()
}

/// `avoid-word`: a phrase of the avoid-list, also across the end of a line.
fn avoided(lists: &Lists, path: &str, passage: &Passage) -> Vec<Finding> {
    let mut joined = String::new();
    let mut starts = Vec::new();
    for (number, line) in &passage.lines {
        starts.push((joined.len(), *number));
        joined.push_str(&without_code(line).to_lowercase());
        joined.push(' ');
    }
    let mut findings = Vec::new();
    for (phrase, instead) in &lists.avoid {
        for (at, _) in joined.match_indices(phrase.as_str()) {
            let is_part = |c: char| c.is_alphanumeric() || c == '_';
            let before = joined[..at].chars().next_back().is_some_and(is_part);
            let after = joined[at + phrase.len()..].chars().next().is_some_and(is_part);
            if !before && !after {
                let line = starts.iter().rev().find(|(start, _)| *start <= at).map_or(0, |(_, number)| *number);
                findings.push(Finding::new("avoid-word", path, line, format!("\"{phrase}\": write {instead}")));
            }
        }
    }
    findings
}

/// `opening`: a comment that begins with a relative clause or refers to the one above it.
fn opening(lists: &Lists, path: &str, passage: &Passage) -> Option<Finding> {
    if passage.kind == Kind::Literal || !matches!(extension(path), Some("rs" | "cu" | "ts" | "tsx")) {
        return None;
    }
    let (line, first) = passage.lines.iter().find(|(_, text)| !text.is_empty())?;
    let lower = first.to_lowercase();
    let (phrase, instead) = lists.openings.iter().find(|(phrase, _)| {
        lower.strip_prefix(phrase.as_str()).is_some_and(|rest| !rest.starts_with(|c: char| c.is_alphanumeric()))
    })?;
    // A question is a heading of its own: "What is stored here?".
    let is_question = first.contains('?');
    (!is_question).then(|| Finding::new("opening", path, *line, format!("begins with \"{phrase}\": {instead}")))
}

/// `todo`: `TODO` gives its reason as `TODO(why it waits): what to do`; `FIXME`, `XXX` and `HACK` are not used.
fn unexplained_todo(path: &str, passage: &Passage) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (number, line) in &passage.lines {
        for word in without_code(line).split(|c: char| !c.is_alphanumeric() && c != '_') {
            let unexplained = match word {
                "TODO" => {
                    !line.split("TODO(").skip(1).any(|rest| rest.split(')').next().is_some_and(|why| why.len() > 3))
                }
                "FIXME" | "XXX" | "HACK" => true,
                _ => false,
            };
            if unexplained && passage.kind != Kind::Literal {
                let message = format!("{word}: write `TODO(why it waits): what to do`, or do it");
                findings.push(Finding::new("todo", path, *number, message));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTS: &str = "\
<!-- avoid-list -->
| avoid | write |
|---|---|
| `so many`, `that many` | the parameter's name |
<!-- openings -->

| opening | write |
|---|---|
| `what` | what the thing is |
";

    fn found(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        let tree = Tree::from([(STYLE, LISTS), (path, text)]);
        let findings = check(&tree).expect("the lists are there");
        findings.iter().map(|finding| (finding.rule, finding.line)).collect()
    }

    #[test]
    fn an_avoided_phrase_is_reported_also_across_lines() {
        assert_eq!(found("crates/a/src/b.rs", "//! Takes\n//! so\n//! many rows.\n"), [("avoid-word", 2)]);
        assert_eq!(found("docs/a.md", "There are\nso many.\n"), [("avoid-word", 2)]);
        assert_eq!(found("crates/a/src/b.rs", "const T: &str = \"that many\";\n"), [("avoid-word", 1)]);
    }

    #[test]
    fn code_tests_and_parts_of_words_are_free() {
        assert!(found("docs/a.md", "`so many`\n\n```\nso many\n```\nalso many\n").is_empty());
        assert!(found("crates/a/tests/b.rs", "const T: &str = \"so many\";\n").is_empty());
        assert!(found("crates/a/src/b.rs", "fn f(so: u8, many: u8) {}\n").is_empty());
    }

    #[test]
    fn a_relative_clause_as_opening_is_reported() {
        assert_eq!(found("crates/a/src/b.rs", "/// What was read.\nfn f() {}\n"), [("opening", 1)]);
        assert!(found("crates/a/src/b.rs", "/// Whatever comes.\n/// Reads what was written.\n").is_empty());
    }

    #[test]
    fn a_todo_without_a_reason_is_reported() {
        assert_eq!(found("crates/a/src/b.rs", "// TODO: faster\n"), [("todo", 1)]);
        assert_eq!(found("crates/a/src/b.rs", "// FIXME\n"), [("todo", 1)]);
        assert!(found("crates/a/src/b.rs", "// TODO(needs AVX10 hardware): use it\n").is_empty());
    }

    #[test]
    fn missing_lists_are_an_error() {
        assert!(check(&Tree::from([(STYLE, "# Style\n")])).is_err());
    }
}
