//! Look-ahead: the next step is on the device before the current one has ended, so that the device never waits for the
//! sampler.
//!
//! While a step runs in which every request decodes, [`Engine::launch_ahead`] plans and launches the next one. Its
//! input tokens are not known yet; the device takes the tokens that its digests assume (`RowDigest::assumed`). Sampling
//! stays with the sampler. When it samples another token, or when a sequence ends, is paused, preempted or cancelled
//! meanwhile, that sequence's chunk of the launched step is discarded and the position is computed again in a later
//! step. The other chunks hold, because no row depends on other rows.
//!
//! A block of KV memory may therefore change its owner while a launched step still writes into it. That is sound,
//! because devices run steps in the order in which they are launched:
//!
//! - Such a step writes one position past what is committed of its sequence. No block that other sequences can find
//!   holds that position: a block enters the prefix index when all its positions are committed.
//! - The next owner of the block writes each position in a step that is launched later, and reads no position that it
//!   has not written. The same holds for the sequence itself when it computes the position again, and for copies of
//!   blocks.

use super::{Engine, PlannedChunk, Step};
use crate::sequence::Sequence;

/// The step that was launched before the one that it follows had ended.
#[derive(Default)]
pub(super) struct LookAhead {
    step: Option<Step>,
}

impl LookAhead {
    pub(super) fn is_launched(&self) -> bool {
        self.step.is_some()
    }

    /// Forgets the launched step, when the device that computes it is lost.
    pub(super) fn clear(&mut self) {
        self.step = None;
    }
}

/// The state of look-ahead for one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SequenceLookAhead {
    /// The device had assumed the token that was sampled last, so it will probably be right about the next one.
    is_predictable: bool,
    /// The launched step computes the sequence's next position, from the right token as far as is known.
    is_launched: bool,
    /// A digest did not determine the token, and the row of logits was overwritten. The position is computed again and
    /// the whole row is fetched.
    needs_row: bool,
}

impl SequenceLookAhead {
    pub(crate) fn needs_row(self) -> bool {
        self.needs_row
    }

    /// Discards the sequence's chunk of the launched step.
    pub(crate) fn discard(&mut self) {
        self.is_launched = false;
    }

    /// Records whether the sequence's row has to be computed again, because its digest did not determine the token.
    pub(crate) fn set_needs_row(&mut self, needs_row: bool) {
        self.needs_row = needs_row;
        self.is_launched &= !needs_row;
    }

    /// Compares the token that was sampled with the one that the device assumed when it went on.
    pub(crate) fn sampled(&mut self, token: u32, assumed: Option<u32>) {
        self.is_predictable = assumed == Some(token);
        self.is_launched &= self.is_predictable;
        self.needs_row = false;
    }
}

impl Engine {
    /// Takes the step that was launched ahead, without the chunks that no longer hold.
    pub(super) fn take_launched_step(&mut self) -> Option<Step> {
        let mut step = self.look_ahead.step.take()?;
        let num_chunks = step.chunks.len();
        step.chunks.retain(|chunk| {
            let takes_steps = self.running.get(&chunk.group).is_some_and(|group| group.takes_steps());
            let sequence = self.sequence_mut(chunk);
            sequence
                .is_some_and(|sequence| std::mem::take(&mut sequence.look_ahead.is_launched) && sequence.is_running())
                && takes_steps
        });
        self.stats.tokens_discarded += (num_chunks - step.chunks.len()) as u64;
        Some(step)
    }

    /// Launches the step that follows `step`, if the device can tell everyone's next token. A failure is ignored here:
    /// the step is scheduled again in its turn, and if it fails then, its requests are told.
    pub(super) fn launch_ahead(&mut self, step: &mut Step) {
        let Some(chunks) = self.chunks_after(&step.chunks) else { return };
        // Also when launching fails: a part of the new step may be on the device.
        step.rows_are_gone = true;
        let mut next = Step::new(chunks, step.turn, self.spare_logits.pop().unwrap_or_default());
        if self.launch(&mut next).is_err() {
            return;
        }
        for chunk in &next.chunks {
            self.sequence_mut(chunk).expect("it was just planned").look_ahead.is_launched = true;
        }
        self.stats.steps_ahead += 1;
        self.look_ahead.step = Some(next);
    }

    /// Plans the step after one in which every request samples its token from a digest, and takes the blocks for it.
    /// Returns `None` if a prompt, or a request that could start instead, would have to wait for that step.
    fn chunks_after(&mut self, chunks: &[PlannedChunk]) -> Option<Vec<PlannedChunk>> {
        let served = self.running.values().filter(|group| group.takes_steps()).flat_map(|group| &group.sequences);
        let is_everyone = served.filter(|sequence| sequence.finish.is_none()).count() == chunks.len();
        // Steps that took longer than the tenants' shares are made good by a step that is planned anew.
        if !is_everyone || self.time_share.is_in_debt() || !self.model.is_asynchronous(chunks.len()) {
            return None;
        }
        let context_len = self.model.config().context_len;
        let mut next: Vec<PlannedChunk> = Vec::new();
        for chunk in chunks {
            let group = &self.running[&chunk.group];
            let sequence = &group.sequences[chunk.sequence];
            if !chunk.is_decode
                || chunk.draft_len() > 0
                || !sequence.look_ahead.is_predictable
                // The device assumes tokens without regard to the grammar, and a wrong one delays the sequence.
                || sequence.is_masked()
                || self.digest_queries(chunk).is_empty()
            {
                return None;
            }
            let position = chunk.positions.end;
            let ends_now = group.request.limit(position + 1, context_len).is_some();
            if !ends_now {
                let (positions, first_wanted_row) = (position..position + 1, next.len());
                let token_from_row = Some(chunk.first_wanted_row);
                next.push(PlannedChunk { positions, first_wanted_row, token_from_row, ..chunk.clone() });
            } else if self.num_waiting() > 0 {
                // A waiting request may start where this sequence ends.
                return None;
            }
        }
        if self.would_draft(chunks) {
            return None;
        }
        let has_blocks = next.iter().all(|chunk| self.take_block_ahead(chunk));
        (!next.is_empty() && has_blocks).then_some(next)
    }

    fn sequence_mut(&mut self, chunk: &PlannedChunk) -> Option<&mut Sequence> {
        self.running.get_mut(&chunk.group)?.sequences.get_mut(chunk.sequence)
    }
}
