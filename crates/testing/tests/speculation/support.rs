//! Engines, requests and drafters for the tests of this folder.

use std::sync::{Arc, Mutex};

use pellucid_engine::{
    DraftCounts, Drafter, Engine, EngineOptions, MAX_DRAFT_LEN, Overcommit, Request, SpeculationOptions,
};
use pellucid_model::{Batch, DecoderConfig, Error, KvMemory, Logits, Model};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::suites::speculation::drafters::{
    ConstantDrafter, EdgeDrafter, HonestDrafter, RandomDrafter, Recording, SecondBestDrafter,
};
use pellucid_selftest::suites::speculation::{ComparableChoice, comparable};
use pellucid_selftest::{EventCollector, Outcome};
use pellucid_tensor::{Backend, DType};
use pellucid_testing::FakeModel;

pub(crate) const OPTIONS: EngineOptions = EngineOptions {
    num_blocks: 600,
    block_len: 4,
    kv_dtype: DType::F32,
    max_sequences: 16,
    step_tokens: 128,
    chunk_len: 16,
    max_waiting: 1000,
    overcommit: Overcommit::Never,
    secret: [3; 32],
    snapshot_distance: None,
};

/// Size of the fake model's vocabulary, and its context.
pub(crate) const VOCAB: usize = 24;
pub(crate) const CONTEXT: usize = 60;

/// A model that several engines use, one after the other.
pub(crate) struct SharedModel(DecoderConfig, Arc<Mutex<dyn Model>>);

impl SharedModel {
    pub(crate) fn new(model: impl Model + 'static) -> SharedModel {
        SharedModel(model.config().clone(), Arc::new(Mutex::new(model)))
    }

    pub(crate) fn share(&self) -> Box<dyn Model> {
        Box::new(SharedModel(self.0.clone(), self.1.clone()))
    }
}

impl Model for SharedModel {
    fn config(&self) -> &DecoderConfig {
        &self.0
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.1.lock().expect("one engine at a time").forward(batch, kv, logits)
    }

    fn predict(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.1.lock().expect("one engine at a time").predict(batch, kv, logits)
    }
}

/// Returns an engine with a fake model.
pub(crate) fn fake(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    let mut model = FakeModel::new(VOCAB, CONTEXT);
    change(&mut model);
    let backend: Arc<dyn Backend> = model.backend();
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

/// Steps until all requests have ended, and audits the engine after each step.
pub(crate) fn finish(engine: &mut Engine) {
    while engine.step() {
        engine.audit().expect("consistent accounts of blocks");
    }
}

/// Submits requests and runs them to the end.
pub(crate) fn serve(engine: &mut Engine, requests: &[Request]) -> Vec<Outcome> {
    let collected: Vec<EventCollector> = requests.iter().map(|request| submit(engine, request)).collect();
    finish(engine);
    collected.iter().map(EventCollector::outcome).collect()
}

pub(crate) fn submit(engine: &mut Engine, request: &Request) -> EventCollector {
    let collected = EventCollector::default();
    engine.submit(request.clone(), Box::new(collected.clone())).expect("an accepted request");
    collected
}

/// The part of an outcome that must not depend on drafts.
pub(crate) type Reply = (Vec<ComparableChoice>, usize, usize);

pub(crate) fn reply(outcome: &Outcome) -> Reply {
    let stats = outcome.stats.expect("a request that has ended");
    (comparable(outcome), stats.prompt_tokens, stats.output_tokens)
}

pub(crate) fn replies(outcomes: &[Outcome]) -> Vec<Reply> {
    outcomes.iter().map(reply).collect()
}

pub(crate) fn request(prompt: Vec<u32>, seed: u64) -> Request {
    let temperature = [0.0, 0.7, 1.5][seed as usize % 3];
    let sampling = SamplingParams { temperature, seed, logprobs: Some(2), ..SamplingParams::default() };
    Request { max_tokens: Some(14), ..Request::new(prompt, sampling) }
}

/// Returns prompts that share prefixes, so that the prefix cache has hits; `round` gives others.
pub(crate) fn prompts(count: usize, vocab: u32, round: u32) -> Vec<Vec<u32>> {
    let token = |i: u32, j: u32| (j * 7 + (i % 5) * 11 + j * (i % 3) + round * 13 * (1 + j % 3)) % vocab;
    (0..count as u32).map(|i| (0..5 + (i + round) % 29).map(|j| token(i, j)).collect()).collect()
}

/// Sets that an engine drafts up to `len` tokens in every step, with the drafters that are added to it.
pub(crate) fn fixed(len: usize) -> SpeculationOptions {
    SpeculationOptions { fixed_draft_len: Some(len), ..SpeculationOptions::OFF }
}

/// A way to draft, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Drafting {
    Honest,
    WithErrors,
    Random,
    Constant,
    SecondBest,
    Edge,
    /// Lookup in prompt, output and recent output of the tenant.
    Lookup,
    /// An honest drafter, one with errors and lookup together; lengths are chosen by the engine.
    Everything,
}

