//! Running ahead: the next step is on the device before the one that it follows has ended.
//!
//! While a step runs in which everybody decodes, the next one is planned and launched with tokens that the device itself takes to be
//! chosen: its digests say which (`RowDigest::assumed`). Choosing stays the sampler's. When it chooses otherwise, or when a sequence
//! ends, is paused, preempted or cancelled meanwhile, that sequence's part of the step ahead is left out of what is committed, and the
//! position is computed again in a later step. The others' parts hold, because no row depends on its company.
//!
//! Blocks of KV memory may therefore change hands while a step is on its way that still writes into them. That is sound, because
//! devices take up steps in the order in which they are launched:
//!
//! - Such a step writes one position behind what was committed of its sequence. No full block that others can find holds that position:
//!   blocks are entered into an index when all their positions are committed.
//! - Whoever gets the block next writes each position in a step that is launched later, and reads no position that it has not written.
//!   So does the sequence itself when it computes the position again. Copies of blocks are made in the same order.

use super::{Engine, Planned, Step};
use crate::sequence::Sequence;

impl Engine {
    /// Launches the step that follows the one under way, where everybody's next token can be left to the device. Failing to is nobody's
    /// error: the step comes in its turn, and if it fails again that is told.
    pub(super) fn launch_ahead(&mut self, step: &mut Step) {
        let Some(plan) = self.foresee(&step.plan) else { return };
        // Also when it fails: a part of it may be on the device.
        step.rows_are_gone = true;
        let mut ahead = self.new_step(plan);
        if self.begin_forward(&mut ahead).is_err() {
            return;
        }
        for planned in &ahead.plan {
            self.sequence_mut(planned).expect("it was just planned").is_ahead = true;
        }
        self.stats.steps_ahead += 1;
        self.ahead = Some(ahead);
    }

    /// What follows a step in which everybody who is served draws a token by a digest; memory is made sure of. Nothing that would have
    /// to wait for it: a prompt, or a request that could begin in its place.
    fn foresee(&mut self, plan: &[Planned]) -> Option<Vec<Planned>> {
        let served = self.running.values().filter(|group| group.takes_steps()).flat_map(|group| &group.sequences);
        let is_everybody = served.filter(|sequence| sequence.finish.is_none()).count() == plan.len();
        if !is_everybody || !self.model.is_asynchronous(plan.len()) {
            return None;
        }
        let context_len = self.model.config().context_len;
        let mut ahead: Vec<Planned> = Vec::new();
        for planned in plan {
            let group = &self.running[&planned.group];
            let next = planned.positions.end;
            if !planned.is_decode || !group.sequences[planned.sequence].is_foreseen || self.query(planned).is_none() {
                return None;
            }
            // Whoever ends with this step leaves a place that somebody may wait for.
            if group.request.limit(next + 1, context_len).is_none() {
                let (positions, row, after) = (next..next + 1, ahead.len(), Some(planned.row));
                ahead.push(Planned { positions, row, after, ..planned.clone() });
            } else if self.num_waiting() > 0 {
                return None;
            }
        }
        let has_room = ahead.iter().all(|planned| self.has_room_ahead(planned));
        (!ahead.is_empty() && has_room).then_some(ahead)
    }

    /// A step that was launched ahead, less the parts of those for whom it went wrong.
    pub(super) fn still_wanted(&mut self, mut step: Step) -> Step {
        let num_rows = step.plan.len();
        step.plan.retain(|planned| {
            let takes_steps = self.running.get(&planned.group).is_some_and(|group| group.takes_steps());
            let sequence = self.sequence_mut(planned);
            sequence.is_some_and(|sequence| std::mem::take(&mut sequence.is_ahead) && sequence.is_running())
                && takes_steps
        });
        self.stats.tokens_discarded += (num_rows - step.plan.len()) as u64;
        step
    }

    fn sequence_mut(&mut self, planned: &Planned) -> Option<&mut Sequence> {
        self.running.get_mut(&planned.group)?.sequences.get_mut(planned.sequence)
    }
}
