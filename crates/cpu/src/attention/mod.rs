//! Softmax attention over the paged keys and values of many sequences.
//!
//! For a query q at position p and the visible positions j: `out = sum_j softmax_j(cap(scale * q·k_j)) v_j`.
//!
//! Batch invariance: positions are divided into spans of [`SPAN`] at absolute positions. Within a span a row computes
//! the largest of its scores, then exponentials, their sum and the weighted sum of values, each in one fixed order
//! ([`softmax`]); spans are joined in ascending order ([`state`]). So the bits of a row depend only on its query, its
//! position and the stored keys and values. A row in a prefill of 512, the same row alone, one thread or many: all do
//! the same arithmetic. The block that holds a position does not matter.
//!
//! Bytes moved: each visible key and value once for all query heads that share it and for all rows of a task. One row
//! is bound by memory. A chunk of rows is a matrix product and bound by arithmetic: f32 with vectors, or, with AMX and
//! keys and values of 16 bits, bf16 in two parts (`amx`).

#[cfg(target_arch = "x86_64")]
mod amx;
mod decoded_tile;
mod kv_layout;
mod lanes;
mod new_rows;
mod plan;
mod softmax;
mod span;
mod state;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_tensor::{
    Attend, Attention, BidirectionalAttention, DType, HeadShape, KvLayer, SequenceSpan, StoreKv, Tensor, Values,
};

use crate::memory::{floats, floats_mut};
use crate::pool::{Direction, Pool};
use crate::shared_slice::SharedSlice;
use crate::simd::Level;
use kv_layout::{KvBytes, KvLayout};
use lanes::{LaneKernel, Lanes};
use new_rows::{NewRows, Rotation};
use plan::{Piece, Plan};
use span::{Queries, Span, Workspace};
use state::State;

/// Positions of a span: the work on one row is divided between threads only at multiples of it.
const SPAN: usize = 512;

/// A buffer of floats that begins on a cache line, so that no vector crosses one: that would halve the speed of every
/// load.
#[derive(Debug, Default)]
struct AlignedFloats(Vec<f32>);

impl AlignedFloats {
    /// Returns `len` floats with unspecified values.
    fn with_len(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len + lanes::LANES {
            self.0.resize(len + lanes::LANES, 0.0);
        }
        let skip = self.0.as_ptr().align_offset(64);
        &mut self.0[skip..][..len]
    }
}

/// The arguments of a call, shared by all tasks.
#[derive(Clone, Copy)]
struct Call<'a> {
    queries: &'a [f32],
    /// How queries are rotated first.
    rotation: Option<Rotation<'a>>,
    /// Keys and values that are stored first, if that is part of the call.
    new_rows: Option<NewRows<'a>>,
    memory: KvBytes<'a>,
    layout: KvLayout,
    /// The last position that each row sees. If the call stores keys and values, it is the row's own.
    positions: &'a [u32],
    /// The first position that each row sees; without it, `window` determines the position.
    first_visible: Option<&'a [u32]>,
    sequences: &'a [SequenceSpan],
    block_tables: &'a [u32],
    scale: f32,
    soft_cap: Option<f32>,
    window: Option<usize>,
    /// A score for each head that takes part in its softmax and has no value.
    sinks: Option<&'a [f32]>,
}

