//! A seeded simulator of the engine: random arrivals, lengths, cancellations, floods, pauses, changed parameters,
//! replies ended early, beam searches, scored prompts, constraints, deadlines, quotas and little memory, with a fake
//! model that may look ahead and assume wrong tokens, and with drafters that may be wrong or hostile.
//!
//! After every step, the engine's accounts of blocks are audited. Every successful reply must be the one that the
//! model's pure function gives, and every request must end. A failure names its seed; to repeat it alone, run
//! `PELLUCID_SEED=N cargo test -p pellucid-testing --test simulator`.
//!
//! `tenants` simulates a tenant that misbehaves, and measures in virtual time what another one gets.

mod constraints;
mod drafters;
mod tenants;

use std::sync::Arc;
use std::time::Duration;

use pellucid_engine::{
    BeamParams, Control, DraftCounts, EarlyStopping, Engine, EngineOptions, EngineStats, Error, FinishReason,
    Overcommit, Request, Scope, TenantId, window_need,
};
use pellucid_model::{Devices, Model};
use pellucid_sampling::{Input, Sampler, SamplingParams, Workspace};
use pellucid_selftest::{EventCollector, Outcome};
use pellucid_tensor::{Backend, DType};
use pellucid_testing::{FakeModel, Machine, VirtualClock};

const VOCAB: usize = 24;
const CONTEXT: usize = 40;
/// Total number of submissions, cancellations, control messages and steps.
const OPERATIONS: usize = 1_000_000;
/// Maximum steps until all requests have ended, once no new ones arrive; each needs at most a few dozen steps.
const MAX_DRAIN_STEPS: usize = 20_000;

struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        // SplitMix64.
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) % bound as u64) as usize
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

struct Live {
    request: Request,
    collected: EventCollector,
    /// The sampling parameters after each control message that is acknowledged, changed or not.
    params_after_control: Vec<SamplingParams>,
    is_held: bool,
    /// Choices that a control message ended.
    ended: Vec<usize>,
}

#[test]
fn a_million_operations_keep_the_engine_consistent() {
    if let Ok(seed) = std::env::var("PELLUCID_SEED") {
        simulate(seed.parse().expect("a number"));
        return;
    }
    let (mut operations, mut ahead, mut discarded, mut forced) = (0, 0, 0, 0);
    let mut drafts = DraftCounts::default();
    let mut seed = 0;
    while operations < OPERATIONS {
        let outcome = std::panic::catch_unwind(|| simulate(seed));
        match outcome {
            Ok((count, stats)) => {
                operations += count;
                ahead += stats.steps_ahead;
                discarded += stats.tokens_discarded;
                drafts += stats.speculation.total();
                forced += stats.forced_tokens;
            }
            Err(_) => panic!("seed {seed} failed; repeat it with PELLUCID_SEED={seed}"),
        }
        seed += 1;
    }
    eprintln!("{operations} operations, {seed} seeds; {ahead} steps ahead, {discarded} tokens discarded; {drafts:?}");
    assert!(
        ahead > 10_000 && discarded > 1_000,
        "{ahead} steps were launched ahead, {discarded} tokens were discarded"
    );
    assert!(forced > 10_000, "{forced} tokens were forced by constraints");
    assert!(drafts.accepted > 50_000 && drafts.rejected() > 50_000, "{drafts:?}");
}

