//! Which sequence holds which block of KV memory: reserve, grow, fork, release.
//!
//! Blocks are reference-counted. A sequence holds a [`BlockTable`], which cannot be cloned: [`KvCache::admit`] or
//! [`KvCache::fork`] create it and [`KvCache::release`] takes it back. A request holds a [`Reservation`], from which
//! all its tables grow, so that a request that reserved its maximum length cannot run out of memory later.
//!
//! `prefix_cache` finds blocks that were computed before, `quota` bounds what a tenant holds. Nothing here touches
//! memory or a device: the copies that copy-on-write needs are returned to the caller.

mod audit;
mod block_table;
mod events;
mod eviction_queues;
mod prefix_cache;
mod prefix_index;
mod prefix_miss;
mod quota;
mod scope;
mod states;
mod windows;

use std::collections::HashMap;

pub use block_table::{BlockCopy, BlockTable, Reservation};
pub use events::{KvEvent, KvEventSink};
pub use prefix_miss::{MissReason, PrefixDifference, PrefixMiss};
pub use quota::TenantUsage;
pub use scope::{Scope, TenantId};
pub use states::{StateCopy, StateOptions, StatePlan, StateSlot};
pub use windows::{WindowBlock, WindowOptions};

use events::KvEventLog;
use eviction_queues::EvictionQueues;
use prefix_cache::Content;
use prefix_index::{BlockHasher, PrefixIndex};
use prefix_miss::EvictedBlocks;
use states::StateSlots;
use windows::Windows;

use crate::Error;

/// A block's number, an index into `KvMemory`.
pub type BlockId = u32;

/// Why blocks could not be reserved or taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OutOfBlocks {
    /// Other requests hold the memory; some of it becomes free when they end.
    #[error("{needed} blocks of KV memory are needed, but only {available} are available")]
    Memory {
        /// Blocks that are needed.
        needed: usize,
        /// Blocks that are free or idle, and not reserved.
        available: usize,
    },
    /// The tenant's quota is used up.
    #[error("{needed} blocks of KV memory are needed, but the tenant's quota of {quota} leaves {available}")]
    Quota {
        /// Blocks that are needed.
        needed: usize,
        /// Maximum blocks of the tenant.
        quota: usize,
        /// Blocks that the tenant may still take.
        available: usize,
    },
}

#[derive(Debug)]
struct Block {
    /// Tables that hold it.
    num_users: u32,
    /// The tenant whose usage it counts for, in use or idle.
    owner: TenantId,
    /// Its content, once it is full and in an index.
    content: Option<Content>,
}

/// The blocks of one KV memory.
#[derive(Debug)]
pub struct KvCache {
    block_len: usize,
    blocks: Vec<Block>,
    /// Blocks without content.
    free: Vec<BlockId>,
    indexes: HashMap<Scope, PrefixIndex>,
    idle: EvictionQueues,
    usage: HashMap<TenantId, TenantUsage>,
    quotas: HashMap<TenantId, usize>,
    /// Prefixes that the operator declared shared.
    shared_prefixes: Vec<Vec<u32>>,
    hasher: BlockHasher,
    evicted: EvictedBlocks,
    /// Blocks that are reserved and not taken yet, of all requests.
    num_reserved: usize,
    /// Advances with every admission; orders blocks by their last use.
    clock: u64,
    /// Present if the model has recurrent states.
    states: Option<StateSlots>,
    /// Present if layers with windows have blocks of their own.
    windows: Option<Windows>,
    /// Present if someone follows the changes of the prefix cache.
    events: Option<KvEventLog>,
}

impl KvCache {
    /// Creates a cache of free blocks. `secret` is the key of the content hashes, so that no client can predict which
    /// tokens collide.
    pub fn new(num_blocks: usize, block_len: usize, secret: [u8; 32]) -> Self {
        assert!(block_len > 0, "a block holds at least one position");
        KvCache {
            block_len,
            blocks: (0..num_blocks)
                .map(|_| Block { num_users: 0, owner: Scope::SHARED.tenant, content: None })
                .collect(),
            // Blocks are taken from the end, so the lowest numbers go first.
            free: (0..num_blocks as BlockId).rev().collect(),
            indexes: HashMap::new(),
            idle: EvictionQueues::default(),
            usage: HashMap::new(),
            quotas: HashMap::new(),
            shared_prefixes: Vec::new(),
            hasher: BlockHasher::new(secret),
            evicted: EvictedBlocks::default(),
            num_reserved: 0,
            clock: 0,
            states: None,
            windows: None,
            events: None,
        }
    }

    /// Returns the number of all blocks.
    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the number of positions in a block.
    pub fn block_len(&self) -> usize {
        self.block_len
    }

    /// Returns the number of blocks that hold `num_positions` positions.
    pub fn blocks_for(&self, num_positions: usize) -> usize {
        num_positions.div_ceil(self.block_len)
    }

