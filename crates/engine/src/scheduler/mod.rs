//! The scheduling policy: how many tokens each sequence computes in the next step, and which tenant's request starts
//! next. Pure functions: no clock, no device, no channel; measured times are arguments.
//!
//! Prefill, chunked prefill and decode are the same here: a sequence has tokens left to compute and is given some of
//! them.
//!
//! - [`share_out`]: rows, if only one tenant has something to compute.
//! - [`TimeShare`]: rows, if several tenants share the time of a step; [`StepCosts`] predicts it.
//! - [`Served`], [`next_tenant`], [`tenant_to_preempt`]: turns, and memory.
//! - [`within_share`]: a tenant's share of what fills up.

mod cost;
mod fill;
mod share;
#[cfg(test)]
pub(crate) mod simulated_machines;
mod time_share;

use std::collections::HashMap;

use crate::kv_cache::TenantId;

pub use cost::{StepCosts, Work};
pub use share::within_share;
pub use time_share::{Arrivals, Plan, Rows, TimeShare, Turn};

/// The tokens that a running sequence has left to compute.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending {
    /// Tenant of the request.
    pub tenant: TenantId,
    /// Number of tokens left.
    pub num_left: usize,
    /// Number of tokens that are computed already.
    pub depth: usize,
    /// The one token left is the next of a reply. It is scheduled before all prompts.
    pub is_decode: bool,
    /// Number of steps since the last one that computed something of it.
    pub num_skipped: u32,
    /// It is computed in the same step as the entry before it, or neither is: the beams of one search.
    pub joins_previous: bool,
}

/// Returns the number of tokens that each sequence computes in the next step, in the order of `pending`, if time is no
/// concern.
///
/// Decode rows come first, so that a long prompt delays the next token of other requests by one chunk at most. The rest
/// of the budget goes to prompts, in chunks of at most `chunk_len`. Tenants get equal parts of it; a part that a tenant
/// has no use for goes to the others, the least served first.
pub fn share_out(pending: &[Pending], budget: usize, chunk_len: usize, served: &Served) -> Vec<usize> {
    share_out_weighted(pending, budget, chunk_len, served, |_| 1.0)
}

/// Like [`share_out`], with parts of the budget in proportion to the weights of the tenants.
fn share_out_weighted(
    pending: &[Pending],
    budget: usize,
    chunk_len: usize,
    served: &Served,
    weight: impl Fn(TenantId) -> f64,
) -> Vec<usize> {
    let mut given = vec![0; pending.len()];
    let mut left = budget;
    for (given, pending) in given.iter_mut().zip(pending).filter(|(_, pending)| pending.is_decode) {
        *given = pending.num_left.min(left);
        left -= *given;
    }
    let wanted = |i: usize| if pending[i].is_decode { 0 } else { pending[i].num_left.min(chunk_len) };
    let mut tenants: Vec<(TenantId, usize)> = Vec::new();
    for i in (0..pending.len()).filter(|&i| wanted(i) > 0) {
        match tenants.iter_mut().find(|(tenant, _)| *tenant == pending[i].tenant) {
            Some((_, sum)) => *sum += wanted(i),
            None => tenants.push((pending[i].tenant, wanted(i))),
        }
    }
    // Those that want least come first, so that the rest of their parts is left for those that want more. The last of
    // equals gets the remainder of the division.
    tenants.sort_by_key(|&(tenant, sum)| (sum, std::cmp::Reverse(served.cost(tenant))));
    for (turn, &(tenant, sum)) in tenants.iter().enumerate() {
        let weights: f64 = tenants[turn..].iter().map(|&(tenant, _)| weight(tenant)).sum();
        let mut part = sum.min((left as f64 * weight(tenant) / weights) as usize);
        left -= part;
        for i in (0..pending.len()).filter(|&i| pending[i].tenant == tenant && wanted(i) > 0) {
            given[i] = wanted(i).min(part);
            part -= given[i];
        }
    }
    given
}

/// The cost of the steps that were computed for each tenant, in nanoseconds, by which turns are shared fairly: the
/// counters of the Virtual Token Counter (Sheng et al., 2024), charged with measured time.
///
/// A tenant that had no requests for a while does not catch up on what it missed: it starts level with the least served
/// tenant present. When no tenant is present, all start anew.
#[derive(Debug, Default, Clone)]
pub struct Served {
    cost_ns: HashMap<TenantId, u64>,
}

impl Served {
    /// Returns the cost that a tenant was charged.
    pub fn cost(&self, tenant: TenantId) -> u64 {
        self.cost_ns.get(&tenant).copied().unwrap_or(0)
    }

