//! The prefix cache: finds the blocks of a prompt that were computed before, and evicts idle ones when their memory is
//! needed.
//!
//! A full block whose content is known is entered into the index of its scope, and can be found there after its last
//! user has gone. There is one index for each tenant and salt, and no lookup without a scope. Prefixes that the
//! operator declared shared have an index of their own, which every tenant's lookup may use.

use super::eviction_queues::EvictionOrder;
use super::prefix_index::{BlockHash, PrefixIndex};
use super::states::Snapshot;
use super::windows::KeptWindow;
use super::{BlockId, BlockTable, KvCache, Scope, TenantId};

/// The identity of a full block.
#[derive(Debug)]
pub(super) struct Content {
    pub(super) scope: Scope,
    hash: BlockHash,
    /// Number of blocks before it in its sequence; a chain is evicted from its end.
    pub(super) depth: u32,
    pub(super) tokens: Box<[u32]>,
    last_used: u64,
    /// The state at the block's end, if the model has states and one was saved.
    pub(super) snapshot: Option<Snapshot>,
    /// The window block beside it, if the model has window blocks and this one was kept.
    pub(super) window: Option<KeptWindow>,
}

/// A block that holds the next tokens of a prompt.
pub(super) struct FoundBlock {
    pub(super) block: BlockId,
    pub(super) hash: BlockHash,
}

impl KvCache {
    /// Declares a prefix shared: every tenant finds its whole blocks, no matter which tenant computed them.
    pub fn share_prefix(&mut self, tokens: Vec<u32>) {
        self.shared_prefixes.push(tokens);
    }

    /// Returns the number of blocks of a table that belong to shared prefixes.
    pub fn num_shared(&self, table: &BlockTable) -> usize {
        let is_shared = |block: &&BlockId| {
            let content = self.blocks[**block as usize].content.as_ref();
            content.is_some_and(|content| content.scope == Scope::SHARED)
        };
        table.blocks().iter().filter(is_shared).count()
    }

    /// Enters every block that `tokens` fill into the index. Their keys and values must be stored.
    pub fn index_full_blocks(&mut self, table: &mut BlockTable, tokens: &[u32]) {
        let num_before = table.num_hashed();
        // Without memory for a hash, a later step enters the block.
        while (table.num_hashed() + 1) * self.block_len <= tokens.len() && table.reserve_hash() {
            let i = table.num_hashed();
            let range = i * self.block_len..(i + 1) * self.block_len;
            let scope = self.scope_of_block(table.scope(), tokens, range.end);
            let parent = table.last_hash();
            let hash = self.hasher.hash(scope, parent, &tokens[range.clone()]);
            let block = table.blocks()[i];
            let index = self.indexes.entry(scope).or_default();
            // Another sequence of the scope may have computed the same block at the same time; the first one stays in
            // the index.
            if self.blocks[block as usize].content.is_none() && index.insert(hash, block) {
                let content = tokens[range].into();
                let entry = &mut self.blocks[block as usize];
                let (depth, last_used) = (i as u32, self.clock);
                entry.content =
                    Some(Content { scope, hash, depth, tokens: content, last_used, snapshot: None, window: None });
                let owner = std::mem::replace(&mut entry.owner, scope.tenant);
                self.usage_mut(owner).in_use -= 1;
                self.usage_mut(scope.tenant).in_use += 1;
                self.record_stored(scope, hash, parent, &tokens[i * self.block_len..(i + 1) * self.block_len]);
            }
            table.push_hash(hash);
            self.keep_snapshot(table, i, (scope, hash), &tokens[i * self.block_len..(i + 1) * self.block_len]);
        }
        self.drop_pending_snapshots(table);
        self.keep_windows(table, num_before, tokens);
    }

