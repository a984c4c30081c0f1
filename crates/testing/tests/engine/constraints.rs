//! Requests with a constraint: masks are applied where the constraint excludes tokens, free text needs none, and runs
//! of forced tokens are computed in one step. None of that changes a reply.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use pellucid_engine::{Engine, EngineOptions, EngineStats, Error, FinishReason, Overcommit, Request};
use pellucid_sampling::{SamplingParams, StepKind};
use pellucid_selftest::Outcome;
use pellucid_selftest::suites::speculation::comparable;
use pellucid_testing::{Automaton, FakeModel};

use crate::support::{OPTIONS, bits, fake, serve};

const END: u32 = 23;

/// Changes a request, given its number.
type Change<'a> = &'a dyn Fn(usize, &mut Request);

/// Free text until token 7; then 3 and one of 4 and 5, and free text again.
fn call() -> Automaton {
    Automaton::new(&[END]).free(&[(7, 1)]).state(&[(3, 2)]).state(&[(4, 0), (5, 0)])
}

/// A list of records, each of which is mostly forced, as JSON of a schema is: 8 and a run of nine tokens, one of three
/// values, and after it the end or the next record.
fn records() -> Automaton {
    let run = [1, 1, 2, 4, 5, 6, 8, 9, 10];
    let mut automaton = Automaton::new(&[END]).state(&[(8, 1)]);
    for (i, token) in run.into_iter().enumerate() {
        automaton = automaton.state(&[(token, i + 2)]);
    }
    automaton.state(&[(11, 11), (12, 11), (13, 12)]).state(&[(8, 1)]).may_end().state(&[])
}

fn requests(constraint: &Automaton, trace: bool) -> Vec<Request> {
    let request = |i: u32| {
        let sampling = SamplingParams {
            temperature: [0.0, 0.7, 1.5][i as usize % 3],
            seed: u64::from(i),
            logprobs: Some(2),
            end_ids: vec![END],
            ..SamplingParams::default()
        };
        let constraint: Option<Arc<dyn pellucid_sampling::TokenConstraint>> = Some(Arc::new(constraint.clone()));
        Request { constraint, trace, max_tokens: Some(40), ..Request::new(vec![i % 20, i + 1, 3], sampling) }
    };
    (0..12).map(request).collect()
}

/// Returns an engine on a device that digests rows and runs steps ahead.
fn digesting(change: impl FnOnce(&mut FakeModel)) -> Engine {
    fake(OPTIONS, |model| {
        model.is_asynchronous = true;
        model.digest_len = Some(24);
        change(model);
    })
}

#[test]
fn free_text_needs_no_masks_and_changes_no_bits() {
    let masked = Automaton { always_masks: true, ..call() };
    let outcomes = serve(&mut fake(OPTIONS, |_| ()), &requests(&masked, false));
    let expected: Vec<_> = outcomes.iter().map(bits).collect();
    let all: Vec<u32> = expected.iter().flat_map(|(tokens, _)| tokens[0].clone()).collect();
    assert!(all.windows(2).any(|pair| pair == [7, 3]), "the constraint is reached: {all:?}");
    assert!(all.windows(2).all(|pair| pair[0] != 7 || pair[1] == 3), "and followed: {all:?}");
    let compare = |name: &str, mut engine: Engine| {
        let found: Vec<_> = serve(&mut engine, &requests(&call(), false)).iter().map(bits).collect();
        assert!(found == expected, "{name}");
        engine.stats()
    };
    compare("whole rows", fake(OPTIONS, |_| ()));
    let stats = compare("digests", digesting(|_| ()));
    assert!(stats.steps_ahead > 10, "free text is computed ahead: {stats:?}");
    compare("short digests", digesting(|model| model.digest_len = Some(2)));
    compare("wrong assumptions", digesting(|model| model.wrong_every = Some(3)));
}

