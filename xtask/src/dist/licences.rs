//! Licence texts of the libraries in the program, which their licences require beside a binary.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::Value;

use crate::cargo_metadata;

/// Names of the files in a package's folder that hold its licence begin with one of these, in any case.
const FILE_NAMES: [&str; 5] = ["license", "licence", "copying", "notice", "unlicense"];

/// Returns one text: for each library its name, version and licence, then every licence text once, with the libraries
/// that it belongs to.
pub(super) fn of_libraries(root: &Path) -> Result<String> {
    let metadata = cargo_metadata::read(root)?;
    let linked = linked_packages(&metadata).context("cargo metadata has no package pellucid-cli")?;
    let mut list = String::new();
    let mut texts: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for package in metadata["packages"].as_array().into_iter().flatten() {
        let text = |name: &str| package[name].as_str().unwrap_or_default();
        // Packages of the workspace have no source; their licence is the project's.
        if !linked.contains(text("id")) || package["source"].is_null() {
            continue;
        }
        let name = format!("{} {}", text("name"), text("version"));
        list += &format!("  {name}: {}\n", text("license"));
        let folder = Path::new(text("manifest_path")).parent().context("a manifest has no folder")?;
        for text in licence_texts(folder)? {
            texts.entry(text).or_default().push(name.clone());
        }
    }
    let mut all = format!("The program contains these libraries:\n\n{list}");
    for (text, names) in texts {
        all += &format!("\n{:-<80}\n{}\n\n{}\n", "", names.join(", "), text.trim_end());
    }
    Ok(all)
}

/// Ids of the packages that are linked into the program: its dependencies, without those of tests and build scripts.
fn linked_packages(metadata: &Value) -> Option<BTreeSet<String>> {
    let nodes = metadata["resolve"]["nodes"].as_array()?;
    let nodes: BTreeMap<&str, &Value> = nodes.iter().filter_map(|node| Some((node["id"].as_str()?, node))).collect();
    let program = metadata["packages"].as_array()?.iter().find(|package| package["name"] == "pellucid-cli")?;
    let mut waiting = vec![program["id"].as_str()?];
    let mut seen = BTreeSet::new();
    while let Some(id) = waiting.pop() {
        if !seen.insert(id.to_owned()) {
            continue;
        }
        for dependency in nodes.get(id)?["deps"].as_array()? {
            let kinds = dependency["dep_kinds"].as_array()?;
            if kinds.iter().any(|kind| kind["kind"].is_null()) {
                waiting.push(dependency["pkg"].as_str()?);
            }
        }
    }
    Some(seen)
}

/// Contents of the licence files in `folder`, sorted by name.
fn licence_texts(folder: &Path) -> Result<Vec<String>> {
    let mut paths: Vec<_> = std::fs::read_dir(folder)?.filter_map(|entry| Some(entry.ok()?.path())).collect();
    paths.sort();
    let mut texts = Vec::new();
    for path in paths {
        let name = path.file_name().unwrap_or_default().to_string_lossy().to_lowercase();
        if path.is_file() && FILE_NAMES.iter().any(|start| name.starts_with(start)) {
            texts.push(String::from_utf8_lossy(&std::fs::read(&path)?).into_owned());
        }
    }
    Ok(texts)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn libraries_of_the_program_are_listed_and_those_of_tests_are_not() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let all = of_libraries(root).unwrap();
        assert!(all.contains("  serde_json 1."), "serde_json is linked");
        assert!(!all.contains("  proptest 1."), "proptest is for tests alone");
        assert!(all.contains("Permission is hereby granted"), "no text of the MIT licence");
    }
}