thread_local! {
    static PLAN: RefCell<Plan> = RefCell::default();
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// Writes the keys and values of every row into their slots.
pub(crate) fn store(level: Level, pool: &Pool, store: &StoreKv<'_>, kv: &mut KvLayer) {
    let layout = KvLayout::new(level, kv_dtype(kv), store.shape);
    let new_rows = NewRows::new(&layout, None, store.keys, Values::Rows(store.values), store.slots);
    // SAFETY: the layer is borrowed uniquely, and nothing else uses it during the call.
    unsafe { new_rows.store_rows(level, pool, &layout, &KvBytes::of(kv), 0..store.slots.len()) };
}

/// Computes attention for every row into `out`.
pub(crate) fn attention(level: Level, pool: &Pool, attention: &Attention<'_>, out: &mut Tensor) {
    let Attention { queries, kv, positions, sequences, block_tables, shape, scale, soft_cap, window } = *attention;
    let layout = KvLayout::new(level, kv_dtype(kv), shape);
    let call = Call {
        queries: rows_of(queries, &layout, positions, out),
        rotation: None,
        new_rows: None,
        memory: KvBytes::read_only(kv),
        layout,
        positions,
        first_visible: None,
        sequences,
        block_tables,
        scale,
        soft_cap,
        window,
        sinks: None,
    };
    call.run(level, pool, floats_mut(out));
}

/// Computes attention of encoders for every row into `out`.
pub(crate) fn bidirectional(level: Level, pool: &Pool, attention: &BidirectionalAttention<'_>, out: &mut Tensor) {
    let BidirectionalAttention { queries, kv, first_visible, last_visible, sequences, block_tables, shape, scale } =
        *attention;
    assert_eq!(first_visible.len(), last_visible.len(), "a range of positions for each row");
    let layout = KvLayout::new(level, kv_dtype(kv), shape);
    let call = Call {
        queries: rows_of(queries, &layout, last_visible, out),
        rotation: None,
        new_rows: None,
        memory: KvBytes::read_only(kv),
        layout,
        positions: last_visible,
        first_visible: Some(first_visible),
        sequences,
        block_tables,
        scale,
        soft_cap: None,
        window: None,
        sinks: None,
    };
    call.run(level, pool, floats_mut(out));
}

/// Rotates queries and keys, stores keys and values, and computes attention for every row into `out`.
///
/// If one task has all rows of a sequence, it stores them itself: they are then in the cache of the thread that reads
/// them.
pub(crate) fn attend(
    level: Level,
    pool: &Pool,
    attend: &Attend<'_>,
    [queries, keys]: [&Tensor; 2],
    kv: &mut KvLayer,
    out: &mut Tensor,
) {
    let Attend { rope, values, slots, positions, sequences, block_tables, shape, .. } = *attend;
    let Attend { scale, soft_cap, window, sinks, .. } = *attend;
    let layout = KvLayout::new(level, kv_dtype(kv), shape);
    let layout = match values {
        Values::Rows(_) => layout,
        Values::InKeys { first } => layout.with_values_in_keys(first),
    };
    let rotation = rope.map(|rope| Rotation::new(rope, shape.head_size, positions.len()));
    let call = Call {
        queries: rows_of(queries, &layout, positions, out),
        rotation,
        new_rows: Some(NewRows::new(&layout, rotation, keys, values, slots)),
        memory: KvBytes::of(kv),
        layout,
        positions,
        first_visible: None,
        sequences,
        block_tables,
        scale,
        soft_cap,
        window,
        sinks: sinks.map(floats),
    };
    call.run(level, pool, floats_mut(out));
}

fn kv_dtype(kv: &KvLayer) -> DType {
    assert_eq!(kv.values.dtype(), kv.keys.dtype(), "keys and values have one format");
    kv.keys.dtype()
}

/// Checks the shapes of queries and output, and returns the queries.
fn rows_of<'a>(queries: &'a Tensor, layout: &KvLayout, positions: &[u32], out: &Tensor) -> &'a [f32] {
    let HeadShape { num_heads, num_kv_heads, head_size, block_len } = layout.shape;
    assert!(num_heads.is_multiple_of(num_kv_heads) && head_size > 0 && block_len > 0);
    assert_eq!((queries.rows(), queries.cols()), (positions.len(), num_heads * head_size));
    assert_eq!((out.rows(), out.cols()), (positions.len(), num_heads * layout.value_size()));
    floats(queries)
}

impl<'a> Call<'a> {
    fn run(&self, level: Level, pool: &Pool, out: &mut [f32]) {
        let rows_in_sequences: usize = self.sequences.iter().map(|sequence| sequence.rows.len()).sum();
        assert_eq!(rows_in_sequences, self.positions.len(), "every row belongs to a sequence");
        PLAN.with_borrow_mut(|plan| {
            plan.make(self, pool.num_threads());
            let mut partial = std::mem::take(&mut plan.partial);
            let places = [SharedSlice::new(out), SharedSlice::new(partial.with_len(plan.partial_len))];
            if let Some(new_rows) = self.new_rows {
                debug_assert!(
                    self.writes_own_blocks(plan, &new_rows),
                    "a sequence writes only blocks that no other one has"
                );
                let others = plan.pieces.iter().filter(|piece| !piece.stores).flat_map(|piece| piece.rows.clone());
                // SAFETY: no task runs yet, so nothing else uses the memory.
                unsafe { new_rows.store_rows(level, pool, &self.layout, &self.memory, others) };
            }
            let compute = |task: usize, next: Option<usize>| self.compute(level, plan, task, next, places);
            if plan.from_both_ends {
                pool.run_from_both_ends(plan.num_tasks, None, &|task, direction| match direction {
                    Direction::Up => compute(task, Some(task + 1).filter(|&next| next < plan.num_tasks)),
                    Direction::Down => compute(task, task.checked_sub(1)),
                });
            } else {
                pool.run(plan.num_tasks, &|task| compute(task, None));
            }
            plan.partial = partial;
        });
    }

