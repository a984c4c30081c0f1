//! Chained drafts: the draft steps of a call are launched one after another without waiting. Each takes its tokens from
//! those that the device assumed in the step before, and the target's step takes all of them, so that the host reads
//! the drafted tokens when everything is on its way.
//!
//! The device's assumption needs no confirmation: the target verifies the draft, whatever it is. A chain is launched
//! only if every sequence is caught up and its sampler chain is one that the device imitates.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pellucid_model::{Chunk, ChunkIds, ChunkState};
use pellucid_tensor::RowQuery;

use super::round::MAX_READY_ROWS;
use super::{DraftModel, WantedDraft, internal_error, sample};
use crate::scheduler::Work;
use crate::{Clock, Error};

/// A sequence of the chain that is on the device. Its tokens are in the row of the same index, in each of the first
/// `len` slots.
pub(super) struct Link {
    sequence: u64,
    num_tokens: usize,
    len: usize,
}

/// Drafted tokens that only the device knows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainedDraft {
    /// Row in each of the first `len` slots.
    pub row: usize,
    /// Number of drafted tokens.
    pub len: usize,
}

impl DraftModel {
    /// Launches the steps of all drafts. Returns the slots' row of each wanted draft; `None` if nothing was launched,
    /// because the device or one of the sequences does not allow it.
    pub fn launch_chain(&mut self, wanted: &[WantedDraft<'_>]) -> Option<Vec<ChainedDraft>> {
        self.chain.clear();
        let slots = self.model.token_slots();
        if self.is_disabled || slots.num_slots == 0 || wanted.is_empty() || wanted.len() > slots.num_rows {
            return None;
        }
        self.sequences.begin_call();
        let lens = self.chain_lens(wanted).filter(|lens| lens.iter().all(|&len| len <= slots.num_slots))?;
        // The longest drafts come first, so that a sequence has the same row in every step.
        let mut order: Vec<usize> = (0..wanted.len()).collect();
        order.sort_by_key(|&i| std::cmp::Reverse(lens[i]));
        let links = order.iter().map(|&i| Link {
            sequence: wanted[i].sequence,
            num_tokens: wanted[i].tokens.len(),
            len: lens[i],
        });
        self.chain.extend(links);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.launch_steps(wanted, &order)));
        if let Err(error) = outcome.unwrap_or_else(|panic| Err(internal_error(&*panic))) {
            self.fail_chain(error);
            return None;
        }
        let mut drafts = vec![ChainedDraft { row: 0, len: 0 }; wanted.len()];
        for (row, &i) in order.iter().enumerate() {
            drafts[i] = ChainedDraft { row, len: lens[i] };
        }
        Some(drafts)
    }

    /// Returns the length of each draft, and takes the blocks for them; `None` if a sequence cannot be chained.
    fn chain_lens(&mut self, wanted: &[WantedDraft<'_>]) -> Option<Vec<usize>> {
        let jobs = self.jobs(wanted);
        let vocab_size = self.model.config().vocab_size;
        let mut num_rows = 0;
        let mut lens = Vec::with_capacity(wanted.len());
        if jobs.len() != wanted.len() {
            return None;
        }
        for (job, wanted) in jobs.iter().zip(wanted) {
            let num_left = self.sequences.get(wanted.sequence)?.num_left();
            num_rows += num_left;
            // A state changes with every token, so only a chain without one has a query.
            let has_queries = job.max_len > 0
                && vocab_size <= wanted.sampler.vocab_size()
                && sample::query(wanted.sampler, wanted.tokens.len() as u32).is_some();
            if !has_queries || num_left > MAX_READY_ROWS || num_rows > self.options.step_tokens {
                return None;
            }
            lens.push(job.max_len);
        }
        let fits = self.model.supports_digests() && self.model.is_asynchronous(num_rows);
        let grows = |(wanted, len): (&WantedDraft<'_>, &usize)| {
            self.sequences.grow(wanted.sequence, wanted.tokens.len() + len - 1)
        };
        (fits && wanted.iter().zip(&lens).all(grows)).then_some(lens)
    }

    /// Launches the steps, and the copy of the drafted tokens to the host.
    fn launch_steps(&mut self, wanted: &[WantedDraft<'_>], order: &[usize]) -> Result<(), Error> {
        let DraftModel { model, kv, sequences, batch, options, chain, .. } = self;
        let num_steps = chain.first().map_or(0, |link| link.len);
        for step in 0..num_steps {
            batch.clear();
            for (row, (link, &i)) in chain.iter().zip(order).enumerate().take_while(|(_, (link, _))| link.len > step) {
                let sequence = sequences.get(link.sequence).expect("its blocks were taken");
                let end = link.num_tokens + step;
                let ids = match step {
                    0 => ChunkIds::Tokens(&sequence.tokens[sequence.num_computed..]),
                    _ => ChunkIds::Assumed { row },
                };
                let num_rows = if step == 0 { sequence.num_left() } else { 1 };
                let query: Option<RowQuery> = sample::query(wanted[i].sampler, end as u32);
                let chunk = Chunk {
                    ids,
                    first_position: end - num_rows,
                    blocks: sequence.table.blocks(),
                    wanted: num_rows - 1..num_rows,
                    queries: query.as_slice(),
                    state: ChunkState::default(),
                };
                batch.push(chunk, options.block_len);
            }
            model.launch_draft(batch, kv, step)?;
        }
        Ok(model.fetch_drafts(num_steps)?)
    }

    /// Waits for the drafted tokens of the chain that was launched at `launched`, and returns them by row.
    pub fn finish_chain(&mut self, clock: &dyn Clock, launched: Instant) -> Result<Vec<Vec<u32>>, Error> {
        let mut slots = Vec::new();
        let read = catch_unwind(AssertUnwindSafe(|| self.model.read_drafts(&mut slots)));
        let outcome = match read {
            Ok(outcome) => outcome.map_err(Error::from),
            Err(panic) => Err(internal_error(&*panic)),
        };
        if let Err(error) = outcome {
            self.fail_chain(Error::Internal("the drafted tokens could not be read".to_owned()));
            return Err(error);
        }
        self.num_failed_steps = 0;
        let num_rows = self.model.token_slots().num_rows;
        let links = std::mem::take(&mut self.chain);
        self.measure_chain(&links, (clock.now() - launched).as_secs_f64());
        let mut drafts = Vec::with_capacity(links.len());
        for (row, Link { sequence, num_tokens, len }) in links.into_iter().enumerate() {
            let draft: Vec<u32> = (0..len).map(|slot| slots[slot * num_rows + row]).collect();
            if let Some(known) = self.sequences.get_mut(sequence) {
                known.tokens.extend_from_slice(&draft);
                known.num_computed = num_tokens + len - 1;
                // The last token stays out: its position is computed again if the target has no further token by then.
                self.sequences.index(sequence, num_tokens - 1);
            }
            drafts.push(draft);
        }
        Ok(drafts)
    }

    /// Measures the steps of a chain, of which only the time of all together is known.
    fn measure_chain(&mut self, links: &[Link], seconds: f64) {
        let num_steps = links.first().map_or(0, |link| link.len);
        for step in 0..num_steps {
            let chunks = links.iter().filter(|link| link.len > step);
            let work = chunks.fold(Work::default(), |work, link| work.and(Work::chunk(link.num_tokens + step - 1, 1)));
            self.costs.measure(work, seconds / num_steps as f64);
        }
    }

    /// Ends the drafts of a chain that failed. It is not known which sequence was the reason.
    fn fail_chain(&mut self, error: Error) {
        let sequences: Vec<u64> = self.chain.drain(..).map(|link| link.sequence).collect();
        self.fail_sequences(&sequences, error);
    }
}
