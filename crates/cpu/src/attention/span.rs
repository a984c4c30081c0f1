//! The queries of one task, and their attention over one span of positions.

use std::ops::Range;

use super::decoded_tile::{DecodeTile, HeadPages, TILE};
use super::lanes::{LANES, LaneKernel, Lanes};
use super::new_rows::KeyOrValue;
use super::softmax::{self, Softmax};
use super::state::State;
use super::{AlignedFloats, Call, NextSpan, SPAN};
use crate::math;
use crate::shared_slice::SharedSlice;
use crate::simd::Level;

/// Floats from the scores of one query to those of the next. With a power of two, all of them would share a few sets of
/// the cache.
pub(super) const SCORES_STRIDE: usize = SPAN + LANES;

/// Memory that a thread keeps from task to task.
#[derive(Debug, Default)]
pub(super) struct Workspace {
    /// A tile of keys, `[head_size][TILE]`, or of values, `[TILE][stride]`.
    tile: AlignedFloats,
    /// A tile of keys whose parts are values, before they are transposed: `[head_size][TILE]`.
    keys_with_values: AlignedFloats,
    /// `[queries][SCORES_STRIDE]`, of which SPAN are used: scores, then weights.
    pub(super) scores: AlignedFloats,
    #[cfg(target_arch = "x86_64")]
    pub(super) planes: super::amx::SplitBuffers,
    /// `[queries][head_size]`, rotated.
    pub(super) queries: AlignedFloats,
    /// States of a task that computes all of its spans: joined so far, and of the current span.
    pub(super) joined: AlignedFloats,
    pub(super) current: AlignedFloats,
}

/// Consecutive rows of one sequence, each with the query heads that share a kv head.
///
/// Query i is head `i % group` of row `i / group`. The first and the last visible position do not decrease from row to
/// row.
pub(super) struct Queries<'a> {
    call: &'a Call<'a>,
    pages: HeadPages<'a>,
    rows: Range<usize>,
    group: usize,
    /// `[queries][head_size]`
    rotated: &'a [f32],
}

impl<'a> Queries<'a> {
    /// Copies the queries of a kv head from their rows to `rotated`, and rotates them there.
    ///
    /// # Safety
    /// While the value is in use, no other thread writes the sequence's regions of `kv_head` that are read through it.
    pub(super) unsafe fn new(
        call: &'a Call<'a>,
        level: Level,
        sequence: usize,
        rows: Range<usize>,
        kv_head: usize,
        rotated: &'a mut AlignedFloats,
    ) -> Self {
        let Call { memory, layout, .. } = *call;
        // SAFETY: passed on from the caller.
        let pages = unsafe { HeadPages::new(layout, memory, call.blocks(sequence), kv_head) };
        let group = layout.shape.num_heads / layout.shape.num_kv_heads;
        let mut queries = Queries { call, pages, rows, group, rotated: &[] };
        let (len, head_size) = (queries.len(), layout.shape.head_size);
        let rotated = rotated.with_len(len * head_size);
        for (i, query) in rotated.chunks_exact_mut(head_size).enumerate() {
            query.copy_from_slice(&call.queries[queries.index(i) * head_size..][..head_size]);
            if let Some(rotation) = call.rotation {
                rotation.rotate_head(level, queries.rows.start + i / group, query);
            }
        }
        queries.rotated = rotated;
        queries
    }

    pub(super) fn kv_head(&self) -> usize {
        self.pages.kv_head
    }

    #[inline(always)]
    pub(super) fn head_size(&self) -> usize {
        self.pages.layout.shape.head_size
    }

    /// Number of values of a query's result.
    #[inline(always)]
    pub(super) fn value_size(&self) -> usize {
        self.pages.layout.value_size()
    }

