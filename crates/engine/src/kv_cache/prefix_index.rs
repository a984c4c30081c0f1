//! Finding a block by what it holds: keys, and one index for each scope.

use std::collections::HashMap;

use super::BlockId;

/// Who owns blocks and may find them. Comes from the authenticated key, never from a request's body.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TenantId(pub u32);

/// A set of blocks that find each other: a tenant's, narrowed by a salt when a request brings one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Scope {
    pub tenant: TenantId,
    /// 0 without one.
    salt: u64,
}

impl Scope {
    /// The owner of what the operator declared shared. No key leads to it.
    pub(super) const SHARED: Scope = Scope { tenant: TenantId(u32::MAX), salt: 0 };

    pub fn of(tenant: TenantId) -> Scope {
        Scope { tenant, salt: 0 }
    }

    /// A scope within the tenant's that only requests with the same salt share.
    pub fn salted(tenant: TenantId, salt: &str) -> Scope {
        let digest = blake3::hash(salt.as_bytes());
        let salt = u64::from_le_bytes(digest.as_bytes()[..8].try_into().expect("eight bytes"));
        // 0 means unsalted.
        Scope { tenant, salt: salt.max(1) }
    }
}

/// The keyed hash of a chain of blocks up to one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct BlockHash([u8; 16]);

/// Makes keys: `key = hash(secret, scope, key of the block before, tokens)`.
#[derive(Debug)]
pub(super) struct BlockHasher {
    secret: [u8; 32],
    /// Bits of a key that count. All of them, but in the test that forces collisions.
    #[cfg(test)]
    pub(super) mask: u8,
    /// Whether a key is trusted alone. Never, but in the test that shows what the comparison of tokens is for.
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

    pub(super) fn key(&self, scope: Scope, parent: Option<BlockHash>, tokens: &[u32]) -> BlockHash {
        let mut hasher = blake3::Hasher::new_keyed(&self.secret);
        hasher.update(&scope.tenant.0.to_le_bytes());
        hasher.update(&scope.salt.to_le_bytes());
        hasher.update(&parent.map_or([0; 16], |parent| parent.0));
        for token in tokens {
            hasher.update(&token.to_le_bytes());
        }
        let key: [u8; 16] = hasher.finalize().as_bytes()[..16].try_into().expect("sixteen bytes");
        #[cfg(test)]
        let key = key.map(|byte| byte & self.mask);
        BlockHash(key)
    }
}

/// The findable blocks of one scope.
#[derive(Debug, Default)]
pub(super) struct PrefixIndex {
    blocks: HashMap<BlockHash, BlockId>,
}

impl PrefixIndex {
    pub(super) fn get(&self, key: BlockHash) -> Option<BlockId> {
        self.blocks.get(&key).copied()
    }

    /// Whether the key was new.
    pub(super) fn insert(&mut self, key: BlockHash, block: BlockId) -> bool {
        if self.blocks.contains_key(&key) {
            return false;
        }
        self.blocks.insert(key, block);
        true
    }

    pub(super) fn remove(&mut self, key: BlockHash) {
        self.blocks.remove(&key);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.blocks.is_empty()
    }
}
