//! Allocation against an exhaustive search, and whole replies on simulated machines, in virtual time.

use proptest::prelude::*;

use super::super::{Acceptance, DrafterKind, Level, MAX_DRAFT_LEN, ScoredDraft};
use super::*;
use crate::scheduler::simulated_machines::{cpu, gpu};

const UNLIMITED: Limits = Limits { num_rows: usize::MAX, max_lengthening: f64::INFINITY };

/// A CPU that reads its weights once and has no tiles: each row costs a tenth of them.
fn linear(work: Work) -> f64 {
    1e-2 + 1e-3 * work.num_rows as f64 + 1e-8 * work.num_compared as f64
}

/// A machine on which a row costs as much as reading the weights: no draft pays.
fn compute_bound(work: Work) -> f64 {
    1e-3 + 1e-3 * work.num_rows as f64
}

type Machine = fn(Work) -> f64;
const MACHINES: [(&str, Machine); 4] =
    [("cpu", cpu), ("gpu", gpu), ("linear", linear), ("compute_bound", compute_bound)];

fn decode(depths: &[usize], lengths: &[usize]) -> Work {
    let mut work = Work::default();
    depths.iter().zip(lengths).for_each(|(&depth, len)| work += Work::chunk(depth, 1 + len));
    work
}

/// Costs of a machine that has run all numbers of rows.
fn measured(machine: Machine) -> StepCosts {
    let mut costs = StepCosts::of_single_rows();
    for round in 0..200 {
        let work = Work::chunk(100 + round * 37 % 900, [1, 2, 4, 8, 16, 32, 64, 128][round % 8]);
        costs.measure(work, machine(work));
    }
    costs
}

fn candidate(depth: usize, len: usize, rate: f64, seconds_per_token: f64) -> Candidate {
    Candidate { len, rates: [rate; MAX_DRAFT_LEN], seconds_per_token, ..Candidate::without_draft(depth) }
}

/// Expected tokens per second of a choice, as the definition says.
fn rate(costs: &StepCosts, base: Work, candidates: &[Candidate], lengths: &[usize]) -> f64 {
    let (mut work, mut plain, mut tokens, mut drafting) = (base, Work::default(), 0.0, 0.0f64);
    for (candidate, &len) in candidates.iter().zip(lengths) {
        work += candidate.work(len);
        plain += Work::chunk(candidate.depth, 1);
        tokens += 1.0 + candidate.expected(len);
        if len > 0 {
            drafting = drafting.max(candidate.start_seconds + len as f64 * candidate.seconds_per_token);
        }
    }
    tokens / (costs.predict(plain).min(costs.predict(base)) + costs.predict(work) - costs.predict(base) + drafting)
}

/// Calls `visit` with every choice of lengths.
fn for_each_choice(candidates: &[Candidate], lengths: &mut Vec<usize>, visit: &mut impl FnMut(&[usize])) {
    let Some(next) = candidates.get(lengths.len()) else { return visit(lengths) };
    for len in 0..=next.len {
        lengths.push(len);
        for_each_choice(candidates, lengths, visit);
        lengths.pop();
    }
}

proptest! {
    #[test]
    fn the_choice_is_as_good_as_the_best(
        machine in 0..MACHINES.len(),
        drafts in prop::collection::vec((0usize..6, 0.0f64..1.0, 0usize..20_000, any::<bool>()), 1..5),
        draft_seconds in 0.0f64..2e-3,
        num_prompt_rows in prop_oneof![Just(0usize), 1usize..200],
        num_rows in prop_oneof![Just(usize::MAX), 0usize..12],
        max_lengthening in prop_oneof![Just(f64::INFINITY), 1.0f64..1.5],
    ) {
        let costs = measured(MACHINES[machine].1);
        let candidates: Vec<Candidate> = drafts.iter().map(|&(len, rate, depth, is_slow)| {
            candidate(depth, len, rate, if is_slow { draft_seconds } else { 0.0 })
        }).collect();
        let depths: Vec<usize> = drafts.iter().map(|draft| draft.2).collect();
        let mut base = decode(&depths, &vec![0; depths.len()]);
        if num_prompt_rows > 0 {
            base += Work::chunk(0, num_prompt_rows);
        }
        let limits = Limits { num_rows, max_lengthening };
        let chosen = choose(&costs, base, &candidates, limits);
        prop_assert!(chosen.iter().zip(&candidates).all(|(&len, candidate)| len <= candidate.len));
        let step = Step::new(&costs, base, &candidates).unwrap();
        let allowed = |lengths: &[usize]| {
            lengths.iter().sum::<usize>() <= num_rows && step.is_within(limits, step.extra_seconds(lengths) - 1e-12)
        };
        prop_assert!(allowed(&chosen), "{chosen:?} is beyond {limits:?}");
        let found = rate(&costs, base, &candidates, &chosen);
        let mut best = 0.0f64;
        for_each_choice(&candidates, &mut Vec::new(), &mut |lengths| {
            if allowed(lengths) {
                best = best.max(rate(&costs, base, &candidates, lengths));
            }
        });
        // A step that may hardly be longer is a knapsack, which a greedy choice does not solve.
        let tolerance = if max_lengthening.is_finite() { 0.75 } else { 0.99 };
        prop_assert!(found >= tolerance * best, "{found} with {chosen:?}, {best} is possible");
    }
}

