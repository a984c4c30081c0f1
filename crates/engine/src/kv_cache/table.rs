//! The blocks of one sequence.

use super::index::{Key, Scope};
use super::{BlockId, KvCache};

/// Which block holds which positions of a sequence. Made and given back by [`KvCache`] alone, and never cloned.
#[derive(Debug)]
#[must_use = "a table must be given back with KvCache::release"]
pub struct BlockTable {
    scope: Scope,
    blocks: Vec<BlockId>,
    /// The keys of the full blocks, in order.
    keys: Vec<Key>,
    /// Blocks promised to it and not taken yet.
    pub(super) reserved: usize,
}

/// Copy one block's keys and values to another, in every layer, before the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    pub from: BlockId,
    pub to: BlockId,
}

impl BlockTable {
    pub(super) fn new(scope: Scope) -> Self {
        BlockTable { scope, blocks: Vec::new(), keys: Vec::new(), reserved: 0 }
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

    pub(super) fn last_key(&self) -> Option<Key> {
        self.keys.last().copied()
    }

    pub(super) fn set_known(&mut self, key: Key) {
        self.keys.push(key);
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    pub(super) fn push_found(&mut self, block: BlockId, key: Key) {
        self.blocks.push(block);
        self.keys.push(key);
    }

    /// Puts another block at `i`; what is known of the content from there on no longer holds.
    pub(super) fn replace(&mut self, i: usize, block: BlockId) {
        self.blocks[i] = block;
        self.keys.truncate(i);
    }

    /// The same blocks without a reservation; the caller counts the references.
    pub(super) fn fork(&self) -> BlockTable {
        BlockTable { scope: self.scope, blocks: self.blocks.clone(), keys: self.keys.clone(), reserved: 0 }
    }

    pub(super) fn take_blocks(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.blocks)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // A leak would only show much later, as memory that never comes back.
        let leaked = !self.blocks.is_empty() || self.reserved > 0;
        debug_assert!(
            !leaked || std::thread::panicking(),
            "a block table was dropped without {}",
            std::any::type_name::<KvCache>()
        );
    }
}
