//! Checks the cache's counters against the tables and reservations that exist. Simulators and tests call it after every
//! step.

use std::collections::{HashMap, HashSet};

use super::{BlockId, BlockTable, KvCache, Reservation, Scope, TenantId};

impl KvCache {
    /// Counts users, reservations and usage again from `tables` and `reservations`, and describes the first difference.
    pub fn audit<'a>(
        &self,
        tables: impl Iterator<Item = &'a BlockTable> + Clone,
        reservations: impl Iterator<Item = &'a Reservation>,
    ) -> Result<(), String> {
        let mut users = vec![0u32; self.blocks.len()];
        let mut owners: HashMap<BlockId, TenantId> = HashMap::new();
        let mut in_use: HashMap<TenantId, usize> = HashMap::new();
        let mut slots = Vec::new();
        self.audit_windows(tables.clone())?;
        for table in tables {
            slots.extend(table.state_slots());
            let tenant = table.scope().tenant;
            for &block in table.blocks() {
                users[block as usize] += 1;
                if users[block as usize] == 1 {
                    *in_use.entry(self.blocks[block as usize].owner).or_default() += 1;
                }
                let is_shared = self.blocks[block as usize].content.as_ref().is_some_and(|c| c.scope == Scope::SHARED);
                let owner = *owners.entry(block).or_insert(tenant);
                if owner != tenant && !is_shared {
                    return Err(format!("block {block} is held by both {owner:?} and {tenant:?}"));
                }
            }
        }
        self.audit_states(&slots)?;
        let free: HashSet<BlockId> = self.free.iter().copied().collect();
        if free.len() != self.free.len() {
            return Err("a block is twice in the free list".into());
        }
        for (block, entry) in self.blocks.iter().enumerate() {
            if entry.num_users != users[block] {
                return Err(format!(
                    "block {block} has a count of {} users, but {} tables hold it",
                    entry.num_users, users[block]
                ));
            }
            let is_free = free.contains(&(block as BlockId));
            if is_free != (entry.num_users == 0 && entry.content.is_none()) {
                return Err(format!(
                    "block {block} is {} the free list: {entry:?}",
                    if is_free { "in" } else { "not in" }
                ));
            }
        }
        let reserved: usize = reservations.map(Reservation::num_blocks).sum();
        if reserved != self.num_reserved {
            return Err(format!(
                "{} blocks are counted as reserved, but reservations hold {reserved}",
                self.num_reserved
            ));
        }
        if self.free.len() + self.num_idle() < reserved {
            return Err(format!(
                "{reserved} blocks are reserved, but only {} are free or idle",
                self.free.len() + self.num_idle()
            ));
        }
        for (&tenant, usage) in &self.usage {
            let found = in_use.get(&tenant).copied().unwrap_or(0);
            if usage.in_use != found {
                return Err(format!(
                    "{tenant:?} is charged for {} blocks in use, but its tables hold {found}",
                    usage.in_use
                ));
            }
            let held = usage.in_use + usage.reserved + usage.idle;
            if let Some(quota) = self.quota(tenant).filter(|&quota| held > quota) {
                return Err(format!("{tenant:?} holds {held} blocks ({usage:?}), above its quota of {quota}"));
            }
        }
        Ok(())
    }
}
