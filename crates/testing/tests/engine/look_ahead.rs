//! Look-ahead: steps that are launched before the previous step has ended give the same replies.

use std::sync::Arc;

use pellucid_engine::{Control, Engine, EngineOptions, Error, Request};
use pellucid_model::Model;
use pellucid_selftest::EventCollector;
use pellucid_selftest::suites::look_ahead;
use pellucid_tensor::Backend;
use pellucid_testing::FakeModel;

use crate::support::{OPTIONS, bits, fake, finish, request, serve};

/// Returns the number of tokens that the sink has received after each step of one request.
fn tokens_after_steps(is_asynchronous: bool) -> Vec<usize> {
    let mut engine = fake(OPTIONS, |model| model.is_asynchronous = is_asynchronous);
    let collected = EventCollector::default();
    engine.submit(request(vec![1, 2, 3], 1), Box::new(collected.clone())).expect("an accepted request");
    let mut counts = Vec::new();
    while engine.step() {
        counts.push(collected.outcome().tokens.first().map_or(0, Vec::len));
        assert_eq!(collected.is_over(), counts.len() == 10, "the last event is sent with the last step");
    }
    counts
}

#[test]
fn a_token_is_sent_when_its_step_ends_or_while_the_device_runs_the_next_one() {
    assert_eq!(tokens_after_steps(false), (1..=10).collect::<Vec<_>>());
    let mut behind: Vec<usize> = (0..9).collect();
    behind.push(10);
    assert_eq!(tokens_after_steps(true), behind);
}

#[test]
fn a_dropped_engine_sends_the_tokens_of_its_last_step() {
    let mut engine = fake(OPTIONS, |model| model.is_asynchronous = true);
    let (short, long) = (EventCollector::default(), EventCollector::default());
    let one = Request { max_tokens: Some(1), ..request(vec![1, 2, 3], 1) };
    engine.submit(one, Box::new(short.clone())).expect("an accepted request");
    engine.submit(request(vec![4, 5], 1), Box::new(long.clone())).expect("an accepted request");
    assert!(engine.step() && !short.is_over());
    drop(engine);
    assert!(short.is_over() && short.outcome().error.is_none());
    assert_eq!(long.outcome().tokens[0].len(), 1);
}

/// Returns an engine whose model is asynchronous and digests rows.
fn look_ahead_engine(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    fake(options, |model| {
        model.is_asynchronous = true;
        model.digest_len = Some(24);
        change(model);
    })
}

#[test]
fn steps_launched_ahead_change_no_bits() {
    let mut requests: Vec<Request> = (0..12).map(|i| request(vec![i % 20, i + 1, 3], u64::from(i % 4))).collect();
    for (i, request) in requests.iter_mut().enumerate() {
        request.max_tokens = Some(3 + 4 * i);
        request.sampling.temperature = [0.0, 0.7, 1.0][i % 3];
        request.sampling.top_p = [1.0, 0.8][i % 2];
        request.sampling.stop_ids = vec![i as u32];
    }
    let expected: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &requests).iter().map(bits).collect();
    let share = |wrong_every: Option<usize>, digest_len: usize| {
        let mut engine = look_ahead_engine(OPTIONS, |model| {
            model.wrong_every = wrong_every;
            model.digest_len = Some(digest_len);
        });
        let found: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
        assert!(found == expected, "wrong every {wrong_every:?}, digests of {digest_len}");
        let stats = engine.stats();
        (stats.steps_ahead as f64 / stats.steps as f64, stats.tokens_discarded)
    };
    let (most, discarded) = share(None, 24);
    assert!(most > 0.6, "a fraction of {most} of the steps was launched ahead");
    assert!(discarded <= 12, "{discarded} tokens were discarded; only stop ids cannot be foreseen");
    let (some, discarded) = share(Some(5), 24);
    assert!(
        some > 0.1 && some < most && discarded > 0,
        "a fraction of {some} of the steps was launched ahead, {discarded} tokens were discarded"
    );
    // Digests that often do not suffice, when the whole row is gone already.
    assert!(share(None, 2).0 > 0.1);
}

