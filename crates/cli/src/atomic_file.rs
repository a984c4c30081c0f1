//! A file that is there whole or not at all: it is written beside its place, and takes it when it is done.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::terminal::interrupt::{Interrupt, Leaving};

/// What is written so far. It is removed when it is dropped before it was finished, and by Ctrl-C.
pub(crate) struct AtomicFile {
    target: PathBuf,
    part: PathBuf,
    _leaving: Leaving,
}

impl AtomicFile {
    /// Refuses to begin where there is something already.
    pub(crate) fn create(target: &Path, interrupt: &Interrupt) -> Result<(AtomicFile, File)> {
        refuse_existing(target)?;
        let mut part = target.as_os_str().to_owned();
        part.push(".part");
        let part = PathBuf::from(part);
        let file = match File::create_new(&part) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => bail!(
                "{} is there: another run writes it, or one was killed and left it; then remove it",
                part.display()
            ),
            Err(error) => return Err(error).with_context(|| format!("could not create {}", part.display())),
        };
        let leaving = interrupt.leaving({
            let part = part.clone();
            move || match fs::remove_file(&part) {
                Ok(()) => "nothing was written".into(),
                Err(error) => format!("{} was left: {error}", part.display()),
            }
        });
        Ok((AtomicFile { target: target.to_owned(), part, _leaving: leaving }, file))
    }

    pub(crate) fn part(&self) -> &Path {
        &self.part
    }

    /// Brings everything to disk and puts it in its place.
    pub(crate) fn finish(self, file: &File) -> Result<()> {
        let done = file.sync_all().and_then(|()| fs::rename(&self.part, &self.target));
        done.with_context(|| format!("could not write {}", self.target.display()))
    }
}

impl Drop for AtomicFile {
    fn drop(&mut self) {
        // After `finish` it is gone. What is left of a failed run is of no use; that it cannot be removed would only hide why it failed.
        let _ = fs::remove_file(&self.part);
    }
}

/// Said before long work begins.
pub(crate) fn refuse_existing(target: &Path) -> Result<()> {
    if target.exists() {
        bail!("{} exists already; name another file, or remove it first", target.display());
    }
    Ok(())
}
