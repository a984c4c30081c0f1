//! Draft models that fail: NaN logits, panics, lost devices. The failing sequence has no draft; the others do.

use pellucid_engine::{DraftModelOptions, Error};

use crate::support::{OPTIONS, TestSequence, VOCAB, draft_model, greedy, prompt, propose, propose_one};

fn with_token(id: u64, token: u32) -> TestSequence {
    let mut tokens = prompt(9, id as u32);
    tokens.iter_mut().filter(|other| **other == 23).for_each(|other| *other = 0);
    tokens[3] = token;
    TestSequence::new(id, id as u32, &tokens, &greedy())
}

#[test]
fn nan_logits_end_the_drafts_of_their_sequence_only() {
    for digest_len in [None, Some(4)] {
        let (mut model, _) = draft_model(OPTIONS, |fake| {
            (fake.poison, fake.digest_len) = (Some(23), digest_len);
        });
        let mut sequences = vec![with_token(0, 1), with_token(1, 23), with_token(2, 2)];
        for call in 0..3 {
            let drafts = propose(&mut model, &mut sequences, 1);
            assert_eq!(drafts[1], [0u32; 0]);
            assert_eq!(drafts[0], sequences[0].continuation(1, VOCAB));
            assert_eq!(drafts[2], sequences[2].continuation(1, VOCAB));
            assert_eq!(model.take_error().is_some(), call == 0, "it is reported once");
            assert_eq!(model.num_errors(), 1);
        }
        assert_eq!(model.num_behind(1, 9), None);
        assert!(!model.is_disabled());
        (0..3).for_each(|id| model.forget(id));
        assert_eq!((model.cache().num_in_use(), model.num_sequences()), (0, 0));
        assert!(model.num_behind(1, 9).is_some(), "a sequence that was forgotten has a new chance");
    }
}

#[test]
fn a_panic_ends_the_drafts_of_its_step() {
    let (mut model, _) = draft_model(OPTIONS, |fake| fake.bomb = Some(23));
    let mut sequences = vec![with_token(0, 1), with_token(1, 23)];
    assert_eq!(propose(&mut model, &mut sequences, 2), [[0u32; 0]; 2]);
    assert!(matches!(model.take_error(), Some(Error::Internal(text)) if text.contains("bomb")));
    assert_eq!((model.cache().num_in_use(), model.num_sequences()), (0, 0));
    let mut later = with_token(2, 2);
    assert_eq!(propose_one(&mut model, &mut later, 1), later.continuation(1, VOCAB), "later sequences are served");
}

#[test]
fn a_model_that_always_panics_is_not_called_again() {
    let (mut model, steps) = draft_model(OPTIONS, |fake| fake.bomb = Some(23));
    for id in 0..20 {
        assert_eq!(propose_one(&mut model, &mut with_token(id, 23), 2), [0u32; 0]);
    }
    assert!(model.is_disabled());
    assert_eq!(steps.lock().expect("no panic holds it").len(), 8);
    assert_eq!(propose_one(&mut model, &mut with_token(21, 1), 2), [0u32; 0]);
    assert_eq!((model.num_errors(), model.num_behind(21, 9)), (8, None));
}

#[test]
fn a_lost_device_disables_the_draft_model_and_a_full_one_does_not() {
    let (mut model, _) = draft_model(OPTIONS, |fake| fake.lost_at = Some(2));
    let mut sequence = with_token(0, 1);
    let expected = sequence.continuation(5, VOCAB);
    assert_eq!(propose_one(&mut model, &mut sequence, 5), expected[..2], "what was drafted before holds");
    assert!(model.is_disabled() && matches!(model.take_error(), Some(Error::DeviceLost(_))));
    assert_eq!(model.cache().num_in_use(), 0);

    let (mut model, _) = draft_model(OPTIONS, |fake| fake.fails_at = Some(0));
    assert_eq!(propose_one(&mut model, &mut with_token(0, 1), 5), [0u32; 0]);
    assert!(!model.is_disabled() && matches!(model.take_error(), Some(Error::OutOfMemory(_))));
    let mut next = with_token(1, 1);
    assert_eq!(propose_one(&mut model, &mut next, 5), next.continuation(5, VOCAB));
}

#[test]
fn too_few_blocks_shorten_or_empty_the_draft() {
    for (num_blocks, expected) in [(0, 0), (2, 0), (3, 4), (4, 8)] {
        let (mut model, _) = draft_model(DraftModelOptions { num_blocks, ..OPTIONS }, |_| ());
        let mut sequence = with_token(0, 1);
        let draft = propose_one(&mut model, &mut sequence, 3);
        assert_eq!(draft.is_empty(), expected == 0, "{num_blocks} blocks");
        // The first call reserved what it needed. A longer draft takes what there is.
        let draft = propose_one(&mut model, &mut sequence, 14);
        assert_eq!(draft.len(), expected, "{num_blocks} blocks");
        assert_eq!(draft, sequence.continuation(expected, VOCAB));
        assert_eq!(model.num_errors(), 0);
    }
}

/// A sequence whose id was used before for other tokens, or for another tenant, starts anew.
#[test]
fn an_id_that_is_used_again_gets_no_stale_block() {
    let (mut model, _) = draft_model(OPTIONS, |_| ());
    for kind in 0..12u32 {
        let mut tokens = prompt(20, kind);
        tokens[..10].copy_from_slice(&prompt(10, 0));
        let mut sequence = TestSequence::new(1, kind % 2, &tokens, &greedy());
        assert_eq!(propose_one(&mut model, &mut sequence, 4), sequence.continuation(4, VOCAB), "kind {kind}");
    }
}
