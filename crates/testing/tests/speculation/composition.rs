//! Speculation together with everything else that the engine does, with the fake model, whose replies change if a
//! stale or wrong position of KV memory is ever read.

use std::sync::Arc;

use pellucid_engine::{
    BeamParams, Control, DrafterKind, EarlyStopping, Engine, EngineOptions, Overcommit, Request, Scope,
    SpeculationOptions, TenantId,
};
use pellucid_sampling::TokenConstraint;
use pellucid_selftest::Outcome;
use pellucid_selftest::suites::speculation::drafters::{HonestDrafter, RandomDrafter, Recording};
use pellucid_testing::{Automaton, FakeModel};

use crate::support::{
    CONTEXT, Drafting, OPTIONS, VOCAB, assert_same, compare, fake, finish, fixed, prompts, replies, reply, request,
    serve, submit,
};

/// Returns requests of many lengths, with all temperatures.
fn requests(count: usize) -> Vec<Request> {
    prompts(count, VOCAB as u32, 1).into_iter().zip(0..).map(|(prompt, seed)| request(prompt, seed)).collect()
}

#[test]
fn several_choices() {
    let mut requests = requests(12);
    for (i, request) in requests.iter_mut().enumerate() {
        request.num_choices = 1 + i % 4;
        request.best_of = request.num_choices + [0, 0, 2][i % 3];
    }
    compare("n and best_of", &|| fake(OPTIONS, |_| ()), &requests);
}

#[test]
fn chunks_and_small_steps() {
    for (chunk_len, step_tokens) in [(1, 16), (3, 17), (7, 23)] {
        let options = EngineOptions { chunk_len, step_tokens, ..OPTIONS };
        compare(&format!("chunks of {chunk_len}"), &|| fake(options, |_| ()), &requests(24));
    }
    let alone = EngineOptions { max_sequences: 1, ..OPTIONS };
    compare("one sequence at a time", &|| fake(alone, |_| ()), &requests(16));
}

#[test]
fn replies_end_in_the_middle_of_a_draft() {
    let mut limited = requests(24);
    for (i, request) in limited.iter_mut().enumerate() {
        request.max_tokens = Some(1 + i % 12);
    }
    compare("max_tokens", &|| fake(OPTIONS, |_| ()), &limited);

    let at = |len: usize| (0..len as u32).map(|j| j * 5 % VOCAB as u32).collect();
    let to_the_end = |len: usize| Request { max_tokens: None, ..request(at(len), len as u64) };
    let full: Vec<Request> = (CONTEXT - 20..CONTEXT).map(to_the_end).collect();
    compare("the end of the context", &|| fake(OPTIONS, |_| ()), &full);

    let mut guarded = requests(9);
    for (i, request) in guarded.iter_mut().enumerate() {
        request.loop_guard = true;
        request.sampling.allowed_tokens = Some(vec![7 + i as u32 % 2]);
        request.max_tokens = None;
    }
    compare("the loop guard", &|| fake(OPTIONS, |_| ()), &guarded);
}

#[test]
fn prompts_are_scored() {
    let mut requests = requests(12);
    requests.iter_mut().for_each(|request| request.score_prompt = true);
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let mut engine = fake(OPTIONS, |_| ());
    Drafting::WithErrors.prepare(&mut engine, &Recording::of(requests.iter().zip(&plain)), 4);
    let drafted = serve(&mut engine, &requests);
    let bits = |outcome: &Outcome| outcome.prompt_logprobs.iter().map(|ln_p| ln_p.to_bits()).collect::<Vec<_>>();
    for (plain, drafted) in plain.iter().zip(&drafted) {
        assert_eq!(bits(plain), bits(drafted));
    }
    assert_same("scored prompts", &replies(&drafted), &replies(&plain));
}

