//! Tenants share sequences and KV memory fairly: floods, reservations, preemption and pauses.

use pellucid_engine::{Control, Engine, EngineOptions, Overcommit, Request, Scope, TenantId};
use pellucid_selftest::EventCollector;

use crate::support::{OPTIONS, bits, fake, finish, request, serve, submit};

#[test]
fn a_flood_of_one_tenant_leaves_the_other_its_share() {
    let options = EngineOptions { max_sequences: 8, num_blocks: 200, ..OPTIONS };
    let of = |tenant, i: u32| Request {
        scope: Scope::of(TenantId(tenant)),
        ..request(vec![i % 20, (i / 20) % 20, tenant, 7, i % 3], u64::from(i))
    };
    let mut engine = fake(options, |_| ());
    let flood: Vec<EventCollector> = (0..400).map(|_| EventCollector::default()).collect();
    for (i, collected) in flood.iter().enumerate() {
        engine.submit(of(1, i as u32), Box::new(collected.clone())).expect("an accepted request");
    }
    // The flood occupies all sequences when the quiet tenant arrives.
    (0..5).for_each(|_| assert!(engine.step()));
    let quiet: Vec<EventCollector> = (0..4).map(|_| EventCollector::default()).collect();
    for (i, collected) in quiet.iter().enumerate() {
        engine.submit(of(2, i as u32), Box::new(collected.clone())).expect("an accepted request");
    }
    let count = |all: &[EventCollector]| -> usize {
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
    // Alone, four requests with five prompt tokens and ten output tokens take eleven steps.
    assert!(steps <= 22, "{steps} steps; alone, eleven suffice");
    finish(&mut engine);
}

/// Returns a request of a tenant. Without `max_tokens`, it reserves a whole context of 15 blocks.
fn request_of(tenant: u32, first: u32, max_tokens: Option<usize>) -> Request {
    Request { scope: Scope::of(TenantId(tenant)), max_tokens, ..request(vec![first, 2, 3, 4, 5], u64::from(first)) }
}

/// Runs the submitted requests to the end, and checks that each reply equals that of its request served alone.
fn finish_as_alone(engine: &mut Engine, requests: &[Request], collected: &[EventCollector]) {
    finish(engine);
    for (request, collected) in requests.iter().zip(collected) {
        let alone = &serve(&mut fake(OPTIONS, |_| ()), std::slice::from_ref(request))[0];
        assert!(bits(&collected.outcome()) == bits(alone), "{request:?}");
    }
}

fn preemptions(collected: &EventCollector) -> usize {
    collected.outcome().stats.expect("a successful request").preemptions
}

#[test]
fn a_tenant_that_holds_all_memory_yields_the_others_share() {
    // Two requests with one choice each, or one with two choices: few sequences that hold all memory.
    for (first, num_choices) in [(vec![0, 1], 1), (vec![0], 2)] {
        let mut engine = fake(EngineOptions { num_blocks: 30, ..OPTIONS }, |_| ());
        let mut requests: Vec<Request> = first.iter().map(|&i| request_of(1, i, None)).collect();
        requests.iter_mut().for_each(|request| (request.num_choices, request.best_of) = (num_choices, num_choices));
        let mut collected: Vec<EventCollector> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        (0..5).for_each(|_| assert!(engine.step()));
        requests.push(request_of(2, 7, Some(10)));
        collected.push(submit(&mut engine, &requests[requests.len() - 1]));
        (0..11).for_each(|_| assert!(engine.step()));
        assert!(collected[requests.len() - 1].is_over(), "it was scheduled at once");
        finish_as_alone(&mut engine, &requests, &collected);
        assert_eq!(engine.stats().preemptions, 1);
    }
}

/// If cached blocks did not count, two tenants whose requests take more than a share would preempt each other for ever.
#[test]
fn cached_blocks_count_towards_a_share() {
    let mut engine = fake(EngineOptions { num_blocks: 10, ..OPTIONS }, |_| ());
    let of = |tenant, prompt| Request { prompt, max_tokens: Some(7), ..request_of(tenant, 0, None) };
    let requests = [of(1, (0..17).collect()), of(2, (3..20).collect())];
    serve(&mut engine, &requests[1..]);
    // Six blocks each; the second tenant has some of its blocks in the prefix cache.
    let first = submit(&mut engine, &requests[0]);
    (0..3).for_each(|_| assert!(engine.step()));
    let second = submit(&mut engine, &requests[1]);
    finish_as_alone(&mut engine, &requests, &[first, second]);
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_tenant_that_waits_for_its_own_requests_lets_others_pass() {
    let mut engine = fake(EngineOptions { num_blocks: 25, ..OPTIONS }, |_| ());
    let mut requests = vec![request_of(1, 0, None), request_of(2, 1, Some(10)), request_of(2, 2, Some(10))];
    let mut collected: Vec<EventCollector> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    (0..3).for_each(|_| assert!(engine.step()));
    // The first tenant has one running request, so it is next, but there is no memory for its second request.
    for request in [request_of(1, 3, None), request_of(2, 4, Some(3))] {
        collected.push(submit(&mut engine, &request));
        requests.push(request);
    }
    (0..5).for_each(|_| assert!(engine.step()));
    assert!(collected[4].is_over(), "there was memory for it");
    assert!(!collected[0].is_over() && !collected[1].is_over());
    finish_as_alone(&mut engine, &requests, &collected);
    assert_eq!(engine.stats().preemptions, 0);
}

#[test]
fn a_paused_request_is_preempted_and_resumes_where_it_was() {
    // No memory, or no free sequence, for a second request.
    for options in [EngineOptions { num_blocks: 20, ..OPTIONS }, EngineOptions { max_sequences: 1, ..OPTIONS }] {
        let mut engine = fake(options, |_| ());
        let requests = [request_of(1, 0, None), request_of(1, 7, None)];
        let paused = submit(&mut engine, &requests[0]);
        (0..5).for_each(|_| assert!(engine.step()));
        paused.send_control(Control::Pause);
        assert!(engine.step());
        assert!(engine.stats().blocks_in_use > 0, "it keeps its blocks while no other request needs them");
        let other = submit(&mut engine, &requests[1]);
        (0..56).for_each(|_| assert!(engine.step()));
        assert!(other.is_over() && !paused.is_over());
        assert_eq!(paused.outcome().tokens[0].len(), 5);
        paused.send_control(Control::Resume);
        finish_as_alone(&mut engine, &requests, &[paused.clone(), other]);
        assert_eq!(preemptions(&paused), 1);
    }
}

#[test]
fn a_request_without_max_tokens_reserves_its_tokens_and_some_growth() {
    let requests: Vec<Request> = (0..6)
        .map(|i| Request { num_choices: 1 + i % 2, best_of: 1 + i % 2, ..request_of(1, i as u32, None) })
        .collect();
    let started = |overcommit| {
        let mut engine = fake(EngineOptions { num_blocks: 40, overcommit, ..OPTIONS }, |_| ());
        let collected: Vec<EventCollector> = requests.iter().map(|request| submit(&mut engine, request)).collect();
        assert!(engine.step());
        let stats = engine.stats();
        finish_as_alone(&mut engine, &requests, &collected);
        (6 - stats.num_waiting, stats.blocks_in_use + stats.blocks_reserved, engine.stats().preemptions)
    };
    // 15 blocks for one choice, 29 for two.
    assert_eq!(started(Overcommit::Never), (1, 15, 0));
    // Memory for five tokens and eight more: 4 blocks for one choice, 7 for two.
    let (num_started, held, preemptions) = started(Overcommit::Unbounded { growth: 8 });
    assert_eq!((num_started, held), (6, 33));
    assert!(preemptions > 0, "memory runs out in the end");
    // A request with `max_tokens` reserves memory for all of them.
    let mut engine = fake(EngineOptions { overcommit: Overcommit::Unbounded { growth: 8 }, ..OPTIONS }, |_| ());
    submit(&mut engine, &request_of(1, 0, Some(50)));
    assert!(engine.step());
    assert_eq!(engine.stats().blocks_in_use + engine.stats().blocks_reserved, 14);
    finish(&mut engine);
}

#[test]
fn the_tenant_with_most_memory_is_preempted_when_it_runs_out() {
    let mut engine = fake(EngineOptions { num_blocks: 30, overcommit: Overcommit::Always, ..OPTIONS }, |_| ());
    let mut requests: Vec<Request> = (0..4).map(|i| request_of(1, i, None)).collect();
    let mut collected: Vec<EventCollector> = requests.iter().map(|request| submit(&mut engine, request)).collect();
    (0..5).for_each(|_| assert!(engine.step()));
    requests.push(request_of(2, 7, Some(40)));
    collected.push(submit(&mut engine, &requests[4]));
    finish_as_alone(&mut engine, &requests, &collected);
    assert_eq!(preemptions(&collected[4]), 0, "it arrived last and stayed within its share");
    assert!(preemptions(&collected[3]) > 0, "memory ran out");
}
