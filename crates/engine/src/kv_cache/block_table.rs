//! The blocks of one sequence, and the blocks reserved for one request.

use super::prefix_index::BlockHash;
use super::states::TableStates;
use super::windows::TableWindows;
use super::{BlockId, Scope, TenantId, WindowBlock};
use crate::{Error, fallible};

/// Maps the positions of a sequence to blocks. Only [`KvCache`](super::KvCache) creates tables and takes them back; a
/// table cannot be cloned.
#[derive(Debug)]
#[must_use = "a table must be given back with KvCache::release"]
pub struct BlockTable {
    scope: Scope,
    blocks: Vec<BlockId>,
    /// Hashes of the full blocks whose content is known, in order.
    hashes: Vec<BlockHash>,
    /// Slots of recurrent states; none for a model without them.
    pub(super) states: TableStates,
    /// Blocks of layers with windows; none for a model without them.
    pub(super) windows: TableWindows,
}

/// Blocks that a request may still take. Given back with [`KvCache::cancel`](super::KvCache::cancel).
#[derive(Debug)]
#[must_use = "a reservation must be given back with KvCache::cancel"]
pub struct Reservation {
    pub(super) tenant: TenantId,
    pub(super) num_blocks: usize,
}

impl Reservation {
    /// Returns the number of blocks that are left.
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

/// A copy of one block's keys and values to another, in every layer, that the caller must make before the next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockCopy {
    /// The block to read.
    pub from: BlockId,
    /// The block to write.
    pub to: BlockId,
    /// The window blocks to read and to write, if layers with windows have blocks of their own.
    pub windows: Option<[WindowBlock; 2]>,
}

impl BlockTable {
    pub(super) fn new(scope: Scope) -> Self {
        let (states, windows) = (TableStates::default(), TableWindows::default());
        BlockTable { scope, blocks: Vec::new(), hashes: Vec::new(), states, windows }
    }

    /// Returns the blocks in the order of the positions.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }

    /// Returns the scope of the sequence.
    pub fn scope(&self) -> Scope {
        self.scope
    }

    /// Returns the number of full blocks whose content is known.
    pub(super) fn num_hashed(&self) -> usize {
        self.hashes.len()
    }

    /// Returns the hashes of the full blocks whose content is known.
    pub(super) fn hashes(&self) -> &[BlockHash] {
        &self.hashes
    }

    pub(super) fn last_hash(&self) -> Option<BlockHash> {
        self.hashes.last().copied()
    }

    /// Makes room for one more hash. Returns false if there is no memory for it.
    pub(super) fn reserve_hash(&mut self) -> bool {
        self.hashes.try_reserve(1).is_ok()
    }

    /// Sets the hash of the first block that has none.
    pub(super) fn push_hash(&mut self, hash: BlockHash) {
        self.hashes.push(hash);
    }

    pub(super) fn push(&mut self, block: BlockId) {
        self.blocks.push(block);
    }

    /// Adds a block that was found in the prefix cache.
    pub(super) fn push_found(&mut self, block: BlockId, hash: BlockHash) {
        self.blocks.push(block);
        self.hashes.push(hash);
    }

    /// Replaces block `i`. The hashes from there on no longer hold.
    pub(super) fn replace(&mut self, i: usize, block: BlockId) {
        self.blocks[i] = block;
        self.hashes.truncate(i);
    }

    /// Returns a second table over the same blocks, without states and windows. The caller counts the references.
    pub(super) fn fork(&self) -> Result<BlockTable, Error> {
        let (blocks, hashes) = (fallible::copy_of(&self.blocks)?, fallible::copy_of(&self.hashes)?);
        let (states, windows) = (TableStates::default(), TableWindows::default());
        Ok(BlockTable { scope: self.scope, blocks, hashes, states, windows })
    }

    /// Makes room for `num_blocks` more blocks with hashes. Returns false if there is no memory for them.
    pub(super) fn reserve(&mut self, num_blocks: usize) -> bool {
        self.blocks.try_reserve(num_blocks).is_ok() && self.hashes.try_reserve(num_blocks).is_ok()
    }

    pub(super) fn take_blocks(&mut self) -> Vec<BlockId> {
        std::mem::take(&mut self.blocks)
    }
}

impl Drop for BlockTable {
    fn drop(&mut self) {
        // Without this, a leak would show much later, as memory that is never free again.
        debug_assert!(
            (self.blocks.is_empty() && !self.has_live_state()) || std::thread::panicking(),
            "a block table was dropped instead of released"
        );
    }
}
