//! Quotas of tenants: what a quota counts, and where it is enforced.
//!
//! A quota is a maximum number of blocks of KV memory. It counts the blocks that the tenant owns:
//!
//! - **in use**: held by its running sequences. A block that several of its sequences share counts once.
//! - **reserved**: set aside for its running requests and not taken yet.
//! - **idle**: not in use, but kept in its prefix cache.
//!
//! Blocks of prefixes that the operator declared shared belong to no tenant and count for none. Waiting requests hold
//! no blocks. The quota is enforced in four places:
//!
//! 1. A request that needs more blocks than the quota is refused at submission (`request_limits`,
//!    `Error::ExceedsQuota`).
//! 2. A request that would need more than the quota leaves beside the tenant's running requests waits until one of them
//!    ends (`engine::admission`). Idle blocks do not prevent it: they are evicted.
//! 3. A running request that grows past its reservation and past the quota preempts a request of its own tenant
//!    (`engine::preemption`).
//! 4. A block that becomes idle while the tenant is at its quota evicts the tenant's least recently used idle block.

use std::collections::HashMap;

use super::{KvCache, OutOfBlocks, TenantId};

/// Blocks that a tenant holds. A quota bounds the sum of the three.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub struct TenantUsage {
    /// Blocks in tables; a block that several tables share counts once.
    pub in_use: usize,
    /// Blocks that no table holds and that the prefix cache can find.
    pub idle: usize,
    /// Blocks reserved for running requests and not taken yet.
    pub reserved: usize,
}

impl TenantUsage {
    /// Returns the number of blocks that cannot be evicted.
    fn num_held(self) -> usize {
        self.in_use + self.reserved
    }
}

impl KvCache {
    /// Sets the maximum number of blocks that a tenant may hold.
    pub fn set_quota(&mut self, tenant: TenantId, num_blocks: usize) {
        self.quotas.insert(tenant, num_blocks);
    }

    /// Returns a tenant's quota; `None` if it has none.
    pub fn quota(&self, tenant: TenantId) -> Option<usize> {
        self.quotas.get(&tenant).copied()
    }

    /// Returns all quotas.
    pub fn quotas(&self) -> &HashMap<TenantId, usize> {
        &self.quotas
    }

    /// Takes over the operator's settings of another cache: its shared prefixes, and its quotas in proportion to the
    /// number of blocks, at least one block.
    pub fn follow_settings(&mut self, other: &KvCache) {
        let scaled = |quota: usize| quota as u128 * self.num_blocks() as u128 / other.num_blocks().max(1) as u128;
        self.quotas = other.quotas.iter().map(|(&tenant, &quota)| (tenant, scaled(quota).max(1) as usize)).collect();
        self.shared_prefixes.clone_from(&other.shared_prefixes);
    }

    /// Returns the blocks that a tenant holds.
    pub fn usage(&self, tenant: TenantId) -> TenantUsage {
        self.usage.get(&tenant).copied().unwrap_or_default()
    }

    /// Returns the blocks of every tenant that has held some. Those of shared prefixes are under an id that no key has.
    pub fn usages(&self) -> impl Iterator<Item = (TenantId, TenantUsage)> {
        self.usage.iter().map(|(&tenant, &usage)| (tenant, usage))
    }

    pub(super) fn usage_mut(&mut self, tenant: TenantId) -> &mut TenantUsage {
        self.usage.entry(tenant).or_default()
    }

    /// Checks that the tenant may hold `needed` more blocks. Its idle blocks do not count here: they can be evicted.
    pub(super) fn check_quota(&self, tenant: TenantId, needed: usize) -> Result<(), OutOfBlocks> {
        let Some(quota) = self.quota(tenant) else { return Ok(()) };
        let held = self.usage(tenant).num_held();
        if held + needed > quota {
            return Err(OutOfBlocks::Quota { needed, quota, available: quota.saturating_sub(held) });
        }
        Ok(())
    }

    /// Evicts the tenant's idle blocks until what it holds, and `num_more` blocks, fit its quota.
    pub(super) fn evict_over_quota(&mut self, tenant: TenantId, num_more: usize) {
        let Some(quota) = self.quota(tenant) else { return };
        loop {
            let usage = self.usage(tenant);
            if usage.idle == 0 || usage.num_held() + usage.idle + num_more <= quota {
                return;
            }
            let block = self.evict_from(tenant).expect("an idle block was counted");
            self.free.push(block);
        }
    }
}
