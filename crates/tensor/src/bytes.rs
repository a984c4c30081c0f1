//! Bytes that several tensors share without copying: a range of a mapped file, or of a buffer.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// The owner of shared bytes.
pub trait BytesOwner: AsRef<[u8]> + Send + Sync {
    /// Hints that a range was copied and will hardly be read again, so that its memory may be released. The bytes do
    /// not change.
    fn release(&self, _range: Range<usize>) {}
}

impl BytesOwner for Vec<u8> {}

/// A cheaply cloned range of immutable bytes that keeps its owner alive.
#[derive(Clone)]
pub struct SharedBytes {
    owner: Arc<dyn BytesOwner>,
    range: Range<usize>,
}

impl SharedBytes {
    pub fn new(owner: Arc<dyn BytesOwner>) -> Self {
        let range = 0..(*owner).as_ref().len();
        SharedBytes { owner, range }
    }

    /// Tells the owner that these bytes were copied and will hardly be read again.
    pub fn release(&self) {
        self.owner.release(self.range.clone());
    }

    /// Returns a part of these bytes; `None` if the range exceeds them.
    pub fn slice(&self, range: Range<usize>) -> Option<Self> {
        if range.start > range.end || range.end > self.len() {
            return None;
        }
        let start = self.range.start + range.start;
        Some(SharedBytes { owner: self.owner.clone(), range: start..start + range.len() })
    }
}

impl Deref for SharedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &(*self.owner).as_ref()[self.range.clone()]
    }
}

impl From<Vec<u8>> for SharedBytes {
    fn from(bytes: Vec<u8>) -> Self {
        SharedBytes::new(Arc::new(bytes))
    }
}

impl fmt::Debug for SharedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SharedBytes({} bytes)", self.len())
    }
}
