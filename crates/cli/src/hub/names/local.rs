//! Names that the user has given to model files and folders of this machine.
//!
//! They are kept in one file of the store, `ROOT/names.json`, an object of names and absolute paths.

use crate::flags::usage_error::bail_usage;
use crate::hub::failure::disk_error;
use crate::hub::name::is_plain_name;
use crate::hub::partial_file::with_suffix;
use crate::hub::{Store, known_models};
use anyhow::{Result, bail};
use std::collections::BTreeMap;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// Maximum bytes of the file; a name takes about a hundred.
const MAX_BYTES: u64 = 1 << 20;

impl Store {
    fn names_path(&self) -> PathBuf {
        self.root().join("names.json")
    }

    /// Returns the names and their paths.
    pub(crate) fn names(&self) -> Result<BTreeMap<String, PathBuf>> {
        let path = self.names_path();
        let read = fs::metadata(&path).and_then(|found| match found.len() {
            0..=MAX_BYTES => fs::read(&path),
            _ => Err(ErrorKind::FileTooLarge.into()),
        });
        let text = match read {
            Ok(text) => text,
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(BTreeMap::new()),
            Err(error) => return Err(disk_error("read", &path, &error)),
        };
        match serde_json::from_slice(&text) {
            Ok(names) => Ok(names),
            Err(error) => bail!(
                "the file of names {} is damaged in line {}: expected a JSON object of names and paths; correct or \
                 delete it",
                path.display(),
                error.line()
            ),
        }
    }

    /// Returns the path of a name, ignoring case.
    pub(crate) fn named(&self, name: &str) -> Result<Option<PathBuf>> {
        Ok(self.names()?.into_iter().find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, path)| path))
    }

    /// Gives a file or folder a name.
    pub(crate) fn add_name(&self, name: &str, path: &Path) -> Result<PathBuf> {
        if !is_plain_name(name) {
            bail_usage!(
                "{name:?} cannot be the name of a model: expected letters, digits, `-`, `_` and `.`, and no `.` at the \
                 beginning"
            );
        }
        if known_models::find(name).is_some() {
            bail_usage!("{name} is the name of a known model already (`pellucid models` lists them); choose another");
        }
        let mut names = self.names()?;
        if let Some((known, path)) = names.iter().find(|(known, _)| known.eq_ignore_ascii_case(name)) {
            bail_usage!("{known} names {} already; `pellucid rm {known}` removes that name", path.display());
        }
        let path = path.canonicalize().map_err(|error| disk_error("read", path, &error))?;
        if path.to_str().is_none() {
            bail_usage!("{} cannot be given a name, because its path is not UTF-8", path.display());
        }
        names.insert(name.to_owned(), path.clone());
        self.write_names(&names)?;
        Ok(path)
    }

    /// Removes a name and returns its path; the file stays. Returns `None` if there is no such name.
    pub(crate) fn remove_name(&self, name: &str) -> Result<Option<PathBuf>> {
        let mut names = self.names()?;
        let Some(known) = names.keys().find(|known| known.eq_ignore_ascii_case(name)).cloned() else { return Ok(None) };
        let path = names.remove(&known);
        self.write_names(&names)?;
        Ok(path)
    }

    fn write_names(&self, names: &BTreeMap<String, PathBuf>) -> Result<()> {
        let path = self.names_path();
        let part = with_suffix(&path, ".part");
        fs::create_dir_all(self.root()).map_err(|error| disk_error("make the folder", self.root(), &error))?;
        let text = serde_json::to_string_pretty(names)? + "\n";
        let written = fs::write(&part, text).and_then(|()| fs::rename(&part, &path));
        written.map_err(|error| disk_error("write", &path, &error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_kept_until_it_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::new(folder.path().join("store"));
        let file = folder.path().join("a model.gguf");
        fs::write(&file, "x").unwrap();
        assert_eq!(store.named("mine").unwrap(), None);
        store.add_name("Mine", &file).unwrap();
        assert_eq!(store.named("mine").unwrap(), Some(file.canonicalize().unwrap()));
        assert!(store.add_name("mine", &file).unwrap_err().to_string().contains("Mine names "));
        for name in ["", "a/b", ".x", "a b", "smollm2", "../x"] {
            assert!(store.add_name(name, &file).is_err(), "{name:?} was taken");
        }
        assert!(store.add_name("other", &folder.path().join("none")).is_err());
        assert!(store.remove_name("MINE").unwrap().is_some() && store.remove_name("mine").unwrap().is_none());
        assert!(file.exists());
        fs::write(folder.path().join("store/names.json"), "[").unwrap();
        assert!(store.names().unwrap_err().to_string().contains("damaged in line 1"));
    }
}
