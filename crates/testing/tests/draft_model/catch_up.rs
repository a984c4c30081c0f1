//! Prompts: prefilled in parts over several calls, found in the prefix cache of their scope only, evicted when blocks
//! run out.

use pellucid_engine::kv_cache::KvCache;
use pellucid_engine::{DraftModelOptions, Scope, TenantId};

use crate::support::{OPTIONS, Steps, TestSequence, VOCAB, draft_model, greedy, prompt, propose, propose_one};

/// Returns the number of rows that were computed since the last call.
fn take_rows(steps: &Steps) -> usize {
    steps.lock().expect("no panic holds it").drain(..).sum()
}

#[test]
fn a_long_prompt_is_caught_up_over_several_calls() {
    let (mut model, steps) = draft_model(OPTIONS, |_| ());
    let mut long = TestSequence::new(1, 0, &prompt(150, 1), &greedy());
    let mut short = TestSequence::new(2, 1, &prompt(6, 2), &greedy());
    assert!(!model.is_caught_up(1, long.tokens.len()));
    let mut calls = 0;
    loop {
        calls += 1;
        let both = &mut [long.clone(), short.clone()];
        let drafts = propose(&mut model, both, 3);
        assert_eq!(drafts[1], short.continuation(3, VOCAB), "a sequence that is caught up does not wait");
        assert!(take_rows(&steps) <= OPTIONS.chunk_len + 16 + 2 * 3);
        if !drafts[0].is_empty() {
            assert_eq!(drafts[0], long.continuation(3, VOCAB));
            break;
        }
        assert_eq!(model.num_behind(1, long.tokens.len()), Some(150 - calls * OPTIONS.chunk_len));
        short.decode(VOCAB);
        long.decode(VOCAB);
        long.tokens.truncate(150);
    }
    assert_eq!(calls, 4);
    assert!(model.is_caught_up(1, long.tokens.len()));
    assert!(model.step_seconds([150, 10].into_iter()) > 0.0 && model.catch_up_seconds(0, 150) > 0.0);
    // Now both need one row for each token.
    long.history = long.sampler.history(&long.tokens);
    propose_one(&mut model, &mut long, 3);
    assert_eq!(take_rows(&steps), 3);
}

#[test]
fn without_a_draft_the_prompt_is_only_prepared() {
    let (mut model, steps) = draft_model(OPTIONS, |_| ());
    let mut sequence = TestSequence::new(1, 0, &prompt(30, 1), &greedy());
    assert!(propose_one(&mut model, &mut sequence, 0).is_empty());
    assert_eq!(take_rows(&steps), 29);
    assert!(propose_one(&mut model, &mut sequence, 0).is_empty());
    assert_eq!(take_rows(&steps), 0);
    assert_eq!(propose_one(&mut model, &mut sequence, 2), sequence.continuation(2, VOCAB));
    assert_eq!(take_rows(&steps), 2);
}

/// The control is the same tenant, whose second sequence finds the blocks.
#[test]
fn tenants_never_share_blocks_of_the_draft_model() {
    for (tenant, salt, expected) in [(0, None, 2), (1, None, 22), (0, Some("pepper"), 22)] {
        let (mut model, steps) = draft_model(OPTIONS, |_| ());
        let mut first = TestSequence::new(1, 0, &prompt(22, 1), &greedy());
        propose_one(&mut model, &mut first, 1);
        assert_eq!(take_rows(&steps), 22);
        let mut second = TestSequence::new(2, tenant, &prompt(22, 1), &greedy());
        if let Some(salt) = salt {
            second.scope = Scope::salted(second.scope.tenant, salt);
        }
        assert_eq!(propose_one(&mut model, &mut second, 1), second.continuation(1, VOCAB));
        assert_eq!(take_rows(&steps), expected, "tenant {tenant}, salt {salt:?}");
    }
}