#[test]
fn masked_rows_are_sampled_from_digests() {
    let allowed: Vec<(u32, usize)> = (6..18).map(|token| (token, 0)).collect();
    let constraint = Automaton::new(&[END]).state(&allowed).may_end();
    let changes: [(&str, Change<'_>); 4] = [
        ("greedy", &|_, request| request.sampling.temperature = 0.0),
        ("sampled", &|_, _| ()),
        ("truncated", &|i, request| (request.sampling.top_k, request.sampling.top_p) = (3 + i as u32, 0.9)),
        ("a share of all", &|_, request| (request.sampling.temperature, request.sampling.top_p) = (1.0, 0.7)),
    ];
    for (name, change) in changes {
        let mut requests = requests(&constraint, false);
        requests.iter_mut().enumerate().for_each(|(i, request)| change(i, request));
        let outcomes = serve(&mut fake(OPTIONS, |_| ()), &requests);
        let expected: Vec<_> = outcomes.iter().map(bits).collect();
        let num_tokens: usize = expected.iter().map(|(tokens, _)| tokens[0].len()).sum();
        // With 24 tokens the digest has the whole row, with 12 some tokens are missing, with 2 most are.
        let whole_rows = [24, 12, 2].map(|len| {
            let mut counter = None;
            let mut engine = digesting(|model| {
                (model.digest_len, model.wrong_every) = (Some(len), Some(3));
                counter = Some(model.num_whole_rows.clone());
            });
            let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
            assert!(found == expected, "{name} with {len} tokens");
            assert_eq!(engine.stats().steps_ahead, 0, "no token is assumed under a mask");
            counter.expect("a model").load(Ordering::Relaxed)
        });
        match name {
            "greedy" => assert_eq!(whole_rows[..2], [0, 0], "{whole_rows:?} of {num_tokens}"),
            "a share of all" => assert!(whole_rows[0] >= num_tokens, "{whole_rows:?} of {num_tokens}"),
            _ => assert!(whole_rows[0] == 0 && whole_rows[1] < num_tokens, "{whole_rows:?} of {num_tokens}"),
        }
    }
}

#[test]
fn traces_of_free_text_show_the_grammar() {
    let trace = |constraint: &Automaton| serve(&mut fake(OPTIONS, |_| ()), &requests(constraint, true));
    let (free, masked) = (trace(&call()), trace(&Automaton { always_masks: true, ..call() }));
    let text = |outcome: &Outcome| format!("{:?}", outcome.events);
    assert!(free.iter().map(text).eq(masked.iter().map(text)), "with and without masks the traces are the same");
    for event in free.iter().flat_map(|outcome| &outcome.events[0]) {
        let trace = event.trace.as_ref().expect("a trace");
        let step = trace.steps.iter().find(|step| step.kind == StepKind::Mask).expect("the step of the grammar");
        let is_free = step.setting == "expected by state 0";
        assert_eq!(step.entered == step.left, is_free, "{step:?}");
    }
}

/// Serves requests with and without forced tokens on engines that `engine` creates, and compares the replies. Returns
/// the statistics with and without.
fn compare_forced(name: &str, engine: &dyn Fn() -> Engine, change: &dyn Fn(usize, &mut Request)) -> [EngineStats; 2] {
    let serve_with = |constraint: Automaton| {
        let mut requests = requests(&constraint, false);
        requests.iter_mut().enumerate().for_each(|(i, request)| change(i, request));
        let mut engine = engine();
        let outcomes = serve(&mut engine, &requests);
        (outcomes, engine.stats())
    };
    let (found, with) = serve_with(records());
    let (expected, without) = serve_with(Automaton { hides_forced: true, ..records() });
    let num_forced: usize = found.iter().map(|outcome| outcome.stats.expect("it has ended").forced_tokens).sum();
    assert!(num_forced > 90, "{name}: {num_forced} forced tokens");
    // The words that describe a step of the grammar are the only difference.
    let reply = |outcome: &Outcome| format!("{:?}", comparable(outcome)).replace("forced; ", "");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(reply(found), reply(expected), "{name}, request {i}");
    }
    [with, without]
}