fn simulate(seed: u64) -> (usize, EngineStats) {
    let mut random = Random(seed);
    let window = random.chance(2).then(|| 1 + random.below(8));
    // With windows there are fewer sequences, so that window blocks are fewer than the others.
    let max_sequences = 1 + random.below(if window.is_some() { 3 } else { 8 });
    let mut options = EngineOptions {
        num_blocks: 10 + random.below(50),
        block_len: 4,
        kv_dtype: DType::F32,
        max_sequences,
        step_tokens: max_sequences + random.below(24),
        chunk_len: 1 + random.below(16),
        max_waiting: 1 + random.below(30),
        overcommit: [Overcommit::Never, Overcommit::Unbounded { growth: random.below(12) }, Overcommit::Always]
            [random.below(3)],
        secret: [seed as u8; 32],
        snapshot_distance: None,
    };
    let mut model = FakeModel::new(VOCAB, CONTEXT);
    if let Some(len) = window {
        model = model.with_window(len);
        let devices = Devices::from(model.backend() as Arc<dyn Backend>);
        let need = window_need(model.config(), &devices, 4, max_sequences, options.step_tokens);
        options.num_blocks = need.expect("a window").num_live * 4 / 3 + 2 + random.below(20);
    }
    model.digest_len = [None, Some(2), Some(VOCAB)][random.below(3)];
    model.is_asynchronous = random.chance(2);
    model.wrong_every = random.chance(2).then(|| 1 + random.below(9));
    // Virtual time: a seed gives the same steps on every machine.
    let clock = VirtualClock::new(if random.chance(3) { Machine::Cpu } else { Machine::Gpu });
    model.clock = Some(clock.clone());
    let backend = model.backend();
    let mut engine = Engine::new(Box::new(model), backend, options).expect("an engine");
    assert_eq!(engine.cache().has_windows(), window.is_some());
    engine.set_clock(Box::new(clock));
    drafters::draw(&mut engine, &mut random);
    if random.chance(3) {
        engine.cache_mut().set_quota(TenantId(1), 10 + random.below(12));
    }
    if random.chance(3) {
        engine.cache_mut().share_prefix(prompt(0, 9));
    }
    let mut live: Vec<Live> = Vec::new();
    let mut operations = 0;
    let flood = random.chance(4);
    for _ in 0..1500 {
        operations += 1;
        let busy = if flood { 2 } else { 5 };
        if random.chance(busy) {
            submit(&mut engine, &mut random, &mut live);
        } else if random.chance(25) && !live.is_empty() {
            let gone = live.swap_remove(random.below(live.len()));
            gone.collected.close();
        } else if random.chance(8) && !live.is_empty() {
            let at = random.below(live.len());
            interfere(&mut random, &mut live[at]);
        } else {
            engine.step();
            engine.audit().unwrap_or_else(|wrong| panic!("after {operations} operations: {wrong}"));
        }
        live.retain(|live| !is_checked(live));
    }
    live.iter_mut().filter(|live| live.is_held).for_each(release);
    let mut steps_left = MAX_DRAIN_STEPS;
    while engine.step() {
        operations += 1;
        engine.audit().unwrap_or_else(|wrong| panic!("while draining: {wrong}"));
        live.retain(|live| !is_checked(live));
        steps_left -= 1;
        assert!(steps_left > 0, "{} requests did not end within {MAX_DRAIN_STEPS} steps", live.len());
    }
    // The last request may have ended without a step.
    live.retain(|live| !is_checked(live));
    assert!(live.is_empty(), "{} requests got no reply", live.len());
    let stats = engine.stats();
    assert_eq!((stats.blocks_in_use, stats.num_running, stats.num_waiting), (0, 0, 0));
    (operations, stats)
}

/// Pauses a request, resumes it, ends one of its choices, or changes its sampling parameters.
fn interfere(random: &mut Random, live: &mut Live) {
    if live.is_held {
        release(live);
    } else if live.request.num_choices > 1 && live.request.best_of == live.request.num_choices && random.chance(3) {
        let choice = random.below(live.request.num_choices);
        live.ended.push(choice);
        live.collected.send_control(Control::End { choice });
    } else if live.request.beams.is_none() && random.chance(3) && live.request.best_of == 1 {
        let sampling = SamplingParams { temperature: random.below(3) as f32 / 2.0, ..live.request.sampling.clone() };
        live.params_after_control.push(sampling.clone());
        live.collected.send_control(Control::Update(Box::new(sampling)));
    } else {
        live.is_held = true;
        match random.chance(2) {
            true => live.collected.set_ready(false),
            false => live.send_control(Control::Pause),
        }
    }
}

fn release(live: &mut Live) {
    live.is_held = false;
    live.collected.set_ready(true);
    live.send_control(Control::Resume);
}

