//! Chained drafts: steps of a draft model take their tokens from each other on the device, and a step of another model
//! takes all of them, before the host knows one. They must be the tokens and the digests of steps that are launched one
//! by one.

use std::sync::Arc;

use pellucid_model::{BLOCK_LEN, Batch, Chunk, ChunkIds, ChunkState, Logits, Model};
use pellucid_tensor::{Backend, RowDigest, RowQuery, TokenSource};

use crate::{Golden, Runner};

/// Tokens that are drafted in each round for each of the sequences.
const DRAFT_LEN: usize = 4;
const NUM_SEQUENCES: usize = 3;

/// Blocks of a sequence in the KV memory of each model.
const NUM_BLOCKS: usize = 2;

fn blocks(sequence: usize) -> Vec<u32> {
    (0..NUM_BLOCKS).map(|block| (sequence * NUM_BLOCKS + NUM_BLOCKS - 1 - block) as u32).collect()
}

fn query(sequence: usize, position: usize) -> RowQuery {
    let race = Some((40 + sequence as u64, position as u32)).filter(|_| sequence > 0);
    RowQuery { temperature: if sequence > 0 { 0.8 } else { 1.0 }, race, shortlist: None }
}

/// Adds a chunk of a sequence, of which the rows from `first_wanted` on have digests.
fn push(batch: &mut Batch, sequence: usize, position: usize, ids: &[TokenSource], first_wanted: usize) {
    let queries: Vec<RowQuery> = (first_wanted..ids.len()).map(|row| query(sequence, position + row + 1)).collect();
    let chunk = Chunk {
        ids: ChunkIds::Sources(ids),
        first_position: position,
        blocks: &blocks(sequence),
        wanted: first_wanted..ids.len(),
        queries: &queries,
        state: ChunkState::default(),
    };
    batch.push(chunk, BLOCK_LEN);
}

fn forward(runner: &mut Runner, batch: &Batch) -> Vec<RowDigest> {
    let mut logits = Logits::default();
    runner.model.forward(batch, &mut runner.kv, &mut logits).expect("the batch is valid");
    logits.digests_mut().to_vec()
}

/// Drafts a round one step at a time. Returns the drafted tokens of each sequence.
fn one_by_one(draft: &mut Runner, tokens: &[Vec<u32>], num_new: usize) -> Vec<Vec<u32>> {
    let mut drafted = vec![Vec::new(); NUM_SEQUENCES];
    for step in 0..DRAFT_LEN {
        let mut batch = Batch::default();
        for (sequence, (tokens, drafted)) in tokens.iter().zip(&drafted).enumerate() {
            let new = if step == 0 { &tokens[tokens.len() - num_new..] } else { &drafted[step - 1..] };
            let ids: Vec<TokenSource> = new.iter().map(|&token| TokenSource::Token(token)).collect();
            let position = tokens.len() + drafted.len() - ids.len();
            push(&mut batch, sequence, position, &ids, ids.len() - 1);
        }
        for (drafted, digest) in drafted.iter_mut().zip(forward(draft, &batch)) {
            drafted.push(digest.assumed.unwrap_or(0));
        }
    }
    drafted
}

/// Drafts and verifies a round without waiting. Returns the drafted tokens, and the digests of the target.
fn chained(
    (draft, target): (&mut Runner, &mut Runner),
    tokens: &[Vec<u32>],
    num_new: usize,
) -> (Vec<Vec<u32>>, Vec<RowDigest>) {
    for step in 0..DRAFT_LEN {
        let mut batch = Batch::default();
        for (sequence, tokens) in tokens.iter().enumerate() {
            let new = tokens[tokens.len() - num_new..].iter().map(|&token| TokenSource::Token(token));
            let ids = if step == 0 { new.collect() } else { vec![TokenSource::Assumed { row: sequence as u32 }] };
            push(&mut batch, sequence, tokens.len() + step - ids.len(), &ids, ids.len() - 1);
        }
        draft.model.launch_draft(&batch, &mut draft.kv, step).expect("a step of the draft model");
    }
    target.model.fetch_drafts(DRAFT_LEN).expect("tokens that were kept");
    let mut batch = Batch::default();
    for (sequence, tokens) in tokens.iter().enumerate() {
        let kept = |slot: usize| TokenSource::Kept { slot: slot as u32, row: sequence as u32 };
        let last = TokenSource::Token(*tokens.last().expect("a prompt"));
        let ids: Vec<TokenSource> = [last].into_iter().chain((0..DRAFT_LEN).map(kept)).collect();
        push(&mut batch, sequence, tokens.len() - 1, &ids, 0);
    }
    let digests = forward(target, &batch);
    let mut slots = Vec::new();
    target.model.read_drafts(&mut slots).expect("tokens that were fetched");
    let num_rows = target.model.token_slots().num_rows;
    let token = |sequence: usize, slot: usize| slots[slot * num_rows + sequence];
    let drafted = (0..NUM_SEQUENCES).map(|sequence| (0..DRAFT_LEN).map(|slot| token(sequence, slot)).collect());
    (drafted.collect(), digests)
}

/// Checks several rounds, so that recorded steps are replayed too: some with one new token, some with two.
pub(crate) fn chained_drafts_equal_single_steps(backend: &Arc<dyn Backend>, draft: &Golden, target: &Golden) {
    let num_blocks = NUM_SEQUENCES * NUM_BLOCKS;
    let load = |golden: &Golden| Runner::load(&golden.folder, backend.clone(), None, num_blocks);
    let [mut draft, mut single_draft] = [load(draft), load(draft)];
    let [mut target, mut single_target] = [load(target), load(target)];
    let vocab_size = draft.model.config().vocab_size.min(target.model.config().vocab_size) as u32;
    let prompt = |sequence: u32| (0..5 + sequence).map(|i| (i * 7 + sequence) % vocab_size).collect();
    let mut tokens: Vec<Vec<u32>> = (0..NUM_SEQUENCES as u32).map(prompt).collect();
    for runner in [&mut draft, &mut single_draft, &mut target, &mut single_target] {
        let mut batch = Batch::default();
        for (sequence, tokens) in tokens.iter().enumerate() {
            let ids: Vec<TokenSource> = tokens.iter().map(|&token| TokenSource::Token(token)).collect();
            push(&mut batch, sequence, 0, &ids, ids.len() - 1);
        }
        forward(runner, &batch);
    }
    for round in 0..12 {
        let num_new = 1 + round % 2;
        let new = |sequence: usize, i: usize| (round * 11 + sequence * 5 + i * 3) as u32 % vocab_size;
        for (sequence, tokens) in tokens.iter_mut().enumerate() {
            tokens.extend((0..num_new).map(|i| new(sequence, i)));
        }
        // Of two new tokens the target computes only the second; at the first it keeps what the round before stored,
        // which is equal if that round was.
        let expected = one_by_one(&mut single_draft, &tokens, num_new);
        let mut batch = Batch::default();
        for (sequence, (tokens, drafted)) in tokens.iter().zip(&expected).enumerate() {
            let rows = tokens.last().into_iter().chain(drafted);
            let ids: Vec<TokenSource> = rows.map(|&token| TokenSource::Token(token)).collect();
            push(&mut batch, sequence, tokens.len() - 1, &ids, 0);
        }
        let digests = forward(&mut single_target, &batch);
        let (found, found_digests) = chained((&mut draft, &mut target), &tokens, num_new);
        assert_eq!(found, expected, "drafted tokens of round {round}");
        assert!(found_digests == digests, "round {round}: the model that verifies has other digests");
    }
}
