//! A draft model: a smaller model with the same vocabulary that proposes the next tokens of several sequences at once.
//!
//! It samples from its own logits with the sampler, seed and position of each request, so it uses the same noise as the
//! target and often the same token wins the draw. It has its own KV memory and KV cache, with the scopes of the
//! requests. [`DraftModel::propose`] first brings the draft model's keys and values up to date: it keeps those of the
//! tokens that the target accepted and overwrites the others. Then it runs one draft step after another, each for all
//! sequences together.
//!
//! A prompt is prefilled when a proposal for its sequence is wanted for the first time; one call computes at most
//! `chunk_len` rows of prompts. Until a sequence is caught up, its draft is empty.
//!
//! Nothing that goes wrong here reaches a request. A sequence for which the draft model fails has empty drafts from
//! then on; after a lost device, or [`MAX_FAILED_STEPS`] failed steps in a row, all drafts are empty.
//! [`DraftModel::take_error`] returns the first error that nobody has seen yet.

mod chain;
mod round;
pub(super) mod sample;
mod sequences;

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use pellucid_model::{Batch, KvMemory, Logits, Model};
use pellucid_sampling::{History, Sampler, State};
use pellucid_tensor::{Backend, DType};

use crate::kv_cache::{KvCache, Scope};
use crate::scheduler::{StepCosts, Work};
use crate::{Clock, Error};

pub use chain::ChainedDraft;

use chain::Link;
use sample::SampleMemory;
use sequences::DraftSequences;

/// Number of failed steps, one after another, after which a draft model is not used any more.
pub(super) const MAX_FAILED_STEPS: u32 = 8;

/// Settings of a [`DraftModel`].
#[derive(Debug, Clone, Copy)]
pub struct DraftModelOptions {
    /// Number of blocks of the draft model's KV memory.
    pub num_blocks: usize,
    /// Positions in each block.
    pub block_len: usize,
    /// Format in which keys and values are stored.
    pub kv_dtype: DType,
    /// Maximum rows of prompts, of all sequences together, that one call of [`DraftModel::propose`] computes.
    pub chunk_len: usize,
    /// Maximum rows of a draft step.
    pub step_tokens: usize,
    /// Key of the prefix cache's hashes.
    pub secret: [u8; 32],
}

/// A sequence for which a draft is wanted. A call has each sequence at most once.
#[derive(Debug)]
pub struct WantedDraft<'a> {
    /// Identifies the sequence until [`DraftModel::forget`]. An id is not used again for another sequence.
    pub sequence: u64,
    /// Scope of the request.
    pub scope: Scope,
    /// Prompt and output so far, all chosen by the target.
    pub tokens: &'a [u32],
    /// Maximum tokens of the draft. 0 only prepares the sequence for later calls.
    pub max_len: usize,
    /// Sampler of the request.
    pub sampler: &'a Sampler,
    /// History of the sequence. It gets the drafted tokens during the call and is as before when the call returns.
    pub history: &'a mut History,
    /// State of the sequence.
    pub state: State,
    /// The proposed tokens. The last one may be an end or stop token.
    pub draft: Vec<u32>,
}

/// Proposes tokens with a model; see the head of this file.
#[allow(missing_debug_implementations)] // Its model would print weights.
pub struct DraftModel {
    model: Box<dyn Model>,
    /// Keeps the device of `kv` in existence.
    _backend: Arc<dyn Backend>,
    kv: KvMemory,
    options: DraftModelOptions,
    sequences: DraftSequences,
    /// Sequences for which the draft model failed.
    failed: BTreeSet<u64>,
    costs: StepCosts,
    max_prefill_seconds: f64,
    batch: Batch,
    logits: Logits,
    memory: SampleMemory,
    /// The chain of draft steps whose tokens were not read yet, the longest drafts first.
    chain: Vec<Link>,
    /// Number of steps that failed since the last one that did not.
    num_failed_steps: u32,
    is_disabled: bool,
    /// The first error that was not taken yet.
    error: Option<Error>,
    num_errors: u64,
}

impl DraftModel {
    /// Allocates the KV memory and creates a draft model that knows no sequence.
    pub fn new(
        model: Box<dyn Model>,
        backend: Arc<dyn Backend>,
        options: DraftModelOptions,
    ) -> Result<DraftModel, Error> {
        assert!(options.chunk_len > 0 && options.step_tokens > 0);
        if model.config().has_state() {
            let architecture = model.config().architecture.clone();
            return Err(Error::StatefulDraftModel { architecture });
        }
        let devices = model.placed_on().cloned().unwrap_or_else(|| backend.clone().into());
        let kv = KvMemory::new(model.config(), &devices, options.kv_dtype, options.num_blocks, options.block_len)?;
        Ok(DraftModel {
            model,
            _backend: backend,
            kv,
            options,
            sequences: DraftSequences::new(KvCache::new(options.num_blocks, options.block_len, options.secret)),
            failed: BTreeSet::new(),
            costs: StepCosts::default(),
            max_prefill_seconds: f64::INFINITY,
            batch: Batch::default(),
            logits: Logits::default(),
            memory: SampleMemory::default(),
            chain: Vec::new(),
            num_failed_steps: 0,
            is_disabled: false,
            error: None,
            num_errors: 0,
        })
    }

