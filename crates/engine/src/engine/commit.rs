//! Commits a step: records what was computed, samples tokens, sends events, and ends replies.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pellucid_sampling::{Choice, Digest, End, Input, Logprobs, TokenTrace, Workspace};
use pellucid_tensor::RowDigest;

use super::run::internal_error;
use super::{Engine, PlannedChunk, Step};
use crate::kv_cache::KvCache;
use crate::sequence::Sequence;
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Error, Event, FinishReason, TokenEvent, fallible};

/// A chunk of a step that has ended, with the logits of its wanted rows.
pub(super) struct ChunkRows<'a> {
    pub(super) chunk: &'a PlannedChunk,
    step: &'a Step,
    /// The token that was sampled from the digest of the chunk's one wanted row, if the digest was enough.
    sampled: Option<Choice>,
}

impl<'a> ChunkRows<'a> {
    fn row(&self, row: usize) -> &'a [f32] {
        self.step.logits.row(self.chunk.first_wanted_row + row)
    }

    /// Index of the chunk's last wanted row among the wanted rows of the step.
    fn last_index(&self) -> usize {
        self.chunk.first_wanted_row + self.chunk.wanted.len() - 1
    }

    pub(super) fn last(&self) -> &'a [f32] {
        self.step.logits.row(self.last_index())
    }

    /// The digest of the last wanted row; `None` if the whole row was fetched.
    fn digest(&self) -> Option<&'a RowDigest> {
        (!self.chunk.wanted.is_empty()).then(|| self.step.logits.digest(self.last_index())).flatten()
    }
}

impl Engine {
    /// Commits the chunks of a step; ends their requests if it failed.
    pub(super) fn commit(&mut self, step: &Step, outcome: Result<(), Error>) {
        match outcome {
            Ok(()) => self.commit_groups(step),
            Err(error) => self.fail_step(&step.chunks, error),
        }
        // With an asynchronous device, `run` sends these events when the next step is on its way.
        if !self.model.is_asynchronous(1) || self.running.is_empty() {
            self.deliver();
        }
    }

    fn commit_groups(&mut self, step: &Step) {
        let now = self.clock.now();
        let mut by_group: Vec<(GroupId, Vec<ChunkRows<'_>>)> = Vec::new();
        for chunk in &step.chunks {
            let rows = ChunkRows { chunk, step, sampled: None };
            match by_group.last_mut().filter(|(id, _)| *id == chunk.group) {
                Some((_, parts)) => parts.push(rows),
                None => by_group.push((chunk.group, vec![rows])),
            }
        }
        for (id, parts) in by_group {
            // A panic while one request is committed must not end the others.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.commit_group(id, parts, now)));
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.fail_request(id, error),
                Err(panic) => self.fail_request(id, internal_error(&panic)),
            }
        }
    }

