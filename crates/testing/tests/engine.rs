//! The engine's promises: the same bits whoever else is served, limits that are kept, faults that stay with their request.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{
    BeamParams, Control, EarlyStopping, Engine, EngineHandle, EngineOptions, Error, Event, FinishReason, Overcommit,
    Request, Scope, TenantId,
};
use pellucid_model::{Decoder, LoadOptions, Model};
use pellucid_sampling::SamplingParams;
use pellucid_tensor::{Backend, DType};
use pellucid_testing::{Collected, FakeModel, Outcome, Subject, ahead_suite, cpu, subjects};

const OPTIONS: EngineOptions = EngineOptions {
    num_blocks: 400,
    block_len: 4,
    kv_dtype: DType::F32,
    max_sequences: 32,
    step_tokens: 64,
    chunk_len: 16,
    max_waiting: 1000,
    overcommit: Overcommit::Never,
    secret: [3; 32],
};

fn engine(path: &Path, num_threads: usize, options: EngineOptions) -> Engine {
    let backend = cpu(Isa::best(), num_threads).expect("the best there is");
    let checkpoint = Checkpoint::open(path).expect("a model");
    let model = Decoder::load(&checkpoint, backend.clone(), LoadOptions::default(), &mut |_, _| ()).expect("it loads");
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

fn fake(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    let mut model = FakeModel::new(24, 60);
    change(&mut model);
    let backend = model.backend();
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

fn request(prompt: Vec<u32>, seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 1.0, seed, logprobs: Some(0), ..SamplingParams::default() };
    Request { max_tokens: Some(10), ..Request::new(prompt, sampling) }
}

fn finish(engine: &mut Engine) {
    while engine.step() {
        engine.audit().expect("the books are right");
    }
}

fn serve(engine: &mut Engine, requests: &[Request]) -> Vec<Outcome> {
    let collected: Vec<Collected> = requests.iter().map(|_| Collected::default()).collect();
    for (request, collected) in requests.iter().zip(&collected) {
        engine.submit(request.clone(), Box::new(collected.clone())).expect("it is accepted");
    }
    finish(engine);
    collected.iter().map(Collected::outcome).collect()
}

/// Prompts that share beginnings, so that caches have something to find.
fn prompts(count: usize, vocab: u32) -> Vec<Vec<u32>> {
    (0..count as u32).map(|i| (0..5 + i % 29).map(|j| (j * 7 + (i % 5) * 11 + j * (i % 3)) % vocab).collect()).collect()
}

/// Tokens and the bits of their log probabilities.
fn bits(outcome: &Outcome) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    assert_eq!(outcome.error, None);
    (outcome.tokens.clone(), outcome.logprob_bits.clone())
}

#[test]
fn alone_or_in_company_cold_or_cached_preempted_or_not_the_bits_are_the_same() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    for Subject { name, path, kv_dtype, .. } in subjects(folder.path()) {
        // LongRoPE and the smallest contexts included; every family takes the same road.
        let requests: Vec<Request> =
            prompts(24, 90).into_iter().enumerate().map(|(i, p)| request(p, i as u64 % 4)).collect();
        let options = EngineOptions { kv_dtype, ..OPTIONS };
        let mut alone = Vec::new();
        let mut single = engine(&path, 1, EngineOptions { max_sequences: 1, chunk_len: 64, ..options });
        for request in &requests {
            alone.push(bits(&serve(&mut single, std::slice::from_ref(request))[0]));
        }
        let settings = [
            options,
            EngineOptions { chunk_len: 1, ..options },
            EngineOptions { max_sequences: 3, step_tokens: 7, chunk_len: 5, ..options },
            // Memory for a few sequences only, given out too freely: requests are preempted and computed again.
            EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, ..options },
        ];
        for (i, options) in settings.into_iter().enumerate() {
            let mut engine = engine(&path, 2, options);
            for warmth in ["cold", "warm"] {
                let together = serve(&mut engine, &requests);
                for (j, outcome) in together.iter().enumerate() {
                    let case = format!("{name}, KV in {kv_dtype}: request {j}, setting {i}, {warmth}");
                    assert!(bits(outcome) == alone[j], "{case} differs");
                }
            }
            let stats = engine.stats();
            assert!(stats.cached_tokens > 0, "{name}: the second round finds what the first stored");
            assert!(i != 3 || stats.preemptions > 0, "{name}: memory was tight");
        }
    }
}

