//! Look-ahead: an engine that launches steps before the previous one has ended gives the same replies as one that does
//! not.

use std::sync::Arc;

use pellucid_engine::{Engine, EngineOptions, EngineStats, Overcommit, Request};
use pellucid_model::{BLOCK_LEN, Batch, DecoderConfig, Error, KvMemory, Logits, Model};
use pellucid_sampling::SamplingParams;
use pellucid_tensor::{Backend, DType};

use crate::EventCollector;

const OPTIONS: EngineOptions = EngineOptions {
    num_blocks: 64,
    block_len: BLOCK_LEN,
    kv_dtype: DType::F32,
    max_sequences: 8,
    step_tokens: 64,
    chunk_len: 32,
    max_waiting: 100,
    overcommit: Overcommit::Never,
    secret: [5; 32],
    snapshot_distance: None,
};

/// A model that can forbid looking ahead, or report that the device's assumed token was wrong.
struct ControlledModel {
    model: Box<dyn Model>,
    may_look_ahead: bool,
    /// Every `wrong_every`th digest loses its assumed token.
    wrong_every: Option<usize>,
    num_digests: usize,
}

impl Model for ControlledModel {
    fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.forward(batch, kv, logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.model.launch(batch, kv, logits)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        self.model.finish(logits)?;
        for digest in logits.digests_mut() {
            self.num_digests += 1;
            if self.wrong_every.is_some_and(|every| self.num_digests.is_multiple_of(every)) {
                digest.assumed = None;
            }
        }
        Ok(())
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        self.may_look_ahead && self.model.is_asynchronous(num_rows)
    }

    fn supports_digests(&self) -> bool {
        self.model.supports_digests()
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.model.read_row(row, out)
    }
}

/// Requests with greedy decoding and sampling, with the usual sampler steps, stop ids and limits, and one that needs
/// whole rows.
fn requests(vocab_size: usize) -> Vec<Request> {
    let token = |i: usize| (i * 31 % vocab_size) as u32;
    let request = |i: usize| {
        let sampling = SamplingParams {
            seed: i as u64,
            temperature: [0.0, 1.0, 0.7][i % 3],
            top_k: [0, 0, 0, 20][i % 4],
            top_p: [1.0, 1.0, 0.9][i % 3],
            min_p: if i % 5 == 4 { 0.05 } else { 0.0 },
            stop_ids: if i % 4 == 1 { (0..6).map(|k| token(i + k)).collect() } else { Vec::new() },
            repetition_penalty: if i == 9 { 1.1 } else { 1.0 },
            logprobs: i.is_multiple_of(2).then_some(2),
            ..SamplingParams::default()
        };
        let num_choices = if i == 5 { 2 } else { 1 };
        let prompt = (0..3 + 7 * (i % 5)).map(|k| token(i + 3 * k)).collect();
        let max_tokens = Some(5 + 9 * (i % 7));
        Request { max_tokens, num_choices, best_of: num_choices, ..Request::new(prompt, sampling) }
    };
    (0..14).map(request).collect()
}

type Reply = (Vec<Vec<u32>>, Vec<Vec<u32>>);

/// Serves the requests, which arrive in small groups; one client disconnects on the way.
fn serve(model: ControlledModel, backend: Arc<dyn Backend>) -> (Vec<Reply>, EngineStats) {
    let requests = requests(model.config().vocab_size);
    let mut engine = Engine::new(Box::new(model), backend, OPTIONS).expect("memory for a small model");
    let mut all: Vec<EventCollector> = Vec::new();
    let disconnecting = EventCollector::default();
    let long = Request { max_tokens: Some(100), ..requests[0].clone() };
    engine.submit(long, Box::new(disconnecting.clone())).expect("a request that can be served");
    for (i, request) in requests.into_iter().enumerate() {
        let collected = EventCollector::default();
        engine.submit(request, Box::new(collected.clone())).expect("a request that can be served");
        all.push(collected);
        (0..6 * (i % 3)).for_each(|_| assert!(engine.step()));
        if i == 7 {
            disconnecting.close();
        }
    }
    while engine.step() {
        engine.audit().expect("consistent accounts of blocks");
    }
    let reply = |collected: &EventCollector| {
        let outcome = collected.outcome();
        assert_eq!(outcome.error, None);
        (outcome.tokens, outcome.logprob_bits)
    };
    (all.iter().map(reply).collect(), engine.stats())
}

/// Checks that replies do not depend on looking ahead. `model` loads a model whose device digests rows and runs
/// asynchronously.
pub fn look_ahead_keeps_replies(model: &dyn Fn() -> Box<dyn Model>, backend: &Arc<dyn Backend>) {
    let run = |may_look_ahead: bool, wrong_every: Option<usize>| {
        serve(ControlledModel { model: model(), may_look_ahead, wrong_every, num_digests: 0 }, backend.clone())
    };
    let (expected, stats) = run(false, None);
    assert_eq!((stats.steps_ahead, stats.tokens_discarded), (0, 0), "looking ahead was forbidden");
    for wrong_every in [None, Some(11), Some(2)] {
        let (found, stats) = run(true, wrong_every);
        for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found == expected, "request {i}, wrong every {wrong_every:?}: {found:?}, expected {expected:?}");
        }
        let EngineStats { steps, steps_ahead, tokens_discarded, .. } = stats;
        let min_steps_ahead = if wrong_every.is_none() { steps / 3 } else { 1 };
        assert!(
            steps_ahead >= min_steps_ahead,
            "{steps_ahead} of {steps} steps were launched ahead, wrong every {wrong_every:?}"
        );
        assert!(wrong_every.is_none() || tokens_discarded > 0, "no token was discarded");
    }
}
