//! The loop that serves all requests. Read [`Engine::step`] first: admit, schedule, run, commit.
//!
//! One thread owns the engine; nothing in it is shared, locked or asynchronous. Each part of the loop has a file:
//!
//! - `admission`: starts waiting requests, in fair turns. Before that, at the same moment between two steps,
//!   `cancellation` removes requests that nobody reads any more, `control` applies messages such as pause, and
//!   `deadline` ends requests that took too long.
//! - `schedule`: a chunk for each running sequence; `drafting` adds drafted tokens to it; `preemption` when there is no
//!   memory for it; `tenants` keeps the accounts of the time that each tenant's chunks took.
//! - `run`: the forward pass; `look_ahead` launches the next one before this one has ended; `failure` if it fails.
//!   `kv_events` tells others what the prefix cache holds.
//! - `commit`: sends events, ends replies; `sample` for its tokens, `beams` for beam search.

mod admission;
mod cancellation;
mod commit;
mod control;
mod deadline;
mod drafting;
mod failure;
mod kv_events;
pub(crate) mod look_ahead;
mod options;
mod preemption;
mod run;
mod schedule;
mod step;
mod tenants;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_model::{Batch, Devices, KvMemory, Logits, Model};
use pellucid_sampling::Workspace;
use pellucid_tensor::Backend;

use crate::buffered_sink::BufferedSink;
use crate::clock::{Clock, SystemClock};
use crate::kv_cache::{KvCache, KvEventSink, TenantId};
use crate::queue::Queue;
use crate::request_limits::{CheckedRequest, RequestLimits, check};
use crate::scheduler::{Served, StepCosts, TimeShare};
use crate::sequence::{Sequence, SequenceGrammar};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::speculation::{DraftModel, Drafters};
use crate::{EngineStats, Error, Event, EventSink, Request};

pub use options::{EngineOptions, Overcommit, WindowNeed, state_need, window_need};

use look_ahead::LookAhead;
use step::{PlannedChunk, Step};
use tenants::RecentTenants;

/// Serves many requests with one model.
#[allow(missing_debug_implementations)] // Its model would print weights.
pub struct Engine {
    model: Box<dyn Model>,
    devices: Devices,
    kv: KvMemory,
    cache: KvCache,
    options: EngineOptions,
    queue: Arc<Queue>,
    /// Requests in the queue, by tenant; each tenant's in the order in which they will start.
    waiting: BTreeMap<TenantId, Vec<(GroupId, SequenceGroup)>>,
    running: BTreeMap<GroupId, SequenceGroup>,
    /// Sinks of requests that ended in the last step, with their last events.
    ended: Vec<BufferedSink>,
    next_id: GroupId,
    clock: Box<dyn Clock>,
    served: Served,
    costs: StepCosts,
    /// The costs by which drafts are weighed: a draft adds single rows.
    draft_costs: StepCosts,
    time_share: TimeShare,
    /// The tenants of the last steps.
    recent: RecentTenants,
    stats: EngineStats,
    /// When the last step ended, unless no request was left.
    last_end: Option<Instant>,
    /// The last step found nothing to compute: every running request is paused, or its reader is slow.
    is_stalled: bool,
    /// The device is lost.
    is_lost: bool,
    batch: Batch,
    look_ahead: LookAhead,
    drafters: Drafters,
    /// Receives the changes of the prefix cache.
    kv_events: Option<Box<dyn KvEventSink>>,
    /// Logits of earlier steps, kept for their memory.
    spare_logits: Vec<Logits>,
    /// Memory for a row of logits whose digest did not determine the token.
    spare_row: Vec<f32>,
    workspace: Workspace,
}

impl Engine {
    /// One round of the loop. Returns false when no request is left.
    pub fn step(&mut self) -> bool {
        let started = self.clock.now();
        self.admit();
        let Some(mut step) = self.schedule() else {
            self.deliver();
            self.send_kv_events();
            self.last_end = None;
            return self.num_waiting() > 0 || !self.running.is_empty();
        };
        let outcome = self.run(&mut step);
        self.commit(&step, outcome);
        self.send_kv_events();
        self.end_step(step, started);
        true
    }

