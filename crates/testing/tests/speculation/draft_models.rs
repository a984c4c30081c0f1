//! Draft models: the target itself, one with other weights, one that computes NaN, one that fails, and small memory.

use std::sync::Arc;

use pellucid_checkpoint::Checkpoint;
use pellucid_cpu::Isa;
use pellucid_engine::{DraftCounts, Engine, EngineOptions, Overcommit, Request};
use pellucid_model::{Batch, Decoder, DecoderConfig, Error, KvMemory, LoadOptions, Logits, Model};
use pellucid_selftest::goldens_folder;
use pellucid_testing::{FakeModel, cpu};

use crate::support::{
    CONTEXT, OPTIONS, Reply, SharedModel, VOCAB, assert_same, fake, fixed, prompts, replies, request, serve,
};

/// A fake model whose logits are changed after each step.
struct Changed {
    model: FakeModel,
    change: fn(&mut f32, usize),
    num_steps: usize,
}

impl Model for Changed {
    fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.forward(batch, kv, logits)?;
        self.num_steps += 1;
        let values = logits.resize(batch.num_wanted(), VOCAB);
        values.iter_mut().enumerate().for_each(|(i, logit)| (self.change)(logit, i + self.num_steps));
        Ok(())
    }
}

fn changed(change: fn(&mut f32, usize)) -> Box<dyn Model> {
    Box::new(Changed { model: FakeModel::new(VOCAB, CONTEXT), change, num_steps: 0 })
}

fn requests() -> Vec<Request> {
    let mut requests: Vec<Request> =
        prompts(24, VOCAB as u32, 2).into_iter().zip(0..).map(|(p, seed)| request(p, seed)).collect();
    for (i, request) in requests.iter_mut().enumerate() {
        request.sampling.repetition_penalty = [1.0, 1.0, 1.3, 1.0][i % 4];
        request.sampling.stop_ids = if i % 5 == 4 { vec![3, 9] } else { Vec::new() };
        (request.num_choices, request.best_of) = if i % 6 == 5 { (2, 3) } else { (1, 1) };
        request.max_tokens = if i % 7 == 6 { None } else { Some(14) };
    }
    requests
}

fn expected(requests: &[Request]) -> Vec<Reply> {
    replies(&serve(&mut fake(OPTIONS, |_| ()), requests))
}

/// Serves the requests twice with a draft model, compares the replies, and returns the counts.
fn compare(name: &str, options: EngineOptions, draft: Box<dyn Model>, num_blocks: usize) -> DraftCounts {
    let requests = requests();
    let expected = expected(&requests);
    let mut engine = fake(options, |_| ());
    engine.set_speculation(fixed(4));
    engine.set_draft_model(draft, num_blocks).expect("a model with the same vocabulary");
    for round in ["cold", "warm"] {
        assert_same(&format!("{name}, {round}"), &replies(&serve(&mut engine, &requests)), &expected);
    }
    assert_eq!(engine.stats().blocks_in_use, 0);
    engine.stats().speculation.total()
}

#[test]
fn the_target_as_its_own_draft_model_is_accepted_at_every_temperature() {
    let counts = compare("the target", OPTIONS, Box::new(FakeModel::new(VOCAB, CONTEXT)), OPTIONS.num_blocks);
    // Drafts beyond max_tokens or a stop token are never sampled.
    assert!(counts.accepted * 10 > counts.drafted * 7, "{counts:?}");
}

#[test]
fn draft_models_that_differ_from_the_target() {
    let other = compare("other weights", OPTIONS, changed(|logit, i| *logit += (i % 3) as f32), OPTIONS.num_blocks);
    assert!(other.accepted > 0 && other.accepted < other.drafted, "{other:?}");
    compare("reversed weights", OPTIONS, changed(|logit, _| *logit = -*logit), OPTIONS.num_blocks);
    compare("NaN", OPTIONS, changed(|logit, _| *logit = f32::NAN), OPTIONS.num_blocks);
    compare(
        "some NaN",
        OPTIONS,
        changed(|logit, i| {
            if i % 50 == 0 {
                *logit = f32::NAN
            }
        }),
        OPTIONS.num_blocks,
    );
    compare("infinity", OPTIONS, changed(|logit, _| *logit = f32::INFINITY), OPTIONS.num_blocks);
    compare("minus infinity", OPTIONS, changed(|logit, _| *logit = f32::NEG_INFINITY), OPTIONS.num_blocks);
}

#[test]
fn a_draft_model_that_fails_changes_no_reply() {
    let mut failing = FakeModel::new(VOCAB, CONTEXT);
    failing.fails_at = Some(9);
    compare("a failing draft model", OPTIONS, Box::new(failing), OPTIONS.num_blocks);
}

#[test]
fn little_memory_for_the_draft_model_or_the_target() {
    let model = || Box::new(FakeModel::new(VOCAB, CONTEXT));
    for num_blocks in [1, 15, 40] {
        compare("little memory for the draft", OPTIONS, model(), num_blocks);
    }
    let tight = EngineOptions { num_blocks: 24, overcommit: Overcommit::Always, ..OPTIONS };
    compare("little memory for the target", tight, model(), 24);
    let chunked = EngineOptions { chunk_len: 3, step_tokens: 19, ..OPTIONS };
    compare("small steps", chunked, model(), OPTIONS.num_blocks);
}

#[test]
fn a_draft_model_with_a_shorter_context_or_another_number_of_tokens() {
    let requests = requests();
    let expected = expected(&requests);
    for (vocab_size, context_len) in [(VOCAB, 20), (VOCAB + 3, CONTEXT), (VOCAB - 3, CONTEXT)] {
        let mut engine = fake(OPTIONS, |_| ());
        engine.set_speculation(fixed(4));
        let draft = Box::new(FakeModel::new(vocab_size, context_len));
        engine.set_draft_model(draft, OPTIONS.num_blocks).expect("memory for a small model");
        let name = format!("a draft model of {vocab_size} tokens and a context of {context_len}");
        assert_same(&name, &replies(&serve(&mut engine, &requests)), &expected);
    }
}

fn golden(name: &str, backend: &Arc<pellucid_cpu::CpuBackend>) -> Decoder {
    let checkpoint = Checkpoint::open(&goldens_folder().join(name)).expect("a golden");
    Decoder::load(&checkpoint, backend.clone(), LoadOptions::default(), &mut |_, _| ()).expect("it loads")
}

#[test]
fn pairs_of_tiny_models() {
    let backend = cpu(Isa::best(), 2).expect("the best instruction set is available");
    let requests: Vec<Request> = prompts(18, 90, 3).into_iter().zip(0..).map(|(p, seed)| request(p, seed)).collect();
    for (target, draft) in [("llama3", "llama2"), ("qwen3-moe", "qwen3"), ("gemma2", "gpt2"), ("qwen2", "qwen2")] {
        let model = SharedModel::new(golden(target, &backend));
        let engine = || Engine::new(model.share(), backend.clone(), OPTIONS).expect("an engine");
        let expected = replies(&serve(&mut engine(), &requests));
        let mut engine = engine();
        engine.set_speculation(fixed(3));
        engine.set_draft_model(Box::new(golden(draft, &backend)), OPTIONS.num_blocks).expect("the same vocabulary");
        let name = format!("{target} with the draft model {draft}");
        assert_same(&name, &replies(&serve(&mut engine, &requests)), &expected);
        let counts = engine.stats().speculation.total();
        assert!(counts.drafted > 0, "{name}: {counts:?}");
        assert!(target != draft || counts.accepted * 10 > counts.drafted * 7, "{name}: {counts:?}");
    }
}
