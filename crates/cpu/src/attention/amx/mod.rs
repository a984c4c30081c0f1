//! Attention with the tiles of AMX: scores and weighted sums are products of bf16 matrices, for one row as for many.
//!
//! `scores[q][j] = q·k_j` and `sums[q] += weights[q][j] v_j`, for sixteen queries at a time. A tile multiplies bf16,
//! which is too coarse, so each value is split into two, x = high + low: keys and values in f16 exactly (11 bits in 8 +
//! 8), queries and weights with a relative error of 2^-16. A product is then `high·low + high·high + low·high`, in this
//! order, 32 values at a time.
//!
//! The batch invariance of [`super`] holds because the hardware computes each row of a tile separately, in an order
//! that the instruction fixes, and a weight of zero adds nothing: the number of rows of a tile and what the other rows
//! see do not matter. The order of values within 32 is that of the layout (see [`super::kv_layout`]).
//!
//! Bound: 24 multiplications of 16 cycles for 16 queries and 32 positions of a head of 64, and 32 vectors of
//! exponentials. Measured on 2026-11-15 on two threads of a Xeon with AMX: 340 GFLOP/s of attention, which is 1.0
//! TFLOP/s of bf16; f32 vectors reach 208 GFLOP/s.

mod prefetch;
mod split;
mod tile_product;

use std::ops::Range;

use pellucid_tensor::DType;

use super::decoded_tile::HeadPages;
use super::kv_layout::STEP;
use super::lanes::Lanes;
use super::softmax::Softmax;
use super::span::{Queries, SCORES_STRIDE, Workspace};
use super::state::State;
use super::{NextSpan, SPAN};
use crate::memory::Buffer;
use crate::shared_slice::SharedSlice;
use crate::simd::amx::release_tiles;
use prefetch::{KvPrefetch, STREAMS};
use split::{KvLines, split};
use tile_product::{LeftTiles, RightTiles, TileProduct};

/// Queries of a tile.
const ROWS: usize = 16;
const LINE: usize = 64;
/// Positions whose keys are split at a time: four tiles of scores.
const KEYS: usize = 64;
/// Bytes from a query's scores to the next one's.
const SCORES_BYTES: usize = SCORES_STRIDE * size_of::<f32>();

/// Memory that a thread keeps from task to task.
#[derive(Debug, Default)]
pub(super) struct SplitBuffers {
    /// `[tile][step][high, low][16 queries][32 values]`
    queries: Buffer<u16>,
    /// High parts of the keys or values of some positions, then low parts.
    memory: Buffer<u16>,
}

/// A bit for each position of a span, set if its value has a NaN or an infinity.
type NanMarks = [u32; SPAN / STEP];

impl Queries<'_> {
    /// Computes the state of each query over one span with tiles.
    ///
    /// # Safety
    /// The layout is for tiles.
    #[inline(always)]
    pub(super) unsafe fn span_by_tiles<L: Lanes>(
        &self,
        lanes: L,
        span: usize,
        next: Option<NextSpan<'_>>,
        workspace: &mut Workspace,
        state: &mut State<'_>,
    ) {
        let Workspace { scores, planes, .. } = workspace;
        let scores = scores.with_len(self.len() * SCORES_STRIDE);
        // SAFETY: passed on from the caller; `scores` and `state` have a row for every query.
        unsafe {
            self.split_queries(planes);
            let ahead = KvPrefetch { pages: self.pages(), next };
            let mut tiles = QueryTiles { queries: self, span, ahead, configured: 0 };
            tiles.scores(planes, scores);
            for tile in 0..tiles.count() {
                let blocks = tiles.blocks(tile, 0..SPAN);
                for i in tiles.queries_of(tile) {
                    let scores = &mut scores[i * SCORES_STRIDE..][..SPAN];
                    (state.largest[i], state.sums[i]) =
                        weights(lanes, self.softmax(), scores, self.visible(i, span), blocks.clone());
                }
            }
            tiles.values(planes, scores, state, false);
            // Zero times NaN or infinity is NaN, so an invisible value can make a result NaN. If a result is NaN, all
            // are computed again with such values set to zero, and rows that do see one become NaN.
            if has_nan(state.values) {
                let marks = tiles.values(planes, scores, state, true);
                for i in (0..self.len()).filter(|&i| sees_mark(&marks, self.visible(i, span))) {
                    state.sums[i] = f32::NAN;
                }
            }
            release_tiles();
        }
    }

    /// Splits the queries into tiles of high and low parts. The last tile has fewer rows.
    ///
    /// # Safety
    /// The machine has AVX-512.
    unsafe fn split_queries(&self, planes: &mut SplitBuffers) {
        let head_size = self.head_size();
        let steps = head_size / STEP;
        let out = planes.queries.grow(self.len().next_multiple_of(ROWS) * 2 * head_size);
        for i in 0..self.len() {
            for step in 0..steps {
                let values = self.query(i)[step * STEP..].as_ptr();
                let at = ((i / ROWS * steps + step) * 2 * ROWS + i % ROWS) * STEP;
                // SAFETY: the query has 32 values from here on, and both tiles have a row for them.
                unsafe { split(values, out[at..].as_mut_ptr(), out[at + ROWS * STEP..].as_mut_ptr()) };
            }
        }
    }
}

