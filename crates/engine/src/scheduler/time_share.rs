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
//! The time that a tenant waited for a step that was running when it came is a debt too.

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
/// Overheads that a chunk must cost while no other tenant has requests, but one is expected: it waits for the whole
/// chunk then.
const SHORT_OVERHEADS: f64 = 4.0;
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
            let given = if arrivals.is_expected { cut_to_short_step(pending, wanted, costs) } else { wanted };
            return Plan { given, turn: Turn::Alone };
        }
        let (light, mut heavy): (Vec<Party>, Vec<Party>) =
            parties.into_iter().partition(|party| party.alone <= LIGHT * quantum);
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
        let is_probe = is_decode && costs.is_stale(fill.work, PROBE_AFTER);
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

/// Limits the prompts of a step to the shortest chunk that is efficient: the next step of a tenant that is about to
/// come back waits for this one.
fn cut_to_short_step(pending: &[Pending], wanted: Vec<usize>, costs: &StepCosts) -> Vec<usize> {
    let mut fill = Fill::new(pending, &wanted, costs);
    let (decode, prompts): (Vec<usize>, Vec<usize>) = (0..pending.len()).partition(|&i| pending[i].is_decode);
    decode.into_iter().for_each(|i| fill.take(i, wanted[i]));
    let Some(&first) = prompts.iter().find(|&&i| wanted[i] > 0) else { return wanted };
    let budget = fill.least_chunk_cost(first, SHORT_OVERHEADS);
    let start = costs.predict(fill.work);
    for i in prompts.into_iter().filter(|&i| wanted[i] > 0) {
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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const ROWS: Rows = Rows { budget: 256, chunk_len: 256 };
    const A: TenantId = TenantId(1);
    const B: TenantId = TenantId(2);

    /// The time of a step: 4 ms for the weights, 0.6 ms for a row, more at depth.
    fn machine(work: Work) -> f64 {
        4e-3 + 6e-4 * work.num_rows as f64 + 1.1e-6 * work.num_read as f64 + 2.3e-7 * work.num_compared as f64
    }

    fn trained() -> StepCosts {
        let mut costs = StepCosts::default();
        for depth in (0..6000).step_by(100) {
            for num_rows in [1, 2, 4, 8, 16, 64, 256, 1, 16] {
                let work = Work::chunk(depth, num_rows);
                costs.measure(work, machine(work));
            }
        }
        costs
    }

    fn decode(tenant: TenantId, depth: usize) -> Pending {
        Pending { tenant, num_left: 1, depth, is_decode: true, num_skipped: 0, joins_previous: false }
    }

    fn prompt(tenant: TenantId, depth: usize, num_left: usize) -> Pending {
        Pending { num_left, is_decode: false, ..decode(tenant, depth) }
    }

    fn work_of(pending: &[Pending], given: &[usize]) -> Work {
        let mut work = Work::default();
        for (pending, &num_rows) in pending.iter().zip(given).filter(|(_, num_rows)| **num_rows > 0) {
            work += Work::chunk(pending.depth, num_rows);
        }
        work
    }

    /// Runs the same pending work for a while; returns the time, and the rows that each entry got.
    fn run(pending: &[Pending], num_steps: usize) -> (f64, Vec<usize>) {
        let (mut share, mut costs, mut served) = (TimeShare::default(), trained(), Served::default());
        let (mut pending, mut rows, mut time) = (pending.to_vec(), vec![0; pending.len()], 0.0);
        for _ in 0..num_steps {
            let Plan { given, turn } = share.plan(&pending, ROWS, &served, &costs, &Arrivals::default());
            let work = work_of(&pending, &given);
            let seconds = machine(work);
            costs.measure(work, seconds);
            share.settle(turn, seconds);
            time += seconds;
            for (i, &num_rows) in given.iter().enumerate() {
                rows[i] += num_rows;
                pending[i].num_skipped = if num_rows > 0 { 0 } else { pending[i].num_skipped + 1 };
                served.charge(pending[i].tenant, (1e9 * machine(Work::chunk(pending[i].depth, num_rows))) as u64);
            }
        }
        (time, rows)
    }

    #[test]
    fn a_tenant_alone_is_not_limited() {
        let pending = [prompt(A, 5000, 900), decode(A, 3000), decode(A, 10)];
        let mut share = TimeShare::default();
        let plan = share.plan(&pending, ROWS, &Served::default(), &trained(), &Arrivals::default());
        assert_eq!((plan.given, plan.turn), (vec![254, 1, 1], Turn::Alone));
    }

    #[test]
    fn long_prompts_and_many_replies_leave_half_of_the_time_to_a_decoding_tenant() {
        let mut many = vec![decode(B, 100)];
        many.extend((0..15).map(|_| decode(A, 100)));
        let long = [decode(B, 100), prompt(A, 5000, 1000), prompt(A, 3000, 1000)];
        let deep = [decode(B, 100), decode(A, 60_000), decode(A, 60_000)];
        for pending in [&many[..], &long, &deep] {
            let num_steps = 2000;
            let (time, rows) = run(pending, num_steps);
            let alone = machine(Work::chunk(100, 1)) * num_steps as f64;
            assert_eq!(rows[0], num_steps, "the cheapest tenant is in every step");
            assert!(alone / time > 0.45, "{:.0} % of its speed alone", 100.0 * alone / time);
            // The other tenant gets its share too.
            let others = (1..pending.len()).map(|i| machine(Work::chunk(pending[i].depth, 1)) * rows[i] as f64);
            let others: f64 = others.sum();
            assert!(others / time > 0.2, "{:.0} % for the other: {rows:?}", 100.0 * others / time);
            let first = rows[1];
            let is_even = rows[1..].iter().all(|&rows| rows.abs_diff(first) <= first / 10 + 2);
            assert!(is_even || !pending[1].is_decode, "replies take turns: {rows:?}");
        }
        // The positive control: as one tenant, the steps are as long as they can be.
        let one: Vec<Pending> = long.iter().map(|&pending| Pending { tenant: A, ..pending }).collect();
        let (time, _) = run(&one, 200);
        let alone = machine(Work::chunk(100, 1)) * 200.0;
        assert!(alone / time < 0.05, "{:.0} %", 100.0 * alone / time);
    }

    #[test]
    fn a_tenants_prompts_are_not_kept_waiting_by_its_own_replies() {
        let mut pending = vec![decode(B, 100), prompt(A, 0, 100_000)];
        pending.extend((0..14).map(|_| decode(A, 100)));
        let (_, rows) = run(&pending, 1000);
        assert!(rows[1] > 200 && rows[2] > 50, "{rows:?}");
    }

    #[test]
    fn everything_is_computed_if_it_fits() {
        let pending = [decode(A, 50), decode(B, 60), decode(TenantId(3), 70), decode(A, 80)];
        let mut share = TimeShare::default();
        let plan = share.plan(&pending, ROWS, &Served::default(), &trained(), &Arrivals::default());
        assert_eq!(plan.given, [1; 4]);
    }

    #[test]
    fn the_time_that_a_newcomer_waited_is_made_good() {
        let (mut share, costs, served) = (TimeShare::default(), trained(), Served::default());
        let pending = [decode(B, 10), prompt(A, 100, 1000)];
        let arrivals = Arrivals { newcomers: vec![B], waited: vec![(B, 0.05)], is_expected: false };
        let first = share.plan(&pending, ROWS, &served, &costs, &arrivals);
        assert_eq!(first.given, [1, 0]);
        assert!(share.is_in_debt());
        let mut num_alone = 0;
        loop {
            let plan = share.plan(&pending, ROWS, &served, &costs, &Arrivals::default());
            if plan.given[1] > 0 {
                break;
            }
            num_alone += 1;
            share.settle(plan.turn, machine(work_of(&pending, &plan.given)));
        }
        assert!((5..=20).contains(&num_alone), "{num_alone} steps of 5 ms for a wait of 50 ms");
    }

    #[test]
    fn a_newcomer_gets_more_than_its_part_until_its_first_token() {
        let (mut share, costs, served) = (TimeShare::default(), trained(), Served::default());
        let replies = decode(A, 15_000);
        let pending = [replies, replies, replies, replies, prompt(B, 0, 1000)];
        let rows = |newcomers: Vec<TenantId>, share: &mut TimeShare| {
            let arrivals = Arrivals { newcomers, ..Arrivals::default() };
            // The newcomer is not behind, so that its arrival alone decides.
            let mut served = served.clone();
            served.charge(B, 1_000_000_000);
            share.plan(&pending, ROWS, &served, &costs, &arrivals).given[4]
        };
        let (usual, new) = (rows(vec![], &mut share), rows(vec![B], &mut share));
        assert!(new > usual && usual > 0, "{new} rows for a newcomer, {usual} otherwise");
        let others = [decode(A, 3000), prompt(A, 0, 1000), prompt(B, 0, 1000)];
        let arrivals = Arrivals { newcomers: vec![B], ..Arrivals::default() };
        let plan = share.plan(&others, ROWS, &served, &costs, &arrivals);
        assert!(plan.given[2] > plan.given[1], "more rows than the prompts of others: {:?}", plan.given);
    }

    #[test]
    fn the_wait_of_a_newcomer_is_made_good_whoever_is_cheaper() {
        let (costs, served) = (trained(), Served::default());
        let pending = [decode(A, 100), prompt(B, 0, 1000)];
        let rows = |seconds: f64| {
            let arrivals = Arrivals { newcomers: vec![B], waited: vec![(B, seconds)], is_expected: false };
            TimeShare::default().plan(&pending, ROWS, &served, &costs, &arrivals).given[1]
        };
        assert!(rows(0.05) > 4 * rows(0.0), "{} rows after a wait, {} without", rows(0.05), rows(0.0));
    }

    #[test]
    fn time_that_is_too_short_for_a_tile_is_saved() {
        // Replies of one tenant, whose steps have room for less than two tiles of the other one's prompt.
        let mut pending: Vec<Pending> = (0..16).map(|_| decode(A, 100)).collect();
        pending.push(prompt(B, 0, 1_000_000));
        let (time, rows) = run(&pending, 500);
        let alone = machine(work_of(&pending[..16], &[1; 16])) * 500.0;
        let prompt_alone = machine(Work::chunk(0, 256)) / 256.0 * rows[16] as f64;
        assert!(alone / time > 0.45, "{:.0} % for the replies", 100.0 * alone / time);
        assert!(prompt_alone / time > 0.45, "{:.0} % for the prompt", 100.0 * prompt_alone / time);
    }

    #[test]
    fn a_tenant_that_may_come_back_finds_short_steps() {
        let (mut share, costs, served) = (TimeShare::default(), trained(), Served::default());
        let pending = [decode(A, 10), prompt(A, 5000, 1000)];
        let arrivals = Arrivals { is_expected: true, ..Arrivals::default() };
        let plan = share.plan(&pending, ROWS, &served, &costs, &arrivals);
        assert!(plan.given[0] == 1 && (4..128).contains(&plan.given[1]), "{:?}", plan.given);
    }

    proptest! {
        #[test]
        fn every_plan_computes_something_within_what_is_wanted(
            rows in prop::collection::vec((0u32..4, 0usize..9000, 1usize..400, any::<bool>(), 0u32..9), 1..40),
            times in prop::collection::vec(1e-5f64..2.0, 1..30),
            is_expected in any::<bool>(),
        ) {
            let pending: Vec<Pending> = rows.iter().map(|&(tenant, depth, num_left, is_decode, num_skipped)| {
                let num_left = if is_decode { 1 } else { num_left };
                Pending { num_left, is_decode, num_skipped, ..decode(TenantId(tenant), depth) }
            }).collect();
            let (mut share, mut costs, served) = (TimeShare::default(), StepCosts::default(), Served::default());
            for (i, seconds) in times.into_iter().enumerate() {
                let newcomer = TenantId(i as u32 % 5);
                let weight = |tenant| if tenant == newcomer { 1.0 + BONUS } else { 1.0 };
                let wanted = share_out_weighted(&pending, ROWS.budget, ROWS.chunk_len, &served, weight);
                let (newcomers, waited) = (vec![newcomer], vec![(TenantId(1), (i % 3) as f64 * 0.01)]);
                let arrivals = Arrivals { newcomers, waited, is_expected };
                let plan = share.plan(&pending, ROWS, &served, &costs, &arrivals);
                prop_assert!(plan.given.iter().sum::<usize>() > 0, "a step computes something");
                for (given, wanted) in plan.given.iter().zip(wanted) {
                    prop_assert!(*given <= wanted);
                }
                costs.measure(work_of(&pending, &plan.given), seconds);
                share.settle(plan.turn, seconds);
                prop_assert!(share.credit.is_finite());
            }
        }
    }
}
