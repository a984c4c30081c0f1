//! Rules on files and folders: line width, module docs, sizes, and where a module's file lies.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::{Tree, extension};

/// Columns of a line of code, comment or prose, as in `rustfmt.toml`.
const MAX_COLUMNS: usize = 120;
/// Lines of a source file that a reader can still keep in mind.
const MAX_LINES: usize = 500;
/// Source files of one folder.
const MAX_FILES: usize = 15;

/// Documents that have to stay short, with their maximum number of lines.
const SHORT_DOCUMENTS: &[(&str, usize)] =
    &[("ARCHITECTURE.md", 300), ("README.md", 150), ("docs/performance.md", 100), ("docs/cuda.md", 100)];

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.files() {
        if is_fixture(path) {
            continue;
        }
        findings.extend(line_width(path, text));
        findings.extend(module_doc(path, text));
        findings.extend(file_size(path, text));
    }
    findings.extend(folder_size(tree));
    findings.extend(module_files(tree));
    findings
}

/// Whether a file is test data, or a script that makes it.
fn is_fixture(path: &str) -> bool {
    path.contains("/fixtures/")
}

fn is_source(path: &str) -> bool {
    matches!(extension(path), Some("rs" | "cu" | "cuh" | "py" | "cjs" | "mjs" | "ts" | "tsx"))
}

/// `line-width`: no line is wider than [`MAX_COLUMNS`]. Tables, code and links in Markdown cannot be broken, so they
/// may be.
fn line_width(path: &str, text: &str) -> Vec<Finding> {
    let is_markdown = extension(path) == Some("md");
    if !is_source(path) && !is_markdown && !path.starts_with(".ci/") {
        return Vec::new();
    }
    let mut is_code = false;
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        // Formatters break code; a line that they leave too wide holds a string that cannot be broken.
        let is_formatted = matches!(extension(path), Some("rs" | "ts" | "tsx"));
        let holds_string = is_formatted && line.contains(['"', '`']) && !line.trim_start().starts_with("//");
        if holds_string {
            continue;
        }
        if is_markdown {
            is_code ^= line.trim_start().starts_with("```");
            let cannot_break = is_code || line.starts_with(['|', '<', '[', '!']) || !line.trim().contains(' ');
            if cannot_break {
                continue;
            }
        }
        let columns = line.chars().count();
        if columns > MAX_COLUMNS {
            let message = format!("{columns} columns; at most {MAX_COLUMNS}");
            findings.push(Finding::new("line-width", path, index + 1, message));
        }
    }
    findings
}

/// `module-doc`: every Rust file opens with `//!`, or with the README of its crate.
fn module_doc(path: &str, text: &str) -> Option<Finding> {
    let has_doc = text.starts_with("//!") || text.starts_with("#![doc = include_str!");
    let lacks_doc = extension(path) == Some("rs") && !has_doc;
    lacks_doc.then(|| Finding::new("module-doc", path, 1, "the file does not open with `//!` and what it holds"))
}

/// `file-size`: sources have at most [`MAX_LINES`] lines, some documents fewer.
fn file_size(path: &str, text: &str) -> Option<Finding> {
    let document = SHORT_DOCUMENTS.iter().find(|(name, _)| *name == path).map(|(_, most)| *most);
    let most = document.or(is_source(path).then_some(MAX_LINES))?;
    let lines = text.lines().count();
    (lines > most).then(|| Finding::new("file-size", path, 0, format!("{lines} lines; at most {most}, so split it")))
}

/// `folder-size`: a folder has at most [`MAX_FILES`] source files of its own.
fn folder_size(tree: &Tree) -> Vec<Finding> {
    let mut folders = BTreeMap::<&str, usize>::new();
    for (path, _) in tree.files().filter(|(path, _)| is_source(path)) {
        *folders.entry(path.rsplit_once('/').map_or("", |(folder, _)| folder)).or_default() += 1;
    }
    let too_many = folders.into_iter().filter(|(_, files)| *files > MAX_FILES);
    too_many
        .map(|(folder, files)| {
            let message = format!("{files} source files; at most {MAX_FILES}, so make subfolders");
            Finding::new("folder-size", folder, 0, message)
        })
        .collect()
}

