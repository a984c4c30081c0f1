//! Reloads the keys file and the certificate of a running server: at SIGHUP, and when the files change.
//!
//! A file that cannot be read or is refused changes nothing: the server goes on with the old content, and the log names
//! the file and the reason.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, SystemTime};

use anyhow::Result;
use pellucid_server::{SharedTenants, Tls};
use tracing::{error, info, warn};

use super::ServeArgs;
use super::access;
use crate::terminal::interrupt::Interrupt;

/// Interval at which the files are checked. A changed file is read when it has stayed the same for one interval, so
/// that a file that is still being written is not read.
const INTERVAL: Duration = Duration::from_secs(2);

/// Identity of a file's content as far as its metadata tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stamp {
    modified: Option<SystemTime>,
    len: u64,
    inode: u64,
}

/// Files that are reloaded together.
struct Watched {
    paths: Vec<PathBuf>,
    /// Stamps when the files were last read; `None` for a file that could not be found.
    loaded: Vec<Option<Stamp>>,
    /// Stamps at the last check.
    seen: Vec<Option<Stamp>>,
}

impl Watched {
    fn new(paths: Vec<PathBuf>) -> Watched {
        let stamps: Vec<_> = paths.iter().map(|path| stamp(path)).collect();
        Watched { paths, loaded: stamps.clone(), seen: stamps }
    }

    /// Whether the files differ from those that were read last and have not changed since the last check.
    fn has_settled_change(&mut self) -> bool {
        let now: Vec<_> = self.paths.iter().map(|path| stamp(path)).collect();
        let is_settled = now == self.seen;
        self.seen = now;
        is_settled && self.seen != self.loaded
    }

    fn set_loaded(&mut self) {
        self.loaded = self.paths.iter().map(|path| stamp(path)).collect();
        self.seen.clone_from(&self.loaded);
    }
}

fn stamp(path: &Path) -> Option<Stamp> {
    let metadata = std::fs::metadata(path).ok()?;
    #[cfg(unix)]
    let inode = std::os::unix::fs::MetadataExt::ino(&metadata);
    #[cfg(not(unix))]
    let inode = 0;
    Some(Stamp { modified: metadata.modified().ok(), len: metadata.len(), inode })
}

/// Starts the thread that reloads the files of `args`. Does nothing if there are none; SIGHUP then shuts down.
pub(super) fn start(args: &ServeArgs, tenants: &SharedTenants, tls: Option<&Tls>, interrupt: &Interrupt) {
    let mut keys = args.keys_file.clone().map(|path| Watched::new(vec![path]));
    let pair = args.tls_cert.clone().zip(args.tls_key.clone()).zip(tls.cloned());
    let mut certificate = pair.map(|((chain, key), tls)| (Watched::new(vec![chain, key]), tls));
    if keys.is_none() && certificate.is_none() {
        return;
    }
    let (hang_up, hang_ups) = mpsc::channel();
    // The receiver lives as long as the process.
    interrupt.on_hang_up(move || {
        let _ = hang_up.send(());
    });
    let (tenants, api_key) = (tenants.clone(), args.api_key.clone());
    let reload = move || {
        loop {
            let is_asked = match hang_ups.recv_timeout(INTERVAL) {
                Ok(()) => true,
                Err(RecvTimeoutError::Timeout) => false,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            if let Some(files) = &mut keys
                && (files.has_settled_change() || is_asked)
            {
                // Before reading: a change while the file is read causes another reload.
                files.set_loaded();
                report(&files.paths, reload_keys(&files.paths[0], api_key.as_deref(), &tenants));
            }
            if let Some((files, tls)) = &mut certificate
                && (files.has_settled_change() || is_asked)
            {
                files.set_loaded();
                report(&files.paths, access::reload_certificate(&files.paths[0], &files.paths[1], tls));
            }
        }
    };
    if let Err(error) = std::thread::Builder::new().name("reload".into()).spawn(reload) {
        warn!(%error, "keys and certificates will not be reloaded: the thread for it cannot be started");
    }
}

fn report(paths: &[PathBuf], outcome: Result<()>) {
    let files = paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ");
    match outcome {
        Ok(()) => info!(files, "reloaded"),
        // The chain of causes begins with the name of the file.
        Err(reason) => error!(files, "not reloaded, the old content stays in effect: {reason:#}"),
    }
}

fn reload_keys(path: &Path, api_key: Option<&str>, tenants: &SharedTenants) -> Result<()> {
    let reloaded = tenants.replace(access::tenant_configs(Some(path), api_key)?)?;
    for tenant in &reloaded.added {
        info!(tenant, "tenant added");
    }
    for tenant in &reloaded.removed {
        info!(tenant, "tenant removed; its requests in flight go on");
    }
    for tenant in &reloaded.needs_restart {
        warn!(tenant, "the changed kv_tokens of this tenant takes effect at the next start of the server");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_read_when_it_has_settled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        std::fs::write(&path, "one").unwrap();
        let mut files = Watched::new(vec![path.clone()]);
        assert!(!files.has_settled_change(), "nothing has changed");
        std::fs::write(&path, "one and").unwrap();
        assert!(!files.has_settled_change(), "it may still be written");
        std::fs::write(&path, "one and two").unwrap();
        assert!(!files.has_settled_change());
        assert!(files.has_settled_change());
        files.set_loaded();
        assert!(!files.has_settled_change());
        // Replaced by a rename, with the same length.
        let other = folder.path().join("other");
        std::fs::write(&other, "two and one").unwrap();
        std::fs::rename(&other, &path).unwrap();
        assert!(!files.has_settled_change());
        assert!(files.has_settled_change());
        files.set_loaded();
        std::fs::remove_file(&path).unwrap();
        assert!(!files.has_settled_change());
        assert!(files.has_settled_change(), "a removed file is a change, which is then reported as an error");
    }
}