/// Serves requests one at a time, twice, and then prompts that continue their replies. Returns the replies and the
/// number of tokens that each request found in the prefix cache.
fn fill_cache(engine: &mut Engine, requests: &[Request]) -> (Vec<Vec<Outcome>>, Vec<usize>) {
    let mut outcomes = Vec::new();
    let mut rounds = vec![requests.to_vec(), requests.to_vec()];
    while let Some(round) = rounds.pop() {
        let served: Vec<Outcome> = round.iter().flat_map(|one| serve(engine, std::slice::from_ref(one))).collect();
        if rounds.is_empty() && outcomes.len() == 1 {
            let continued = |(request, outcome): (&Request, &Outcome)| {
                let prompt = [&request.prompt[..], &outcome.tokens[0], &[1, 2]].concat();
                Request { prompt, max_tokens: Some(1), ..request.clone() }
            };
            rounds.push(round.iter().zip(&served).map(continued).collect());
        }
        outcomes.push(served);
    }
    let cached = outcomes.iter().flatten().map(|outcome| outcome.stats.expect("it has ended").cached_tokens).collect();
    (outcomes, cached)
}

#[test]
fn the_prefix_cache_holds_the_same_tokens() {
    let mut requests = requests(40);
    for (i, request) in requests.iter_mut().enumerate() {
        request.max_tokens = Some(3 + i % 17);
        request.sampling.stop_ids = vec![i as u32 % 24];
    }
    let mut engine = fake(OPTIONS, |_| ());
    let (plain, cached) = fill_cache(&mut engine, &requests);
    let num_idle = engine.cache().num_idle();
    assert!(cached.iter().sum::<usize>() > 1000, "the cache is used: {cached:?}");
    let recording = Recording::of(requests.iter().zip(&plain[0]));
    for drafting in Drafting::ALL {
        for len in [1, 4, 15] {
            let mut engine = fake(OPTIONS, |_| ());
            drafting.prepare(&mut engine, &recording, len);
            let (found, found_cached) = fill_cache(&mut engine, &requests);
            for (found, plain) in found.iter().zip(&plain) {
                assert_same(&format!("{drafting:?} of {len}"), &replies(found), &replies(plain));
            }
            assert_eq!(found_cached, cached, "{drafting:?} of {len}: cached tokens");
            assert_eq!(engine.cache().num_idle(), num_idle, "{drafting:?} of {len}: cached blocks");
        }
    }
}

#[test]
fn preempted_requests() {
    let options = EngineOptions { num_blocks: 20, overcommit: Overcommit::Always, ..OPTIONS };
    let requests: Vec<Request> =
        requests(20).into_iter().map(|request| Request { max_tokens: Some(20), ..request }).collect();
    compare("little memory", &|| fake(options, |_| ()), &requests);
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let mut engine = fake(options, |_| ());
    Drafting::WithErrors.prepare(&mut engine, &Recording::of(requests.iter().zip(&plain)), 6);
    assert_same("little memory", &replies(&serve(&mut engine, &requests)), &replies(&plain));
    assert!(engine.stats().preemptions > 0, "little memory causes preemptions");
}

#[test]
fn look_ahead_steps() {
    let requests: Vec<Request> =
        requests(16).into_iter().map(|request| Request { max_tokens: Some(24), ..request }).collect();
    for (digest_len, wrong_every) in [(VOCAB, None), (VOCAB, Some(5)), (2, None)] {
        let engine = || {
            fake(OPTIONS, |model| {
                model.is_asynchronous = true;
                model.digest_len = Some(digest_len);
                model.wrong_every = wrong_every;
            })
        };
        let name = format!("digests of {digest_len}, wrong every {wrong_every:?}");
        compare(&name, &engine, &requests);
        let plain = replies(&serve(&mut fake(OPTIONS, |_| ()), &requests));
        assert_same(&name, &replies(&serve(&mut engine(), &requests)), &plain);
    }
}

