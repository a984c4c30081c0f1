//! The accounts of the time that tenants share: plans a step with them, and charges each tenant for its part.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::{Engine, Step};
use crate::kv_cache::TenantId;
use crate::scheduler::{Arrivals, Pending, Plan, Rows, Work};
use crate::sequence_group::GroupId;

/// Time for which a tenant without requests is expected to come back. Until then prompts of other tenants are computed
/// in short chunks, so that its next request does not wait for a long step.
const EXPECTED_FOR: Duration = Duration::from_secs(2);

/// The tenants that had something to compute in the last steps.
#[derive(Debug, Default)]
pub(super) struct RecentTenants {
    /// When a step was last planned for each tenant.
    last_planned: HashMap<TenantId, Instant>,
    /// Tenants of the last planned step, and its duration.
    last_tenants: BTreeSet<TenantId>,
    /// Tenants that came after a step without them, with their first request, until that has a token.
    newcomers: BTreeMap<TenantId, GroupId>,
    last_step: Duration,
}

impl RecentTenants {
    /// Records the tenants of the step that is planned now, and returns those that had nothing in the step before.
    fn record(&mut self, tenants: BTreeSet<TenantId>, now: Instant) -> Vec<TenantId> {
        self.last_planned.retain(|_, &mut planned| now - planned < EXPECTED_FOR);
        self.last_planned.extend(tenants.iter().map(|&tenant| (tenant, now)));
        let new: Vec<TenantId> = tenants.difference(&self.last_tenants).copied().collect();
        self.last_tenants = tenants;
        new
    }
}

impl Engine {
    /// Shares out the rows of the next step.
    pub(super) fn share_step(&mut self, pending: &[Pending]) -> Plan {
        let now = self.clock.now();
        let Engine { recent, running, time_share, .. } = self;
        let new = recent.record(pending.iter().map(|pending| pending.tenant).collect(), now);
        let first_of = |tenant: TenantId| running.iter().find(|(_, group)| group.tenant() == tenant);
        recent.newcomers.extend(new.iter().filter_map(|&tenant| Some((tenant, *first_of(tenant)?.0))));
        recent.newcomers.retain(|_, id| running.get(id).is_some_and(|group| group.first_token.is_none()));
        // A tenant that is new in this step may have come while the last one ran.
        let waited = |tenant: TenantId| {
            let groups = running.values().filter(|group| group.tenant() == tenant);
            let waited = groups.map(|group| now - group.arrived).min().unwrap_or_default();
            (tenant, waited.min(recent.last_step).as_secs_f64())
        };
        let arrivals = Arrivals {
            newcomers: recent.newcomers.keys().copied().collect(),
            waited: new.into_iter().map(waited).collect(),
            is_expected: recent.last_planned.len() > 1,
        };
        let rows = Rows { budget: self.options.step_tokens, chunk_len: self.options.chunk_len };
        time_share.plan(pending, rows, &self.served, &self.costs, &arrivals)
    }

    /// Learns from a step that took `time`, and charges each tenant for its part of it. `time_between` passed between
    /// the step before and this one, with work such as taking requests, and is shared like the time of the step.
    pub(super) fn settle(&mut self, step: &Step, time: Duration, time_between: Duration) {
        let mut works: Vec<(TenantId, Work)> = Vec::new();
        let mut all = Work::default();
        for chunk in &step.chunks {
            all += chunk.work();
            match works.iter_mut().find(|(tenant, _)| *tenant == chunk.tenant) {
                Some((_, work)) => *work += chunk.work(),
                None => works.push((chunk.tenant, chunk.work())),
            }
        }
        let seconds = time.saturating_sub(step.drafting_time).as_secs_f64();
        self.costs.measure(all, seconds);
        self.draft_costs.measure(all, seconds);
        self.drafters.finish_step(seconds);
        self.time_share.settle(step.turn, (time + time_between).as_secs_f64());
        self.recent.last_step = time;
        let alone: Vec<f64> = works.iter().map(|&(_, work)| self.costs.predict(work)).collect();
        let sum: f64 = alone.iter().sum();
        for ((tenant, _), alone) in works.into_iter().zip(alone) {
            let part = if sum > 0.0 { alone / sum } else { 1.0 };
            self.served.charge(tenant, (time.as_nanos() as f64 * part) as u64);
        }
    }
}
