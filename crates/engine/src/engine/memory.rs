//! Room for a step: blocks for the rows that are to be written, copies of shared ones, and preemption when memory has run out.

use super::{Engine, Planned};
use crate::kv_cache::{BlockCopy, OutOfBlocks, TenantId};
use crate::sequence_group::{GroupId, SequenceGroup};

impl Engine {
    /// Makes sure that a sequence can write its next `num_tokens` positions; false when it was preempted or ended instead.
    pub(super) fn make_room(&mut self, id: GroupId, sequence: usize, num_tokens: usize) -> bool {
        loop {
            if !self.running.contains_key(&id) {
                return false;
            }
            match self.try_make_room(id, sequence, num_tokens) {
                Ok(copy) => {
                    let copied =
                        copy.map_or(Ok(()), |BlockCopy { from, to }| self.kv.copy_block(&*self.backend, from, to));
                    return match copied {
                        Ok(()) => true,
                        Err(error) => {
                            self.end_with(id, error.into());
                            false
                        }
                    };
                }
                Err(why) => {
                    // Nobody else's memory counts towards a tenant's quota.
                    let tenant = self.running[&id].tenant();
                    let victim = self.victim(matches!(why, OutOfBlocks::Quota { .. }).then_some(tenant));
                    // The last one running is never taken: nobody else could make room for it.
                    match victim.filter(|_| self.running.len() > 1) {
                        Some(victim) => self.preempt(victim),
                        None => return false,
                    }
                }
            }
        }
    }

    fn try_make_room(
        &mut self,
        id: GroupId,
        sequence: usize,
        num_tokens: usize,
    ) -> Result<Option<BlockCopy>, OutOfBlocks> {
        let group = self.running.get_mut(&id).expect("a running group");
        let reservation = group.reservation.as_mut().expect("a running group has a reservation");
        let sequence = &mut group.sequences[sequence];
        let table = sequence.table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, sequence.num_computed + num_tokens)?;
        self.cache.make_writable(table, reservation, sequence.num_computed)
    }

    /// Whether a sequence can write a position ahead of its turn, without anybody giving way.
    pub(super) fn has_room_ahead(&mut self, planned: &Planned) -> bool {
        let group = self.running.get_mut(&planned.group).expect("a running group");
        let reservation = group.reservation.as_mut().expect("a running group has a reservation");
        let table = group.sequences[planned.sequence].table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, planned.positions.end).is_ok()
            && self.cache.is_writable(table, planned.positions.start)
    }

    /// Who gives way when memory has run out: of the tenant that has most of it, or of the one given, whoever is paused, then the lowest
    /// priority, and of those the latest to come. Priorities of different tenants are not compared.
    fn victim(&self, tenant: Option<TenantId>) -> Option<GroupId> {
        let tenant = tenant.or_else(|| self.largest_tenant())?;
        let candidates = self.running.iter().filter(|(_, group)| group.tenant() == tenant);
        let place =
            |id: GroupId, group: &SequenceGroup| (!group.is_paused, group.request.priority, std::cmp::Reverse(id));
        candidates.min_by_key(|(id, group)| place(**id, group)).map(|(&id, _)| id)
    }

    /// Takes a request out of the batch and back into the queue, with its tokens.
    pub(super) fn preempt(&mut self, id: GroupId) {
        let Some(mut group) = self.running.remove(&id) else { return };
        group.release(&mut self.cache);
        group.sink.deliver();
        group.stats.preemptions += 1;
        self.stats.preemptions += 1;
        self.enqueue(id, group);
    }
}
