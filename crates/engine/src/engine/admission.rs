//! Starts waiting requests, in fair turns between tenants, while there are sequences and blocks of KV memory for them.
//!
//! A request that could never fit, into the memory or into its tenant's quota, was refused at submission
//! (`request_limits`). What a quota counts is described in `kv_cache::quota`.

use std::cmp::Reverse;
use std::time::Instant;

use super::{Engine, Overcommit};
use crate::kv_cache::{OutOfBlocks, TenantId};
use crate::scheduler::{Contender, fits_share, next_tenant, tenant_to_preempt};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Event, fallible};

/// The result of an attempt to start a request.
#[derive(Clone, Copy)]
enum Admission {
    Started,
    /// Its tenant is at its quota of blocks.
    AtQuota,
    /// Other requests hold what it needs.
    Short(Shortage),
}

/// A resource of which too little is available for a request.
#[derive(Clone, Copy)]
enum Shortage {
    /// Running sequences, of `max_sequences`.
    Sequences,
    /// Blocks of KV memory.
    Blocks,
}

impl Engine {
    /// Handles everything that happens between two steps, then starts waiting requests.
    pub(crate) fn admit(&mut self) {
        let now = self.clock.now();
        self.drop_cancelled();
        self.apply_controls(now);
        self.end_expired(now);
        self.reattach_sequences();
        // Tenants that get no further turn now. A tenant at its quota waits for its own requests, and so does one that
        // has something running. A tenant that has nothing running and waits for what others hold keeps its turn: if
        // smaller requests were let past, a large one might never start.
        let mut skipped: Vec<TenantId> = Vec::new();
        while let Some(tenant) = self.next_in_turn(&skipped) {
            match self.start_next(tenant, now, &mut skipped) {
                Admission::Started => {}
                Admission::AtQuota => skipped.push(tenant),
                Admission::Short(_) if self.num_sequences_of(tenant) > 0 => skipped.push(tenant),
                Admission::Short(_) => break,
            }
        }
    }

    /// Puts a request into its tenant's queue: the higher priority first, then the earlier id. A preempted request
    /// keeps its id.
    pub(super) fn enqueue(&mut self, id: GroupId, mut group: SequenceGroup) {
        let tenant = group.tenant();
        let running = self.running.values().map(SequenceGroup::tenant);
        let present: Vec<TenantId> = running.chain(self.waiting.keys().copied()).collect();
        if !present.contains(&tenant) {
            self.served.arrive(tenant, present.into_iter());
        }
        let queue = self.waiting.entry(tenant).or_default();
        if let Err(error) = fallible::reserve(queue, 1) {
            self.waiting.retain(|_, queue| !queue.is_empty());
            group.sink.send(Event::Failed(error));
            self.stats.failed_requests += 1;
            return;
        }
        let index = queue.partition_point(|(other, waiting)| {
            (Reverse(waiting.request.priority), *other) < (Reverse(group.request.priority), id)
        });
        queue.insert(index, (id, group));
    }

    fn num_sequences_of(&self, tenant: TenantId) -> usize {
        self.running.values().filter(|group| group.tenant() == tenant).map(SequenceGroup::num_slots).sum()
    }

    /// Returns the number of blocks that a tenant uses or has reserved.
    fn num_blocks_of(&self, tenant: TenantId) -> usize {
        let usage = self.cache.usage(tenant);
        usage.in_use + usage.reserved
    }

    /// Returns the tenants that have a running request, each with what `held` says it holds.
    fn running_tenants(&self, held: impl Fn(TenantId) -> usize) -> Vec<Contender> {
        let mut tenants: Vec<TenantId> = self.running.values().map(SequenceGroup::tenant).collect();
        tenants.sort_unstable();
        tenants.dedup();
        tenants.into_iter().map(|tenant| Contender { tenant, held: held(tenant) }).collect()
    }

    /// Returns the tenant with a running request that holds most blocks.
    pub(super) fn largest_tenant(&self) -> Option<TenantId> {
        let tenants = self.running_tenants(|tenant| self.num_blocks_of(tenant));
        tenants.into_iter().max_by_key(|c| (c.held, c.tenant)).map(|c| c.tenant)
    }