impl Drafting {
    pub(crate) const ALL: [Drafting; 8] = [
        Drafting::Honest,
        Drafting::WithErrors,
        Drafting::Random,
        Drafting::Constant,
        Drafting::SecondBest,
        Drafting::Edge,
        Drafting::Lookup,
        Drafting::Everything,
    ];

    /// Adds the drafters to an engine, with drafts of up to `len` tokens.
    pub(crate) fn prepare(self, engine: &mut Engine, recording: &Recording, len: usize) {
        let vocab_size = engine.model().config().vocab_size;
        let honest = |error_every| Box::new(HonestDrafter::new(recording.clone(), error_every, vocab_size));
        let drafter: Box<dyn Drafter> = match self {
            Drafting::Honest => honest(None),
            Drafting::WithErrors => honest(Some(3)),
            Drafting::Random => Box::new(RandomDrafter::new(len as u64, vocab_size)),
            Drafting::Constant => Box::new(ConstantDrafter(1)),
            Drafting::SecondBest => Box::new(SecondBestDrafter(recording.clone())),
            Drafting::Edge => Box::new(EdgeDrafter { vocab_size, num_calls: 0 }),
            Drafting::Lookup => {
                engine.set_speculation(SpeculationOptions { ngram: true, suffix: true, ..fixed(len) });
                return;
            }
            Drafting::Everything => {
                let fixed_draft_len = None;
                let max_draft_len = MAX_DRAFT_LEN;
                engine.set_speculation(SpeculationOptions {
                    ngram: true,
                    suffix: true,
                    mtp: true,
                    max_draft_len,
                    fixed_draft_len,
                });
                engine.add_drafter(honest(Some(5)));
                engine.add_drafter(honest(None));
                return;
            }
        };
        engine.set_speculation(fixed(len));
        engine.add_drafter(drafter);
    }

    /// Whether the drafter proposes whatever the sequence is.
    pub(crate) fn always_drafts(self) -> bool {
        !matches!(self, Drafting::Lookup | Drafting::Everything)
    }
}

/// Serves requests with and without drafts on engines that `engine` creates, compares the replies, and returns the
/// counts of drafts. The positive control runs with random drafts that are not checked.
pub(crate) fn compare(name: &str, engine: &dyn Fn() -> Engine, requests: &[Request]) -> DraftCounts {
    let plain = serve(&mut engine(), requests);
    let expected = replies(&plain);
    let recording = Recording::of(requests.iter().zip(&plain));
    let mut total = DraftCounts::default();
    for (drafting, len) in Drafting::ALL.into_iter().zip([5, 4, 3, 2, 3, 7, 6, 15]) {
        let mut engine = engine();
        drafting.prepare(&mut engine, &recording, len);
        let found = replies(&serve(&mut engine, requests));
        let counts = engine.stats().speculation.total();
        assert_same(&format!("{name}, {drafting:?}"), &found, &expected);
        assert!(!drafting.always_drafts() || counts.drafted > 0, "{name}: {drafting:?} drafted nothing");
        assert!(drafting != Drafting::Honest || counts.accepted > 0, "{name}: {counts:?} with an honest drafter");
        total += counts;
    }
    let mut unchecked = engine();
    Drafting::Random.prepare(&mut unchecked, &recording, 3);
    unchecked.trust_drafts();
    let found = replies(&serve(&mut unchecked, requests));
    assert!(found != expected, "{name}: the comparison must notice drafts that nobody checked");
    total
}

pub(crate) fn assert_same(name: &str, found: &[Reply], expected: &[Reply]) {
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found == expected, "{name}, request {i}: {found:?}\nexpected {expected:?}");
    }
}
