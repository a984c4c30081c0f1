//! Rules on packages: the licences of dependencies, duplicate versions, also where cargo-deny is not installed, and
//! libraries for tests only.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::Result;
use serde_json::Value;

use super::Finding;
use super::exceptions::Exceptions;
use super::tree::Tree;
use crate::cargo_metadata;

/// Packages that this machine builds, as `cargo metadata` describes them.
#[derive(Debug, Default)]
pub(super) struct Metadata {
    pub(super) packages: Vec<Package>,
}

#[derive(Debug, Clone, Default)]
pub(super) struct Package {
    pub(super) name: String,
    pub(super) version: String,
    pub(super) licence: Option<String>,
    /// Whether it is one of ours.
    pub(super) is_member: bool,
    /// Names of the packages that it needs, those for tests alone left out.
    pub(super) dependencies: BTreeSet<String>,
}

impl Metadata {
    /// Asks Cargo.
    pub(super) fn read(root: &Path) -> Result<Self> {
        Ok(Self::parse(&cargo_metadata::read(root)?))
    }

    fn parse(metadata: &Value) -> Self {
        let members: BTreeSet<&str> = strings(&metadata["workspace_members"]).collect();
        let packages = metadata["packages"].as_array().into_iter().flatten().map(|package| {
            let text = |name: &str| package[name].as_str().map(str::to_owned);
            let dependencies = package["dependencies"].as_array().into_iter().flatten();
            let needed = dependencies.filter(|dependency| dependency["kind"].as_str() != Some("dev"));
            Package {
                name: text("name").unwrap_or_default(),
                version: text("version").unwrap_or_default(),
                licence: text("license"),
                is_member: package["id"].as_str().is_some_and(|id| members.contains(id)),
                dependencies: needed.filter_map(|needed| needed["name"].as_str()).map(str::to_owned).collect(),
            }
        });
        Self { packages: packages.collect() }
    }
}

fn strings(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

pub(super) fn check(tree: &Tree, metadata: &Metadata, exceptions: &Exceptions) -> Result<Vec<Finding>> {
    let mut findings = licences(metadata, &exceptions.licences);
    findings.extend(duplicates(tree.text("Cargo.lock")?));
    findings.extend(test_only(metadata));
    Ok(findings)
}

/// The package of the program.
const PRODUCT: &str = "pellucid-cli";
/// Libraries that the product replaces by its own code. Tests may compare with them; in the product they would bring
/// back their dependencies, a sixth of the time of a clean build.
const TEST_ONLY: [&str; 2] = ["tokenizers", "minijinja"];

/// `test-only`: the program does not depend on a library of `TEST_ONLY`, not even through another package.
fn test_only(metadata: &Metadata) -> Vec<Finding> {
    let by_name: BTreeMap<&str, &Package> = metadata.packages.iter().map(|package| (&*package.name, package)).collect();
    // Each reached package with the one that needs it.
    let mut reached = BTreeMap::from([(PRODUCT, None)]);
    let mut open = vec![PRODUCT];
    while let Some(name) = open.pop() {
        for needed in by_name.get(name).into_iter().flat_map(|package| &package.dependencies) {
            if by_name.contains_key(&**needed) && !reached.contains_key(&**needed) {
                reached.insert(needed, Some(name));
                open.push(needed);
            }
        }
    }
    let mut findings = Vec::new();
    for name in TEST_ONLY.into_iter().filter(|name| reached.contains_key(name)) {
        let path: Vec<&str> = std::iter::successors(Some(name), |name| reached[name]).collect();
        let message = format!("the program must not depend on it; needed by {}", path[1..].join(", needed by "));
        findings.push(Finding::new("test-only", name, 0, message));
    }
    findings
}

/// `licence`: every package can be used under a licence of the list in `xtask/exceptions.toml`.
fn licences(metadata: &Metadata, allowed: &BTreeSet<String>) -> Vec<Finding> {
    let mut findings = Vec::new();
    for package in &metadata.packages {
        let licence = package.licence.as_deref().unwrap_or("none");
        if !is_allowed(licence, allowed) {
            let message = format!("{} has the licence {licence:?}, which is not on the list", package.version);
            findings.push(Finding::new("licence", &package.name, 0, message));
        }
    }
    findings
}

/// Evaluates an expression such as `(MIT OR Apache-2.0) AND Unicode-3.0`; a slash is an old form of `OR`.
fn is_allowed(expression: &str, allowed: &BTreeSet<String>) -> bool {
    let spaced = expression.replace('/', " OR ").replace('(', " ( ").replace(')', " ) ");
    let mut words = spaced.split_whitespace().peekable();
    let holds = any_of(&mut words, allowed);
    holds && words.next().is_none()
}

type Words<'a> = std::iter::Peekable<std::str::SplitWhitespace<'a>>;

fn any_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = all_of(words, allowed);
    while words.next_if_eq(&"OR").is_some() {
        holds |= all_of(words, allowed);
    }
    holds
}

