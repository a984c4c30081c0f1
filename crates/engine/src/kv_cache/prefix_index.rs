//! Finds a block by its content: hashes of chains of blocks, and one index for each scope.

use std::collections::HashMap;

use super::{BlockId, Scope};

/// Keyed hash of a block's tokens and of all blocks before it in its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockHash([u8; 16]);

impl BlockHash {
    /// Returns 64 of its bits, by which routers name blocks.
    pub(super) fn short(self) -> u64 {
        let [a, b, c, d, e, f, g, h, ..] = self.0;
        u64::from_le_bytes([a, b, c, d, e, f, g, h])
    }
}

/// Computes `hash(secret, scope, hash of the block before, tokens)`.
#[derive(Debug)]
pub(super) struct BlockHasher {
    secret: [u8; 32],
    /// Bits of each byte of a hash that are kept. All of them, except in the test that forces collisions.
    #[cfg(test)]
    pub(super) mask: u8,
    /// Whether a hash is trusted without comparing tokens. Only in the test that shows why tokens are compared.
    #[cfg(test)]
    pub(super) is_trusted: bool,
}

impl BlockHasher {
    pub(super) fn new(secret: [u8; 32]) -> Self {
        BlockHasher {
            secret,
            #[cfg(test)]
            mask: 0xFF,
            #[cfg(test)]
            is_trusted: false,
        }
    }

    pub(super) fn hash(&self, scope: Scope, parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(&scope.tenant.0.to_le_bytes());
        hasher.update(&scope.salt.to_le_bytes());
        hasher.update(&parent.map_or([0; 16], |parent| parent.0));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        let hash: [u8; 16] = hasher.finalize().as_bytes()[..16].try_into().expect("sixteen bytes");
        #[cfg(test)]
        let hash = hash.map(|byte| byte & self.mask);
        BlockHash(hash)
    }
}

/// The blocks of one scope that can be found by their content.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    blocks: HashMap<BlockHash, BlockId>,
}

impl PrefixIndex {
    pub(super) fn get(&self, hash: BlockHash) -> Option<BlockId> {
        self.blocks.get(&hash).copied()
    }

    /// Enters a block. Returns false, and changes nothing, if the hash is there already.
    pub(super) fn insert(&mut self, hash: BlockHash, block: BlockId) -> bool {
        if self.blocks.contains_key(&hash) {
            return false;
        }
        self.blocks.insert(hash, block);
        true
    }

    pub(super) fn blocks(&self) -> impl Iterator<Item = BlockId> {
        self.blocks.values().copied()
    }

    pub(super) fn remove(&mut self, hash: BlockHash) {
        self.blocks.remove(&hash);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