    /// Proposes up to `max_len` tokens for each sequence, in `draft`. No step of another model may be in flight on the
    /// device.
    pub fn propose(&mut self, wanted: &mut [WantedDraft<'_>], clock: &dyn Clock) {
        wanted.iter_mut().for_each(|wanted| wanted.draft.clear());
        if self.is_disabled {
            return;
        }
        let lens: Vec<usize> = wanted.iter().map(|wanted| wanted.history.ids().len()).collect();
        let outcome = catch_unwind(AssertUnwindSafe(|| self.draft(wanted, clock)));
        if let Err(panic) = outcome {
            // The panics of a model are caught where it is called. This one is a bug here.
            self.disable(internal_error(&*panic));
            wanted.iter_mut().for_each(|wanted| wanted.draft.clear());
        }
        for (wanted, len) in wanted.iter_mut().zip(lens) {
            wanted.history.truncate(len);
        }
    }

    /// Limits the predicted time in which a call of [`DraftModel::propose`] computes rows of prompts. Without this,
    /// `chunk_len` is the only limit.
    pub fn limit_prefill(&mut self, seconds: f64) {
        self.max_prefill_seconds = seconds;
    }

    /// Forgets a sequence that has ended, and gives its blocks back. Its prefix stays in the cache of its scope.
    pub fn forget(&mut self, sequence: u64) {
        self.sequences.release(sequence);
        self.failed.remove(&sequence);
    }

    /// Returns the number of rows to compute before the first drafted token of a sequence of `num_tokens` tokens can be
    /// sampled: 1 or a few if it is caught up, else about the length of its prompt. `None` if the draft model failed
    /// for it or has too short a context.
    pub fn num_behind(&self, sequence: u64, num_tokens: usize) -> Option<usize> {
        let is_usable = !self.is_disabled && !self.failed.contains(&sequence) && num_tokens <= self.context_len();
        let num_computed = self.sequences.get(sequence).map_or(0, |sequence| sequence.num_computed);
        is_usable.then(|| num_tokens.saturating_sub(num_computed).max(1))
    }

    /// Whether the next call for a sequence of `num_tokens` tokens proposes something.
    pub fn is_caught_up(&self, sequence: u64, num_tokens: usize) -> bool {
        self.num_behind(sequence, num_tokens).is_some_and(|behind| behind <= round::MAX_READY_ROWS)
    }

    /// Whether one call is enough to catch up a sequence of `num_tokens` tokens and to propose something.
    pub fn is_within_reach(&self, sequence: u64, num_tokens: usize) -> bool {
        self.num_behind(sequence, num_tokens).is_some_and(|behind| behind <= round::MIN_PREFILL_ROWS)
    }

    /// Returns the predicted seconds of the fewest rows of prompts that a call computes; 0 before the first step was
    /// measured.
    pub fn min_prefill_seconds(&self) -> f64 {
        self.costs.predict(Work::chunk(0, round::MIN_PREFILL_ROWS.min(self.options.chunk_len)))
    }

    /// Returns the predicted seconds of one draft step for sequences of these lengths, which gives each one more
    /// drafted token; 0 before the first step was measured.
    pub fn step_seconds(&self, lens: impl Iterator<Item = usize>) -> f64 {
        self.costs.predict(lens.fold(Work::default(), |work, len| work.and(Work::chunk(len, 1))))
    }

    /// Returns the predicted seconds of catching up `num_rows` rows after `depth` tokens that are computed already; 0
    /// before the first step was measured.
    pub fn catch_up_seconds(&self, depth: usize, num_rows: usize) -> f64 {
        let chunk_len = self.options.chunk_len;
        let starts = (depth..depth + num_rows).step_by(chunk_len);
        starts.map(|start| self.costs.predict(Work::chunk(start, chunk_len.min(depth + num_rows - start)))).sum()
    }

    /// Returns the measured times of draft steps, sampling included.
    pub fn costs(&self) -> &StepCosts {
        &self.costs
    }

    /// Returns the model.
    pub fn model(&self) -> &dyn Model {
        &*self.model
    }

    /// Returns the draft model's KV cache.
    pub fn cache(&self) -> &KvCache {
        self.sequences.cache()
    }

    /// Applies the operator's settings of the target's cache: shared prefixes, and quotas in proportion to the number
    /// of blocks.
    pub fn follow_settings(&mut self, target: &KvCache) {
        self.sequences.cache_mut().follow_settings(target);
    }

    /// Returns the number of sequences that hold blocks.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// Returns the first error since the last call, so that each is reported once.
    pub fn take_error(&mut self) -> Option<Error> {
        self.error.take()
    }

    /// Returns the number of errors since the start: failed steps, and sequences whose logits could not be sampled.
    pub fn num_errors(&self) -> u64 {
        self.num_errors
    }

    /// Whether all drafts are empty from now on, because the device is lost or every step failed.
    pub fn is_disabled(&self) -> bool {
        self.is_disabled
    }

    /// Counts the blocks again, for simulators and tests.
    pub fn audit(&self) -> Result<(), String> {
        self.sequences.audit()
    }

    fn context_len(&self) -> usize {
        self.model.config().context_len
    }

    /// Records an error of one sequence, which has empty drafts from now on.
    fn fail(&mut self, sequence: u64, error: Error) {
        self.sequences.release(sequence);
        self.failed.insert(sequence);
        self.report(error);
    }

    fn disable(&mut self, error: Error) {
        self.is_disabled = true;
        self.sequences.release_all();
        self.report(error);
    }

    fn report(&mut self, error: Error) {
        self.num_errors += 1;
        self.error.get_or_insert(error);
    }
}

/// Turns the payload of a panic into an error.
pub(super) fn internal_error(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    Error::Internal(text.unwrap_or("no message").to_owned())
}
