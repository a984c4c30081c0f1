//! Speculation: an engine with drafters, honest or hostile, gives the same replies as one without, to the bit.

pub mod drafters;

use std::sync::Arc;

use pellucid_engine::{DraftCounts, Engine, EngineOptions, Overcommit, Request, SpeculationOptions, TokenEvent};
use pellucid_model::{BLOCK_LEN, Model};
use pellucid_sampling::SamplingParams;
use pellucid_tensor::{Backend, DType};

use crate::{EventCollector, Outcome};
use drafters::{ConstantDrafter, EdgeDrafter, HonestDrafter, RandomDrafter, Recording, SecondBestDrafter};

const OPTIONS: EngineOptions = EngineOptions {
    num_blocks: 96,
    block_len: BLOCK_LEN,
    kv_dtype: DType::F32,
    max_sequences: 6,
    step_tokens: 96,
    chunk_len: 32,
    max_waiting: 100,
    overcommit: Overcommit::Never,
    secret: [6; 32],
    snapshot_distance: None,
};

/// A choice of a reply: its tokens, the last one possibly a token that ended it, and the text of its finish reason.
pub type ComparableChoice = (Vec<ComparableToken>, String);
/// A token, the bits of its log probabilities, and the text of its trace, which has every number in full.
pub type ComparableToken = (u32, Vec<u32>, String);

/// Returns everything about a reply that must be equal with and without drafts.
pub fn comparable(outcome: &Outcome) -> Vec<ComparableChoice> {
    assert_eq!(outcome.error, None);
    let token = |event: &TokenEvent| {
        let logprobs = event.logprobs.iter().flat_map(|logprobs| {
            let top = logprobs.top.iter().flat_map(|&(id, logprob)| [id, logprob.to_bits()]);
            std::iter::once(logprobs.chosen.to_bits()).chain(top)
        });
        let trace = event.trace.as_ref().map_or(String::new(), |trace| format!("{trace:?}"));
        (event.id, logprobs.collect(), trace)
    };
    let choices = outcome.events.iter().zip(&outcome.finish);
    choices.map(|(events, finish)| (events.iter().map(token).collect(), format!("{finish:?}"))).collect()
}

/// Requests at temperatures 0, 0.7 and 1.5, with penalties, DRY, mirostat, stop ids and several choices.
fn requests(vocab_size: usize) -> Vec<Request> {
    let token = |i: usize| (i * 31 % vocab_size) as u32;
    let request = |i: usize| {
        let sampling = SamplingParams {
            seed: i as u64,
            temperature: [0.0, 0.7, 1.5][i % 3],
            top_k: [0, 20][i % 2],
            top_p: if i % 5 == 4 { 0.9 } else { 1.0 },
            repetition_penalty: if i % 4 == 3 { 1.2 } else { 1.0 },
            dry_multiplier: if i == 6 { 0.8 } else { 0.0 },
            stop_ids: if i % 7 == 5 { (0..6).map(|k| token(i + k)).collect() } else { Vec::new() },
            logprobs: Some(2),
            ..SamplingParams::default()
        };
        let sampling = if i == 8 {
            SamplingParams { top_k: 0, top_p: 1.0, mirostat_tau: Some(4.0), ..sampling }
        } else {
            sampling
        };
        let num_choices = if i == 4 { 2 } else { 1 };
        // A prompt that repeats itself, for the n-gram drafter.
        let prompt = (0..4 + 9 * (i % 4)).map(|k| token(i + k % 5)).collect();
        let max_tokens = Some(6 + 5 * (i % 5));
        Request { max_tokens, num_choices, best_of: num_choices, ..Request::new(prompt, sampling) }
    };
    (0..12).map(request).collect()
}

/// Serves the requests, which arrive in small groups, and returns the outcomes and the counts of drafts.
fn serve(mut engine: Engine, requests: &[Request]) -> (Vec<Outcome>, DraftCounts) {
    let mut all: Vec<EventCollector> = Vec::new();
    for (i, request) in requests.iter().enumerate() {
        let collected = EventCollector::default();
        engine.submit(request.clone(), Box::new(collected.clone())).expect("a request that can be served");
        all.push(collected);
        for _ in 0..3 * (i % 3) {
            engine.step();
        }
    }
    while engine.step() {
        engine.audit().expect("consistent accounts of blocks");
    }
    (all.iter().map(EventCollector::outcome).collect(), engine.stats().speculation.total())
}

