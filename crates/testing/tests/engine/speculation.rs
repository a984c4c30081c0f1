//! Replies with drafters are those without them, token for token and bit for bit.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use pellucid_engine::{
    DraftContext, Drafter, DrafterKind, Engine, EngineOptions, Overcommit, Request, SpeculationOptions,
};

use pellucid_testing::{FakeModel, FakeSlots};

use pellucid_tensor::TokenSlots;

use crate::support::{OPTIONS, bits, fake, prompts, request, serve};

/// Knows the replies, and spoils each proposed token whose number is a multiple of `spoiled_every`.
struct Recorded {
    replies: HashMap<Vec<u32>, Vec<u32>>,
    spoiled_every: usize,
    num_proposed: usize,
}

impl Drafter for Recorded {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let (prompt, output) = context.tokens.split_at(context.prompt_len);
        let Some(reply) = self.replies.get(prompt).filter(|reply| reply.starts_with(output)) else { return };
        for &token in reply[output.len()..].iter().take(max_len) {
            self.num_proposed += 1;
            let is_spoiled = self.num_proposed.is_multiple_of(self.spoiled_every);
            draft.push(if is_spoiled { (token + 1) % 24 } else { token });
        }
    }
}

fn requests() -> Vec<Request> {
    let with_seed = |(seed, prompt)| Request { max_tokens: Some(25), ..request(prompt, seed) };
    (0..).zip(prompts(12, 24)).map(with_seed).collect()
}

fn check(mut make: impl FnMut() -> Engine) {
    let requests = requests();
    let plain: Vec<_> =
        requests.iter().map(|request| serve(&mut make(), std::slice::from_ref(request)).remove(0)).collect();
    for spoiled_every in [1, 2, 3, 7, usize::MAX] {
        for alone in [true, false] {
            let replies = requests.iter().zip(&plain).map(|(r, o)| (r.prompt.clone(), o.tokens[0].clone())).collect();
            let mut engine = make();
            engine.set_speculation(SpeculationOptions { fixed_draft_len: Some(5), ..SpeculationOptions::OFF });
            engine.add_drafter(Box::new(Recorded { replies, spoiled_every, num_proposed: 0 }));
            let outcomes = if alone {
                requests.iter().map(|request| serve(&mut engine, std::slice::from_ref(request)).remove(0)).collect()
            } else {
                serve(&mut engine, &requests)
            };
            for (outcome, plain) in outcomes.iter().zip(&plain) {
                assert_eq!(bits(outcome), bits(plain), "spoiled every {spoiled_every}, alone: {alone}");
            }
            let counts = engine.stats().speculation.total();
            assert!(counts.drafted > 0);
            match spoiled_every {
                1 => assert_eq!(counts.accepted, 0),
                usize::MAX => assert_eq!(counts.rejected(), 0, "{counts:?}"),
                _ => assert!(counts.accepted > 0 && counts.rejected() > 0),
            }
        }
    }
}

#[test]
fn drafts_change_no_bit() {
    check(|| fake(OPTIONS, |_| ()));
    check(|| fake(EngineOptions { num_blocks: 60, overcommit: Overcommit::Always, ..OPTIONS }, |_| ()));
}

#[test]
fn drafts_of_an_asynchronous_device_with_digests_change_no_bit() {
    for wrong_every in [None, Some(3)] {
        check(|| {
            fake(OPTIONS, |model| {
                (model.is_asynchronous, model.digest_len, model.wrong_every) = (true, Some(8), wrong_every);
            })
        });
    }
}

