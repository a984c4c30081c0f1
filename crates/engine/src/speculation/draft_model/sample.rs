//! Samples a drafted token from the draft model's logits with the sampler of the request.

use pellucid_model::{Logits, Model};
use pellucid_sampling::{Choice, Digest, DigestQuery, History, Input, Sampler, State, Workspace};
use pellucid_tensor::{RowDigest, RowQuery, Shortlist};

use crate::Error;

/// Memory that is kept from token to token.
#[derive(Default)]
pub(in crate::speculation) struct SampleMemory {
    workspace: Workspace,
    /// A row that was read because its digest was not enough.
    row: Vec<f32>,
    /// A row with the length that the sampler expects.
    fitted: Vec<f32>,
}

/// The sampler of a request with the sequence that it samples for.
pub(in crate::speculation) struct Chain<'a> {
    pub(in crate::speculation) sampler: &'a Sampler,
    pub(in crate::speculation) history: &'a History,
    /// Number of tokens before the one to sample.
    pub(in crate::speculation) position: u32,
}

/// Returns what a digest must contain to sample the token at `position`; `None` if the whole row is needed.
pub(in crate::speculation) fn query(sampler: &Sampler, position: u32) -> Option<RowQuery> {
    let DigestQuery { temperature, race, shortlist } = sampler.query(position)?;
    let shortlist = shortlist.map(|list| Shortlist { draw: list.draw, k: list.k, p: list.p, min_p: list.min_p });
    Some(RowQuery { temperature, race, shortlist })
}

/// Samples from row `row` of a step that has ended, which no other step has followed.
pub(in crate::speculation) fn sample(
    model: &mut dyn Model,
    logits: &Logits,
    row: usize,
    chain: &Chain<'_>,
    state: &mut State,
    memory: &mut SampleMemory,
) -> Result<Choice, Error> {
    if let Some(digest) = logits.digest(row) {
        if let Some(choice) = from_digest(digest, chain, &mut memory.workspace)? {
            return Ok(choice);
        }
        memory.row.resize(model.config().vocab_size, 0.0);
        model.read_row(row, &mut memory.row)?;
        let SampleMemory { row, fitted, workspace } = memory;
        return from_row(row, chain, state, fitted, workspace);
    }
    from_row(logits.row(row), chain, state, &mut memory.fitted, &mut memory.workspace)
}

fn from_digest(digest: &RowDigest, chain: &Chain<'_>, workspace: &mut Workspace) -> Result<Option<Choice>, Error> {
    let query = chain.sampler.query(chain.position).filter(|_| digest.is_plain);
    let Some(DigestQuery { temperature, .. }) = query else { return Ok(None) };
    let RowDigest { ref top, has_all, totals, ref finalists, .. } = *digest;
    let digest = Digest { top, has_all, totals, temperature, finalists };
    Ok(chain.sampler.sample_digest(&digest, chain.position, None, workspace)?)
}

/// Samples from a whole row. The output of a draft model may be padded to another length than the target's: tokens that
/// only the draft model has are left out, tokens that only the target has cannot be sampled.
fn from_row(
    row: &[f32],
    chain: &Chain<'_>,
    state: &mut State,
    fitted: &mut Vec<f32>,
    workspace: &mut Workspace,
) -> Result<Choice, Error> {
    let vocab_size = chain.sampler.vocab_size();
    let logits = if row.len() == vocab_size {
        row
    } else {
        fitted.clear();
        fitted.extend_from_slice(&row[..row.len().min(vocab_size)]);
        fitted.resize(vocab_size, f32::NEG_INFINITY);
        fitted
    };
    let input = Input { logits, history: chain.history, position: chain.position, mask: None };
    Ok(chain.sampler.sample(&input, state, workspace)?)
}