/// The check of `pellucid selftest`, with the fake model.
#[test]
fn the_look_ahead_suite_passes() {
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
fn a_failed_step_ahead_ends_its_requests_and_the_engine_continues() {
    let long = |seed| Request { max_tokens: Some(40), ..request(vec![1, 2, 3], seed) };
    let healthy: Vec<_> = serve(&mut fake(OPTIONS, |_| ()), &[long(1), long(2)]).iter().map(bits).collect();
    // A failure at the launch: the step ahead is dropped, and the regular step reports the error.
    let bomb = healthy[0].0[0][20];
    let mut engine = look_ahead_engine(OPTIONS, |model| model.bomb = Some(bomb));
    let outcome = &serve(&mut engine, &[long(1)])[0];
    assert!(matches!(&outcome.error, Some(Error::Internal(message)) if message.contains("bomb")), "{outcome:?}");
    let at = healthy[0].0[0].iter().position(|&token| token == bomb).expect("the twenty-first token at the latest");
    assert_eq!(outcome.tokens[0], healthy[0].0[0][..=at], "every token before it was sent");
    // A failure while a further step is in flight.
    let mut engine = look_ahead_engine(OPTIONS, |model| model.fails_at = Some(7));
    let outcomes = serve(&mut engine, &[long(1), long(2)]);
    assert!(engine.stats().steps_ahead >= 6);
    for (outcome, healthy) in outcomes.iter().zip(&healthy) {
        assert!(matches!(outcome.error, Some(Error::OutOfMemory(_))), "{outcome:?}");
        assert!(healthy.0[0].starts_with(&outcome.tokens[0]));
    }
    let after: Vec<_> = serve(&mut engine, &[long(1), long(2)]).iter().map(bits).collect();
    assert!(after == healthy, "the engine continues as before");
    assert_eq!(engine.stats().blocks_in_use, 0);
}

#[test]
fn a_device_lost_during_a_step_ahead_ends_all_requests() {
    let mut engine = look_ahead_engine(OPTIONS, |model| model.lost_at = Some(9));
    let outcomes = serve(&mut engine, &[request(vec![1, 2, 3], 1), request(vec![4, 5], 2)]);
    assert!(engine.is_lost() && !engine.step());
    assert!(outcomes.iter().all(|outcome| matches!(outcome.error, Some(Error::DeviceLost(_)))), "{outcomes:?}");
}

#[test]
fn a_new_request_waits_for_at_most_the_steps_in_flight() {
    let mut engine = look_ahead_engine(OPTIONS, |_| ());
    let first = EventCollector::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long, Box::new(first.clone())).expect("an accepted request");
    (0..10).for_each(|_| assert!(engine.step()));
    assert!(engine.stats().steps_ahead > 5);
    let second = EventCollector::default();
    engine.submit(request(vec![4, 5], 1), Box::new(second.clone())).expect("an accepted request");
    // The step ahead; the prompt; its token is sent while the next step runs.
    (0..3).for_each(|_| assert!(engine.step()));
    assert_eq!(second.outcome().tokens[0].len(), 1);
    finish(&mut engine);
    assert_eq!((first.outcome().error, second.outcome().error), (None, None));
}

#[test]
fn a_pause_discards_the_token_of_the_step_ahead() {
    let mut engine = look_ahead_engine(OPTIONS, |_| ());
    let collected = EventCollector::default();
    let long = Request { max_tokens: Some(40), ..request(vec![1, 2, 3], 1) };
    engine.submit(long.clone(), Box::new(collected.clone())).expect("an accepted request");
    (0..10).for_each(|_| assert!(engine.step()));
    collected.send_control(Control::Pause);
    (0..5).for_each(|_| assert!(engine.step()));
    let outcome = collected.outcome();
    assert_eq!(outcome.controls_applied, [outcome.tokens[0].len()], "no token was sent after the pause");
    assert_eq!(engine.stats().tokens_discarded, 1);
    collected.send_control(Control::Resume);
    finish(&mut engine);
    assert!(bits(&collected.outcome()) == bits(&serve(&mut fake(OPTIONS, |_| ()), &[long])[0]));
}
