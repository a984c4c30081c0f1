//! A draft model whose tokens are accepted with a given probability.
//!
//! With random weights a draft model is never right. This one runs the steps of a real model, for their cost, and then
//! replaces the tokens that the device kept by those of a recorded reply, some of them spoiled. It finds the recorded
//! reply by the seed of a row's query, so every request needs a seed of its own.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};

use anyhow::{bail, ensure};
use pellucid_model::{Batch, Decoder, DecoderConfig, Error, KvMemory, Logits, Model};
use pellucid_tensor::{RowQuery, TokenSlots};

/// The recorded replies, and the rate at which their tokens are proposed.
#[derive(Debug, Default)]
pub(super) struct Recorded {
    /// Tokens of prompt and reply, by seed.
    replies: HashMap<u64, Vec<u32>>,
    acceptance: f64,
}

/// Recorded replies that the benchmark and the draft model share.
#[derive(Debug, Clone, Default)]
pub(super) struct SharedReplies(Arc<Mutex<Recorded>>);

impl SharedReplies {
    fn get(&self) -> MutexGuard<'_, Recorded> {
        self.0.lock().expect("nothing panics while it holds the replies")
    }

    pub(super) fn record(&self, seed: u64, tokens: Vec<u32>) {
        self.get().replies.insert(seed, tokens);
    }

    /// Fails if a reply differs from the recorded one.
    pub(super) fn compare(&self, seed: u64, tokens: &[u32]) -> anyhow::Result<()> {
        let recorded = self.get();
        let expected = recorded.replies.get(&seed).map_or(&[][..], Vec::as_slice);
        if let Some(at) = expected.iter().zip(tokens).position(|(expected, token)| expected != token) {
            bail!("the reply with drafts differs from the one without at token {at}; please report this bug");
        }
        ensure!(expected.len() == tokens.len(), "the reply with drafts has another length than the one without");
        Ok(())
    }

    pub(super) fn set_acceptance(&self, acceptance: f64) {
        self.get().acceptance = acceptance;
    }

    /// Returns the token to propose for a row: the recorded one with the probability `acceptance`, by a draw that
    /// depends on seed and position alone.
    fn proposal(&self, query: &RowQuery, vocab_size: usize) -> u32 {
        let Some((seed, position)) = query.race else { return 0 };
        let recorded = self.get();
        let token = recorded.replies.get(&seed).and_then(|tokens| tokens.get(position as usize)).copied();
        let token = token.unwrap_or(0);
        match uniform(seed, position) < recorded.acceptance {
            true => token,
            false => (token + 1) % vocab_size as u32,
        }
    }
}

/// Returns a number from 0 to 1 (SplitMix64 of seed and position).
fn uniform(seed: u64, position: u32) -> f64 {
    let mut mixed = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15).wrapping_add(u64::from(position) << 32 | 0x5bd1);
    for factor in [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB] {
        mixed = (mixed ^ (mixed >> 29)).wrapping_mul(factor);
    }
    ((mixed ^ (mixed >> 31)) >> 11) as f64 / (1u64 << 53) as f64
}

pub(super) struct ForcedDraft {
    pub(super) model: Decoder,
    pub(super) replies: SharedReplies,
}

impl Model for ForcedDraft {
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
        self.model.finish(logits)
    }

    fn is_asynchronous(&self, num_rows: usize) -> bool {
        self.model.is_asynchronous(num_rows)
    }

    fn supports_digests(&self) -> bool {
        self.model.supports_digests()
    }

    fn token_slots(&self) -> TokenSlots {
        self.model.token_slots()
    }

    fn launch_draft(&mut self, batch: &Batch, kv: &mut KvMemory, slot: usize) -> Result<(), Error> {
        self.model.launch_draft(batch, kv, slot)?;
        let vocab_size = self.config().vocab_size;
        let proposals: Vec<u32> =
            batch.queries().iter().flatten().map(|query| self.replies.proposal(query, vocab_size)).collect();
        Ok(self.model.backend().replace_kept(slot, &proposals)?)
    }

    fn fetch_drafts(&mut self, num_slots: usize) -> Result<(), Error> {
        self.model.fetch_drafts(num_slots)
    }

    fn read_drafts(&mut self, out: &mut Vec<u32>) -> Result<(), Error> {
        self.model.read_drafts(out)
    }

    fn read_row(&mut self, row: usize, out: &mut [f32]) -> Result<(), Error> {
        self.model.read_row(row, out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proposals_are_right_at_the_given_rate() {
        let replies = SharedReplies::default();
        let query = |position: u32| RowQuery { temperature: 1.0, race: Some((3, position)), shortlist: None };
        replies.record(3, (0..10_000).collect());
        for acceptance in [0.0, 0.6, 0.8, 1.0] {
            replies.set_acceptance(acceptance);
            let num_right =
                (0..10_000).filter(|&position| replies.proposal(&query(position), 50_000) == position).count();
            assert!((num_right as f64 / 1e4 - acceptance).abs() < 0.02, "{num_right} at {acceptance}");
        }
        // A reply that was not recorded.
        replies.proposal(&RowQuery { race: Some((4, 0)), ..query(0) }, 50_000);
    }
}
