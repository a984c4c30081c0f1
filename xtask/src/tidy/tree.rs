//! The files of the repository, as the rules see them.
//!
//! Folders that hold build output or downloads are skipped by name, because a source archive has no git to ask.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use anyhow::{Context, Result};

/// Folders that are never part of the repository.
const SKIPPED: &[&str] = &["target", "__pycache__", "node_modules", "venv", ".git"];

/// Extensions of the files whose text the rules read; of other files they know only the path.
const TEXT: &[&str] = &["rs", "cu", "md", "py", "cjs", "mjs", "ts", "tsx", "css", "toml", "lock"];

/// Every file of the repository by its path relative to the root, with the text of those that a rule may read.
#[derive(Debug, Default)]
pub(super) struct Tree {
    files: BTreeMap<String, String>,
}

impl Tree {
    pub(super) fn read(root: &Path) -> Result<Self> {
        let mut tree = Self::default();
        tree.read_folder(root, "")?;
        Ok(tree)
    }

    fn read_folder(&mut self, folder: &Path, prefix: &str) -> Result<()> {
        for entry in fs::read_dir(folder).with_context(|| format!("cannot list {}", folder.display()))? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{prefix}{name}");
            if entry.file_type()?.is_dir() {
                if !SKIPPED.contains(&name.as_str()) {
                    self.read_folder(&entry.path(), &format!("{path}/"))?;
                }
                continue;
            }
            // Scripts under .ci have no extension.
            let is_text =
                extension(&path).is_some_and(|extension| TEXT.contains(&extension)) || path.starts_with(".ci/");
            let text = if is_text {
                fs::read_to_string(entry.path()).with_context(|| format!("cannot read {path}"))?
            } else {
                String::new()
            };
            self.files.insert(path, text);
        }
        Ok(())
    }

    /// Returns all paths and texts in the order of the paths. The text of a binary file is empty.
    pub(super) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    /// Returns the files whose name ends in one of `extensions`.
    pub(super) fn with_extension(&self, extensions: &'static [&str]) -> impl Iterator<Item = (&str, &str)> {
        self.files().filter(move |(path, _)| extension(path).is_some_and(|extension| extensions.contains(&extension)))
    }

    pub(super) fn text(&self, path: &str) -> Result<&str> {
        self.files.get(path).map(String::as_str).with_context(|| format!("{path} is missing"))
    }

    /// Whether `path` is a file or a folder of the repository. A trailing slash is allowed for folders.
    pub(super) fn exists(&self, path: &str) -> bool {
        let path = path.trim_end_matches('/');
        let folder = format!("{path}/");
        path.is_empty()
            || self.files.contains_key(path)
            || self.files.range(folder.clone()..).next().is_some_and(|(next, _)| next.starts_with(&folder))
    }
}

pub(super) fn extension(path: &str) -> Option<&str> {
    let (_, name) = path.rsplit_once('/').unwrap_or(("", path));
    name.rsplit_once('.').map(|(_, extension)| extension)
}

#[cfg(test)]
impl<const N: usize> From<[(&str, &str); N]> for Tree {
    fn from(files: [(&str, &str); N]) -> Self {
        Self { files: files.into_iter().map(|(path, text)| (path.to_owned(), text.to_owned())).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_and_their_folders_exist() {
        let tree = Tree::from([("docs/a.md", ""), ("docs-old/b.md", "")]);
        assert!(tree.exists("docs") && tree.exists("docs/") && tree.exists("docs/a.md"));
        assert!(!tree.exists("doc") && !tree.exists("docs/b.md"));
    }
}
