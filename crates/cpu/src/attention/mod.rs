//! Softmax attention over the paged keys and values of many sequences.
//!
//! For a query q at position p and the visible positions j: `out = sum_j softmax_j(cap(scale * q·k_j)) v_j`.
//!
//! The law. Positions are cut into spans of [`SPAN`], whose edges are absolute. Within a span a row takes the largest of its scores,
//! then exponentials, their sum and the weighted sum of values, each in one fixed order ([`kernel`]); spans are joined in ascending
//! order ([`state`]). So the bits of a row depend on its query, its position and the stored keys and values: a row among 512 of a
//! prompt, the same row alone, one thread or many, all do the same arithmetic. Where a block lies plays no part.
//!
//! Bytes moved: each visible key and value once for all query heads that share it, and for as many rows of a chunk as one task takes.
//! One row is bound by memory; a chunk of rows is a matrix product and bound by arithmetic: of f32 by vectors, or, with AMX and keys and
//! values of 16 bits, of bf16 in two parts (`tiles`).

mod kernel;
mod lanes;
mod pages;
mod span;
mod state;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tiles;

use std::cell::RefCell;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use pellucid_tensor::{Attention, Tensor};

use crate::memory::{SharedOutput, bytes, floats, floats_mut};
use crate::pool::{Direction, Pool};
use crate::simd::Level;
use lanes::{Kernel, Lanes};
use pages::Layout;
pub(crate) use pages::store;
use span::{Queries, Workspace};
use state::State;

/// Positions between two edges where the work on one row may be split.
const SPAN: usize = 512;

/// Rows of one sequence that are computed together, for each of the kv heads.
#[derive(Debug, Clone)]
struct Piece {
    sequence: usize,
    rows: Range<usize>,
    /// The spans that any of the rows sees.
    spans: Range<usize>,
    /// Where the states of its spans begin in [`Plan::partial`], when spans are tasks of their own.
    partial: usize,
    first_task: usize,
}

/// The tasks of one call, kept by the calling thread so that a step allocates nothing after the first.
#[derive(Debug, Default)]
struct Plan {
    pieces: Vec<Piece>,
    num_tasks: usize,
    /// Whether each span is a task of its own: worth it when there are too few pieces to keep all threads busy.
    split: bool,
    /// States of spans that wait for the others of their row.
    partial: Room,
    partial_len: usize,
    /// For each piece and kv head, the spans that are not computed yet.
    missing: Vec<AtomicUsize>,
}

/// Numbers that begin on a cache line, so that no vector of them crosses one: that would halve the speed of every load.
#[derive(Debug, Default)]
struct Room(Vec<f32>);

impl Room {
    /// Room for `len` numbers; what they are is not promised.
    fn room_for(&mut self, len: usize) -> &mut [f32] {
        if self.0.len() < len + lanes::LANES {
            self.0.resize(len + lanes::LANES, 0.0);
        }
        let skip = self.0.as_ptr().align_offset(64);
        &mut self.0[skip..][..len]
    }
}

/// One call, as all tasks see it.
struct Call<'a> {
    attention: &'a Attention<'a>,
    queries: &'a [f32],
    keys: &'a [u8],
    values: &'a [u8],
    layout: Layout,
}

thread_local! {
    static PLAN: RefCell<Plan> = RefCell::default();
    static WORKSPACE: RefCell<Workspace> = RefCell::default();
}

/// Computes every row of `attention` into `out`.
pub(crate) fn attend(level: Level, pool: &Pool, attention: &Attention<'_>, out: &mut Tensor) {
    let shape = attention.shape;
    let (num_rows, cols) = (attention.queries.rows(), shape.num_heads * shape.head_size);
    assert_eq!((attention.queries.cols(), out.rows(), out.cols()), (cols, num_rows, cols));
    assert_eq!(attention.positions.len(), num_rows);
    assert!(shape.num_heads.is_multiple_of(shape.num_kv_heads) && shape.head_size > 0 && shape.block_len > 0);
    let rows_in_sequences: usize = attention.sequences.iter().map(|sequence| sequence.rows.len()).sum();
    assert_eq!(rows_in_sequences, num_rows, "every row belongs to a sequence");
    let dtype = attention.kv.keys.dtype();
    assert_eq!(attention.kv.values.dtype(), dtype, "keys and values have one format");
    let call = Call {
        attention,
        queries: floats(attention.queries),
        keys: bytes(&attention.kv.keys),
        values: bytes(&attention.kv.values),
        layout: Layout::new(level, dtype, shape),
    };
    PLAN.with_borrow_mut(|plan| {
        plan.make(&call, pool.num_threads());
        let Plan { pieces, num_tasks, split, partial, partial_len, missing } = plan;
        let (output, partial) = (SharedOutput::new(floats_mut(out)), SharedOutput::new(partial.room_for(*partial_len)));
        let compute = |task: usize, next: Option<usize>| {
            let index = pieces.partition_point(|piece| piece.first_task <= task) - 1;
            let piece = &pieces[index];
            let task = task - piece.first_task;
            let (kv_head, span) = (task % shape.num_kv_heads, split.then_some(task / shape.num_kv_heads));
            let next = next
                .and_then(|next| next.checked_sub(piece.first_task))
                .map(|next| (next % shape.num_kv_heads, piece.spans.start + next / shape.num_kv_heads));
            let missing = &missing[index * shape.num_kv_heads + kv_head];
            WORKSPACE.with_borrow_mut(|workspace| {
                let task = Task { call: &call, piece, kv_head, span, next, output, partial, missing, workspace };
                lanes::run(level, task);
            });
        };
        if *split {
            // A thread knows where it will go on reading.
            pool.run_from_both_ends(*num_tasks, None, &|task, direction| match direction {
                Direction::Up => compute(task, Some(task + 1)),
                Direction::Down => compute(task, task.checked_sub(1)),
            });
        } else {
            pool.run(*num_tasks, &|task| compute(task, None));
        }
    });
}

