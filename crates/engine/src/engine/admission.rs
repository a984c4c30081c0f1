//! Who comes in: cancelled and late requests leave, then waiting ones begin, in fair turns, while there is room.

use std::time::Instant;

use super::{Engine, Overcommit};
use crate::kv_cache::{OutOfBlocks, TenantId};
use crate::scheduler::{Contender, must_yield, next_tenant};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Event, FinishReason};

/// What became of a request whose turn it was.
#[derive(Clone, Copy)]
enum Begin {
    Begun,
    /// Its tenant holds all that it may.
    AtQuota,
    /// Others hold what it needs.
    OutOfBlocks(Lack),
}

/// What a request needs and cannot have.
#[derive(Clone, Copy)]
enum Lack {
    /// Places among the sequences that run.
    Slots(usize),
    /// Blocks of KV memory, those that were found included: once it runs they count towards its tenant's share.
    Blocks(usize),
}

impl Engine {
    pub(crate) fn admit(&mut self) {
        let now = Instant::now();
        self.drop_cancelled();
        self.heed_controls(now);
        self.end_late(now);
        self.attach_others();
        // Who has no turn in this round. A tenant at its own quota waits for itself, and so does one that has something running. Whoever
        // has nothing and waits for room that others hold keeps the turn: were smaller requests let past, a large one might never begin.
        let mut passed: Vec<TenantId> = Vec::new();
        while let Some(tenant) = self.next_in_turn(&passed) {
            match self.begin_next(tenant, now, &mut passed) {
                Begin::Begun => {}
                Begin::AtQuota => passed.push(tenant),
                Begin::OutOfBlocks(_) if self.running_of(tenant) > 0 => passed.push(tenant),
                Begin::OutOfBlocks(_) => break,
            }
        }
    }

    pub(super) fn enqueue(&mut self, id: GroupId, group: SequenceGroup) {
        let tenant = group.tenant();
        let running = self.running.values().map(SequenceGroup::tenant);
        let present: Vec<TenantId> = running.chain(self.waiting.keys().copied()).collect();
        if !present.contains(&tenant) {
            self.served.arrive(tenant, present.into_iter());
        }
        let queue = self.waiting.entry(tenant).or_default();
        // The higher priority first, then who came first; someone who was preempted kept its number.
        let place = queue.partition_point(|(other, waiting)| {
            (std::cmp::Reverse(waiting.request.priority), *other) < (std::cmp::Reverse(group.request.priority), id)
        });
        queue.insert(place, (id, group));
    }

    fn drop_cancelled(&mut self) {
        let gone: Vec<GroupId> =
            self.running.iter().filter(|(_, group)| !group.sink.is_open()).map(|(&id, _)| id).collect();
        for id in gone {
            let mut group = self.running.remove(&id).expect("it was just there");
            group.release(&mut self.cache);
            self.stats.cancelled_requests += 1;
        }
        for queue in self.waiting.values_mut() {
            let before = queue.len();
            queue.retain(|(_, group)| group.sink.is_open());
            self.stats.cancelled_requests += (before - queue.len()) as u64;
        }
        self.waiting.retain(|_, queue| !queue.is_empty());
    }

    /// Replies whose time is over end where they are.
    fn end_late(&mut self, now: Instant) {
        let late =
            |group: &SequenceGroup| group.request.deadline.is_some_and(|deadline| now - group.arrived >= deadline);
        let running: Vec<GroupId> = self.running.iter().filter(|(_, group)| late(group)).map(|(&id, _)| id).collect();
        let waiting = self.waiting.values_mut().flat_map(|queue| queue.extract_if(.., |(_, group)| late(group)));
        let mut ended: Vec<SequenceGroup> = waiting.map(|(_, group)| group).collect();
        ended.extend(running.into_iter().filter_map(|id| self.running.remove(&id)));
        self.waiting.retain(|_, queue| !queue.is_empty());
        for mut group in ended {
            group.release(&mut self.cache);
            let holds_back = group.holds_back() || group.search.is_some();
            for sequence in group.sequences.iter_mut().filter(|sequence| sequence.finish.is_none()) {
                sequence.finish = Some(FinishReason::Deadline);
                if !holds_back && !group.unwanted.contains(&sequence.choice) {
                    let (choice, reason) = (sequence.choice, FinishReason::Deadline);
                    group.sink.send(Event::ChoiceEnd { choice, reason, token: None });
                }
            }
            // Before the prompt is computed there is one sequence, whatever was asked for.
            let unborn = if group.search.is_some() { 0..0 } else { group.sequences.len()..group.request.num_choices };
            for choice in unborn.filter(|choice| !group.unwanted.contains(choice)) {
                group.sink.send(Event::ChoiceEnd { choice, reason: FinishReason::Deadline, token: None });
            }
            group.complete(now);
            group.sink.deliver();
            self.stats.finished_requests += 1;
        }
    }