/// Only tokens that the target chose are found later, never drafted ones.
#[test]
fn drafted_tokens_do_not_enter_the_prefix_cache() {
    let (mut model, steps) = draft_model(OPTIONS, |_| ());
    let mut sequence = TestSequence::new(1, 0, &prompt(9, 1), &greedy());
    let draft = propose_one(&mut model, &mut sequence, 12);
    assert_eq!(draft.len(), 12);
    let mut accepted = TestSequence::new(2, 0, &[&sequence.tokens[..], &draft[..]].concat(), &greedy());
    model.forget(1);
    take_rows(&steps);
    propose_one(&mut model, &mut accepted, 1);
    assert_eq!(take_rows(&steps), 21 - 8, "two blocks of the prompt are found, the drafted blocks are not");
    model.forget(2);
    let mut again = TestSequence { id: 3, ..accepted.clone() };
    propose_one(&mut model, &mut again, 1);
    assert_eq!(take_rows(&steps), 1, "control: as tokens of the target they are");
}

#[test]
fn choices_of_a_request_compute_their_prompt_once() {
    let (mut model, steps) = draft_model(OPTIONS, |_| ());
    let mut choices: Vec<TestSequence> = (0..4).map(|id| TestSequence::new(id, 0, &prompt(33, 1), &greedy())).collect();
    let drafts = propose(&mut model, &mut choices, 2);
    for (choice, draft) in choices.iter().zip(drafts) {
        assert_eq!(draft, choice.continuation(2, VOCAB));
    }
    assert_eq!(take_rows(&steps), 33 + 3 + 4);
}

#[test]
fn idle_sequences_give_their_blocks_to_others() {
    let options = DraftModelOptions { num_blocks: 20, ..OPTIONS };
    let (mut model, steps) = draft_model(options, |_| ());
    // Each holds 8 blocks.
    let mut sequences: Vec<TestSequence> =
        (0..3).map(|id| TestSequence::new(id, id as u32, &prompt(30, id as u32), &greedy())).collect();
    for sequence in &mut sequences {
        assert_eq!(propose_one(&mut model, sequence, 2), sequence.continuation(2, VOCAB));
    }
    assert_eq!(model.num_sequences(), 2, "the first was evicted");
    assert!(!model.is_caught_up(0, 30) && model.is_caught_up(1, 30));
    take_rows(&steps);

    // All three at once do not fit. One has no draft, the others do, and that stays so.
    for _ in 0..5 {
        let drafts = propose(&mut model, &mut sequences, 2);
        let num_empty = drafts.iter().filter(|draft| draft.is_empty()).count();
        assert_eq!(num_empty, 1, "{drafts:?}");
        for (sequence, draft) in sequences.iter().zip(&drafts).filter(|(_, draft)| !draft.is_empty()) {
            assert_eq!(*draft, sequence.continuation(2, VOCAB));
        }
        for sequence in &mut sequences {
            sequence.decode(VOCAB);
        }
    }
    assert!(take_rows(&steps) < 5 * 2 * 4, "no prompt was computed again and again");
    assert_eq!(model.num_errors(), 0);
}

/// Quotas of the target's cache hold in proportion, and its shared prefixes are shared here too.
#[test]
fn settings_of_the_cache_are_those_of_the_target() {
    let (mut model, steps) = draft_model(OPTIONS, |_| ());
    let mut target = KvCache::new(100, 4, [0; 32]);
    target.set_quota(TenantId(7), 3);
    target.share_prefix(prompt(12, 1));
    model.follow_settings(&target);
    assert_eq!(model.cache().quota(TenantId(7)), Some(6));
    let mut small = TestSequence::new(1, 7, &prompt(20, 2), &greedy());
    let mut large = TestSequence::new(2, 7, &prompt(26, 2), &greedy());
    assert_eq!(propose_one(&mut model, &mut large, 1), [0u32; 0], "7 blocks are above the quota");
    assert_eq!(propose_one(&mut model, &mut small, 1).len(), 1);
    take_rows(&steps);
    propose_one(&mut model, &mut TestSequence::new(3, 1, &prompt(20, 1), &greedy()), 1);
    propose_one(&mut model, &mut TestSequence::new(4, 2, &prompt(20, 1), &greedy()), 1);
    assert_eq!(take_rows(&steps), 20 + 8, "the second tenant finds the shared prefix and no more");
}
