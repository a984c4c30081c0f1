//! Counts everything again: for simulators and tests, after every step.

use std::collections::{HashMap, HashSet};

use super::{BlockId, BlockTable, KvCache, Reservation, Scope, TenantId};

impl KvCache {
    /// Compares the books with the tables and reservations that exist. What differs is told in a sentence.
    pub fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable>,
        reservations: impl Iterator<Item = &'a Reservation>,
    ) -> Result<(), String> {
        let mut users = vec![0u32; self.blocks.len()];
        let mut owners: HashMap<BlockId, TenantId> = HashMap::new();
        let mut in_use: HashMap<TenantId, usize> = HashMap::new();
        for table in tables {
            let tenant = table.scope().tenant;
            for &block in table.blocks() {
                users[block as usize] += 1;
                if users[block as usize] == 1 {
                    *in_use.entry(self.blocks[block as usize].owner).or_default() += 1;
                }
                let is_shared = self.blocks[block as usize].content.as_ref().is_some_and(|c| c.scope == Scope::SHARED);
                let owner = *owners.entry(block).or_insert(tenant);
                if owner != tenant && !is_shared {
                    return Err(format!("block {block} is held by {owner:?} and {tenant:?}"));
                }
            }
        }
        let free: HashSet<BlockId> = self.free.iter().copied().collect();
        if free.len() != self.free.len() {
            return Err("a block is free twice".into());
        }
        for (block, entry) in self.blocks.iter().enumerate() {
            if entry.num_users != users[block] {
                return Err(format!("block {block} counts {} users and has {}", entry.num_users, users[block]));
            }
            let is_free = free.contains(&(block as BlockId));
            if is_free != (entry.num_users == 0 && entry.content.is_none()) {
                return Err(format!("block {block} is {} and {entry:?}", if is_free { "free" } else { "not free" }));
            }
        }
        let reserved: usize = reservations.map(Reservation::num_blocks).sum();
        if reserved != self.reserved {
            return Err(format!("{} blocks are reserved in the books and {reserved} in fact", self.reserved));
        }
        if self.free.len() + self.num_idle() < reserved {
            return Err(format!(
                "{reserved} blocks are promised and {} could be had",
                self.free.len() + self.num_idle()
            ));
        }
        for (&tenant, usage) in &self.usage {
            let found = in_use.get(&tenant).copied().unwrap_or(0);
            if usage.in_use != found {
                return Err(format!("{tenant:?} uses {} blocks in the books and {found} in fact", usage.in_use));
            }
            let held = usage.in_use + usage.reserved + usage.idle;
            if let Some(quota) = self.quota(tenant).filter(|&quota| held > quota) {
                return Err(format!("{tenant:?} holds {held} blocks ({usage:?}) and may hold {quota}"));
            }
        }
        Ok(())
    }
}
