//! Shares the time of steps between tenants: weighted fair queueing with measured costs.
//!
//! A decoding tenant can use one row of each sequence in a step, so that a longer step slows it down, whatever else the
//! step computes. Therefore the length of steps is what is shared. Let `q` be the time of a step with the cheapest
//! tenant alone. With `n` tenants, a step may take `n q`: the cheapest tenant then advances at one part in `n` of the
//! speed that it has alone, and so do the others, because the rest of the step, `(n - 1) q`, is theirs. If everything
//! that could be computed fits into that time, everything is computed, as without shares. The weights are read once for
//! all tenants, so each gets more than its part.
//!
//! Predictions are wrong at times, and some work cannot be cut: a row at a depth of 50,000 tokens, the beams of a
//! search, a tile of 16 rows. Hence the [`TimeShare`] is an account, as in deficit round robin: each step is credited
//! `n q` and debited the time that was measured. A step that took too long is followed by steps of the cheapest tenants
//! alone until that is made good, and work that does not fit waits until enough was saved for it. Chunks of a prompt
//! wait in the same way until their overhead (keys and values are read once for each chunk) is a small part of their
//! cost.
//!
//! The time that a tenant waited for a step that was running when it came is a debt too, also if the others cost no
//! more than it does.

#[cfg(test)]
mod tests;

use super::fill::Fill;
use super::{Pending, Served, StepCosts, Work, share_out_weighted};
use crate::kv_cache::TenantId;

/// Part of the time of other tenants that is kept back, because the cheapest tenant's time is an estimate.
const MARGIN: f64 = 1.0 / 16.0;
/// Part by which their time is extended while one of them is a newcomer: its first token is waited for, and short
/// chunks are less efficient than long ones, so that it would get less than its part from the same time. The cheapest
/// of two tenants keeps 1 / (2 + `BONUS`), 46 % of its speed.
const BONUS: f64 = 3.0 / 16.0;
/// A tenant whose rows cost at most this multiple of the cheapest tenant's is computed in every step too.
const LIGHT: f64 = 1.1;
/// Maximum time of a step while no other tenant has requests, but one is expected, which waits for the whole step then:
/// in times of one row. A share of a step with one row of another tenant has two; with three, a prompt that starts from
/// nothing is computed in two thirds of its speed, and sixteen replies on tiles of sixteen rows in one step.
const SHORT_STEP: f64 = 3.0;
/// Overheads that a chunk costs at least then, so that prompts advance at great depth too.
const SHORT_OVERHEADS: f64 = 2.0;
/// Number of steps after which one computes the cheapest tenants alone, to measure their time, if none had about their
/// number of rows. Everything is shared by that time, and a guess may be far off.
const PROBE_AFTER: u64 = 64;
/// Multiple of its predicted time from which on a step shows that the prediction was wrong, not that the machine is
/// noisy.
const FAR_TOO_LONG: f64 = 1.5;
/// Maximum debt from steps that took longer than predicted, in times of the cheapest tenant.
const MAX_DEBT: f64 = 16.0;

/// The limits of a step in rows.
#[derive(Debug, Clone, Copy)]
pub struct Rows {
    /// Maximum rows of a step.
    pub budget: usize,
    /// Maximum rows of one prompt.
    pub chunk_len: usize,
}

/// The next step: the rows of each sequence, and the account that the step is settled with.
#[derive(Debug, Clone)]
pub struct Plan {
    /// Number of tokens that each sequence computes, in the order of `pending`.
    pub given: Vec<usize>,
    /// The tenants of the step.
    pub turn: Turn,
}

/// The tenants of a step, and what it may cost.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Turn {
    /// One tenant has something to compute.
    Alone,
    /// Several tenants share the step.
    Shared {
        /// Time that is credited for the step, in seconds.
        credited: f64,
        /// Predicted time of the step with the cheapest tenant alone.
        quantum: f64,
        /// Predicted time of the step, if it computes only what is computed in every step.
        base: Option<f64>,
        /// Time to save for work that did not fit; 0 if all did.
        saved: f64,
    },
}

/// Tenants that came, or may come back.
#[derive(Debug, Clone, Default)]
pub struct Arrivals {
    /// Tenants that came after a step without them and have no token since.
    pub newcomers: Vec<TenantId>,
    /// Tenants that came while the last step ran, and the seconds that they waited for it.
    pub waited: Vec<(TenantId, f64)>,
    /// Another tenant had requests a moment ago and may come back.
    pub is_expected: bool,
}

impl Arrivals {
    fn is_newcomer(&self, tenant: TenantId) -> bool {
        self.newcomers.contains(&tenant)
    }

