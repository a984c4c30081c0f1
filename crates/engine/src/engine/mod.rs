//! The loop: admit, schedule, run, commit. One thread owns it; nothing in it is shared, locked or asynchronous.

mod admission;
mod commit;
mod control;
mod look_ahead;
mod memory;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use pellucid_model::{Batch, Chunk, KvMemory, Logits, Model};
use pellucid_sampling::{DigestQuery, Workspace};
use pellucid_tensor::{Backend, CHOSEN, DType, RowQuery, Shortlist};

use crate::buffered_sink::BufferedSink;
use crate::kv_cache::{KvCache, TenantId};
use crate::request_limits::{CheckedRequest, RequestLimits, check};
use crate::scheduler::{Pending, Served, share_out};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{EngineStats, Error, Event, EventSink, Request};

/// Rows of prompts that are to be scored in one step: each wants all its logits, which nothing else in a step does.
const MAX_SCORED_ROWS: usize = 128;

/// How an engine runs.
#[derive(Debug, Clone, Copy)]
pub struct EngineOptions {
    /// Blocks of KV memory, and positions in each.
    pub num_blocks: usize,
    pub block_len: usize,
    /// How keys and values are stored.
    pub kv_dtype: DType,
    /// Sequences that decode at once.
    pub max_sequences: usize,
    /// Rows of a step at most; at least `max_sequences`.
    pub step_tokens: usize,
    /// Tokens of one prompt in a step at most: how long others may have to wait for their next token.
    pub chunk_len: usize,
    /// Requests that may wait.
    pub max_waiting: usize,
    pub overcommit: Overcommit,
    /// Keys the hashes of the prefix cache.
    pub secret: [u8; 32],
}

/// Who is admitted by what it needs now, not by what it may come to need. When memory runs out, someone is computed again later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Overcommit {
    /// Nobody: every request reserves all that it may come to need.
    Never,
    /// Requests without `max_tokens`, which would reserve a whole context for each reply: each time that they begin they reserve what they
    /// have, and room for so many tokens more.
    Unbounded { growth: usize },
    /// Everybody reserves what it has.
    Always,
}

/// Serves many requests with one model.
#[allow(missing_debug_implementations)] // Its model would print weights.
pub struct Engine {
    model: Box<dyn Model>,
    backend: Arc<dyn Backend>,
    kv: KvMemory,
    cache: KvCache,
    options: EngineOptions,
    /// By tenant, in the order in which they come in.
    waiting: BTreeMap<TenantId, Vec<(GroupId, SequenceGroup)>>,
    running: BTreeMap<GroupId, SequenceGroup>,
    /// Of requests that ended in the last step, with their last events.
    leaving: Vec<BufferedSink>,
    next_id: GroupId,
    served: Served,
    stats: EngineStats,
    /// The last step computed nothing: whoever is here is paused, or its reader is slow.
    is_stalled: bool,
    /// The device is gone.
    is_lost: bool,
    batch: Batch,
    /// The step that was launched before the one that it follows had ended.
    ahead: Option<Step>,
    /// Those of steps that are over, kept for their memory.
    spare_logits: Vec<Logits>,
    /// For the rows whose digest did not do.
    spare_row: Vec<f32>,
    workspace: Workspace,
}

/// A step on its way through the device.
struct Step {
    plan: Vec<Planned>,
    logits: Logits,
    /// The next one takes the place of the rows of logits that are still on the device.
    rows_are_gone: bool,
}

/// A sequence's part of a step.
#[derive(Debug, Clone)]
struct Planned {
    group: GroupId,
    /// PrefixIndex among the group's sequences.
    sequence: usize,
    /// The positions to compute.
    positions: Range<usize>,
    is_decode: bool,
    /// Rows of this chunk whose logits are wanted, counted from its start.
    wanted: Range<usize>,
    /// Where the first of them is among those of the step.
    row: usize,
    /// The wanted row of the step before that the token comes from, where nobody has chosen it yet.
    after: Option<usize>,
}

