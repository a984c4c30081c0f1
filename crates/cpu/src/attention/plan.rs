//! [`Plan`]: divides the rows of one call into tasks.

use std::ops::Range;
use std::sync::atomic::AtomicUsize;

use super::state::State;
use super::{AlignedFloats, Call, SPAN};

/// Maximum floats in states of spans: 128 MB. Many rows deep in a long context would need gigabytes; they make enough
/// tasks without dividing spans.
const MAX_PARTIAL_LEN: usize = 32 << 20;

/// Rows of one sequence that are computed together, for each of the kv heads.
#[derive(Debug, Clone)]
pub(super) struct Piece {
    pub(super) sequence: usize,
    pub(super) rows: Range<usize>,
    /// The spans that are visible to any of the rows.
    pub(super) spans: Range<usize>,
    /// Offset of the states of its spans in [`Plan::partial`], if each span is a task.
    pub(super) partial: usize,
    pub(super) first_task: usize,
    /// Whether its tasks store the rows' keys and values. They may if the piece has all rows of its sequence, so that
    /// no other piece reads them.
    pub(super) stores: bool,
}

/// The tasks of one call, kept by the calling thread so that only the first step allocates.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) pieces: Vec<Piece>,
    pub(super) num_tasks: usize,
    /// Whether each span is a separate task, because there are too few pieces to keep all threads busy.
    pub(super) split: bool,
    /// Whether threads take tasks from both ends, so that they know which memory they read next: if few rows share what
    /// is read, memory is the bound.
    pub(super) from_both_ends: bool,
    /// States of spans until all spans of their rows are computed.
    pub(super) partial: AlignedFloats,
    pub(super) partial_len: usize,
    /// For each piece and kv head, the number of spans that are not computed yet.
    pub(super) missing: Vec<AtomicUsize>,
}

impl Plan {
    /// Divides the rows of every sequence into pieces, and decides whether each span is a separate task.
    pub(super) fn make(&mut self, call: &Call<'_>, num_threads: usize) {
        // Several tasks for each thread, so that none waits long for the last one.
        const TASKS_PER_THREAD: usize = 4;
        // Queries that share one decoding of a tile: enough that decoding costs little compared with the products.
        const QUERIES_PER_PIECE: usize = 128;
        // Up to this number of queries in a piece, reading keys and values takes longer than arithmetic.
        const MAX_QUERIES_BOUND_BY_MEMORY: usize = 16;
        let shape = call.layout.shape;
        let wanted = TASKS_PER_THREAD * num_threads;
        let group = shape.num_heads / shape.num_kv_heads;
        let fair_share = (call.positions.len() * shape.num_kv_heads).div_ceil(wanted);
        let rows_per_piece = fair_share.min(QUERIES_PER_PIECE / group).max(8);
        // Whole tiles of sixteen queries, if possible.
        let rows_of_tiles = 16 / 16.min(1 << group.trailing_zeros());
        let rows_per_piece = (rows_per_piece / rows_of_tiles * rows_of_tiles).max(rows_per_piece.min(rows_of_tiles));
        self.pieces.clear();
        for (sequence, span) in call.sequences.iter().enumerate() {
            // The last rows see the most positions. They go first, so that short tasks come at the end.
            let mut end = span.rows.end;
            while end > span.rows.start {
                let rows = end.saturating_sub(rows_per_piece).max(span.rows.start)..end;
                let visible = call.visible(rows.start).start..call.visible(rows.end - 1).end;
                end = rows.start;
                let stores = call.new_rows.is_some() && rows == span.rows;
                let spans = visible.start / SPAN..visible.end.div_ceil(SPAN);
                self.pieces.push(Piece { sequence, rows, spans, partial: 0, first_task: 0, stores });
            }
        }
        let several_spans = self.pieces.iter().any(|piece| piece.spans.len() > 1);
        let state_len = |piece: &Piece| State::len(piece.rows.len() * group, call.layout.value_size());
        let states = |piece: &Piece| piece.spans.len() * shape.num_kv_heads * state_len(piece);
        self.split = several_spans
            && num_threads > 1
            && self.pieces.len() * shape.num_kv_heads < wanted
            && self.pieces.iter().map(states).sum::<usize>() <= MAX_PARTIAL_LEN;
        self.from_both_ends =
            self.split || self.pieces.iter().all(|piece| piece.rows.len() * group <= MAX_QUERIES_BOUND_BY_MEMORY);
        self.num_tasks = 0;
        self.missing.clear();
        let mut partial = 0;
        for piece in &mut self.pieces {
            piece.first_task = self.num_tasks;
            piece.partial = partial;
            // If a block crosses the edge of a span, one task would read it while another stores into it.
            piece.stores &= !self.split || SPAN.is_multiple_of(shape.block_len);
            let num_spans = if self.split { piece.spans.len() } else { 1 };
            self.num_tasks += num_spans * shape.num_kv_heads;
            partial += num_spans * shape.num_kv_heads * state_len(piece);
            self.missing.extend((0..shape.num_kv_heads).map(|_| AtomicUsize::new(num_spans)));
        }
        self.partial_len = if self.split { partial } else { 0 };
    }