#[test]
fn pauses_and_disconnects() {
    let requests: Vec<Request> =
        requests(12).into_iter().map(|request| Request { max_tokens: Some(24), ..request }).collect();
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let (expected, recording) = (replies(&plain), Recording::of(requests.iter().zip(&plain)));
    for is_asynchronous in [false, true] {
        for drafting in Drafting::ALL {
            let mut engine = fake(OPTIONS, |model| {
                model.is_asynchronous = is_asynchronous;
                model.digest_len = is_asynchronous.then_some(VOCAB);
            });
            drafting.prepare(&mut engine, &recording, 3);
            let collected: Vec<_> = requests.iter().map(|request| submit(&mut engine, request)).collect();
            (0..4).for_each(|_| assert!(engine.step()));
            let (paused, gone) = (&collected[2..5], &collected[8..10]);
            paused.iter().for_each(|collected| collected.send_control(Control::Pause));
            gone.iter().for_each(|collected| collected.close());
            (0..3).for_each(|_| assert!(engine.step()));
            for collected in paused {
                let outcome = collected.outcome();
                let num_tokens = outcome.tokens.first().map_or(0, Vec::len);
                assert!(outcome.is_over() || outcome.controls_applied == [num_tokens], "no token after the pause");
                collected.send_control(Control::Resume);
            }
            finish(&mut engine);
            for (i, collected) in collected.iter().enumerate().filter(|(i, _)| !(8..10).contains(i)) {
                assert!(reply(&collected.outcome()) == expected[i], "{drafting:?}, request {i}");
            }
            assert_eq!(engine.stats().blocks_in_use, 0);
        }
    }
}

#[test]
fn a_changed_temperature_counts_from_the_token_after_it() {
    let base = Request { max_tokens: Some(30), ..request(vec![1, 2, 3, 4], 1) };
    let plain = serve(&mut fake(OPTIONS, |_| ()), std::slice::from_ref(&base));
    let recording = Recording::of([(&base, &plain[0])]);
    let hot = pellucid_sampling::SamplingParams { temperature: 1.4, ..base.sampling.clone() };
    let mut engine = fake(OPTIONS, |_| ());
    Drafting::Honest.prepare(&mut engine, &recording, 4);
    let collected = submit(&mut engine, &base);
    (0..4).for_each(|_| assert!(engine.step()));
    collected.send_control(Control::Update(Box::new(hot.clone())));
    finish(&mut engine);
    let drafted = collected.outcome();
    let at = drafted.controls_applied[0];
    assert!(at > 4, "{at} tokens in four steps with an honest drafter");
    // Without drafts, the message arrives after the step that makes token `at`.
    let mut engine = fake(OPTIONS, |_| ());
    let collected = submit(&mut engine, &base);
    (0..at).for_each(|_| assert!(engine.step()));
    collected.send_control(Control::Update(Box::new(hot)));
    finish(&mut engine);
    let changed = collected.outcome();
    assert_eq!(changed.controls_applied, [at]);
    assert!(reply(&drafted) == reply(&changed));
    assert!(changed.tokens != plain[0].tokens, "the temperature makes a difference");
}

#[test]
fn tenants_share_no_drafts() {
    let of = |tenant: u32| {
        let mut request = Request { max_tokens: Some(30), ..request(vec![1, 2, 3, 4], 0) };
        request.scope = Scope::of(TenantId(tenant));
        request
    };
    let expected = reply(&serve(&mut fake(OPTIONS, |_| ()), &[of(0)])[0]);
    let mut engine = fake(OPTIONS, |_| ());
    engine.set_speculation(SpeculationOptions { suffix: true, ..fixed(6) });
    let drafted = |engine: &mut Engine, tenant: u32| {
        let outcome = serve(engine, &[of(tenant)]).remove(0);
        assert!(reply(&outcome) == expected, "tenant {tenant}");
        outcome.stats.expect("it has ended").speculation.of(DrafterKind::Suffix)
    };
    let first = drafted(&mut engine, 0);
    let again = drafted(&mut engine, 0);
    assert!(again.accepted > first.accepted + 10, "the tenant's own reply is proposed again: {first:?}, {again:?}");
    let other = drafted(&mut engine, 1);
    assert_eq!(other, first, "another tenant gets as little as the first one got from nothing");

    let mixed: Vec<Request> = requests(24)
        .into_iter()
        .zip(0..)
        .map(|(request, i)| Request { scope: Scope::of(TenantId(i % 3)), ..request })
        .collect();
    compare("three tenants", &|| fake(OPTIONS, |_| ()), &mixed);
}

