//! Samples the tokens of a step: from digests where they are enough, from rows of logits otherwise, and row after row
//! where a drafter proposed tokens.

use pellucid_sampling::{Choice, Digest, End, Input, TokenTrace, Workspace};
use pellucid_tensor::RowDigest;

use super::super::{Engine, PlannedChunk, Step};
use super::forced::{commit_run, forced_choice};
use super::probe::probe_token;
use crate::kv_cache::KvCache;
use crate::sequence::{Sequence, SequenceGrammar};
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Error, Event, FinishReason, Proposal, TokenEvent, fallible};

/// A chunk of a step that has ended, with the logits of its wanted rows.
pub(super) struct ChunkRows<'a> {
    pub(super) chunk: &'a PlannedChunk,
    pub(super) step: &'a Step,
    /// The token that was sampled from the digest of the chunk's first row to sample from, if the digest was enough.
    pub(super) sampled: Option<Choice>,
}

impl<'a> ChunkRows<'a> {
    /// Returns a wanted row of the chunk.
    pub(super) fn row(&self, row: usize) -> &'a [f32] {
        self.step.logits.row(self.chunk.first_wanted_row + row)
    }

    /// Index, among the chunk's wanted rows, of the first row to sample from: the last one, unless those after it are
    /// drafted.
    fn first_to_sample(&self) -> usize {
        self.chunk.wanted.len() - 1 - self.chunk.draft_len()
    }

    /// The only row of a chunk without a draft that a token is sampled from.
    pub(super) fn last(&self) -> &'a [f32] {
        self.row(self.chunk.wanted.len() - 1)
    }

    /// The digest of a wanted row; `None` if the whole row was fetched.
    fn digest(&self, row: usize) -> Option<&'a RowDigest> {
        self.step.logits.digest(self.chunk.first_wanted_row + row)
    }

    /// The digest of the first row to sample from; `None` if the whole row was fetched, or none is wanted.
    fn first_digest(&self) -> Option<&'a RowDigest> {
        (!self.chunk.wanted.is_empty()).then(|| self.digest(self.first_to_sample())).flatten()
    }
}