/// Numbers that halves cannot hold end the request that made them, by name, and nobody else's.
#[test]
fn keys_beyond_the_format_end_their_request_with_an_error() {
    let folder = tempfile::tempdir().expect("a temporary folder");
    subjects(folder.path());
    // Norm weights of the first layer a million times as large make keys and values that no half can hold.
    let file = folder.path().join("model.safetensors");
    let mut bytes = std::fs::read(&file).expect("just written");
    let header_len = u64::from_le_bytes(bytes[..8].try_into().expect("eight bytes")) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header_len]).expect("a header");
    let offsets = &header["model.layers.0.input_layernorm.weight"]["data_offsets"];
    let at = |i: usize| 8 + header_len + offsets[i].as_u64().expect("an offset") as usize;
    for number in bytes[at(0)..at(1)].chunks_exact_mut(4) {
        let value = f32::from_le_bytes(number.try_into().expect("four bytes"));
        number.copy_from_slice(&(value * 1e6).to_le_bytes());
    }
    std::fs::write(&file, bytes).expect("a writable file");
    let run = |kv_dtype| {
        let mut engine = engine(folder.path(), 1, EngineOptions { kv_dtype, ..OPTIONS });
        serve(&mut engine, &[request(vec![1, 2, 3], 1)])[0].error.clone()
    };
    assert!(matches!(run(DType::F16), Some(Error::Sampling(pellucid_sampling::Error::NotANumber { .. }))));
    assert_eq!((run(DType::F32), run(DType::BF16)), (None, None), "formats with the range of f32 go on");
}

#[test]
fn a_format_that_does_not_fit_is_refused_by_name() {
    let refusal = |kv_dtype| {
        let model = FakeModel::new(24, 60);
        let backend = model.backend();
        let refused = Engine::new(Box::new(model), backend, EngineOptions { kv_dtype, ..OPTIONS });
        refused.err().expect("it is refused").to_string()
    };
    assert!(refusal(DType::Q8_0).contains("Q8_0 holds heads of a multiple of 32 numbers, but this model's have 1"));
    assert!(refusal(DType::Q4_0).contains("Q4_0 is no format of KV memory; those are F32, F16, BF16, Q8_0"));
}

#[test]
fn logits_that_are_not_numbers_end_their_request_alone() {
    let requests: Vec<Request> = (0..6).map(|i| request(vec![i, i + 1, 3], 1)).collect();
    let healthy: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &requests).iter().map(bits).collect();
    let mut with_poison = requests.clone();
    with_poison.insert(3, request(vec![1, 23, 2], 1));
    let outcomes = serve(&mut fake(OPTIONS, |model| model.poison = Some(23)), &with_poison);
    assert!(matches!(outcomes[3].error, Some(Error::Sampling(pellucid_sampling::Error::NotANumber { .. }))));
    let mut found: Vec<_> = Vec::new();
    for (i, outcome) in outcomes.iter().enumerate().filter(|(i, _)| *i != 3) {
        // A neighbour that drew the poisoned token itself ends with it, by right.
        if outcome.error.is_none() {
            found.push(i);
            assert!(bits(outcome) == healthy[if i > 3 { i - 1 } else { i }], "neighbour {i} is untouched");
        }
    }
    assert!(!found.is_empty());
}

#[test]
fn a_panic_in_the_model_ends_that_step_and_the_engine_goes_on() {
    let mut engine = fake(OPTIONS, |model| model.bomb = Some(22));
    let outcome = &serve(&mut engine, &[request(vec![22], 1)])[0];
    assert!(matches!(&outcome.error, Some(Error::Internal(message)) if message.contains("bomb")), "{outcome:?}");
    let sampling = SamplingParams { banned_tokens: vec![22], temperature: 1.0, ..SamplingParams::default() };
    let after = Request { max_tokens: Some(5), ..Request::new(vec![1, 2], sampling) };
    assert_eq!(serve(&mut engine, &[after])[0].error, None);
    assert_eq!(engine.stats().blocks_in_use, 0);
}

/// Tokens that were told after each step of one request.
fn told_after_steps(is_asynchronous: bool) -> Vec<usize> {
    let mut engine = fake(OPTIONS, |model| model.is_asynchronous = is_asynchronous);
    let collected = Collected::default();
    engine.submit(request(vec![1, 2, 3], 1), Box::new(collected.clone())).expect("it is accepted");
    let mut told = Vec::new();
    while engine.step() {
        told.push(collected.outcome().tokens.first().map_or(0, Vec::len));
        assert_eq!(collected.is_over(), told.len() == 10, "the last event comes with the last step's, at once");
    }
    told
}

