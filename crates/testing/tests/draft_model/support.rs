//! Draft models over the fake model, sequences, and the tokens that plain decoding would choose.

use std::sync::{Arc, Mutex};

use pellucid_engine::{DraftModel, DraftModelOptions, Scope, SystemClock, TenantId, WantedDraft};
use pellucid_model::{Batch, DecoderConfig, Error, KvMemory, Logits, Model};
use pellucid_sampling::{History, Input, Sampler, SamplingParams, State, StepKind, Workspace};
use pellucid_tensor::{Backend, DType};
use pellucid_testing::FakeModel;

pub(crate) const VOCAB: usize = 24;
pub(crate) const CONTEXT: usize = 200;

pub(crate) const OPTIONS: DraftModelOptions = DraftModelOptions {
    num_blocks: 200,
    block_len: 4,
    kv_dtype: DType::F32,
    chunk_len: 40,
    step_tokens: 64,
    secret: [5; 32],
};

/// Number of rows of each step that a model has computed.
pub(crate) type Steps = Arc<Mutex<Vec<usize>>>;

/// Counts the rows of each step.
pub(crate) struct Counted<M> {
    pub(crate) model: M,
    pub(crate) steps: Steps,
}

impl<M: Model> Model for Counted<M> {
    fn config(&self) -> &DecoderConfig {
        self.model.config()
    }

    fn forward(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.launch(batch, kv, logits)?;
        self.finish(logits)
    }

    fn launch(&mut self, batch: &Batch, kv: &mut KvMemory, logits: &mut Logits) -> Result<(), Error> {
        self.steps.lock().expect("no panic holds it").push(batch.num_rows());
        self.model.launch(batch, kv, logits)
    }

    fn finish(&mut self, logits: &mut Logits) -> Result<(), Error> {
        self.model.finish(logits)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        self.model.is_asynchronous(num_rows)
    }

    fn supports_digests(&self) -> bool {
        self.model.supports_digests()
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.model.read_row(row, out)
    }
}

/// Returns a draft model over a fake model, and the rows of its steps.
pub(crate) fn draft_model(options: DraftModelOptions, change: impl FnOnce(&mut FakeModel)) -> (DraftModel, Steps) {
    draft_model_of(FakeModel::new(VOCAB, CONTEXT), options, change)
}

pub(crate) fn draft_model_of(
    mut model: FakeModel,
    options: DraftModelOptions,
    change: impl FnOnce(&mut FakeModel),
) -> (DraftModel, Steps) {
    change(&mut model);
    let backend: Arc<dyn Backend> = model.backend();
    let steps = Steps::default();
    let model = Box::new(Counted { model, steps: steps.clone() });
    (DraftModel::new(model, backend, options).expect("a draft model"), steps)
}

/// A sequence of the target.
#[derive(Clone)]
pub(crate) struct TestSequence {
    pub(crate) id: u64,
    pub(crate) scope: Scope,
    pub(crate) tokens: Vec<u32>,
    pub(crate) sampler: Sampler,
    pub(crate) history: History,
    pub(crate) state: State,
}

impl TestSequence {
    pub(crate) fn new(id: u64, tenant: u32, prompt: &[u32], params: &SamplingParams) -> TestSequence {
        let sampler = Sampler::new(params, VOCAB).expect("valid parameters");
        TestSequence {
            id,
            scope: Scope::of(TenantId(tenant)),
            tokens: prompt.to_vec(),
            history: sampler.history(prompt),
            state: sampler.state(),
            sampler,
        }
    }

    pub(crate) fn wanted(&mut self, max_len: usize) -> WantedDraft<'_> {
        WantedDraft {
            sequence: self.id,
            scope: self.scope,
            tokens: &self.tokens,
            max_len,
            sampler: &self.sampler,
            history: &mut self.history,
            state: self.state,
            draft: Vec::new(),
        }
    }

    /// Samples the next token with the fake model. Returns it and whether it ends the sequence.
    pub(crate) fn decode(&mut self, vocab_size: usize) -> (u32, bool) {
        let mut logits = FakeModel::logits_after(self.tokens.iter().copied(), vocab_size);
        logits.resize(VOCAB, f32::NEG_INFINITY);
        let input = Input { logits: &logits, history: &self.history, position: self.tokens.len() as u32, mask: None };
        let choice = self.sampler.sample(&input, &mut self.state, &mut Workspace::default()).expect("a token");
        self.push(choice.token);
        (choice.token, choice.end.is_some())
    }

    pub(crate) fn push(&mut self, token: u32) {
        self.tokens.push(token);
        self.history.push(token);
    }

    /// Returns up to `max_len` tokens that decoding with a fake model of `vocab_size` tokens chooses next, the end
    /// token included.
    pub(crate) fn continuation(&self, max_len: usize, vocab_size: usize) -> Vec<u32> {
        let (mut copy, mut tokens) = (self.clone(), Vec::new());
        for _ in 0..max_len {
            let (token, is_end) = copy.decode(vocab_size);
            tokens.push(token);
            if is_end {
                break;
            }
        }
        tokens
    }
}