impl Engine {
    /// Samples from digests. If a digest does not determine the token, the row is read later. If the row is gone,
    /// because the next step is on the device already, the chunk is left out and its position is computed again.
    pub(super) fn sample_digests(&mut self, id: GroupId, parts: &mut Vec<ChunkRows<'_>>) -> Result<(), Error> {
        let Engine { running, workspace, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        for rows in parts.iter_mut() {
            let sequence = &mut group.sequences[rows.chunk.sequence];
            if let Some(digest) = rows.first_digest() {
                rows.sampled = sample_digest(sequence, digest, workspace)?;
                sequence.look_ahead.set_needs_row(rows.sampled.is_none() && rows.step.rows_are_gone);
            }
        }
        parts.retain(|rows| {
            rows.first_digest().is_none() || !group.sequences[rows.chunk.sequence].look_ahead.needs_row()
        });
        Ok(())
    }

    /// Samples the next tokens of every sequence that is complete: one, and one more for each drafted token that was
    /// right. After the prompt, all choices sample from the prompt's last row. Returns the largest number of tokens
    /// that a sequence got.
    pub(super) fn sample_tokens(&mut self, id: GroupId, complete: Vec<ChunkRows<'_>>) -> Result<usize, Error> {
        let vocab_size = self.model.config().vocab_size;
        let group = self.running.get_mut(&id).expect("a planned request runs");
        if group.sequences.len() < group.request.width() {
            fork_choices(group, &mut self.cache, vocab_size)?;
        }
        let shares_prompt =
            complete.len() == 1 && group.sequences.iter().all(|s| s.tokens.len() == group.request.prompt.len());
        // A row that several sequences sample from is always fetched whole, so `sampled` is empty for it.
        let targets: Vec<(usize, &ChunkRows<'_>)> = if shares_prompt {
            let wanted = (0..group.sequences.len()).filter(|&i| group.sequences[i].finish.is_none());
            wanted.map(|i| (i, &complete[0])).collect()
        } else {
            complete.iter().map(|part| (part.chunk.sequence, part)).collect()
        };
        let mut most = 0;
        for (i, rows) in targets {
            most = most.max(self.sample_sequence(id, i, rows)?);
        }
        Ok(most)
    }

    /// Samples the tokens of one sequence: from the first row, and from each further row while what was drafted for it
    /// is what was sampled. Returns the number of tokens.
    fn sample_sequence(&mut self, id: GroupId, i: usize, rows: &ChunkRows<'_>) -> Result<usize, Error> {
        let Engine { running, cache, workspace, model, kv, spare_row, drafters, stats, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        let (vocab_size, context_len) = (model.config().vocab_size, model.config().context_len);
        let (draft_len, first) = (rows.chunk.draft_len(), rows.first_to_sample());
        let (mut chosen, mut num_accepted) = (Vec::new(), 0);
        let num_forced_before = group.stats.forced_tokens;
        for row in 0..=draft_len {
            let sequence = &mut group.sequences[i];
            sequence.reserve()?;
            let digest = rows.digest(first + row);
            let sampled = match (row, digest) {
                (0, _) => rows.sampled.clone(),
                (_, Some(digest)) => sample_digest(sequence, digest, workspace)?,
                (_, None) => None,
            };
            let sampled = sampled.or_else(|| forced_choice(sequence, &group.request));
            let trace = group.request.trace;
            let (mut choice, trace) = match (sampled, digest) {
                (Some(choice), _) => (choice, None),
                (None, Some(_)) => {
                    spare_row.resize(vocab_size, 0.0);
                    model.read_row(rows.chunk.first_wanted_row + first + row, spare_row)?;
                    sample_row(sequence, spare_row, trace, workspace)?
                }
                (None, None) => sample_row(sequence, rows.row(first + row), trace, workspace)?,
            };
            if row == 0 {
                sequence.look_ahead.sampled(choice.token, digest.and_then(|digest| digest.assumed));
            } else {
                // The token that this row was computed from is the right one, so its keys and values are.
                sequence.num_computed += 1;
                stats.decode_tokens += 1;
                let table = sequence.table.as_mut().expect("a running sequence has blocks");
                cache.accept_draft(table, row - 1);
                let num_cacheable = group.request.num_cacheable(sequence.num_computed);
                cache.index_full_blocks(table, &sequence.tokens[..num_cacheable]);
            }
            let proposal = sequence.drafts.proposal(row).filter(|_| row < draft_len);
            if let Some(proposal) = proposal.filter(|_| drafters.trusts_drafts()) {
                choice.token = proposal.token;
            }
            let is_accepted = row < draft_len && sequence.drafts.next(row) == Some(choice.token);
            num_accepted += usize::from(is_accepted);
            chosen.push(choice.token);
            probe_token(group, (i, choice.token), (&mut **model, kv), workspace)?;
            if commit_token(group, i, (choice, trace, proposal), cache, context_len)? || !is_accepted {
                break;
            }
        }
        let num_committed = chosen.len() + commit_run(group, i, cache, context_len)?;
        stats.forced_tokens += (group.stats.forced_tokens - num_forced_before) as u64;
        let tenant = group.tenant();
        let sequence = &mut group.sequences[i];
        if let Some(table) = &mut sequence.table {
            cache.end_drafts(table);
        }
        if let Some((drafter, counts)) = sequence.drafts.counts(num_accepted).filter(|_| draft_len > 0) {
            group.stats.speculation.add(drafter, counts);
            stats.speculation.add(drafter, counts);
            stats.num_drafts += 1;
            drafters.num_accepted += num_accepted;
        }
        drafters.observe(tenant, &mut sequence.drafts, &chosen);
        if sequence.finish.is_some() {
            drafters.keep_output(group.request.scope, &sequence.tokens[group.request.prompt.len()..]);
        }
        Ok(num_committed)
    }
}

/// Adds a token to a sequence and sends it. Returns whether it ends the sequence.
pub(super) fn commit_token(
    group: &mut SequenceGroup,
    i: usize,
    (choice, trace, proposal): (Choice, Option<Box<TokenTrace>>, Option<Proposal>),
    cache: &mut KvCache,
    context_len: usize,
) -> Result<bool, Error> {
    let holds_back = group.holds_back();
    let reports_logprobs = group.request.sampling.logprobs.is_some();
    let batch_size = group.batch_size;
    let sequence = &mut group.sequences[i];
    let mut finish = match choice.end {
        Some(End::EndOfSequence) => Some(FinishReason::End),
        Some(End::Stop) => Some(FinishReason::Stop),
        None => None,
    };
    sequence.num_sampled += 1;
    sequence.total_logprob += choice.logprobs.as_ref().map_or(0.0, |logprobs| f64::from(logprobs.chosen));
    let logprobs = choice.logprobs.filter(|_| reports_logprobs);
    let event = TokenEvent { choice: sequence.choice, id: choice.token, logprobs, trace, proposal, batch_size };
    let mut end_token = None;
    if finish.is_some() {
        end_token = Some(event);
    } else {
        sequence.tokens.push(choice.token);
        sequence.history.push(choice.token);
        group.stats.output_tokens += 1;
        if holds_back {
            fallible::push(&mut sequence.held, event)?;
        } else {
            group.sink.hold(Event::Token(event));
        }
        let grammar = sequence.grammar.as_mut();
        let is_complete = grammar.map_or(Ok(false), |grammar| {
            group.stats.forced_tokens += usize::from(grammar.forces(choice.token));
            grammar.accept(choice.token)
        })?;
        let at_limit = sequence.finish_at_limit(&group.request, context_len);
        finish = if is_complete { Some(FinishReason::End) } else { at_limit };
    }
    if let Some(reason) = finish {
        sequence.end(reason, cache);
        if !holds_back {
            group.sink.hold(Event::ChoiceEnd { choice: sequence.choice, reason, token: end_token });
        }
    }
    Ok(finish.is_some())
}

/// Creates the other choices of a request, which share the blocks of its prompt.
fn fork_choices(group: &mut SequenceGroup, cache: &mut KvCache, vocab_size: usize) -> Result<(), Error> {
    for choice in group.sequences.len()..group.request.width() {
        let first = &group.sequences[0];
        let mut sequence = Sequence::new(choice, &group.request.prompt, group.request.sampler(choice, vocab_size)?)?;
        sequence.grammar = SequenceGrammar::new(&group.request, vocab_size)?;
        sequence.num_computed = first.num_computed;
        sequence.table = first.table.as_ref().map(|table| cache.fork(table)).transpose()?;
        group.sequences.push(sequence);
    }
    // Some may have been ended by a control message during prefill.
    for &choice in &group.unwanted {
        group.sequences[choice].end(FinishReason::Stop, cache);
    }
    Ok(())
}

/// Samples from the digest of a row of logits; `None` if the digest does not determine the token, as where a grammar
/// excludes the most probable tokens.
fn sample_digest(
    sequence: &mut Sequence,
    digest: &RowDigest,
    workspace: &mut Workspace,
) -> Result<Option<Choice>, Error> {
    let (position, is_masked) = (sequence.tokens.len() as u32, sequence.is_masked());
    let Sequence { sampler, grammar, .. } = sequence;
    let Some(query) = sampler.query(position).filter(|_| digest.is_plain) else { return Ok(None) };
    let mask = match grammar.as_mut().filter(|_| is_masked) {
        None => None,
        Some(grammar) => {
            if !grammar.forced().is_empty() {
                // A forced token needs neither mask nor logits.
                return Ok(None);
            }
            grammar.mask(false)?
        }
    };
    let RowDigest { ref top, has_all, totals, ref finalists, .. } = *digest;
    let digest = Digest { top, has_all, totals, temperature: query.temperature, finalists };
    Ok(sampler.sample_digest(&digest, position, mask, workspace)?)
}

/// Samples from a row of logits.
fn sample_row(
    sequence: &mut Sequence,
    logits: &[f32],
    trace: bool,
    workspace: &mut Workspace,
) -> Result<(Choice, Option<Box<TokenTrace>>), Error> {
    let Sequence { sampler, history, state, tokens, grammar, .. } = sequence;
    let mask = grammar.as_mut().map(|grammar| grammar.mask(trace)).transpose()?.flatten();
    let input = Input { logits, history, position: tokens.len() as u32, mask };
    if trace {
        let (choice, mut trace) = sampler.trace(&input, state, workspace)?;
        grammar.iter_mut().for_each(|grammar| grammar.describe(&mut trace));
        return Ok((choice, Some(Box::new(trace))));
    }
    Ok((sampler.sample(&input, state, workspace)?, None))
}
