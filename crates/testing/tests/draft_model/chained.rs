//! Drafts that are chained on the device: the same tokens as one step after another, whatever was rejected before.

use pellucid_engine::{DraftModel, DraftModelOptions, SystemClock, WantedDraft};
use pellucid_sampling::SamplingParams;
use pellucid_tensor::TokenSlots;
use pellucid_testing::{FakeModel, FakeSlots};

use crate::support::{CONTEXT, OPTIONS, TestSequence, VOCAB, greedy, prompt, propose};

fn chained_model(options: DraftModelOptions, change: impl FnOnce(&mut FakeModel)) -> DraftModel {
    let mut fake = FakeModel::new(VOCAB, CONTEXT);
    fake.digest_len = Some(VOCAB);
    fake.is_asynchronous = true;
    *fake.slots.lock().expect("no panic holds it") = FakeSlots::new(TokenSlots { num_slots: 8, num_rows: 16 });
    change(&mut fake);
    let backend = fake.backend();
    DraftModel::new(Box::new(fake), backend, options).expect("a draft model")
}

fn params(i: u64) -> SamplingParams {
    let temperature = [0.0, 0.7, 1.5][i as usize % 3];
    let top_k = [0, 6, 0][i as usize / 3 % 3];
    SamplingParams { temperature, top_k, seed: i, ..greedy() }
}

/// Launches and finishes a chain; `None` if there is none.
fn chain(model: &mut DraftModel, sequences: &mut [TestSequence], max_len: usize) -> Option<Vec<Vec<u32>>> {
    let wanted: Vec<WantedDraft<'_>> =
        sequences.iter_mut().enumerate().map(|(i, sequence)| sequence.wanted(1 + (max_len + i) % 6)).collect();
    let chained = model.launch_chain(&wanted)?;
    let by_row = model.finish_chain(&SystemClock, std::time::Instant::now()).expect("the drafted tokens");
    model.audit().expect("consistent accounts of blocks");
    Some(chained.iter().map(|draft| by_row[draft.row][..draft.len].to_vec()).collect())
}

#[test]
fn chained_drafts_are_those_of_single_steps() {
    let mut model = chained_model(DraftModelOptions { num_blocks: 600, ..OPTIONS }, |_| ());
    let new = |i: u64| TestSequence::new(i, i as u32 % 3, &prompt(3 + 2 * i as usize, i as u32 % 4), &params(i));
    let mut sequences: Vec<TestSequence> = (0..9).map(new).collect();
    // Prompts are computed without a chain.
    assert!(chain(&mut model, &mut sequences, 3).is_none());
    while propose(&mut model, &mut sequences, 1).iter().any(Vec::is_empty) {}
    for round in 0..30usize {
        let drafts = chain(&mut model, &mut sequences, round).expect("all are caught up");
        for (i, (sequence, draft)) in sequences.iter_mut().zip(drafts).enumerate() {
            assert_eq!(draft, sequence.continuation(1 + (round + i) % 6, VOCAB), "sequence {i}, round {round}");
            let num_accepted = (round * 5 + i * 3) % (draft.len() + 1);
            draft[..num_accepted].iter().for_each(|&token| sequence.push(token));
            sequence.push(((round * 11 + i * 7) % VOCAB) as u32);
        }
    }
    assert!(model.step_seconds([100].into_iter()) > 0.0);
    assert_eq!(model.num_errors(), 0);
    (0..9).for_each(|id| model.forget(id));
    assert_eq!((model.num_sequences(), model.cache().num_in_use()), (0, 0));
}

/// A wrong assumption makes a draft wrong and nothing else: the next one follows the tokens of the target again.
#[test]
fn wrong_assumptions_do_not_last() {
    let mut model = chained_model(OPTIONS, |fake| fake.wrong_every = Some(7));
    let mut sequences = vec![TestSequence::new(0, 0, &prompt(9, 1), &params(1))];
    propose(&mut model, &mut sequences, 1);
    let mut num_right = 0;
    for round in 0..40 {
        let draft = chain(&mut model, &mut sequences, round).expect("a chain").remove(0);
        num_right += usize::from(draft == sequences[0].continuation(draft.len(), VOCAB));
        sequences[0].decode(VOCAB);
    }
    assert!((10..40).contains(&num_right), "{num_right} of 40 drafts were right");
}

#[test]
fn what_cannot_be_chained_is_not() {
    let mut model = chained_model(OPTIONS, |_| ());
    let penalised = SamplingParams { repetition_penalty: 1.3, ..params(1) };
    let mut sequences =
        vec![TestSequence::new(0, 0, &prompt(9, 1), &params(1)), TestSequence::new(1, 0, &prompt(9, 2), &penalised)];
    propose(&mut model, &mut sequences, 1);
    assert!(chain(&mut model, &mut sequences[..1], 3).is_some());
    assert!(chain(&mut model, &mut sequences, 3).is_none(), "a penalty needs whole rows");
    let drafts = propose(&mut model, &mut sequences, 3);
    for (sequence, draft) in sequences.iter().zip(drafts) {
        assert_eq!(draft, sequence.continuation(3, VOCAB));
    }
}

#[test]
fn a_chain_that_fails_ends_the_drafts_of_its_sequences() {
    let mut model = chained_model(OPTIONS, |fake| fake.bomb = Some(23));
    let mut sequences = [TestSequence::new(0, 0, &[1, 2, 3], &params(1)), TestSequence::new(1, 0, &[4, 5], &params(2))];
    propose(&mut model, &mut sequences[..1], 1);
    sequences[0].push(23);
    assert!(chain(&mut model, &mut sequences[..1], 3).is_none());
    assert!(model.take_error().is_some());
    assert_eq!((model.num_behind(0, 4), model.num_sequences(), model.cache().num_in_use()), (None, 0, 0));
    assert!(model.num_behind(1, 2).is_some());
}