impl Planned {
    fn num_tokens(&self) -> usize {
        self.positions.len()
    }
}

impl Engine {
    pub fn new(model: Box<dyn Model>, backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Engine, Error> {
        assert!(options.step_tokens >= options.max_sequences, "every sequence decodes in every step");
        assert!(options.max_sequences > 0 && options.chunk_len > 0);
        let kv = KvMemory::new(model.config(), &*backend, options.kv_dtype, options.num_blocks, options.block_len)
            .map_err(Error::from)?;
        Ok(Engine {
            cache: KvCache::new(options.num_blocks, options.block_len, options.secret),
            model,
            backend,
            kv,
            options,
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            leaving: Vec::new(),
            next_id: 0,
            served: Served::default(),
            stats: EngineStats::default(),
            is_stalled: false,
            is_lost: false,
            batch: Batch::default(),
            ahead: None,
            spare_logits: Vec::new(),
            spare_row: Vec::new(),
            workspace: Workspace::default(),
        })
    }

    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// For the operator's settings: shared prefixes and quotas.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// What a request must keep to; the operator's settings of the cache are final by then.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            config: self.model.config().clone(),
            options: self.options,
            quotas: self.cache.quotas().clone(),
        }
    }

    /// Checks a request and puts it into the queue. Its events go to `sink`.
    pub fn submit(&mut self, request: Request, sink: Box<dyn EventSink>) -> Result<(), Error> {
        let quota = self.cache.quota(request.scope.tenant);
        let sampler = check(&request, self.model.config(), &self.options, quota)?;
        let waiting = self.num_waiting();
        if waiting >= self.options.max_waiting {
            return Err(Error::QueueFull { waiting });
        }
        self.accept(CheckedRequest { request, sampler, arrived: Instant::now() }, sink);
        Ok(())
    }

    /// Puts a request into the queue that was checked by this engine's limits and found room.
    pub(crate) fn accept(&mut self, checked: CheckedRequest, sink: Box<dyn EventSink>) {
        let group = SequenceGroup::new(checked.request, self.model.config(), checked.sampler, sink, checked.arrived);
        let id = self.next_id;
        self.next_id += 1;
        self.enqueue(id, group);
    }

    /// One round. Gives false when there is nothing left to do.
    pub fn step(&mut self) -> bool {
        let started = Instant::now();
        self.admit();
        let (mut step, launched) = match self.ahead.take() {
            Some(step) => (self.still_wanted(step), started),
            None => {
                let plan = self.schedule();
                self.is_stalled = plan.is_empty();
                if plan.is_empty() {
                    self.deliver();
                    return self.num_waiting() > 0 || !self.running.is_empty();
                }
                let launched = Instant::now();
                match self.launch(plan) {
                    Some(step) => (step, launched),
                    None => return true,
                }
            }
        };
        self.launch_ahead(&mut step);
        self.deliver();
        let outcome = contained(|| self.model.finish(&mut step.logits));
        let finished = Instant::now();
        match outcome {
            Ok(()) => self.commit(&step),
            Err(error) => self.fail(&step.plan, error),
        }
        self.spare_logits.push(step.logits);
        // Where the device computes by itself, what this step gave is told once the next one is under way.
        if !self.model.is_asynchronous(1) || self.running.is_empty() {
            self.deliver();
        }
        self.stats.steps += 1;
        self.stats.step_time += started.elapsed();
        self.stats.forward_time += self.ahead.as_ref().map_or(finished, |_| Instant::now()) - launched;
        true
    }

    /// Tells what the last step gave.
    fn deliver(&mut self) {
        self.running.values_mut().for_each(|group| group.sink.deliver());
        self.leaving.drain(..).for_each(|mut sink| sink.deliver());
    }

    /// Gives every running sequence a part of the step, and makes sure of the memory that it takes.
    fn schedule(&mut self) -> Vec<Planned> {
        let mut rows: Vec<(GroupId, usize)> = Vec::new();
        let mut pending: Vec<Pending> = Vec::new();
        let mut scored_left = MAX_SCORED_ROWS;
        for (&id, group) in self.running.iter().filter(|(_, group)| group.takes_steps()) {
            // Beams advance together: none goes on before all have caught up.
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
                    rows.push((id, i));
                    pending.push(Pending {
                        tenant: group.tenant(),
                        num_left,
                        is_decode: is_decode && !waits_for_others,
                    });
                }
            }
        }
        let given = share_out(&pending, self.options.step_tokens, self.options.chunk_len, &self.served);
        let mut plan = Vec::new();
        for (((id, sequence), pending), num_tokens) in rows.into_iter().zip(&pending).zip(given) {
            if num_tokens > 0 && self.make_room(id, sequence, num_tokens) {
                let start = self.running[&id].sequences[sequence].num_computed;
                let (positions, is_decode) = (start..start + num_tokens, pending.is_decode);
                let wanted = self.wanted_rows(id, sequence, num_tokens);
                plan.push(Planned { group: id, sequence, positions, is_decode, wanted, row: 0, after: None });
            }
        }
        // Making room may have preempted someone who was planned before.
        plan.retain(|planned: &Planned| self.running.contains_key(&planned.group));
        let mut row = 0;
        for planned in &mut plan {
            planned.row = row;
            row += planned.wanted.len();
        }
        plan
    }

    /// The last row of a chunk that ends where the sequence does; every row of a prompt that is to be scored.
    fn wanted_rows(&self, id: GroupId, sequence: usize, num_tokens: usize) -> Range<usize> {
        let group = &self.running[&id];
        let sequence = &group.sequences[sequence];
        if group.scores_next(sequence) {
            return 0..num_tokens;
        }
        let is_complete = sequence.num_computed + num_tokens == sequence.tokens.len();
        (if is_complete { num_tokens - 1 } else { num_tokens })..num_tokens
    }

    /// What will do in place of the row of logits that a sequence draws its next token from.
    fn query(&self, planned: &Planned) -> Option<RowQuery> {
        let group = &self.running[&planned.group];
        let sequence = &group.sequences[planned.sequence];
        let next = planned.positions.end;
        let one_draws = planned.wanted.len() == 1
            && next >= sequence.tokens.len()
            && group.sequences.len() == group.request.width();
        let is_looked_at =
            group.request.trace || group.search.is_some() || group.request.score_prompt || sequence.needs_row;
        if !self.model.digests() || !one_draws || is_looked_at {
            return None;
        }
        let DigestQuery { temperature, race, shortlist } = sequence.sampler.query(next as u32)?;
        let shortlist = shortlist.map(|list| Shortlist { draw: list.draw, k: list.k, p: list.p, min_p: list.min_p });
        Some(RowQuery { temperature, race, shortlist })
    }

    fn new_step(&mut self, plan: Vec<Planned>) -> Step {
        Step { plan, logits: self.spare_logits.pop().unwrap_or_default(), rows_are_gone: false }
    }

    /// Begins a step; where that fails, its requests end.
    fn launch(&mut self, plan: Vec<Planned>) -> Option<Step> {
        let num_rows = plan.iter().map(Planned::num_tokens).sum();
        // The device will not compute by itself: whoever has something to hear hears it now.
        if !self.model.is_asynchronous(num_rows) {
            self.deliver();
        }
        let mut step = self.new_step(plan);
        match self.begin_forward(&mut step) {
            Ok(()) => Some(step),
            Err(error) => {
                self.fail(&step.plan, error);
                self.deliver();
                None
            }
        }
    }

    /// Begins the forward pass over a plan.
    fn begin_forward(&mut self, step: &mut Step) -> Result<(), Error> {
        let mut batch = std::mem::take(&mut self.batch);
        batch.clear();
        for planned in &step.plan {
            let sequence = &self.running[&planned.group].sequences[planned.sequence];
            let table = sequence.table.as_ref().expect("a planned sequence has blocks");
            let chosen = planned.after.map(|row| CHOSEN + row as u32);
            let ids = match &chosen {
                Some(id) => std::slice::from_ref(id),
                None => &sequence.tokens[planned.positions.clone()],
            };
            let chunk = Chunk {
                ids,
                first_position: planned.positions.start,
                blocks: table.blocks(),
                wanted: planned.wanted.clone(),
                query: self.query(planned),
            };
            batch.push(chunk, self.options.block_len);
        }
        let Engine { model, kv, .. } = self;
        let outcome = contained(|| model.launch(&batch, kv, &mut step.logits));
        self.batch = batch;
        outcome
    }

    /// Ends every request of a step that failed; every request there is, where the device is gone.
    fn fail(&mut self, plan: &[Planned], error: Error) {
        if matches!(error, Error::DeviceLost(_)) {
            return self.lose(&error);
        }
        let groups: BTreeSet<GroupId> = plan.iter().map(|planned| planned.group).collect();
        for id in groups {
            self.end_with(id, error.clone());
        }
    }

    /// Ends every request there is: the device that held the model is gone.
    fn lose(&mut self, error: &Error) {
        self.is_lost = true;
        self.ahead = None;
        let ids: Vec<GroupId> = self.running.keys().copied().collect();
        ids.into_iter().for_each(|id| self.end_with(id, error.clone()));
        for (_, mut group) in std::mem::take(&mut self.waiting).into_values().flatten() {
            group.release(&mut self.cache);
            group.sink.send(Event::Failed(error.clone()));
            self.stats.failed_requests += 1;
        }
    }

    /// Whether the device is gone: there will be no further step.
    pub fn is_lost(&self) -> bool {
        self.is_lost
    }

    /// Ends one request with an error.
    fn end_with(&mut self, id: GroupId, error: Error) {
        if let Some(mut group) = self.running.remove(&id) {
            group.release(&mut self.cache);
            group.sink.send(Event::Failed(error));
            self.stats.failed_requests += 1;
        }
    }

    /// Counts the blocks again, for simulators and tests.
    pub fn audit(&self) -> Result<(), String> {
        let groups = || self.running.values().chain(self.waiting.values().flatten().map(|(_, group)| group));
        let tables = groups().flat_map(|group| &group.sequences).filter_map(|sequence| sequence.table.as_ref());
        self.cache.audit(tables, groups().filter_map(|group| group.reservation.as_ref()))
    }

    /// Whether the last step found nobody to compute for.
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    pub fn num_waiting(&self) -> usize {
        self.waiting.values().map(Vec::len).sum()
    }

    /// What has happened since the start, and what is held now.
    pub fn stats(&self) -> EngineStats {
        EngineStats {
            num_waiting: self.num_waiting(),
            num_running: self.running.values().flat_map(|group| &group.sequences).filter(|s| s.is_running()).count(),
            blocks_in_use: self.cache.num_in_use(),
            blocks_reserved: self.cache.num_reserved(),
            blocks_idle: self.cache.num_idle(),
            num_blocks: self.cache.num_blocks(),
            ..self.stats
        }
    }
}

impl Drop for Engine {
    /// Whoever is still served hears of the last step and no more; the blocks go back all the same, so that a leak can never hide behind
    /// an exit.
    fn drop(&mut self) {
        self.deliver();
        let Engine { running, waiting, cache, .. } = self;
        let groups = running.values_mut().chain(waiting.values_mut().flatten().map(|(_, group)| group));
        groups.for_each(|group| group.release(cache));
    }
}

/// What the model does; a panic in it is an error of its step alone.
fn contained(work: impl FnOnce() -> Result<(), pellucid_model::Error>) -> Result<(), Error> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(outcome) => Ok(outcome?),
        Err(panic) => Err(Error::Internal(panic_message(&panic))),
    }
}

fn panic_message(panic: &Box<dyn std::any::Any + Send>) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no message").to_owned()
}