/// `module-file`: a module with children is `name/mod.rs`, never `name.rs` beside a folder `name`.
fn module_files(tree: &Tree) -> Vec<Finding> {
    let files = tree.with_extension(&["rs"]);
    let beside_folder = files.filter(|(path, _)| tree.exists(&format!("{}/", path.trim_end_matches(".rs"))));
    beside_folder
        .map(|(path, _)| {
            let folder = path.trim_end_matches(".rs");
            Finding::new("module-file", path, 0, format!("move it to {folder}/mod.rs, beside the modules in it"))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(findings: &[Finding]) -> Vec<(&str, &str, usize)> {
        findings.iter().map(|finding| (finding.rule, finding.path.as_str(), finding.line)).collect()
    }

    #[test]
    fn a_wide_line_is_reported() {
        let wide = format!("//! Head.\n// {}\n", "é".repeat(118));
        assert_eq!(
            rules(&check(&Tree::from([("crates/a/src/lib.rs", wide.as_str())]))),
            [("line-width", "crates/a/src/lib.rs", 2)]
        );
        let fits = format!("//! Head.\n// {}\n", "é".repeat(117));
        assert!(check(&Tree::from([("crates/a/src/lib.rs", fits.as_str())])).is_empty());
    }

    #[test]
    fn a_line_with_a_long_string_may_be_wide() {
        let wide = format!("//! Head.\nconst A: &str = \"{}\";\n", "a".repeat(120));
        assert!(check(&Tree::from([("crates/a/src/lib.rs", wide.as_str())])).is_empty());
    }

    #[test]
    fn in_markdown_prose_is_measured_and_tables_are_not() {
        let wide = "word ".repeat(30);
        let text = format!("| {wide} |\n\n```\n{wide}\n```\n\n{wide}\n");
        assert_eq!(rules(&check(&Tree::from([("docs/a.md", text.as_str())]))), [("line-width", "docs/a.md", 7)]);
    }

    #[test]
    fn a_file_without_module_doc_is_reported() {
        let tree = Tree::from([("crates/a/tests/b.rs", "use std::fmt;\n")]);
        assert_eq!(rules(&check(&tree)), [("module-doc", "crates/a/tests/b.rs", 1)]);
    }

    #[test]
    fn a_long_file_is_reported() {
        let long = "//! Head.\n".repeat(MAX_LINES + 1);
        assert_eq!(
            rules(&check(&Tree::from([("crates/a/src/b.rs", long.as_str())]))),
            [("file-size", "crates/a/src/b.rs", 0)]
        );
        let long = "line\n".repeat(101);
        assert_eq!(rules(&check(&Tree::from([("docs/cuda.md", long.as_str())]))), [("file-size", "docs/cuda.md", 0)]);
    }

    #[test]
    fn a_crowded_folder_is_reported() {
        let paths: Vec<String> = (0..=MAX_FILES).map(|index| format!("crates/a/src/m{index:02}.cu")).collect();
        let files: [(&str, &str); MAX_FILES + 1] = std::array::from_fn(|index| (paths[index].as_str(), ""));
        assert_eq!(rules(&check(&Tree::from(files))), [("folder-size", "crates/a/src", 0)]);
    }

    #[test]
    fn a_module_beside_its_folder_is_reported() {
        let tree = Tree::from([("crates/a/src/b.rs", "//! B."), ("crates/a/src/b/c.rs", "//! C.")]);
        assert_eq!(rules(&check(&tree)), [("module-file", "crates/a/src/b.rs", 0)]);
        let tree = Tree::from([("crates/a/src/b/mod.rs", "//! B."), ("crates/a/src/b/c.rs", "//! C.")]);
        assert!(check(&tree).is_empty());
    }
}