    /// One of the spans, as the memory that is read next.
    pub(super) fn next(&self, span: usize) -> NextSpan<'a> {
        NextSpan { blocks: self.pages.blocks, kv_head: self.pages.kv_head, span }
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len() * self.group
    }

    /// Index of query i among the heads of all rows.
    #[inline(always)]
    fn index(&self, i: usize) -> usize {
        let (row, head) = (self.rows.start + i / self.group, self.pages.kv_head * self.group + i % self.group);
        row * self.call.layout.shape.num_heads + head
    }

    /// The positions of a span that are visible to query i, counted from the span's start.
    #[inline(always)]
    pub(super) fn visible(&self, i: usize, span: usize) -> Range<usize> {
        let visible = self.call.visible(self.rows.start + i / self.group);
        let within = |position: usize| position.saturating_sub(span * SPAN).min(SPAN);
        within(visible.start)..within(visible.end)
    }

    #[inline(always)]
    pub(super) fn query(&self, i: usize) -> &[f32] {
        &self.rotated[i * self.head_size()..][..self.head_size()]
    }

    #[cfg(target_arch = "x86_64")]
    pub(super) fn pages(&self) -> &HeadPages<'a> {
        &self.pages
    }

    #[inline(always)]
    pub(super) fn softmax(&self) -> Softmax {
        Softmax { scale: self.call.scale, soft_cap: self.call.soft_cap }
    }

    /// (first query, number of queries) of the register tiles with a query that sees a position of the tile at `start`.
    fn register_tiles<L: Lanes>(&self, span: usize, start: usize) -> impl Iterator<Item = (usize, usize)> {
        let sees = move |i: usize| {
            let visible = self.visible(i, span);
            visible.start < start + TILE && visible.end > start
        };
        (0..self.len())
            .step_by(L::TILE_QUERIES)
            .map(|first| (first, L::TILE_QUERIES.min(self.len() - first)))
            .filter(move |&(first, count)| (first..first + count).any(sees))
    }

    /// Computes the scores of up to four queries with a tile of keys.
    ///
    /// # Safety
    /// The queries exist, and `scores` points to a tile within the first query's row of scores.
    #[inline(always)]
    unsafe fn score<L: Lanes>(&self, lanes: L, first: usize, count: usize, keys: &[f32], scores: *mut f32) {
        let head_size = self.head_size();
        let query = |r: usize| self.query(first + r).as_ptr();
        // SAFETY: passed on from the caller.
        unsafe {
            let scores = |r: usize| scores.add((first + r) * SCORES_STRIDE);
            // A constant condition: the compiler then omits the match.
            if L::TILE_QUERIES == 1 {
                return softmax::score(lanes, [query(0)], keys, head_size, [scores(0)]);
            }
            match count {
                1 => softmax::score(lanes, [query(0)], keys, head_size, [scores(0)]),
                2 => softmax::score::<L, 2>(lanes, [0, 1].map(query), keys, head_size, [0, 1].map(scores)),
                3 => softmax::score::<L, 3>(lanes, [0, 1, 2].map(query), keys, head_size, [0, 1, 2].map(scores)),
                _ => softmax::score::<L, 4>(lanes, [0, 1, 2, 3].map(query), keys, head_size, [0, 1, 2, 3].map(scores)),
            }
        }
    }

    /// Divides the weighted sums by the sums of weights and writes the results.
    ///
    /// # Safety
    /// No other thread writes this kv head's results of these rows.
    pub(super) unsafe fn write(&self, state: &State<'_>, output: &SharedSlice<'_, f32>) {
        let value_size = self.value_size();
        let stride = state.stride();
        for i in 0..self.len() {
            // SAFETY: passed on from the caller.
            let out = unsafe { output.part(self.index(i) * value_size, value_size) };
            let factor = match self.call.sinks {
                None => 1.0 / state.sums[i],
                Some(sinks) => {
                    let sink = sinks[self.pages.kv_head * self.group + i % self.group];
                    factor_with_sink(state.largest[i], state.sums[i], sink)
                }
            };
            for (out, value) in out.iter_mut().zip(&state.values[i * stride..]) {
                *out = value * factor;
            }
        }
    }
}

