//! Changes of the prefix cache, for routers that send a request to the server that has its prefix.
//!
//! Recorded are the blocks that every request of one tenant can find: those of its scope without a salt, and those of
//! prefixes that the operator declared shared. Blocks of other tenants and of salts are never recorded. A block is
//! named by a part of its keyed hash, which is different for each tenant and each process.

use super::prefix_index::BlockHash;
use super::{KvCache, Scope, TenantId};

/// A change of the prefix cache.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KvEvent {
    /// A block can be found.
    Stored {
        /// Hash of the block and of all blocks before it.
        hash: u64,
        /// Hash of the block before it; `None` for the first.
        parent: Option<u64>,
        /// Its tokens.
        tokens: Box<[u32]>,
    },
    /// A block was evicted.
    Removed {
        /// Hash of the block.
        hash: u64,
    },
}

/// Receives the changes of each step, in order. Called on the engine's thread, so it must not block.
pub trait KvEventSink: Send {
    /// Takes the changes of a step.
    fn send(&mut self, events: Vec<KvEvent>);
}

/// Changes since the last step.
#[derive(Debug)]
pub(super) struct KvEventLog {
    tenant: TenantId,
    events: Vec<KvEvent>,
}

impl KvCache {
    /// Records changes that concern `tenant` from now on.
    pub fn record_events(&mut self, tenant: TenantId) {
        self.events = Some(KvEventLog { tenant, events: Vec::new() });
    }

    /// Returns the changes since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        self.events.as_mut().map_or_else(Vec::new, |log| std::mem::take(&mut log.events))
    }

    /// Records a block that entered the index of `scope`.
    pub(super) fn record_stored(&mut self, scope: Scope, hash: BlockHash, parent: Option<BlockHash>, tokens: &[u32]) {
        self.record(scope, || KvEvent::Stored {
            hash: hash.short(),
            parent: parent.map(BlockHash::short),
            tokens: tokens.into(),
        });
    }

    /// Records a block that left the index of `scope`.
    pub(super) fn record_removed(&mut self, scope: Scope, hash: BlockHash) {
        self.record(scope, || KvEvent::Removed { hash: hash.short() });
    }

    fn record(&mut self, scope: Scope, event: impl FnOnce() -> KvEvent) {
        let Some(log) = &mut self.events else { return };
        if scope == Scope::of(log.tenant) || scope == Scope::SHARED {
            log.events.push(event());
        }
    }
}
