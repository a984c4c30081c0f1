//! Memory-maps files. Weights are read in place: opening a model of any size only reads its header, and processes that
//! run the same file share the page cache.

use std::fs::File;
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use pellucid_tensor::{BytesOwner, SharedBytes};

use crate::error::Error;

/// A mapped file that can release pages.
struct MappedFile(Mmap);

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

impl BytesOwner for MappedFile {
    /// Removes the pages from this process. The system may keep them in its cache, and reads them again when they are
    /// accessed.
    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        // SAFETY: the map is read-only and backed by a file, so a page that is dropped is read again with the same
        // bytes. If the system refuses, nothing changes.
        let _ = unsafe { self.0.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// Maps a regular file read-only. Returns empty bytes for an empty file.
pub(crate) fn map(path: &Path) -> Result<SharedBytes, Error> {
    // Checked before the file is opened, because opening a named pipe blocks until a writer opens it too.
    let about = std::fs::metadata(path).map_err(|e| Error::io(path, "open the file", e))?;
    if !about.is_file() {
        let found = if about.is_dir() { "a folder" } else { "something that is not a regular file" };
        return Err(Error::NotAModel { path: path.to_path_buf(), found: found.into() });
    }
    let file = File::open(path).map_err(|e| Error::io(path, "open the file", e))?;
    let about = file.metadata().map_err(|e| Error::io(path, "read the file's length", e))?;
    if about.len() == 0 {
        return Ok(SharedBytes::from(Vec::new()));
    }
    // SAFETY: the map is private to this process, read-only, and lives as long as any `SharedBytes` cut from it, so no
    // reference outlives it and nothing here writes through it. What remains is another process changing the file
    // meanwhile, against which no user-space program can guard a map. Its effect is kept to wrong numbers or a bus
    // error: the length is the map's own and fixed, every access is bounds-checked against it, any bit pattern is a
    // valid u8, and text and headers are copied out before they are validated, so no checked property (UTF-8, offsets)
    // rests on bytes that can change afterwards.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map the file into memory", e))?;
    Ok(SharedBytes::new(Arc::new(MappedFile(map))))
}
