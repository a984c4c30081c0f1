//! Prefetching KV memory.
//!
//! A thread reads some regions of keys, then the same number of regions of values, then those of its next task. In a
//! long span it prefetches four regions ahead, four at a time, because several streams of memory are faster than one. A
//! span of few regions would end before that helps: while reading one of them, the thread prefetches the corresponding
//! region of its next task.

use super::super::decoded_tile::HeadPages;
use super::super::kv_layout::STEP;
use super::super::{NextSpan, SPAN};
use super::LINE;
use crate::shared_slice::SharedSlice;

/// Regions that are prefetched at a time.
pub(super) const STREAMS: usize = 4;

/// The KV memory that a thread reads now and next.
#[derive(Clone, Copy)]
pub(super) struct KvPrefetch<'a> {
    pub(super) pages: &'a HeadPages<'a>,
    /// The span that is read after this one, if known.
    pub(super) next: Option<NextSpan<'a>>,
}

impl KvPrefetch<'_> {
    /// Returns the starts of the lines to prefetch while 32 positions of keys are read, and the distance between lines.
    /// The number of lines is that of the keys.
    #[inline]
    pub(super) fn of_keys(&self, position: usize) -> ([*const u8; STREAMS], usize) {
        let HeadPages { blocks, kv_head, .. } = self.pages;
        let memory = self.pages.memory();
        let values = NextSpan { blocks, kv_head: *kv_head, span: position / SPAN };
        self.part(&memory.keys, position, Some((&memory.values, values)))
    }

    /// Returns the starts of the lines to prefetch while 32 positions of values are read, and the distance between
    /// lines.
    #[inline]
    pub(super) fn of_values(&self, position: usize) -> ([*const u8; STREAMS], usize) {
        let memory = self.pages.memory();
        self.part(&memory.values, position, self.next.map(|next| (&memory.keys, next)))
    }

    #[inline]
    fn part(
        &self,
        bytes: &SharedSlice<'_, u8>,
        position: usize,
        then: Option<(&SharedSlice<'_, u8>, NextSpan<'_>)>,
    ) -> ([*const u8; STREAMS], usize) {
        let HeadPages { layout, blocks, kv_head, .. } = *self.pages;
        let block_len = layout.shape.block_len;
        // By default an address that is in the cache already: prefetching an invalid address would cost more.
        let mut starts = [blocks.as_ptr().cast(); STREAMS];
        let first_of = |span: usize| span * SPAN / block_len;
        let (here, span) = (position / block_len, position / SPAN);
        if blocks.len().min(first_of(span + 1)) - first_of(span) <= STREAMS {
            let corresponding = |next: NextSpan<'_>| {
                next.blocks.get(first_of(next.span) + here - first_of(span)).map(|&block| (block, next.kv_head))
            };
            if let Some((block, kv_head)) = self.next.and_then(corresponding) {
                let lines = layout.shape.head_size * LINE;
                let region = bytes
                    .address(layout.region(block as usize, kv_head))
                    .wrapping_add(position % block_len / STEP * lines);
                starts = std::array::from_fn(|stream| region.wrapping_add(stream * LINE));
            }
            return (starts, STREAMS * LINE);
        }
        // A part of each of the next four regions; at the end of a span, of the first four regions that are read next.
        let part = (position / STEP) % (block_len / STEP * STREAMS);
        let first = (here / STREAMS + 1) * STREAMS;
        let place = if first < first_of(span + 1) {
            Some((bytes, NextSpan { blocks, kv_head, span }, first))
        } else {
            then.map(|(bytes, next)| (bytes, next, first_of(next.span)))
        };
        if let Some((bytes, next, first)) = place {
            let within = part * layout.shape.head_size / STREAMS * LINE;
            for (start, &block) in starts.iter_mut().zip(next.blocks.get(first..).unwrap_or(&[])) {
                *start = bytes.address(layout.region(block as usize, next.kv_head) + within);
            }
        }
        (starts, LINE)
    }
}
