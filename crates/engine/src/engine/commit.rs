//! What a step gave: keys and values are accounted for, tokens are drawn, replies end.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

use pellucid_sampling::{Choice, Digest, End, Input, Logprobs, TokenTrace, Workspace};
use pellucid_tensor::RowDigest;

use super::{Engine, Planned, Step, panic_message};
use crate::sequence::Sequence;
use crate::sequence_group::{GroupId, SequenceGroup};
use crate::{Error, Event, FinishReason, TokenEvent};

/// The logits of the rows that a planned chunk wanted.
struct Rows<'a> {
    planned: &'a Planned,
    step: &'a Step,
    /// By the digest of the one row that was wanted, where that does.
    chosen: Option<Choice>,
}

impl<'a> Rows<'a> {
    fn row(&self, row: usize) -> &'a [f32] {
        self.step.logits.row(self.planned.row + row)
    }

    /// Where the row at the end of a chunk that reached its sequence's end is among the step's.
    fn last_row(&self) -> usize {
        self.planned.row + self.planned.wanted.len() - 1
    }

    fn last(&self) -> &'a [f32] {
        self.step.logits.row(self.last_row())
    }

    /// What does in the place of that row.
    fn digest(&self) -> Option<&'a RowDigest> {
        (!self.planned.wanted.is_empty()).then(|| self.step.logits.digest(self.last_row())).flatten()
    }
}