#[test]
fn forced_runs_change_no_reply_and_save_steps() {
    let plain = |_: usize, request: &mut Request| request.sampling.logprobs = None;
    let [with, without] = compare_forced("no logits", &|| fake(OPTIONS, |_| ()), &plain);
    assert!(3 * with.steps < without.steps, "{} steps with forced runs, {} without", with.steps, without.steps);
    assert_eq!(with.prefill_tokens, without.prefill_tokens, "forced tokens are tokens of replies");
    let [with, without] = compare_forced("log probabilities", &|| fake(OPTIONS, |_| ()), &|_, _| ());
    assert!(3 * with.steps < 2 * without.steps, "{} steps with forced runs, {} without", with.steps, without.steps);
    assert_eq!(with.decode_tokens, without.decode_tokens);
    assert_eq!(with.speculation, without.speculation, "a forced token is no draft");
}

#[test]
fn forced_runs_compose() {
    let no_logprobs = |request: &mut Request| request.sampling.logprobs = None;
    let changes: [(&str, Change<'_>); 9] = [
        ("traces", &|_, request| request.trace = true),
        ("n", &|i, request| (request.num_choices, request.best_of) = (1 + i % 3, 1 + i % 3)),
        ("best_of", &|i, request| (request.num_choices, request.best_of) = (1 + i % 2, 3)),
        ("max_tokens", &|i, request| {
            no_logprobs(request);
            request.max_tokens = Some(5 + 3 * i);
        }),
        ("the end of the context", &|i, request| {
            no_logprobs(request);
            request.prompt = vec![i as u32; 25 + i];
            request.max_tokens = None;
        }),
        ("penalties", &|i, request| {
            no_logprobs(request);
            (request.sampling.repetition_penalty, request.sampling.frequency_penalty) = (1.3, 0.5);
            request.sampling.penalty_window = Some(4 + i as u32);
        }),
        ("mirostat", &|_, request| {
            no_logprobs(request);
            (request.sampling.mirostat_tau, request.sampling.mirostat_eta) = (Some(2.0), Some(0.3));
        }),
        ("stop ids", &|_, request| {
            no_logprobs(request);
            request.sampling.stop_ids = vec![9];
        }),
        ("the loop guard", &|_, request| {
            no_logprobs(request);
            request.loop_guard = true;
        }),
    ];
    let little = EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, ..OPTIONS };
    let small = EngineOptions { chunk_len: 3, max_sequences: 5, step_tokens: 7, ..OPTIONS };
    for (name, change) in changes {
        compare_forced(name, &|| fake(OPTIONS, |_| ()), change);
        compare_forced(&format!("{name}, digests"), &|| digesting(|model| model.wrong_every = Some(3)), change);
        compare_forced(&format!("{name}, small chunks"), &|| fake(small, |_| ()), change);
    }
    let plain = |_: usize, request: &mut Request| no_logprobs(request);
    let [with, without] = compare_forced("little memory", &|| fake(little, |_| ()), &plain);
    assert!(with.preemptions > 0 && without.preemptions > 0, "little memory causes preemptions");
}

#[test]
fn a_forced_token_that_is_banned_is_an_error() {
    let mut request = requests(&records(), false).remove(0);
    request.sampling.banned_tokens = vec![5];
    for logprobs in [None, Some(0)] {
        request.sampling.logprobs = logprobs;
        let outcome = &serve(&mut fake(OPTIONS, |_| ()), std::slice::from_ref(&request))[0];
        assert!(matches!(outcome.error, Some(Error::Sampling(_))), "{outcome:?}");
        assert_eq!(outcome.tokens[0], [8, 1, 1, 2, 4], "the tokens before it were sent");
    }
}

#[test]
fn a_reply_ends_where_nothing_can_follow() {
    let (constraint, mut request) = (Automaton::new(&[END]).state(&[(4, 1)]).state(&[(5, 2)]).state(&[]), None);
    let request: &mut Request = request.insert(requests(&constraint, false).remove(0));
    request.sampling.logprobs = None;
    let mut engine = fake(OPTIONS, |_| ());
    let outcome = &serve(&mut engine, std::slice::from_ref(request))[0];
    assert_eq!((&outcome.tokens[0], outcome.finish[0]), (&vec![4, 5], Some(FinishReason::End)));
    assert_eq!(engine.stats().steps, 1, "a reply without any choice needs only its prompt");
}
