//! The loop guard: a reply that repeats itself ends at the same token in every batch, and only if the request says so.

use pellucid_engine::{
    BeamParams, EarlyStopping, Engine, EngineOptions, Error, FinishReason, Overcommit, Repetition, Request,
};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::EventCollector;
use pellucid_testing::FakeModel;

use crate::support::{OPTIONS, finish, request, serve, submit};

const OPTIONS_OF_LOOPS: EngineOptions = EngineOptions { num_blocks: 2000, ..OPTIONS };

fn engine(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    let mut model = FakeModel::new(24, 700);
    change(&mut model);
    let backend = model.backend();
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

/// A guarded request whose reply can only be the same token, again and again.
fn looping(max_tokens: Option<usize>) -> Request {
    let sampling = SamplingParams { allowed_tokens: Some(vec![7]), ..SamplingParams::default() };
    Request { max_tokens, loop_guard: true, ..Request::new(vec![7, 7, 7, 7], sampling) }
}

const LOOP: Option<FinishReason> = Some(FinishReason::Repetition(Repetition { period: 1, repeats: 258 }));

#[test]
fn a_loop_ends_where_the_rule_says() {
    let mut engine = engine(OPTIONS_OF_LOOPS, |_| ());
    let outcomes = serve(
        &mut engine,
        &[
            looping(None),
            Request { loop_guard: false, ..looping(None) },
            looping(Some(258)),
            looping(Some(257)),
            Request { loop_guard: true, max_tokens: Some(600), ..request(vec![1, 2, 3], 5) },
        ],
    );
    let ends: Vec<_> = outcomes.iter().map(|outcome| (outcome.tokens[0].len(), outcome.finish[0])).collect();
    assert_eq!(ends[0], (258, LOOP), "the prompt does not count");
    assert_eq!(ends[1], (696, Some(FinishReason::Context)), "off by default");
    assert_eq!(ends[2], (258, Some(FinishReason::MaxTokens)), "limits come first");
    assert_eq!(ends[3], (257, Some(FinishReason::MaxTokens)));
    assert_eq!(ends[4], (600, Some(FinishReason::MaxTokens)), "text that does not repeat");
}

#[test]
fn min_tokens_delay_the_end() {
    let mut engine = engine(OPTIONS_OF_LOOPS, |_| ());
    let mut late = looping(None);
    late.sampling.min_tokens = 400;
    let outcome = &serve(&mut engine, &[late])[0];
    let expected = Some(FinishReason::Repetition(Repetition { period: 1, repeats: 400 }));
    assert_eq!((outcome.tokens[0].len(), outcome.finish[0]), (400, expected));
}

#[test]
fn the_end_depends_on_the_reply_alone() {
    // Every reply samples among two tokens, one of which is much more probable, so that runs of it have many lengths.
    let sampled = |seed| {
        let mut sampled = Request { max_tokens: Some(640), loop_guard: true, ..request(vec![4, 5, 6], seed) };
        sampled.sampling.allowed_tokens = Some(vec![3, 9]);
        sampled.sampling.logit_bias = vec![(9, 8.0)];
        sampled
    };
    let alone: Vec<_> = (0..12)
        .map(|seed| {
            let outcome = serve(&mut engine(OPTIONS_OF_LOOPS, |_| ()), &[sampled(seed)]).remove(0);
            (outcome.tokens[0].clone(), outcome.finish[0])
        })
        .collect();
    let is_loop = |finish: &Option<FinishReason>| matches!(finish, Some(FinishReason::Repetition(_)));
    let num_loops = alone.iter().filter(|(_, finish)| is_loop(finish)).count();
    assert!((1..12).contains(&num_loops), "some loop, some do not: {num_loops}");
    assert!(alone.iter().any(|(tokens, finish)| is_loop(finish) && tokens.len() > 300), "some loop later");

    let requests: Vec<Request> = (0..12).map(sampled).collect();
    let preempting = EngineOptions { num_blocks: 400, overcommit: Overcommit::Always, ..OPTIONS };
    let chunked = EngineOptions { step_tokens: 7, chunk_len: 2, max_sequences: 4, ..OPTIONS_OF_LOOPS };
    for options in [OPTIONS_OF_LOOPS, preempting, chunked] {
        for is_asynchronous in [false, true] {
            let mut engine = engine(options, |model| {
                model.is_asynchronous = is_asynchronous;
                model.digest_len = is_asynchronous.then_some(8);
            });
            let together = serve(&mut engine, &requests);
            for (outcome, (tokens, finish)) in together.iter().zip(&alone) {
                assert_eq!((&outcome.tokens[0], &outcome.finish[0]), (tokens, finish));
            }
            assert_eq!(engine.stats().preemptions > 0, options.num_blocks == 400, "preemption where it is meant");
        }
    }
    // Choices are guarded one by one.
    let together =
        &serve(&mut engine(OPTIONS_OF_LOOPS, |_| ()), &[Request { num_choices: 12, best_of: 12, ..sampled(0) }])[0];
    let choices: Vec<_> = together.tokens.iter().cloned().zip(together.finish.iter().copied()).collect();
    assert_eq!(choices, alone);
    // `best_of` prefers a reply that is no loop, though its tokens are less probable.
    let best =
        &serve(&mut engine(OPTIONS_OF_LOOPS, |_| ()), &[Request { num_choices: 1, best_of: 12, ..sampled(0) }])[0];
    assert!(!is_loop(&best.finish[0]), "{:?}", best.finish);
}

#[test]
fn a_request_that_waits_starts_when_the_guard_ends_another() {
    let mut engine = engine(EngineOptions { max_sequences: 1, ..OPTIONS_OF_LOOPS }, |_| ());
    let first = submit(&mut engine, &looping(None));
    let second = submit(&mut engine, &request(vec![1, 2, 3], 5));
    finish(&mut engine);
    assert_eq!(first.outcome().finish, [LOOP]);
    assert_eq!(second.outcome().finish, [Some(FinishReason::MaxTokens)]);
}

#[test]
fn beam_search_refuses_the_guard_by_name() {
    let mut engine = engine(OPTIONS_OF_LOOPS, |_| ());
    let early_stopping = EarlyStopping::Heuristic;
    let beams = Some(BeamParams { width: 2, num_returned: 1, length_penalty: 1.0, early_stopping });
    let guarded = Request { beams, loop_guard: true, ..Request::new(vec![1, 2], SamplingParams::default()) };
    let refused = engine.submit(guarded, Box::new(EventCollector::default()));
    assert_eq!(refused, Err(Error::NotWithBeams { name: "loop_guard" }));
}