    /// Sends the events that the last step left in the requests' sinks.
    fn deliver(&mut self) {
        self.running.values_mut().for_each(|group| group.sink.deliver());
        self.ended.drain(..).for_each(|mut sink| sink.deliver());
    }

    /// Counts a step and keeps its memory. A step that could not be launched does not count.
    fn end_step(&mut self, step: Step, started: Instant) {
        let (Some(launched), Some(finished)) = (step.launched, step.finished) else { return };
        let now = self.clock.now();
        let time_between = self.last_end.map_or(Duration::ZERO, |end| started.saturating_duration_since(end));
        self.settle(&step, now - started, time_between);
        // Without requests the engine waits, which is no work.
        self.last_end = (!self.running.is_empty() || self.num_waiting() > 0).then_some(now);
        self.spare_logits.push(step.logits);
        self.stats.steps += 1;
        self.stats.step_time += now - started;
        // With a further step on the device, the model was at work all the time.
        let forward_end = if self.look_ahead.is_launched() { now } else { finished };
        self.stats.forward_time += forward_end - launched.max(started);
    }

    /// Allocates the KV memory and creates an engine without requests.
    pub fn new(model: Box<dyn Model>, backend: Arc<dyn Backend>, options: EngineOptions) -> Result<Engine, Error> {
        assert!(options.step_tokens >= options.max_sequences, "every sequence decodes in every step");
        assert!(options.max_sequences > 0 && options.chunk_len > 0);
        let config = model.config();
        let devices = model.placed_on().cloned().unwrap_or_else(|| backend.into());
        let windows = options.windows(config, &devices);
        let num_blocks = (options.num_blocks, windows.map(|windows| windows.num_blocks));
        let mut kv = KvMemory::with_windows(config, &devices, options.kv_dtype, num_blocks, options.block_len)?;
        let mut cache = KvCache::new(options.num_blocks, options.block_len, options.secret);
        if let Some(windows) = windows {
            cache.use_windows(windows);
        }
        if let Some(states) = options.states(config)? {
            kv = kv.with_states(config, &devices, states.num_slots())?;
            cache.use_states(states);
        }
        Ok(Engine {
            cache,
            model,
            devices,
            kv,
            options,
            queue: Queue::new(options.max_waiting),
            waiting: BTreeMap::new(),
            running: BTreeMap::new(),
            ended: Vec::new(),
            next_id: 0,
            clock: Box::new(SystemClock),
            served: Served::default(),
            costs: StepCosts::default(),
            draft_costs: StepCosts::of_single_rows(),
            time_share: TimeShare::default(),
            recent: RecentTenants::default(),
            stats: EngineStats::default(),
            last_end: None,
            is_stalled: false,
            is_lost: false,
            batch: Batch::default(),
            look_ahead: LookAhead::default(),
            drafters: Drafters::default(),
            kv_events: None,
            spare_logits: Vec::new(),
            spare_row: Vec::new(),
            workspace: Workspace::default(),
        })
    }

    /// Replaces the clock by which steps and requests are measured, for simulators.
    pub fn set_clock(&mut self, clock: Box<dyn Clock>) {
        self.clock = clock;
    }

    /// Returns the model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Returns the KV cache.
    pub fn cache(&self) -> &KvCache {
        &self.cache
    }

    /// Returns the KV cache for the operator's settings: shared prefixes and quotas.
    pub fn cache_mut(&mut self) -> &mut KvCache {
        &mut self.cache
    }

    /// Returns the limits that every request is checked against. The operator's settings of the cache must be final by
    /// then.
    pub fn limits(&self) -> RequestLimits {
        RequestLimits {
            config: self.model.config().clone(),
            options: self.options,
            bytes_per_block: self.options.bytes_per_block(self.model.config(), &self.devices),
            quotas: self.cache.quotas().clone(),
        }
    }