#[test]
fn a_request_may_switch_speculation_off() {
    let mut off = request(vec![1, 2, 3], 1);
    off.speculate = false;
    let on = request(vec![1, 2, 3], 2);
    let mut engine = fake(OPTIONS, |_| ());
    engine.set_speculation(fixed(3));
    engine.add_drafter(Box::new(RandomDrafter::new(1, VOCAB)));
    let outcomes = serve(&mut engine, &[off, on]);
    let drafted = |i: usize| {
        let outcome: &Outcome = &outcomes[i];
        outcome.stats.expect("it has ended").speculation.total().drafted
    };
    assert_eq!(drafted(0), 0);
    assert!(drafted(1) > 0);
    assert!(outcomes[0].events[0].iter().all(|event| event.proposal.is_none()));
}

#[test]
fn predicted_output_is_a_draft() {
    let plain = requests(9);
    let expected = serve(&mut fake(OPTIONS, |_| ()), &plain);
    let mut accepted = Vec::new();
    let right = |i: usize| expected[i].tokens[0].clone();
    let predictions: [&dyn Fn(usize) -> Vec<u32>; 4] =
        [&right, &|i| right(i).split_off(4), &|i| [&right(i)[..5], &right(i)[6..]].concat(), &|_| vec![3; 40]];
    for prediction in predictions {
        let mut engine = fake(OPTIONS, |_| ());
        engine.set_speculation(fixed(4));
        let predicted: Vec<Request> = (plain.iter().enumerate())
            .map(|(i, request)| Request { prediction: prediction(i), ..request.clone() })
            .collect();
        assert_same("a prediction", &replies(&serve(&mut engine, &predicted)), &replies(&expected));
        accepted.push(engine.stats().speculation.of(DrafterKind::Prediction).accepted);
    }
    assert!(accepted[0] > 60 && accepted[2] > 20, "a right prediction is accepted: {accepted:?}");
}

