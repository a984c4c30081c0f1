//! What of KV memory is asked for before it is read.
//!
//! A thread reads some regions of keys, then as many of values, then those of its next task: it asks for them four regions ahead, four at a
//! time, because several streams of memory are faster than one.

use super::super::SPAN;
use super::super::pages::STEP;
use super::super::tile::Pages;
use super::LINE;

/// Regions that are asked for at a time.
pub(super) const STREAMS: usize = 4;

/// The way of a thread through KV memory.
#[derive(Clone, Copy)]
pub(super) struct Ahead<'a> {
    pub(super) pages: &'a Pages<'a>,
    /// The kv head and the span that will be read after this one, if that is known.
    pub(super) next: Option<(usize, usize)>,
}

impl Ahead<'_> {
    /// Where the lines begin that are asked for while 32 positions of keys are read: as many as these have.
    #[inline]
    pub(super) fn of_keys(&self, position: usize) -> [*const u8; STREAMS] {
        let Pages { keys, values, kv_head, .. } = *self.pages;
        self.part(keys, position, Some((values, kv_head, position / SPAN)))
    }

    /// The same for values.
    #[inline]
    pub(super) fn of_values(&self, position: usize) -> [*const u8; STREAMS] {
        let Pages { keys, values, .. } = *self.pages;
        self.part(values, position, self.next.map(|(kv_head, span)| (keys, kv_head, span)))
    }

    /// A part of each of the next four regions; after the last ones of a span, of the first four of what is read `then`.
    #[inline]
    fn part(&self, bytes: &[u8], position: usize, then: Option<(&[u8], usize, usize)>) -> [*const u8; STREAMS] {
        let Pages { layout, blocks, kv_head, .. } = *self.pages;
        let block_len = layout.shape.block_len;
        let part = (position / STEP) % (block_len / STEP * STREAMS);
        let first = (position / block_len / STREAMS + 1) * STREAMS;
        let place = if first * block_len < (position / SPAN + 1) * SPAN {
            Some((bytes, kv_head, first))
        } else {
            then.map(|(bytes, kv_head, span)| (bytes, kv_head, span * SPAN / block_len))
        };
        let mut starts = [blocks.as_ptr().cast(); STREAMS];
        // Elsewhere stays what is in the cache already: to ask for an address that is none would cost more than to ask for nothing.
        if let Some((bytes, kv_head, first)) = place {
            let within = part * layout.shape.head_size / STREAMS * LINE;
            for (start, &block) in starts.iter_mut().zip(blocks.get(first..).unwrap_or(&[])) {
                *start = bytes.as_ptr().wrapping_add(layout.region(block as usize, kv_head) + within);
            }
        }
        starts
    }
}
