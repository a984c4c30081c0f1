//! Decides what the next step computes: a chunk for each running sequence, and the blocks of KV memory that it writes
//! to.

use std::ops::Range;

use super::{Engine, PlannedChunk, Step};
use crate::kv_cache::TenantId;
use crate::scheduler::{Pending, Plan, Turn, share_out};
use crate::sequence_group::{GroupId, SequenceGroup};

/// Maximum rows of prompts that are scored in one step. Each needs its whole row of logits, which no other row of a
/// prompt does.
const MAX_SCORED_ROWS: usize = 128;

impl Engine {
    /// Returns the next step: the one that was launched ahead, or a new one. `None` if no sequence can be computed now.
    pub(super) fn schedule(&mut self) -> Option<Step> {
        if let Some(step) = self.take_launched_step() {
            return Some(step);
        }
        self.forget_drafts();
        let (mut chunks, turn) = self.plan_chunks();
        self.is_stalled = chunks.is_empty();
        if self.is_stalled {
            return None;
        }
        self.add_forced(&mut chunks, turn);
        let drafting_time = self.add_drafts(&mut chunks, turn);
        let mut num_wanted = 0;
        for chunk in &mut chunks {
            chunk.first_wanted_row = num_wanted;
            num_wanted += chunk.wanted.len();
        }
        let step = Step::new(chunks, turn, self.spare_logits.pop().unwrap_or_default());
        Some(Step { drafting_time, ..step })
    }

    /// Gives every running sequence a chunk, as the scheduler shares out the rows, and takes the blocks for it.
    fn plan_chunks(&mut self) -> (Vec<PlannedChunk>, Turn) {
        let mut candidates: Vec<(GroupId, usize)> = Vec::new();
        let mut pending: Vec<Pending> = Vec::new();
        let scored_tenants = self.scored_tenants();
        let mut scored_left: Vec<usize> =
            vec![(MAX_SCORED_ROWS / scored_tenants.len().max(1)).max(1); scored_tenants.len()];
        for (&id, group) in self.running.iter().filter(|(_, group)| group.takes_steps()) {
            // Beams advance together: the last token of each is computed when all others have been.
            let caught_up = group.sequences.iter().all(|sequence| sequence.num_left() <= 1);
            let waits_for_others = group.search.is_some() && group.sequences.len() > 1 && !caught_up;
            let mut has_pending = false;
            for (i, sequence) in group.sequences.iter().enumerate().filter(|(_, sequence)| sequence.is_running()) {
                let is_decode = sequence.num_left() == 1 && sequence.num_computed >= group.request.prompt.len();
                let mut num_left = sequence.num_left() - usize::from(waits_for_others);
                if group.scores_next(sequence) {
                    let tenant = scored_tenants.binary_search(&group.tenant()).expect("a tenant with such a prompt");
                    num_left = num_left.min(scored_left[tenant]);
                    scored_left[tenant] -= num_left;
                }
                if num_left > 0 {
                    candidates.push((id, i));
                    pending.push(Pending {
                        tenant: group.tenant(),
                        num_left,
                        depth: sequence.num_computed,
                        is_decode: is_decode && !waits_for_others,
                        num_skipped: sequence.num_skipped,
                        joins_previous: group.search.is_some() && !waits_for_others && has_pending,
                    });
                    has_pending = true;
                }
            }
        }
        let Plan { given, turn } = self.share_step(&pending);
        let mut chunks = self.take_chunks(&candidates, &pending, &given);
        // The tenants whose turn it is have to wait for memory: the others need not.
        if chunks.is_empty() && turn != Turn::Alone {
            let given = share_out(&pending, self.options.step_tokens, self.options.chunk_len, &self.served);
            chunks = self.take_chunks(&candidates, &pending, &given);
        }
        (chunks, turn)
    }

    /// Returns the tenants that have a prompt to score now, in ascending order. They get equal parts of
    /// [`MAX_SCORED_ROWS`].
    fn scored_tenants(&self) -> Vec<TenantId> {
        let groups = self.running.values().filter(|group| group.takes_steps());
        let scored = groups.filter(|group| group.sequences.iter().any(|s| s.is_running() && group.scores_next(s)));
        let mut tenants: Vec<TenantId> = scored.map(SequenceGroup::tenant).collect();
        tenants.sort_unstable();
        tenants.dedup();
        tenants
    }

    /// Takes the blocks for the rows that sequences were given.
    fn take_chunks(
        &mut self,
        candidates: &[(GroupId, usize)],
        pending: &[Pending],
        given: &[usize],
    ) -> Vec<PlannedChunk> {
        let mut chunks = Vec::new();
        for ((&(group, sequence), pending), &num_tokens) in candidates.iter().zip(pending).zip(given) {
            if let Some(sequence) = self.running.get_mut(&group).and_then(|group| group.sequences.get_mut(sequence)) {
                sequence.num_skipped = if num_tokens > 0 { 0 } else { sequence.num_skipped.saturating_add(1) };
            }
            if num_tokens > 0 && self.take_blocks(group, sequence, num_tokens) {
                let start = self.running[&group].sequences[sequence].num_computed;
                chunks.push(PlannedChunk {
                    group,
                    tenant: pending.tenant,
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
