//! Prefetching weights into the second-level cache while earlier ones are multiplied.

use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::ops::Range;

use crate::pool::Direction;

/// Streams that a range is prefetched in. The hardware prefetchers follow a stream within a page of 4 KB: several
/// streams fetch the range sooner than one.
const STREAMS: usize = 4;

const LINE: usize = 64;

/// Prefetches a range of memory in small steps, so that the memory is never idle.
pub(super) struct PacedPrefetch {
    next: *const u8,
    /// Bytes from stream to stream.
    stride: usize,
    /// Cache lines of a stream that are left.
    left: usize,
    /// Bytes of a stream to prefetch in each step, and bytes that are due but less than a line.
    each: usize,
    due: usize,
}

impl PacedPrefetch {
    /// Prefetches all of `bytes` in `num_steps` steps.
    pub(super) fn new(bytes: &[u8], num_steps: usize) -> Self {
        let stride = bytes.len().div_ceil(STREAMS).next_multiple_of(LINE);
        PacedPrefetch {
            next: bytes.as_ptr(),
            stride,
            left: stride / LINE,
            each: stride.div_ceil(num_steps),
            due: LINE - 1,
        }
    }

    /// Does the next step; nothing after the last one.
    #[inline(always)]
    pub(super) fn fetch(&mut self) {
        self.due += self.each;
        while self.due >= LINE && self.left > 0 {
            for stream in 0..STREAMS {
                // SAFETY: a prefetch may use any address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(self.next.wrapping_add(stream * self.stride).cast()) };
            }
            self.next = self.next.wrapping_add(LINE);
            (self.due, self.left) = (self.due - LINE, self.left - 1);
        }
    }
}

/// Prefetches the part of the next panels that will be unpacked next, one share for each block of rows that is
/// multiplied meanwhile.
pub(super) struct NextPanelsPrefetch {
    start: *const u8,
    panel_bytes: usize,
    /// Offset of the current block's share, and the bytes of all shares.
    at: usize,
    len: usize,
    bytes_each: usize,
}

impl NextPanelsPrefetch {
    /// Prefetches `len` bytes of each panel, the first of which begins at `start`, in `num_blocks` shares.
    pub(super) fn new(start: *const u8, panel_bytes: usize, len: usize, num_blocks: usize) -> Self {
        let bytes_each = len.div_ceil(num_blocks).next_multiple_of(LINE);
        NextPanelsPrefetch { start, panel_bytes, at: bytes_each.wrapping_neg(), len, bytes_each }
    }

    /// Prefetches the current share of a panel.
    #[inline(always)]
    pub(super) fn fetch(&mut self, panel: usize) {
        if self.at < self.len {
            let from = self.start.wrapping_add(panel * self.panel_bytes + self.at);
            for line in (0..self.bytes_each).step_by(LINE) {
                // SAFETY: a prefetch may use any address.
                unsafe { _mm_prefetch::<_MM_HINT_T1>(from.wrapping_add(line).cast()) };
            }
        }
    }

    /// Goes on to the next share.
    pub(super) fn next_block(&mut self) {
        self.at = self.at.wrapping_add(self.bytes_each);
    }
}

/// Takes `len` panels of those that are left, in the thread's direction. Returns them, and up to `num_next` of
/// `num_panels` panels that will probably be read after them, in this task or in the thread's next one.
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