/// Proposes for all sequences, and checks that nothing of them changed and that all blocks are accounted for.
pub(crate) fn propose(model: &mut DraftModel, sequences: &mut [TestSequence], max_len: usize) -> Vec<Vec<u32>> {
    let before: Vec<String> = sequences.iter().map(|sequence| format!("{:?}", sequence.history)).collect();
    let mut wanted: Vec<WantedDraft<'_>> = sequences.iter_mut().map(|sequence| sequence.wanted(max_len)).collect();
    model.propose(&mut wanted, &SystemClock);
    let drafts = wanted.into_iter().map(|wanted| wanted.draft).collect();
    model.audit().expect("consistent accounts of blocks");
    let after: Vec<String> = sequences.iter().map(|sequence| format!("{:?}", sequence.history)).collect();
    assert_eq!(before, after, "histories are as they were");
    drafts
}

pub(crate) fn propose_one(model: &mut DraftModel, sequence: &mut TestSequence, max_len: usize) -> Vec<u32> {
    propose(model, std::slice::from_mut(sequence), max_len).remove(0)
}

/// Returns a prompt of `len` tokens; prompts of different `kind` differ from their first token on.
pub(crate) fn prompt(len: usize, kind: u32) -> Vec<u32> {
    (0..len as u32).map(|i| (i * i + 7 * i * kind + 5 * kind + 3) % VOCAB as u32).collect()
}

pub(crate) fn greedy() -> SamplingParams {
    SamplingParams { temperature: 0.0, ..SamplingParams::default() }
}

/// Returns parameters that use every step of the chain, alone and together, at temperatures 0, 0.7 and 1.5.
pub(crate) fn all_params() -> Vec<SamplingParams> {
    let base = SamplingParams::default;
    let chains = [
        base(),
        SamplingParams { top_k: 5, ..base() },
        SamplingParams { top_p: 0.8, min_p: 0.05, logprobs: Some(3), ..base() },
        SamplingParams { typical_p: 0.7, ..base() },
        SamplingParams { top_n_sigma: 1.5, ..base() },
        SamplingParams { xtc_probability: 0.5, ..base() },
        SamplingParams { dynamic_temperature_range: 0.3, ..base() },
        SamplingParams { repetition_penalty: 1.4, penalty_window: Some(6), ..base() },
        SamplingParams { frequency_penalty: 0.7, presence_penalty: 0.5, ..base() },
        SamplingParams { dry_multiplier: 2.0, ..base() },
        SamplingParams { mirostat_tau: Some(3.0), ..base() },
        SamplingParams { logit_bias: vec![(3, 2.0), (4, -100.0)], banned_tokens: vec![7], ..base() },
        SamplingParams { stop_ids: vec![1, 9], end_ids: vec![2], min_tokens: 12, ..base() },
        SamplingParams { samplers: Some(vec![StepKind::TopP, StepKind::Temperature]), top_p: 0.6, ..base() },
        SamplingParams { repetition_penalty: 1.2, top_k: 12, top_p: 0.9, min_p: 0.02, stop_ids: vec![5], ..base() },
    ];
    let temperatures = [0.0, 0.7, 1.5];
    let all = temperatures.iter().flat_map(|&temperature| {
        chains.iter().enumerate().map(move |(i, params)| SamplingParams {
            temperature,
            seed: 100 + i as u64,
            ..params.clone()
        })
    });
    // Mirostat needs a temperature.
    all.filter(|params| params.temperature > 0.0 || params.mirostat_tau.is_none()).collect()
}