    /// Returns the index of a task's piece, the piece, the kv head, and the index of the span in the piece if each span
    /// is a task.
    pub(super) fn task(&self, task: usize, num_kv_heads: usize) -> (usize, &Piece, usize, Option<usize>) {
        let index = self.pieces.partition_point(|piece| piece.first_task <= task) - 1;
        let piece = &self.pieces[index];
        let task = task - piece.first_task;
        (index, piece, task % num_kv_heads, self.split.then_some(task / num_kv_heads))
    }
}

#[cfg(test)]
mod tests {
    use pellucid_tensor::{Backend, DType, HeadShape, KvLayer, SequenceSpan};

    use super::super::kv_layout::{KvBytes, KvLayout};
    use super::*;
    use crate::simd::{Isa, Level};
    use crate::{CpuBackend, CpuOptions};

    /// The plan for the last `num_rows` rows of a sequence of `depth` positions.
    fn plan(num_rows: usize, depth: usize, num_threads: usize) -> Plan {
        let shape = HeadShape { num_heads: 64, num_kv_heads: 8, head_size: 128, block_len: 32 };
        let backend = CpuBackend::new(CpuOptions { num_threads: 1, isa: Isa::Scalar }).expect("no instructions");
        let memory = || backend.zeros(DType::F16, 1, 1).expect("one number");
        let positions: Vec<u32> = (depth - num_rows..depth).map(|position| position as u32).collect();
        let kv = KvLayer { keys: memory(), values: memory() };
        let call = Call {
            queries: &[],
            rotation: None,
            new_rows: None,
            memory: KvBytes::read_only(&kv),
            layout: KvLayout::new(Level::of(Isa::Scalar).expect("no instructions"), DType::F16, shape),
            positions: &positions,
            first_visible: None,
            sequences: &[SequenceSpan { rows: 0..num_rows, blocks: 0..0 }],
            block_tables: &[],
            scale: 1.0,
            soft_cap: None,
            window: None,
            sinks: None,
        };
        let mut plan = Plan::default();
        plan.make(&call, num_threads);
        plan
    }

    #[test]
    fn one_row_is_split_at_any_depth_and_many_rows_while_their_states_fit() {
        assert!(!plan(1, 300, 8).split, "one span is one task");
        assert!(plan(1, 4096, 4).split && plan(1, 1 << 20, 128).split);
        assert!(plan(100, 4096, 64).split);
        let deep = plan(500, 128 << 10, 128);
        assert!(!deep.split && deep.partial_len == 0 && deep.num_tasks >= 128, "{} tasks", deep.num_tasks);
    }
}
