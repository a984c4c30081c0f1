//! Engines, requests and outcomes for the tests of this folder.

use std::path::Path;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{Engine, EngineOptions, Overcommit, Request};
use pellucid_model::{Decoder, LoadOptions};
use pellucid_sampling::SamplingParams;
use pellucid_selftest::{EventCollector, Outcome};
use pellucid_tensor::DType;
use pellucid_testing::{FakeModel, Machine, VirtualClock, cpu};

pub(crate) const OPTIONS: EngineOptions = EngineOptions {
    num_blocks: 400,
    block_len: 4,
    kv_dtype: DType::F32,
    max_sequences: 32,
    step_tokens: 64,
    chunk_len: 16,
    max_waiting: 1000,
    overcommit: Overcommit::Never,
    secret: [3; 32],
    snapshot_distance: None,
};

pub(crate) fn engine(path: &Path, num_threads: usize, options: EngineOptions) -> Engine {
    let backend = cpu(Isa::best(), num_threads).expect("the best instruction set is available");
    let checkpoint = Checkpoint::open(path).expect("a model");
    let model = Decoder::load(&checkpoint, backend.clone(), LoadOptions::default(), &mut |_, _| ()).expect("it loads");
    Engine::new(Box::new(model), backend, options).expect("an engine")
}

/// Returns an engine with a fake model of 24 tokens and a context of 60, in virtual time: the steps that tenants share
/// do not depend on the machine. A step of few rows takes as long as one of many.
pub(crate) fn fake(options: EngineOptions, change: impl FnOnce(&mut FakeModel)) -> Engine {
    let mut model = FakeModel::new(24, 60);
    let clock = VirtualClock::new(Machine::Gpu);
    model.clock = Some(clock.clone());
    change(&mut model);
    let backend = model.backend();
    let mut engine = Engine::new(Box::new(model), backend, options).expect("an engine");
    engine.set_clock(Box::new(clock));
    engine
}

pub(crate) fn request(prompt: Vec<u32>, seed: u64) -> Request {
    let sampling = SamplingParams { temperature: 1.0, seed, logprobs: Some(0), ..SamplingParams::default() };
    Request { max_tokens: Some(10), ..Request::new(prompt, sampling) }
}

/// Steps until all requests have ended, and audits the engine after each step.
pub(crate) fn finish(engine: &mut Engine) {
    while engine.step() {
        engine.audit().expect("consistent accounts of blocks");
    }
}

/// Submits requests and runs them to the end.
pub(crate) fn serve(engine: &mut Engine, requests: &[Request]) -> Vec<Outcome> {
    let collected: Vec<EventCollector> = requests.iter().map(|_| EventCollector::default()).collect();
    for (request, collected) in requests.iter().zip(&collected) {
        engine.submit(request.clone(), Box::new(collected.clone())).expect("an accepted request");
    }
    finish(engine);
    collected.iter().map(EventCollector::outcome).collect()
}

/// Returns prompts that share prefixes, so that the prefix cache has hits.
pub(crate) fn prompts(count: usize, vocab: u32) -> Vec<Vec<u32>> {
    (0..count as u32).map(|i| (0..5 + i % 29).map(|j| (j * 7 + (i % 5) * 11 + j * (i % 3)) % vocab).collect()).collect()
}

/// Returns the tokens and the bits of their log probabilities.
pub(crate) fn bits(outcome: &Outcome) -> (Vec<Vec<u32>>, Vec<Vec<u32>>) {
    assert_eq!(outcome.error, None);
    (outcome.tokens.clone(), outcome.logprob_bits.clone())
}

pub(crate) fn submit(engine: &mut Engine, request: &Request) -> EventCollector {
    let collected = EventCollector::default();
    engine.submit(request.clone(), Box::new(collected.clone())).expect("an accepted request");
    collected
}
