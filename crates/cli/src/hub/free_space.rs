//! Free space on the disk of the model store, checked before a download begins.

use super::failure::Failure;
use crate::terminal::format::bytes_text;
use anyhow::anyhow;
use std::path::Path;

/// Rejects a download of `needed` bytes to `target` that the disk has no space for. A disk whose free space is unknown
/// passes: writing to it then fails when it is full.
pub(crate) fn check(target: &Path, needed: u64) -> Result<(), Failure> {
    match free_bytes(target) {
        Some(free) if free < needed => Err(Failure::Local(anyhow!(
            "not enough space on the disk: {} needs {} more, {} are free; free some space and run the command again, \
             or choose another folder with --models-dir",
            target.display(),
            bytes_text(needed),
            bytes_text(free)
        ))),
        _ => Ok(()),
    }
}

/// Returns the bytes that this user may still write to the disk of `target`, which need not exist yet.
#[cfg(unix)]
fn free_bytes(target: &Path) -> Option<u64> {
    let folder = target.ancestors().find(|folder| folder.is_dir())?;
    let about = rustix::fs::statvfs(folder).ok()?;
    about.f_bavail.checked_mul(about.f_frsize)
}

#[cfg(not(unix))]
fn free_bytes(_: &Path) -> Option<u64> {
    None
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    #[test]
    fn a_download_that_cannot_fit_is_rejected() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("not/there/yet.gguf");
        assert!(check(&target, 1).is_ok());
        let error = anyhow::Error::from(check(&target, 1 << 62).unwrap_err()).to_string();
        assert!(error.starts_with("not enough space on the disk: ") && error.contains("--models-dir"), "{error}");
    }
}
