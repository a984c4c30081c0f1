//! Who owns which block of KV memory: reserve, grow, fork, release, and find again what a tenant has computed before.
//!
//! Blocks are counted references. A sequence holds a [`BlockTable`], which cannot be cloned: it is made by [`KvCache::admit`] or
//! [`KvCache::fork`] and given back with [`KvCache::release`]. A full block whose content is known is entered into its tenant's index
//! and stays findable after its last user has gone, until the memory is needed.
//!
//! Isolation is by structure: there is one index for each tenant (and salt), and no lookup without one. Blocks of prefixes that the
//! operator declared shared live in an index of their own.
//!
//! Nothing here touches memory or a device: copies that copy-on-write asks for are returned to the caller.

mod index;
mod table;

use std::collections::HashMap;

pub use index::{Scope, TenantId};
pub use table::{BlockCopy, BlockTable};

use index::{Index, Key, Keyer};

/// A block's number, an index into `KvMemory`.
pub type BlockId = u32;

/// Why blocks could not be had.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum NoRoom {
    /// Others hold the memory; some of it comes back when they finish.
    #[error("{needed} blocks are needed and {available} can be had")]
    Memory { needed: usize, available: usize },
    /// The tenant's own quota is used up.
    #[error("{needed} blocks are needed and the tenant's quota of {quota} leaves {available}")]
    Quota { needed: usize, quota: usize, available: usize },
}

#[derive(Debug, Default)]
struct Block {
    /// Tables that hold it.
    num_users: u32,
    /// What it holds, once it is full and entered into an index.
    content: Option<Content>,
}

/// The identity of a full block.
#[derive(Debug)]
struct Content {
    scope: Scope,
    key: Key,
    /// Blocks before it in its sequence; a chain is evicted from its end.
    depth: u32,
    tokens: Box<[u32]>,
    last_used: u64,
}

