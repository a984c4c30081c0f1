//! The rows that a step brings: their queries and keys turn by the angles of their positions, keys and values are stored.

use std::cell::RefCell;

use pellucid_tensor::{Rope, RopeStyle, Tensor};

use super::kv_layout::{KvBytes, KvLayout, encode_head};
use crate::memory::floats;
use crate::ops::rope;
use crate::pool::Pool;
use crate::simd::{Level, with_simd};

/// By how much rows turn.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rotation<'a> {
    angles: &'a [f32],
    /// Angles of a row.
    cols: usize,
    style: RopeStyle,
}

impl<'a> Rotation<'a> {
    pub(super) fn new(rope: Rope<'a>, head_size: usize, num_rows: usize) -> Self {
        assert_eq!((rope.angles.rows(), rope.head_size), (num_rows, head_size));
        assert!(rope.angles.cols() <= head_size);
        Rotation { angles: floats(rope.angles), cols: rope.angles.cols(), style: rope.style }
    }

    /// Turns one head of a row.
    pub(super) fn head(&self, level: Level, row: usize, head: &mut [f32]) {
        let (angles, len) = (&self.angles[row * self.cols..][..self.cols], head.len());
        with_simd!(level, simd => rope::rotate_row(simd, head, angles, len, self.style));
    }
}

/// What is stored.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewRows<'a> {
    /// Of keys; values stay as they are.
    turn: Option<Rotation<'a>>,
    /// `[rows][kv heads][head_size]`
    keys: &'a [f32],
    values: &'a [f32],
    /// For each row, block * block_len + offset.
    slots: &'a [u32],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyOrValue {
    Key,
    Value,
}

thread_local! {
    /// A head that turns, and the same encoded.
    static HEAD: RefCell<(Vec<f32>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<'a> NewRows<'a> {
    pub(super) fn new(
        layout: &KvLayout,
        turn: Option<Rotation<'a>>,
        keys: &'a Tensor,
        values: &'a Tensor,
        slots: &'a [u32],
    ) -> Self {
        let cols = layout.shape.num_kv_heads * layout.shape.head_size;
        for tensor in [keys, values] {
            assert_eq!((tensor.rows(), tensor.cols()), (slots.len(), cols));
        }
        NewRows { turn, keys: floats(keys), values: floats(values), slots }
    }

    /// Writes the key or the value of one head of a row into its slot.
    ///
    /// # Safety
    /// `memory` is alive, and nobody else reads or writes that head's region of the slot's block.
    pub(super) unsafe fn store_head(
        &self,
        level: Level,
        layout: &KvLayout,
        memory: &KvBytes,
        row: usize,
        kv_head: usize,
        kind: KeyOrValue,
    ) {
        let (num_kv_heads, head_size) = (layout.shape.num_kv_heads, layout.shape.head_size);
        let (rows, regions) = match kind {
            KeyOrValue::Key => (self.keys, memory.keys),
            KeyOrValue::Value => (self.values, memory.values),
        };
        let (block, offset) =
            (self.slots[row] as usize / layout.shape.block_len, self.slots[row] as usize % layout.shape.block_len);
        let head = &rows[(row * num_kv_heads + kv_head) * head_size..][..head_size];
        HEAD.with_borrow_mut(|(turned, encoded)| {
            let head = match (kind, self.turn) {
                (KeyOrValue::Key, Some(turn)) => {
                    turned.clear();
                    turned.extend_from_slice(head);
                    turn.head(level, row, turned);
                    &turned[..]
                }
                _ => head,
            };
            encoded.resize(layout.head_bytes(), 0);
            with_simd!(level, simd => encode_head(simd, layout.dtype, head, encoded));
            // SAFETY: passed on from the caller.
            let region = unsafe { regions.part(layout.region(block, kv_head), layout.region_bytes()) };
            layout.place(encoded, offset, kind, region);
        });
    }

    /// Stores some rows. Threads share out the heads and, where there are more threads than heads, the blocks of the cache: rows that one block
    /// and head have write into the same cache lines.
    ///
    /// # Safety
    /// `memory` is alive, and nobody else uses it.
    pub(super) unsafe fn store_rows(
        &self,
        level: Level,
        pool: &Pool,
        layout: &KvLayout,
        memory: &KvBytes,
        rows: impl Iterator<Item = usize> + Clone + Sync,
    ) {
        // Below this many numbers, waking threads costs more than the work.
        const ENOUGH_FOR_THREADS: usize = 1024;
        let num_kv_heads = layout.shape.num_kv_heads;
        let num_rows = rows.clone().count();
        let parts = (2 * pool.num_threads()).div_ceil(2 * num_kv_heads);
        let num_tasks = 2 * num_kv_heads * parts;
        let store_part = |task: usize| {
            let (kind, kv_head, part) = (task % 2, task / 2 % num_kv_heads, task / 2 / num_kv_heads);
            let kind = if kind == 0 { KeyOrValue::Key } else { KeyOrValue::Value };
            let is_here = |row: usize| self.slots[row] as usize / layout.shape.block_len % parts == part;
            for row in rows.clone().filter(|&row| is_here(row)) {
                // SAFETY: a task owns its head's regions of keys or of values in its part of the blocks.
                unsafe { self.store_head(level, layout, memory, row, kv_head, kind) };
            }
        };
        if num_rows * num_kv_heads * layout.shape.head_size < ENOUGH_FOR_THREADS {
            (0..num_tasks).for_each(store_part);
        } else {
            pool.run(num_tasks, &store_part);
        }
    }
}
