//! Rules on references: links and paths in documents and comments lead to something that exists.

use super::Finding;
use super::source::passages;
use super::tree::{Tree, extension};

/// Beginnings by which a path in backticks is known as one of the repository.
const ROOTS: &[&str] = &["crates/", "docs/", "tests/", "xtask/", "packaging/", ".ci/"];

/// Characters of a pattern, a placeholder or a command; such text is no path.
const NO_PATH: &[char] = &[' ', '*', '<', '{', '$', '(', '|', '\u{2026}'];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.with_extension(&["md"]) {
        findings.extend(links(tree, path, text));
        for (index, line) in text.lines().enumerate() {
            findings.extend(quoted_paths(tree, path, index + 1, line));
        }
    }
    for (path, text) in tree.with_extension(&["rs", "cu", "py"]) {
        // The rules' own tests name paths that do not exist.
        if path.starts_with("xtask/") {
            continue;
        }
        for passage in passages(path, text) {
            for (number, line) in &passage.lines {
                findings.extend(quoted_paths(tree, path, *number, line));
            }
        }
    }
    findings
}

/// `link`: a relative link of a document names a file, and a fragment one of its headings.
fn links(tree: &Tree, path: &str, text: &str) -> Vec<Finding> {
    let folder = path.rsplit_once('/').map_or("", |(folder, _)| folder);
    let mut findings = Vec::new();
    let mut is_code = false;
    for (index, line) in text.lines().enumerate() {
        is_code ^= line.trim_start().starts_with("```");
        if is_code {
            continue;
        }
        for target in targets(line) {
            let (file, fragment) = target.split_once('#').unwrap_or((target, ""));
            let is_external = target.contains("://") || target.starts_with("mailto:");
            if is_external || file.starts_with('/') {
                continue;
            }
            let found = if file.is_empty() { Some(path.to_owned()) } else { resolve(folder, file) };
            let Some(found) = found.filter(|found| tree.exists(found)) else {
                findings.push(Finding::new("link", path, index + 1, format!("{target} does not exist")));
                continue;
            };
            let has_fragment = fragment.is_empty()
                || extension(&found) != Some("md")
                || tree.text(&found).is_ok_and(|text| headings(text).any(|heading| heading == fragment));
            if !has_fragment {
                findings.push(Finding::new("link", path, index + 1, format!("{found} has no heading #{fragment}")));
            }
        }
    }
    findings
}

/// The targets of `[text](target)` and `src="target"` in a line.
fn targets(line: &str) -> impl Iterator<Item = &str> {
    let links = line.split("](").skip(1).filter_map(|rest| rest.split([')', ' ']).next());
    let images = line.split("src=\"").skip(1).filter_map(|rest| rest.split('"').next());
    links.chain(images)
}

/// Joins a relative path to a folder; `None` where it leaves the repository.
fn resolve(folder: &str, file: &str) -> Option<String> {
    let mut parts: Vec<&str> = folder.split('/').filter(|part| !part.is_empty()).collect();
    for part in file.split('/') {
        match part {
            "" | "." => {}
            ".." => {
                parts.pop()?;
            }
            _ => parts.push(part),
        }
    }
    Some(parts.join("/"))
}

/// The anchors that a forge gives to the headings of a document.
fn headings(text: &str) -> impl Iterator<Item = String> {
    let headings = text.lines().filter_map(|line| line.strip_prefix('#'));
    headings.map(|heading| {
        let lower = heading.trim_start_matches('#').trim().to_lowercase();
        let kept = lower.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
        kept.map(|c| if c == ' ' { '-' } else { c }).collect()
    })
}

/// `path`: a path in backticks exists: one from the root, or, in documents, one that begins with a crate's folder.
fn quoted_paths(tree: &Tree, path: &str, number: usize, line: &str) -> Vec<Finding> {
    let quoted = line.split('`').skip(1).step_by(2);
    let mut findings = Vec::new();
    for text in quoted.filter(|text| !text.contains(NO_PATH)) {
        // `file.rs:75` names a line of it.
        let name = text.split(':').next().unwrap_or(text);
        let from_root = ROOTS.iter().any(|root| name.starts_with(root));
        let exists = if from_root {
            tree.exists(name)
        } else if extension(path) == Some("md") {
            in_crate(tree, name).unwrap_or(true)
        } else {
            true
        };
        if !exists {
            findings.push(Finding::new("path", path, number, format!("`{text}` does not exist")));
        }
    }
    findings
}

/// Whether `engine/handle` or `cpu/src/pool.rs` exists below `crates`; `None` where no crate has the name before the
/// slash.
fn in_crate(tree: &Tree, name: &str) -> Option<bool> {
    let (first, rest) = name.split_once('/')?;
    if !tree.exists(&format!("crates/{first}/Cargo.toml")) {
        return None;
    }
    let rest = rest.trim_end_matches('/');
    let candidates = ["", ".rs"].into_iter().flat_map(|suffix| {
        ["", "src/"].into_iter().map(move |source| format!("crates/{first}/{source}{rest}{suffix}"))
    });
    Some(candidates.into_iter().any(|path| tree.exists(&path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(path: &str, text: &str) -> Vec<(&'static str, usize)> {
        let tree = Tree::from([
            ("crates/engine/Cargo.toml", ""),
            ("crates/engine/src/handle.rs", ""),
            ("docs/b.md", "# A heading, or `two`\n"),
            (path, text),
        ]);
        check(&tree).iter().map(|finding| (finding.rule, finding.line)).collect()
    }

    #[test]
    fn a_dead_link_is_reported() {
        assert_eq!(found("docs/a.md", "[b](b.md)\n[c](c.md)\n"), [("link", 2)]);
        assert_eq!(found("docs/a.md", "![picture](images/none.svg)\n"), [("link", 1)]);
        assert!(
            found("docs/a.md", "[x](https://example.com/none) [y](../crates/engine) [z](#here)\n# Here\n").is_empty()
        );
    }

    #[test]
    fn a_link_to_a_missing_heading_is_reported() {
        assert_eq!(found("docs/a.md", "[b](b.md#no-heading)\n"), [("link", 1)]);
        assert!(found("docs/a.md", "[b](b.md#a-heading-or-two)\n").is_empty());
    }

    #[test]
    fn a_quoted_path_that_does_not_exist_is_reported() {
        assert_eq!(found("docs/a.md", "See `crates/engine/src/handle.rs` and `crates/none`.\n"), [("path", 1)]);
        assert_eq!(found("docs/a.md", "`engine/handle`, `engine/src/handle.rs`, `engine/none`\n"), [("path", 1)]);
        assert_eq!(found("crates/engine/src/x.rs", "// See `docs/none.md`.\n"), [("path", 1)]);
        assert!(found("docs/a.md", "`application/json`, `crates/*/src`, `docs/b.md:1`\n").is_empty());
    }
}
