//! Commits a step of a beam search: hands the logits of all beams to the search, and forks the sequences that it
//! continues.

use super::super::Engine;
use super::sample::ChunkRows;
use crate::kv_cache::KvCache;
use crate::sequence::Sequence;
use crate::sequence_group::GroupId;
use crate::{Error, FinishReason};

impl Engine {
    /// Advances the search by one token and replaces the group's sequences by the beams that it continues.
    pub(super) fn advance_beams(&mut self, id: GroupId, complete: &[ChunkRows<'_>]) -> Result<(), Error> {
        let Engine { running, cache, model, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        let num_running = group.sequences.len();
        assert_eq!(complete.len(), num_running, "beams advance together");
        let mut rows: Vec<&[f32]> = vec![&[]; num_running];
        for part in complete {
            rows[part.chunk.sequence] = part.last();
        }
        if let Some(token) = rows.iter().flat_map(|row| row.iter()).position(|logit| logit.is_nan()) {
            let token = (token % model.config().vocab_size) as u32;
            return Err(pellucid_sampling::Error::NotANumber { token }.into());
        }
        let search = group.search.as_mut().expect("a beam search");
        let next = search.advance(&rows)?;
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        // Each beam is one token longer, after the last step too.
        group.stats.output_tokens += next.as_ref().map_or(group.request.width(), Vec::len);
        let Some(next) = next else {
            // All beams have the same length, and would be one token longer.
            let limit = group.request.limit(group.sequences[0].tokens.len() + 1, model.config().context_len);
            for sequence in &mut group.sequences {
                sequence.end(limit.unwrap_or(FinishReason::End), cache);
            }
            return Ok(());
        };
        let mut sequences = Vec::with_capacity(next.len());
        for (choice, continuation) in next.iter().enumerate() {
            let parent = &group.sequences[continuation.parent];
            match continued(choice, parent, continuation.token, cache) {
                Ok(sequence) => sequences.push(sequence),
                Err(error) => {
                    sequences.into_iter().filter_map(|sequence| sequence.table).for_each(|table| {
                        cache.release(table);
                    });
                    return Err(error);
                }
            }
        }
        let old = std::mem::replace(&mut group.sequences, sequences);
        for table in old.into_iter().filter_map(|sequence| sequence.table) {
            cache.release_into(table, reservation);
        }
        Ok(())
    }
}

/// Returns the sequence that continues `parent` by `token`.
fn continued(choice: usize, parent: &Sequence, token: u32, cache: &mut KvCache) -> Result<Sequence, Error> {
    let mut sequence = Sequence::new(choice, &parent.tokens, parent.sampler.clone())?;
    sequence.tokens.push(token);
    sequence.num_computed = parent.num_computed;
    sequence.table = parent.table.as_ref().map(|table| cache.fork(table)).transpose()?;
    Ok(sequence)
}
