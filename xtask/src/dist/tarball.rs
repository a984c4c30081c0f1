//! The tarball: one folder with `bin` and `share`, to be unpacked anywhere.

use std::path::{Path, PathBuf};

use anyhow::Result;

use super::Release;
use super::archive::{Entry, gzip, tar};

impl Release {
    /// Name of the tarball without its ending, and of the folder in it.
    pub(super) fn tarball_name(&self) -> String {
        format!("pellucid-{}-linux-{}", self.version, self.program.architecture.uname)
    }
}

pub(super) fn write(release: &Release, out: &Path) -> Result<Vec<PathBuf>> {
    let name = release.tarball_name();
    let mut entries = release.contents.below(&format!("{name}/"), "LICENSES.txt");
    entries.push(Entry::file(
        format!("{name}/share/pellucid/pellucid.service"),
        0o644,
        release.contents.unit.as_bytes(),
    ));
    let path = out.join(format!("{name}.tar.gz"));
    std::fs::write(&path, gzip(&tar(&entries, release.timestamp)?)?)?;
    Ok(vec![path])
}