impl Engine {
    pub(super) fn commit(&mut self, step: &Step) {
        let now = Instant::now();
        let mut by_group: Vec<(GroupId, Vec<Rows<'_>>)> = Vec::new();
        for planned in &step.plan {
            let rows = Rows { planned, step, chosen: None };
            match by_group.last_mut().filter(|(id, _)| *id == planned.group) {
                Some((_, parts)) => parts.push(rows),
                None => by_group.push((planned.group, vec![rows])),
            }
        }
        for (id, parts) in by_group {
            // A fault while one request is served must not reach the others.
            let outcome = catch_unwind(AssertUnwindSafe(|| self.commit_group(id, parts, now)));
            match outcome {
                Ok(Ok(())) => {}
                Ok(Err(error)) => self.end_with(id, error),
                Err(panic) => self.end_with(id, Error::Internal(panic_message(&panic))),
            }
        }
    }

    /// Chooses tokens by digests. Where one does not do the row is looked at; with the next step on the device already that row is
    /// gone, and the part is left out: its position is computed again.
    fn choose_in_brief(&mut self, id: GroupId, parts: &mut Vec<Rows<'_>>) -> Result<(), Error> {
        let Engine { running, workspace, .. } = self;
        let group = running.get_mut(&id).expect("a planned group runs");
        for rows in parts.iter_mut() {
            let sequence = &mut group.sequences[rows.planned.sequence];
            if let Some(digest) = rows.digest() {
                rows.chosen = choose_in_brief(sequence, digest, workspace)?;
                sequence.needs_row = rows.chosen.is_none() && rows.step.rows_are_gone;
                sequence.is_ahead &= !sequence.needs_row;
            }
        }
        parts.retain(|rows| rows.digest().is_none() || !group.sequences[rows.planned.sequence].needs_row);
        Ok(())
    }

    /// Notes what is stored now, and enters full blocks into the tenant's index.
    fn account(&mut self, id: GroupId, parts: &[Rows<'_>]) {
        let Engine { running, cache, served, stats, .. } = self;
        let group = running.get_mut(&id).expect("a planned group runs");
        for Rows { planned, .. } in parts {
            let sequence = &mut group.sequences[planned.sequence];
            debug_assert_eq!(sequence.num_computed, planned.positions.start);
            sequence.num_computed = planned.positions.end;
            let table = sequence.table.as_mut().expect("a running sequence has blocks");
            cache.remember(table, &sequence.tokens[..sequence.num_computed]);
            served.charge(group.request.scope.tenant, planned.num_tokens());
            let counter = if planned.is_decode { &mut stats.decode_tokens } else { &mut stats.prefill_tokens };
            *counter += planned.num_tokens() as u64;
        }
    }

    fn commit_group(&mut self, id: GroupId, mut parts: Vec<Rows<'_>>, now: Instant) -> Result<(), Error> {
        self.choose_in_brief(id, &mut parts)?;
        self.account(id, &parts);
        let Engine { running, workspace, .. } = self;
        let group = running.get_mut(&id).expect("a planned group runs");
        if let Some(started) = group.started.filter(|_| group.stats.queue_time.is_zero()) {
            group.stats.queue_time = started - group.arrived;
        }
        for rows in &parts {
            let sequence = &group.sequences[rows.planned.sequence];
            if sequence.num_computed < group.request.prompt.len() {
                let (computed, total) = (sequence.num_computed, group.request.prompt.len());
                group.sink.hold(Event::PromptProgress { computed, total });
            }
            if group.request.score_prompt {
                score_prompt(group, rows, workspace)?;
            }
        }
        let complete: Vec<Rows<'_>> =
            parts.into_iter().filter(|part| group.sequences[part.planned.sequence].num_left() == 0).collect();
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
            self.draw(id, complete)?;
        }
        self.finish_if_done(id, now);
        Ok(())
    }

    /// Draws the next token of every sequence that has logits; after the prompt, the other choices begin from the same ones.
    fn draw(&mut self, id: GroupId, complete: Vec<Rows<'_>>) -> Result<(), Error> {
        let Engine { running, cache, workspace, model, spare_row, .. } = self;
        let group = running.get_mut(&id).expect("a planned group runs");
        let (vocab_size, context_len) = (model.config().vocab_size, model.config().context_len);
        if group.sequences.len() < group.request.width() {
            fork_choices(group, cache, vocab_size)?;
        }
        let shares_prompt =
            complete.len() == 1 && group.sequences.iter().all(|s| s.tokens.len() == group.request.prompt.len());
        // A row that several draw from is never told in brief, and so has not been chosen from.
        let targets: Vec<(usize, &Rows<'_>)> = if shares_prompt {
            let wanted = (0..group.sequences.len()).filter(|&i| group.sequences[i].finish.is_none());
            wanted.map(|i| (i, &complete[0])).collect()
        } else {
            complete.iter().map(|part| (part.planned.sequence, part)).collect()
        };
        let (holds_back, trace) = (group.holds_back(), group.request.trace);
        let reports_logprobs = group.request.sampling.logprobs.is_some();
        for (i, rows) in targets {
            let sequence = &mut group.sequences[i];
            let (choice, trace) = match (&rows.chosen, rows.digest()) {
                (Some(choice), _) => (choice.clone(), None),
                (None, Some(_)) => {
                    spare_row.resize(vocab_size, 0.0);
                    model.read_row(rows.last_row(), spare_row)?;
                    choose(sequence, spare_row, trace, workspace)?
                }
                (None, None) => choose(sequence, rows.last(), trace, workspace)?,
            };
            sequence.is_foreseen = rows.digest().is_some_and(|digest| digest.assumed == Some(choice.token));
            sequence.is_ahead &= sequence.is_foreseen;
            sequence.needs_row = false;
            let mut finish = match choice.end {
                Some(End::EndOfSequence) => Some(FinishReason::End),
                Some(End::Stop) => Some(FinishReason::Stop),
                None => None,
            };
            sequence.num_drawn += 1;
            sequence.total_logprob += choice.logprobs.as_ref().map_or(0.0, |logprobs| f64::from(logprobs.chosen));
            let logprobs = choice.logprobs.filter(|_| reports_logprobs);
            let event = TokenEvent { choice: sequence.choice, id: choice.token, logprobs, trace };
            let mut end_token = None;
            if finish.is_some() {
                end_token = Some(event);
            } else {
                sequence.tokens.push(choice.token);
                sequence.history.push(choice.token);
                group.stats.output_tokens += 1;
                if holds_back {
                    sequence.held.push(event)
                } else {
                    group.sink.hold(Event::Token(event))
                }
                finish = group.request.limit(sequence.tokens.len(), context_len);
            }
            if let Some(reason) = finish {
                sequence.finish = Some(reason);
                if let Some(table) = sequence.table.take() {
                    cache.release(table);
                }
                if !holds_back {
                    group.sink.hold(Event::ChoiceEnd { choice: sequence.choice, reason, token: end_token });
                }
            }
        }
        Ok(())
    }

    /// Hands the logits of all beams to the search, and turns the sequences into those that it wants next.
    fn advance_beams(&mut self, id: GroupId, complete: &[Rows<'_>]) -> Result<(), Error> {
        let Engine { running, cache, model, .. } = self;
        let group = running.get_mut(&id).expect("a planned group runs");
        let num_running = group.sequences.len();
        assert_eq!(complete.len(), num_running, "beams advance together");
        let mut rows: Vec<&[f32]> = vec![&[]; num_running];
        for part in complete {
            rows[part.planned.sequence] = part.last();
        }
        if let Some(token) = rows.iter().flat_map(|row| row.iter()).position(|logit| logit.is_nan()) {
            let token = (token % model.config().vocab_size) as u32;
            return Err(pellucid_sampling::Error::NotANumber { token }.into());
        }
        let search = group.search.as_mut().expect("a beam search");
        let next = search.advance(&rows);
        let reservation = group.reservation.as_mut().expect("a running group has a reservation");
        // Each beam is a token longer, also with the last step.
        group.stats.output_tokens += next.as_ref().map_or(group.request.width(), Vec::len);
        let Some(next) = next else {
            // All are of one length, and would be one token longer.
            let limit = group.request.limit(group.sequences[0].tokens.len() + 1, model.config().context_len);
            for sequence in &mut group.sequences {
                sequence.finish = Some(limit.unwrap_or(FinishReason::End));
                if let Some(table) = sequence.table.take() {
                    cache.release(table);
                }
            }
            return Ok(());
        };
        let mut sequences = Vec::with_capacity(next.len());
        for (choice, continuation) in next.iter().enumerate() {
            let parent = &group.sequences[continuation.parent];
            let mut sequence = Sequence::new(choice, &parent.tokens, parent.sampler.clone());
            sequence.tokens.push(continuation.token);
            sequence.num_computed = parent.num_computed;
            sequence.table = parent.table.as_ref().map(|table| cache.fork(table));
            sequences.push(sequence);
        }
        let old = std::mem::replace(&mut group.sequences, sequences);
        for table in old.into_iter().filter_map(|sequence| sequence.table) {
            cache.release_into(table, reservation);
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
        self.leaving.push(group.sink);
        self.stats.finished_requests += 1;
    }
}

/// The other choices of a request, over the prompt's blocks.
fn fork_choices(
    group: &mut SequenceGroup,
    cache: &mut crate::kv_cache::KvCache,
    vocab_size: usize,
) -> Result<(), Error> {
    for choice in group.sequences.len()..group.request.width() {
        let first = &group.sequences[0];
        let mut sequence = Sequence::new(choice, &group.request.prompt, group.request.sampler(choice, vocab_size)?);
        sequence.num_computed = first.num_computed;
        sequence.table = first.table.as_ref().map(|table| cache.fork(table));
        group.sequences.push(sequence);
    }
    // Some were ended before they began.
    for &choice in &group.unwanted {
        group.sequences[choice].finish = Some(FinishReason::Stop);
        if let Some(table) = group.sequences[choice].table.take() {
            cache.release(table);
        }
    }
    Ok(())
}

/// By the digest of the logits; `None` where that does not reach.
fn choose_in_brief(
    sequence: &Sequence,
    digest: &RowDigest,
    workspace: &mut Workspace,
) -> Result<Option<Choice>, Error> {
    let position = sequence.tokens.len() as u32;
    let Some(query) = sequence.sampler.query(position).filter(|_| digest.is_plain) else { return Ok(None) };
    let RowDigest { ref top, has_all, totals, ref finalists, .. } = *digest;
    let digest = Digest { top, has_all, totals, temperature: query.temperature, finalists };
    Ok(sequence.sampler.sample_digest(&digest, position, workspace)?)
}

fn choose(
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

/// ln p of the prompt's tokens that this chunk's rows predict; sent once all are known.
fn score_prompt(group: &mut SequenceGroup, rows: &Rows<'_>, workspace: &mut Workspace) -> Result<(), Error> {
    let (prompt, planned) = (&group.request.prompt, rows.planned);
    let start = planned.positions.start;
    if start >= prompt.len() || group.prompt_logprobs.len() + 1 >= prompt.len() {
        return Ok(());
    }
    let num_top = group.request.sampling.logprobs.unwrap_or(0);
    for (row, position) in planned.wanted.clone().map(|row| start + row).enumerate() {
        // After a preemption the rows come again; what is known stays.
        if position == group.prompt_logprobs.len() && position + 1 < prompt.len() {
            group.prompt_logprobs.push(Logprobs::of(rows.row(row), prompt[position + 1], num_top, workspace)?);
        }
    }
    if group.prompt_logprobs.len() + 1 == prompt.len() {
        group.sink.hold(Event::PromptLogprobs(group.prompt_logprobs.clone()));
    }
    Ok(())
}
