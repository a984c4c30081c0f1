//! Asking for weights before they are used, while what came before them is multiplied.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use crate::pool::Direction;

/// Places of a stretch that are fetched in turns. The machine's own prefetchers follow a stream within a page of 4 KB: several streams
/// bring a stretch in sooner than one does.
const STREAMS: usize = 4;

const LINE: usize = 64;

/// A stretch of memory that is used next: kernels ask for it bit by bit, so that memory is never idle. It goes to the second-level cache.
pub(super) struct PacedPrefetch {
    next: *const u8,
    /// Bytes from stream to stream.
    stride: usize,
    /// Lines of a stream that are left.
    left: usize,
    /// Bytes of a stream to ask for each time, and those that are due but less than a line.
    each: usize,
    due: usize,
}

impl PacedPrefetch {
    /// All of `bytes`, in `num_times` parts.
    pub(super) fn new(bytes: &[u8], num_times: usize) -> Self {
        let stride = bytes.len().div_ceil(STREAMS).next_multiple_of(LINE);
        PacedPrefetch {
            next: bytes.as_ptr(),
            stride,
            left: stride / LINE,
            each: stride.div_ceil(num_times),
            due: LINE - 1,
        }
    }

    /// The next part; after the last one, nothing.
    #[inline(always)]
    pub(super) fn fetch(&mut self) {
        self.due += self.each;
        while self.due >= LINE && self.left > 0 {
            for stream in 0..STREAMS {
                // SAFETY: a prefetch may go anywhere.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.wrapping_add(stream * self.stride).cast()) };
            }
            self.next = self.next.wrapping_add(LINE);
            (self.due, self.left) = (self.due - LINE, self.left - 1);
        }
    }
}

/// What is unpacked next of the panels that follow: kernels ask for it line by line while they multiply.
pub(super) struct NextPanelsPrefetch {
    start: *const u8,
    panel_bytes: usize,
    /// Where the lines of this block begin, and how many bytes they are.
    at: usize,
    len: usize,
    bytes_each: usize,
}

impl NextPanelsPrefetch {
    /// `len` bytes of each panel, of which the first begins at `start`, asked for in `num_blocks` parts.
    pub(super) fn new(start: *const u8, panel_bytes: usize, len: usize, num_blocks: usize) -> Self {
        let bytes_each = len.div_ceil(num_blocks).next_multiple_of(LINE);
        NextPanelsPrefetch { start, panel_bytes, at: bytes_each.wrapping_neg(), len, bytes_each }
    }

    #[inline(always)]
    pub(super) fn fetch(&mut self, panel: usize) {
        if self.at < self.len {
            let from = self.start.wrapping_add(panel * self.panel_bytes + self.at);
            for line in (0..self.bytes_each).step_by(LINE) {
                // SAFETY: a prefetch may go anywhere.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
            }
        }
    }

    pub(super) fn next_block(&mut self) {
        self.at = self.at.wrapping_add(self.bytes_each);
    }
}

/// Takes `len` panels of those that are left, in the thread's direction. Gives them, and up to `num_next` of `num_panels` that are likely to be
/// read after them, in this task or in the thread's next one.
pub(super) fn take_panels(
    left: &mut Range<usize>,
    len: usize,
    direction: Direction,
    num_next: usize,
    num_panels: usize,
) -> (Range<usize>, Range<usize>) {
    match direction {
        Direction::Up => {
            let taken = left.start..left.start + len;
            left.start = taken.end;
            (taken.clone(), taken.end..num_panels.min(taken.end + num_next))
        }
        Direction::Down => {
            let taken = left.end - len..left.end;
            left.end = taken.start;
            (taken.clone(), taken.start.saturating_sub(num_next)..taken.start)
        }
    }
}