/// Checks that drafts change no reply. `load` loads the model, once for every engine; the same model also serves as its
/// own draft model.
pub fn drafts_change_no_reply(load: &dyn Fn() -> Box<dyn Model>, backend: &Arc<dyn Backend>) {
    let engine = || Engine::new(load(), backend.clone(), OPTIONS).expect("memory for a small model");
    let first = engine();
    let vocab_size = first.model().config().vocab_size;
    let requests = requests(vocab_size);
    let (plain, counts) = serve(first, &requests);
    assert_eq!(counts.drafted, 0, "an engine without drafters does not speculate");
    let expected: Vec<Vec<ComparableChoice>> = plain.iter().map(comparable).collect();
    let recording = Recording::of(requests.iter().zip(&plain));

    let run = |name: &str, max_draft_len: usize, prepare: &dyn Fn(&mut Engine)| {
        let mut engine = engine();
        engine.set_speculation(SpeculationOptions { fixed_draft_len: Some(max_draft_len), ..SpeculationOptions::OFF });
        prepare(&mut engine);
        let (found, counts) = serve(engine, &requests);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            let found = comparable(found);
            assert!(found == *expected, "{name}, request {i}: {found:?}, expected {expected:?}");
        }
        assert!(counts.drafted > 0, "{name}: nothing was drafted");
        counts
    };
    for max_draft_len in [1, 4, 15] {
        let honest = || Box::new(HonestDrafter::new(recording.clone(), None, vocab_size));
        let counts = run("an honest drafter", max_draft_len, &|engine| engine.add_drafter(honest()));
        assert!(2 * counts.accepted > counts.drafted, "an honest drafter of {max_draft_len}: {counts:?}");
    }
    run("a drafter with errors", 5, &|engine| {
        engine.add_drafter(Box::new(HonestDrafter::new(recording.clone(), Some(3), vocab_size)));
    });
    run("a random drafter", 7, &|engine| engine.add_drafter(Box::new(RandomDrafter::new(1, vocab_size))));
    run("a drafter of one token", 3, &|engine| engine.add_drafter(Box::new(ConstantDrafter(1))));
    run("a drafter of second best tokens", 4, &|engine| {
        engine.add_drafter(Box::new(SecondBestDrafter(recording.clone())));
    });
    run("a drafter of invalid ids", 6, &|engine| {
        engine.add_drafter(Box::new(EdgeDrafter { vocab_size, num_calls: 0 }));
    });
    let counts = run("the model as its own draft model", 4, &|engine| {
        engine.set_draft_model(load(), OPTIONS.num_blocks).expect("memory for a small model");
    });
    assert!(2 * counts.accepted > counts.drafted, "the model as its own draft model: {counts:?}");

    // The positive control: if drafts were not checked, the comparison would notice.
    let mut unchecked = engine();
    unchecked.set_speculation(SpeculationOptions { fixed_draft_len: Some(4), ..SpeculationOptions::OFF });
    unchecked.add_drafter(Box::new(RandomDrafter::new(1, vocab_size)));
    unchecked.trust_drafts();
    let (found, _) = serve(unchecked, &requests);
    let num_equal = found.iter().zip(&expected).filter(|&(found, expected)| comparable(found) == *expected).count();
    assert!(num_equal < requests.len() / 2, "{num_equal} replies are right though random drafts were not checked");
}

/// Checks that the layer with which a model predicts further tokens changes no reply. `load` loads the model with it.
pub fn predictor_changes_no_reply(load: &dyn Fn() -> Box<dyn Model>, backend: &Arc<dyn Backend>) {
    // Little memory: requests are preempted, and find their prefixes.
    let few_blocks = EngineOptions {
        num_blocks: 24,
        overcommit: Overcommit::Unbounded { growth: 4 },
        kv_dtype: DType::F16,
        ..OPTIONS
    };
    for options in [OPTIONS, few_blocks] {
        let engine = || Engine::new(load(), backend.clone(), options).expect("memory for a small model");
        let first = engine();
        let requests = requests(first.model().config().vocab_size);
        let (plain, _) = serve(first, &requests);
        for fixed_draft_len in [Some(1), Some(4), None] {
            let mut engine = engine();
            engine.set_speculation(SpeculationOptions { mtp: true, fixed_draft_len, ..SpeculationOptions::OFF });
            let (found, counts) = serve(engine, &requests);
            for (i, (found, expected)) in found.iter().zip(&plain).enumerate() {
                let (found, expected) = (comparable(found), comparable(expected));
                assert!(found == expected, "drafts of {fixed_draft_len:?}, request {i}: {found:?}, not {expected:?}");
            }
            assert!(fixed_draft_len.is_none() || counts.drafted > 50, "drafts of {fixed_draft_len:?}: {counts:?}");
        }
    }
}
