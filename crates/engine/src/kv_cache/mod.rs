//! Who owns which block of KV memory: reserve, grow, fork, release, and find again what a tenant has computed before.
//!
//! Blocks are counted references. A sequence holds a [`BlockTable`], which cannot be cloned: it is made by [`KvCache::admit`] or
//! [`KvCache::fork`] and given back with [`KvCache::release`]. A request holds a [`Reservation`], from which all its tables grow, so that
//! what was admitted cannot fail for memory later. A full block whose content is known is entered into its tenant's index and stays
//! findable after its last user has gone, until the memory is needed.
//!
//! Isolation is by structure: there is one index for each tenant (and salt), and no lookup without one. Blocks of prefixes that the
//! operator declared shared live in an index of their own.
//!
//! Nothing here touches memory or a device: copies that copy-on-write asks for are returned to the caller.

mod audit;
mod block_table;
mod idle_blocks;
mod prefix_index;

use std::collections::HashMap;

pub use block_table::{BlockCopy, BlockTable, Reservation};
pub use prefix_index::{Scope, TenantId};

use idle_blocks::{EvictionOrder, IdleBlocks};
use prefix_index::{BlockHash, BlockHasher, PrefixIndex};

/// A block's number, an index into `KvMemory`.
pub type BlockId = u32;

/// Why blocks could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum OutOfBlocks {
    /// Others hold the memory; some of it comes back when they finish.
    #[error("{needed} blocks are needed and {available} can be had")]
    Memory { needed: usize, available: usize },
    /// The tenant's own quota is used up.
    #[error("{needed} blocks are needed and the tenant's quota of {quota} leaves {available}")]
    Quota { needed: usize, quota: usize, available: usize },
}

#[derive(Debug)]
struct Block {
    /// Tables that hold it.
    num_users: u32,
    /// Who is charged for it while it is used or idle.
    owner: TenantId,
    /// What it holds, once it is full and entered into an index.
    content: Option<Content>,
}

/// The identity of a full block.
#[derive(Debug)]
struct Content {
    scope: Scope,
    key: BlockHash,
    /// Blocks before it in its sequence; a chain is evicted from its end.
    depth: u32,
    tokens: Box<[u32]>,
    last_used: u64,
}

/// What a tenant holds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Blocks in tables; one that several tables share counts once.
    pub in_use: usize,
    /// Blocks that nobody uses and that can be found again.
    pub idle: usize,
    /// Blocks promised to admitted sequences and not taken yet.
    pub reserved: usize,
}

/// The blocks of one KV memory.
#[derive(Debug)]
pub struct KvCache {
    block_len: usize,
    blocks: Vec<Block>,
    /// Blocks that hold nothing.
    free: Vec<BlockId>,
    indexes: HashMap<Scope, PrefixIndex>,
    idle: IdleBlocks,
    usage: HashMap<TenantId, Usage>,
    quotas: HashMap<TenantId, usize>,
    /// Prefixes that the operator declared shared, and who owns their blocks.
    shared_prefixes: Vec<Vec<u32>>,
    hasher: BlockHasher,
    /// Blocks promised to admitted sequences and not taken yet.
    reserved: usize,
    /// Advances with every admission; orders blocks by their last use.
    clock: u64,
}

impl KvCache {
    /// `secret` keys the hashes of contents, so that nobody can guess which tokens collide.
    pub fn new(num_blocks: usize, block_len: usize, secret: [u8; 32]) -> Self {
        assert!(block_len > 0, "a block holds at least one position");
        KvCache {
            block_len,
            blocks: (0..num_blocks)
                .map(|_| Block { num_users: 0, owner: Scope::SHARED.tenant, content: None })
                .collect(),
            // Taken from the end, so that the lowest numbers go first.
            free: (0..num_blocks as BlockId).rev().collect(),
            indexes: HashMap::new(),
            idle: IdleBlocks::default(),
            usage: HashMap::new(),
            quotas: HashMap::new(),
            shared_prefixes: Vec::new(),
            hasher: BlockHasher::new(secret),
            reserved: 0,
            clock: 0,
        }
    }

    /// Lets all tenants find the whole blocks of this prefix, whoever computes them.
    pub fn share_prefix(&mut self, tokens: Vec<u32>) {
        self.shared_prefixes.push(tokens);
    }

    /// Bounds the blocks that a tenant may hold: in use, promised and idle together.
    pub fn set_quota(&mut self, tenant: TenantId, num_blocks: usize) {
        self.quotas.insert(tenant, num_blocks);
    }