#[test]
fn a_token_is_told_when_its_step_ends_or_while_the_device_runs_the_next_one() {
    assert_eq!(told_after_steps(false), (1..=10).collect::<Vec<_>>());
    let mut behind: Vec<usize> = (0..9).collect();
    behind.push(10);
    assert_eq!(told_after_steps(true), behind);
}

#[test]
fn an_engine_that_ends_tells_what_its_last_step_gave() {
    let mut engine = fake(OPTIONS, |model| model.is_asynchronous = true);
    let (short, long) = (Collected::default(), Collected::default());
    let one = Request { max_tokens: Some(1), ..request(vec![1, 2, 3], 1) };
    engine.submit(one, Box::new(short.clone())).expect("it is accepted");
    engine.submit(request(vec![4, 5], 1), Box::new(long.clone())).expect("it is accepted");
    assert!(engine.step() && !short.is_over());
    drop(engine);
    assert!(short.is_over() && short.outcome().error.is_none());
    assert_eq!(long.outcome().tokens[0].len(), 1);
}

/// An engine whose device runs ahead and digests rows.
fn ahead(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    fake(options, |model| {
        model.is_asynchronous = true;
        model.digest_len = Some(24);
        change(model);
    })
}

#[test]
fn steps_that_run_ahead_change_no_bits() {
    let mut requests: Vec<Request> = (0..12).map(|i| request(vec![i % 20, i + 1, 3], u64::from(i % 4))).collect();
    for (i, request) in requests.iter_mut().enumerate() {
        request.max_tokens = Some(3 + 4 * i);
        request.sampling.temperature = [0.0, 0.7, 1.0][i % 3];
        request.sampling.top_p = [1.0, 0.8][i % 2];
        request.sampling.stop_ids = vec![i as u32];
    }
    let expected: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &requests).iter().map(bits).collect();
    let share = |misjudges: Option<usize>, digest_len: usize| {
        let mut engine = ahead(OPTIONS, |model| {
            model.misjudges = misjudges;
            model.digest_len = Some(digest_len);
        });
        let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
        assert!(found == expected, "one in {misjudges:?} misjudged, digests of {digest_len}");
        let stats = engine.stats();
        (stats.steps_ahead as f64 / stats.steps as f64, stats.tokens_discarded)
    };
    let (most, discarded) = share(None, 24);
    assert!(most > 0.6, "{most} of the steps ran ahead");
    assert!(discarded <= 12, "{discarded} tokens for nothing, where only a stop cannot be foreseen");
    let (some, discarded) = share(Some(5), 24);
    assert!(some > 0.1 && some < most && discarded > 0, "{some} of the steps ran ahead, {discarded} for nothing");
    // Digests that often do not reach, when the row is gone already.
    assert!(share(None, 2).0 > 0.1);
}

/// The self-test's own check, of a device that is played.
#[test]
fn the_check_of_running_ahead_holds() {
    let load = || -> Box<dyn Model> {
        let mut model = FakeModel::new(96, 256);
        model.is_asynchronous = true;
        model.digest_len = Some(40);
        Box::new(model)
    };
    let backend: Arc<dyn Backend> = FakeModel::new(1, 1).backend();
    ahead_suite::running_ahead_changes_nothing(&load, &backend);
}

#[test]
fn a_step_ahead_that_fails_ends_its_requests_and_nobody_else() {
    let long = |seed| Request { max_tokens: Some(40), ..request(vec![1, 2, 3], seed) };
    let healthy: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &[long(1), long(2)]).iter().map(bits).collect();
    // At its launch, where it is given up and the step in its turn tells why.
    let bomb = healthy[0].0[0][20];
    let mut engine = ahead(OPTIONS, |model| model.bomb = Some(bomb));
    let outcome = &serve(&mut engine, &[long(1)])[0];
    assert!(matches!(&outcome.error, Some(Error::Internal(message)) if message.contains("bomb")), "{outcome:?}");
    let at = healthy[0].0[0].iter().position(|&token| token == bomb).expect("it is the twentieth at the latest");
    assert_eq!(outcome.tokens[0], healthy[0].0[0][..=at], "everything before it was told");
    // Later, with a further step on the device by then.
    let mut engine = ahead(OPTIONS, |model| model.fails_at = Some(7));
    let outcomes = serve(&mut engine, &[long(1), long(2)]);
    assert!(engine.stats().steps_ahead >= 6);
    for (outcome, healthy) in outcomes.iter().zip(&healthy) {
        assert!(matches!(outcome.error, Some(Error::OutOfMemory(_))), "{outcome:?}");
        assert!(healthy.0[0].starts_with(&outcome.tokens[0]));
    }
    let after: Vec<_> = serve(&mut engine, &[long(1), long(2)]).iter().map(bits).collect();
    assert!(after == healthy, "the engine goes on as before");
    assert_eq!(engine.stats().blocks_in_use, 0);
}

