//! Features of a request: limits, several choices, best-of, beam search, scored prompts, control messages, streams.

use std::sync::Arc;
use std::time::Duration;

use pellucid_engine::{
    AttentionProbe, BeamParams, Control, EarlyStopping, EngineHandle, EngineOptions, Error, Event, FinishReason,
    ProbeRequest, Request,
};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::{EventCollector, goldens_folder};
use pellucid_testing::FakeModel;

use crate::support::{OPTIONS, bits, engine, fake, finish, request, serve};

#[test]
fn every_control_message_is_acknowledged_once() {
    let mut engine = fake(OPTIONS, |_| ());
    let collected = EventCollector::default();
    let three = Request { num_choices: 3, best_of: 3, ..request(vec![1, 2, 3], 1) };
    engine.submit(three, Box::new(collected.clone())).expect("an accepted request");
    (0..4).for_each(|_| assert!(engine.step()));
    let controls = [Control::End { choice: 1 }, Control::Pause, Control::End { choice: 2 }, Control::Resume];
    controls.into_iter().for_each(|control| collected.send_control(control));
    finish(&mut engine);
    let outcome = collected.outcome();
    assert_eq!(outcome.controls_applied, [12, 12], "pause and resume, after four tokens of each choice");
    let stop = Some(FinishReason::Stop);
    assert_eq!(outcome.finish, [Some(FinishReason::MaxTokens), stop, stop]);
}

#[test]
fn a_flood_of_updates_is_applied_one_in_each_step() {
    let mut engine = fake(OPTIONS, |_| ());
    let collected = EventCollector::default();
    let updated = request(vec![1, 2, 3], 1);
    engine.submit(updated.clone(), Box::new(collected.clone())).expect("an accepted request");
    (0..2).for_each(|_| assert!(engine.step()));
    for _ in 0..5 {
        collected.send_control(Control::Update(Box::new(updated.sampling.clone())));
    }
    collected.send_control(Control::Pause);
    for num_applied in 1..=4 {
        engine.step();
        assert_eq!(collected.outcome().controls_applied.len(), num_applied);
    }
    engine.step();
    assert_eq!(collected.outcome().controls_applied.len(), 5, "the last update");
    engine.step();
    assert_eq!(collected.outcome().controls_applied.len(), 6, "what comes after it waits for the next step");
    collected.send_control(Control::Resume);
    finish(&mut engine);
    let alone = serve(&mut fake(OPTIONS, |_| ()), &[updated])[0].tokens.clone();
    assert_eq!(collected.outcome().tokens, alone, "updates that change nothing change nothing");
}

#[test]
fn limits_are_enforced_and_named() {
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

    let rejected = |request: Request| {
        let mut engine = fake(EngineOptions { num_blocks: 4, max_waiting: 1, ..OPTIONS }, |_| ());
        engine.submit(request, Box::new(EventCollector::default())).expect_err("it must be rejected")
    };
    assert_eq!(rejected(Request::new(vec![], SamplingParams::default())), Error::EmptyPrompt);
    let long = Request::new(vec![1; 60], SamplingParams::default());
    assert_eq!(rejected(long), Error::PromptTooLong { prompt: 60, context: 60 });
    let outside = Request::new(vec![1, 24], SamplingParams::default());
    assert_eq!(rejected(outside), Error::IdOutsideVocabulary { id: 24, vocab_size: 24 });
    assert_eq!(rejected(plain(None)), Error::ExceedsKvMemory { needed: 15, have: 4 });
    assert!(matches!(rejected(Request { num_choices: 0, ..plain(Some(1)) }), Error::OutOfRange { name: "n", .. }));
    let mut engine = fake(EngineOptions { max_waiting: 1, ..OPTIONS }, |_| ());
    engine.submit(plain(Some(1)), Box::new(EventCollector::default())).expect("the first request waits");
    let second = engine.submit(plain(Some(1)), Box::new(EventCollector::default()));
    assert_eq!(second, Err(Error::QueueFull));
}

