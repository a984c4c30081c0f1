//! Failures of a download, remote or local: only after a remote one is the fallback tried.
//!
//! Also words errors of the file system. All modules of `hub` use it.

use anyhow::{Error, anyhow};
use std::io;
use std::path::Path;

#[derive(Debug)]
pub(crate) enum Failure {
    /// The server or the network failed, or the data is wrong.
    Remote(Error),
    /// This machine failed: the disk, a permission. Another source would not help.
    Local(Error),
}

impl Failure {
    pub(crate) fn remote(message: impl Into<String>) -> Failure {
        Failure::Remote(anyhow!(message.into()))
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Error {
        match failure {
            Failure::Remote(error) | Failure::Local(error) => error,
        }
    }
}

/// Converts an error of the file system to a failure that names the path and what to do.
pub(crate) fn on_disk<'a>(doing: &'a str, path: &'a Path) -> impl Fn(io::Error) -> Failure + 'a {
    move |error| Failure::Local(disk_error(doing, path, &error))
}

pub(crate) fn disk_error(doing: &str, path: &Path, error: &io::Error) -> Error {
    let path = path.display();
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => anyhow!(
            "the disk is full: could not {doing} {path}; free some space and run the command again (it resumes), \
             or choose another folder with --models-dir"
        ),
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => anyhow!(
            "no permission to {doing} {path} ({error}); change its permissions or choose another folder with \
             --models-dir"
        ),
        _ => anyhow!("could not {doing} {path}: {error}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_of_the_disk_say_what_to_do() {
        let path = Path::new("models/x.part");
        let say = |kind: io::ErrorKind| disk_error("write", path, &kind.into()).to_string();
        assert!(say(io::ErrorKind::StorageFull).starts_with("the disk is full: could not write models/x.part"));
        assert!(say(io::ErrorKind::PermissionDenied).starts_with("no permission to write models/x.part"));
        assert!(say(io::ErrorKind::ReadOnlyFilesystem).contains("--models-dir"));
    }
}