#[test]
fn a_draft_model_changes_no_bit_and_the_same_model_is_always_right() {
    let requests = requests();
    for is_asynchronous in [false, true] {
        let change = |model: &mut FakeModel| {
            model.is_asynchronous = is_asynchronous;
            model.digest_len = is_asynchronous.then_some(24);
        };
        let plain: Vec<_> = serve(&mut fake(OPTIONS, change), &requests).iter().map(bits).collect();
        for fixed_draft_len in [None, Some(4)] {
            let mut engine = fake(OPTIONS, change);
            engine.set_speculation(SpeculationOptions { fixed_draft_len, ..SpeculationOptions::OFF });
            let mut draft = FakeModel::new(24, 60);
            change(&mut draft);
            engine.set_draft_model(Box::new(draft), 400).expect("a draft model");
            let outcomes: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
            assert_eq!(outcomes, plain);
            let counts = engine.stats().speculation.of(DrafterKind::DraftModel);
            assert!(counts.drafted > 20, "{counts:?}");
            assert_eq!(counts.rejected(), 0, "{counts:?}");
        }
    }
}

/// As when the embedding is on another device than the draft model.
#[test]
fn a_model_that_takes_no_kept_tokens_gets_drafts_step_by_step() {
    let requests = requests();
    let change = |model: &mut FakeModel| (model.is_asynchronous, model.digest_len) = (true, Some(24));
    let plain: Vec<_> = serve(&mut fake(OPTIONS, change), &requests).iter().map(bits).collect();
    let mut engine = fake(OPTIONS, change);
    engine.set_speculation(SpeculationOptions { fixed_draft_len: Some(4), ..SpeculationOptions::OFF });
    let slots = Arc::new(Mutex::new(FakeSlots::new(TokenSlots { num_slots: 16, num_rows: 128 })));
    let mut draft = FakeModel::new(24, 60);
    change(&mut draft);
    draft.slots = slots.clone();
    engine.set_draft_model(Box::new(draft), 400).expect("a draft model");
    let outcomes: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
    assert_eq!(outcomes, plain);
    assert!(engine.stats().speculation.of(DrafterKind::DraftModel).accepted > 20);
    assert_eq!(slots.lock().expect("no test panicked").num_fetches, 0, "a chain was launched");
}

#[test]
fn drafts_that_only_the_device_knows_change_no_bit() {
    let requests = requests();
    for (wrong_every, size) in [
        (None, TokenSlots { num_slots: 16, num_rows: 128 }),
        (Some(3), TokenSlots { num_slots: 16, num_rows: 128 }),
        // Too few slots for the draft, and too few rows for all sequences at once: some drafts are not chained.
        (Some(3), TokenSlots { num_slots: 2, num_rows: 128 }),
        (Some(5), TokenSlots { num_slots: 16, num_rows: 2 }),
    ] {
        let slots = Arc::new(Mutex::new(FakeSlots::new(size)));
        let change = |model: &mut FakeModel| {
            (model.is_asynchronous, model.digest_len, model.slots) = (true, Some(24), slots.clone());
        };
        let plain: Vec<_> = serve(&mut fake(OPTIONS, change), &requests).iter().map(bits).collect();
        for fixed_draft_len in [None, Some(4)] {
            let mut engine = fake(OPTIONS, change);
            engine.set_speculation(SpeculationOptions { fixed_draft_len, ..SpeculationOptions::OFF });
            let mut draft = FakeModel::new(24, 60);
            change(&mut draft);
            draft.wrong_every = wrong_every;
            engine.set_draft_model(Box::new(draft), 400).expect("a draft model");
            let outcomes: Vec<_> = serve(&mut engine, &requests).iter().map(bits).collect();
            assert_eq!(outcomes, plain);
            let counts = engine.stats().speculation.of(DrafterKind::DraftModel);
            assert!(counts.drafted > 20 && counts.accepted > 0, "{counts:?}");
            if size.num_slots == 16 && size.num_rows == 128 {
                assert_eq!(counts.rejected() > 0, wrong_every.is_some(), "{counts:?}");
            }
        }
        let num_fetches = slots.lock().expect("no test panicked").num_fetches;
        assert!(num_fetches > 3 || size.num_slots == 2, "{num_fetches} chains were launched with {size:?}");
    }
}
