//! `xtask tidy`: the rules of `docs/style.md` that a machine can check.
//!
//! Each rule is a pure function from the [`Tree`] (or from what `cargo metadata` prints) to a list of [`Finding`]s, so
//! each has a negative test on a small sample that it must report. `xtask/exceptions.toml` lists the findings that are
//! accepted, with reasons. The test `the_repository_is_tidy` runs every rule over the repository, so
//! `cargo test --workspace` does.

mod exceptions;
mod figures;
mod layout;
mod links;
mod packages;
mod security;
mod source;
mod structure;
mod tree;
mod words;

use std::fmt;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};

use exceptions::Exceptions;
use packages::Metadata;
use tree::Tree;

/// A place that breaks a rule.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Finding {
    /// Relative to the repository's root, with forward slashes.
    path: String,
    /// From 1; 0 for the file or folder as a whole.
    line: usize,
    /// Name of the rule, as `xtask/exceptions.toml` spells it.
    rule: &'static str,
    /// The problem and its remedy.
    message: String,
}

impl Finding {
    fn new(rule: &'static str, path: &str, line: usize, message: impl Into<String>) -> Self {
        Self { path: path.to_owned(), line, rule, message: message.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.line {
            0 => write!(formatter, "{}: {} [{}]", self.path, self.message, self.rule),
            line => write!(formatter, "{}:{line}: {} [{}]", self.path, self.message, self.rule),
        }
    }
}

/// Prints the findings and fails if there are any. `--all` also prints those that `exceptions.toml` accepts.
pub(crate) fn run(arguments: &[String]) -> Result<()> {
    let all = match arguments {
        [] => false,
        [flag] if flag == "--all" => true,
        _ => bail!("usage: xtask tidy [--all]"),
    };
    let findings = check_repository(&repository_root(), all)?;
    for finding in &findings {
        println!("{finding}");
    }
    if !findings.is_empty() {
        bail!("{} findings; docs/style.md explains the rules", findings.len());
    }
    Ok(())
}

fn repository_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Runs every rule; with `all`, accepted findings are included.
fn check_repository(root: &Path, all: bool) -> Result<Vec<Finding>> {
    let tree = Tree::read(root)?;
    let metadata = Metadata::read(root)?;
    let exceptions = Exceptions::parse(tree.text("xtask/exceptions.toml")?)?;
    let mut findings = check(&tree, &metadata, &exceptions)?;
    if !all {
        findings = exceptions.apply(findings);
    }
    findings.sort();
    Ok(findings)
}

fn check(tree: &Tree, metadata: &Metadata, exceptions: &Exceptions) -> Result<Vec<Finding>> {
    let mut findings = layout::check(tree);
    findings.extend(words::check(tree)?);
    findings.extend(links::check(tree));
    findings.extend(figures::check(tree));
    findings.extend(structure::check(tree, metadata)?);
    findings.extend(packages::check(tree, metadata, exceptions)?);
    findings.extend(security::check(tree)?);
    Ok(findings)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_repository_is_tidy() {
        let findings = check_repository(&repository_root(), false).expect("the rules can be run");
        let lines: Vec<String> = findings.iter().map(Finding::to_string).collect();
        assert!(findings.is_empty(), "{} findings:\n{}\n", lines.len(), lines.join("\n"));
    }
}