fn all_of(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    let mut holds = one(words, allowed);
    while words.next_if_eq(&"AND").is_some() {
        holds &= one(words, allowed);
    }
    holds
}

fn one(words: &mut Words<'_>, allowed: &BTreeSet<String>) -> bool {
    match words.next() {
        Some("(") => {
            let holds = any_of(words, allowed);
            holds && words.next() == Some(")")
        }
        Some(licence) => match words.next_if_eq(&"WITH") {
            // An exception to a licence is part of its name.
            Some(_) => words.next().is_some_and(|exception| allowed.contains(&format!("{licence} WITH {exception}"))),
            None => allowed.contains(licence),
        },
        None => false,
    }
}

/// `duplicate`: Cargo.lock holds one version of each package.
fn duplicates(lock: &str) -> Vec<Finding> {
    let mut versions = BTreeMap::<&str, Vec<&str>>::new();
    let mut name = "";
    for line in lock.lines() {
        if let Some(value) = line.strip_prefix("name = ") {
            name = value.trim_matches('"');
        } else if let Some(value) = line.strip_prefix("version = ") {
            versions.entry(name).or_default().push(value.trim_matches('"'));
        }
    }
    let several = versions.into_iter().filter(|(name, versions)| versions.len() > 1 && !name.is_empty());
    several
        .map(|(name, versions)| Finding::new("duplicate", name, 0, format!("versions {}", versions.join(", "))))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list() -> BTreeSet<String> {
        ["MIT", "Unicode-3.0", "Apache-2.0 WITH LLVM-exception"].map(str::to_owned).into()
    }

    #[test]
    fn licence_expressions_are_evaluated() {
        for allowed in ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(GPL-3.0 OR MIT) AND Unicode-3.0"] {
            assert!(is_allowed(allowed, &list()), "{allowed}");
        }
        assert!(is_allowed("Apache-2.0 WITH LLVM-exception", &list()));
        for refused in ["GPL-3.0", "none", "MIT AND GPL-3.0", "(MIT OR GPL-3.0) AND GPL-3.0", "Apache-2.0"] {
            assert!(!is_allowed(refused, &list()), "{refused}");
        }
    }

    #[test]
    fn a_package_with_another_licence_is_reported() {
        let package = |name: &str, licence: Option<&str>| Package {
            name: name.to_owned(),
            licence: licence.map(str::to_owned),
            ..Package::default()
        };
        let packages = vec![package("good", Some("MIT")), package("bad", Some("GPL-3.0")), package("silent", None)];
        let findings = licences(&Metadata { packages }, &list());
        let names: Vec<&str> = findings.iter().map(|finding| finding.path.as_str()).collect();
        assert_eq!(names, ["bad", "silent"]);
    }

    #[test]
    fn a_library_for_tests_is_kept_out_of_the_program() {
        let package = |name: &str, dependencies: &[&str]| Package {
            name: name.to_owned(),
            dependencies: dependencies.iter().map(|name| (*name).to_owned()).collect(),
            ..Package::default()
        };
        let with = |dependencies: &[&str]| Metadata {
            packages: vec![
                package("pellucid-cli", &["pellucid-tokenizer", "clap"]),
                package("pellucid-tokenizer", dependencies),
                package("pellucid-testing", &["tokenizers"]),
                package("regex", &["pellucid-cli"]),
                package("tokenizers", &["regex"]),
            ],
        };
        assert!(test_only(&with(&["regex"])).is_empty());
        let findings = test_only(&with(&["regex", "tokenizers"]));
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].path, "tokenizers");
        assert!(findings[0].message.ends_with("needed by pellucid-tokenizer, needed by pellucid-cli"), "{findings:?}");
    }

    #[test]
    fn two_versions_of_a_package_are_reported() {
        let entry = |name: &str, version: &str| format!("name = \"{name}\"\nversion = \"{version}\"\n\n");
        let findings = duplicates(&(entry("a", "1.0.0") + &entry("b", "1.0.0") + &entry("a", "2.0.0")));
        assert_eq!(findings.len(), 1);
        assert_eq!((findings[0].path.as_str(), findings[0].message.as_str()), ("a", "versions 1.0.0, 2.0.0"));
    }
}