    /// Checks a request and puts it into the queue. Its events go to `sink`.
    pub fn submit(&mut self, request: Request, sink: Box<dyn EventSink>) -> Result<(), Error> {
        let quota = self.cache.quota(request.scope.tenant);
        let sampler = check(&request, self.model.config(), &self.options, quota)?;
        let places = self.queue.take(&[request.scope.tenant])?;
        let place = places.into_iter().next().expect("one place for one request");
        self.accept(CheckedRequest { request, sampler, place, arrived: self.clock.now() }, sink);
        Ok(())
    }

    /// Sets the number of tenants that may submit requests. With more than one, no tenant can fill the queue.
    pub fn set_num_tenants(&self, num_tenants: usize) {
        self.queue.set_num_tenants(num_tenants);
    }

    /// Returns the places of the queue, for the threads that submit.
    pub(crate) fn queue(&self) -> &Arc<Queue> {
        &self.queue
    }

    /// Returns the number of preempted requests in the queue. They hold no place.
    pub(crate) fn num_preempted(&self) -> usize {
        self.waiting.values().flatten().filter(|(_, group)| group.place.is_none()).count()
    }

    /// Puts a request into the queue that was checked against this engine's limits.
    pub(crate) fn accept(&mut self, checked: CheckedRequest, mut sink: Box<dyn EventSink>) {
        let CheckedRequest { request, sampler, place, arrived } = checked;
        let vocab_size = self.model.config().vocab_size;
        let first = Sequence::new(0, &request.prompt, sampler)
            .and_then(|first| Ok(Sequence { grammar: SequenceGrammar::new(&request, vocab_size)?, ..first }));
        let first = match first {
            Ok(first) => first,
            Err(error) => {
                sink.send(Event::Failed(error));
                self.stats.failed_requests += 1;
                return;
            }
        };
        let group = SequenceGroup::new(request, self.model.config(), first, sink, place, arrived);
        let id = self.next_id;
        self.next_id += 1;
        self.enqueue(id, group);
    }

    /// Counts the blocks again, for simulators and tests.
    pub fn audit(&self) -> Result<(), String> {
        let groups = || self.running.values().chain(self.waiting.values().flatten().map(|(_, group)| group));
        let tables = groups().flat_map(|group| &group.sequences).filter_map(|sequence| sequence.table.as_ref());
        self.cache.audit(tables, groups().filter_map(|group| group.reservation.as_ref()))?;
        self.drafters.model.as_ref().map_or(Ok(()), DraftModel::audit)
    }

    /// Whether the last step found nothing to compute.
    pub(crate) fn is_stalled(&self) -> bool {
        self.is_stalled
    }

    /// Returns the number of requests in the queue.
    pub fn num_waiting(&self) -> usize {
        self.waiting.values().map(Vec::len).sum()
    }

    /// Returns the counters since the start, and what the engine holds now.
    pub fn stats(&self) -> EngineStats {
        let sequences = self.running.values().flat_map(|group| &group.sequences);
        EngineStats {
            num_waiting: self.num_waiting(),
            num_running: sequences.filter(|sequence| sequence.is_running()).count(),
            blocks_in_use: self.cache.num_in_use(),
            blocks_reserved: self.cache.num_reserved(),
            blocks_idle: self.cache.num_idle(),
            block_len: self.options.block_len,
            num_blocks: self.cache.num_blocks(),
            window_blocks_taken: self.cache.num_taken_windows().0,
            window_blocks_kept: self.cache.num_taken_windows().1,
            num_window_blocks: self.cache.num_window_blocks(),
            draft_errors: self.drafters.model.as_ref().map_or(0, DraftModel::num_errors)
                + self.drafters.mtp.num_errors(),
            ..self.stats
        }
    }
}

impl Drop for Engine {
    /// Sends the events of the last step. Then releases all blocks, so that the debug assertions against leaked blocks
    /// hold here too.
    fn drop(&mut self) {
        self.deliver();
        let Engine { running, waiting, cache, .. } = self;
        let groups = running.values_mut().chain(waiting.values_mut().flatten().map(|(_, group)| group));
        groups.for_each(|group| group.release(cache));
    }
}