/// Returns the factor of a query's weighted sum if its softmax has one more score: `largest` is the largest of the
/// other scores, `sum` the sum of their weights relative to it.
fn factor_with_sink(largest: f32, sum: f32, sink: f32) -> f32 {
    let common = largest.max(sink);
    let others = math::exp(largest - common);
    others / (sum * others + math::exp(sink - common))
}

/// The attention of queries over one span, which gives a state for each query. The thread probably reads `next`
/// afterwards.
pub(super) struct Span<'a, 'state> {
    pub(super) queries: &'a Queries<'a>,
    pub(super) span: usize,
    pub(super) next: Option<NextSpan<'a>>,
    pub(super) workspace: &'a mut Workspace,
    pub(super) state: &'a mut State<'state>,
}

impl LaneKernel for Span<'_, '_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Span { queries, span, next, workspace, state } = self;
        #[cfg(target_arch = "x86_64")]
        if L::TILES && queries.pages.layout.tiles {
            // SAFETY: the layout is for tiles.
            unsafe { queries.span_by_tiles(lanes, span, next, workspace, state) };
            return;
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = next;
        let head_size = queries.head_size();
        let stride = queries.value_size().next_multiple_of(LANES);
        let tile = workspace.tile.with_len(TILE * stride.max(head_size));
        let first_value = queries.pages.layout.first_value;
        let keys_with_values = workspace.keys_with_values.with_len(first_value.map_or(0, |_| TILE * head_size));
        let scores = workspace.scores.with_len(queries.len() * SCORES_STRIDE);
        state.clear();

        // Rows are in order, so the first sees the earliest position and the last the latest.
        let seen = queries.visible(0, span).start..queries.visible(queries.len() - 1, span).end;
        let tiles = (seen.start / TILE..seen.end.div_ceil(TILE)).map(|t| {
            let start = t * TILE;
            (start, seen.start.max(start)..seen.end.min(start + TILE))
        });
        let decode = |kind, start: usize, seen: Range<usize>, out: &mut [f32]| {
            let first = span * SPAN;
            let positions = first + seen.start..first + seen.end;
            lanes.call(DecodeTile { pages: &queries.pages, kind, tile: first + start, positions, out });
        };
        for (start, seen) in tiles.clone() {
            let keys = &mut tile[..TILE * head_size];
            decode(KeyOrValue::Key, start, seen, keys);
            for (first, count) in queries.register_tiles::<L>(span, start) {
                // SAFETY: `count` queries from `first` on, and a tile within each of their rows of scores.
                unsafe { queries.score(lanes, first, count, keys, scores.as_mut_ptr().add(start)) };
            }
        }

        for i in 0..queries.len() {
            let visible = queries.visible(i, span);
            if !visible.is_empty() {
                let scores = &mut scores[i * SCORES_STRIDE..][..SPAN];
                (state.largest[i], state.sums[i]) = queries.softmax().weights(lanes, scores, visible);
            }
        }

        for (start, seen) in tiles {
            let values = &mut tile[..TILE * stride];
            match first_value {
                None => decode(KeyOrValue::Value, start, seen, values),
                Some(first) => {
                    decode(KeyOrValue::Key, start, seen, keys_with_values);
                    transpose_tile(&keys_with_values[first * TILE..], values);
                }
            }
            for (first, count) in queries.register_tiles::<L>(span, start) {
                let tile = RegisterTile { queries, span, start, first, count };
                // SAFETY: the queries have rows of scores, and `state` has a row of values for every query.
                unsafe { tile.accumulate(lanes, values, scores, state) };
            }
        }
    }
}

