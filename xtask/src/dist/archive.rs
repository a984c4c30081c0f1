//! Files of a package in memory, and writing them as a tar archive that is the same to the byte each time.

use std::io::Write;

use anyhow::Result;
use flate2::Compression;
use flate2::write::GzEncoder;

/// One file, folder or link in a package; `path` is relative and has no leading dot.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub(super) path: String,
    pub(super) mode: u32,
    /// User and group.
    pub(super) owner: u64,
    pub(super) kind: Kind,
}

#[derive(Debug, Clone)]
pub(super) enum Kind {
    File(Vec<u8>),
    Folder,
    /// A symbolic link with its target.
    Link(String),
}

impl Entry {
    pub(super) fn file(path: impl Into<String>, mode: u32, bytes: impl Into<Vec<u8>>) -> Self {
        Self { path: path.into(), mode, owner: 0, kind: Kind::File(bytes.into()) }
    }

    pub(super) fn folder(path: impl Into<String>, mode: u32, owner: u64) -> Self {
        Self { path: path.into(), mode, owner, kind: Kind::Folder }
    }

    pub(super) fn link(path: impl Into<String>, target: impl Into<String>) -> Self {
        Self { path: path.into(), mode: 0o777, owner: 0, kind: Kind::Link(target.into()) }
    }

    /// Returns the entry with `prefix` before its path.
    pub(super) fn under(&self, prefix: &str) -> Self {
        Self { path: format!("{prefix}{}", self.path), ..self.clone() }
    }
}

/// Writes `entries` as a tar archive, with their parent folders and sorted by path.
pub(super) fn tar(entries: &[Entry], timestamp: u64) -> Result<Vec<u8>> {
    let mut archive = tar::Builder::new(Vec::new());
    for entry in with_parents(entries) {
        let mut header = tar::Header::new_gnu();
        header.set_mode(entry.mode);
        header.set_mtime(timestamp);
        header.set_uid(entry.owner);
        header.set_gid(entry.owner);
        match &entry.kind {
            Kind::File(bytes) => {
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(bytes.len() as u64);
                archive.append_data(&mut header, &entry.path, bytes.as_slice())?;
            }
            Kind::Folder => {
                header.set_entry_type(tar::EntryType::Directory);
                header.set_size(0);
                archive.append_data(&mut header, format!("{}/", entry.path), std::io::empty())?;
            }
            Kind::Link(target) => {
                header.set_entry_type(tar::EntryType::Symlink);
                header.set_size(0);
                archive.append_link(&mut header, &entry.path, target)?;
            }
        }
    }
    Ok(archive.into_inner()?)
}

/// Compresses; the header carries neither a time nor a name.
pub(super) fn gzip(bytes: &[u8]) -> Result<Vec<u8>> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(bytes)?;
    Ok(encoder.finish()?)
}

/// Adds the folders above each entry that are not entries themselves, and sorts.
fn with_parents(entries: &[Entry]) -> Vec<Entry> {
    let mut all: std::collections::BTreeMap<String, Entry> =
        entries.iter().map(|entry| (entry.path.clone(), entry.clone())).collect();
    for entry in entries {
        for (at, _) in entry.path.match_indices('/') {
            let parent = &entry.path[..at];
            all.entry(parent.to_owned()).or_insert_with(|| Entry::folder(parent, 0o755, 0));
        }
    }
    all.into_values().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn archives_are_sorted_have_parents_and_repeat() {
        let entries = [
            Entry::file("b/c/program", 0o755, *b"binary"),
            Entry::link("a", "b"),
            Entry::folder("b/c/own", 0o700, 65532),
        ];
        let archive = tar(&entries, 1_700_000_000).unwrap();
        assert_eq!(archive, tar(&entries, 1_700_000_000).unwrap());
        let mut reader = tar::Archive::new(archive.as_slice());
        let read: Vec<(String, u32, u64)> = reader
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                let header = entry.header();
                (entry.path().unwrap().display().to_string(), header.mode().unwrap(), header.uid().unwrap())
            })
            .collect();
        let expected = [
            ("a", 0o777, 0),
            ("b/", 0o755, 0),
            ("b/c/", 0o755, 0),
            ("b/c/own/", 0o700, 65532),
            ("b/c/program", 0o755, 0),
        ];
        let read: Vec<(&str, u32, u64)> =
            read.iter().map(|(path, mode, owner)| (path.as_str(), *mode, *owner)).collect();
        assert_eq!(read, expected);
    }

    #[test]
    fn compression_repeats_and_restores() {
        let packed = gzip(b"text text text").unwrap();
        assert_eq!(packed, gzip(b"text text text").unwrap());
        assert_eq!(packed[4..8], [0; 4], "the header carries a time");
        let mut unpacked = String::new();
        std::io::Read::read_to_string(&mut flate2::read::GzDecoder::new(packed.as_slice()), &mut unpacked).unwrap();
        assert_eq!(unpacked, "text text text");
    }
}
