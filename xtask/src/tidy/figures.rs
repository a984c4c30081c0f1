//! The rule on figures: a table of README.md that names its source holds what the source holds.
//!
//! `<!-- figures from docs/performance.md and docs/cuda.md -->` before a table of README.md says that each of its rows,
//! found by its first cell, has the same cells under the same headings in a table of one of these documents.

use std::collections::BTreeMap;

use super::Finding;
use super::tree::Tree;

const README: &str = "README.md";

/// A table of Markdown: the line of its first row, its headings and its rows.
#[derive(Debug)]
struct Table {
    line: usize,
    headings: Vec<String>,
    rows: Vec<Vec<String>>,
}

pub(super) fn check(tree: &Tree) -> Vec<Finding> {
    let Ok(readme) = tree.text(README) else { return Vec::new() };
    let mut findings = Vec::new();
    if marks(readme).is_empty() {
        findings.push(Finding::new("figures", README, 0, "no table names its source by `<!-- figures from ... -->`"));
    }
    for (number, source) in marks(readme) {
        let Some(table) = tables(readme).into_iter().find(|table| table.line > number) else {
            findings.push(Finding::new("figures", README, number, "no table follows"));
            continue;
        };
        let mut sources = Vec::new();
        for name in source.split(" and ") {
            match tree.text(name) {
                Ok(text) => sources.extend(tables(text)),
                Err(_) => findings.push(Finding::new("figures", README, number, format!("{name} does not exist"))),
            }
        }
        findings.extend(compare(&table, source, &sources));
    }
    findings
}

/// Lines that name the source of the next table, from 1.
fn marks(text: &str) -> Vec<(usize, &str)> {
    let mark = |line: &'_ str| -> Option<(usize, usize)> {
        let start = "<!-- figures from ".len();
        line.starts_with("<!-- figures from ").then(|| (start, line.find(" -->").unwrap_or(line.len())))
    };
    let lines = text.lines().enumerate();
    lines.filter_map(|(index, line)| mark(line).map(|(start, end)| (index + 1, &line[start..end]))).collect()
}

fn tables(text: &str) -> Vec<Table> {
    let mut tables = Vec::<Table>::new();
    let mut is_inside = false;
    for (index, line) in text.lines().enumerate() {
        let Some(row) = line.strip_prefix('|') else {
            is_inside = false;
            continue;
        };
        // Emphasis is no part of a figure.
        let cells: Vec<String> =
            row.trim_end_matches('|').split('|').map(|cell| cell.trim().replace("**", "")).collect();
        match tables.last_mut() {
            Some(table) if is_inside => table.rows.push(cells),
            _ => tables.push(Table { line: index + 1, headings: cells, rows: Vec::new() }),
        }
        is_inside = true;
    }
    tables
}

/// Compares each row of README's table with the row of the same name in the first source table that has one.
fn compare(table: &Table, source: &str, sources: &[Table]) -> Vec<Finding> {
    let mut findings = Vec::new();
    // The first row is the line of dashes.
    for (index, row) in table.rows.iter().enumerate().skip(1) {
        let line = table.line + 1 + index;
        let named = sources.iter().find_map(|source| {
            let found = source.rows.iter().find(|cells| cells.first() == row.first())?;
            Some(source.headings.iter().zip(found).collect::<BTreeMap<_, _>>())
        });
        let Some(named) = named else {
            let name = row.first().map_or("", String::as_str);
            findings.push(Finding::new("figures", README, line, format!("{source} has no row \"{name}\"")));
            continue;
        };
        for (heading, cell) in table.headings.iter().zip(row).skip(1) {
            match named.get(heading) {
                Some(other) if *other == cell => {}
                Some(other) => {
                    let message = format!("\"{heading}\" is {cell:?} here and {other:?} in {source}");
                    findings.push(Finding::new("figures", README, line, message));
                }
                None => {
                    let message = format!("{source} has no column \"{heading}\" for this row");
                    findings.push(Finding::new("figures", README, line, message));
                }
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const SOURCE: &str = "| model | prefill | decode |\n|---|---|---|\n| A | **100** | 10 |\n| B | 200 | 20 |\n";

    fn found(readme: &str) -> Vec<usize> {
        let tree = Tree::from([(README, readme), ("docs/performance.md", SOURCE)]);
        check(&tree).iter().map(|finding| finding.line).collect()
    }

    #[test]
    fn another_figure_is_reported() {
        let mark = "<!-- figures from docs/performance.md -->\n";
        assert!(found(&format!("{mark}| model | decode |\n|---|---|\n| B | 20 |\n")).is_empty());
        assert_eq!(found(&format!("{mark}| model | decode |\n|---|---|\n| B | 21 |\n")), [4]);
        assert_eq!(found(&format!("{mark}| model | speed |\n|---|---|\n| B | 20 |\n")), [4]);
        assert_eq!(found(&format!("{mark}| model | decode |\n|---|---|\n| C | 20 |\n")), [4]);
    }

    #[test]
    fn a_mark_without_table_or_source_is_reported() {
        assert_eq!(found("| model | decode |\n|---|---|\n| B | 20 |\n"), [0]);
        assert_eq!(found("<!-- figures from docs/performance.md -->\n"), [1]);
        assert_eq!(found("<!-- figures from docs/none.md -->\n| a |\n|---|\n| b |\n"), [1, 4]);
    }
}