    pub fn quota(&self, tenant: TenantId) -> Option<usize> {
        self.quotas.get(&tenant).copied()
    }

    pub fn quotas(&self) -> &HashMap<TenantId, usize> {
        &self.quotas
    }

    /// Blocks of a table that lie in prefixes which the operator declared shared.
    pub fn num_shared(&self, table: &BlockTable) -> usize {
        let is_shared = |block: &&BlockId| {
            let content = self.blocks[**block as usize].content.as_ref();
            content.is_some_and(|content| content.scope == Scope::SHARED)
        };
        table.blocks().iter().filter(is_shared).count()
    }

    pub fn num_blocks(&self) -> usize {
        self.blocks.len()
    }

    /// Blocks for `num_positions` positions.
    pub fn blocks_for(&self, num_positions: usize) -> usize {
        num_positions.div_ceil(self.block_len)
    }

    /// Blocks that could be had now: free ones and idle ones, less those promised.
    pub fn num_available(&self) -> usize {
        self.free.len() + self.num_idle() - self.reserved
    }

    pub fn num_idle(&self) -> usize {
        self.idle.len()
    }

    /// Blocks promised and not taken yet.
    pub fn num_reserved(&self) -> usize {
        self.reserved
    }

    /// Blocks that some table holds.
    pub fn num_in_use(&self) -> usize {
        self.blocks.len() - self.free.len() - self.num_idle()
    }

    pub fn usage(&self, tenant: TenantId) -> Usage {
        self.usage.get(&tenant).copied().unwrap_or_default()
    }

    /// Begins a request: finds the longest prefix of `prompt` that the tenant may see, and promises `num_blocks` in all, found ones included.
    ///
    /// Gives the table, the promise for the rest, and how many of the prompt's tokens were found. At least the prompt's last token is
    /// left to compute, because its logits are wanted.
    pub fn admit(
        &mut self,
        scope: Scope,
        prompt: &[u32],
        num_blocks: usize,
    ) -> Result<(BlockTable, Reservation, usize), OutOfBlocks> {
        assert!(!prompt.is_empty(), "a sequence begins with a token");
        self.clock += 1;
        let found = self.find_prefix(scope, &prompt[..prompt.len() - 1]);
        let needed = num_blocks.max(self.blocks_for(prompt.len())) - found.len();
        // Found blocks that are idle now will be in use: they cannot also be evicted for the rest.
        let idle_found = found.iter().filter(|found| self.blocks[found.block as usize].num_users == 0).count();
        let reservation = self.reserve_beside(scope.tenant, needed, idle_found)?;
        let mut table = BlockTable::new(scope);
        for found in &found {
            self.take_found(found.block);
            table.push_found(found.block, found.key);
        }
        // Not before: what was found is not to be evicted for the rest.
        self.keep_within_quota(scope.tenant, 0);
        Ok((table, reservation, found.len() * self.block_len))
    }

    /// A table for another sequence of a request that runs already: what can be found of `tokens`, on the request's reservation.
    pub fn attach(&mut self, scope: Scope, tokens: &[u32], reservation: &mut Reservation) -> (BlockTable, usize) {
        let mut table = BlockTable::new(scope);
        for found in self.find_prefix(scope, &tokens[..tokens.len() - 1]) {
            // An idle block that is used now covers a part of what was promised.
            if self.blocks[found.block as usize].num_users == 0 && !self.draw_on(reservation) {
                break;
            }
            self.take_found(found.block);
            table.push_found(found.block, found.key);
        }
        let num_cached = table.blocks().len() * self.block_len;
        (table, num_cached)
    }

    /// A table for a sequence that begins anew, without looking for a prefix.
    pub fn empty_table(&self, scope: Scope) -> BlockTable {
        BlockTable::new(scope)
    }

    /// Promises blocks.
    pub fn reserve(&mut self, tenant: TenantId, num_blocks: usize) -> Result<Reservation, OutOfBlocks> {
        let reservation = self.reserve_beside(tenant, num_blocks, 0)?;
        self.keep_within_quota(tenant, 0);
        Ok(reservation)
    }

