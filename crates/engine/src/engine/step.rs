//! A step on its way through the device, and the chunks that it consists of.

use std::ops::Range;
use std::time::{Duration, Instant};

use pellucid_model::Logits;

use crate::kv_cache::TenantId;
use crate::scheduler::{Turn, Work};
use crate::sequence_group::GroupId;

/// One forward pass over chunks of several sequences.
pub(crate) struct Step {
    pub(super) chunks: Vec<PlannedChunk>,
    /// The tenants that it was planned for.
    pub(super) turn: Turn,
    pub(super) logits: Logits,
    /// Time that a draft model took for its drafts.
    pub(super) drafting_time: Duration,
    /// When the device began with it; `None` until it is launched.
    pub(super) launched: Option<Instant>,
    /// When its logits arrived.
    pub(super) finished: Option<Instant>,
    /// The step after it has been launched and overwrites the rows of logits that were not fetched from the device.
    pub(super) rows_are_gone: bool,
}

/// The positions that a step computes of one sequence.
#[derive(Debug, Clone)]
pub(super) struct PlannedChunk {
    pub(super) group: GroupId,
    pub(super) tenant: TenantId,
    /// Index among the group's sequences.
    pub(super) sequence: usize,
    pub(super) positions: Range<usize>,
    pub(super) is_decode: bool,
    /// Rows of this chunk whose logits are wanted, counted from its start.
    pub(super) wanted: Range<usize>,
    /// Index of the first wanted row among the wanted rows of the step.
    pub(super) first_wanted_row: usize,
    /// For a chunk launched ahead, whose token is not sampled yet: the wanted row of the step before that gives the
    /// token.
    pub(super) token_from_row: Option<usize>,
}

impl PlannedChunk {
    pub(super) fn num_tokens(&self) -> usize {
        self.positions.len()
    }

    /// Number of drafted tokens: the rows after the first of a sequence that decodes.
    pub(super) fn draft_len(&self) -> usize {
        if self.is_decode { self.num_tokens() - 1 } else { 0 }
    }

    pub(super) fn work(&self) -> Work {
        Work::chunk(self.positions.start, self.num_tokens())
    }
}

impl Step {
    /// A step that is not launched yet. `logits` are those of an earlier step, kept for their memory.
    pub(super) fn new(chunks: Vec<PlannedChunk>, turn: Turn, logits: Logits) -> Step {
        Step {
            chunks,
            turn,
            logits,
            drafting_time: Duration::ZERO,
            launched: None,
            finished: None,
            rows_are_gone: false,
        }
    }
}
