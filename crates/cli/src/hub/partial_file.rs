//! A file being downloaded: `NAME.part`, hashed as it grows, and renamed when it is complete and correct.
//!
//! Pieces of Python packages grow in `NAME.pieces.part` instead, so that neither source discards the bytes of the
//! other. `NAME.part.json` beside it identifies the content. A partial file without it, or of other content, is
//! discarded.
//! `download.rs` fills it from the network and `pip_fallback.rs` from an archive.

use super::failure::{Failure, on_disk};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use std::fs::{self, File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

/// Suffixes of the partial files of a target: of the hub, and of Python packages.
pub(crate) const PART_SUFFIXES: [&str; 2] = [".part", ".pieces.part"];

/// Expected size and hash of the complete file.
#[derive(Debug, Clone)]
pub(crate) struct Expected {
    pub(crate) bytes: u64,
    /// Lower-case hexadecimal; `None` for small files, whose hash the hub does not report.
    pub(crate) sha256: Option<String>,
}

/// The content of `NAME.part.json`.
#[derive(Debug, Serialize, Deserialize)]
struct Note {
    identity: String,
    bytes: u64,
    etag: Option<String>,
}

#[derive(Debug)]
pub(crate) struct PartialFile {
    target: PathBuf,
    path: PathBuf,
    note: PathBuf,
    about: Note,
    file: File,
    len: u64,
    hasher: Sha256,
}

impl PartialFile {
    /// Opens the partial file of `target`. Keeps the bytes of an earlier run if `identity` and `bytes` are equal.
    pub(crate) fn open(target: &Path, identity: &str, bytes: u64) -> Result<PartialFile, Failure> {
        PartialFile::open_as(target, PART_SUFFIXES[0], identity, bytes)
    }

    /// Opens a partial file of `target` for pieces of Python packages, beside the one of the hub.
    pub(crate) fn open_pieces(target: &Path, identity: &str, bytes: u64) -> Result<PartialFile, Failure> {
        PartialFile::open_as(target, PART_SUFFIXES[1], identity, bytes)
    }

    fn open_as(target: &Path, suffix: &str, identity: &str, bytes: u64) -> Result<PartialFile, Failure> {
        let path = with_suffix(target, suffix);
        let note = with_suffix(&path, ".json");
        if let Some(folder) = target.parent() {
            fs::create_dir_all(folder).map_err(on_disk("make the folder", folder))?;
        }
        let left = fs::read(&note).ok().and_then(|text| serde_json::from_slice::<Note>(&text).ok());
        let left = left.filter(|note| note.identity == identity && note.bytes == bytes);
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&path)
            .map_err(on_disk("write", &path))?;
        let about = Note { identity: identity.to_owned(), bytes, etag: None };
        let mut part =
            PartialFile { target: target.to_owned(), path, note, about, file, len: 0, hasher: Sha256::new() };
        let len = part.file.metadata().map_err(on_disk("read", &part.path))?.len();
        match left {
            Some(left) if len <= bytes => {
                part.about = left;
                part.hash_existing(len)?;
            }
            _ => part.restart()?,
        }
        Ok(part)
    }

    /// Stores the server's tag of the following bytes. Returns false if earlier bytes had another tag: the caller must
    /// then start over.
    pub(crate) fn agrees_with(&mut self, etag: Option<&str>) -> Result<bool, Failure> {
        if self.len > 0 && self.about.etag.as_deref() != etag {
            return Ok(false);
        }
        self.about.etag = etag.map(str::to_owned);
        let text = serde_json::to_vec(&self.about).map_err(|error| Failure::Local(error.into()))?;
        fs::write(&self.note, text).map_err(on_disk("write", &self.note))?;
        Ok(true)
    }

    /// Returns the number of bytes so far.
    pub(crate) fn len(&self) -> u64 {
        self.len
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Discards the bytes after the first `len`.
    pub(crate) fn truncate(&mut self, len: u64) -> Result<(), Failure> {
        if len < self.len {
            self.restart_at(len)?;
            self.hash_existing(len)?;
        }
        Ok(())
    }

    /// Discards all bytes.
    pub(crate) fn restart(&mut self) -> Result<(), Failure> {
        self.restart_at(0)
    }

    fn restart_at(&mut self, len: u64) -> Result<(), Failure> {
        self.file.set_len(len).map_err(on_disk("write", &self.path))?;
        self.file.seek(SeekFrom::Start(0)).map_err(on_disk("write", &self.path))?;
        self.len = 0;
        self.hasher = Sha256::new();
        Ok(())
    }

    pub(crate) fn append(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        self.file.write_all(bytes).map_err(on_disk("write", &self.path))?;
        self.hasher.update(bytes);
        self.len += bytes.len() as u64;
        Ok(())
    }

    /// Removes the file and its JSON file.
    pub(crate) fn discard(self) -> Result<(), Failure> {
        let PartialFile { path, note, file, .. } = self;
        drop(file);
        fs::remove_file(&path).map_err(on_disk("remove", &path))?;
        remove_if_exists(&note)
    }

    /// Checks size and hash and renames the file to its target; returns the hash. A wrong file is deleted.
    pub(crate) fn finish(self, expected: &Expected, origin: &str) -> Result<String, Failure> {
        let found = hexadecimal(&self.hasher.clone().finalize());
        if self.len != expected.bytes {
            let len = self.len;
            self.discard()?;
            return Err(Failure::remote(format!("{origin} sent {len} bytes, expected {}", expected.bytes)));
        }
        if let Some(wanted) = &expected.sha256
            && *wanted != found
        {
            self.discard()?;
            return Err(Failure::remote(format!(
                "what {origin} sent is not the file expected and was deleted: sha256 expected {wanted}, found {found}"
            )));
        }
        // The bytes must be on disk before the rename, or a crash could leave an incomplete file.
        self.file.sync_all().map_err(on_disk("write", &self.path))?;
        fs::rename(&self.path, &self.target).map_err(on_disk("rename to", &self.target))?;
        // Bytes of the other source are not needed any more.
        for suffix in PART_SUFFIXES {
            let part = with_suffix(&self.target, suffix);
            remove_if_exists(&with_suffix(&part, ".json"))?;
            remove_if_exists(&part)?;
        }
        Ok(found)
    }

    fn hash_existing(&mut self, len: u64) -> Result<(), Failure> {
        self.file.seek(SeekFrom::Start(0)).map_err(on_disk("read", &self.path))?;
        let mut buffer = vec![0; 1 << 20];
        while self.len < len {
            let count = self.file.read(&mut buffer).map_err(on_disk("read", &self.path))?;
            if count == 0 {
                break;
            }
            self.hasher.update(&buffer[..count]);
            self.len += count as u64;
        }
        Ok(())
    }
}

/// Returns the sha256 of a file.
pub(crate) fn hash_file(path: &Path) -> Result<String, Failure> {
    let mut file = File::open(path).map_err(on_disk("read", path))?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0; 1 << 20];
    loop {
        match file.read(&mut buffer).map_err(on_disk("read", path))? {
            0 => return Ok(hexadecimal(&hasher.finalize())),
            count => hasher.update(&buffer[..count]),
        }
    }
}

/// Appends a suffix to the extension of a path: `a.gguf` and `.part` give `a.gguf.part`.
pub(crate) fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn remove_if_exists(path: &Path) -> Result<(), Failure> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(on_disk("remove", path)(error)),
        _ => Ok(()),
    }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