#[test]
fn rows_that_cost_nothing_are_used_and_full_batches_are_not_drafted_for() {
    let costs = measured(gpu);
    let candidates = |num: usize| vec![candidate(100, 8, 0.7, 0.0); num];
    let base = |num: usize| decode(&vec![100; num], &vec![0; num]);
    assert_eq!(choose(&costs, base(1), &candidates(1), UNLIMITED), [8]);
    assert_eq!(choose(&costs, base(4), &candidates(4), UNLIMITED), [8; 4]);
    let costs = measured(linear);
    assert_eq!(choose(&costs, base(64), &candidates(64), UNLIMITED), [0; 64], "each row takes the time of a token");
    assert!(choose(&costs, base(1), &candidates(1), UNLIMITED)[0] >= 2);
    let costs = measured(compute_bound);
    assert_eq!(choose(&costs, base(4), &candidates(4), UNLIMITED), [0; 4]);
}

#[test]
fn the_time_of_a_prompt_does_not_make_drafts_cheap() {
    let costs = measured(linear);
    let improbable = [candidate(100, 8, 0.05, 0.0)];
    let base = Work::chunk(100, 1).and(Work::chunk(0, 100));
    assert_eq!(choose(&costs, base, &improbable, UNLIMITED), [0]);
    assert!(choose(&costs, base, &[candidate(100, 8, 0.8, 0.0)], UNLIMITED)[0] > 0);
}

#[test]
fn nothing_is_drafted_before_times_are_known() {
    let (costs, draft) = (StepCosts::of_single_rows(), [candidate(100, 8, 0.9, 0.0)]);
    assert_eq!(choose(&costs, Work::chunk(100, 1), &draft, UNLIMITED), [0]);
    assert_eq!(DraftLengths::default().choose(&costs, Work::chunk(100, 1), &draft, UNLIMITED), [0]);
    assert_eq!(DraftLengths::default().choose(&measured(gpu), Work::default(), &[], UNLIMITED), [0; 0]);
}

/// Replies on a simulated machine.
struct Simulation {
    machine: Machine,
    drafter: DrafterKind,
    /// Time of a token of the draft model; 0 for a lookup, which is observed in every step.
    draft_seconds: f64,
    num_sequences: usize,
    costs: StepCosts,
    lengths: DraftLengths,
    acceptance: Acceptance,
    seconds: f64,
    num_tokens: usize,
    random: u64,
}

const DEPTH: usize = 500;

impl Simulation {
    fn new(machine: Machine, drafter: DrafterKind, draft_seconds: f64, num_sequences: usize) -> Simulation {
        let mut costs = StepCosts::of_single_rows();
        (0..DEPTH)
            .step_by(256)
            .for_each(|depth| costs.measure(Work::chunk(depth, 256), machine(Work::chunk(depth, 256))));
        Simulation {
            machine,
            drafter,
            draft_seconds,
            num_sequences,
            costs,
            lengths: DraftLengths::default(),
            acceptance: Acceptance::shared(),
            seconds: 0.0,
            num_tokens: 0,
            random: 1,
        }
    }

