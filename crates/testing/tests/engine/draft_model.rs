//! A draft model in the engine: long prompts that it prefills beside the target, tenants, failures, full batches.

use pellucid_engine::{DrafterKind, Engine, Request, Scope, SpeculationOptions, TenantId};
use pellucid_sampling::SamplingParams;
use pellucid_testing::{FakeModel, Machine, VirtualClock};

use crate::support::{OPTIONS, bits, prompts, request, serve};

const CHOSEN: SpeculationOptions = SpeculationOptions::OFF;
const FIXED: SpeculationOptions = SpeculationOptions { fixed_draft_len: Some(4), ..SpeculationOptions::OFF };

const VOCAB: usize = 24;
const CONTEXT: usize = 1000;

/// Returns an engine in virtual time, without a draft model.
fn plain(machine: Machine) -> (Engine, VirtualClock) {
    let mut model = FakeModel::new(VOCAB, CONTEXT);
    let clock = VirtualClock::new(machine);
    model.clock = Some(clock.clone());
    let backend = model.backend();
    let mut engine = Engine::new(Box::new(model), backend, OPTIONS).expect("an engine");
    engine.set_clock(Box::new(clock.clone()));
    (engine, clock)
}

/// Returns an engine whose draft model takes no time, or the time of the target.
fn with_draft_model(
    options: SpeculationOptions,
    takes_time: bool,
    change: impl FnOnce(&mut FakeModel),
) -> (Engine, VirtualClock) {
    let (mut engine, clock) = plain(Machine::Gpu);
    let mut draft = FakeModel::new(VOCAB, CONTEXT);
    draft.clock = takes_time.then(|| clock.clone());
    change(&mut draft);
    engine.set_speculation(options);
    engine.set_draft_model(Box::new(draft), OPTIONS.num_blocks).expect("a draft model");
    (engine, clock)
}

fn requests(count: usize, prompt_len: usize, max_tokens: usize) -> Vec<Request> {
    let prompt = |i: usize| (0..prompt_len).map(|j| ((j * j + i * 7 + j * i) % VOCAB) as u32).collect();
    (0..count).map(|i| Request { max_tokens: Some(max_tokens), ..request(prompt(i), i as u64) }).collect()
}

/// Prompts of several times the rows that one call computes.
#[test]
fn long_prompts_are_prefilled_beside_the_target() {
    let requests = requests(3, 130, 60);
    let (mut engine, _) = plain(Machine::Gpu);
    let expected: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    for options in [CHOSEN, FIXED] {
        let (mut engine, _) = with_draft_model(options, false, |_| ());
        let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
        assert_eq!(found, expected);
        let counts = engine.stats().speculation.of(DrafterKind::DraftModel);
        assert!(counts.accepted > 40 && counts.rejected() == 0, "{options:?}: {counts:?}");
    }
}

/// With the time of the target for each of its steps, a draft model cannot pay, and its prefill even less.
#[test]
fn a_draft_model_that_is_too_slow_costs_little() {
    let requests = requests(1, 400, 400);
    let (mut engine, clock) = plain(Machine::Gpu);
    let expected: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    let plain_time = clock.elapsed();
    let (mut engine, clock) = with_draft_model(CHOSEN, true, |_| ());
    let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    assert_eq!(found, expected);
    let ratio = plain_time.as_secs_f64() / clock.elapsed().as_secs_f64();
    assert!(ratio >= 0.97, "{ratio} of plain decoding");
}

#[test]
fn every_sampler_accepts_all_tokens_of_the_same_model() {
    let base = || SamplingParams { logprobs: Some(2), ..SamplingParams::default() };
    let chains = [
        base(),
        SamplingParams { top_k: 5, top_p: 0.9, ..base() },
        SamplingParams { typical_p: 0.7, min_p: 0.02, ..base() },
        SamplingParams { repetition_penalty: 1.4, frequency_penalty: 0.5, penalty_window: Some(9), ..base() },
        SamplingParams { dry_multiplier: 1.5, presence_penalty: 0.5, ..base() },
        SamplingParams { mirostat_tau: Some(3.0), ..base() },
        SamplingParams { xtc_probability: 0.5, logit_bias: vec![(3, 1.0)], min_tokens: 9, end_ids: vec![2], ..base() },
    ];
    let mut requests: Vec<Request> = Vec::new();
    for (i, temperature) in [0.0, 0.7, 1.5].into_iter().enumerate() {
        for (j, chain) in chains.iter().enumerate().filter(|(_, c)| temperature > 0.0 || c.mirostat_tau.is_none()) {
            let seed = (i * 10 + j) as u64;
            let prompt = prompts(30, VOCAB as u32).remove(seed as usize);
            let sampling = SamplingParams { temperature, seed, ..chain.clone() };
            requests.push(Request { max_tokens: Some(20), ..Request::new(prompt, sampling) });
        }
    }
    let (mut engine, _) = plain(Machine::Gpu);
    let expected: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    let (mut engine, _) = with_draft_model(FIXED, false, |_| ());
    let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    assert_eq!(found, expected);
    let counts = engine.stats().speculation.of(DrafterKind::DraftModel);
    assert!(counts.drafted > 100 && counts.rejected() == 0, "{counts:?}");
}

/// NaN logits, panics, a failed and a lost device of the draft model: the replies are those without it.
#[test]
fn failures_of_a_draft_model_reach_no_request() {
    let mut requests = requests(6, 20, 25);
    requests.iter_mut().zip(0..).for_each(|(request, id)| request.scope = Scope::of(TenantId(id % 3)));
    let (mut engine, _) = plain(Machine::Gpu);
    let expected: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    let changes: [fn(&mut FakeModel); 5] = [
        |draft| draft.poison = Some(5),
        |draft| draft.bomb = Some(5),
        |draft| draft.fails_at = Some(3),
        |draft| draft.lost_at = Some(3),
        |draft| (draft.poison, draft.digest_len) = (Some(5), Some(4)),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let (mut engine, _) = with_draft_model(FIXED, false, change);
        let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
        assert_eq!(found, expected, "change {i}");
        let stats = engine.stats();
        assert_eq!((stats.failed_requests, stats.preemptions), (0, 0));
        assert!(!engine.is_lost());
    }
}

/// A draft model without blocks proposes nothing, and requests do not notice.
#[test]
fn a_draft_model_without_memory_changes_nothing() {
    let requests = requests(4, 20, 25);
    let (mut engine, _) = plain(Machine::Gpu);
    let expected: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    for num_blocks in [0, 3, 8] {
        let (mut engine, _) = plain(Machine::Gpu);
        engine.set_speculation(FIXED);
        engine.set_draft_model(Box::new(FakeModel::new(VOCAB, CONTEXT)), num_blocks).expect("a draft model");
        let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
        assert_eq!(found, expected, "{num_blocks} blocks");
        let drafted = engine.stats().speculation.of(DrafterKind::DraftModel).drafted;
        assert_eq!(drafted > 0, num_blocks == 8, "{drafted} tokens with {num_blocks} blocks");
        assert_eq!(engine.stats().preemptions, 0);
    }
}