#[test]
fn a_device_that_goes_while_a_step_ahead_is_on_it_ends_everything_cleanly() {
    let mut engine = ahead(OPTIONS, |model| model.lost_at = Some(9));
    let outcomes = serve(&mut engine, &[request(vec![1, 2, 3], 1), request(vec![4, 5], 2)]);
    assert!(engine.is_lost() && !engine.step());
    assert!(outcomes.iter().all(|outcome| matches!(outcome.error, Some(Error::DeviceLost(_)))), "{outcomes:?}");
}

#[test]
fn a_new_request_waits_for_the_step_under_way_and_the_one_ahead_and_for_no_other() {
    let mut engine = ahead(OPTIONS, |_| ());
    let first = Collected::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long, Box::new(first.clone())).expect("it is accepted");
    (0..10).for_each(|_| assert!(engine.step()));
    assert!(engine.stats().steps_ahead > 5);
    let second = Collected::default();
    engine.submit(request(vec![4, 5], 1), Box::new(second.clone())).expect("it is accepted");
    // The step ahead; the prompt; its token is told when the next step is under way.
    (0..3).for_each(|_| assert!(engine.step()));
    assert_eq!(second.outcome().tokens[0].len(), 1);
    finish(&mut engine);
    assert_eq!((first.outcome().error, second.outcome().error), (None, None));
}

#[test]
fn a_pause_holds_although_the_next_token_is_on_its_way() {
    let mut engine = ahead(OPTIONS, |_| ());
    let collected = Collected::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long.clone(), Box::new(collected.clone())).expect("it is accepted");
    (0..10).for_each(|_| assert!(engine.step()));
    collected.wish(Control::Pause);
    (0..5).for_each(|_| assert!(engine.step()));
    let outcome = collected.outcome();
    assert_eq!(outcome.controls_applied, [outcome.tokens[0].len()], "nothing was said after the pause");
    assert_eq!(engine.stats().tokens_discarded, 1);
    collected.wish(Control::Resume);
    finish(&mut engine);
    assert!(bits(&collected.outcome()) == bits(&serve(&mut fake(OPTIONS, |_| ()), &[long])[0]));
}

#[test]
fn every_wish_is_answered_once_and_the_end_of_a_choice_by_that() {
    let mut engine = fake(OPTIONS, |_| ());
    let collected = Collected::default();
    let three = Request { num_choices: 3, best_of: 3, ..request(vec![1, 2, 3], 1) };
    engine.submit(three, Box::new(collected.clone())).expect("it is accepted");
    (0..4).for_each(|_| assert!(engine.step()));
    let wishes = [Control::End { choice: 1 }, Control::Pause, Control::End { choice: 2 }, Control::Resume];
    wishes.into_iter().for_each(|wish| collected.wish(wish));
    finish(&mut engine);
    let outcome = collected.outcome();
    assert_eq!(outcome.controls_applied, [12, 12], "the pause and its end, with four tokens of each choice");
    let stop = Some(FinishReason::Stop);
    assert_eq!(outcome.finish, [Some(FinishReason::MaxTokens), stop, stop]);
}

