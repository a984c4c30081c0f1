//! Proposals equal plain decoding with the draft model: with every sampler, alone and together, after drafts that were
//! accepted, accepted in part or rejected.

use pellucid_engine::{DraftModelOptions, MAX_DRAFT_LEN};
use pellucid_sampling::SamplingParams;
use pellucid_testing::FakeModel;

use crate::support::{
    CONTEXT, OPTIONS, TestSequence, VOCAB, all_params, draft_model, draft_model_of, greedy, prompt, propose,
    propose_one,
};

/// A draft model equal to the target: every draft is what the target chooses, to the end of the reply.
#[test]
fn a_draft_model_equal_to_the_target_is_always_right() {
    for digest_len in [None, Some(8), Some(2)] {
        let (mut model, _) = draft_model(OPTIONS, |fake| fake.digest_len = digest_len);
        for (id, params) in all_params().iter().enumerate() {
            let mut sequence = TestSequence::new(id as u64, 0, &prompt(5 + id % 20, id as u32), params);
            let mut num_drafted = 0;
            for round in 0..8 {
                let max_len = 1 + (round * 3 + id) % 7;
                let draft = propose_one(&mut model, &mut sequence, max_len);
                assert_eq!(draft, sequence.continuation(max_len, VOCAB), "{params:?}, round {round}");
                num_drafted += draft.len();
                // The target accepts all of it and adds one token.
                let ends = (0..=draft.len()).any(|_| sequence.decode(VOCAB).1);
                if ends {
                    break;
                }
            }
            assert!(num_drafted > 0);
            model.forget(id as u64);
        }
        assert_eq!((model.num_errors(), model.num_sequences()), (0, 0));
        assert_eq!((model.cache().num_in_use(), model.cache().num_reserved()), (0, 0));
    }
}

/// Sequences with different samplers, lengths and tenants in one call. After each call another part of the draft is
/// rejected, so that positions are overwritten. The fake model reads its tokens back from KV memory: a position that
/// was not overwritten would change the draft.
#[test]
fn drafts_follow_the_tokens_of_the_target_after_rejections() {
    for (digest_len, asynchronous, wrong_every) in
        [(None, false, None), (Some(6), false, None), (Some(6), true, None), (Some(6), true, Some(3))]
    {
        let (mut model, _) = draft_model(DraftModelOptions { num_blocks: 600, ..OPTIONS }, |fake| {
            fake.digest_len = digest_len;
            fake.is_asynchronous = asynchronous;
            fake.wrong_every = wrong_every;
        });
        let params = all_params();
        let mut sequences: Vec<TestSequence> = (0..12)
            .map(|i| {
                TestSequence::new(i, i as u32 % 3, &prompt(3 + 2 * i as usize, i as u32 % 4), &params[i as usize * 3])
            })
            .collect();
        let mut num_drafted = 0;
        for round in 0..30usize {
            let drafts = propose(&mut model, &mut sequences, 1 + round % 6);
            for (i, (sequence, draft)) in sequences.iter_mut().zip(drafts).enumerate() {
                let expected = sequence.continuation(1 + round % 6, VOCAB);
                // The prompts of the first rounds share the rows of a call.
                assert!(draft == expected || (round < 6 && draft.is_empty()), "sequence {i}, round {round}");
                num_drafted += draft.len();
                let num_accepted = (round * 5 + i * 3) % (draft.len() + 1);
                for &token in &draft[..num_accepted] {
                    sequence.push(token);
                }
                // Often another token than the drafted one.
                sequence.push(((round * 11 + i * 7) % VOCAB) as u32);
            }
        }
        assert!(num_drafted > 500, "{num_drafted} tokens were drafted");
        assert_eq!(model.num_errors(), 0);
        sequences.iter().for_each(|sequence| model.forget(sequence.id));
        assert_eq!((model.num_sequences(), model.cache().num_in_use()), (0, 0));
    }
}

#[test]
fn a_draft_ends_at_an_end_token_and_at_the_context() {
    let (mut model, _) = draft_model(OPTIONS, |_| ());
    let params = SamplingParams { temperature: 1.0, seed: 9, end_ids: (0..VOCAB as u32 / 2).collect(), ..greedy() };
    let mut num_ends = 0;
    for id in 0..20 {
        let mut sequence = TestSequence::new(id, 0, &prompt(8, id as u32), &params);
        let draft = propose_one(&mut model, &mut sequence, MAX_DRAFT_LEN);
        assert_eq!(draft, sequence.continuation(MAX_DRAFT_LEN, VOCAB));
        let is_end = |token: &u32| (*token as usize) < VOCAB / 2;
        assert!(!draft[..draft.len() - 1].iter().any(is_end), "nothing follows an end token");
        num_ends += usize::from(draft.last().is_some_and(is_end));
    }
    assert!(num_ends > 15, "{num_ends} of 20 drafts have an end token");

    // The last drafted token of a context needs no position of its own.
    let options = DraftModelOptions { chunk_len: CONTEXT, step_tokens: CONTEXT, ..OPTIONS };
    let (mut model, _) = draft_model(options, |_| ());
    for (len, expected) in [(CONTEXT - 3, 4), (CONTEXT, 1), (CONTEXT + 1, 0)] {
        let mut sequence = TestSequence::new(100 + len as u64, 0, &prompt(len, 1), &greedy());
        assert_eq!(propose_one(&mut model, &mut sequence, 10).len(), expected, "{len} tokens");
    }
    assert_eq!(model.num_errors(), 0);
}

/// The rows of two models with the same vocabulary may be padded to different lengths.
#[test]
fn padding_of_either_vocabulary_is_tolerated() {
    let params = SamplingParams { temperature: 1.0, seed: 4, ..greedy() };
    for (vocab_size, digest_len) in [(VOCAB - 4, None), (VOCAB - 4, Some(8)), (VOCAB + 6, None), (VOCAB + 6, Some(8))] {
        let fake = FakeModel::new(vocab_size, CONTEXT);
        let (mut model, _) = draft_model_of(fake, OPTIONS, |fake| fake.digest_len = digest_len);
        let mut num_drafted = 0;
        for id in 0..20 {
            let tokens: Vec<u32> = prompt(10, id as u32).iter().map(|token| token % (VOCAB as u32 - 4)).collect();
            let mut sequence = TestSequence::new(id, 0, &tokens, &params);
            let draft = propose_one(&mut model, &mut sequence, 6);
            assert!(draft.iter().all(|&token| (token as usize) < VOCAB.min(vocab_size)), "{draft:?}");
            if vocab_size < VOCAB {
                assert_eq!(draft, sequence.continuation(6, vocab_size));
            }
            num_drafted += draft.len();
        }
        assert!(num_drafted > 20, "{num_drafted}");
        assert_eq!(model.num_errors(), 0);
        // A token that the draft model does not have ends drafting for its sequence only.
        let mut sequence = TestSequence::new(50, 0, &prompt(6, 2), &params);
        sequence.push(VOCAB as u32 - 1);
        let is_known = vocab_size >= VOCAB;
        assert_eq!(propose_one(&mut model, &mut sequence, 3).is_empty(), !is_known);
        assert_eq!(model.num_errors(), u64::from(!is_known));
    }
}
