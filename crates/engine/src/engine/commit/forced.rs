//! Commits the tokens that a grammar forces: they are known without logits, so a run of them is computed in one chunk,
//! together with the token before it.
//!
//! A forced token is the only one that the mask allows, so sampling could choose no other. Requests that need the
//! logits of every token (log probabilities, `best_of`, Mirostat, traces, probes) sample each forced token from its
//! row; for them, `Engine::add_forced` in `drafting` plans the rows of a run in one step, like a draft that cannot be
//! wrong.

use pellucid_sampling::Choice;

use super::sample::commit_token;
use crate::kv_cache::KvCache;
use crate::sequence::Sequence;
use crate::sequence_group::SequenceGroup;
use crate::{Error, Request};

/// Maximum forced tokens that are committed in one step, because clients read at most a bounded number of events.
const MAX_RUN: usize = 64;

/// Returns the next token of a sequence if it is known without logits.
pub(super) fn forced_choice(sequence: &mut Sequence, request: &Request) -> Option<Choice> {
    let token = *sequence.grammar.as_mut().filter(|_| !request.trace && request.probe.is_none())?.forced().first()?;
    sequence.sampler.forced_choice(token, sequence.tokens.len() - request.prompt.len())
}

/// Commits the forced tokens after the last one of a sequence. Returns their number.
pub(super) fn commit_run(
    group: &mut SequenceGroup,
    i: usize,
    cache: &mut KvCache,
    context_len: usize,
) -> Result<usize, Error> {
    let mut num_forced = 0;
    while group.sequences[i].finish.is_none() && num_forced < MAX_RUN {
        let Some(choice) = forced_choice(&mut group.sequences[i], &group.request) else { break };
        group.sequences[i].reserve()?;
        commit_token(group, i, (choice, None, None), cache, context_len)?;
        num_forced += 1;
    }
    if num_forced > 0 {
        // A step that was launched ahead computes only the token before the run. The next step computes them together.
        group.sequences[i].look_ahead.discard();
    }
    Ok(num_forced)
}