#[test]
fn limits_are_kept_and_named() {
    let mut engine = fake(OPTIONS, |_| ());
    let plain = |max_tokens| Request { max_tokens, ..Request::new(vec![1, 2, 3], SamplingParams::default()) };
    let outcomes = serve(&mut engine, &[plain(Some(4)), plain(None)]);
    assert_eq!((outcomes[0].tokens[0].len(), outcomes[0].finish[0]), (4, Some(FinishReason::MaxTokens)));
    assert_eq!((outcomes[1].tokens[0].len(), outcomes[1].finish[0]), (57, Some(FinishReason::Context)));
    let late = Request { deadline: Some(Duration::ZERO), ..plain(None) };
    assert_eq!(serve(&mut engine, std::slice::from_ref(&late))[0].finish, [Some(FinishReason::Deadline)]);
    for best_of in [3, 5] {
        let several = Request { num_choices: 3, best_of, ..late.clone() };
        assert_eq!(serve(&mut engine, &[several])[0].finish, [Some(FinishReason::Deadline); 3], "best of {best_of}");
    }

    let refused = |request: Request| {
        let mut engine = fake(EngineOptions { num_blocks: 4, max_waiting: 1, ..OPTIONS }, |_| ());
        engine.submit(request, Box::new(Collected::default())).expect_err("it is refused")
    };
    assert_eq!(refused(Request::new(vec![], SamplingParams::default())), Error::EmptyPrompt);
    let long = Request::new(vec![1; 60], SamplingParams::default());
    assert_eq!(refused(long), Error::PromptTooLong { prompt: 60, context: 60 });
    let outside = Request::new(vec![1, 24], SamplingParams::default());
    assert_eq!(refused(outside), Error::IdOutsideVocabulary { id: 24, vocab_size: 24 });
    assert_eq!(refused(plain(None)), Error::ExceedsKvMemory { needed: 15, have: 4 });
    assert!(matches!(refused(Request { num_choices: 0, ..plain(Some(1)) }), Error::OutOfRange { name: "n", .. }));
    let mut engine = fake(EngineOptions { max_waiting: 1, ..OPTIONS }, |_| ());
    engine.submit(plain(Some(1)), Box::new(Collected::default())).expect("the first waits");
    let second = engine.submit(plain(Some(1)), Box::new(Collected::default()));
    assert_eq!(second, Err(Error::QueueFull { waiting: 1 }));
}

#[test]
fn several_choices_are_the_replies_of_their_seeds_and_best_of_takes_the_most_probable() {
    let mut engine = fake(OPTIONS, |_| ());
    let prompt = vec![4, 5, 6, 7, 8];
    let alone: Vec<Vec<u32>> =
        (0..4).map(|i| serve(&mut engine, &[request(prompt.clone(), 10 + i)])[0].tokens[0].clone()).collect();
    let together = &serve(&mut engine, &[Request { num_choices: 4, best_of: 4, ..request(prompt.clone(), 10) }])[0];
    assert_eq!(together.tokens, alone);
    let best = &serve(&mut engine, &[Request { num_choices: 2, best_of: 4, ..request(prompt, 10) }])[0];
    let mean = |bits: &Vec<u32>| bits.iter().map(|&b| f64::from(f32::from_bits(b))).sum::<f64>() / bits.len() as f64;
    let mut ranked: Vec<usize> = (0..4).collect();
    ranked.sort_by(|&a, &b| mean(&together.logprob_bits[b]).total_cmp(&mean(&together.logprob_bits[a])));
    assert_eq!(best.tokens, [alone[ranked[0]].clone(), alone[ranked[1]].clone()]);
    let mut unreported = Request { num_choices: 2, best_of: 4, ..request(vec![4, 5, 6, 7, 8], 10) };
    unreported.sampling.logprobs = None;
    let same = &serve(&mut engine, &[unreported])[0];
    assert_eq!(same.tokens, best.tokens, "log probabilities decide whether they are reported or not");
    assert!(same.logprob_bits.iter().all(Vec::is_empty));
}

/// The model's own ln p of a token.
fn ln_p(tokens: &[u32], next: u32) -> f64 {
    let logits = FakeModel::logits_after(tokens.iter().copied(), 24);
    let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
    f64::from(logits[next as usize]) - sum.ln()
}

#[test]
fn best_of_counts_the_token_that_ended_a_reply() {
    let mut engine = fake(OPTIONS, |_| ());
    let mut num_empty = 0;
    for seed in 0..40 {
        let mut several = Request { num_choices: 4, best_of: 4, ..request(vec![4, 5, 6], 4 * seed) };
        several.sampling.end_ids = vec![23];
        several.sampling.logit_bias = vec![(23, 3.0)];
        let made = &serve(&mut engine, std::slice::from_ref(&several))[0];
        let mean = |choice: usize| {
            let mut tokens = several.prompt.clone();
            let ends = (made.finish[choice] == Some(FinishReason::End)).then_some(23);
            let drawn: Vec<u32> = made.tokens[choice].iter().copied().chain(ends).collect();
            let mut total = 0.0;
            for &next in &drawn {
                total += ln_p(&tokens, next);
                tokens.push(next);
            }
            total / drawn.len() as f64
        };
        let best = (0..4).max_by(|&a, &b| mean(a).total_cmp(&mean(b)).then(b.cmp(&a))).expect("four of them");
        let found = &serve(&mut engine, &[Request { num_choices: 1, ..several.clone() }])[0];
        assert_eq!(found.tokens[0], made.tokens[best], "seed {seed}");
        num_empty += usize::from(made.tokens.iter().any(Vec::is_empty) && !made.tokens[best].is_empty());
    }
    assert!(num_empty > 5, "a reply that ended at once lost {num_empty} times");
}

