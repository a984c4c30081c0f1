//! Drafts of the layer that a model has for predicting further tokens ([`Model::predict`]).
//!
//! The layer proposes a token from the target's last row and the token that the target chose; from its own row and its
//! own proposal, the next one. What it needs of earlier positions lies in the target's KV memory, in the blocks of the
//! sequence, so it has no cache, no prompt to prefill and no sequences of its own. It writes to the positions of the
//! drafted tokens, which the target's step overwrites.
//!
//! As with a draft model, nothing that goes wrong here reaches a request.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pellucid_model::{Batch, Chunk, ChunkIds, ChunkState, KvMemory, Logits, Model};

use super::draft_model::sample::{self, Chain, SampleMemory};
use super::draft_model::{MAX_FAILED_STEPS, WantedDraft, internal_error};
use crate::scheduler::{StepCosts, Work};
use crate::{Clock, Error};

/// A sequence for which a draft is wanted.
pub(crate) struct MtpDraft<'a> {
    pub(crate) wanted: WantedDraft<'a>,
    /// Blocks of the sequence, enough for its tokens and all but the last of the draft.
    pub(crate) blocks: &'a [u32],
}

/// Proposes tokens with the target's own layer.
#[derive(Default)]
pub(crate) struct MtpDrafter {
    costs: StepCosts,
    batch: Batch,
    logits: Logits,
    memory: SampleMemory,
    num_failed_steps: u32,
    num_errors: u64,
}

impl MtpDrafter {
    /// Returns the predicted seconds of one more drafted token for sequences of these lengths; 0 before the first one
    /// was measured.
    pub(crate) fn step_seconds(&self, lens: impl Iterator<Item = usize>) -> f64 {
        self.costs.predict(lens.fold(Work::default(), |work, len| work.and(Work::chunk(len, 1))))
    }

    /// Whether it proposes nothing any more, because too many steps failed.
    pub(crate) fn is_disabled(&self) -> bool {
        self.num_failed_steps >= MAX_FAILED_STEPS
    }

    /// Returns the number of failed steps since the start.
    pub(crate) fn num_errors(&self) -> u64 {
        self.num_errors
    }

    /// Proposes up to `max_len` tokens for each sequence, one step after the other for all of them together.
    pub(crate) fn propose(
        &mut self,
        (model, kv, block_len): (&mut dyn Model, &mut KvMemory, usize),
        drafts: &mut [MtpDraft<'_>],
        clock: &dyn Clock,
    ) {
        let lens: Vec<usize> = drafts.iter().map(|draft| draft.wanted.history.ids().len()).collect();
        loop {
            let is_open = |draft: &MtpDraft<'_>| draft.wanted.draft.len() < draft.wanted.max_len;
            let open: Vec<usize> = (0..drafts.len()).filter(|&i| is_open(&drafts[i])).collect();
            if open.is_empty() || self.is_disabled() {
                break;
            }
            let started = clock.now();
            let step = || self.step((&mut *model, &mut *kv, block_len), drafts, &open);
            let outcome = catch_unwind(AssertUnwindSafe(step)).unwrap_or_else(|panic| Err(internal_error(&*panic)));
            if outcome.is_err() {
                // The drafts so far are proposals like others.
                (self.num_failed_steps, self.num_errors) = (self.num_failed_steps + 1, self.num_errors + 1);
                break;
            }
            self.num_failed_steps = 0;
            let depth = |&i: &usize| drafts[i].wanted.tokens.len();
            let work = open.iter().map(depth).fold(Work::default(), |work, len| work.and(Work::chunk(len, 1)));
            self.costs.measure(work, (clock.now() - started).as_secs_f64());
        }
        drafts.iter_mut().zip(lens).for_each(|(draft, len)| draft.wanted.history.truncate(len));
    }

    /// Proposes one token for each sequence of `open`.
    fn step(
        &mut self,
        (model, kv, block_len): (&mut dyn Model, &mut KvMemory, usize),
        drafts: &mut [MtpDraft<'_>],
        open: &[usize],
    ) -> Result<(), Error> {
        self.batch.clear();
        for &i in open {
            let MtpDraft { wanted: WantedDraft { tokens, draft, .. }, blocks } = &drafts[i];
            let last = *draft.last().or(tokens.last()).expect("a sequence that decodes has tokens");
            let chunk = Chunk {
                ids: ChunkIds::Tokens(&[last]),
                first_position: tokens.len() + draft.len() - 1,
                blocks,
                wanted: 0..1,
                queries: &[],
                state: ChunkState::default(),
            };
            self.batch.push(chunk, block_len);
        }
        model.predict(&self.batch, kv, &mut self.logits)?;
        for (row, &i) in open.iter().enumerate() {
            let WantedDraft { tokens, sampler, history, state, draft, max_len, .. } = &mut drafts[i].wanted;
            let position = (tokens.len() + draft.len()) as u32;
            let chain = Chain { sampler, history, position };
            // A grammar or a NaN may leave no token.
            let Ok(choice) = sample::sample(model, &self.logits, row, &chain, state, &mut self.memory) else {
                *max_len = draft.len();
                continue;
            };
            history.try_reserve().map_err(|_| crate::fallible::out_of_memory())?;
            history.push(choice.token);
            draft.push(choice.token);
            if choice.end.is_some() {
                *max_len = draft.len();
            }
        }
        Ok(())
    }
}
