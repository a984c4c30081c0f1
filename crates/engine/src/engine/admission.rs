//! Who comes in: cancelled and late requests leave, then waiting ones begin, in fair turns, while there is room.

use std::time::Instant;

use super::Engine;
use crate::job::{Job, JobId};
use crate::kv_cache::{NoRoom, TenantId};
use crate::scheduler::{Contender, must_yield, next_tenant};
use crate::{Event, FinishReason};

/// What became of a request whose turn it was.
enum Begin {
    Begun,
    /// Its tenant holds all that it may.
    AtQuota,
    /// Others hold what it needs.
    NoRoom,
}

impl Engine {
    pub(crate) fn admit(&mut self) {
        let now = Instant::now();
        self.drop_cancelled();
        self.heed_controls(now);
        self.end_late(now);
        self.attach_others();
        // A tenant at its own quota waits for itself. Whoever waits for room that others hold keeps the turn: were smaller requests let
        // past, a large one might never begin.
        let mut at_quota: Vec<TenantId> = Vec::new();
        while let Some(tenant) = self.next_in_turn(&at_quota) {
            match self.begin_next(tenant, now) {
                Begin::Begun => {}
                Begin::AtQuota => at_quota.push(tenant),
                Begin::NoRoom => break,
            }
        }
    }

    pub(super) fn enqueue(&mut self, id: JobId, job: Job) {
        let tenant = job.tenant();
        let running = self.running.values().map(Job::tenant);
        let present: Vec<TenantId> = running.chain(self.waiting.keys().copied()).collect();
        if !present.contains(&tenant) {
            self.served.arrive(tenant, present.into_iter());
        }
        let queue = self.waiting.entry(tenant).or_default();
        // The higher priority first, then who came first; someone who was preempted kept its number.
        let place = queue.partition_point(|(other, waiting)| {
            (std::cmp::Reverse(waiting.request.priority), *other) < (std::cmp::Reverse(job.request.priority), id)
        });
        queue.insert(place, (id, job));
    }

