//! Why the rest of a prompt was not found in the prefix cache. Only blocks of the request's own tenant are looked at.

use std::collections::{HashSet, VecDeque};

use super::prefix_index::BlockHash;
use super::{KvCache, Scope};

/// Evicted blocks that are remembered.
const MAX_EVICTED: usize = 16_384;
/// Other salts of the tenant that are tried.
const MAX_SALTS: usize = 64;
/// Tokens that are reported before and after the first one that differs.
const CONTEXT: usize = 8;

/// Why a prompt's blocks after the first `reused` tokens were computed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixMiss {
    /// Tokens of the prompt that were found.
    pub reused: usize,
    /// Why the next block was not.
    pub reason: MissReason,
}

/// Why a block was not found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum MissReason {
    /// The nearest cached prompt has another token there.
    Differs(PrefixDifference),
    /// The block was cached and has been evicted.
    Evicted,
    /// Another salt of the tenant has the block.
    OtherSalt,
    /// The block is cached, but no snapshot of the model's recurrent state is, neither after it nor after a later one.
    NoSnapshot,
    /// The block is cached, but the keys and values that layers with sliding windows need after it, or after a later
    /// one, are not.
    NoWindow,
    /// No cached prompt goes on from here.
    New,
}

/// The first token in which a prompt differs from the nearest cached one, with the tokens around it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PrefixDifference {
    /// Position of the first token that differs.
    pub position: usize,
    /// The tokens that both have before it.
    pub before: Vec<u32>,
    /// The tokens of the prompt from it on.
    pub prompt: Vec<u32>,
    /// The tokens of the cached prompt from it on.
    pub cached: Vec<u32>,
}

/// Hashes of blocks that were evicted last. A hash depends on the scope, so it says nothing to another tenant.
#[derive(Debug, Default)]
pub(super) struct EvictedBlocks {
    hashes: HashSet<BlockHash>,
    order: VecDeque<BlockHash>,
}

impl EvictedBlocks {
    pub(super) fn insert(&mut self, hash: BlockHash) {
        if self.hashes.try_reserve(1).is_err() || self.order.try_reserve(1).is_err() || !self.hashes.insert(hash) {
            return;
        }
        self.order.push_back(hash);
        if self.order.len() > MAX_EVICTED
            && let Some(oldest) = self.order.pop_front()
        {
            self.hashes.remove(&oldest);
        }
    }
}

impl KvCache {
    /// Returns why no more than the first `reused` tokens of a prompt were found; `None` if all its whole blocks were.
    pub fn explain_miss(&self, scope: Scope, prompt: &[u32], reused: usize) -> Option<PrefixMiss> {
        let end = reused + self.block_len;
        if end >= prompt.len() {
            return None;
        }
        let block = &prompt[reused..end];
        let parent = self.parent_hash(scope, &prompt[..reused]);
        let hash = self.hasher.hash(scope, parent, block);
        let reason = if self.evicted.hashes.contains(&hash) {
            MissReason::Evicted
        } else if self.contents_of(scope).any(|(_, cached, _)| cached == hash) {
            if self.has_windows() { MissReason::NoWindow } else { MissReason::NoSnapshot }
        } else if self.has_other_salt(scope, &prompt[..end]) {
            MissReason::OtherSalt
        } else {
            self.difference(scope, parent, prompt, reused).map_or(MissReason::New, MissReason::Differs)
        };
        Some(PrefixMiss { reused, reason })
    }

    /// Returns the hash of the last block of a prefix of whole blocks.
    fn parent_hash(&self, scope: Scope, prefix: &[u32]) -> Option<BlockHash> {
        let mut parent = None;
        for (i, block) in prefix.chunks_exact(self.block_len).enumerate() {
            let scope = self.scope_of_block(scope, prefix, (i + 1) * self.block_len);
            parent = Some(self.hasher.hash(scope, parent, block));
        }
        parent
    }

    /// Whether requests of the same tenant with another salt, or without one, have cached this prefix.
    fn has_other_salt(&self, scope: Scope, prefix: &[u32]) -> bool {
        let others = self.indexes.keys().filter(|other| other.tenant == scope.tenant && **other != scope);
        let has_all = |other: &Scope| self.find_prefix(*other, prefix).len() * self.block_len == prefix.len();
        others.take(MAX_SALTS).any(has_all)
    }

    /// Returns where the cached block after the same prefix that has most in common with the prompt differs from it.
    fn difference(
        &self,
        scope: Scope,
        parent: Option<BlockHash>,
        prompt: &[u32],
        reused: usize,
    ) -> Option<PrefixDifference> {
        let block = &prompt[reused..reused + self.block_len];
        let depth = (reused / self.block_len) as u32;
        let common = |tokens: &[u32]| tokens.iter().zip(block).take_while(|(a, b)| a == b).count();
        let follows = |tokens: &[u32], hash: BlockHash| self.hasher.hash(scope, parent, tokens) == hash;
        let (length, nearest) = (self.contents_of(scope))
            .filter(|(content_depth, hash, tokens)| *content_depth == depth && follows(tokens, *hash))
            .map(|(_, _, tokens)| (common(tokens), tokens))
            .max_by_key(|(length, _)| *length)?;
        let position = reused + length;
        Some(PrefixDifference {
            position,
            before: prompt[position.saturating_sub(CONTEXT)..position].to_vec(),
            prompt: prompt[position..prompt.len().min(position + CONTEXT)].to_vec(),
            cached: nearest[length..nearest.len().min(length + CONTEXT)].to_vec(),
        })
    }
}
