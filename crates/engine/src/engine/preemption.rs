//! Takes the blocks of KV memory that a step writes to, and preempts a request when memory has run out.
//!
//! A preempted request gives all its blocks back and returns to the queue with its tokens. When it starts again, they
//! are computed again, to the same bits.

use std::cmp::Reverse;

use super::{Engine, PlannedChunk};
use crate::kv_cache::{BlockCopy, OutOfBlocks, TenantId};
use crate::sequence_group::{GroupId, SequenceGroup};

impl Engine {
    /// Takes the blocks for a sequence's next `num_tokens` positions. Returns false if the request was preempted or
    /// ended instead, or has to wait.
    pub(super) fn take_blocks(&mut self, id: GroupId, sequence: usize, num_tokens: usize) -> bool {
        loop {
            if !self.running.contains_key(&id) {
                return false;
            }
            match self.try_take_blocks(id, sequence, num_tokens) {
                Ok(copy) => {
                    return match copy.map_or(Ok(()), |copy| self.copy_block(copy)) {
                        Ok(()) => true,
                        Err(error) => {
                            self.fail_request(id, error.into());
                            false
                        }
                    };
                }
                Err(why) => {
                    // A tenant at its quota can only free its own blocks.
                    let tenant = self.running[&id].tenant();
                    let victim = self.victim(matches!(why, OutOfBlocks::Quota { .. }).then_some(tenant));
                    // The last running request is never preempted: no other one could free blocks for it.
                    match victim.filter(|_| self.running.len() > 1) {
                        Some(victim) => self.preempt(victim),
                        None => return false,
                    }
                }
            }
        }
    }

    fn try_take_blocks(
        &mut self,
        id: GroupId,
        sequence: usize,
        num_tokens: usize,
    ) -> Result<Option<BlockCopy>, OutOfBlocks> {
        let group = self.running.get_mut(&id).expect("a running request");
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        let sequence = &mut group.sequences[sequence];
        let table = sequence.table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, sequence.num_computed + num_tokens)?;
        self.cache.make_writable(table, reservation, sequence.num_computed)
    }

    fn copy_block(&mut self, copy: BlockCopy) -> Result<(), pellucid_model::Error> {
        let BlockCopy { from, to, windows } = copy;
        self.kv.copy_block(&self.devices, from, to)?;
        windows.map_or(Ok(()), |[from, to]| self.kv.copy_window_block(&self.devices, from, to))
    }

    /// Takes the block for a chunk that is launched ahead. Returns false if that would need a preemption or a copy.
    pub(super) fn take_block_ahead(&mut self, chunk: &PlannedChunk) -> bool {
        let group = self.running.get_mut(&chunk.group).expect("a running request");
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        let table = group.sequences[chunk.sequence].table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, chunk.positions.end).is_ok()
            && self.cache.is_writable(table, chunk.positions.start)
    }

    /// Returns the request to preempt when memory has run out: of `tenant`, or of the tenant that holds most blocks, a
    /// paused request first, then the lowest priority, then the latest to arrive. Priorities of different tenants are
    /// not compared.
    fn victim(&self, tenant: Option<TenantId>) -> Option<GroupId> {
        let tenant = tenant.or_else(|| self.largest_tenant())?;
        let groups = self.running.iter().filter(|(_, group)| group.tenant() == tenant);
        let order = |id: GroupId, group: &SequenceGroup| (!group.is_paused, group.request.priority, Reverse(id));
        groups.min_by_key(|(id, group)| order(**id, group)).map(|(&id, _)| id)
    }

    /// Takes a request out of the batch and puts it back into the queue, with its tokens.
    pub(super) fn preempt(&mut self, id: GroupId) {
        let Some(mut group) = self.running.remove(&id) else { return };
        group.release(&mut self.cache);
        group.sink.deliver();
        group.stats.preemptions += 1;
        self.stats.preemptions += 1;
        self.enqueue(id, group);
    }
}