    /// Returns the longest chain of blocks in the index that `tokens` begins with.
    pub(super) fn find_prefix(&self, scope: Scope, tokens: &[u32]) -> Vec<FoundBlock> {
        let mut found = Vec::new();
        let mut parent = None;
        for (i, content) in tokens.chunks_exact(self.block_len).enumerate() {
            let scope = self.scope_of_block(scope, tokens, (i + 1) * self.block_len);
            let hash = self.hasher.hash(scope, parent, content);
            let Some(block) = self.indexes.get(&scope).and_then(|index| index.get(hash)) else { break };
            // Equal hashes are not enough: after a collision a request would read another prompt's keys and values.
            let holds = |stored: &Content| *stored.tokens == *content && stored.depth == i as u32;
            #[cfg(test)]
            let holds = |stored: &Content| self.hasher.is_trusted || holds(stored);
            if !self.blocks[block as usize].content.as_ref().is_some_and(holds) {
                break;
            }
            // Without memory for the list, the rest of the prefix is computed again.
            if found.try_reserve(1).is_err() {
                break;
            }
            found.push(FoundBlock { block, hash });
            parent = Some(hash);
        }
        found
    }

    /// Returns depth, hash and tokens of every block that can be found in a scope.
    pub(super) fn contents_of(&self, scope: Scope) -> impl Iterator<Item = (u32, BlockHash, &[u32])> {
        let blocks = self.indexes.get(&scope).into_iter().flat_map(PrefixIndex::blocks);
        let contents = blocks.filter_map(|block| self.blocks[block as usize].content.as_ref());
        contents.map(|content| (content.depth, content.hash, &*content.tokens))
    }

    /// Returns the shared scope for a block that lies wholly within a shared prefix, and `scope` for all others.
    pub(super) fn scope_of_block(&self, scope: Scope, tokens: &[u32], end: usize) -> Scope {
        let is_prefix =
            |prefix: &Vec<u32>| prefix.len() >= end && tokens.len() >= end && prefix[..end] == tokens[..end];
        if self.shared_prefixes.iter().any(is_prefix) { Scope::SHARED } else { scope }
    }

    /// Adds a user to a block that was found.
    pub(super) fn use_found(&mut self, block: BlockId) {
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

    /// Removes a user from a block. Returns whether it was the last one; the block is then idle if it can be found, and
    /// free otherwise.
    pub(super) fn drop_user(&mut self, block: BlockId) -> bool {
        let clock = self.clock;
        let entry = &mut self.blocks[block as usize];
        entry.num_users -= 1;
        if entry.num_users > 0 {
            return false;
        }
        self.usage.entry(entry.owner).or_default().in_use -= 1;
        match &mut entry.content {
            None => self.free.push(block),
            Some(content) => {
                content.last_used = clock;
                let tenant = content.scope.tenant;
                self.idle.add(tenant, EvictionOrder::new(clock, content.depth, block));
                self.usage_mut(tenant).idle += 1;
                self.evict_over_quota(tenant, 0);
            }
        }
        true
    }

    /// Evicts an idle block of the tenant that has most of them.
    pub(super) fn evict_one(&mut self) -> Option<BlockId> {
        self.evict_from(self.idle.next_tenant()?)
    }

    /// Evicts a tenant's least recently used idle block. The caller owns the block then.
    pub(super) fn evict_from(&mut self, tenant: TenantId) -> Option<BlockId> {
        let block = self.idle.pop(tenant)?;
        let content = self.blocks[block as usize].content.take().expect("an idle block has content");
        let index = self.indexes.get_mut(&content.scope).expect("the index it was entered into");
        index.remove(content.hash);
        self.evicted.insert(content.hash);
        if index.is_empty() {
            self.indexes.remove(&content.scope);
        }
        self.record_removed(content.scope, content.hash);
        self.forget_snapshot(content.scope, content.depth, block, content.snapshot);
        self.forget_window(content.scope, content.depth, block, content.window);
        self.usage_mut(tenant).idle -= 1;
        Some(block)
    }
}
