//! Bytes of a reply that are written next. Their number grows with the request, so growing can fail: the reply ends
//! then, and the server goes on.

use std::fmt;
use std::io;

use serde::Serialize;

use crate::http::error::ApiError;
use crate::limits::client_memory::out_of_memory;

/// An allocation for a reply failed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct OutOfMemory;

impl fmt::Display for OutOfMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("there is not enough memory for the reply")
    }
}

impl std::error::Error for OutOfMemory {}

impl From<OutOfMemory> for ApiError {
    fn from(_: OutOfMemory) -> ApiError {
        out_of_memory()
    }
}

impl From<std::collections::TryReserveError> for OutOfMemory {
    fn from(_: std::collections::TryReserveError) -> OutOfMemory {
        OutOfMemory
    }
}

/// UTF-8 text whose growth can fail.
#[derive(Debug, Default)]
pub(crate) struct ReplyBuffer {
    bytes: Vec<u8>,
}

impl ReplyBuffer {
    /// Returns a buffer with room for `capacity` bytes.
    pub(crate) fn with_capacity(capacity: usize) -> Result<ReplyBuffer, OutOfMemory> {
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(capacity)?;
        Ok(ReplyBuffer { bytes })
    }

    pub(crate) fn len(&self) -> usize {
        self.bytes.len()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }

    /// Removes the bytes from `len` on, which must be a boundary of what was written.
    pub(crate) fn truncate(&mut self, len: usize) {
        self.bytes.truncate(len);
    }

    pub(crate) fn push(&mut self, text: &str) -> Result<(), OutOfMemory> {
        self.push_bytes(text.as_bytes())
    }

    /// Appends UTF-8.
    pub(crate) fn push_bytes(&mut self, bytes: &[u8]) -> Result<(), OutOfMemory> {
        self.bytes.try_reserve(bytes.len())?;
        self.bytes.extend_from_slice(bytes);
        Ok(())
    }

    /// Appends a value as JSON. The types of replies can always be written, so only memory can be missing.
    pub(crate) fn json(&mut self, value: &impl Serialize) -> Result<(), OutOfMemory> {
        serde_json::to_writer(&mut *self, value).map_err(|_| OutOfMemory)
    }

    /// Appends the characters of a JSON string, without quotation marks.
    pub(crate) fn json_text(&mut self, text: &str) -> Result<(), OutOfMemory> {
        let start = self.bytes.len();
        self.json(&text)?;
        self.bytes.remove(start);
        self.bytes.pop();
        Ok(())
    }
}

impl io::Write for ReplyBuffer {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.push_bytes(bytes).map_err(|_| io::ErrorKind::OutOfMemory)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Returns the bytes of a JSON string, without quotation marks.
pub(crate) fn json_text_len(text: &str) -> usize {
    struct Count(usize);
    impl io::Write for Count {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0 += bytes.len();
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut count = Count(0);
    // Counting cannot fail.
    let _ = serde_json::to_writer(&mut count, text);
    count.0 - 2
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn strings_are_written_without_quotation_marks() {
        let text = "é\u{1F600}\"\\\n\u{0}";
        let mut buffer = ReplyBuffer::default();
        buffer.push("a").unwrap();
        buffer.json_text(text).unwrap();
        buffer.json(&(1, "b")).unwrap();
        let quoted = serde_json::to_string(text).unwrap();
        let expected = format!("a{}[1,\"b\"]", &quoted[1..quoted.len() - 1]);
        assert_eq!(buffer.as_bytes(), expected.as_bytes());
        assert_eq!(json_text_len(text), quoted.len() - 2);
        buffer.truncate(1);
        assert_eq!(buffer.into_bytes(), b"a");
    }

    #[test]
    fn a_shortage_is_an_error() {
        assert_eq!(ReplyBuffer::with_capacity(usize::MAX).unwrap_err(), OutOfMemory);
        let error = ApiError::from(OutOfMemory);
        assert_eq!((error.status.as_u16(), error.retry_after_s), (503, Some(1)));
    }
}