impl Live {
    /// Sends a control message that does not change the sampling parameters.
    fn send_control(&mut self, control: Control) {
        self.params_after_control.push(self.params_after_control.last().unwrap_or(&self.request.sampling).clone());
        self.collected.send_control(control);
    }
}

/// Returns a prompt of a family; prompts of a family share prefixes.
fn prompt(family: usize, len: usize) -> Vec<u32> {
    (0..len).map(|i| ((i * 7 + family * 5) % (VOCAB - 2)) as u32).collect()
}

fn submit(engine: &mut Engine, random: &mut Random, live: &mut Vec<Live>) {
    let mut tokens = prompt(random.below(3), 1 + random.below(20));
    if random.chance(3) {
        tokens.push(random.below(VOCAB) as u32);
    }
    let sampling = SamplingParams {
        temperature: if random.chance(2) { 0.0 } else { 1.0 },
        seed: random.below(3) as u64,
        top_k: if random.chance(4) { 1 + random.below(6) as u32 } else { 0 },
        top_p: if random.chance(4) { 0.7 } else { 1.0 },
        min_p: if random.chance(6) { 0.1 } else { 0.0 },
        repetition_penalty: if random.chance(12) { 1.2 } else { 1.0 },
        stop_ids: if random.chance(3) { vec![3] } else { Vec::new() },
        end_ids: vec![(VOCAB - 1) as u32],
        ..SamplingParams::default()
    };
    let tenant = TenantId(random.below(3) as u32);
    let scope = if random.chance(6) { Scope::salted(tenant, "salt") } else { Scope::of(tenant) };
    let request = Request {
        scope,
        max_tokens: (!random.chance(8)).then(|| 1 + random.below(14)),
        num_choices: if random.chance(5) { 1 + random.below(3) } else { 1 },
        priority: random.below(3) as i32,
        ..Request::new(tokens, sampling)
    };
    let best_of = request.num_choices + if random.chance(12) { 1 + random.below(2) } else { 0 };
    let request = Request {
        best_of,
        speculate: !random.chance(8),
        score_prompt: random.chance(15),
        deadline: random.chance(40).then_some(Duration::ZERO),
        constraint: random.chance(4).then(|| constraints::draw(random)),
        ..request
    };
    let request = if random.chance(15) { with_beams(random, request) } else { request };
    let collected = EventCollector::default();
    match engine.submit(request.clone(), Box::new(collected.clone())) {
        Ok(()) => {
            live.push(Live { request, collected, params_after_control: Vec::new(), is_held: false, ended: Vec::new() });
        }
        Err(
            Error::QueueFull
            | Error::ExceedsKvMemory { .. }
            | Error::ExceedsQuota { .. }
            | Error::OutOfRange { name: "n" | "best_of" | "beam width", .. },
        ) => {}
        Err(error) => panic!("{request:?} was refused: {error}"),
    }
}

/// Turns a request into a beam search.
fn with_beams(random: &mut Random, request: Request) -> Request {
    let width = 2 + random.below(2);
    let beams = BeamParams {
        width,
        num_returned: 1 + random.below(width),
        length_penalty: random.below(3) as f32 - 1.0,
        early_stopping: [EarlyStopping::Always, EarlyStopping::Heuristic, EarlyStopping::Never][random.below(3)],
    };
    let sampling = SamplingParams { end_ids: request.sampling.end_ids, ..SamplingParams::default() };
    Request { sampling, beams: Some(beams), constraint: None, num_choices: 1, best_of: 1, ..request }
}