    fn running_of(&self, tenant: TenantId) -> usize {
        self.running.values().filter(|group| group.tenant() == tenant).map(SequenceGroup::num_slots).sum()
    }

    /// Blocks that a tenant has in use or was promised.
    fn blocks_of(&self, tenant: TenantId) -> usize {
        let usage = self.cache.usage(tenant);
        usage.in_use + usage.reserved
    }

    /// Those who have something running, each with what it has of something.
    fn running_tenants(&self, held: impl Fn(TenantId) -> usize) -> Vec<Contender> {
        let mut tenants: Vec<TenantId> = self.running.values().map(SequenceGroup::tenant).collect();
        tenants.sort_unstable();
        tenants.dedup();
        tenants.into_iter().map(|tenant| Contender { tenant, held: held(tenant) }).collect()
    }

    /// The tenant that has most blocks of those who have something running.
    pub(super) fn largest_tenant(&self) -> Option<TenantId> {
        let tenants = self.running_tenants(|tenant| self.blocks_of(tenant));
        tenants.into_iter().max_by_key(|c| (c.held, c.tenant)).map(|c| c.tenant)
    }

    fn next_in_turn(&self, passed: &[TenantId]) -> Option<TenantId> {
        let contenders: Vec<Contender> = (self.waiting.iter())
            .filter(|(tenant, queue)| !passed.contains(tenant) && queue.iter().any(|(_, group)| !group.is_paused))
            .map(|(&tenant, _)| Contender { tenant, held: self.running_of(tenant) })
            .collect();
        next_tenant(&contenders, &self.served)
    }

    /// Begins the tenant's next request that is not paused, if there is room for it now. Tenants that make way for it are passed over for
    /// the rest of the round.
    fn begin_next(&mut self, tenant: TenantId, now: Instant, passed: &mut Vec<TenantId>) -> Begin {
        let queue = self.waiting.get_mut(&tenant).expect("its turn comes while it waits");
        let next = queue.iter().position(|(_, group)| !group.is_paused).expect("something that is not paused");
        let (id, mut group) = queue.remove(next);
        self.waiting.retain(|_, queue| !queue.is_empty());
        loop {
            let outcome = self.begin(&mut group);
            let yielding = match outcome {
                Begin::Begun => {
                    if group.started.is_none() {
                        group.started = Some(now);
                        group.sink.send(Event::Started { cached_tokens: group.stats.cached_tokens });
                    }
                    self.running.insert(id, group);
                    return outcome;
                }
                Begin::AtQuota => None,
                Begin::OutOfBlocks(lack) => self.yielding_to(tenant, lack),
            };
            let Some(yielding) = yielding else {
                self.enqueue(id, group);
                return outcome;
            };
            // One that is paused does not come back by itself.
            let other = &self.running[&yielding];
            passed.extend((!other.is_paused).then_some(other.tenant()));
            self.preempt(yielding);
        }
    }

    /// Finds what is cached of the group's sequences and reserves the rest.
    fn begin(&mut self, group: &mut SequenceGroup) -> Begin {
        let slots: usize = self.running.values().map(SequenceGroup::num_slots).sum();
        if slots + group.num_slots() > self.options.max_sequences {
            return Begin::OutOfBlocks(Lack::Slots(group.num_slots()));
        }
        let needed = self.blocks_to_begin(group);
        match self.try_begin(group, needed) {
            Ok(()) => Begin::Begun,
            Err(out_of_blocks) => {
                group.release(&mut self.cache);
                match out_of_blocks {
                    OutOfBlocks::Quota { .. } => Begin::AtQuota,
                    OutOfBlocks::Memory { .. } => Begin::OutOfBlocks(Lack::Blocks(needed)),
                }
            }
        }
    }

