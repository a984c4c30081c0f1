//! A file that exists complete or not at all: it is written under another name and renamed when it is complete.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::flags::usage_error::bail_usage;
use crate::terminal::interrupt::{CleanupGuard, Interrupt};

/// A file being written. It is removed when it is dropped before [`AtomicFile::finish`], and by Ctrl-C.
pub(crate) struct AtomicFile {
    target: PathBuf,
    part: PathBuf,
    _cleanup: CleanupGuard,
}

impl AtomicFile {
    /// Creates the file under its temporary name. Fails if the target exists.
    pub(crate) fn create(target: &Path, interrupt: &Interrupt) -> Result<(AtomicFile, File)> {
        check_target(target)?;
        let mut part = target.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = match File::create_new(&part) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => bail!(
                "{} exists: another run is writing it, or a run that was killed left it behind; if so, remove it",
                part.display()
            ),
            Err(error) => return Err(error).with_context(|| format!("could not create {}", part.display())),
        };
        let cleanup = interrupt.on_exit({
            let part = part.clone();
            move || match fs::remove_file(&part) {
                Ok(()) => "nothing was written".into(),
                Err(error) => format!("{} could not be removed: {error}", part.display()),
            }
        });
        Ok((AtomicFile { target: target.to_owned(), part, _cleanup: cleanup }, file))
    }

    pub(crate) fn part(&self) -> &Path {
        &self.part
    }

    /// Flushes the file to disk and renames it to the target.
    pub(crate) fn finish(self, file: &File) -> Result<()> {
        let done = file.sync_all().and_then(|()| fs::rename(&self.part, &self.target));
        done.with_context(|| format!("could not write {}", self.target.display()))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // After `finish` the temporary file is gone. An error here would hide why the run failed.
        let _ = fs::remove_file(&self.part);
    }
}

/// Fails if the target exists, or its folder does not; called before long work begins.
pub(crate) fn check_target(target: &Path) -> Result<()> {
    if let Some(folder) = target.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        bail_usage!("there is no folder {} for {}", folder.display(), target.display());
    }
    if target.exists() {
        bail_usage!("{} exists already; name another file, or remove it first", target.display());
    }
    Ok(())
}