/// Whether the request has ended; if so, checks its reply.
fn is_checked(live: &Live) -> bool {
    if !live.collected.is_over() {
        return false;
    }
    let (request, outcome) = (&live.request, live.collected.outcome());
    assert_eq!(outcome.error, None, "{request:?}");
    assert_eq!(outcome.finish.len(), request.num_choices, "every choice has an end: {request:?}");
    assert!(outcome.finish.iter().all(Option::is_some), "every choice has an end: {request:?}");
    if request.deadline.is_some() {
        let is_late = |(choice, finish): (usize, &Option<FinishReason>)| {
            *finish == Some(FinishReason::Deadline) || live.ended.contains(&choice)
        };
        assert!(outcome.finish.iter().enumerate().all(is_late), "{request:?}");
        return true;
    }
    if request.score_prompt && live.ended.is_empty() {
        assert_eq!(outcome.prompt_logprobs.len(), request.prompt.len() - 1, "{request:?}");
    }
    if request.beams.is_some() {
        assert_eq!(outcome.beams, alone(request).beams, "{request:?}");
        return true;
    }
    let changes: Vec<_> =
        outcome.controls_applied.iter().copied().zip(live.params_after_control.iter().cloned()).collect();
    for choice in 0..request.num_choices {
        let found = outcome.tokens.get(choice).cloned().unwrap_or_default();
        if request.best_of > request.num_choices {
            let made = |other| is_reply(&found, &expected(request, other, &changes), !live.ended.is_empty());
            assert!((0..request.best_of).any(made), "choice {choice} of {request:?} is none of the candidates");
        } else {
            let expected = expected(request, choice, &changes);
            let is_right = is_reply(&found, &expected, live.ended.contains(&choice));
            assert!(is_right, "choice {choice} of {request:?}: {found:?} for {expected:?}");
        }
    }
    true
}

/// Whether a reply is the expected one, or its beginning if the reply may have been ended early.
fn is_reply(found: &[u32], expected: &[u32], is_cut: bool) -> bool {
    if is_cut { expected.starts_with(found) } else { found == expected }
}

/// Returns the outcome of a request that is served alone.
fn alone(request: &Request) -> Outcome {
    let options = EngineOptions {
        num_blocks: 200,
        block_len: 4,
        kv_dtype: DType::F32,
        max_sequences: 8,
        step_tokens: 64,
        chunk_len: 64,
        max_waiting: 1,
        overcommit: Overcommit::Never,
        secret: [9; 32],
        snapshot_distance: None,
    };
    let model = FakeModel::new(VOCAB, CONTEXT);
    let backend = model.backend();
    let mut engine = Engine::new(Box::new(model), backend, options).expect("an engine");
    let collected = EventCollector::default();
    engine.submit(request.clone(), Box::new(collected.clone())).expect("an accepted request");
    while engine.step() {}
    collected.outcome()
}

/// Computes a reply with the model's pure function and the sampler alone. `changes` holds the sampling parameters after
/// each control message, with the number of output tokens when it was applied.
fn expected(request: &Request, choice: usize, changes: &[(usize, SamplingParams)]) -> Vec<u32> {
    let mut params = request.sampling.clone();
    params.seed += choice as u64;
    let mut sampler = Sampler::new(&params, VOCAB).expect("valid parameters");
    let mut history = sampler.history(&request.prompt);
    let (mut state, mut workspace) = (sampler.state(), Workspace::default());
    let mut tokens = request.prompt.clone();
    let mut matcher = request.constraint.as_ref().map(|constraint| constraint.matcher());
    let mut words = [0];
    while tokens.len() < CONTEXT && request.max_tokens != Some(tokens.len() - request.prompt.len()) {
        let num_output = tokens.len() - request.prompt.len();
        // Only a request with one choice changes its parameters.
        if let Some((_, params)) = changes.iter().rfind(|(at, _)| *at <= num_output).filter(|_| request.best_of == 1) {
            sampler = Sampler::new(params, VOCAB).expect("valid parameters");
        }
        let logits = FakeModel::logits_after(tokens.iter().copied(), VOCAB);
        let mask = matcher.as_mut().filter(|matcher| !matcher.allows_all()).map(|matcher| {
            matcher.mask(&mut words).expect("a mask");
            &words[..]
        });
        let input = Input { logits: &logits, history: &history, position: tokens.len() as u32, mask };
        let choice = sampler.sample(&input, &mut state, &mut workspace).expect("a token");
        if choice.end.is_some() {
            break;
        }
        tokens.push(choice.token);
        history.push(choice.token);
        if let Some(matcher) = &mut matcher {
            matcher.accept(choice.token).expect("a token that the mask allows");
            if matcher.is_complete() {
                break;
            }
        }
    }
    tokens.split_off(request.prompt.len())
}