    /// Promises blocks, while `idle_found` idle ones are about to be used. The tenant's other idle ones have to make way after that.
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
        self.usage.entry(tenant).or_default().reserved += needed;
        self.reserved += needed;
        Ok(Reservation { tenant, num_blocks: needed })
    }

    /// Takes a promise back.
    pub fn cancel(&mut self, mut reservation: Reservation) {
        self.usage.entry(reservation.tenant).or_default().reserved -= reservation.num_blocks;
        self.reserved -= reservation.num_blocks;
        reservation.num_blocks = 0;
    }

    /// Makes sure that the table covers `num_positions`, from the promise first and from what is available after that.
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
        Ok(())
    }

    /// Whether the block of `position` is the table's alone and nobody can find it.
    pub fn is_writable(&self, table: &BlockTable, position: usize) -> bool {
        let block = &self.blocks[table.blocks()[position / self.block_len] as usize];
        block.num_users == 1 && block.content.is_none()
    }

    /// Makes the block of `position` the table's alone before it is written; the copy that this takes is the caller's to do.
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
        let to = self.take_block(reservation)?;
        table.replace(i, to);
        self.leave_block(from);
        Ok(Some(BlockCopy { from, to }))
    }

    /// A second table over the same blocks.
    pub fn fork(&mut self, table: &BlockTable) -> BlockTable {
        let fork = table.fork();
        for &block in fork.blocks() {
            self.blocks[block as usize].num_users += 1;
        }
        fork
    }

    /// Enters every block that `tokens` fill into the index; their keys and values are stored.
    pub fn index_full_blocks(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        while (table.num_known() + 1) * self.block_len <= tokens.len() {
            let i = table.num_known();
            let range = i * self.block_len..(i + 1) * self.block_len;
            let scope = self.scope_of_block(table.scope(), tokens, range.end);
            let key = self.hasher.key(scope, table.last_key(), &tokens[range.clone()]);
            let block = table.blocks()[i];
            let index = self.indexes.entry(scope).or_default();
            // Another sequence of the scope may have computed the same block at the same time: the first stays the findable one.
            if self.blocks[block as usize].content.is_none() && index.insert(key, block) {
                let tokens = tokens[range].into();
                let entry = &mut self.blocks[block as usize];
                entry.content = Some(Content { scope, key, depth: i as u32, tokens, last_used: self.clock });
                let owner = std::mem::replace(&mut entry.owner, scope.tenant);
                self.usage.entry(owner).or_default().in_use -= 1;
                self.usage.entry(scope.tenant).or_default().in_use += 1;
            }
            table.set_known(key);
        }
    }

    /// Gives a sequence's blocks back; those that can be found again stay until their memory is needed. Gives the number of blocks that
    /// nobody uses any more.
    pub fn release(&mut self, mut table: BlockTable) -> usize {
        table.take_blocks().into_iter().filter(|&block| self.leave_block(block)).count()
    }

    /// Gives a sequence's blocks back to the request that it belongs to: what nobody uses any more is promised to it again.
    pub fn release_into(&mut self, table: BlockTable, reservation: &mut Reservation) {
        let num_blocks = self.release(table);
        self.usage.entry(reservation.tenant).or_default().reserved += num_blocks;
        self.reserved += num_blocks;
        reservation.num_blocks += num_blocks;
        self.keep_within_quota(reservation.tenant, 0);
    }

    /// The longest chain of findable blocks that `tokens` begins with.
    fn find_prefix(&mut self, scope: Scope, tokens: &[u32]) -> Vec<Found> {
        let mut found = Vec::new();
        let mut parent = None;
        for (i, content) in tokens.chunks_exact(self.block_len).enumerate() {
            let scope = self.scope_of_block(scope, tokens, (i + 1) * self.block_len);
            let key = self.hasher.key(scope, parent, content);
            let Some(block) = self.indexes.get(&scope).and_then(|index| index.get(key)) else { break };
            // The hash finds a candidate, the tokens decide: a collision must not give anyone wrong text.
            let holds = |stored: &Content| *stored.tokens == *content && stored.depth == i as u32;
            #[cfg(test)]
            let holds = |stored: &Content| self.hasher.is_trusted || holds(stored);
            if !self.blocks[block as usize].content.as_ref().is_some_and(holds) {
                break;
            }
            found.push(Found { block, key });
            parent = Some(key);
        }
        found
    }

    /// Blocks that lie wholly within a declared prefix belong to everybody, all others to the tenant.
    fn scope_of_block(&self, scope: Scope, tokens: &[u32], end: usize) -> Scope {
        let declared = |prefix: &Vec<u32>| prefix.len() >= end && tokens.len() >= end && prefix[..end] == tokens[..end];
        if self.shared_prefixes.iter().any(declared) { Scope::SHARED } else { scope }
    }

    /// A block that holds nothing, charged to the reservation while it lasts.
    fn take_block(&mut self, reservation: &mut Reservation) -> Result<BlockId, OutOfBlocks> {
        let is_promised = reservation.num_blocks > 0;
        if !is_promised {
            self.check_quota(reservation.tenant, 1)?;
        }
        if !self.draw_on(reservation) {
            return Err(OutOfBlocks::Memory { needed: 1, available: 0 });
        }
        if !is_promised {
            self.keep_within_quota(reservation.tenant, 1);
        }
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict_one().expect("what is reserved or available can be had"),
        };
        self.usage.entry(reservation.tenant).or_default().in_use += 1;
        let entry = &mut self.blocks[block as usize];
        entry.owner = reservation.tenant;
        entry.num_users = 1;
        Ok(block)
    }

    /// Uses up one promised block; without a promise, one that is available. False when there is none.
    fn draw_on(&mut self, reservation: &mut Reservation) -> bool {
        if reservation.num_blocks == 0 {
            return self.num_available() > 0;
        }
        reservation.num_blocks -= 1;
        self.usage.entry(reservation.tenant).or_default().reserved -= 1;
        self.reserved -= 1;
        true
    }

    /// Whether the tenant's quota has room for `needed` more blocks; its idle ones can make way.
    fn check_quota(&self, tenant: TenantId, needed: usize) -> Result<(), OutOfBlocks> {
        let Some(&quota) = self.quotas.get(&tenant) else { return Ok(()) };
        let usage = self.usage(tenant);
        let held = usage.in_use + usage.reserved;
        if held + needed > quota {
            return Err(OutOfBlocks::Quota { needed, quota, available: quota.saturating_sub(held) });
        }
        Ok(())
    }

    /// One more user of a block that was found.
    fn take_found(&mut self, block: BlockId) {
        let clock = self.clock;
        let entry = &mut self.blocks[block as usize];
        entry.num_users += 1;
        let content = entry.content.as_mut().expect("a found block has content");
        if entry.num_users == 1 {
            self.idle.remove(content.scope.tenant, EvictionOrder::new(content.last_used, content.depth, block));
            let usage = self.usage.entry(entry.owner).or_default();
            usage.idle -= 1;
            usage.in_use += 1;
        }
        content.last_used = clock;
    }

    /// Whether nobody uses the block any more.
    fn leave_block(&mut self, block: BlockId) -> bool {
        let clock = self.clock;
        let entry = &mut self.blocks[block as usize];
        entry.num_users -= 1;
        if entry.num_users > 0 {
            return false;
        }
        let owner = entry.owner;
        self.usage.entry(owner).or_default().in_use -= 1;
        match &mut entry.content {
            None => self.free.push(block),
            Some(content) => {
                content.last_used = clock;
                let tenant = content.scope.tenant;
                self.idle.add(tenant, EvictionOrder::new(clock, content.depth, block));
                self.usage.entry(tenant).or_default().idle += 1;
                self.keep_within_quota(tenant, 0);
            }
        }
        true
    }

    /// Evicts a tenant's own idle blocks until what it holds fits its quota, with so many more.
    fn keep_within_quota(&mut self, tenant: TenantId, num_more: usize) {
        let Some(&quota) = self.quotas.get(&tenant) else { return };
        loop {
            let usage = self.usage(tenant);
            if usage.idle == 0 || usage.in_use + usage.reserved + usage.idle + num_more <= quota {
                return;
            }
            let block = self.evict_from(tenant).expect("an idle block was counted");
            self.free.push(block);
        }
    }

    /// Empties an idle block, of the tenant that has most of them.
    fn evict_one(&mut self) -> Option<BlockId> {
        self.evict_from(self.idle.first_to_give()?)
    }

    /// Empties a tenant's least recently used idle block.
    fn evict_from(&mut self, tenant: TenantId) -> Option<BlockId> {
        let block = self.idle.pop(tenant)?;
        let content = self.blocks[block as usize].content.take().expect("an idle block has content");
        let index = self.indexes.get_mut(&content.scope).expect("the index it was entered into");
        index.remove(content.key);
        if index.is_empty() {
            self.indexes.remove(&content.scope);
        }
        self.usage.entry(tenant).or_default().idle -= 1;
        Some(block)
    }
}

/// A block that holds the next tokens of a prompt.
struct Found {
    block: BlockId,
    key: BlockHash,
}

#[cfg(test)]
mod tests;
