//! Runs a step: builds the batch, launches it on the device, and waits for the logits.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};

use pellucid_model::{Chunk, ChunkIds};
use pellucid_sampling::{DigestQuery, Sampler};
use pellucid_tensor::{RowQuery, Shortlist};

use super::{Engine, PlannedChunk, Step};
use crate::Error;
use crate::kv_cache::{StateCopy, StatePlan};

impl Engine {
    /// Runs a step, unless it was launched ahead, and waits for its logits. While an asynchronous device computes,
    /// launches the step after it and sends the events of the step before it.
    pub(super) fn run(&mut self, step: &mut Step) -> Result<(), Error> {
        let launched = if step.launched.is_none() { self.launch_now(step) } else { Ok(()) };
        if launched.is_ok() {
            self.launch_ahead(step);
        }
        self.deliver();
        if launched.is_err() {
            self.drafters.chain_launched = None;
        }
        launched?;
        self.prepare_masks(step);
        self.finish_chain(step)?;
        let outcome = contain_panics(|| self.model.finish(&mut step.logits));
        step.finished = Some(self.clock.now());
        outcome
    }

    /// Computes the masks of grammars while an asynchronous device computes the rows that they are for. A synchronous
    /// device is done by now; masks are then computed when they are used.
    fn prepare_masks(&mut self, step: &Step) {
        for chunk in &step.chunks {
            let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
            if let Some(grammar) = group.sequences[chunk.sequence].grammar.as_mut().filter(|_| !chunk.wanted.is_empty())
            {
                grammar.prepare();
            }
        }
    }

    fn launch_now(&mut self, step: &mut Step) -> Result<(), Error> {
        let num_rows = step.chunks.iter().map(PlannedChunk::num_tokens).sum();
        // A synchronous launch returns when the step is over. Events must not wait that long.
        if !self.model.is_asynchronous(num_rows) {
            self.deliver();
        }
        self.launch(step)
    }

    /// Builds the batch of a step and launches its forward pass.
    pub(super) fn launch(&mut self, step: &mut Step) -> Result<(), Error> {
        let now = self.clock.now();
        self.plan_states(step)?;
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        for planned in &step.chunks {
            let sequence = &self.running[&planned.group].sequences[planned.sequence];
            let table = sequence.table.as_ref().expect("a planned sequence has blocks");
            let sources = if planned.draft_len() > 0 { sequence.drafts.sources() } else { Vec::new() };
            let ids = match planned.token_from_row {
                Some(row) => ChunkIds::Assumed { row },
                None if !sources.is_empty() => ChunkIds::Sources(&sources),
                None if planned.draft_len() > 0 => ChunkIds::Tokens(&sequence.drafts.rows()[..planned.num_tokens()]),
                None => ChunkIds::Tokens(&sequence.tokens[planned.positions.clone()]),
            };
            let queries = self.digest_queries(planned);
            let chunk = Chunk {
                ids,
                first_position: planned.positions.start,
                blocks: table.blocks(),
                wanted: planned.wanted.clone(),
                queries: &queries,
                state: table.chunk_state(planned.positions.start),
            };
            batch.push_with_windows(chunk, table.window_blocks(), self.options.block_len);
        }
        let Engine { model, kv, .. } = self;
        let outcome = contain_panics(|| model.launch(&batch, kv, &mut step.logits));
        self.batch = batch;
        outcome?;
        step.launched = Some(now);
        Ok(())
    }

    /// Makes the copies of recurrent states that are due, and plans where the step saves them. A model without states
    /// has none.
    fn plan_states(&mut self, step: &Step) -> Result<(), Error> {
        let Engine { running, cache, kv, devices, .. } = self;
        if !cache.has_states() {
            return Ok(());
        }
        for StateCopy { from, to } in cache.take_state_copies() {
            kv.copy_state(devices, from, to)?;
        }
        // Drafts first: they need their slots, snapshots take what is left.
        for plans_draft in [true, false] {
            for chunk in &step.chunks {
                let group = running.get_mut(&chunk.group).expect("a planned request runs");
                let (positions, draft_len) = (chunk.positions.clone(), chunk.draft_len());
                let num_cacheable = group.request.num_cacheable(positions.end - draft_len);
                let prompt_len = group.request.prompt.len();
                let table = group.sequences[chunk.sequence].table.as_mut().expect("a planned sequence has blocks");
                if plans_draft {
                    cache.plan_draft_states(table, draft_len);
                } else {
                    cache.plan_states(table, &StatePlan { positions, draft_len, prompt_len, num_cacheable });
                }
            }
        }
        Ok(())
    }

    /// Returns the queries of the digests from which the tokens of a chunk can be sampled without its rows of logits:
    /// one for each wanted row, or none if the rows are needed.
    pub(super) fn digest_queries(&self, chunk: &PlannedChunk) -> Vec<RowQuery> {
        let group = &self.running[&chunk.group];
        let sequence = &group.sequences[chunk.sequence];
        let first = chunk.positions.end - chunk.draft_len();
        let samples_all = chunk.wanted.len() == 1 + chunk.draft_len()
            && first >= sequence.tokens.len()
            && group.sequences.len() == group.request.width();
        let request = &group.request;
        let needs_row =
            request.trace || group.search.is_some() || request.score_prompt || sequence.look_ahead.needs_row();
        if !self.model.supports_digests() || !samples_all || needs_row {
            return Vec::new();
        }
        let sampler = &sequence.sampler;
        let of_position = if sequence.is_masked() { Sampler::masked_query } else { Sampler::query };
        let query = |position: usize| {
            let DigestQuery { temperature, race, shortlist } = of_position(sampler, position as u32)?;
            let shortlist = shortlist.map(|s| Shortlist { draw: s.draw, k: s.k, p: s.p, min_p: s.min_p });
            Some(RowQuery { temperature, race, shortlist })
        };
        (first..=chunk.positions.end).map(query).collect::<Option<_>>().unwrap_or_default()
    }
}

/// Calls into the model; a panic there becomes an error of this step.
fn contain_panics(work: impl FnOnce() -> Result<(), pellucid_model::Error>) -> Result<(), Error> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => Ok(outcome?),
        Err(panic) => Err(internal_error(&panic)),
    }
}

/// Turns the payload of a panic into an error.
pub(super) fn internal_error(panic: &Box<dyn Any + Send>) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Error::Internal(text.unwrap_or("no message").to_owned())
}