    /// Blocks that a group reserves as it begins. Always enough for the tokens that its sequences have: nobody gives way for what is
    /// computed again after a preemption, only for what is new, and so everything ends.
    fn blocks_to_begin(&self, group: &SequenceGroup) -> usize {
        let Engine { options, model, .. } = self;
        let request = &group.request;
        let growth = match options.overcommit {
            Overcommit::Never => None,
            Overcommit::Unbounded { growth } => request.max_tokens.is_none().then_some(growth),
            Overcommit::Always => Some(0),
        };
        let Some(growth) = growth else { return request.blocks_needed(model.config(), options.block_len) };
        let longest = group.sequences.iter().filter(|sequence| sequence.finish.is_none()).map(|s| s.tokens.len()).max();
        let num_positions = longest.unwrap_or(request.prompt.len()).saturating_add(growth);
        request.blocks_for(
            group.num_slots(),
            num_positions.min(request.max_positions(model.config())),
            options.block_len,
        )
    }

    /// Room for the group's first sequence, and the promise for all. The others follow when its prompt is computed: they share those blocks.
    fn try_begin(&mut self, group: &mut SequenceGroup, needed: usize) -> Result<(), OutOfBlocks> {
        let scope = group.request.scope;
        let first = group.sequences.iter_mut().find(|sequence| sequence.finish.is_none());
        let sequence = first.expect("a group that waits has something to compute");
        // A prompt that is scored needs the logits of all its rows; so nothing of it is looked up.
        if group.request.score_prompt && group.prompt_logprobs.len() + 1 < group.request.prompt.len() {
            let blocks = needed.max(self.cache.blocks_for(sequence.tokens.len()));
            group.reservation = Some(self.cache.reserve(scope.tenant, blocks)?);
            sequence.table = Some(self.cache.empty_table(scope));
            return Ok(());
        }
        let (table, reservation, num_cached) = self.cache.admit(scope, &sequence.tokens, needed)?;
        sequence.num_computed = num_cached;
        sequence.table = Some(table);
        group.reservation = Some(reservation);
        if group.stats.preemptions == 0 {
            group.stats.cached_tokens = num_cached;
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
        for group in running.values_mut() {
            let running = || group.sequences.iter().filter(|sequence| sequence.is_running());
            let has_prompt = running().any(|sequence| sequence.num_computed >= group.request.prompt.len());
            // When the one that went ahead has ended already, the next goes ahead.
            let num_attached = if has_prompt { usize::MAX } else { usize::from(running().next().is_none()) };
            let reservation = group.reservation.as_mut().expect("a running group has a reservation");
            let missing = group.sequences.iter_mut().filter(|s| s.finish.is_none() && s.table.is_none());
            for sequence in missing.take(num_attached) {
                let (table, num_cached) = cache.attach(group.request.scope, &sequence.tokens, reservation);
                sequence.num_computed = num_cached;
                sequence.table = Some(table);
            }
        }
    }

    /// Who makes way for a tenant: whoever is paused, because it computes nothing with what it holds; else the latest of a tenant that has
    /// more than its share, for one that would have no more than its own.
    fn yielding_to(&self, needy: TenantId, lack: Lack) -> Option<GroupId> {
        if let Some(paused) = self.latest(|group| group.is_paused) {
            return Some(paused);
        }
        let yielding = match lack {
            Lack::Slots(needed) => self.must_yield(needy, |t| self.running_of(t), needed, self.options.max_sequences),
            Lack::Blocks(needed) => self.must_yield(needy, |t| self.blocks_of(t), needed, self.cache.num_blocks()),
        };
        yielding.and_then(|tenant| self.latest(|group| group.tenant() == tenant))
    }

    fn must_yield(
        &self,
        needy: TenantId,
        held: impl Fn(TenantId) -> usize,
        needed: usize,
        total: usize,
    ) -> Option<TenantId> {
        let needy = Contender { tenant: needy, held: held(needy) };
        must_yield(&self.running_tenants(held), needy, needed, total)
    }

    fn latest(&self, is_meant: impl Fn(&SequenceGroup) -> bool) -> Option<GroupId> {
        self.running.iter().rev().find(|(_, group)| is_meant(group)).map(|(&id, _)| id)
    }
}
