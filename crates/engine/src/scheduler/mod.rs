//! The scheduling policy: how many tokens each sequence computes in the next step, and which tenant's request starts
//! next. Pure functions: no clock, no device, no channel.
//!
//! Prefill, chunked prefill and decode are the same here: a sequence has tokens left to compute and is given some of
//! them.

mod share;

use std::collections::HashMap;

use crate::kv_cache::TenantId;

pub use share::within_share;

/// The tokens that a running sequence has left to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Tenant of the request.
    pub tenant: TenantId,
    /// Number of tokens left.
    pub num_left: usize,
    /// The one token left is the next of a reply. It is scheduled before all prompts.
    pub is_decode: bool,
}

/// Returns the number of tokens that each sequence computes in the next step, in the order of `pending`.
///
/// Decode rows come first, so that a long prompt delays the next token of other requests by one chunk at most. The rest
/// of the budget goes to prompts, in chunks of at most `chunk_len`, beginning with the tenant that was served least.
pub fn share_out(pending: &[Pending], budget: usize, chunk_len: usize, served: &Served) -> Vec<usize> {
    let mut given = vec![0; pending.len()];
    let mut left = budget;
    for (given, pending) in given.iter_mut().zip(pending).filter(|(_, pending)| pending.is_decode) {
        *given = pending.num_left.min(left);
        left -= *given;
    }
    let mut prompts: Vec<usize> = (0..pending.len()).filter(|&i| !pending[i].is_decode).collect();
    // A stable sort: requests of the same tenant keep their order.
    prompts.sort_by_key(|&i| served.tokens(pending[i].tenant));
    for i in prompts {
        given[i] = pending[i].num_left.min(chunk_len).min(left);
        left -= given[i];
    }
    given
}

/// Number of tokens computed for each tenant, by which turns are shared fairly.
///
/// A tenant that had no requests for a while does not catch up on what it missed: it starts level with the least served
/// tenant present.
#[derive(Debug, Default, Clone)]
pub struct Served {
    tokens: HashMap<TenantId, u64>,
}

impl Served {
    /// Returns the number of tokens computed for a tenant.
    pub fn tokens(&self, tenant: TenantId) -> u64 {
        self.tokens.get(&tenant).copied().unwrap_or(0)
    }

    /// Adds computed tokens.
    pub fn charge(&mut self, tenant: TenantId, num_tokens: usize) {
        *self.tokens.entry(tenant).or_default() += num_tokens as u64;
    }

    /// Records that a tenant without requests submits one. `present` are the tenants that have requests.
    pub fn arrive(&mut self, tenant: TenantId, present: impl Iterator<Item = TenantId>) {
        if let Some(least) = present.filter(|other| *other != tenant).map(|other| self.tokens(other)).min() {
            let tokens = self.tokens.entry(tenant).or_default();
            *tokens = (*tokens).max(least);
        }
    }
}

/// A tenant, and how much it holds of a shared resource: running sequences, or blocks of KV memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Contender {
    /// The tenant.
    pub tenant: TenantId,
    /// Amount of the resource that it holds.
    pub held: usize,
}

/// Returns the tenant whose request starts next: the one with the fewest running sequences, then the least served, then
/// the lower id.
pub fn next_tenant(contenders: &[Contender], served: &Served) -> Option<TenantId> {
    contenders.iter().min_by_key(|c| (c.held, served.tokens(c.tenant), c.tenant)).map(|c| c.tenant)
}

/// Returns the tenant whose request is preempted so that `needy` can hold `needed` more of `total`: the one that holds
/// most, if that is more than its share and `needy` would hold no more than its own.
pub fn tenant_to_preempt(running: &[Contender], needy: Contender, needed: usize, total: usize) -> Option<TenantId> {
    let num_tenants = running.iter().filter(|c| c.tenant != needy.tenant && c.held > 0).count() + 1;
    let share = (total / num_tenants).max(1);
    // Otherwise two tenants whose requests are larger than a share would preempt each other for ever.
    if needy.held + needed > share {
        return None;
    }
    let largest = running.iter().filter(|c| c.tenant != needy.tenant).max_by_key(|c| (c.held, c.tenant))?;
    (largest.held > share).then_some(largest.tenant)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(tenant: u32) -> Pending {
        Pending { tenant: TenantId(tenant), num_left: 1, is_decode: true }
    }

    fn prompt(tenant: u32, num_left: usize) -> Pending {
        Pending { tenant: TenantId(tenant), num_left, is_decode: false }
    }

    #[test]
    fn decode_rows_come_first_and_a_long_prompt_gets_a_chunk() {
        let served = Served::default();
        let pending = [prompt(1, 1000), decode(1), decode(2), prompt(2, 3)];
        assert_eq!(share_out(&pending, 64, 32, &served), [32, 1, 1, 3]);
        assert_eq!(share_out(&pending, 10, 32, &served), [8, 1, 1, 0]);
        assert_eq!(share_out(&pending, 2, 32, &served), [0, 1, 1, 0]);
    }

    #[test]
    fn the_least_served_tenants_prompt_comes_first() {
        let mut served = Served::default();
        served.charge(TenantId(1), 100);
        assert_eq!(share_out(&[prompt(1, 40), prompt(2, 40)], 40, 32, &served), [8, 32]);
    }

    #[test]
    fn a_returning_tenant_starts_level() {
        let mut served = Served::default();
        served.charge(TenantId(1), 500);
        served.charge(TenantId(2), 700);
        served.arrive(TenantId(3), [TenantId(1), TenantId(2)].into_iter());
        assert_eq!(served.tokens(TenantId(3)), 500);
        served.arrive(TenantId(2), [TenantId(1)].into_iter());
        assert_eq!(served.tokens(TenantId(2)), 700, "a count is never lowered");
    }

    #[test]
    fn only_a_tenant_above_its_share_is_preempted() {
        let c = |tenant, held| Contender { tenant: TenantId(tenant), held };
        assert_eq!(tenant_to_preempt(&[c(1, 8)], c(2, 0), 1, 8), Some(TenantId(1)));
        assert_eq!(
            tenant_to_preempt(&[c(1, 8)], c(2, 0), 5, 8),
            None,
            "five are more than the needy tenant's own share"
        );
        assert_eq!(tenant_to_preempt(&[c(1, 4), c(2, 4)], c(2, 4), 1, 8), None);
        assert_eq!(tenant_to_preempt(&[c(1, 4), c(2, 3)], c(2, 3), 1, 8), None, "four of eight is not above its share");
        assert_eq!(tenant_to_preempt(&[], c(2, 0), 1, 8), None);
    }

    proptest! {
        #[test]
        fn the_budget_is_kept_and_used(
            rows in prop::collection::vec((0u32..4, 1usize..200, any::<bool>()), 0..40),
            budget in 1usize..300,
            chunk_len in 1usize..100,
        ) {
            let pending: Vec<Pending> = rows
                .iter()
                .map(|&(tenant, left, is_decode)| if is_decode { decode(tenant) } else { prompt(tenant, left) })
                .collect();
            let given = share_out(&pending, budget, chunk_len, &Served::default());
            let total: usize = given.iter().sum();
            prop_assert!(total <= budget);
            for (given, pending) in given.iter().zip(&pending) {
                prop_assert!(*given <= pending.num_left);
                prop_assert!(pending.is_decode || *given <= chunk_len);
            }
            let wanted: usize = pending.iter().map(|p| if p.is_decode { 1 } else { p.num_left.min(chunk_len) }).sum();
            prop_assert_eq!(total, wanted.min(budget), "no budget is left unused while tokens are pending");
        }
    }
}
