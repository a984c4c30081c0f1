//! The npm package: `npx pellucid` runs the program. It contains no JavaScript; npm links the program itself.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde_json::json;

use super::Release;
use super::archive::{Entry, gzip, tar};

pub(super) fn write(release: &Release, root: &Path, out: &Path) -> Result<Vec<PathBuf>> {
    let manifest = json!({
        "name": "pellucid",
        "version": release.version,
        "description": release.summary,
        "license": "MIT OR Apache-2.0",
        "os": ["linux"],
        "cpu": [release.program.architecture.npm],
        "libc": ["glibc"],
        "bin": { "pellucid": "bin/pellucid" },
    });
    // npm expects everything below a folder of this name.
    let entries = [
        Entry::file("package/package.json", 0o644, serde_json::to_string_pretty(&manifest)? + "\n"),
        Entry::file("package/README.md", 0o644, std::fs::read(root.join("README.md"))?),
        Entry::file("package/LICENSES.txt", 0o644, release.contents.licences.as_bytes()),
        release.contents.program.under("package/"),
    ];
    let path = out.join(format!("pellucid-{}-npm-{}.tgz", release.version, release.program.architecture.uname));
    std::fs::write(&path, gzip(&tar(&entries, release.timestamp)?)?)?;
    Ok(vec![path])
}