/// Whether a value is NaN. Looks at every value: stopping at the first NaN would prevent vectorisation.
#[inline(always)]
fn has_nan(values: &[f32]) -> bool {
    values.iter().fold(false, |found, value| found | value.is_nan())
}

/// Whether one of the visible positions is marked.
fn sees_mark(marks: &NanMarks, visible: Range<usize>) -> bool {
    visible.into_iter().any(|position| marks[position / STEP] >> (position % STEP) & 1 == 1)
}

/// Replaces the scores of a query by weights, split for tiles: 32 scores become 32 high parts and 32 low parts.
/// Invisible positions of the blocks get the weight zero. Returns the largest score and the sum of the weights.
///
/// # Safety
/// The machine has AVX-512.
#[inline(always)]
unsafe fn weights<L: Lanes>(
    lanes: L,
    softmax: Softmax,
    scores: &mut [f32],
    visible: Range<usize>,
    blocks: Range<usize>,
) -> (f32, f32) {
    let positions = blocks.start * STEP..blocks.end * STEP;
    if visible.is_empty() {
        scores[positions].fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    let result = softmax.weights(lanes, scores, visible.clone());
    scores[positions.start..visible.start].fill(0.0);
    scores[visible.end..positions.end].fill(0.0);
    for block in scores[positions].chunks_exact_mut(STEP) {
        let block = block.as_mut_ptr();
        // SAFETY: all 32 values are read before they are overwritten.
        unsafe { split(block, block.cast(), block.cast::<u16>().add(STEP)) };
    }
    result
}

/// The tiles of queries of one task, over one span.
struct QueryTiles<'a> {
    queries: &'a Queries<'a>,
    span: usize,
    ahead: KvPrefetch<'a>,
    /// Number of rows that tile registers are configured for.
    configured: usize,
}

