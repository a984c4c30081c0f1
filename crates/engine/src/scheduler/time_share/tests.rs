//! Tests of the shares: what tenants get of the steps of virtual machines.

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
fn the_wait_of_a_newcomer_is_made_good_by_others_that_are_as_cheap() {
    let (costs, served) = (trained(), Served::default());
    // Six rows of decode beside a prompt of six.
    let mut pending = vec![decode(A, 10); 6];
    pending.push(prompt(B, 0, 6));
    let rows = |waited: Vec<(TenantId, f64)>| {
        let arrivals = Arrivals { newcomers: vec![B], waited, is_expected: false };
        TimeShare::default().plan(&pending, ROWS, &served, &costs, &arrivals).given
    };
    assert_eq!(rows(vec![(B, 0.01)]), [0, 0, 0, 0, 0, 0, 6]);
    // Positive control: nobody waited, so everything is computed together.
    assert_eq!(rows(vec![]), [1, 1, 1, 1, 1, 1, 6]);
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