#[test]
fn a_flood_leaves_the_other_tenant_its_share() {
    let options = EngineOptions { max_sequences: 8, num_blocks: 200, ..OPTIONS };
    let of = |tenant, i: u32| Request {
        scope: Scope::of(TenantId(tenant)),
        ..request(vec![i % 20, (i / 20) % 20, tenant, 7, i % 3], u64::from(i))
    };
    let mut engine = fake(options, |_| ());
    let flood: Vec<Collected> = (0..400).map(|_| Collected::default()).collect();
    for (i, collected) in flood.iter().enumerate() {
        engine.submit(of(1, i as u32), Box::new(collected.clone())).expect("accepted");
    }
    // The flood has all places when the quiet tenant comes.
    (0..5).for_each(|_| assert!(engine.step()));
    let quiet: Vec<Collected> = (0..4).map(|_| Collected::default()).collect();
    for (i, collected) in quiet.iter().enumerate() {
        engine.submit(of(2, i as u32), Box::new(collected.clone())).expect("accepted");
    }
    let count = |all: &[Collected]| -> usize {
        all.iter().map(|c| c.outcome().tokens.iter().map(Vec::len).sum::<usize>()).sum()
    };
    let before = count(&flood);
    let mut steps = 0;
    while quiet.iter().any(|collected| !collected.is_over()) {
        assert!(engine.step());
        steps += 1;
    }
    let (theirs, ours) = (count(&flood) - before, count(&quiet));
    assert!(ours * 100 >= 45 * (ours + theirs), "{ours} tokens for the quiet tenant, {theirs} for the flood");
    // Alone, four requests of five prompt tokens and ten of output take eleven steps.
    assert!(steps <= 22, "{steps} steps, where eleven would do alone");
    finish(&mut engine);
}

/// A request of a tenant; one without a bound takes a whole context of 15 blocks.
fn request_of(tenant: u32, first: u32, max_tokens: Option<usize>) -> Request {
    Request { scope: Scope::of(TenantId(tenant)), max_tokens, ..request(vec![first, 2, 3, 4, 5], u64::from(first)) }
}

fn submit(engine: &mut Engine, request: &Request) -> Collected {
    let collected = Collected::default();
    engine.submit(request.clone(), Box::new(collected.clone())).expect("it is accepted");
    collected
}

/// Serves to the end what was submitted; every reply is the one that its request gets alone.
fn finish_as_alone(engine: &mut Engine, requests: &[Request], collected: &[Collected]) {
    finish(engine);
    for (request, collected) in requests.iter().zip(collected) {
        let alone = &serve(&mut fake(OPTIONS, |_| ()), std::slice::from_ref(request))[0];
        assert!(bits(&collected.outcome()) == bits(alone), "{request:?}");
    }
}

fn preemptions(collected: &Collected) -> usize {
    collected.outcome().stats.expect("it ended well").preemptions
}

#[test]
fn a_tenant_that_holds_the_memory_leaves_the_other_its_share() {
    // Two requests of one choice each, and one of two: few places, all of the memory.
    for (first, num_choices) in [(vec![0, 1], 1), (vec![0], 2)] {
        let mut engine = fake(EngineOptions { num_blocks: 30, ..OPTIONS }, |_| ());
        let mut requests: Vec<Request> = first.iter().map(|&i| request_of(1, i, None)).collect();
        requests.iter_mut().for_each(|request| (request.num_choices, request.best_of) = (num_choices, num_choices));
        let mut collected: Vec<Collected> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        (0..5).for_each(|_| assert!(engine.step()));
        requests.push(request_of(2, 7, Some(10)));
        collected.push(submit(&mut engine, &requests[requests.len() - 1]));
        (0..11).for_each(|_| assert!(engine.step()));
        assert!(collected[requests.len() - 1].is_over(), "it had its turn at once");
        finish_as_alone(&mut engine, &requests, &collected);
        assert_eq!(engine.stats().preemptions, 1);
    }
}