/// Transposes the values of a tile: `[value_size][TILE]` becomes `[TILE][stride]`. Values beyond `value_size` stay.
#[inline(always)]
fn transpose_tile(values: &[f32], out: &mut [f32]) {
    let stride = out.len() / TILE;
    // A cache line of each position at a time.
    for (part, values) in values.chunks(LANES * TILE).enumerate() {
        for (position, out) in out.chunks_exact_mut(stride).enumerate() {
            for (out, row) in out[part * LANES..].iter_mut().zip(values.chunks_exact(TILE)) {
                *out = row[position];
            }
        }
    }
}

/// Queries whose sums are in registers at the same time, at one tile of a span.
struct RegisterTile<'a> {
    queries: &'a Queries<'a>,
    span: usize,
    /// Start of the tile, counted from the span's start.
    start: usize,
    first: usize,
    count: usize,
}

impl RegisterTile<'_> {
    /// The positions of the tile that are visible to query `first + r`, counted from the tile's start.
    #[inline(always)]
    fn visible(&self, r: usize) -> Range<usize> {
        let visible = self.queries.visible(self.first + r, self.span);
        let end = visible.end.clamp(self.start, self.start + TILE) - self.start;
        (visible.start.clamp(self.start, self.start + TILE) - self.start).min(end)..end
    }

    /// Adds the tile's values: for each query separately those before the first position that all of them see, then
    /// together those that all of them see, then separately the rest. For each query that is ascending order, and
    /// invisible positions are not used: an unused slot may hold anything, and zero times infinity is not zero.
    ///
    /// # Safety
    /// The queries exist, and have rows in `scores` and `state`.
    #[inline(always)]
    unsafe fn accumulate<L: Lanes>(&self, lanes: L, values: &[f32], scores: &[f32], state: &mut State<'_>) {
        // The visible range of the last query begins last, that of the first query ends first.
        let common = self.visible(self.count - 1).start..self.visible(0).end;
        let stride = state.stride();
        let rows = TileSums {
            weights: scores[self.first * SCORES_STRIDE + self.start..].as_ptr(),
            sums: state.values[self.first * stride..].as_mut_ptr(),
            stride,
        };
        // SAFETY: passed on from the caller.
        unsafe {
            if L::TILE_QUERIES == 1 {
                return rows.add::<L, 1>(lanes, 0, values, common);
            }
            if common.is_empty() {
                for r in 0..self.count {
                    rows.add::<L, 1>(lanes, r, values, self.visible(r));
                }
                return;
            }
            for r in 0..self.count {
                rows.add::<L, 1>(lanes, r, values, self.visible(r).start..common.start);
            }
            match self.count {
                1 => rows.add::<L, 1>(lanes, 0, values, common.clone()),
                2 => rows.add::<L, 2>(lanes, 0, values, common.clone()),
                3 => rows.add::<L, 3>(lanes, 0, values, common.clone()),
                _ => rows.add::<L, 4>(lanes, 0, values, common.clone()),
            }
            for r in 0..self.count {
                rows.add::<L, 1>(lanes, r, values, common.end..self.visible(r).end);
            }
        }
    }
}

/// Weights and sums of the queries of a register tile.
struct TileSums {
    weights: *const f32,
    sums: *mut f32,
    stride: usize,
}

impl TileSums {
    /// Adds the positions of `range` for `R` queries from `first` on.
    ///
    /// # Safety
    /// These queries have rows of weights, SCORES_STRIDE apart, and of sums, `stride` apart.
    #[inline(always)]
    unsafe fn add<L: Lanes, const R: usize>(&self, lanes: L, first: usize, values: &[f32], range: Range<usize>) {
        if range.is_empty() {
            return;
        }
        // SAFETY: passed on from the caller.
        unsafe {
            let weights = std::array::from_fn::<_, R, _>(|r| self.weights.add((first + r) * SCORES_STRIDE));
            let sums = std::array::from_fn::<_, R, _>(|r| self.sums.add((first + r) * self.stride));
            softmax::accumulate(lanes, weights, values, range, sums);
        }
    }
}