impl QueryTiles<'_> {
    /// The keys of a block of 32 positions.
    fn keys_of(&self, block: usize) -> KvLines {
        let HeadPages { layout, .. } = self.queries.pages();
        let position = self.span * SPAN + block * STEP;
        let first = position % layout.shape.block_len / ROWS * LINE;
        self.lines(
            &self.queries.pages().memory().keys,
            position,
            first,
            layout.shape.block_len / ROWS * LINE,
            self.ahead.of_keys(position),
        )
    }

    /// The values of a block of 32 positions.
    fn values_of(&self, block: usize) -> KvLines {
        let HeadPages { layout, .. } = self.queries.pages();
        let position = self.span * SPAN + block * STEP;
        let first = position % layout.shape.block_len / STEP * layout.shape.head_size * LINE;
        self.lines(&self.queries.pages().memory().values, position, first, 2 * LINE, self.ahead.of_values(position))
    }

    /// Lines of the block that holds a position, from byte `first` of its region on.
    fn lines(
        &self,
        bytes: &SharedSlice<'_, u8>,
        position: usize,
        first: usize,
        stride: usize,
        (ahead, step): ([*const u8; STREAMS], usize),
    ) -> KvLines {
        let layout = &self.queries.pages().layout;
        let region = self.queries.pages().region(bytes, position);
        let rows = layout.shape.head_size / 2;
        assert!(first + (rows - 1) * stride + 2 * LINE <= region.len());
        KvLines { start: region[first..].as_ptr(), rows, stride, dtype: layout.dtype, ahead, step }
    }

    fn count(&self) -> usize {
        self.queries.len().div_ceil(ROWS)
    }

    fn queries_of(&self, tile: usize) -> Range<usize> {
        tile * ROWS..((tile + 1) * ROWS).min(self.queries.len())
    }

    /// The blocks of 32 positions, within `positions`, that are visible to one of a tile's queries.
    fn blocks(&self, tile: usize, positions: Range<usize>) -> Range<usize> {
        let queries = self.queries_of(tile);
        let seen = self.seen(queries.start, queries.end - 1);
        let (start, end) = (seen.start.max(positions.start), seen.end.min(positions.end));
        if start < end { start / STEP..end.div_ceil(STEP) } else { 0..0 }
    }

    /// The positions that are visible to queries `first` to `last`: the visible range does not begin or end earlier in
    /// later queries.
    fn seen(&self, first: usize, last: usize) -> Range<usize> {
        self.queries.visible(first, self.span).start..self.queries.visible(last, self.span).end
    }

    /// The blocks of 32 positions that are visible to any query.
    fn all_blocks(&self) -> Range<usize> {
        let seen = self.seen(0, self.queries.len() - 1);
        seen.start / STEP..seen.end.div_ceil(STEP)
    }

    /// Configures the tile registers for `rows` rows.
    ///
    /// # Safety
    /// The machine has AMX.
    unsafe fn configure(&mut self, rows: usize) {
        if self.configured != rows {
            // SAFETY: passed on from the caller.
            unsafe { TileProduct::tile_shapes(rows).load() };
            self.configured = rows;
        }
    }

    /// Computes the scores of all queries.
    ///
    /// # Safety
    /// The layout is for tiles, queries are split, and `scores` has a row for every query.
    unsafe fn scores(&mut self, planes: &mut SplitBuffers, scores: &mut [f32]) {
        let head_size = self.queries.head_size();
        let (steps, plane) = (head_size / STEP, KEYS * head_size);
        let SplitBuffers { queries, memory } = planes;
        let memory = memory.grow(2 * plane).as_mut_ptr().cast::<u8>();
        let right = RightTiles { high: memory, low: plane * 2, stride: KEYS * 4, step: ROWS * KEYS * 4 };
        let all = self.all_blocks();
        for first in (all.start / 2 * 2..all.end).step_by(KEYS / STEP) {
            let here = first.max(all.start)..(first + 2).min(all.end);
            for block in here {
                let lines = self.keys_of(block);
                // SAFETY: the memory has `head_size / 2` rows of two lines for each of two adjacent blocks, in both
                // planes.
                unsafe { lines.split(memory.add((block - first) * 2 * LINE), plane * 2, KEYS * 4) };
            }
            for tile in 0..self.count() {
                let blocks = self.blocks(tile, first * STEP..first * STEP + KEYS);
                let rows = self.queries_of(tile);
                let left = queries[tile * steps * 2 * ROWS * STEP..].as_ptr().cast::<u8>();
                let left = LeftTiles { high: left, low: ROWS * LINE, stride: LINE, step: 2 * ROWS * LINE };
                // SAFETY: the queries' rows of scores hold whole blocks.
                unsafe {
                    self.configure(rows.len());
                    let right = right.columns((blocks.start.saturating_sub(first)) * STEP);
                    let out = scores[rows.start * SCORES_STRIDE + blocks.start * STEP..].as_mut_ptr();
                    let product = TileProduct { left, right, steps, out, stride: SCORES_BYTES, planes: self.planes() };
                    product.run(blocks.len() * 2, true);
                }
            }
        }
    }

    /// Adds up the weighted values in the state. With `clear`, NaN and infinite values count as zeros. Returns the
    /// positions that have some.
    ///
    /// # Safety
    /// As for `scores`, which hold weights, and `state` has a row for every query.
    unsafe fn values(
        &mut self,
        planes: &mut SplitBuffers,
        scores: &[f32],
        state: &mut State<'_>,
        clear: bool,
    ) -> NanMarks {
        let head_size = self.queries.head_size();
        // The number of blocks that fit into the first-level cache together with the weights; one tile gains nothing
        // from several.
        let at_once = match self.count() {
            1 => 1,
            _ if head_size <= 64 => 4,
            _ => 2,
        };
        let block_bytes = STEP * head_size * 2;
        let memory = planes.memory.grow(at_once * block_bytes).as_mut_ptr().cast::<u8>();
        let low = at_once * block_bytes;
        let mut marks = [0; SPAN / STEP];
        state.values.fill(0.0);
        let all = self.all_blocks();
        for first in (all.start / at_once * at_once..all.end).step_by(at_once) {
            for block in first.max(all.start)..(first + at_once).min(all.end) {
                let lines = self.values_of(block);
                // SAFETY: the memory has `head_size` lines, two in a row, for each block in both planes.
                unsafe {
                    let to = memory.add((block - first) * block_bytes);
                    lines.split(to, low, 2 * LINE);
                    if clear {
                        marks[block] = lines.clear_non_finite(to, low, head_size);
                    }
                }
            }
            for tile in 0..self.count() {
                let blocks = self.blocks(tile, first * STEP..(first + at_once) * STEP);
                if blocks.is_empty() {
                    continue;
                }
                let rows = self.queries_of(tile);
                let weights = scores[rows.start * SCORES_STRIDE + blocks.start * STEP..].as_ptr().cast::<u8>();
                let left = LeftTiles { high: weights, low: LINE, stride: SCORES_BYTES, step: 2 * LINE };
                let skipped = (blocks.start - first) * block_bytes;
                let right =
                    RightTiles { high: memory.wrapping_add(skipped), low, stride: head_size * 4, step: block_bytes };
                // SAFETY: the queries' rows of values have `head_size` floats.
                unsafe {
                    self.configure(rows.len());
                    let out = state.values[rows.start * head_size..].as_mut_ptr();
                    let (steps, stride) = (blocks.len(), head_size * 4);
                    let product = TileProduct { left, right, steps, out, stride, planes: self.planes() };
                    product.run(head_size / ROWS, false);
                }
            }
        }
        marks
    }

    fn planes(&self) -> usize {
        if self.queries.pages().layout.dtype == DType::BF16 { 1 } else { 2 }
    }
}