/// Otherwise two tenants whose requests take more than a share would take each other's place for ever.
#[test]
fn blocks_that_are_found_count_towards_a_share() {
    let mut engine = fake(EngineOptions { num_blocks: 10, ..OPTIONS }, |_| ());
    let of = |tenant, prompt| Request { prompt, max_tokens: Some(7), ..request_of(tenant, 0, None) };
    let requests = [of(1, (0..17).collect()), of(2, (3..20).collect())];
    serve(&mut engine, &requests[1..]);
    // Six blocks each, of which the second finds some that it has computed before.
    let first = submit(&mut engine, &requests[0]);
    (0..3).for_each(|_| assert!(engine.step()));
    let second = submit(&mut engine, &requests[1]);
    finish_as_alone(&mut engine, &requests, &[first, second]);
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_tenant_that_waits_for_its_own_requests_lets_others_past() {
    let mut engine = fake(EngineOptions { num_blocks: 25, ..OPTIONS }, |_| ());
    let mut requests = vec![request_of(1, 0, None), request_of(2, 1, Some(10)), request_of(2, 2, Some(10))];
    let mut collected: Vec<Collected> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    (0..3).for_each(|_| assert!(engine.step()));
    // The first tenant has one running, so its turn is before the second tenant's, and there is no room for its second.
    for request in [request_of(1, 3, None), request_of(2, 4, Some(3))] {
        collected.push(submit(&mut engine, &request));
        requests.push(request);
    }
    (0..5).for_each(|_| assert!(engine.step()));
    assert!(collected[4].is_over(), "there was room for it");
    assert!(!collected[0].is_over() && !collected[1].is_over());
    finish_as_alone(&mut engine, &requests, &collected);
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_paused_request_makes_way_and_goes_on_where_it_was() {
    // No room for a second: neither in memory, nor among those who run.
    for options in [EngineOptions { num_blocks: 20, ..OPTIONS }, EngineOptions { max_sequences: 1, ..OPTIONS }] {
        let mut engine = fake(options, |_| ());
        let requests = [request_of(1, 0, None), request_of(1, 7, None)];
        let paused = submit(&mut engine, &requests[0]);
        (0..5).for_each(|_| assert!(engine.step()));
        paused.wish(Control::Pause);
        assert!(engine.step());
        assert!(engine.stats().blocks_in_use > 0, "it keeps its blocks while nobody needs them");
        let other = submit(&mut engine, &requests[1]);
        (0..56).for_each(|_| assert!(engine.step()));
        assert!(other.is_over() && !paused.is_over());
        assert_eq!(paused.outcome().tokens[0].len(), 5);
        paused.wish(Control::Resume);
        finish_as_alone(&mut engine, &requests, &[paused.clone(), other]);
        assert_eq!(preemptions(&paused), 1);
    }
}

#[test]
fn a_request_without_a_bound_reserves_what_it_has_and_some_growth() {
    let requests: Vec<Request> = (0..6)
        .map(|i| Request { num_choices: 1 + i % 2, best_of: 1 + i % 2, ..request_of(1, i as u32, None) })
        .collect();
    let begun = |overcommit| {
        let mut engine = fake(EngineOptions { num_blocks: 40, overcommit, ..OPTIONS }, |_| ());
        let collected: Vec<Collected> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        assert!(engine.step());
        let stats = engine.stats();
        finish_as_alone(&mut engine, &requests, &collected);
        (6 - stats.num_waiting, stats.blocks_in_use + stats.blocks_reserved, engine.stats().preemptions)
    };
    // Of one choice 15 blocks, of two 29.
    assert_eq!(begun(Overcommit::Never), (1, 15, 0));
    // Room for five tokens and eight more: of one choice 4 blocks, of two 7.
    let (num_begun, held, preemptions) = begun(Overcommit::Unbounded { growth: 8 });
    assert_eq!((num_begun, held), (6, 33));
    assert!(preemptions > 0, "it was too much in the end");
    // Whoever has a bound reserves up to there.
    let mut engine = fake(EngineOptions { overcommit: Overcommit::Unbounded { growth: 8 }, ..OPTIONS }, |_| ());
    submit(&mut engine, &request_of(1, 0, Some(50)));
    assert!(engine.step());
    assert_eq!(engine.stats().blocks_in_use + engine.stats().blocks_reserved, 14);
    finish(&mut engine);
}

#[test]
fn whoever_has_most_of_the_memory_gives_way_when_it_runs_out() {
    let mut engine = fake(EngineOptions { num_blocks: 30, overcommit: Overcommit::Always, ..OPTIONS }, |_| ());
    let mut requests: Vec<Request> = (0..4).map(|i| request_of(1, i, None)).collect();
    let mut collected: Vec<Collected> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    (0..5).for_each(|_| assert!(engine.step()));
    requests.push(request_of(2, 7, Some(40)));
    collected.push(submit(&mut engine, &requests[4]));
    finish_as_alone(&mut engine, &requests, &collected);
    assert_eq!(preemptions(&collected[4]), 0, "it came last and stayed within its share");
    assert!(preemptions(&collected[3]) > 0, "memory was tight");
}

#[test]
fn a_search_to_the_end_of_the_context_is_one_of_as_many_tokens() {
    let beams = BeamParams { width: 3, num_returned: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    for end_ids in [vec![], vec![5]] {
        let sampling = SamplingParams { end_ids, ..SamplingParams::default() };
        let search =
            |max_tokens| Request { max_tokens, beams: Some(beams), ..Request::new(vec![1, 2, 3], sampling.clone()) };
        let outcomes = serve(&mut fake(OPTIONS, |_| ()), &[search(None), search(Some(57)), search(Some(1000))]);
        assert_eq!(outcomes[0].beams.len(), 2);
        assert_eq!(outcomes[0].beams, outcomes[1].beams);
        assert_eq!(outcomes[0].beams, outcomes[2].beams);
        if sampling.end_ids.is_empty() {
            assert_eq!(outcomes[0].beams[0].ids.len(), 57);
            let reasons = [FinishReason::Context, FinishReason::MaxTokens, FinishReason::Context];
            assert!(outcomes.iter().zip(reasons).all(|(outcome, reason)| outcome.finish == [Some(reason)]));
        }
    }
}

#[test]
fn a_search_counts_the_tokens_of_all_its_beams() {
    let beams = BeamParams { width: 3, num_returned: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    for max_tokens in [1, 8] {
        let sampling = SamplingParams::default();
        let search =
            Request { max_tokens: Some(max_tokens), beams: Some(beams), ..Request::new(vec![1, 2, 3], sampling) };
        let stats = serve(&mut fake(OPTIONS, |_| ()), &[search])[0].stats.expect("it ended well");
        assert_eq!(stats.output_tokens, 3 * max_tokens);
    }
}

#[test]
fn prompts_can_be_scored() {
    // Together they are more rows than one step scores.
    let mut engine = fake(EngineOptions { step_tokens: 512, chunk_len: 64, ..OPTIONS }, |_| ());
    let prompt: Vec<u32> = (0..37).map(|i| i * 5 % 24).collect();
    let scored = Request { score_prompt: true, max_tokens: Some(1), ..request(prompt.clone(), 0) };
    let outcomes = serve(&mut engine, &vec![scored; 7]);
    assert_eq!(outcomes[0].prompt_logprobs.len(), 36);
    for other in &outcomes[1..] {
        assert_eq!(outcomes[0].prompt_logprobs, other.prompt_logprobs, "nothing was skipped for being cached");
    }
    for (i, found) in outcomes[0].prompt_logprobs.iter().enumerate() {
        let logits = FakeModel::logits_after(prompt[..=i].iter().copied(), 24);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = f64::from(logits[prompt[i + 1] as usize]) - sum.ln();
        assert!((f64::from(*found) - expected).abs() < 1e-5);
    }
}

#[test]
fn a_dropped_stream_frees_its_blocks_and_the_handle_serves_many() {
    [false, true].into_iter().for_each(serve_streams);
}

fn serve_streams(is_asynchronous: bool) {
    let handle = Arc::new(EngineHandle::start(fake(OPTIONS, |model| model.is_asynchronous = is_asynchronous)));
    let endless = Request { max_tokens: None, ..request(vec![1, 2, 3], 1) };
    let stream = handle.submit(endless).expect("accepted");
    let first = std::iter::from_fn(|| stream.next_event()).find(|event| matches!(event, Event::Token(_)));
    assert!(first.is_some());
    drop(stream);
    let threads: Vec<_> = (0..8)
        .map(|i| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let stream = handle.submit(request(vec![i, 2, 3], 5)).expect("accepted");
                std::iter::from_fn(|| stream.next_event()).filter(|event| matches!(event, Event::Token(_))).count()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), 10);
    }
    let stats = handle.stats().expect("it runs");
    assert_eq!((stats.blocks_in_use, stats.num_running), (0, 0));
    assert_eq!(stats.finished_requests + stats.cancelled_requests, 9);
    // A handle that goes away in the middle of a reply leaves nothing behind either: debug builds would panic on a lost block.
    let unfinished = handle.submit(Request { max_tokens: None, ..request(vec![9], 1) }).expect("accepted");
    drop(handle);
    drop(unfinished);
}
