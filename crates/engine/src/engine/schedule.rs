//! Decides what the next step computes: a chunk for each running sequence, and the blocks of KV memory that it writes
//! to.

use std::ops::Range;

use super::{Engine, PlannedChunk, Step};
use crate::scheduler::{Pending, share_out};
use crate::sequence_group::GroupId;

/// Maximum rows of prompts that are scored in one step. Each needs its whole row of logits, which no other row of a
/// prompt does.
const MAX_SCORED_ROWS: usize = 128;

impl Engine {
    /// Returns the next step: the one that was launched ahead, or a new one. `None` if no sequence can be computed now.
    pub(super) fn schedule(&mut self) -> Option<Step> {
        if let Some(step) = self.take_launched_step() {
            return Some(step);
        }
        let chunks = self.plan_chunks();
        self.is_stalled = chunks.is_empty();
        (!chunks.is_empty()).then(|| Step::new(chunks, self.spare_logits.pop().unwrap_or_default()))
    }

    /// Gives every running sequence a chunk, as the scheduler shares out the rows, and takes the blocks for it.
    fn plan_chunks(&mut self) -> Vec<PlannedChunk> {
        let mut candidates: Vec<(GroupId, usize)> = Vec::new();
        let mut pending: Vec<Pending> = Vec::new();
        let mut scored_left = MAX_SCORED_ROWS;
        for (&id, group) in self.running.iter().filter(|(_, group)| group.takes_steps()) {
            // Beams advance together: the last token of each is computed when all others have been.
            let caught_up = group.sequences.iter().all(|sequence| sequence.num_left() <= 1);
            let waits_for_others = group.search.is_some() && group.sequences.len() > 1 && !caught_up;
            for (i, sequence) in group.sequences.iter().enumerate().filter(|(_, sequence)| sequence.is_running()) {
                let is_decode = sequence.num_left() == 1 && sequence.num_computed >= group.request.prompt.len();
                let mut num_left = sequence.num_left() - usize::from(waits_for_others);
                if group.scores_next(sequence) {
                    num_left = num_left.min(scored_left);
                    scored_left -= num_left;
                }
                if num_left > 0 {
                    candidates.push((id, i));
                    pending.push(Pending {
                        tenant: group.tenant(),
                        num_left,
                        is_decode: is_decode && !waits_for_others,
                    });
                }
            }
        }
        let given = share_out(&pending, self.options.step_tokens, self.options.chunk_len, &self.served);
        let mut chunks = Vec::new();
        for (((group, sequence), pending), num_tokens) in candidates.into_iter().zip(&pending).zip(given) {
            if num_tokens > 0 && self.take_blocks(group, sequence, num_tokens) {
                let start = self.running[&group].sequences[sequence].num_computed;
                chunks.push(PlannedChunk {
                    group,
                    sequence,
                    positions: start..start + num_tokens,
                    is_decode: pending.is_decode,
                    wanted: self.wanted_rows(group, sequence, num_tokens),
                    first_wanted_row: 0,
                    token_from_row: None,
                });
            }
        }
        // Taking blocks may have preempted a request that was planned before.
        chunks.retain(|chunk: &PlannedChunk| self.running.contains_key(&chunk.group));
        let mut num_wanted = 0;
        for chunk in &mut chunks {
            chunk.first_wanted_row = num_wanted;
            num_wanted += chunk.wanted.len();
        }
        chunks
    }

    /// Returns the rows of a chunk whose logits are needed: the last one if the chunk reaches the sequence's end, and
    /// every row of a prompt that is scored.
    fn wanted_rows(&self, id: GroupId, sequence: usize, num_tokens: usize) -> Range<usize> {
        let group = &self.running[&id];
        let sequence = &group.sequences[sequence];
        if group.scores_next(sequence) {
            return 0..num_tokens;
        }
        let is_complete = sequence.num_computed + num_tokens == sequence.tokens.len();
        (if is_complete { num_tokens - 1 } else { num_tokens })..num_tokens
    }
}
