//! The rule on `SECURITY.md`: each attack that has a defence names a test, and the tests that it names exist.

use anyhow::Result;

use super::Finding;
use super::tree::{Tree, extension};

const SECURITY: &str = "SECURITY.md";

/// The line before the table of attacks.
const MARK: &str = "<!-- attacks -->";

pub(super) fn check(tree: &Tree) -> Result<Vec<Finding>> {
    let text = tree.text(SECURITY)?;
    let mut findings = Vec::new();
    for (index, line) in text.lines().enumerate() {
        findings.extend(named_tests(tree, index + 1, line));
    }
    findings.extend(attacks(tree, text));
    Ok(findings)
}

/// `security-test`: in backticks, `path::name` is a function of that name in the file.
fn named_tests(tree: &Tree, number: usize, line: &str) -> Vec<Finding> {
    let named = quoted(line).filter_map(|text| text.split_once("::"));
    let named = named.filter(|(path, _)| matches!(extension(path), Some("rs" | "py")));
    named
        .filter(|(path, name)| !tree.text(path).is_ok_and(|text| has_function(text, name)))
        .map(|(path, name)| Finding::new("security-test", SECURITY, number, format!("{path} has no test `{name}`")))
        .collect()
}

/// `security-row`: each row after [`MARK`] has three cells, the last of which names a file with tests.
fn attacks(tree: &Tree, text: &str) -> Vec<Finding> {
    let finding = |number: usize, message: &str| Finding::new("security-row", SECURITY, number, message);
    let mut lines = text.lines().enumerate();
    if !lines.any(|(_, line)| line == MARK) {
        return vec![finding(0, "there is no table after `<!-- attacks -->`")];
    }
    let rows = lines.skip_while(|(_, line)| line.is_empty()).take_while(|(_, line)| line.starts_with('|')).skip(2);
    let mut findings = Vec::new();
    for (index, row) in rows {
        // `\|` is a bar within a cell.
        let row = row.replace("\\|", "");
        let cells: Vec<&str> =
            row.trim().trim_start_matches('|').trim_end_matches('|').split('|').map(str::trim).collect();
        match cells[..] {
            [_, _, tests] if quoted(tests).any(|test| is_test(tree, test)) => {}
            [_, _, _] => findings.push(finding(index + 1, "the last cell names no file with tests")),
            _ => findings.push(finding(index + 1, "expected three cells: the attack, the result, the tests")),
        }
    }
    findings
}

/// Whether `path` or `path::name` is a file that contains tests.
fn is_test(tree: &Tree, test: &str) -> bool {
    let path = test.split("::").next().unwrap_or(test);
    tree.text(path).is_ok_and(|text| match extension(path) {
        Some("rs") => text.contains("#[test]") || text.contains("proptest!"),
        Some("py") => text.contains("def test_"),
        _ => false,
    })
}

fn has_function(text: &str, name: &str) -> bool {
    [format!("fn {name}("), format!("def {name}(")].iter().any(|head| text.contains(head.as_str()))
}

fn quoted(line: &str) -> impl Iterator<Item = &str> {
    line.split('`').skip(1).step_by(2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(text: &str) -> Vec<(&'static str, usize)> {
        let tree = Tree::from([
            ("crates/a/tests/b.rs", "#[test]\nfn holds() {}\n"),
            ("crates/a/src/c.rs", "fn holds() {}\n"),
            ("tests/test_d.py", "def test_e():\n    pass\n"),
            (SECURITY, text),
        ]);
        check(&tree).expect("the document").iter().map(|finding| (finding.rule, finding.line)).collect()
    }

    #[test]
    fn a_test_that_does_not_exist_is_reported() {
        let table = format!("{MARK}\n| a | b | c |\n|---|---|---|\n");
        assert!(found(&format!("`crates/a/tests/b.rs::holds`, `tests/test_d.py::test_e`\n{table}")).is_empty());
        assert_eq!(found(&format!("`crates/a/tests/b.rs::fails`\n{table}")), [("security-test", 1)]);
        assert_eq!(found(&format!("`crates/a/tests/none.rs::holds`\n{table}")), [("security-test", 1)]);
    }

    #[test]
    fn a_row_without_a_test_is_reported() {
        let rows = |rows: &str| found(&format!("{MARK}\n| a | b | c |\n|---|---|---|\n{rows}"));
        assert!(rows("| a `x \\| y` | 400 | `crates/a/tests/b.rs` |\n").is_empty());
        assert_eq!(rows("| b | open | |\n"), [("security-row", 4)]);
        assert_eq!(
            rows("| a | 400 | |\n| a | 400 | `crates/a/src/c.rs` |\n"),
            [("security-row", 4), ("security-row", 5)]
        );
        assert_eq!(rows("| a | 400 |\n"), [("security-row", 4)]);
        assert_eq!(found("no table\n"), [("security-row", 0)]);
    }
}