    /// Charges a tenant.
    pub fn charge(&mut self, tenant: TenantId, cost_ns: u64) {
        let cost = self.cost_ns.entry(tenant).or_default();
        *cost = cost.saturating_add(cost_ns);
    }

    /// Records that a tenant without requests submits one. `present` are the tenants that have requests.
    pub fn arrive(&mut self, tenant: TenantId, present: impl Iterator<Item = TenantId>) {
        match present.filter(|other| *other != tenant).map(|other| self.cost(other)).min() {
            Some(least) => {
                let cost = self.cost_ns.entry(tenant).or_default();
                *cost = (*cost).max(least);
            }
            // Otherwise a tenant that was served alone for an hour would wait for another one for an hour.
            None => self.cost_ns.clear(),
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
    contenders.iter().min_by_key(|c| (c.held, served.cost(c.tenant), c.tenant)).map(|c| c.tenant)
}

/// Returns the tenant whose request is preempted so that `needy` can hold `needed` more of `total`: the one that holds
/// most, if that is more than its share and `needy` would hold no more than its own.
pub fn tenant_to_preempt(running: &[Contender], needy: Contender, needed: usize, total: usize) -> Option<TenantId> {
    // Otherwise two tenants whose requests are larger than a share would preempt each other for ever.
    if !fits_share(running, needy, needed, total) {
        return None;
    }
    let largest = running.iter().filter(|c| c.tenant != needy.tenant).max_by_key(|c| (c.held, c.tenant))?;
    (largest.held > equal_share(running, needy, total)).then_some(largest.tenant)
}

/// Whether `needy` can hold `needed` more of `total` within its share. A tenant that preempts others must fit its
/// shares of all resources: otherwise one that exceeds its share of sequences and one that exceeds its share of blocks
/// would preempt each other for ever.
pub fn fits_share(running: &[Contender], needy: Contender, needed: usize, total: usize) -> bool {
    needy.held + needed <= equal_share(running, needy, total)
}

/// Returns the part of `total` that each of the tenants may hold, `needy` among them.
fn equal_share(running: &[Contender], needy: Contender, total: usize) -> usize {
    let num_tenants = running.iter().filter(|c| c.tenant != needy.tenant && c.held > 0).count() + 1;
    (total / num_tenants).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn decode(tenant: u32) -> Pending {
        Pending { is_decode: true, ..prompt(tenant, 1) }
    }

    fn prompt(tenant: u32, num_left: usize) -> Pending {
        let tenant = TenantId(tenant);
        Pending { tenant, num_left, depth: 0, is_decode: false, num_skipped: 0, joins_previous: false }
    }

    #[test]
    fn decode_rows_come_first_and_a_long_prompt_gets_a_chunk() {
        let served = Served::default();
        let pending = [prompt(1, 1000), decode(1), decode(2), prompt(2, 3)];
        assert_eq!(share_out(&pending, 64, 32, &served), [32, 1, 1, 3]);
        assert_eq!(share_out(&pending, 10, 32, &served), [5, 1, 1, 3]);
        assert_eq!(share_out(&pending, 2, 32, &served), [0, 1, 1, 0]);
    }

    #[test]
    fn prompts_of_tenants_get_equal_parts_of_the_rows() {
        let mut served = Served::default();
        served.charge(TenantId(1), 100);
        assert_eq!(share_out(&[prompt(1, 40), prompt(2, 40)], 40, 32, &served), [20, 20]);
        assert_eq!(share_out(&[prompt(1, 40), prompt(1, 40), prompt(2, 40)], 60, 32, &served), [30, 0, 30]);
        assert_eq!(share_out(&[prompt(1, 40), prompt(2, 5), prompt(3, 40)], 41, 32, &served), [18, 5, 18]);
        assert_eq!(share_out(&[prompt(1, 40), prompt(2, 40)], 1, 32, &served), [0, 1], "the least served first");
    }

    #[test]
    fn a_returning_tenant_starts_level() {
        let mut served = Served::default();
        served.charge(TenantId(1), 500);
        served.charge(TenantId(2), 700);
        served.arrive(TenantId(3), [TenantId(1), TenantId(2)].into_iter());
        assert_eq!(served.cost(TenantId(3)), 500);
        served.arrive(TenantId(2), [TenantId(1)].into_iter());
        assert_eq!(served.cost(TenantId(2)), 700, "a cost is never lowered while others are present");
        served.arrive(TenantId(3), std::iter::empty());
        assert_eq!([1, 2, 3].map(|tenant| served.cost(TenantId(tenant))), [0; 3], "all start anew");
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
        assert!(fits_share(&[c(1, 8), c(3, 0)], c(2, 1), 3, 8) && !fits_share(&[c(1, 8)], c(2, 1), 4, 8));
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
