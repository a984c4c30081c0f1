//! Applies control messages to running and waiting requests: pause, resume, new sampling parameters, the end of a
//! choice.

use std::time::Instant;

use super::Engine;
use crate::event::Control;
use crate::kv_cache::KvCache;
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Error, Event, FinishReason};

impl Engine {
    /// Applies the messages that have arrived since the last step, of each request up to its first update: an update
    /// rebuilds the sampler and its history, and a flood of them must not make the steps of other requests longer.
    pub(super) fn apply_controls(&mut self, now: Instant) {
        let Engine { running, waiting, cache, model, .. } = self;
        let vocab_size = model.config().vocab_size;
        let waiting = waiting.values_mut().flatten().map(|(id, group)| (*id, group));
        let mut ended: Vec<(GroupId, Result<(), Error>)> = Vec::new();
        for (id, group) in running.iter_mut().map(|(id, group)| (*id, group)).chain(waiting) {
            while let Some(control) = group.sink.control() {
                let is_update = matches!(control, Control::Update(_));
                // The end of a choice is acknowledged by `ChoiceEnd`.
                let is_acknowledged = !matches!(control, Control::End { .. });
                let outcome = group.apply(control, cache, vocab_size);
                if outcome.is_err() || group.is_finished() {
                    ended.push((id, outcome));
                    break;
                }
                if is_acknowledged {
                    group.sink.send(Event::ControlApplied { output_tokens: group.stats.output_tokens });
                }
                if is_update {
                    break;
                }
            }
        }
        for (id, outcome) in ended {
            let Some(mut group) = self.remove(id) else { continue };
            group.release(&mut self.cache);
            match outcome {
                Ok(()) => {
                    group.complete(now);
                    group.sink.deliver();
                    self.stats.finished_requests += 1;
                }
                Err(error) => {
                    group.sink.send(Event::Failed(error));
                    self.stats.failed_requests += 1;
                }
            }
        }
    }

    /// Removes a request from the running ones or from the queue.
    fn remove(&mut self, id: GroupId) -> Option<SequenceGroup> {
        let running = self.running.remove(&id);
        running.or_else(|| {
            let queues = self.waiting.values_mut();
            let group = queues.flat_map(|queue| queue.extract_if(.., |(other, _)| *other == id)).next();
            self.waiting.retain(|_, queue| !queue.is_empty());
            group.map(|(_, group)| group)
        })
    }
}

impl SequenceGroup {
    fn apply(&mut self, control: Control, cache: &mut KvCache, vocab_size: usize) -> Result<(), Error> {
        match control {
            Control::Pause => self.is_paused = true,
            Control::Resume => self.is_paused = false,
            Control::Update(params) => {
                self.request.sampling = *params;
                for sequence in &mut self.sequences {
                    let sampler = self.request.sampler(sequence.choice, vocab_size)?;
                    // The window of the penalties may have changed. Mirostat starts anew unless it was already on.
                    let (prompt, output) = sequence.tokens.split_at(self.request.prompt.len());
                    sequence.history = sampler.history(prompt);
                    output.iter().for_each(|&token| sequence.history.push(token));
                    if sequence.state.mu == 0.0 {
                        sequence.state = sampler.state();
                    }
                    sequence.sampler = sampler;
                    // The step launched ahead has digests for the old parameters.
                    sequence.look_ahead.discard();
                }
            }
            Control::End { choice } if self.search.is_none() && !self.holds_back() => self.end_choice(choice, cache),
            Control::End { .. } => {}
        }
        Ok(())
    }

    /// Ends a choice with the tokens that it has. During prefill the first sequence stands for all choices: it goes on
    /// while any of them is wanted.
    fn end_choice(&mut self, choice: usize, cache: &mut KvCache) {
        let width = self.request.width();
        if self.sequences.len() < width {
            if choice < width && !self.unwanted.contains(&choice) {
                self.unwanted.push(choice);
                self.sink.send(Event::ChoiceEnd { choice, reason: FinishReason::Stop, token: None });
            }
            if self.unwanted.len() < width {
                return;
            }
            self.sequences[0].finish = Some(FinishReason::Stop);
        }
        let ended = self.sequences.iter_mut().find(|s| s.choice == choice && s.finish.is_none());
        if let Some(sequence) = ended {
            sequence.end(FinishReason::Stop, cache);
            self.sink.send(Event::ChoiceEnd { choice, reason: FinishReason::Stop, token: None });
        }
    }
}