    /// Returns the number of blocks that could be reserved now: free and idle ones, less those that are reserved.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_idle() - self.num_reserved
    }

    /// Returns the number of blocks that no table holds and that the prefix cache can find.
    pub fn num_idle(&self) -> usize {
        self.idle.len()
    }

    /// Returns the number of blocks that are reserved and not taken yet.
    pub fn num_reserved(&self) -> usize {
        self.num_reserved
    }

    /// Returns the number of blocks that some table holds.
    pub fn num_in_use(&self) -> usize {
        self.blocks.len() - self.free.len() - self.num_idle()
    }

    /// Starts a request: finds the longest cached prefix of `prompt` that its scope may see, and reserves `num_blocks`
    /// in all, the blocks that were found included.
    ///
    /// Returns the table, the reservation for the rest, and the number of prompt tokens that were found. The prompt's
    /// last token is never among them, because its logits are needed.
    pub fn admit(
        &mut self,
        scope: Scope,
        prompt: &[u32],
        num_blocks: usize,
    ) -> Result<(BlockTable, Reservation, usize), OutOfBlocks> {
        self.admit_up_to(scope, (prompt, usize::MAX), num_blocks)
    }

    /// [`KvCache::admit`] with at most `max_found` tokens of the prompt found.
    pub fn admit_up_to(
        &mut self,
        scope: Scope,
        (prompt, max_found): (&[u32], usize),
        num_blocks: usize,
    ) -> Result<(BlockTable, Reservation, usize), OutOfBlocks> {
        assert!(!prompt.is_empty(), "a sequence begins with a token");
        self.clock += 1;
        let mut table = BlockTable::new(scope);
        let mut found = self.find_prefix(scope, &prompt[..max_found.min(prompt.len() - 1)]);
        // Without memory for the list, the prefix is computed again.
        if !table.reserve(self.blocks_for(prompt.len())) {
            found.clear();
        }
        let num_found = self.cut_to_window(&mut found);
        self.cut_to_snapshot(&mut found);
        let needed = num_blocks.max(self.blocks_for(prompt.len())) - found.len();
        // Found blocks that are idle now will be in use, so they cannot be evicted for the rest.
        let idle_found = found.iter().filter(|found| self.blocks[found.block as usize].num_users == 0).count();
        let reservation = self.reserve_beside(scope.tenant, needed, idle_found)?;
        for found in &found {
            self.use_found(found.block);
            table.push_found(found.block, found.hash);
        }
        self.use_found_windows(&mut table);
        self.keep_windows_of(&mut table, prompt.len(), num_found);
        self.add_live_state(&mut table);
        if let Some(last) = found.last() {
            self.restore(last.block, &table);
        }
        // After the found blocks are in use, so that they are not evicted here.
        self.evict_over_quota(scope.tenant, 0);
        Ok((table, reservation, found.len() * self.block_len))
    }

    /// Returns a table for another sequence of a running request, with the blocks of `tokens` that the prefix cache
    /// finds, and the number of tokens in them.
    pub fn attach(&mut self, scope: Scope, tokens: &[u32], reservation: &mut Reservation) -> (BlockTable, usize) {
        let mut table = BlockTable::new(scope);
        let has_memory = table.reserve(self.blocks_for(tokens.len()));
        let mut found = if has_memory { self.find_prefix(scope, &tokens[..tokens.len() - 1]) } else { Vec::new() };
        self.cut_to_window(&mut found);
        self.cut_to_snapshot(&mut found);
        let num_idle = found.iter().filter(|found| self.blocks[found.block as usize].num_users == 0).count();
        // A part of the chain would end without a snapshot or without its window.
        if (self.has_states() || self.has_windows()) && num_idle > reservation.num_blocks {
            found.clear();
        }
        for found in &found {
            // An idle block that is used now takes the place of a reserved one.
            if self.blocks[found.block as usize].num_users == 0 && !self.use_reserved(reservation) {
                break;
            }
            self.use_found(found.block);
            table.push_found(found.block, found.hash);
        }
        self.use_found_windows(&mut table);
        self.add_live_state(&mut table);
        if let Some(last) = found.last() {
            self.restore(last.block, &table);
        }
        let num_cached = table.blocks().len() * self.block_len;
        (table, num_cached)
    }

    /// Returns a table without blocks, for a sequence that must not use the prefix cache.
    pub fn empty_table(&mut self, scope: Scope) -> BlockTable {
        let mut table = BlockTable::new(scope);
        self.add_live_state(&mut table);
        table
    }

    /// Reserves blocks.
    pub fn reserve(&mut self, tenant: TenantId, num_blocks: usize) -> Result<Reservation, OutOfBlocks> {
        let reservation = self.reserve_beside(tenant, num_blocks, 0)?;
        self.evict_over_quota(tenant, 0);
        Ok(reservation)
    }

    /// Reserves blocks for a request that will also use `idle_found` blocks which are idle now. The caller then evicts
    /// idle blocks beyond the tenant's quota.
    fn reserve_beside(
        &mut self,
        tenant: TenantId,
        needed: usize,
        idle_found: usize,
    ) -> Result<Reservation, OutOfBlocks> {
        let available = self.num_available().saturating_sub(idle_found);
        if needed > available {
            return Err(OutOfBlocks::Memory { needed, available });
        }
        self.check_quota(tenant, needed + idle_found)?;
        self.usage_mut(tenant).reserved += needed;
        self.num_reserved += needed;
        Ok(Reservation { tenant, num_blocks: needed })
    }

    /// Gives a reservation back.
    pub fn cancel(&mut self, mut reservation: Reservation) {
        self.usage_mut(reservation.tenant).reserved -= reservation.num_blocks;
        self.num_reserved -= reservation.num_blocks;
        reservation.num_blocks = 0;
    }

    /// Extends the table to `num_positions` positions, with reserved blocks first and available ones after that.
    pub fn grow(
        &mut self,
        table: &mut BlockTable,
        reservation: &mut Reservation,
        num_positions: usize,
    ) -> Result<(), OutOfBlocks> {
        while table.blocks().len() < self.blocks_for(num_positions) {
            let block = self.take_block(reservation)?;
            table.push(block);
        }
        self.grow_windows(table)
    }

    /// Whether only this table holds the block of `position`, and the prefix cache cannot find it.
    pub fn is_writable(&self, table: &BlockTable, position: usize) -> bool {
        let block = &self.blocks[table.blocks()[position / self.block_len] as usize];
        block.num_users == 1 && block.content.is_none()
    }

    /// Makes the block of `position` writable. Returns the copy that the caller must make, if the block was shared.
    pub fn make_writable(
        &mut self,
        table: &mut BlockTable,
        reservation: &mut Reservation,
        position: usize,
    ) -> Result<Option<BlockCopy>, OutOfBlocks> {
        if self.is_writable(table, position) {
            return Ok(None);
        }
        let i = position / self.block_len;
        let from = table.blocks()[i];
        let window = self.has_windows().then(|| self.take_window_block()).transpose()?;
        let to = match self.take_block(reservation) {
            Ok(to) => to,
            Err(error) => {
                window.into_iter().for_each(|window| self.drop_holder(window));
                return Err(error);
            }
        };
        let windows = window.map(|window| self.replace_window(table, i, window));
        table.replace(i, to);
        self.drop_user(from);
        Ok(Some(BlockCopy { from, to, windows }))
    }

    /// Returns a second table over the same blocks, with a copy of the live state.
    pub fn fork(&mut self, table: &BlockTable) -> Result<BlockTable, Error> {
        let mut fork = table.fork()?;
        self.fork_state(table, &mut fork);
        self.fork_windows(table, &mut fork);
        for &block in fork.blocks() {
            self.blocks[block as usize].num_users += 1;
        }
        Ok(fork)
    }

    /// Takes a sequence's blocks back. Those in an index stay findable until their memory is needed. Returns the number
    /// of blocks that no sequence uses any more.
    pub fn release(&mut self, mut table: BlockTable) -> usize {
        self.release_states(&mut table);
        self.release_windows(&mut table);
        table.take_blocks().into_iter().filter(|&block| self.drop_user(block)).count()
    }

    /// Takes the blocks of a sequence of `tokens` back, which may go on in a later request.
    pub fn end(&mut self, table: BlockTable, tokens: &[u32]) {
        self.keep_window(&table, table.num_hashed(), tokens);
        self.release(table);
    }

    /// Takes a sequence's blocks back and reserves those that no sequence uses any more for the same request.
    pub fn release_into(&mut self, table: BlockTable, reservation: &mut Reservation) {
        let num_blocks = self.release(table);
        self.usage_mut(reservation.tenant).reserved += num_blocks;
        self.num_reserved += num_blocks;
        reservation.num_blocks += num_blocks;
        self.evict_over_quota(reservation.tenant, 0);
    }

    /// Takes a block without content: a reserved one while there are any, then an available one within the tenant's
    /// quota.
    fn take_block(&mut self, reservation: &mut Reservation) -> Result<BlockId, OutOfBlocks> {
        let is_reserved = reservation.num_blocks > 0;
        if !is_reserved {
            self.check_quota(reservation.tenant, 1)?;
        }
        if !self.use_reserved(reservation) {
            return Err(OutOfBlocks::Memory { needed: 1, available: 0 });
        }
        if !is_reserved {
            self.evict_over_quota(reservation.tenant, 1);
        }
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict_one().expect("a block that is reserved or available is free or idle"),
        };
        self.usage_mut(reservation.tenant).in_use += 1;
        let entry = &mut self.blocks[block as usize];
        entry.owner = reservation.tenant;
        entry.num_users = 1;
        Ok(block)
    }

    /// Uses up one reserved block. Without a reservation, returns whether a block is available.
    fn use_reserved(&mut self, reservation: &mut Reservation) -> bool {
        if reservation.num_blocks == 0 {
            return self.num_available() > 0;
        }
        reservation.num_blocks -= 1;
        self.usage_mut(reservation.tenant).reserved -= 1;
        self.num_reserved -= 1;
        true
    }
}

#[cfg(test)]
mod tests;