    fn uniform(&mut self) -> f64 {
        self.random = self.random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.random >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Generates replies of `num_steps` steps to new requests, whose drafts are right with a probability.
    fn reply(&mut self, num_steps: usize, probability: impl Fn(usize) -> f64) {
        let shared = &self.acceptance;
        let mut sequences = vec![Acceptance::of_sequence(shared); self.num_sequences];
        let mut draft = ScoredDraft::new(self.drafter);
        (0..MAX_DRAFT_LEN).for_each(|_| draft.push(1, Level::LOWEST));
        for step in 0..num_steps {
            let candidates: Vec<Candidate> = sequences
                .iter()
                .map(|acceptance| Candidate {
                    rates: acceptance.rates(&draft),
                    ..candidate(DEPTH, MAX_DRAFT_LEN, 0.0, self.draft_seconds)
                })
                .collect();
            let base = decode(&vec![DEPTH; self.num_sequences], &vec![0; self.num_sequences]);
            let lengths = self.lengths.choose(&self.costs, base, &candidates, UNLIMITED);
            let work = decode(&vec![DEPTH; self.num_sequences], &lengths);
            let seconds = (self.machine)(work);
            self.costs.measure(work, seconds);
            let longest = lengths.iter().max().copied().unwrap_or(0);
            self.seconds += seconds + self.draft_seconds * longest as f64;
            let mut all_accepted = 0;
            for (sequence, &len) in sequences.iter_mut().zip(&lengths) {
                let mut num_right = 0;
                while num_right < MAX_DRAFT_LEN && self.uniform() < probability(step) {
                    num_right += 1;
                }
                let num_accepted = num_right.min(len);
                let mut chosen = vec![1; num_accepted];
                chosen.push(if num_right > num_accepted { 1 } else { 2 });
                // A model that did not draft is not observed.
                let mut seen = draft;
                seen.truncate(if self.draft_seconds > 0.0 { len } else { MAX_DRAFT_LEN });
                sequence.observe(&seen, &chosen);
                self.acceptance.observe(&seen, &chosen);
                all_accepted += num_accepted;
                self.num_tokens += chosen.len();
            }
            self.lengths.finish_step(seconds, all_accepted);
        }
    }

    /// Tokens per second of one length in all steps.
    fn fixed(&self, len: usize, probability: f64) -> f64 {
        let tokens = self.num_sequences as f64 * (0..=len).map(|i| probability.powi(i as i32)).sum::<f64>();
        let work = decode(&vec![DEPTH; self.num_sequences], &vec![len; self.num_sequences]);
        tokens / ((self.machine)(work) + self.draft_seconds * len as f64)
    }

    fn rate(&self) -> f64 {
        self.num_tokens as f64 / self.seconds
    }
}

#[test]
fn a_drafter_that_is_always_wrong_costs_at_most_three_percent() {
    for (name, machine) in MACHINES {
        for drafter in [DrafterKind::Ngram, DrafterKind::Custom, DrafterKind::Prediction, DrafterKind::DraftModel] {
            for num_sequences in [1, 3, 16] {
                for (num_replies, num_steps) in [(1, 200), (1, 2000), (50, 32)] {
                    let draft_seconds = if drafter == DrafterKind::DraftModel { 1e-3 } else { 0.0 };
                    let mut simulation = Simulation::new(machine, drafter, draft_seconds, num_sequences);
                    (0..num_replies).for_each(|_| simulation.reply(num_steps, |_| 0.0));
                    let found = simulation.rate() / simulation.fixed(0, 0.0);
                    assert!(found >= 0.97, "{name} {drafter:?} {num_sequences} {num_replies}x{num_steps}: {found}");
                }
            }
        }
    }
}

#[test]
fn a_good_drafter_reaches_the_rate_of_the_best_length() {
    for (name, machine) in MACHINES {
        for (drafter, draft_seconds) in [(DrafterKind::Custom, 0.0), (DrafterKind::DraftModel, 3e-4)] {
            for num_sequences in [1, 4, 16] {
                for probability in [0.5, 0.8, 0.95] {
                    let mut simulation = Simulation::new(machine, drafter, draft_seconds, num_sequences);
                    simulation.reply(1500, |_| probability);
                    let best = (0..=MAX_DRAFT_LEN).map(|len| simulation.fixed(len, probability)).fold(0.0, f64::max);
                    let plain = simulation.fixed(0, 0.0);
                    let (found, best) = (simulation.rate() / plain, best / plain);
                    assert!(
                        found >= (0.75 * best).max(0.97),
                        "{name} {drafter:?} {num_sequences} {probability}: {found} of {best}"
                    );
                }
            }
        }
    }
}
