//! Memory-maps files. Weights are read in place: opening a model of any size only reads its header, and processes that
//! run the same file share the page cache.

#[cfg(unix)]
mod bus_error;

use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

use memmap2::Mmap;
use pellucid_tensor::{BytesOwner, SharedBytes};

use crate::error::Error;
use crate::file_bytes::open_regular;

/// A mapped file that can release pages.
struct MappedFile {
    // Dropped before the map: its addresses may then belong to another file.
    #[cfg(unix)]
    _registered: bus_error::Registered,
    map: Mmap,
}

impl AsRef<[u8]> for MappedFile {
    fn as_ref(&self) -> &[u8] {
        &self.map
    }
}

impl BytesOwner for MappedFile {
    /// Removes the pages from this process. The system may keep them in its cache, and reads them again when they are
    /// accessed.
    fn release(&self, range: Range<usize>) {
        #[cfg(unix)]
        // SAFETY: the map is read-only and backed by a file, so a page that is dropped is read again with the same
        // bytes. If the system refuses, nothing changes.
        let _ =
            unsafe { self.map.unchecked_advise_range(memmap2::UncheckedAdvice::DontNeed, range.start, range.len()) };
        #[cfg(not(unix))]
        let _ = range;
    }
}

/// Maps a regular file read-only. Returns empty bytes for an empty file.
pub(crate) fn map(path: &Path) -> Result<SharedBytes, Error> {
    let (file, len) = open_regular(path)?;
    if len == 0 {
        return Ok(SharedBytes::from(Vec::new()));
    }
    // SAFETY: the map is private to this process, read-only, and lives as long as any `SharedBytes` cut from it, so no
    // reference outlives it and nothing here writes through it. What remains is another process changing the file
    // meanwhile, against which no user-space program can guard a map. Its effect is kept to wrong numbers or a bus
    // error: the length is the map's own and fixed, every access is bounds-checked against it, any bit pattern is a
    // valid u8, and text and headers are copied out before they are validated, so no checked property (UTF-8, offsets)
    // rests on bytes that can change afterwards.
    let map = unsafe { Mmap::map(&file) }.map_err(|e| Error::io(path, "map the file into memory", e))?;
    Ok(SharedBytes::new(Arc::new(MappedFile {
        #[cfg(unix)]
        _registered: bus_error::Registered::new(path, &map),
        map,
    })))
}

/// Makes the process write a line with the file's path to standard error before it ends because a mapped file was
/// truncated or cannot be read. Does nothing on systems without SIGBUS.
pub fn report_bus_errors() {
    #[cfg(unix)]
    bus_error::report();
}
