//! What of KV memory is asked for before it is read.
//!
//! A thread reads some regions of keys, then as many of values, then those of its next task. In a long span it asks for them four regions
//! ahead, four at a time, because several streams of memory are faster than one. A span of few regions would be over before that helps:
//! while it reads one of them, it asks for the like one of the next task.

use super::super::decoded_tile::HeadPages;
use super::super::kv_layout::STEP;
use super::super::{NextSpan, SPAN};
use super::LINE;
use crate::shared_slice::SharedSlice;

/// Regions that are asked for at a time.
pub(super) const STREAMS: usize = 4;

/// The way of a thread through KV memory.
#[derive(Clone, Copy)]
pub(super) struct KvPrefetch<'a> {
    pub(super) pages: &'a HeadPages<'a>,
    /// What will be read after this span, if that is known.
    pub(super) next: Option<NextSpan<'a>>,
}

impl KvPrefetch<'_> {
    /// Where the lines begin that are asked for while 32 positions of keys are read: as many as these have.
    #[inline]
    pub(super) fn of_keys(&self, position: usize) -> ([*const u8; STREAMS], usize) {
        let HeadPages { memory, blocks, kv_head, .. } = self.pages;
        let values = NextSpan { blocks, kv_head: *kv_head, span: position / SPAN };
        self.part(&memory.keys, position, Some((&memory.values, values)))
    }

    /// The same for values.
    #[inline]
    pub(super) fn of_values(&self, position: usize) -> ([*const u8; STREAMS], usize) {
        let memory = &self.pages.memory;
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
        // Elsewhere stays what is in the cache already: to ask for an address that is none would cost more than to ask for nothing.
        let mut starts = [blocks.as_ptr().cast(); STREAMS];
        let first_of = |span: usize| span * SPAN / block_len;
        let (here, span) = (position / block_len, position / SPAN);
        if blocks.len().min(first_of(span + 1)) - first_of(span) <= STREAMS {
            let like = |next: NextSpan<'_>| {
                next.blocks.get(first_of(next.span) + here - first_of(span)).map(|&block| (block, next.kv_head))
            };
            if let Some((block, kv_head)) = self.next.and_then(like) {
                let lines = layout.shape.head_size * LINE;
                let region = bytes
                    .address(layout.region(block as usize, kv_head))
                    .wrapping_add(position % block_len / STEP * lines);
                starts = std::array::from_fn(|stream| region.wrapping_add(stream * LINE));
            }
            return (starts, STREAMS * LINE);
        }
        // A part of each of the next four regions; after the last ones of a span, of the first four of what is read then.
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