#[test]
fn choices_equal_the_replies_of_their_seeds_and_best_of_returns_the_most_probable() {
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
    assert_eq!(same.tokens, best.tokens, "log probabilities decide even if they are not reported");
    assert!(same.logprob_bits.iter().all(Vec::is_empty));
}

/// Returns the fake model's log probability of a token.
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
        let best = (0..4).max_by(|&a, &b| mean(a).total_cmp(&mean(b)).then(b.cmp(&a))).expect("four choices");
        let found = &serve(&mut engine, &[Request { num_choices: 1, ..several.clone() }])[0];
        assert_eq!(found.tokens[0], made.tokens[best], "seed {seed}");
        num_empty += usize::from(made.tokens.iter().any(Vec::is_empty) && !made.tokens[best].is_empty());
    }
    assert!(num_empty > 5, "an empty reply lost only {num_empty} times");
}

#[test]
fn a_beam_search_to_the_end_of_the_context_equals_one_with_that_max_tokens() {
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
fn a_beam_search_counts_the_tokens_of_all_its_beams() {
    let beams = BeamParams { width: 3, num_returned: 2, length_penalty: 1.0, early_stopping: EarlyStopping::Never };
    for max_tokens in [1, 8] {
        let sampling = SamplingParams::default();
        let search =
            Request { max_tokens: Some(max_tokens), beams: Some(beams), ..Request::new(vec![1, 2, 3], sampling) };
        let stats = serve(&mut fake(OPTIONS, |_| ()), &[search])[0].stats.expect("a successful request");
        assert_eq!(stats.output_tokens, 3 * max_tokens);
    }
}

#[test]
fn prompts_can_be_scored() {
    // Together, the prompts have more rows than one step scores.
    let mut engine = fake(EngineOptions { step_tokens: 512, chunk_len: 64, ..OPTIONS }, |_| ());
    let prompt: Vec<u32> = (0..37).map(|i| i * 5 % 24).collect();
    let scored = Request { score_prompt: true, max_tokens: Some(1), ..request(prompt.clone(), 0) };
    let outcomes = serve(&mut engine, &vec![scored; 7]);
    assert_eq!(outcomes[0].prompt_logprobs.len(), 36);
    for other in &outcomes[1..] {
        assert_eq!(outcomes[0].prompt_logprobs, other.prompt_logprobs, "no row was skipped because it was cached");
    }
    for (i, found) in outcomes[0].prompt_logprobs.iter().enumerate() {
        let logits = FakeModel::logits_after(prompt[..=i].iter().copied(), 24);
        let sum: f64 = logits.iter().map(|&logit| f64::from(logit).exp()).sum();
        let expected = f64::from(logits[prompt[i + 1] as usize]) - sum.ln();
        assert!((f64::from(*found) - expected).abs() < 1e-5);
    }
}

#[test]
fn a_dropped_stream_releases_its_blocks_and_the_handle_serves_many() {
    [false, true].into_iter().for_each(serve_streams);
}

fn serve_streams(is_asynchronous: bool) {
    let handle = Arc::new(EngineHandle::start(fake(OPTIONS, |model| model.is_asynchronous = is_asynchronous)));
    let endless = Request { max_tokens: None, ..request(vec![1, 2, 3], 1) };
    let stream = handle.submit(endless).expect("an accepted request");
    let first = std::iter::from_fn(|| stream.next_event()).find(|event| matches!(event, Event::Token(_)));
    assert!(first.is_some());
    drop(stream);
    let threads: Vec<_> = (0..8)
        .map(|i| {
            let handle = handle.clone();
            std::thread::spawn(move || {
                let stream = handle.submit(request(vec![i, 2, 3], 5)).expect("an accepted request");
                std::iter::from_fn(|| stream.next_event()).filter(|event| matches!(event, Event::Token(_))).count()
            })
        })
        .collect();
    for thread in threads {
        assert_eq!(thread.join().expect("no panic"), 10);
    }
    let stats = handle.stats().expect("the engine runs");
    assert_eq!((stats.blocks_in_use, stats.num_running), (0, 0));
    assert_eq!(stats.finished_requests + stats.cancelled_requests, 9);
    // A handle dropped during a reply must not lose a block: debug builds panic on a lost block.
    let unfinished = handle.submit(Request { max_tokens: None, ..request(vec![9], 1) }).expect("an accepted request");
    drop(handle);
    drop(unfinished);
}

#[test]
fn a_probe_reports_the_bits_of_the_reply_and_changes_none() {
    let path = goldens_folder().join("llama3");
    let prompt: Vec<u32> = (1..40).collect();
    let sampling = SamplingParams { temperature: 1.0, seed: 3, logprobs: Some(3), ..SamplingParams::default() };
    let plain = Request { max_tokens: Some(6), ..Request::new(prompt.clone(), sampling) };
    let attention = AttentionProbe { layer: 1, head: Some(2), rows: 4 };
    let probed = Request {
        probe: Some(ProbeRequest { token: 2, layers: Some(3), attention: Some(attention) }),
        ..plain.clone()
    };
    let mut engine = engine(&path, 1, OPTIONS);
    let alone = serve(&mut engine, std::slice::from_ref(&plain)).remove(0);
    // In a batch, and with the prompt from the prefix cache.
    let together = serve(&mut engine, &[request(vec![7; 9], 1), probed.clone(), request(vec![8; 30], 2)]);
    assert_eq!(bits(&together[1]), bits(&alone));
    let probe = together[1].probe.clone().expect("a reply with three tokens");
    let token = &alone.events[0][2];
    assert_eq!((probe.token, probe.position, probe.id), (2, prompt.len() + 1, token.id));
    assert_eq!(probe.layers.last(), token.logprobs.as_ref(), "the last layer has the model's own log probabilities");
    assert_ne!(probe.layers[0], probe.layers[1]);
    let map = probe.attention.expect("attention was asked for");
    assert_eq!((map.of, map.weights.len(), map.ids.len()), (attention, 4, prompt.len() + 2));
    for (row, weights) in map.weights.iter().enumerate() {
        let sum: f32 = weights.iter().sum();
        assert!((sum - 1.0).abs() < 1e-3, "row {row} sums to {sum}");
        assert!(weights[prompt.len() + row - 1..].iter().all(|&weight| weight == 0.0), "row {row} looks ahead");
    }
    assert_eq!(alone.probe, None);
    let mut refused = |probe: ProbeRequest, change: &dyn Fn(&mut Request)| {
        let mut request = Request { probe: Some(probe), ..probed.clone() };
        change(&mut request);
        engine.submit(request, Box::new(EventCollector::default())).expect_err("it must be rejected").to_string()
    };
    let probe = |layer: usize, head: usize, rows: usize| ProbeRequest {
        attention: Some(AttentionProbe { layer, head: Some(head), rows }),
        ..ProbeRequest::default()
    };
    assert_eq!(refused(probe(2, 0, 1), &|_| ()), "probe.attention.layer: expected 0 to 1, found 2");
    assert_eq!(refused(probe(0, 4, 1), &|_| ()), "probe.attention.head: expected 0 to 3, found 4");
    assert_eq!(refused(probe(0, 0, 65), &|_| ()), "probe.attention.rows: expected 1 to 64, found 65");
    let token = ProbeRequest { token: 6, layers: Some(1), attention: None };
    assert_eq!(refused(token, &|_| ()), "probe.token: expected 0 to 5, found 6");
    let two = |request: &mut Request| (request.num_choices, request.best_of) = (2, 2);
    assert_eq!(refused(probe(0, 0, 1), &two), "n with probe: expected 1 to 1, found 2");
}
