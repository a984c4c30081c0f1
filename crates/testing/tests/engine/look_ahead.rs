//! Steps that are launched before the step before them has ended: the same replies, sooner.

use std::sync::Arc;

use pellucid_engine::{Control, Engine, EngineOptions, Error, Request};
use pellucid_model::Model;
use pellucid_selftest::EventCollector;
use pellucid_selftest::suites::look_ahead;
use pellucid_tensor::Backend;
use pellucid_testing::FakeModel;

use crate::support::{OPTIONS, bits, fake, finish, request, serve};

/// Tokens that were told after each step of one request.
fn told_after_steps(is_asynchronous: bool) -> Vec<usize> {
    let mut engine = fake(OPTIONS, |model| model.is_asynchronous = is_asynchronous);
    let collected = EventCollector::default();
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
    let (short, long) = (EventCollector::default(), EventCollector::default());
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
    look_ahead::look_ahead_keeps_replies(&load, &backend);
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
    let first = EventCollector::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long, Box::new(first.clone())).expect("it is accepted");
    (0..10).for_each(|_| assert!(engine.step()));
    assert!(engine.stats().steps_ahead > 5);
    let second = EventCollector::default();
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
    let collected = EventCollector::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long.clone(), Box::new(collected.clone())).expect("it is accepted");
    (0..10).for_each(|_| assert!(engine.step()));
    collected.send_control(Control::Pause);
    (0..5).for_each(|_| assert!(engine.step()));
    let outcome = collected.outcome();
    assert_eq!(outcome.controls_applied, [outcome.tokens[0].len()], "nothing was said after the pause");
    assert_eq!(engine.stats().tokens_discarded, 1);
    collected.send_control(Control::Resume);
    finish(&mut engine);
    assert!(bits(&collected.outcome()) == bits(&serve(&mut fake(OPTIONS, |_| ()), &[long])[0]));
}
