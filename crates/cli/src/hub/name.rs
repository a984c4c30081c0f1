//! Names of models on the command line, and checks of paths that come from the network.
//!
//! `pull.rs` and `store.rs` parse MODEL arguments; `listing.rs` checks every path that the hub sends.

use anyhow::{Result, bail};
use std::fmt;

/// Maximum bytes of an owner or repository name; the hub allows 96.
const MAX_NAME_BYTES: usize = 96;
/// Limits for a path in a repository, below those of file systems (255 bytes for a component, with its suffix).
const MAX_COMPONENT_BYTES: usize = 200;
const MAX_PATH_BYTES: usize = 512;
const MAX_DEPTH: usize = 8;

/// A model of the hub as the user writes it: `owner/repo`, `owner/repo:TAG` or `owner/repo/file.gguf`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ModelRef {
    pub(crate) owner: String,
    pub(crate) repo: String,
    pub(crate) pick: Pick,
}

/// Selects a file of a repository.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Pick {
    /// The only model of the repository.
    Any,
    /// The GGUF file with this quantization in its name, such as `Q4_K_M`.
    Tag(String),
    /// The file at this path of the repository.
    File(String),
}

impl ModelRef {
    pub(crate) fn parse(name: &str) -> Result<ModelRef> {
        let (path, tag) = match name.rsplit_once(':') {
            Some((path, tag)) => (path, Some(tag)),
            None => (name, None),
        };
        let mut parts = path.splitn(3, '/');
        let (Some(owner), Some(repo)) = (parts.next(), parts.next()) else {
            bail!(
                "`{name}` is not a model name: expected a short name ({}), owner/repo, owner/repo:TAG or \
                 owner/repo/file.gguf",
                super::known_models::MODELS.iter().map(|model| model.name).collect::<Vec<_>>().join(", ")
            );
        };
        for (what, part) in [("owner", owner), ("repository", repo)] {
            if !is_plain_name(part) {
                bail!(
                    "`{name}` is not a model name: the {what} `{part}` may contain letters, digits, `-`, `_` and `.` \
                     only, must not begin with `.`, and is limited to {MAX_NAME_BYTES} bytes"
                );
            }
        }
        let pick = match (parts.next(), tag) {
            (None, None) => Pick::Any,
            (None, Some("")) => bail!("`{name}` is not a model name: expected a tag after the `:`"),
            (None, Some(tag)) => Pick::Tag(tag.to_owned()),
            (Some(file), None) => {
                check_path(file)?;
                Pick::File(file.to_owned())
            }
            (Some(_), Some(_)) => bail!("`{name}` is not a model name: use either a file or a `:TAG`"),
        };
        Ok(ModelRef { owner: owner.to_owned(), repo: repo.to_owned(), pick })
    }
}

impl fmt::Display for ModelRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.owner, self.repo)?;
        match &self.pick {
            Pick::Any => Ok(()),
            Pick::Tag(tag) => write!(f, ":{tag}"),
            Pick::File(file) => write!(f, "/{file}"),
        }
    }
}

/// Whether a name is one safe path component that needs no escaping in a URL.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && !name.starts_with('.')
        && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
}

/// Rejects a path that could be outside the repository's folder, hidden, or different on another operating system.
pub(crate) fn check_path(path: &str) -> Result<()> {
    let refuse = |why: &str| bail!("unsafe file name {path:?}: {why}");
    if path.len() > MAX_PATH_BYTES {
        return refuse("it is longer than 512 bytes");
    }
    if path.split('/').count() > MAX_DEPTH {
        return refuse("it is nested more than 8 folders deep");
    }
    for component in path.split('/') {
        if component.is_empty() {
            return refuse("it has an empty part, as an absolute path has");
        }
        if component == "." || component == ".." {
            return refuse("it has a `.` or `..` part");
        }
        if component.len() > MAX_COMPONENT_BYTES {
            return refuse("a part of it is longer than 200 bytes");
        }
        // On Windows a colon is a drive or a stream, and a trailing dot or space is removed.
        if component.chars().any(|c| c == '\\' || c == ':' || c.is_control()) || component.ends_with(['.', ' ']) {
            return refuse("it holds a backslash, a colon, a control character, or a part that ends in a dot or space");
        }
    }
    Ok(())
}

/// Checks a path like [`check_path`], and rejects hidden files, because the store uses hidden folders itself.
pub(crate) fn check_target(path: &str) -> Result<()> {
    check_path(path)?;
    if path.split('/').any(|component| component.starts_with('.')) {
        bail!("unsafe file name {path:?}: hidden files are not pulled");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reference(owner: &str, repo: &str, pick: Pick) -> ModelRef {
        ModelRef { owner: owner.into(), repo: repo.into(), pick }
    }

    #[test]
    fn names_have_three_forms() {
        assert_eq!(ModelRef::parse("o/r").unwrap(), reference("o", "r", Pick::Any));
        assert_eq!(ModelRef::parse("o/r:Q4_K_M").unwrap(), reference("o", "r", Pick::Tag("Q4_K_M".into())));
        assert_eq!(ModelRef::parse("o/r/a/b.gguf").unwrap(), reference("o", "r", Pick::File("a/b.gguf".into())));
        for name in ["o/r", "o/r:Q4_K_M", "o/r/a/b.gguf"] {
            assert_eq!(ModelRef::parse(name).unwrap().to_string(), name);
        }
    }

    #[test]
    fn strange_names_are_refused() {
        for name in
            ["", "word", "/", "a/", "/a", "../b", "a/..", "a b/c", "a/b:", "a/b/../c", "a/b/c:Q8_0", "a/b//c", "a?x/b"]
        {
            assert!(ModelRef::parse(name).is_err(), "{name:?} was taken");
        }
    }

    #[test]
    fn paths_stay_inside() {
        for path in ["a.gguf", "sub/a b.gguf", "ü/模型.gguf", ".gitattributes"] {
            assert!(check_path(path).is_ok(), "{path:?} was refused");
        }
        let (long, deep) = ("x".repeat(201), "x/".repeat(8) + "x");
        for path in [
            "",
            "/etc/passwd",
            "../x",
            "a/../x",
            "a/./x",
            "a//x",
            "a/",
            "C:\\x",
            "a\\b",
            "a:b",
            "a\0b",
            "a\nb",
            "a. ",
            &long,
            &deep,
        ] {
            assert!(check_path(path).is_err(), "{path:?} was taken");
        }
        assert!(check_target(".manifests/a.json").is_err());
    }
}