    /// Runs one task: stores its rows if that is its part, then computes their attention. `next` is the task that the
    /// thread probably runs next.
    fn compute(
        &self,
        level: Level,
        plan: &Plan,
        task: usize,
        next: Option<usize>,
        [output, partial]: [SharedSlice<'_, f32>; 2],
    ) {
        let num_kv_heads = self.layout.shape.num_kv_heads;
        let (index, piece, kv_head, span) = plan.task(task, num_kv_heads);
        if let (Some(new_rows), true) = (self.new_rows, piece.stores) {
            let spans = span.map_or(piece.spans.clone(), |span| piece.spans.start + span..piece.spans.start + span + 1);
            for row in piece.rows.clone().filter(|&row| spans.contains(&(self.positions[row] as usize / SPAN))) {
                for &kind in new_rows.kinds() {
                    // SAFETY: no other sequence has the row's block (a sequence writes only blocks of its own), and no
                    // other task has this head and span of the sequence.
                    unsafe { new_rows.store_head(level, &self.layout, &self.memory, row, kv_head, kind) };
                }
            }
        }
        let next = next.map(|next| {
            let (_, piece, kv_head, span) = plan.task(next, num_kv_heads);
            NextSpan { blocks: self.blocks(piece.sequence), kv_head, span: piece.spans.start + span.unwrap_or(0) }
        });
        let missing = &plan.missing[index * num_kv_heads + kv_head];
        WORKSPACE.with_borrow_mut(|workspace| {
            let mut rotated = std::mem::take(&mut workspace.queries);
            // SAFETY: rows are stored either before all tasks run, or by the task above, which is the only one that
            // reads the region.
            let queries =
                unsafe { Queries::new(self, level, piece.sequence, piece.rows.clone(), kv_head, &mut rotated) };
            lanes::run(level, Task { queries, piece, span, next, output, partial, missing, workspace });
            workspace.queries = rotated;
        });
    }

    /// Whether the blocks that tasks write while others read belong to one sequence each. The caller of the backend is
    /// responsible for that; checking it takes too long for release builds.
    fn writes_own_blocks(&self, plan: &Plan, new_rows: &NewRows<'_>) -> bool {
        plan.pieces.iter().filter(|piece| piece.stores).all(|piece| {
            piece.rows.clone().all(|row| {
                let block = new_rows.block(&self.layout, row);
                let others = (0..self.sequences.len()).filter(|&sequence| sequence != piece.sequence);
                others.into_iter().all(|sequence| !self.blocks(sequence).contains(&block))
            })
        })
    }

    fn blocks(&self, sequence: usize) -> &'a [u32] {
        &self.block_tables[self.sequences[sequence].blocks.clone()]
    }

    /// The positions that the queries of a row see.
    #[inline(always)]
    fn visible(&self, row: usize) -> Range<usize> {
        let end = self.positions[row] as usize + 1;
        match self.first_visible {
            Some(first) => first[row] as usize..end,
            None => self.window.map_or(0, |window| end.saturating_sub(window))..end,
        }
    }
}

/// The span of a kv head of a sequence that a thread probably reads next. Only the AMX kernel prefetches it.
#[derive(Clone, Copy)]
#[cfg_attr(not(target_arch = "x86_64"), expect(dead_code))]
struct NextSpan<'a> {
    blocks: &'a [u32],
    kv_head: usize,
    span: usize,
}

/// The attention of one piece for one kv head: over all of its spans, or over one.
struct Task<'a> {
    queries: Queries<'a>,
    piece: &'a Piece,
    /// Index among the piece's spans.
    span: Option<usize>,
    next: Option<NextSpan<'a>>,
    output: SharedSlice<'a, f32>,
    partial: SharedSlice<'a, f32>,
    missing: &'a AtomicUsize,
    workspace: &'a mut Workspace,
}

impl LaneKernel for Task<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Task { queries, piece, span, next, output, partial, missing, workspace } = self;
        let (num_queries, value_size) = (queries.len(), queries.value_size());
        let len = State::len(num_queries, value_size);
        let mut joined = std::mem::take(&mut workspace.joined);
        let mut joined_state = State::of(joined.with_len(len), num_queries, value_size);
        joined_state.clear();
        let Some(span) = span else {
            let mut current = std::mem::take(&mut workspace.current);
            let mut state = State::of(current.with_len(len), num_queries, value_size);
            for span in piece.spans.clone() {
                let next = if span + 1 < piece.spans.end { Some(queries.next(span + 1)) } else { next };
                lanes.call(Span { queries: &queries, span, next, workspace: &mut *workspace, state: &mut state });
                joined_state.join(lanes, &state);
            }
            // SAFETY: only this task writes this kv head of its rows.
            unsafe { queries.write(&joined_state, &output) };
            (workspace.joined, workspace.current) = (joined, current);
            return;
        };
        let num_spans = piece.spans.len();
        let first = piece.partial + queries.kv_head() * num_spans * len;
        {
            // SAFETY: only this task uses this state until it decrements the counter below.
            let place = unsafe { partial.part(first + span * len, len) };
            let mut state = State::of(place, num_queries, value_size);
            let (span, workspace) = (piece.spans.start + span, &mut *workspace);
            lanes.call(Span { queries: &queries, span, next, workspace, state: &mut state });
        }
        // The task that computes the last missing span joins all of them in order.
        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            for span in 0..num_spans {
                // SAFETY: the task of that span is done; the counter orders its writes before this.
                let place = unsafe { partial.part(first + span * len, len) };
                joined_state.join(lanes, &State::of(place, num_queries, value_size));
            }
            // SAFETY: only the task that finds no span missing writes these rows.
            unsafe { queries.write(&joined_state, &output) };
        }
        workspace.joined = joined;
    }
}