/// What a tenant holds.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct Usage {
    /// Blocks in tables, shared ones counted for each table.
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
    indexes: HashMap<Scope, Index>,
    usage: HashMap<TenantId, Usage>,
    quotas: HashMap<TenantId, usize>,
    /// Prefixes that the operator declared shared, and who owns their blocks.
    shared_prefixes: Vec<Vec<u32>>,
    keyer: Keyer,
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
            blocks: (0..num_blocks).map(|_| Block::default()).collect(),
            // Taken from the end, so that the lowest numbers go first.
            free: (0..num_blocks as BlockId).rev().collect(),
            indexes: HashMap::new(),
            usage: HashMap::new(),
            quotas: HashMap::new(),
            shared_prefixes: Vec::new(),
            keyer: Keyer::new(secret),
            reserved: 0,
            clock: 0,
        }
    }

    /// Lets all tenants find the whole blocks of this prefix, whoever computes them.
    pub fn share_prefix(&mut self, tokens: Vec<u32>) {
        self.shared_prefixes.push(tokens);
    }

    /// Bounds the blocks that a tenant may hold, in use and idle together.
    pub fn set_quota(&mut self, tenant: TenantId, num_blocks: usize) {
        self.quotas.insert(tenant, num_blocks);
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
        self.indexes.values().map(Index::num_idle).sum()
    }

    /// Blocks that some table holds.
    pub fn num_in_use(&self) -> usize {
        self.blocks.len() - self.free.len() - self.num_idle()
    }

    pub fn usage(&self, tenant: TenantId) -> Usage {
        self.usage.get(&tenant).copied().unwrap_or_default()
    }

    /// Begins a sequence: finds the longest prefix of `prompt` that the tenant may see, and reserves what `num_positions` in all will take.
    ///
    /// At least the prompt's last token is left to compute, because its logits are wanted.
    pub fn admit(&mut self, scope: Scope, prompt: &[u32], num_positions: usize) -> Result<(BlockTable, usize), NoRoom> {
        assert!(!prompt.is_empty(), "a sequence begins with a token");
        self.clock += 1;
        let found = self.find_prefix(scope, &prompt[..prompt.len() - 1]);
        let needed = self.blocks_for(num_positions.max(prompt.len())) - found.len();
        // Found blocks that are idle now will be in use: they cannot also be evicted for the rest.
        let idle_found = found.iter().filter(|found| self.blocks[found.block as usize].num_users == 0).count();
        let available = self.num_available().saturating_sub(idle_found);
        if needed > available {
            return Err(NoRoom::Memory { needed, available });
        }
        self.check_quota(scope.tenant, needed, idle_found)?;
        let mut table = BlockTable::new(scope);
        for found in &found {
            self.take_idle(found.block);
            table.push_found(found.block, found.key);
        }
        let usage = self.usage.entry(scope.tenant).or_default();
        usage.in_use += found.len();
        usage.reserved += needed;
        self.reserved += needed;
        table.reserved = needed;
        Ok((table, found.len() * self.block_len))
    }

    /// Makes sure that the table covers `num_positions`, from its reservation first and from what is available after that.
    pub fn grow(&mut self, table: &mut BlockTable, num_positions: usize) -> Result<(), NoRoom> {
        while table.blocks().len() < self.blocks_for(num_positions) {
            let block = self.take_block(table)?;
            table.push(block);
        }
        Ok(())
    }

    /// Makes the block of `position` the table's alone before it is written; the copy that this takes is the caller's to do.
    pub fn make_writable(&mut self, table: &mut BlockTable, position: usize) -> Result<Option<BlockCopy>, NoRoom> {
        let i = position / self.block_len;
        let from = table.blocks()[i];
        if self.blocks[from as usize].num_users == 1 && self.blocks[from as usize].content.is_none() {
            return Ok(None);
        }
        let to = self.take_block(table)?;
        table.replace(i, to);
        self.leave_block(from);
        self.usage.entry(table.scope().tenant).or_default().in_use -= 1;
        Ok(Some(BlockCopy { from, to }))
    }

    /// A second table over the same blocks, with a reservation of its own for `num_positions` in all.
    ///
    /// A block that is partly filled is copied by whichever of the two writes first, so both get one more block promised.
    pub fn fork(&mut self, table: &mut BlockTable, num_positions: usize) -> Result<BlockTable, NoRoom> {
        let copies = usize::from(table.blocks().len() > table.num_known());
        let growth = self.blocks_for(num_positions).saturating_sub(table.blocks().len());
        let needed = growth + 2 * copies;
        let available = self.num_available();
        if needed > available {
            return Err(NoRoom::Memory { needed, available });
        }
        let tenant = table.scope().tenant;
        self.check_quota(tenant, needed + table.blocks().len(), 0)?;
        let mut fork = table.fork();
        for &block in fork.blocks() {
            self.blocks[block as usize].num_users += 1;
        }
        fork.reserved = growth + copies;
        table.reserved += copies;
        let usage = self.usage.entry(tenant).or_default();
        usage.in_use += fork.blocks().len();
        usage.reserved += needed;
        self.reserved += needed;
        Ok(fork)
    }

    /// Enters every block that `tokens` fill into the index; their keys and values are stored.
    pub fn remember(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        while (table.num_known() + 1) * self.block_len <= tokens.len() {
            let i = table.num_known();
            let range = i * self.block_len..(i + 1) * self.block_len;
            let scope = self.scope_of_block(table.scope(), tokens, range.end);
            let key = self.keyer.key(scope, table.last_key(), &tokens[range.clone()]);
            let block = table.blocks()[i];
            let index = self.indexes.entry(scope).or_default();
            // Another sequence of the scope may have computed the same block at the same time: the first stays the findable one.
            if self.blocks[block as usize].content.is_none() && index.insert(key, block) {
                let tokens = tokens[range].into();
                self.blocks[block as usize].content =
                    Some(Content { scope, key, depth: i as u32, tokens, last_used: self.clock });
            }
            table.set_known(key);
        }
    }

    /// Gives a sequence's blocks back; those that can be found again stay until their memory is needed.
    pub fn release(&mut self, mut table: BlockTable) {
        let usage = self.usage.entry(table.scope().tenant).or_default();
        usage.in_use -= table.blocks().len();
        usage.reserved -= table.reserved;
        self.reserved -= table.reserved;
        table.reserved = 0;
        for block in table.take_blocks() {
            self.leave_block(block);
        }
    }

    /// The longest chain of findable blocks that `tokens` begins with.
    fn find_prefix(&mut self, scope: Scope, tokens: &[u32]) -> Vec<Found> {
        let mut found = Vec::new();
        let mut parent = None;
        for (i, content) in tokens.chunks_exact(self.block_len).enumerate() {
            let scope = self.scope_of_block(scope, tokens, (i + 1) * self.block_len);
            let key = self.keyer.key(scope, parent, content);
            let Some(block) = self.indexes.get(&scope).and_then(|index| index.get(key)) else { break };
            // The hash finds a candidate, the tokens decide: a collision must not give anyone wrong text.
            let holds = |stored: &Content| *stored.tokens == *content && stored.depth == i as u32;
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

    /// A block that holds nothing, charged to the table's reservation while it lasts.
    fn take_block(&mut self, table: &mut BlockTable) -> Result<BlockId, NoRoom> {
        let tenant = table.scope().tenant;
        if table.reserved == 0 {
            let available = self.num_available();
            if available == 0 {
                return Err(NoRoom::Memory { needed: 1, available });
            }
            self.check_quota(tenant, 1, 0)?;
        }
        let block = match self.free.pop() {
            Some(block) => block,
            None => self.evict_one().expect("what is reserved or available can be had"),
        };
        let usage = self.usage.entry(tenant).or_default();
        usage.in_use += 1;
        if table.reserved > 0 {
            table.reserved -= 1;
            usage.reserved -= 1;
            self.reserved -= 1;
        }
        self.blocks[block as usize].num_users = 1;
        Ok(block)
    }

    /// Room under the tenant's quota for `needed` more blocks, made by evicting its own idle ones.
    fn check_quota(&mut self, tenant: TenantId, needed: usize, idle_found: usize) -> Result<(), NoRoom> {
        let Some(&quota) = self.quotas.get(&tenant) else { return Ok(()) };
        let usage = self.usage(tenant);
        // Idle blocks that are about to be used count as used.
        let held = usage.in_use + usage.reserved + idle_found;
        if held + needed > quota {
            return Err(NoRoom::Quota { needed, quota, available: quota.saturating_sub(held) });
        }
        Ok(())
    }

    fn take_idle(&mut self, block: BlockId) {
        let clock = self.clock;
        let entry = &mut self.blocks[block as usize];
        entry.num_users += 1;
        let content = entry.content.as_mut().expect("a found block has content");
        if entry.num_users == 1 {
            let index = self.indexes.get_mut(&content.scope).expect("the index that found it");
            index.remove_idle(content.last_used, content.depth, block);
            self.usage.entry(content.scope.tenant).or_default().idle -= 1;
        }
        content.last_used = clock;
    }

    fn leave_block(&mut self, block: BlockId) {
        let clock = self.clock;
        let entry = &mut self.blocks[block as usize];
        entry.num_users -= 1;
        if entry.num_users > 0 {
            return;
        }
        match &mut entry.content {
            None => self.free.push(block),
            Some(content) => {
                content.last_used = clock;
                let (scope, depth) = (content.scope, content.depth);
                let index = self.indexes.get_mut(&scope).expect("the index it was entered into");
                index.add_idle(clock, depth, block);
                self.usage.entry(scope.tenant).or_default().idle += 1;
                self.keep_within_quota(scope.tenant);
            }
        }
    }

    /// Evicts a tenant's own idle blocks until what it holds fits its quota.
    fn keep_within_quota(&mut self, tenant: TenantId) {
        let Some(&quota) = self.quotas.get(&tenant) else { return };
        loop {
            let usage = self.usage(tenant);
            if usage.idle == 0 || usage.in_use + usage.reserved + usage.idle <= quota {
                return;
            }
            let scopes = self.indexes.iter().filter(|(scope, index)| scope.tenant == tenant && index.num_idle() > 0);
            let oldest = scopes.min_by_key(|(_, index)| index.oldest_idle()).map(|(scope, _)| *scope);
            let block = oldest.and_then(|scope| self.evict_from(scope)).expect("an idle block was counted");
            self.free.push(block);
        }
    }

    /// Empties the least recently used idle block of the tenant that has most of them: a flood pushes out its own blocks first.
    fn evict_one(&mut self) -> Option<BlockId> {
        let idle_of = |tenant: TenantId| self.usage(tenant).idle;
        let scope = (self.indexes.iter())
            .filter(|(_, index)| index.num_idle() > 0)
            .max_by_key(|(scope, index)| (idle_of(scope.tenant), std::cmp::Reverse(index.oldest_idle())))
            .map(|(scope, _)| *scope)?;
        self.evict_from(scope)
    }

    fn evict_from(&mut self, scope: Scope) -> Option<BlockId> {
        let index = self.indexes.get_mut(&scope)?;
        let block = index.pop_oldest_idle()?;
        let content = self.blocks[block as usize].content.take()?;
        index.remove(content.key);
        if index.is_empty() {
            self.indexes.remove(&scope);
        }
        self.usage.entry(scope.tenant).or_default().idle -= 1;
        Some(block)
    }
}

/// A block that holds the next tokens of a prompt.
struct Found {
    block: BlockId,
    key: Key,
}

#[cfg(test)]
mod tests;