#[cfg(test)]
mod tests {
    use pellucid_tensor::{Attention, Backend, DType, HeadShape, KvLayer, SequenceSpan, StoreKv, Tensor};

    use crate::{CpuBackend, CpuOptions, Isa};

    const LEN: usize = 600;
    const KV_HEADS: usize = 2;

    fn values_from(len: usize, seed: u32) -> Vec<f32> {
        (0..len as u32).map(|i| (i.wrapping_add(seed).wrapping_mul(2_654_435_761) >> 8) as f32 / 4e6 - 2.1).collect()
    }

    fn tensor(backend: &CpuBackend, values: &[f32], cols: usize) -> Tensor {
        let mut tensor = backend.zeros(DType::F32, values.len() / cols, cols).unwrap();
        backend.write(values, &mut tensor).unwrap();
        tensor
    }

    /// The attention of all rows of one sequence.
    fn attend(backend: &CpuBackend, dtype: DType, shape: HeadShape, values: &[f32]) -> Vec<f32> {
        let (cols, kv_cols) = (shape.num_heads * shape.head_size, KV_HEADS * shape.head_size);
        let blocks: Vec<u32> = (0..LEN.div_ceil(shape.block_len) as u32).rev().collect();
        let slot = |p: usize| blocks[p / shape.block_len] * shape.block_len as u32 + (p % shape.block_len) as u32;
        let memory = || backend.zeros(dtype, blocks.len(), shape.block_len * kv_cols).unwrap();
        let mut kv = KvLayer { keys: memory(), values: memory() };
        let keys = tensor(backend, &values_from(LEN * kv_cols, 1), kv_cols);
        let slots: Vec<u32> = (0..LEN).map(slot).collect();
        let store = StoreKv { keys: &keys, values: &tensor(backend, values, kv_cols), slots: &slots, shape };
        backend.store_kv(store, &mut kv).unwrap();
        let mut out = backend.zeros(DType::F32, LEN, cols).unwrap();
        let attention = Attention {
            queries: &tensor(backend, &values_from(LEN * cols, 3), cols),
            kv: &kv,
            positions: &(0..LEN as u32).collect::<Vec<_>>(),
            sequences: &[SequenceSpan { rows: 0..LEN, blocks: 0..blocks.len() }],
            block_tables: &blocks,
            shape,
            scale: 0.1,
            soft_cap: None,
            window: Some(555),
        };
        backend.attention(attention, &mut out).unwrap();
        let mut result = vec![0.0; LEN * cols];
        backend.read(&out, &mut result).unwrap();
        result
    }

    #[test]
    fn tiles_agree_with_vectors_and_a_nan_reaches_only_rows_that_see_it() {
        let backend = |isa: Isa| CpuBackend::new(CpuOptions { num_threads: 2, isa });
        let (Ok(tiles), Ok(vectors)) = (backend(Isa::Amx), backend(Isa::Avx512)) else { return };
        for (dtype, num_heads, head_size, block_len) in
            [(DType::F16, 6, 64, 32), (DType::BF16, 2, 96, 64), (DType::F16, 14, 32, 96), (DType::F16, 8, 160, 32)]
        {
            let shape = HeadShape { num_heads, num_kv_heads: KV_HEADS, head_size, block_len };
            let (cols, kv_cols) = (num_heads * head_size, KV_HEADS * head_size);
            let mut values = values_from(LEN * kv_cols, 2);
            let by_tiles = attend(&tiles, dtype, shape, &values);
            for (i, (x, y)) in by_tiles.iter().zip(attend(&vectors, dtype, shape, &values)).enumerate() {
                assert!((x - y).abs() < 2e-4, "{dtype} {shape:?}: value {i} is {x} by tiles and {y} by vectors");
            }
            // One value of position 33 of the second kv head; rows from 588 on do not see it.
            values[33 * kv_cols + head_size + 7] = f32::NAN;
            let poisoned = attend(&tiles, dtype, shape, &values);
            for row in 0..LEN {
                for (i, x) in poisoned[row * cols..(row + 1) * cols].iter().enumerate() {
                    let sees = (33..588).contains(&row) && i >= cols / 2;
                    assert_eq!(x.is_nan(), sees, "{dtype} {shape:?}: row {row}, value {i}");
                    assert!(sees || x.to_bits() == by_tiles[row * cols + i].to_bits(), "row {row}, value {i}");
                }
            }
        }
    }
}
