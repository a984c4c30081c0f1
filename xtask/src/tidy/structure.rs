//! Rules on crates: the import table of `ARCHITECTURE.md`, and lints that every library crate states.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;

use super::Finding;
use super::packages::Metadata;
use super::tree::Tree;

const ARCHITECTURE: &str = "ARCHITECTURE.md";

/// Crates that may contain `unsafe`: kernels, calls of the GPU's driver and of MPI, one memory map.
const UNSAFE: &[&str] = &["cpu", "cuda", "mpi", "checkpoint"];

/// Crates that print: programs, and suites that report on a terminal.
const PRINTING: &[&str] = &["cli", "selftest", "testing", "xtask"];

/// Libraries for other programs: every public item is documented.
const DOCUMENTED: &[&str] = &["generate", "pellucid"];

pub(super) fn check(tree: &Tree, metadata: &Metadata) -> Result<Vec<Finding>> {
    let mut findings = imports(tree.text(ARCHITECTURE)?, metadata);
    findings.extend(stated_lints(tree));
    Ok(findings)
}

/// `imports`: the table after `<!-- imports -->` in `ARCHITECTURE.md` equals the dependencies between our crates.
fn imports(architecture: &str, metadata: &Metadata) -> Vec<Finding> {
    let Some(stated) = stated_imports(architecture) else {
        return vec![Finding::new("imports", ARCHITECTURE, 0, "there is no table after `<!-- imports -->`")];
    };
    let members = metadata.packages.iter().filter(|package| package.is_member && package.name != "xtask");
    let actual: BTreeMap<String, BTreeSet<String>> = members
        .map(|package| {
            let ours = package.dependencies.iter().filter(|name| folder(name).is_some());
            (short(&package.name), ours.map(|name| short(name)).collect())
        })
        .collect();
    let mut findings = Vec::new();
    let names: BTreeSet<&String> = stated.keys().chain(actual.keys()).collect();
    for name in names {
        match (stated.get(name), actual.get(name)) {
            (Some(stated), Some(actual)) if stated == actual => {}
            (Some(stated), Some(actual)) => {
                let message = format!("{name} imports {}, the table says {}", listed(actual), listed(stated));
                findings.push(Finding::new("imports", ARCHITECTURE, 0, message));
            }
            (None, _) => findings.push(Finding::new("imports", ARCHITECTURE, 0, format!("the table lacks {name}"))),
            (_, None) => {
                let message = format!("the table names {name}, which is no crate");
                findings.push(Finding::new("imports", ARCHITECTURE, 0, message));
            }
        }
    }
    findings
}

/// The table `| crate | imports |` by crate; `nothing` is an empty set.
fn stated_imports(architecture: &str) -> Option<BTreeMap<String, BTreeSet<String>>> {
    let mut lines = architecture.lines();
    lines.find(|line| *line == "<!-- imports -->")?;
    let rows = lines.skip_while(|line| line.is_empty()).take_while(|line| line.starts_with('|')).skip(2);
    let mut imports = BTreeMap::new();
    for row in rows {
        let cells: Vec<&str> = row.trim_matches('|').split('|').collect();
        let quoted = |cell: &str| cell.split('`').skip(1).step_by(2).map(str::to_owned).collect::<BTreeSet<_>>();
        let imported = cells.get(1).map(|cell| quoted(cell)).unwrap_or_default();
        for name in quoted(cells.first().unwrap_or(&"")) {
            imports.insert(name, imported.clone());
        }
    }
    Some(imports)
}

/// The folder of one of our packages: its name without `pellucid-`, and `pellucid` for the library itself.
fn folder(package: &str) -> Option<&str> {
    if package == "pellucid" { Some(package) } else { package.strip_prefix("pellucid-") }
}

fn short(package: &str) -> String {
    folder(package).unwrap_or(package).to_owned()
}

fn listed(names: &BTreeSet<String>) -> String {
    if names.is_empty() { "nothing".to_owned() } else { names.iter().cloned().collect::<Vec<_>>().join(", ") }
}

/// `lints`: each crate's root file states what it refuses.
fn stated_lints(tree: &Tree) -> Vec<Finding> {
    let mut findings = Vec::new();
    for (path, text) in tree.with_extension(&["rs"]) {
        let name = match path.split('/').collect::<Vec<_>>()[..] {
            ["crates", name, "src", "lib.rs" | "main.rs"] => name,
            ["xtask", "src", "main.rs"] => "xtask",
            _ => continue,
        };
        let mut wanted = Vec::new();
        if !UNSAFE.contains(&name) {
            wanted.push("#![forbid(unsafe_code)]");
        }
        if !PRINTING.contains(&name) {
            wanted.push("#![warn(clippy::print_stdout, clippy::print_stderr)]");
        }
        if DOCUMENTED.contains(&name) {
            wanted.push("#![deny(missing_docs)]");
        }
        for attribute in wanted.into_iter().filter(|attribute| !text.lines().any(|line| line == *attribute)) {
            findings.push(Finding::new("lints", path, 0, format!("the crate does not state {attribute}")));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::super::packages::Package;
    use super::*;

    const TABLE: &str =
        "text\n<!-- imports -->\n\n| crate | imports |\n|---|---|\n| `tensor` | nothing |\n| `cpu` | `tensor` |\n";

    fn package(name: &str, dependencies: &[&str]) -> Package {
        Package {
            name: name.to_owned(),
            is_member: true,
            dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
            ..Package::default()
        }
    }

    #[test]
    fn the_import_table_is_compared_both_ways() {
        let tensor = package("pellucid-tensor", &["libm"]);
        let found = |packages: Vec<Package>| {
            let findings = imports(TABLE, &Metadata { packages });
            findings.into_iter().map(|finding| finding.message).collect::<Vec<_>>()
        };
        assert!(found(vec![tensor.clone(), package("pellucid-cpu", &["pellucid-tensor"])]).is_empty());
        assert_eq!(
            found(vec![tensor.clone(), package("pellucid-cpu", &[])]),
            ["cpu imports nothing, the table says tensor"]
        );
        assert_eq!(found(vec![tensor]), ["the table names cpu, which is no crate"]);
        let added = vec![
            package("pellucid-tensor", &[]),
            package("pellucid-cpu", &["pellucid-tensor"]),
            package("pellucid", &[]),
        ];
        assert_eq!(found(added), ["the table lacks pellucid"]);
        assert!(!imports("no table", &Metadata::default()).is_empty());
    }

    #[test]
    fn a_crate_that_does_not_state_its_lints_is_reported() {
        let print = "#![warn(clippy::print_stdout, clippy::print_stderr)]\n";
        let both = format!("//! A.\n#![forbid(unsafe_code)]\n{print}");
        assert!(stated_lints(&Tree::from([("crates/model/src/lib.rs", both.as_str())])).is_empty());
        assert_eq!(stated_lints(&Tree::from([("crates/model/src/lib.rs", print)])).len(), 1);
        assert_eq!(stated_lints(&Tree::from([("crates/generate/src/lib.rs", both.as_str())])).len(), 1);
        assert!(stated_lints(&Tree::from([("crates/cpu/src/lib.rs", print)])).is_empty());
        assert_eq!(stated_lints(&Tree::from([("crates/cli/src/main.rs", "//! A.\n")])).len(), 1);
    }
}