    fn next_in_turn(&self, skipped: &[TenantId]) -> Option<TenantId> {
        let contenders: Vec<Contender> = (self.waiting.iter())
            .filter(|(tenant, queue)| !skipped.contains(tenant) && queue.iter().any(|(_, group)| !group.is_paused))
            .map(|(&tenant, _)| Contender { tenant, held: self.num_sequences_of(tenant) })
            .collect();
        next_tenant(&contenders, &self.served)
    }

    /// Starts the tenant's next request that is not paused, if it can start now. Other requests may be preempted for
    /// it; their tenants are added to `skipped`.
    fn start_next(&mut self, tenant: TenantId, now: Instant, skipped: &mut Vec<TenantId>) -> Admission {
        let queue = self.waiting.get_mut(&tenant).expect("its turn comes while it waits");
        let next = queue.iter().position(|(_, group)| !group.is_paused).expect("a request that is not paused");
        let (id, mut group) = queue.remove(next);
        self.waiting.retain(|_, queue| !queue.is_empty());
        loop {
            let outcome = self.try_start(&mut group);
            let victim = match outcome {
                Admission::Started => {
                    if group.started.is_none() {
                        group.started = Some(now);
                        let (request, cached_tokens) = (&group.request, group.stats.cached_tokens);
                        let explains = request.explain_cache && !request.score_prompt;
                        let explain = || self.cache.explain_miss(request.scope, &request.prompt, cached_tokens);
                        let miss = explains.then(explain).flatten().map(Box::new);
                        group.sink.send(Event::Started { cached_tokens, miss });
                    }
                    group.place = None;
                    self.running.insert(id, group);
                    return outcome;
                }
                Admission::AtQuota => None,
                Admission::Short(shortage) => self.victim_for(tenant, &group, shortage),
            };
            let Some(victim) = victim else {
                self.enqueue(id, group);
                return outcome;
            };
            // A paused request does not start again until it is resumed, so its tenant keeps its turn.
            let other = &self.running[&victim];
            skipped.extend((!other.is_paused).then_some(other.tenant()));
            self.preempt(victim);
        }
    }

    /// Finds the cached prefix of a request and reserves blocks for the rest.
    fn try_start(&mut self, group: &mut SequenceGroup) -> Admission {
        let num_running: usize = self.running.values().map(SequenceGroup::num_slots).sum();
        if num_running + group.num_slots() > self.options.max_sequences {
            return Admission::Short(Shortage::Sequences);
        }
        let needed = self.num_blocks_to_start(group);
        match self.reserve(group, needed) {
            Ok(()) => Admission::Started,
            Err(why) => {
                group.release(&mut self.cache);
                match why {
                    OutOfBlocks::Quota { .. } => Admission::AtQuota,
                    OutOfBlocks::Memory { .. } => Admission::Short(Shortage::Blocks),
                }
            }
        }
    }

    /// Returns the number of blocks that a request reserves when it starts, with those found in the prefix cache: once
    /// it runs, they count towards its tenant's share. It is always enough for the tokens that its sequences have: what
    /// is computed again after a preemption never causes another preemption, only new tokens do, so every request ends.
    fn num_blocks_to_start(&self, group: &SequenceGroup) -> usize {
        let Engine { options, model, .. } = self;
        let request = &group.request;
        let growth = match options.overcommit {
            Overcommit::Never => None,
            Overcommit::Unbounded { growth } => request.max_tokens.is_none().then_some(growth),
            Overcommit::Always => Some(0),
        };
        let Some(growth) = growth else { return request.blocks_needed(model.config(), options.block_len) };
        let unfinished = group.sequences.iter().filter(|sequence| sequence.finish.is_none());
        let longest = unfinished.map(|sequence| sequence.tokens.len()).max();
        let num_positions = longest.unwrap_or(request.prompt.len()).saturating_add(growth);
        let max_positions = request.max_positions(model.config());
        request.blocks_for(group.num_slots(), num_positions.min(max_positions), options.block_len)
    }

