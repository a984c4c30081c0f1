//! The new rows of a step: queries and keys are rotated by the angles of their positions (RoPE), keys and values are
//! stored.

use std::cell::RefCell;

use pellucid_tensor::{Rope, RopeStyle, Tensor, Values};

use super::kv_layout::{KvBytes, KvLayout, encode_head};
use crate::memory::floats;
use crate::ops::rope;
use crate::pool::Pool;
use crate::simd::{Level, with_simd};

/// The angles by which heads are rotated.
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

    /// Rotates one head of a row.
    pub(super) fn rotate_head(&self, level: Level, row: usize, head: &mut [f32]) {
        let (angles, len) = (&self.angles[row * self.cols..][..self.cols], head.len());
        with_simd!(level, simd => rope::rotate_row(simd, head, angles, len, self.style));
    }
}

/// Keys and values to store.
#[derive(Debug, Clone, Copy)]
pub(super) struct NewRows<'a> {
    /// How keys are rotated; values are not.
    rotation: Option<Rotation<'a>>,
    /// `[rows][kv heads][head_size]`
    keys: &'a [f32],
    /// `None` if values are parts of the keys.
    values: Option<&'a [f32]>,
    /// The slot of each row: block * block_len + offset.
    slots: &'a [u32],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum KeyOrValue {
    Key,
    Value,
}

thread_local! {
    /// A rotated head, and an encoded one.
    static HEAD: RefCell<(Vec<f32>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

impl<'a> NewRows<'a> {
    pub(super) fn new(
        layout: &KvLayout,
        rotation: Option<Rotation<'a>>,
        keys: &'a Tensor,
        values: Values<'a>,
        slots: &'a [u32],
    ) -> Self {
        let cols = layout.shape.num_kv_heads * layout.shape.head_size;
        let values = match values {
            Values::Rows(values) => Some(values),
            Values::InKeys { .. } => None,
        };
        for tensor in values.into_iter().chain([keys]) {
            assert_eq!((tensor.rows(), tensor.cols()), (slots.len(), cols));
        }
        NewRows { rotation, keys: floats(keys), values: values.map(floats), slots }
    }

    /// Returns the kinds that are stored for each row.
    pub(super) fn kinds(&self) -> &'static [KeyOrValue] {
        if self.values.is_some() { &[KeyOrValue::Key, KeyOrValue::Value] } else { &[KeyOrValue::Key] }
    }

    /// The block that holds a row's slot.
    pub(super) fn block(&self, layout: &KvLayout, row: usize) -> u32 {
        self.slots[row] / layout.shape.block_len as u32
    }

    /// Writes the key or the value of one head of a row into its slot.
    ///
    /// # Safety
    /// Nothing else uses that head's region of the slot's block meanwhile.
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
            KeyOrValue::Value => (self.values.expect("one of `kinds`"), memory.values),
        };
        let (block, offset) =
            (self.slots[row] as usize / layout.shape.block_len, self.slots[row] as usize % layout.shape.block_len);
        let head = &rows[(row * num_kv_heads + kv_head) * head_size..][..head_size];
        HEAD.with_borrow_mut(|(rotated, encoded)| {
            let head = match (kind, self.rotation) {
                (KeyOrValue::Key, Some(rotation)) => {
                    rotated.clear();
                    rotated.extend_from_slice(head);
                    rotation.rotate_head(level, row, rotated);
                    &rotated[..]
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

    /// Stores some rows. Threads divide the heads and, if there are more threads than heads, the blocks: rows of the
    /// same block and head write into the same cache lines, so one thread stores them.
    ///
    /// # Safety
    /// Nothing else uses `memory` meanwhile.
    pub(super) unsafe fn store_rows(
        &self,
        level: Level,
        pool: &Pool,
        layout: &KvLayout,
        memory: &KvBytes,
        rows: impl Iterator<Item = usize> + Clone + Sync,
    ) {
        // With fewer values, waking threads costs more than the work itself.
        const ENOUGH_FOR_THREADS: usize = 1024;
        let (kinds, num_kv_heads) = (self.kinds(), layout.shape.num_kv_heads);
        let num_rows = rows.clone().count();
        let num_heads = kinds.len() * num_kv_heads;
        let parts = (2 * pool.num_threads()).div_ceil(num_heads);
        let num_tasks = num_heads * parts;
        let store_part = |task: usize| {
            let (kind, task) = (kinds[task % kinds.len()], task / kinds.len());
            let (kv_head, part) = (task % num_kv_heads, task / num_kv_heads);
            let is_here = |row: usize| self.slots[row] as usize / layout.shape.block_len % parts == part;
            for row in rows.clone().filter(|&row| is_here(row)) {
                // SAFETY: only this task uses its head's regions of keys, or of values, in its part of the blocks.
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
