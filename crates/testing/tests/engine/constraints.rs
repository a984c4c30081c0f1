//! Requests with a constraint: masks are applied where the constraint excludes tokens, and free text needs none.

use std::sync::Arc;

use pellucid_engine::{Engine, Request};
use pellucid_sampling::{SamplingParams, StepKind};
use pellucid_selftest::Outcome;
use pellucid_testing::{Automaton, FakeModel};

use crate::support::{OPTIONS, bits, fake, serve};

const END: u32 = 23;

/// Free text until token 7; then 3 and one of 4 and 5, and free text again.
fn call() -> Automaton {
    Automaton::new(&[END]).free(&[(7, 1)]).state(&[(3, 2)]).state(&[(4, 0), (5, 0)])
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
