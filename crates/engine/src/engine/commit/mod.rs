//! Commits a step: records what was computed, sends events, and ends replies. `sample` samples the tokens.

mod beams;
mod forced;
mod probe;
mod sample;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pellucid_sampling::{Logprobs, Workspace};

use super::run::internal_error;
use super::{Engine, Step};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Error, Event, fallible};
use sample::ChunkRows;

impl Engine {
    /// Commits the chunks of a step; ends their requests if it failed.
    pub(super) fn commit(&mut self, step: &Step, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.commit_groups(step),
            Err(error) => self.fail_step(&step.chunks, error),
        }
        // With an asynchronous device, `run` sends these events when the next step is on its way.
        if !self.model.is_asynchronous(1) || self.running.is_empty() {
            self.deliver();
        }
    }

    fn commit_groups(&mut self, step: &Step) {
        let now = self.clock.now();
        let mut by_group: Vec<(GroupId, Vec<ChunkRows<'_>>)> = Vec::new();
        for chunk in &step.chunks {
            let rows = ChunkRows { chunk, step, sampled: None };
            match by_group.last_mut().filter(|(id, _)| *id == chunk.group) {
                Some((_, parts)) => parts.push(rows),
                None => by_group.push((chunk.group, vec![rows])),
            }
        }
        for (id, parts) in by_group {
            // A panic while one request is committed must not end the others.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.commit_group(id, parts, now)));
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail_request(id, error),
                Err(panic) => self.fail_request(id, internal_error(&panic)),
            }
        }
    }

    fn commit_group(&mut self, id: GroupId, mut parts: Vec<ChunkRows<'_>>, now: Instant) -> Result<(), Error> {
        let started = self.clock.now();
        self.sample_digests(id, &mut parts)?;
        let mut sampling_time = self.clock.now() - started;
        self.record_computed(id, &parts);
        let Engine { running, workspace, stats, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        if let Some(started) = group.started.filter(|_| group.stats.queue_time.is_zero()) {
            group.stats.queue_time = started - group.arrived;
        }
        for rows in &parts {
            let sequence = &group.sequences[rows.chunk.sequence];
            if sequence.num_computed < group.request.prompt.len() {
                let (computed, total) = (sequence.num_computed, group.request.prompt.len());
                group.sink.hold(Event::PromptProgress { computed, total });
            }
            if group.request.score_prompt {
                score_prompt(group, rows, workspace)?;
            }
        }
        let complete: Vec<ChunkRows<'_>> =
            parts.into_iter().filter(|part| group.sequences[part.chunk.sequence].num_left() == 0).collect();
        if complete.is_empty() {
            return Ok(());
        }
        if let Some(before) = group.last_token.replace(now) {
            group.stats.gaps.observe(now - before);
            stats.gaps.observe(now - before);
        }
        group.batch_size = complete[0].step.chunks.len();
        let is_first = group.first_token.is_none();
        if is_first {
            group.first_token = Some(now);
            group.stats.time_to_first_token = now - group.arrived;
        }
        let is_search = group.search.is_some();
        let started = self.clock.now();
        let num_tokens = if is_search {
            self.advance_beams(id, &complete)?;
            1
        } else {
            self.sample_tokens(id, complete)?
        };
        sampling_time += self.clock.now() - started;
        if let Some(group) = self.running.get_mut(&id) {
            group.stats.sampling_time += sampling_time;
            group.stats.tokens_after_first += if is_first { 0 } else { num_tokens };
        }
        self.finish_if_done(id, now);
        Ok(())
    }

    /// Records the positions whose keys and values are stored now, and enters full blocks into the tenant's prefix
    /// index.
    fn record_computed(&mut self, id: GroupId, parts: &[ChunkRows<'_>]) {
        let Engine { running, cache, stats, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        for ChunkRows { chunk, .. } in parts {
            let sequence = &mut group.sequences[chunk.sequence];
            debug_assert_eq!(sequence.num_computed, chunk.positions.start);
            // Whether the drafted tokens were right is known when they are sampled.
            sequence.num_computed = chunk.positions.end - chunk.draft_len();
            let table = sequence.table.as_mut().expect("a running sequence has blocks");
            cache.index_full_blocks(table, &sequence.tokens[..group.request.num_cacheable(sequence.num_computed)]);
            // A step that is on the device reads its positions before a later one stores others in their place.
            cache.slide_window(table, group.request.first_window_position(sequence.num_computed));
            // A forced token is part of the reply, and is computed for the first time.
            let is_new = chunk.positions.start >= group.request.prompt.len().max(sequence.num_ever_computed);
            let counter = if is_new { &mut stats.decode_tokens } else { &mut stats.prefill_tokens };
            *counter += (chunk.num_tokens() - chunk.draft_len()) as u64;
            sequence.num_ever_computed = sequence.num_ever_computed.max(sequence.num_computed);
        }
    }

    fn finish_if_done(&mut self, id: GroupId, now: Instant) {
        if !self.running.get(&id).is_some_and(SequenceGroup::is_finished) {
            return;
        }
        let mut group = self.running.remove(&id).expect("it was just there");
        group.release(&mut self.cache);
        group.complete(now);
        self.ended.push(group.sink);
        self.stats.finished_requests += 1;
    }
}

/// Computes the log probabilities of the prompt tokens that this chunk's rows predict, and sends them when all are
/// known.
fn score_prompt(group: &mut SequenceGroup, rows: &ChunkRows<'_>, workspace: &mut Workspace) -> Result<(), Error> {
    let (prompt, chunk) = (&group.request.prompt, rows.chunk);
    let start = chunk.positions.start;
    if start >= prompt.len() || group.prompt_logprobs.len() + 1 >= prompt.len() {
        return Ok(());
    }
    let num_top = group.request.sampling.logprobs.unwrap_or(0);
    for (row, position) in chunk.wanted.clone().map(|row| start + row).enumerate() {
        // After a preemption the rows are computed again; log probabilities that are known are kept.
        if position == group.prompt_logprobs.len() && position + 1 < prompt.len() {
            // Room for all of them at once, so that a long list is not copied while it grows.
            fallible::reserve(&mut group.prompt_logprobs, prompt.len() - 1 - position)?;
            group.prompt_logprobs.push(Logprobs::of(rows.row(row), prompt[position + 1], num_top, workspace)?);
        }
    }
    if group.prompt_logprobs.len() + 1 == prompt.len() {
        group.sink.hold(Event::PromptLogprobs(fallible::copy_of(&group.prompt_logprobs)?));
    }
    Ok(())
}
