//! The blocks of one sequence.

use super::BlockId;
use super::prefix_index::{BlockHash, Scope, TenantId};

/// Which block holds which positions of a sequence. Made and given back by [`KvCache`](super::KvCache) alone, and never cloned.
#[derive(Debug)]
#[must_use = "a table must be given back with KvCache::release"]
pub struct BlockTable {
    scope: Scope,
    blocks: Vec<BlockId>,
    /// The keys of the full blocks, in order.
    keys: Vec<BlockHash>,
}

/// Blocks promised to a request and not taken yet. Given back with [`KvCache::cancel`](super::KvCache::cancel).
#[derive(Debug)]
#[must_use = "a reservation must be given back with KvCache::cancel"]
pub struct Reservation {
    pub(super) tenant: TenantId,
    pub(super) num_blocks: usize,
}

impl Reservation {
    pub fn num_blocks(&self) -> usize {
        self.num_blocks
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        debug_assert!(
            self.num_blocks == 0 || std::thread::panicking(),
            "a reservation was dropped instead of cancelled"
        );
    }
}

/// Copy one block's keys and values to another, in every layer, before the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

impl BlockTable {
    pub(super) fn new(scope: Scope) -> Self {
        BlockTable { scope, blocks: Vec::new(), keys: Vec::new() }
    }

    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Full blocks whose content is known.
    pub(super) fn num_known(&self) -> usize {
        self.keys.len()
    }

    pub(super) fn last_key(&self) -> Option<BlockHash> {
        self.keys.last().copied()
    }

    pub(super) fn set_known(&mut self, key: BlockHash) {
        self.keys.push(key);
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    pub(super) fn push_found(&mut self, block: BlockId, key: BlockHash) {
        self.blocks.push(block);
        self.keys.push(key);
    }

    /// Puts another block at `i`; what is known of the content from there on no longer holds.
    pub(super) fn replace(&mut self, i: usize, block: BlockId) {
        self.blocks[i] = block;
        self.keys.truncate(i);
    }

    /// The same blocks; the caller counts the references.
    pub(super) fn fork(&self) -> BlockTable {
        BlockTable { scope: self.scope, blocks: self.blocks.clone(), keys: self.keys.clone() }
    }

    pub(super) fn take_blocks(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.blocks)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // A leak would only show much later, as memory that never comes back.
        debug_assert!(
            self.blocks.is_empty() || std::thread::panicking(),
            "a block table was dropped instead of released"
        );
    }
}
