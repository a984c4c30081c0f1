//! Ends requests whose deadline has passed. Their replies end with the tokens that they have.

use std::time::Instant;

use super::Engine;
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Event, FinishReason};

impl Engine {
    /// Ends every request, running or waiting, whose deadline has passed.
    pub(super) fn end_expired(&mut self, now: Instant) {
        let is_expired =
            |group: &SequenceGroup| group.request.deadline.is_some_and(|deadline| now - group.arrived >= deadline);
        let running = self.running.iter().filter(|(_, group)| is_expired(group));
        let running: Vec<GroupId> = running.map(|(&id, _)| id).collect();
        let waiting = self.waiting.values_mut().flat_map(|queue| queue.extract_if(.., |(_, group)| is_expired(group)));
        let mut expired: Vec<SequenceGroup> = waiting.map(|(_, group)| group).collect();
        expired.extend(running.into_iter().filter_map(|id| self.running.remove(&id)));
        self.waiting.retain(|_, queue| !queue.is_empty());
        for mut group in expired {
            group.release(&mut self.cache);
            group.end_choices(FinishReason::Deadline);
            group.complete(now);
            group.sink.deliver();
            self.stats.finished_requests += 1;
        }
    }
}

impl SequenceGroup {
    /// Ends every choice that has not ended, and reports it.
    fn end_choices(&mut self, reason: FinishReason) {
        // `best_of` and beam search report their choices when they complete.
        let reports_later = self.holds_back() || self.search.is_some();
        for sequence in self.sequences.iter_mut().filter(|sequence| sequence.finish.is_none()) {
            sequence.finish = Some(reason);
            if !reports_later && !self.unwanted.contains(&sequence.choice) {
                self.sink.send(Event::ChoiceEnd { choice: sequence.choice, reason, token: None });
            }
        }
        // Until the prompt is computed there is one sequence, whatever the number of choices.
        let not_started = if self.search.is_some() { 0..0 } else { self.sequences.len()..self.request.num_choices };
        for choice in not_started.filter(|choice| !self.unwanted.contains(choice)) {
            self.sink.send(Event::ChoiceEnd { choice, reason, token: None });
        }
    }
}
