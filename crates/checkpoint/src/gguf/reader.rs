//! A cursor over the bytes of a GGUF header. Every read first checks that the bytes are there; all lengths of the
//! format rely on this check.

use std::fmt::Display;
use std::path::Path;

use crate::error::Error;

pub(crate) struct Reader<'a> {
    path: &'a Path,
    bytes: &'a [u8],
    position: usize,
}

impl<'a> Reader<'a> {
    pub(crate) fn new(path: &'a Path, bytes: &'a [u8]) -> Reader<'a> {
        Reader { path, bytes, position: 0 }
    }

    pub(crate) fn path(&self) -> &'a Path {
        self.path
    }

    pub(crate) fn position(&self) -> usize {
        self.position
    }

    fn left(&self) -> usize {
        self.bytes.len() - self.position
    }

    /// Returns the next `len` bytes. `what` is only formatted if they are missing.
    pub(crate) fn take(&mut self, len: u64, what: &dyn Display) -> Result<&'a [u8], Error> {
        let needed = match usize::try_from(len) {
            Ok(needed) if needed <= self.left() => needed,
            _ => return Err(self.truncated(len, what)),
        };
        let taken = &self.bytes[self.position..self.position + needed];
        self.position += needed;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self, what: &dyn Display) -> Result<[u8; N], Error> {
        let mut taken = [0; N];
        taken.copy_from_slice(self.take(N as u64, what)?);
        Ok(taken)
    }

    pub(crate) fn u8(&mut self, what: &dyn Display) -> Result<u8, Error> {
        Ok(u8::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u16(&mut self, what: &dyn Display) -> Result<u16, Error> {
        Ok(u16::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u32(&mut self, what: &dyn Display) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array(what)?))
    }

    pub(crate) fn u64(&mut self, what: &dyn Display) -> Result<u64, Error> {
        Ok(u64::from_le_bytes(self.array(what)?))
    }

    /// Reads a count of items that take at least `item_bytes` each. Refuses it if fewer bytes are left than `count *
    /// item_bytes`, or if it is above `limit`, so that it is safe to allocate.
    pub(crate) fn count(&mut self, item_bytes: u64, limit: u64, what: &dyn Display) -> Result<usize, Error> {
        let count = self.u64(what)?;
        self.check_count(count, item_bytes, limit, what)
    }

    pub(crate) fn check_count(
        &self,
        count: u64,
        item_bytes: u64,
        limit: u64,
        what: &dyn Display,
    ) -> Result<usize, Error> {
        let needed = count.saturating_mul(item_bytes);
        if needed > self.left() as u64 {
            return Err(self.truncated(needed, &format_args!("{what} (a count of {count})")));
        }
        if count > limit {
            return Err(self.too_large(count, limit, what));
        }
        usize::try_from(count).map_err(|_| self.too_large(count, limit, what))
    }

    /// Reads a string: its length in bytes, then UTF-8 without a terminator.
    pub(crate) fn string(&mut self, limit: u64, what: &dyn Display) -> Result<String, Error> {
        let bytes = self.string_bytes(limit, what)?;
        // The copy is validated, not the mapped file, which could change in between.
        String::from_utf8(bytes.to_vec()).map_err(|e| self.not_utf8(e.utf8_error(), what))
    }

    pub(crate) fn string_bytes(&mut self, limit: u64, what: &dyn Display) -> Result<&'a [u8], Error> {
        let len = self.u64(&format_args!("the length of {what}"))?;
        if len > self.left() as u64 {
            return Err(self.truncated(len, what));
        }
        if len > limit {
            return Err(self.too_large(len, limit, &format_args!("the length of {what}")));
        }
        self.take(len, what)
    }

    pub(crate) fn not_utf8(&self, error: std::str::Utf8Error, what: &dyn Display) -> Error {
        Error::invalid(self.path, what, "UTF-8 text", error)
    }

    fn truncated(&self, needed: u64, what: &dyn Display) -> Error {
        Error::Truncated {
            path: self.path.to_path_buf(),
            what: what.to_string(),
            offset: self.position as u64,
            needed,
            left: self.left() as u64,
        }
    }

    fn too_large(&self, found: u64, limit: u64, what: &dyn Display) -> Error {
        Error::TooLarge { path: self.path.to_path_buf(), what: what.to_string(), limit, found }
    }
}
