//! Decides whether a word of the command line is a model, and what a name that is no path and no pulled model means.
//!
//! `mod.rs` calls [`Hub::obtain`] at the end of `resolve`; the flags of a prompt call [`Hub::names_model`].

mod address;
mod local;

use super::name::{ModelRef, Pick};
use super::{Hub, known_models, pull};
use crate::flags::usage_error::{UsageError, bail_usage};
use crate::terminal::spelling;
use anyhow::{Context, Error, Result};
use std::path::{Path, PathBuf};

impl Hub {
    /// Whether a word of the command line is a model, and not the beginning of a prompt: a known, pulled or given
    /// name, a path that exists, a file name that ends in `.gguf`, `OWNER/REPO`, or an address of the hub. The name of
    /// a file or folder without a separator or an extension must also look like a model, because it may be a word.
    pub(crate) fn names_model(&self, word: &str) -> Result<bool> {
        if word.trim().is_empty() {
            return Ok(false);
        }
        let path = Path::new(word);
        if path.exists() && (word.contains(['/', '\\']) || path.extension().is_some() || looks_like_model(path)) {
            return Ok(true);
        }
        if known_models::find(word).is_some() || self.store.named(word)?.is_some() {
            return Ok(true);
        }
        if word.contains(char::is_whitespace) {
            return Ok(false);
        }
        // An address that cannot be used is no prompt either: `resolve` says why.
        let is_address = address::parse(word, &self.endpoint_host()).map_or(true, |address| address.is_some());
        Ok(is_address || is_gguf(word) || pullable(word).is_some() || self.store.find(word)?.is_some())
    }

    /// Returns the name that is closest to a misspelled one, as `pellucid models` lists it.
    pub(crate) fn similar_name(&self, word: &str) -> Option<String> {
        let mut names: Vec<String> = known_models::names().map(str::to_owned).collect();
        names.extend(self.store.names().unwrap_or_default().into_keys());
        names.extend(self.store.manifests().unwrap_or_default().into_iter().map(|manifest| manifest.name));
        let listed = |name: &str| known_models::find(name).map_or(name, |known| known.name).to_owned();
        let default = known_models::DEFAULT.name;
        let begins = |name: &&String| name.to_lowercase().starts_with(&word.to_lowercase());
        // A family, such as llama: the first of its models, the default before all others.
        if word.len() >= MIN_FAMILY_LEN
            && let Some(name) = names.iter().find(begins)
        {
            return Some(listed(name));
        }
        match spelling::closest(word, names.iter().map(String::as_str)) {
            // One slip is enough for another family's name of two, but not for another size of the default's family.
            Some(name) if family(word) != family(default) || spelling::is_slip(word, name) => Some(listed(name)),
            _ if family(word) == family(default) => Some(default.to_owned()),
            _ => None,
        }
    }

    /// Rejects a path that exists and leads to something else than a model, before anything is read for it.
    pub(crate) fn refuse_no_model(word: &str) -> Result<()> {
        let path = Path::new(word);
        // Other files of a folder stand for it, and the error about a pickle says why it is refused.
        const EXTENSIONS: [&str; 10] =
            ["gguf", "safetensors", "json", "jinja", "bin", "pt", "pth", "ckpt", "pkl", "pickle"];
        let extension = path.extension().and_then(|extension| extension.to_str()).unwrap_or_default();
        if !path.exists() || looks_like_model(path) || EXTENSIONS.contains(&extension.to_ascii_lowercase().as_str()) {
            return Ok(());
        }
        if path.is_dir() {
            bail_usage!("the folder `{word}` has no config.json, so it is no model; give the path of a GGUF file in it")
        }
        bail_usage!("the file `{word}` is not a model; --file {word} adds its text to a prompt")
    }

    /// Returns the path of a model that is neither a path nor in the store: pulls it if its name is one of the hub.
    pub(super) fn obtain(&self, name: &str) -> Result<PathBuf> {
        let (name, revision) = match address::parse(name, &self.endpoint_host())? {
            Some(address) => (address.name, address.revision.unwrap_or_else(|| pull::MAIN.to_owned())),
            None => (name.to_owned(), pull::MAIN.to_owned()),
        };
        if let Some(manifest) = self.store.find(&name)?
            && (manifest.revision == revision || revision == pull::MAIN)
            && self.store.damage(&manifest).is_none()
        {
            return Ok(self.store.entry(&manifest));
        }
        if pullable(&name).is_none() {
            return Err(self.unknown(&name));
        }
        let pulled = self.pull(&name, &revision);
        let manifest = pulled
            .with_context(|| format!("there is no file or folder `{name}`, and it could not be pulled from the hub"))?;
        Ok(self.store.entry(&manifest))
    }

    fn unknown(&self, name: &str) -> Error {
        let advice = match self.similar_name(name) {
            Some(similar) => format!("did you mean {similar}?"),
            None => "`pellucid models` shows the names, and OWNER/REPO is a model of the hub".to_owned(),
        };
        let what = if is_gguf(name) || Path::new(name).is_absolute() || name.starts_with('.') {
            format!("there is no file `{name}`")
        } else {
            format!(
                "there is no model `{name}`: no such file or folder, and no pulled model of that name in {}",
                self.store.root().display()
            )
        };
        UsageError::because(format!("{what}; {advice}"))
    }

    fn endpoint_host(&self) -> String {
        let rest = self.remote.endpoint.split_once("://").map_or("", |(_, rest)| rest);
        rest.split(['/', ':']).next().unwrap_or_default().to_owned()
    }
}

/// Returns the model of the hub that a name means. A file name with a folder, such as `models/a.gguf`, is a path.
fn pullable(name: &str) -> Option<ModelRef> {
    let model = ModelRef::parse(name).ok()?;
    match &model.pick {
        Pick::File(file) => is_gguf(file).then_some(model),
        Pick::Any | Pick::Tag(_) => (!is_gguf(&model.repo)).then_some(model),
    }
}

/// Minimum letters of a word that is taken for the beginning of a name.
const MIN_FAMILY_LEN: usize = 3;

/// Returns the letters at the beginning of a name, in lower case: `qwen` of `Qwen2.5-0.5B`.
fn family(name: &str) -> String {
    name.chars().take_while(|c| c.is_alphabetic()).flat_map(char::to_lowercase).collect()
}

fn is_gguf(name: &str) -> bool {
    name.to_ascii_lowercase().ends_with(".gguf")
}

/// Whether a file or folder can be a model by its name or beginning.
fn looks_like_model(path: &Path) -> bool {
    use std::io::Read;
    let has_magic = || {
        let mut magic = [0; 4];
        std::fs::File::open(path).and_then(|mut file| file.read_exact(&mut magic)).is_ok() && magic == *b"GGUF"
    };
    if path.is_dir() { path.join("config.json").exists() } else { has_magic() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_not_taken_for_repositories() {
        for name in ["o/r", "o/r:Q4_K_M", "o/r/a/b.gguf", "bartowski/Qwen2.5-0.5B-Instruct-GGUF"] {
            assert!(pullable(name).is_some(), "{name}");
        }
        for name in ["models/a.gguf", "./a/b", "/a/b", "../b", "a", "a/b/c", "a/b/c.txt", "What is a/b?"] {
            assert!(pullable(name).is_none(), "{name}");
        }
    }
}
