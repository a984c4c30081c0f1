//! Blocks that nobody uses and that can be found again: one queue for each tenant, in the order in which they make way.
//!
//! A tenant may have any number of scopes (a salt makes one), so the queues are the tenants': what an eviction costs does not grow with
//! the salts that somebody thinks of.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};

use super::{BlockId, TenantId};

/// When and where a block was last used. The oldest goes first, and of those the deepest in its chain: a block without its predecessors
/// can never be found.
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
pub(super) struct IdleBlocks {
    queues: HashMap<TenantId, BTreeSet<EvictionOrder>>,
    num_blocks: usize,
}

impl IdleBlocks {
    pub(super) fn len(&self) -> usize {
        self.num_blocks
    }

    pub(super) fn add(&mut self, tenant: TenantId, place: EvictionOrder) {
        let is_new = self.queues.entry(tenant).or_default().insert(place);
        self.num_blocks += usize::from(is_new);
    }

    pub(super) fn remove(&mut self, tenant: TenantId, place: EvictionOrder) {
        let was_there = self.queues.get_mut(&tenant).is_some_and(|queue| queue.remove(&place));
        self.num_blocks -= usize::from(was_there);
    }

    /// Takes the oldest of a tenant's.
    pub(super) fn pop(&mut self, tenant: TenantId) -> Option<BlockId> {
        let place = self.queues.get_mut(&tenant)?.pop_first()?;
        self.num_blocks -= 1;
        Some(place.block)
    }

    /// The tenant that has most of them, and of several the one with the oldest: a flood pushes out its own blocks first.
    pub(super) fn first_to_give(&self) -> Option<TenantId> {
        let oldest = |queue: &BTreeSet<EvictionOrder>| Reverse(queue.first().map(|place| place.last_used));
        let tenants = self.queues.iter().filter(|(_, queue)| !queue.is_empty());
        tenants.max_by_key(|(tenant, queue)| (queue.len(), oldest(queue), **tenant)).map(|(tenant, _)| *tenant)
    }
}