    fn waited(&self, tenant: TenantId) -> f64 {
        self.waited.iter().find(|(other, _)| *other == tenant).map_or(0.0, |(_, seconds)| *seconds)
    }
}

/// The account of the time that tenants share.
#[derive(Debug, Clone, Copy, Default)]
pub struct TimeShare {
    /// Seconds that the next step may take beyond its own credit; a debt if negative.
    credit: f64,
    /// Number of plans, by which the turn of sequences that were skipped equally often rotates.
    num_plans: usize,
}

/// The sequences of one tenant in a plan.
struct Party {
    tenant: TenantId,
    /// Indices into `pending`, in the order in which they are served.
    order: Vec<usize>,
    /// Predicted time of a step with all its rows alone.
    alone: f64,
}

impl TimeShare {
    /// Shares out a step.
    pub fn plan(
        &mut self,
        pending: &[Pending],
        rows: Rows,
        served: &Served,
        costs: &StepCosts,
        arrivals: &Arrivals,
    ) -> Plan {
        let weight = |tenant| if arrivals.is_newcomer(tenant) { 1.0 + BONUS } else { 1.0 };
        let wanted = share_out_weighted(pending, rows.budget, rows.chunk_len, served, weight);
        self.num_plans = self.num_plans.wrapping_add(1);
        let parties = parties(pending, &wanted, costs, self.num_plans);
        let quantum = parties.iter().map(|party| party.alone).fold(f64::INFINITY, f64::min);
        // Nothing has been measured yet.
        if quantum == 0.0 {
            return Plan { given: wanted, turn: Turn::Alone };
        }
        if parties.len() < 2 {
            let order = parties.first().filter(|_| arrivals.is_expected).map(|party| &party.order[..]);
            let given = match order {
                Some(order) => cut_to_short_step(pending, wanted, order, costs),
                None => wanted,
            };
            return Plan { given, turn: Turn::Alone };
        }
        let is_cheap = |party: &Party| party.alone <= LIGHT * quantum;
        let has_waited = |party: &Party| arrivals.waited(party.tenant) > 0.0;
        // Others that are as cheap as a tenant that waited for them had their step.
        let were_others = parties.iter().any(|party| is_cheap(party) && has_waited(party));
        let (light, mut heavy): (Vec<Party>, Vec<Party>) =
            parties.into_iter().partition(|party| is_cheap(party) && (!were_others || has_waited(party)));
        let num_tenants = light.len() + heavy.len();
        // The others had the time for which a newcomer waited, so it is theirs to make good.
        let waited = |parties: &[Party]| parties.iter().map(|party| arrivals.waited(party.tenant)).fold(0.0, f64::max);
        if !heavy.is_empty() {
            self.credit += (waited(&heavy) - waited(&light)).min(MAX_DEBT * quantum);
        }
        let least = |parties: &[Party]| parties.iter().map(|party| served.cost(party.tenant)).min();
        let is_behind = !heavy.is_empty() && least(&heavy) < least(&light);
        let has_newcomer = heavy.iter().any(|party| arrivals.is_newcomer(party.tenant));
        let part = match (has_newcomer, is_behind) {
            (true, _) => 1.0 + BONUS,
            (false, true) => 1.0,
            (false, false) => 1.0 - MARGIN,
        };
        let credited = quantum * (1.0 + (num_tenants - 1) as f64 * part);
        let budget = self.credit + credited;

        let mut fill = Fill::new(pending, &wanted, costs);
        light.iter().flat_map(|party| &party.order).for_each(|&i| fill.take(i, wanted[i]));
        let base = costs.predict(fill.work);
        let mut saved: f64 = 0.0;
        // Prompts are measured often enough, and a newcomer would wait long for a step of another one's prompt.
        let is_decode = light.iter().flat_map(|party| &party.order).all(|&i| pending[i].is_decode);
        let is_probe = is_decode && costs.is_doubtful(fill.work, PROBE_AFTER);
        heavy.sort_by_key(|party| (!arrivals.is_newcomer(party.tenant), served.cost(party.tenant)));
        for (turn, party) in heavy.iter().enumerate().filter(|_| !is_probe) {
            let slack = budget - costs.predict(fill.work);
            let part = slack / (heavy.len() - turn) as f64;
            // The tenant whose turn it is may need more than its part for work that cannot be cut.
            let missing = fill.serve(&party.order, part, if turn == 0 { slack } else { part });
            saved = saved.max(missing);
        }
        let num_light: usize = light.iter().flat_map(|party| &party.order).map(|&i| wanted[i]).sum();
        let is_base = fill.work.num_rows == num_light;
        let base = (is_base && !heavy.is_empty()).then_some(base);
        if is_probe {
            saved = self.credit.max(0.0);
        }
        Plan { given: fill.given, turn: Turn::Shared { credited, quantum, base, saved } }
    }

