//! Blocks in the order of eviction, one queue for each tenant: the blocks that no sequence uses and that the prefix
//! cache can still find, and those with a snapshot of a recurrent state.
//!
//! The queues belong to tenants, not to scopes: a client may use any number of salts, and the cost of an eviction must
//! not grow with them.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use super::{BlockId, TenantId};

/// Position in a tenant's eviction queue: the least recently used first, and of those the deepest in its chain, because
/// a block whose predecessors are gone can never be found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct EvictionOrder {
    last_used: u64,
    depth: Reverse<u32>,
    block: BlockId,
}

impl EvictionOrder {
    pub(super) fn new(last_used: u64, depth: u32, block: BlockId) -> EvictionOrder {
        EvictionOrder { last_used, depth: Reverse(depth), block }
    }
}

#[derive(Debug, Default)]
pub(super) struct EvictionQueues {
    queues: HashMap<TenantId, BTreeSet<EvictionOrder>>,
    num_blocks: usize,
}

impl EvictionQueues {
    pub(super) fn len(&self) -> usize {
        self.num_blocks
    }

    pub(super) fn add(&mut self, tenant: TenantId, order: EvictionOrder) {
        let is_new = self.queues.entry(tenant).or_default().insert(order);
        self.num_blocks += usize::from(is_new);
    }

    pub(super) fn remove(&mut self, tenant: TenantId, order: EvictionOrder) {
        let was_there = self.queues.get_mut(&tenant).is_some_and(|queue| queue.remove(&order));
        self.num_blocks -= usize::from(was_there);
    }

    /// Removes and returns the tenant's first block to evict.
    pub(super) fn pop(&mut self, tenant: TenantId) -> Option<BlockId> {
        let order = self.queues.get_mut(&tenant)?.pop_first()?;
        self.num_blocks -= 1;
        Some(order.block)
    }

    /// Returns the tenant whose block is evicted next: the one with most blocks in its queue, so that a flood of
    /// requests evicts its own blocks first. Of several, the one with the least recently used block.
    pub(super) fn next_tenant(&self) -> Option<TenantId> {
        let oldest = |queue: &BTreeSet<EvictionOrder>| Reverse(queue.first().map(|order| order.last_used));
        let tenants = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        tenants.max_by_key(|(tenant, queue)| (queue.len(), oldest(queue), **tenant)).map(|(tenant, _)| *tenant)
    }
}