    fn drop_cancelled(&mut self) {
        let gone: Vec<JobId> = self.running.iter().filter(|(_, job)| !job.sink.is_open()).map(|(&id, _)| id).collect();
        for id in gone {
            let mut job = self.running.remove(&id).expect("it was just there");
            job.release(&mut self.cache);
            self.stats.cancelled_requests += 1;
        }
        for queue in self.waiting.values_mut() {
            let before = queue.len();
            queue.retain(|(_, job)| job.sink.is_open());
            self.stats.cancelled_requests += (before - queue.len()) as u64;
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }

    /// Replies whose time is over end where they are.
    fn end_late(&mut self, now: Instant) {
        let late = |job: &Job| job.request.deadline.is_some_and(|deadline| now - job.arrived >= deadline);
        let running: Vec<JobId> = self.running.iter().filter(|(_, job)| late(job)).map(|(&id, _)| id).collect();
        let waiting = self.waiting.values_mut().flat_map(|queue| queue.extract_if(.., |(_, job)| late(job)));
        let mut ended: Vec<Job> = waiting.map(|(_, job)| job).collect();
        ended.extend(running.into_iter().filter_map(|id| self.running.remove(&id)));
        self.waiting.retain(|_, queue| !queue.is_empty());
        for mut job in ended {
            job.release(&mut self.cache);
            let holds_back = job.holds_back() || job.search.is_some();
            for sequence in job.sequences.iter_mut().filter(|sequence| sequence.finish.is_none()) {
                sequence.finish = Some(FinishReason::Deadline);
                if !holds_back && !job.unwanted.contains(&sequence.choice) {
                    let (choice, reason) = (sequence.choice, FinishReason::Deadline);
                    job.sink.send(Event::ChoiceEnd { choice, reason, token: None });
                }
            }
            // Before the prompt is computed there is one sequence, whatever was asked for.
            let unborn = if job.search.is_some() { 0..0 } else { job.sequences.len()..job.request.num_choices };
            for choice in unborn.filter(|choice| !job.unwanted.contains(choice)) {
                job.sink.send(Event::ChoiceEnd { choice, reason: FinishReason::Deadline, token: None });
            }
            job.complete(now);
            job.sink.deliver();
            self.stats.finished_requests += 1;
        }
    }

    fn running_of(&self, tenant: TenantId) -> usize {
        self.running.values().filter(|job| job.tenant() == tenant).map(Job::num_slots).sum()
    }

    fn next_in_turn(&self, blocked: &[TenantId]) -> Option<TenantId> {
        let contenders: Vec<Contender> = (self.waiting.keys())
            .filter(|tenant| !blocked.contains(tenant))
            .map(|&tenant| Contender { tenant, num_running: self.running_of(tenant) })
            .collect();
        next_tenant(&contenders, &self.served)
    }

    /// Begins the tenant's next request, if there is room for it now.
    fn begin_next(&mut self, tenant: TenantId, now: Instant) -> Begin {
        let Some((id, mut job)) = self.waiting.get_mut(&tenant).map(|queue| queue.remove(0)) else {
            return Begin::NoRoom;
        };
        self.waiting.retain(|_, queue| !queue.is_empty());
        loop {
            match self.begin(&mut job) {
                Begin::Begun => {
                    if job.started.is_none() {
                        job.started = Some(now);
                        job.sink.send(Event::Begun { cached_tokens: job.stats.cached_tokens });
                    }
                    self.running.insert(id, job);
                    return Begin::Begun;
                }
                // A tenant below its share may take the place of one above.
                Begin::NoRoom if self.yield_to(tenant, job.num_slots()) => {}
                waits => {
                    self.enqueue(id, job);
                    return waits;
                }
            }
        }
    }

    /// Finds what is cached of the job's sequences and reserves the rest.
    fn begin(&mut self, job: &mut Job) -> Begin {
        let slots: usize = self.running.values().map(Job::num_slots).sum();
        if slots + job.num_slots() > self.options.max_sequences {
            return Begin::NoRoom;
        }
        let needed = if self.options.overcommit {
            0
        } else {
            job.request.blocks_needed(self.model.config(), self.options.block_len)
        };
        match self.try_begin(job, needed) {
            Ok(()) => Begin::Begun,
            Err(no_room) => {
                job.release(&mut self.cache);
                if matches!(no_room, NoRoom::Quota { .. }) { Begin::AtQuota } else { Begin::NoRoom }
            }
        }
    }

    /// Room for the job's first sequence, and the promise for all. The others follow when its prompt is computed: they share those blocks.
    fn try_begin(&mut self, job: &mut Job, needed: usize) -> Result<(), NoRoom> {
        let scope = job.request.scope;
        let first = job.sequences.iter_mut().find(|sequence| sequence.finish.is_none());
        let sequence = first.expect("a job that waits has something to compute");
        // A prompt that is scored needs the logits of all its rows; so nothing of it is looked up.
        if job.request.score_prompt && job.prompt_logprobs.len() + 1 < job.request.prompt.len() {
            let blocks = needed.max(self.cache.blocks_for(sequence.tokens.len()));
            job.reservation = Some(self.cache.reserve(scope.tenant, blocks)?);
            sequence.table = Some(self.cache.empty_table(scope));
            return Ok(());
        }
        let (table, reservation, num_cached) = self.cache.admit(scope, &sequence.tokens, needed)?;
        sequence.num_computed = num_cached;
        sequence.table = Some(table);
        job.reservation = Some(reservation);
        if job.stats.preemptions == 0 {
            job.stats.cached_tokens = num_cached;
            let table = sequence.table.as_ref().expect("it was just made");
            let num_shared = self.cache.num_shared(table) * self.options.block_len;
            self.stats.cached_tokens += num_cached as u64;
            self.stats.shared_cached_tokens += num_shared as u64;
        }
        Ok(())
    }

    /// Brings back the other sequences of requests that were preempted, once the prompt that they share is computed again.
    fn attach_others(&mut self) {
        let Engine { running, cache, .. } = self;
        for job in running.values_mut() {
            let running = || job.sequences.iter().filter(|sequence| sequence.is_running());
            let has_prompt = running().any(|sequence| sequence.num_computed >= job.request.prompt.len());
            // When the one that went ahead has ended already, the next goes ahead.
            let num_attached = if has_prompt { usize::MAX } else { usize::from(running().next().is_none()) };
            let reservation = job.reservation.as_mut().expect("a running job has a reservation");
            let missing = job.sequences.iter_mut().filter(|s| s.finish.is_none() && s.table.is_none());
            for sequence in missing.take(num_attached) {
                let (table, num_cached) = cache.attach(job.request.scope, &sequence.tokens, reservation);
                sequence.num_computed = num_cached;
                sequence.table = Some(table);
            }
        }
    }

    /// Preempts the latest request of a tenant that has more than its share, for one that has less.
    fn yield_to(&mut self, needy: TenantId, num_slots: usize) -> bool {
        let mut tenants: Vec<TenantId> = self.running.values().map(Job::tenant).collect();
        tenants.sort_unstable();
        tenants.dedup();
        let contender = |tenant: TenantId| Contender { tenant, num_running: self.running_of(tenant) };
        let running: Vec<Contender> = tenants.into_iter().map(contender).collect();
        let Some(tenant) = must_yield(&running, contender(needy), num_slots, self.options.max_sequences) else {
            return false;
        };
        let latest = self.running.iter().rev().find(|(_, job)| job.tenant() == tenant).map(|(&id, _)| id);
        latest.is_some_and(|id| self.preempt(id))
    }
}
