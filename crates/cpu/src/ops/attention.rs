//! Softmax attention over the paged keys and values of one sequence.
//!
//! For a query q at position p and the visible positions j: `out = sum_j softmax_j(cap(scale * q·k_j)) v_j`.
//! Keys are taken in tiles whose edges are multiples of [`TILE`] positions, with a running maximum and sum (online softmax), so the
//! order of every sum depends on p alone: not on chunks, on blocks, on other rows or on threads.
//! Bytes moved: each visible key and value once for all query heads that share them.

use pellucid_tensor::{Attention, HeadShape, SequenceSpan};

use super::elementwise;
use crate::math;
use crate::simd::{Simd, vectorized};

/// Positions in a tile; a power of two, unrelated to the length of a block.
const TILE: usize = 32;

/// Where the keys and values of a sequence lie.
#[derive(Clone, Copy)]
pub(crate) struct Pages<'a> {
    pub(crate) keys: &'a [f32],
    pub(crate) values: &'a [f32],
    pub(crate) blocks: &'a [u32],
    pub(crate) shape: HeadShape,
}

impl Pages<'_> {
    /// Index of the first number of the key (and of the value) at a position.
    #[inline(always)]
    fn offset(&self, position: usize, kv_head: usize) -> usize {
        let HeadShape { num_kv_heads, head_size, block_len, .. } = self.shape;
        let block = self.blocks[position / block_len] as usize;
        ((block * num_kv_heads + kv_head) * block_len + position % block_len) * head_size
    }

    fn key(&self, position: usize, kv_head: usize) -> &[f32] {
        let offset = self.offset(position, kv_head);
        &self.keys[offset..offset + self.shape.head_size]
    }

    #[inline(always)]
    fn value(&self, position: usize, kv_head: usize) -> &[f32] {
        let offset = self.offset(position, kv_head);
        &self.values[offset..offset + self.shape.head_size]
    }
}

/// The softmax so far: its largest score, the sum of `exp(score - largest)`, and the sum of values with those weights.
struct Running<'a> {
    largest: f32,
    sum: f32,
    values: &'a mut [f32],
}

/// Attention of one row's query heads that share `kv_head`; `queries` and `out` are `[heads of the group][head_size]`.
pub(crate) fn attend<S: Simd>(
    simd: S,
    pages: Pages<'_>,
    attention: &Attention<'_>,
    position: usize,
    kv_head: usize,
    queries: &[f32],
    out: &mut [f32],
) {
    let head_size = pages.shape.head_size;
    let first = attention.window.map_or(0, |window| (position + 1).saturating_sub(window));
    out.fill(0.0);
    let mut running: Vec<Running<'_>> = out
        .chunks_exact_mut(head_size)
        .map(|values| Running { largest: f32::NEG_INFINITY, sum: 0.0, values })
        .collect();
    let mut tile = first / TILE * TILE;
    while tile <= position {
        let visible = tile.max(first)..(tile + TILE).min(position + 1);
        for (query, running) in queries.chunks_exact(head_size).zip(&mut running) {
            let mut scores = [0.0f32; TILE];
            let scores = &mut scores[..visible.len()];
            score(simd, pages, attention, query, kv_head, visible.start, scores);
            accumulate(simd, pages, kv_head, visible.start, scores, running);
        }
        tile += TILE;
    }
    for running in running {
        elementwise::scale(simd, 1.0 / running.sum, running.values);
    }
}

/// `scores[i] = cap(scale * q · k[start + i])`, four keys at a time.
fn score<S: Simd>(
    simd: S,
    pages: Pages<'_>,
    attention: &Attention<'_>,
    query: &[f32],
    kv_head: usize,
    start: usize,
    scores: &mut [f32],
) {
    let mut i = 0;
    while i + 4 <= scores.len() {
        let keys: [&[f32]; 4] = std::array::from_fn(|j| pages.key(start + i + j, kv_head));
        scores[i..i + 4].copy_from_slice(&simd.dot_tile([query], keys)[0]);
        i += 4;
    }
    for (j, score) in scores.iter_mut().enumerate().skip(i) {
        *score = simd.dot(query, pages.key(start + j, kv_head));
    }
    elementwise::scale(simd, attention.scale, scores);
    if let Some(cap) = attention.soft_cap {
        elementwise::soft_cap(simd, cap, scores);
    }
}

vectorized! {
    /// Adds one tile to the running softmax. Turns `scores` into weights.
    fn accumulate<S: Simd>(
        pages: Pages<'_>,
        kv_head: usize,
        start: usize,
        scores: &mut [f32],
        running: &mut Running<'_>,
    ) {
        let largest = scores.iter().fold(running.largest, |largest, &score| largest.max(score));
        let correction = math::exp(running.largest - largest);
        scores.iter_mut().for_each(|score| *score = math::exp(*score - largest));
        running.largest = largest;
        running.sum = running.sum * correction + scores.iter().sum::<f32>();
        if correction != 1.0 {
            running.values.iter_mut().for_each(|value| *value *= correction);
        }
        for (j, &weight) in scores.iter().enumerate() {
            let value = pages.value(start + j, kv_head);
            for (sum, value) in running.values.iter_mut().zip(value) {
                *sum = S::multiply_add(weight, *value, *sum);
            }
        }
    }
}

/// Writes one row's keys (or values), `[kv heads][head_size]`, into its slot of the blocks.
pub(crate) fn store_row(row: &[f32], slot: usize, shape: HeadShape, blocks: &mut [f32]) {
    let HeadShape { num_kv_heads, head_size, block_len, .. } = shape;
    let (block, offset) = (slot / block_len, slot % block_len);
    for (kv_head, head) in row.chunks_exact(head_size).enumerate() {
        let start = ((block * num_kv_heads + kv_head) * block_len + offset) * head_size;
        blocks[start..start + head_size].copy_from_slice(head);
    }
}

/// The sequence that each row belongs to, as an index into `sequences`.
pub(crate) fn sequence_of_rows(sequences: &[SequenceSpan], num_rows: usize) -> Vec<usize> {
    let mut owners = vec![usize::MAX; num_rows];
    for (i, sequence) in sequences.iter().enumerate() {
        owners[sequence.rows.clone()].fill(i);
    }
    assert!(owners.iter().all(|&owner| owner != usize::MAX), "every row belongs to a sequence");
    owners
}