#[test]
fn beam_search_runs_without_drafts() {
    let beams = BeamParams { width: 3, num_returned: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    let sampling = pellucid_sampling::SamplingParams::default();
    let search = Request { max_tokens: Some(8), beams: Some(beams), ..Request::new(vec![1, 2, 3], sampling) };
    let others = requests(6);
    let plain = serve(&mut fake(OPTIONS, |_| ()), std::slice::from_ref(&search));
    let mut engine = fake(OPTIONS, |_| ());
    engine.set_speculation(SpeculationOptions { ngram: true, suffix: true, ..fixed(3) });
    engine.add_drafter(Box::new(RandomDrafter::new(1, VOCAB)));
    let together = serve(&mut engine, &[&[search], &others[..]].concat());
    assert_eq!(together[0].beams, plain[0].beams);
    assert_eq!(together[0].stats.expect("it has ended").speculation.total().drafted, 0);
}

#[test]
fn proposals_are_reported_and_counted() {
    let requests = requests(12);
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let recording = Recording::of(requests.iter().zip(&plain));
    let mut engine = fake(OPTIONS, |_| ());
    engine.set_speculation(fixed(3));
    engine.add_drafter(Box::new(HonestDrafter::new(recording, Some(4), VOCAB)));
    let outcomes = serve(&mut engine, &requests);
    let mut total = 0;
    for outcome in &outcomes {
        let stats = outcome.stats.expect("it has ended");
        let counts = stats.speculation.of(DrafterKind::Custom);
        assert_eq!(stats.speculation.total(), counts, "one drafter");
        let proposals: Vec<_> = outcome.events.iter().flatten().filter_map(|e| Some((e.id, e.proposal?))).collect();
        assert!(proposals.iter().all(|(_, proposal)| proposal.drafter == DrafterKind::Custom));
        let accepted = proposals.iter().filter(|(id, proposal)| proposal.token == *id).count();
        assert_eq!(accepted as u64, counts.accepted);
        assert!(proposals.len() > accepted, "a rejected proposal is reported with the token that took its place");
        total += counts.drafted;
    }
    assert_eq!(engine.stats().speculation.total().drafted, total);
}

/// Creates an engine.
type MakeEngine<'a> = &'a dyn Fn() -> Engine;

/// Free text until token 7, then a run of forced tokens, a choice, and the end or free text again.
fn constraint() -> Arc<dyn TokenConstraint> {
    let end = VOCAB as u32 - 1;
    let automaton = Automaton::new(&[end]).free(&[(7, 1), (9, 1), (11, 1)]);
    let automaton = automaton.state(&[(3, 2)]).state(&[(4, 3)]).state(&[(5, 4)]).state(&[(3, 5)]);
    Arc::new(automaton.state(&[(1, 0), (2, 6), (6, 1)]).state(&[(8, 0)]).may_end())
}

#[test]
fn constraints_and_forced_tokens() {
    let mut requests = requests(24);
    for (i, request) in requests.iter_mut().enumerate() {
        request.constraint = Some(constraint());
        request.sampling.end_ids = vec![VOCAB as u32 - 1];
        request.sampling.logprobs = [None, Some(2)][i % 2];
        request.sampling.frequency_penalty = [0.0, 0.8][i / 2 % 2];
        request.trace = i % 5 == 4;
        request.max_tokens = Some(10 + i);
        request.num_choices = 1 + i % 3;
        request.best_of = request.num_choices + usize::from(i % 4 == 3);
    }
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let forced: usize = plain.iter().map(|outcome| outcome.stats.expect("it has ended").forced_tokens).sum();
    assert!(forced > 50, "{forced} forced tokens");
    let (expected, recording) = (replies(&plain), Recording::of(requests.iter().zip(&plain)));
    let little = EngineOptions { num_blocks: 100, overcommit: Overcommit::Always, ..OPTIONS };
    let digesting = |model: &mut FakeModel| (model.is_asynchronous, model.digest_len) = (true, Some(VOCAB));
    let engines: [(&str, MakeEngine<'_>); 3] = [
        ("whole rows", &|| fake(OPTIONS, |_| ())),
        ("little memory", &|| fake(little, |_| ())),
        ("look-ahead", &|| fake(OPTIONS, digesting)),
    ];
    // Without `compare`: drafts that nobody checks would be errors of the constraint.
    for (name, engine) in engines {
        for (drafting, len) in Drafting::ALL.into_iter().zip([5, 4, 3, 2, 3, 7, 6, 15]) {
            let mut engine = engine();
            drafting.prepare(&mut engine, &recording, len);
            assert_same(&format!("{name}, {drafting:?}"), &replies(&serve(&mut engine, &requests)), &expected);
        }
    }
}

#[test]
fn a_step_that_fails_ends_its_requests_and_the_engine_continues() {
    let requests = requests(4);
    let plain = serve(&mut fake(OPTIONS, |_| ()), &requests);
    let recording = Recording::of(requests.iter().zip(&plain));
    let mut engine = fake(OPTIONS, |model| model.fails_at = Some(3));
    Drafting::Honest.prepare(&mut engine, &recording, 2);
    let failed = serve(&mut engine, &requests);
    assert!(failed.iter().all(|outcome| outcome.error.is_some()));
    for (failed, plain) in failed.iter().zip(&plain) {
        assert!(plain.tokens[0].starts_with(&failed.tokens[0]));
    }
    assert_same("after the failure", &replies(&serve(&mut engine, &requests)), &replies(&plain));
    assert_eq!(engine.stats().blocks_in_use, 0);
}