    /// Reserves `needed` blocks for a request and gives its first sequence a block table. The other sequences get
    /// theirs when the prompt is computed, because they share its blocks.
    fn reserve(&mut self, group: &mut SequenceGroup, needed: usize) -> Result<(), OutOfBlocks> {
        let scope = group.request.scope;
        let first = group.sequences.iter_mut().find(|sequence| sequence.finish.is_none());
        let sequence = first.expect("a waiting request has something to compute");
        // A prompt that is scored needs the logits of all its rows, so its cached blocks are of no use.
        if group.request.score_prompt && group.prompt_logprobs.len() + 1 < group.request.prompt.len() {
            let blocks = needed.max(self.cache.blocks_for(sequence.tokens.len()));
            group.reservation = Some(self.cache.reserve(scope.tenant, blocks)?);
            sequence.table = Some(self.cache.empty_table(scope));
            return Ok(());
        }
        let max_found = if self.cache.has_windows() { group.request.first_probed_position() } else { usize::MAX };
        let prompt = (&sequence.tokens[..], max_found);
        let (table, reservation, num_cached) = self.cache.admit_up_to(scope, prompt, needed)?;
        if group.stats.preemptions == 0 {
            group.stats.cached_tokens = num_cached;
            let num_shared = self.cache.num_shared(&table) * self.options.block_len;
            self.stats.looked_up_tokens += sequence.tokens.len() as u64;
            self.stats.cached_tokens += num_cached as u64;
            self.stats.shared_cached_tokens += num_shared as u64;
        }
        sequence.num_computed = num_cached;
        sequence.table = Some(table);
        group.reservation = Some(reservation);
        Ok(())
    }

    /// Gives the other sequences of a preempted request their block tables, once the prompt that they share is computed
    /// again.
    fn reattach_sequences(&mut self) {
        let Engine { running, cache, .. } = self;
        for group in running.values_mut() {
            let running = || group.sequences.iter().filter(|sequence| sequence.is_running());
            let has_prompt = running().any(|sequence| sequence.num_computed >= group.request.prompt.len());
            // If the sequence that computed the prompt has ended already, the next one computes it.
            let num_attached = if has_prompt { usize::MAX } else { usize::from(running().next().is_none()) };
            let reservation = group.reservation.as_mut().expect("a running request has a reservation");
            let missing = group.sequences.iter_mut().filter(|s| s.finish.is_none() && s.table.is_none());
            for sequence in missing.take(num_attached) {
                let (table, num_cached) = cache.attach(group.request.scope, &sequence.tokens, reservation);
                sequence.num_computed = num_cached;
                sequence.table = Some(table);
            }
        }
    }

    /// Returns the request to preempt so that `needy` can start `group`: a paused request, which computes nothing with
    /// what it holds; else the latest of a tenant that holds more than its share, if `needy` would then hold no more
    /// than its own shares of sequences and of blocks.
    fn victim_for(&self, needy: TenantId, group: &SequenceGroup, shortage: Shortage) -> Option<GroupId> {
        if let Some(paused) = self.latest(|group| group.is_paused) {
            return Some(paused);
        }
        let resource = |held: &dyn Fn(TenantId) -> usize| {
            (self.running_tenants(held), Contender { tenant: needy, held: held(needy) })
        };
        let sequences = resource(&|tenant| self.num_sequences_of(tenant));
        let blocks = resource(&|tenant| self.num_blocks_of(tenant));
        let num_slots = (group.num_slots(), self.options.max_sequences);
        let num_blocks = (self.num_blocks_to_start(group), self.cache.num_blocks());
        if !fits_share(&sequences.0, sequences.1, num_slots.0, num_slots.1)
            || !fits_share(&blocks.0, blocks.1, num_blocks.0, num_blocks.1)
        {
            return None;
        }
        let tenant = match shortage {
            Shortage::Sequences => tenant_to_preempt(&sequences.0, sequences.1, num_slots.0, num_slots.1),
            Shortage::Blocks => tenant_to_preempt(&blocks.0, blocks.1, num_blocks.0, num_blocks.1),
        }?;
        self.latest(|group| group.tenant() == tenant)
    }

    /// Returns the running request that arrived last among those for which `matches` holds.
    fn latest(&self, matches: impl Fn(&SequenceGroup) -> bool) -> Option<GroupId> {
        self.running.iter().rev().find(|(_, group)| matches(group)).map(|(&id, _)| id)
    }
}