    /// Settles a step that took `seconds`.
    pub fn settle(&mut self, turn: Turn, seconds: f64) {
        let Turn::Shared { credited, quantum, base, saved } = turn else {
            // Nobody waited, so a debt is made good.
            self.credit = (self.credit + seconds).min(0.0);
            return;
        };
        // A step of the cheapest tenants alone measures their time. If it was underestimated by far, so was the credit;
        // without this, such an estimate would keep the other tenants waiting. Small differences are noise: to credit
        // those that are too long and not to debit those that are too short would lengthen every step.
        let correction = base.map_or(1.0, |base| if seconds > FAR_TOO_LONG * base { seconds / base } else { 1.0 });
        let floor = self.credit.min(-MAX_DEBT * quantum);
        self.credit = (self.credit + correction * credited - seconds).max(floor).min(saved.max(0.0));
    }

    /// Whether the steps so far took longer than the tenants' shares. The next step must be planned anew then.
    pub fn is_in_debt(&self) -> bool {
        self.credit < 0.0
    }
}

/// Groups what is pending by tenant. Tenants that get no row at all are left out.
fn parties(pending: &[Pending], wanted: &[usize], costs: &StepCosts, turn: usize) -> Vec<Party> {
    let mut parties: Vec<Party> = Vec::new();
    for i in (0..pending.len()).filter(|&i| wanted[i] > 0) {
        let tenant = pending[i].tenant;
        match parties.iter_mut().find(|party| party.tenant == tenant) {
            Some(party) => party.order.push(i),
            None => parties.push(Party { tenant, order: vec![i], alone: 0.0 }),
        }
    }
    for party in &mut parties {
        let mut work = Work::default();
        party.order.iter().for_each(|&i| work += Work::chunk(pending[i].depth, wanted[i]));
        party.alone = costs.predict(work);
        put_in_turn(&mut party.order, pending, turn);
    }
    parties
}

/// Orders the sequences of one tenant. Decode comes before prompts, those first that were skipped most often; equals
/// rotate. When prompts were skipped more often than any decode, it is their turn; among prompts the order of arrival
/// is kept.
fn put_in_turn(order: &mut [usize], pending: &[Pending], turn: usize) {
    let skipped = |i: usize| pending[i].num_skipped;
    let prompts = order.iter().filter(|&&i| !pending[i].is_decode).map(|&i| skipped(i)).min();
    let decode = order.iter().filter(|&&i| pending[i].is_decode).map(|&i| skipped(i)).max();
    let prompts_first = prompts > decode;
    order.sort_by_cached_key(|&i| {
        let is_second = pending[i].is_decode == prompts_first;
        if !pending[i].is_decode {
            return (is_second, 0, 0, i);
        }
        // Beams stay together, in the order in which they join.
        let head = (0..=i).rev().find(|&head| !pending[head].joins_previous).unwrap_or(0);
        (is_second, u32::MAX - skipped(head), head.wrapping_add(turn) % pending.len(), i)
    });
}

/// Shortens the step of a tenant while another one may come back, whose next request waits for this step: replies take
/// turns, and prompts are cut.
fn cut_to_short_step(pending: &[Pending], wanted: Vec<usize>, order: &[usize], costs: &StepCosts) -> Vec<usize> {
    let one = Work::chunk(0, 1);
    // A guess from longer steps may be far too low, and would cut prompts to crumbs.
    if costs.is_guess(one) {
        return wanted;
    }
    let limit = SHORT_STEP * costs.predict(one);
    let mut fill = Fill::new(pending, &wanted, costs);
    let (decode, prompts): (Vec<usize>, Vec<usize>) = order.iter().partition(|&&i| pending[i].is_decode);
    fill.take_decode(&decode, limit);
    let Some(&first) = prompts.first() else { return fill.given };
    let start = costs.predict(fill.work);
    let budget = (limit - start).max(fill.least_chunk_cost(first, SHORT_OVERHEADS));
    for i in prompts {
        let left = budget - (costs.predict(fill.work) - start);
        let num_rows = fill.rows_within(i, left);
        fill.take(i, num_rows);
        if num_rows < wanted[i] {
            break;
        }
    }
    // The first prompt always advances.
    if fill.given[first] == 0 {
        fill.take(first, 1);
    }
    fill.given
}
