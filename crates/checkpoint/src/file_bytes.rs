//! Reads the files of a model: mapped, or into memory with their SHA-256.
//!
//! A file in memory cannot change any more, so a hash that was checked stays true, and a file that is truncated or
//! replaced later does no harm. It costs memory of the size of the files, and the time to read them.

use std::collections::HashMap;
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use pellucid_tensor::{BytesOwner, SharedBytes};
use sha2::{Digest, Sha256};

use crate::error::Error;
use crate::mmap;

/// Source of the bytes of weights while a model is open.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum FileAccess {
    /// Files are mapped and read in place. They must not change while the model is open.
    #[default]
    Mapped,
    /// Files are read into memory when the model is opened, and their SHA-256 is computed.
    InMemory {
        /// Expected SHA-256 in lower-case hexadecimal digits, by canonical path. Opening fails if a listed file
        /// (weights or JSON) has another hash.
        sha256: HashMap<PathBuf, String>,
    },
}

/// SHA-256 of a weight file that was read into memory.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct FileHash {
    pub path: PathBuf,
    /// Lower-case hexadecimal digits.
    pub sha256: String,
    /// Whether an expected hash was given, and is this one.
    pub verified: bool,
}

/// Reads files in one of the two ways, and collects the hashes of weight files.
#[derive(Debug)]
pub(crate) struct FileReader<'a> {
    access: &'a FileAccess,
    pub(crate) hashes: Vec<FileHash>,
}

/// Bytes between two updates of a hash: the part stays in the processor's cache.
const PART_BYTES: usize = 1 << 18;
/// Alignment of a file in memory. Kernels read some tensors in place, with aligned loads.
const ALIGNMENT: usize = 64;

/// A file in memory, aligned like a mapped one.
struct AlignedBytes {
    buffer: Vec<u8>,
    start: usize,
}

impl AsRef<[u8]> for AlignedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.buffer[self.start..]
    }
}

impl BytesOwner for AlignedBytes {}

impl<'a> FileReader<'a> {
    pub(crate) fn new(access: &'a FileAccess) -> FileReader<'a> {
        FileReader { access, hashes: Vec::new() }
    }

    /// Returns the bytes of a weight file.
    pub(crate) fn read(&mut self, path: &Path) -> Result<SharedBytes, Error> {
        match self.access {
            FileAccess::Mapped => mmap::map(path),
            FileAccess::InMemory { .. } => {
                let (file, len) = open_regular(path)?;
                let (bytes, sha256) = read_whole(path, file, len)?;
                let verified = self.compare(path, &sha256)?;
                self.hashes.push(FileHash { path: path.to_path_buf(), sha256, verified });
                Ok(bytes)
            }
        }
    }

    /// Checks the bytes of a JSON or text file, which is never mapped, if its hash is known.
    pub(crate) fn check(&self, path: &Path, bytes: &[u8]) -> Result<(), Error> {
        if self.expected(path).is_some() {
            self.compare(path, &hexadecimal(&Sha256::digest(bytes)))?;
        }
        Ok(())
    }

    fn expected(&self, path: &Path) -> Option<&'a String> {
        match self.access {
            FileAccess::Mapped => None,
            FileAccess::InMemory { sha256 } => sha256.get(&path.canonicalize().ok()?),
        }
    }

    /// Returns whether the hash of a file was known; fails if it is another one.
    fn compare(&self, path: &Path, found: &str) -> Result<bool, Error> {
        match self.expected(path) {
            Some(expected) if expected != found => {
                Err(Error::Hash { path: path.to_path_buf(), expected: expected.clone(), found: found.to_owned() })
            }
            expected => Ok(expected.is_some()),
        }
    }
}

/// Opens a regular file and returns its length.
pub(crate) fn open_regular(path: &Path) -> Result<(File, u64), Error> {
    // Checked before the file is opened, because opening a named pipe blocks until a writer opens it too.
    let about = std::fs::metadata(path).map_err(|e| Error::io(path, "open the file", e))?;
    if !about.is_file() {
        let found = if about.is_dir() { "a folder" } else { "something that is not a regular file" };
        return Err(Error::NotAModel { path: path.to_path_buf(), found: found.into() });
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open the file", e))?;
    let about = file.metadata().map_err(|e| Error::io(path, "read the file's length", e))?;
    Ok((file, about.len()))
}

/// Reads a file of `len` bytes; returns it with its SHA-256.
fn read_whole(path: &Path, mut file: File, len: u64) -> Result<(SharedBytes, String), Error> {
    let no_memory = || Error::OutOfMemory { path: path.to_path_buf(), bytes: len };
    let size = usize::try_from(len).ok().and_then(|len| len.checked_add(ALIGNMENT)).ok_or_else(no_memory)?;
    let mut buffer: Vec<u8> = Vec::new();
    buffer.try_reserve_exact(size).map_err(|_| no_memory())?;
    let start = buffer.as_ptr().align_offset(ALIGNMENT).min(ALIGNMENT);
    let end = start + len as usize;
    buffer.resize(start, 0);
    let mut hasher = Sha256::new();
    while buffer.len() < end {
        let filled = buffer.len();
        buffer.resize(end.min(filled + PART_BYTES), 0);
        file.read_exact(&mut buffer[filled..]).map_err(|e| Error::io(path, "read the file", e))?;
        hasher.update(&buffer[filled..]);
    }
    Ok((SharedBytes::new(Arc::new(AlignedBytes { buffer, start })), hexadecimal(&hasher.finalize())))
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_in_memory_is_aligned_and_hashed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"hello").unwrap();
        let access = FileAccess::InMemory { sha256: HashMap::new() };
        let mut reader = FileReader::new(&access);
        let bytes = reader.read(&path).unwrap();
        std::fs::write(&path, b"").unwrap();
        assert_eq!(&*bytes, b"hello");
        assert_eq!(bytes.as_ptr().align_offset(ALIGNMENT), 0);
        let hash = &reader.hashes[0];
        assert_eq!(hash.sha256, "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824");
        assert!(!hash.verified);
        assert_eq!(&*reader.read(&path).unwrap(), b"");
    }

    #[test]
    fn a_file_that_no_memory_can_hold_is_refused_with_its_size() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        // A sparse file: it has this length, and takes no space.
        let len = 1 << 42;
        let file = File::create(&path).unwrap();
        if file.set_len(len).is_err() {
            return;
        }
        let found = read_whole(&path, file, u64::MAX - 100).map(|_| ()).unwrap_err().to_string();
        assert!(found.contains("18446744073709551515 bytes"), "{found}");
    }
}