impl Plan {
    /// Cuts the rows of every sequence into pieces, and decides whether their spans are to be tasks of their own.
    fn make(&mut self, call: &Call<'_>, num_threads: usize) {
        // Tasks for each thread, so that none waits long for the last.
        const TASKS_PER_THREAD: usize = 4;
        // Queries that share one decoding of a tile: enough that it costs little beside the products.
        const QUERIES_PER_PIECE: usize = 128;
        let Call { attention, layout, .. } = call;
        let shape = layout.shape;
        let wanted = TASKS_PER_THREAD * num_threads;
        let group = shape.num_heads / shape.num_kv_heads;
        let fair_share = (attention.positions.len() * shape.num_kv_heads).div_ceil(wanted);
        let rows_per_piece = fair_share.min(QUERIES_PER_PIECE / group).max(8);
        // Whole tiles of queries, where that is possible.
        let rows_of_tiles = 16 / 16.min(1 << group.trailing_zeros());
        let rows_per_piece = (rows_per_piece / rows_of_tiles * rows_of_tiles).max(rows_per_piece.min(rows_of_tiles));
        self.pieces.clear();
        for (sequence, span) in attention.sequences.iter().enumerate() {
            // The last rows see the most positions and go first, so that the short tasks fill the end.
            let mut end = span.rows.end;
            while end > span.rows.start {
                let rows = end.saturating_sub(rows_per_piece).max(span.rows.start)..end;
                let positions =
                    attention.positions[rows.start] as usize..attention.positions[rows.end - 1] as usize + 1;
                let first = first_visible(attention, positions.start);
                end = rows.start;
                self.pieces.push(Piece {
                    sequence,
                    rows,
                    spans: first / SPAN..positions.end.div_ceil(SPAN),
                    partial: 0,
                    first_task: 0,
                });
            }
        }
        let several_spans = self.pieces.iter().any(|piece| piece.spans.len() > 1);
        self.split = several_spans && num_threads > 1 && self.pieces.len() * shape.num_kv_heads < wanted;
        self.num_tasks = 0;
        self.missing.clear();
        let mut partial = 0;
        for piece in &mut self.pieces {
            piece.first_task = self.num_tasks;
            piece.partial = partial;
            let num_spans = if self.split { piece.spans.len() } else { 1 };
            self.num_tasks += num_spans * shape.num_kv_heads;
            partial += num_spans * shape.num_kv_heads * State::len(piece.rows.len() * group, shape.head_size);
            self.missing.extend((0..shape.num_kv_heads).map(|_| AtomicUsize::new(num_spans)));
        }
        self.partial_len = if self.split { partial } else { 0 };
    }
}

/// The first position that a query at `position` sees.
fn first_visible(attention: &Attention<'_>, position: usize) -> usize {
    attention.window.map_or(0, |window| (position + 1).saturating_sub(window))
}

/// One piece for one kv head: all of its spans, or one.
struct Task<'a> {
    call: &'a Call<'a>,
    piece: &'a Piece,
    kv_head: usize,
    /// Counted from the piece's first.
    span: Option<usize>,
    /// The kv head and the span where the thread is likely to go on.
    next: Option<(usize, usize)>,
    output: SharedOutput,
    partial: SharedOutput,
    missing: &'a AtomicUsize,
    workspace: &'a mut Workspace,
}

impl Kernel for Task<'_> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Task { call, piece, kv_head, span, next, output, partial, missing, workspace } = self;
        let queries = Queries::new(call, piece.sequence, piece.rows.clone(), kv_head);
        let (num_queries, head_size) = (queries.len(), call.layout.shape.head_size);
        let len = State::len(num_queries, head_size);
        let mut joined = std::mem::take(&mut workspace.joined);
        let mut joined_state = State::of(joined.room_for(len), num_queries, head_size);
        joined_state.clear();
        let Some(span) = span else {
            let mut current = std::mem::take(&mut workspace.current);
            let mut state = State::of(current.room_for(len), num_queries, head_size);
            for span in piece.spans.clone() {
                queries.span(lanes, span, Some((kv_head, span + 1)), workspace, &mut state);
                joined_state.join(lanes, &state);
            }
            // SAFETY: a task owns its kv head of its rows, and the output stays borrowed until all tasks are done.
            unsafe { queries.write(&joined_state, &output) };
            (workspace.joined, workspace.current) = (joined, current);
            return;
        };
        let num_spans = piece.spans.len();
        let first = piece.partial + kv_head * num_spans * len;
        {
            // SAFETY: this task alone has this place until it says below that it is done.
            let place = unsafe { partial.part(first + span * len, len) };
            let mut state = State::of(place, num_queries, head_size);
            queries.span(lanes, piece.spans.start + span, next, workspace, &mut state);
        }
        // Whoever computes the last missing span joins them all, in their order.
        if missing.fetch_sub(1, Ordering::AcqRel) == 1 {
            for span in 0..num_spans {
                // SAFETY: the task of that span is done, which the counter ordered before this.
                let place = unsafe { partial.part(first + span * len, len) };
                joined_state.join(lanes, &State::of(place, num_queries, head_size));
            }
            // SAFETY: as above.
            unsafe { queries.write(&joined_state, &output) };
        }
        workspace.joined = joined;
    }
}