    fn commit_group(&mut self, id: GroupId, mut parts: Vec<ChunkRows<'_>>, now: Instant) -> Result<(), Error> {
        self.sample_digests(id, &mut parts)?;
        self.record_computed(id, &parts);
        let Engine { running, workspace, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        if let Some(started) = group.started.filter(|_| group.stats.queue_time.is_zero()) {
            group.stats.queue_time = started - group.arrived;
        }
        for rows in &parts {
            let sequence = &group.sequences[rows.chunk.sequence];
            if sequence.num_computed < group.request.prompt.len() {
                let (computed, total) = (sequence.num_computed, group.request.prompt.len());
                group.sink.hold(Event::PromptProgress { computed, total });
            }
            if group.request.score_prompt {
                score_prompt(group, rows, workspace)?;
            }
        }
        let complete: Vec<ChunkRows<'_>> =
            parts.into_iter().filter(|part| group.sequences[part.chunk.sequence].num_left() == 0).collect();
        if complete.is_empty() {
            return Ok(());
        }
        if group.first_token.is_none() {
            group.first_token = Some(now);
            group.stats.time_to_first_token = now - group.arrived;
        } else {
            group.stats.decode_steps += 1;
        }
        if group.search.is_some() {
            self.advance_beams(id, &complete)?;
        } else {
            self.sample_tokens(id, complete)?;
        }
        self.finish_if_done(id, now);
        Ok(())
    }

    /// Samples from digests. If a digest does not determine the token, the row is read later. If the row is gone,
    /// because the next step is on the device already, the chunk is left out and its position is computed again.
    fn sample_digests(&mut self, id: GroupId, parts: &mut Vec<ChunkRows<'_>>) -> Result<(), Error> {
        let Engine { running, workspace, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        for rows in parts.iter_mut() {
            let sequence = &mut group.sequences[rows.chunk.sequence];
            if let Some(digest) = rows.digest() {
                rows.sampled = sample_digest(sequence, digest, workspace)?;
                sequence.look_ahead.set_needs_row(rows.sampled.is_none() && rows.step.rows_are_gone);
            }
        }
        parts.retain(|rows| rows.digest().is_none() || !group.sequences[rows.chunk.sequence].look_ahead.needs_row());
        Ok(())
    }

    /// Records the positions whose keys and values are stored now, and enters full blocks into the tenant's prefix
    /// index.
    fn record_computed(&mut self, id: GroupId, parts: &[ChunkRows<'_>]) {
        let Engine { running, cache, stats, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        for ChunkRows { chunk, .. } in parts {
            let sequence = &mut group.sequences[chunk.sequence];
            debug_assert_eq!(sequence.num_computed, chunk.positions.start);
            sequence.num_computed = chunk.positions.end;
            let table = sequence.table.as_mut().expect("a running sequence has blocks");
            cache.index_full_blocks(table, &sequence.tokens[..sequence.num_computed]);
            let counter = if chunk.is_decode { &mut stats.decode_tokens } else { &mut stats.prefill_tokens };
            *counter += chunk.num_tokens() as u64;
        }
    }

    /// Samples the next token of every sequence that is complete. After the prompt, all choices sample from the
    /// prompt's last row.
    fn sample_tokens(&mut self, id: GroupId, complete: Vec<ChunkRows<'_>>) -> Result<(), Error> {
        let Engine { running, cache, workspace, model, spare_row, .. } = self;
        let group = running.get_mut(&id).expect("a planned request runs");
        let (vocab_size, context_len) = (model.config().vocab_size, model.config().context_len);
        if group.sequences.len() < group.request.width() {
            fork_choices(group, cache, vocab_size)?;
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
        let (holds_back, trace) = (group.holds_back(), group.request.trace);
        let reports_logprobs = group.request.sampling.logprobs.is_some();
        for (i, rows) in targets {
            let sequence = &mut group.sequences[i];
            sequence.reserve()?;
            let (choice, trace) = match (&rows.sampled, rows.digest()) {
                (Some(choice), _) => (choice.clone(), None),
                (None, Some(_)) => {
                    spare_row.resize(vocab_size, 0.0);
                    model.read_row(rows.last_index(), spare_row)?;
                    sample_row(sequence, spare_row, trace, workspace)?
                }
                (None, None) => sample_row(sequence, rows.last(), trace, workspace)?,
            };
            sequence.look_ahead.sampled(choice.token, rows.digest().and_then(|digest| digest.assumed));
            let mut finish = match choice.end {
                Some(End::EndOfSequence) => Some(FinishReason::End),
                Some(End::Stop) => Some(FinishReason::Stop),
                None => None,
            };
            sequence.num_sampled += 1;
            sequence.total_logprob += choice.logprobs.as_ref().map_or(0.0, |logprobs| f64::from(logprobs.chosen));
            let logprobs = choice.logprobs.filter(|_| reports_logprobs);
            let event = TokenEvent { choice: sequence.choice, id: choice.token, logprobs, trace, proposal: None };
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
                finish = sequence.finish_at_limit(&group.request, context_len);
            }
            if let Some(reason) = finish {
                sequence.end(reason, cache);
                if !holds_back {
                    group.sink.hold(Event::ChoiceEnd { choice: sequence.choice, reason, token: end_token });
                }
            }
        }
        Ok(())
    }

    fn finish_if_done(&mut self, id: GroupId, now: Instant) {
        if !self.running.get(&id).is_some_and(SequenceGroup::is_finished) {
            return;
        }
        let mut group = self.running.remove(&id).expect("it was just there");
        group.release(&mut self.cache);
        group.complete(now);
        self.ended.push(group.sink);
        self.stats.finished_requests += 1;
    }
}

/// Creates the other choices of a request, which share the blocks of its prompt.
fn fork_choices(group: &mut SequenceGroup, cache: &mut KvCache, vocab_size: usize) -> Result<(), Error> {
    for choice in group.sequences.len()..group.request.width() {
        let first = &group.sequences[0];
        let mut sequence = Sequence::new(choice, &group.request.prompt, group.request.sampler(choice, vocab_size)?)?;
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

/// Samples from the digest of a row of logits; `None` if the digest does not determine the token.
fn sample_digest(sequence: &Sequence, digest: &RowDigest, workspace: &mut Workspace) -> Result<Option<Choice>, Error> {
    let position = sequence.tokens.len() as u32;
    let Some(query) = sequence.sampler.query(position).filter(|_| digest.is_plain) else { return Ok(None) };
    let RowDigest { ref top, has_all, totals, ref finalists, .. } = *digest;
    let digest = Digest { top, has_all, totals, temperature: query.temperature, finalists };
    Ok(sequence.sampler.sample_digest(&digest, position, workspace)?)
}

/// Samples from a row of logits.
fn sample_row(
    sequence: &mut Sequence,
    logits: &[f32],
    trace: bool,
    workspace: &mut Workspace,
) -> Result<(Choice, Option<Box<TokenTrace>>), Error> {
    let Sequence { sampler, history, state, tokens, .. } = sequence;
    let input = Input { logits, history, position: tokens.len() as u32, mask: None };
    if trace {
        let (choice, trace) = sampler.trace(&input, state, workspace)?;
        return Ok((choice, Some(Box::new(trace))));
    }
    Ok((sampler.sample(&input, state, workspace)?, None))
}

/// Computes the log probabilities of the prompt tokens that this chunk's rows predict, and sends them when all are
/// known.
fn score_prompt(group: &mut SequenceGroup, rows: &ChunkRows<'_>, workspace: &mut Workspace) -> Result<(), Error> {
    let (prompt, chunk) = (&group.request.prompt, rows.chunk);
    let start = chunk.positions.start;
    if start >= prompt.len() || group.prompt_logprobs.len() + 1 >= prompt.len() {
        return Ok(());
    }
    let num_top = group.request.sampling.logprobs.unwrap_or(0);
    for (row, position) in chunk.wanted.clone().map(|row| start + row).enumerate() {
        // After a preemption the rows are computed again; log probabilities that are known are kept.
        if position == group.prompt_logprobs.len() && position + 1 < prompt.len() {
            // Room for all of them at once, so that a long list is not copied while it grows.
            fallible::reserve(&mut group.prompt_logprobs, prompt.len() - 1 - position)?;
            group.prompt_logprobs.push(Logprobs::of(rows.row(row), prompt[position + 1], num_top, workspace)?);
        }
    }
    if group.prompt_logprobs.len() + 1 == prompt.len() {
        group.sink.hold(Event::PromptLogprobs(fallible::copy_of(&group.prompt_logprobs)?));
    }
    Ok(())
}
