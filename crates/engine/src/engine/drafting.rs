//! Lengthens the chunks of a step by what drafters propose. A draft uses only rows and blocks of KV memory that nobody
//! else needs: it never delays another sequence's row, and never causes a preemption.

use std::collections::BTreeSet;
use std::time::Duration;

use pellucid_model::Model;

use super::{Engine, PlannedChunk, Step};
use crate::kv_cache::Reservation;
use crate::scheduler::{Turn, Work};
use crate::sequence::{Sequence, SequenceGrammar};
use crate::speculation::{
    Candidate, ChainedDraft, DraftModel, DraftModelOptions, Level, Limits, MtpDraft, WantedDraft, choose,
};
use crate::{DraftContext, Drafter, DrafterKind, Error, MAX_DRAFT_LEN, SpeculationOptions};

/// Factor by which drafts may lengthen a step that several tenants share: the others gain nothing from them.
const MAX_SHARED_LENGTHENING: f64 = 1.05;

/// Minimum tokens that a reply is expected to have left, unless `max_tokens` says less, when the prefill of its prompt
/// by a draft model is weighed.
const EXPECTED_TOKENS: usize = 256;
/// Part of its expected gain that the prefill of a prompt by a draft model may cost.
const CATCH_UP_SHARE: f64 = 0.5;

/// A sequence that decodes in the step that is planned.
struct Prospect {
    /// Index of its chunk.
    chunk: usize,
    /// Whether the draft model, or the model's own layer, would draft for it; a lookup otherwise.
    is_for_model: bool,
    /// Whether the draft model should prefill the prompt of the sequence, so that it can draft in later steps.
    catches_up: bool,
    candidate: Candidate,
}

impl Engine {
    /// Sets which drafters propose tokens. Without this there are none.
    pub fn set_speculation(&mut self, options: SpeculationOptions) {
        self.drafters.options = options;
    }

    /// Adds a drafter of the program's own.
    pub fn add_drafter(&mut self, drafter: Box<dyn Drafter>) {
        self.drafters.add(drafter);
    }

    /// Adds a draft model: a smaller model with the same vocabulary, on the same device. It gets KV memory of
    /// `num_blocks` blocks. The operator's settings of the cache must be final by then.
    pub fn set_draft_model(&mut self, model: Box<dyn Model>, num_blocks: usize) -> Result<(), Error> {
        let options = DraftModelOptions {
            num_blocks,
            block_len: self.options.block_len,
            kv_dtype: self.options.kv_dtype,
            chunk_len: self.options.chunk_len,
            step_tokens: self.options.step_tokens,
            secret: self.options.secret,
        };
        let mut model = DraftModel::new(model, self.devices.output().clone(), options)?;
        model.follow_settings(&self.cache);
        self.drafters.model = Some(model);
        Ok(())
    }

    /// Accepts every drafted token unchecked, so that replies change. A proof that replies do not change must fail with
    /// it.
    #[doc(hidden)]
    pub fn trust_drafts(&mut self) {
        self.drafters.trust_drafts();
    }

    /// Adds drafts to the chunks of sequences that decode. Returns the time that a draft model took for them.
    pub(super) fn add_drafts(&mut self, chunks: &mut [PlannedChunk], turn: Turn) -> Duration {
        if !self.may_draft() {
            return Duration::ZERO;
        }
        let prospects = self.prospects(chunks);
        let lengths = self.draft_lengths(chunks, &prospects, turn);
        let catching_up = prospects.iter().filter(|prospect| prospect.catches_up && self.may_prefill(chunks, turn));
        let mut for_model: Vec<(usize, usize)> = catching_up.map(|prospect| (prospect.chunk, 0)).collect();
        for (prospect, len) in prospects.iter().zip(lengths).filter(|(prospect, len)| *len > 0 && !prospect.catches_up)
        {
            if prospect.is_for_model {
                for_model.push((prospect.chunk, len));
                continue;
            }
            let chunk = &mut chunks[prospect.chunk];
            let draft = *self.sequence_of(chunk).drafts.best().expect("a prospect has a proposal");
            self.plan_draft(chunk, &draft.tokens()[..len], draft.drafter);
        }
        match for_model.is_empty() {
            true => Duration::ZERO,
            false if self.drafters.model.is_some() => self.draft_with_model(chunks, &for_model),
            false => self.draft_with_mtp(chunks, &for_model),
        }
    }

    /// Lengthens chunks by tokens that a grammar forces, for requests that need the logits of every token. Such a draft
    /// cannot be wrong. Tenants that share a step do not wait for the forced tokens of others.
    pub(super) fn add_forced(&mut self, chunks: &mut [PlannedChunk], turn: Turn) {
        if turn != Turn::Alone {
            return;
        }
        let mut rows_left = self.draft_limits(chunks, turn).num_rows;
        for chunk in chunks.iter_mut().filter(|chunk| chunk.is_decode) {
            let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
            let sequence = &mut group.sequences[chunk.sequence];
            let tokens_left = group.request.max_positions(self.model.config()) - sequence.tokens.len();
            let Some(forced) = sequence.grammar.as_mut().map(SequenceGrammar::forced) else { continue };
            let max_len = MAX_DRAFT_LEN.min(tokens_left.saturating_sub(1)).min(rows_left);
            let forced = forced[..forced.len().min(max_len)].to_vec();
            let forced = &forced[..forced.len().min(self.draft_room(chunk))];
            if forced.is_empty() {
                continue;
            }
            rows_left -= forced.len();
            let sequence = self.lengthen(chunk, forced.len());
            let last = *sequence.tokens.last().expect("a sequence that decodes has tokens");
            sequence.drafts.plan_forced(last, forced);
        }
    }

    /// Whether a step with these chunks would be better with drafts, as far as is known before its tokens are.
    pub(super) fn would_draft(&mut self, chunks: &[PlannedChunk]) -> bool {
        if !self.may_draft() {
            return false;
        }
        let prospects = self.prospects(chunks);
        if prospects.iter().any(|prospect| prospect.catches_up) {
            return true;
        }
        if let Some(len) = self.drafters.options.fixed_draft_len {
            return len > 0 && prospects.iter().any(|prospect| prospect.candidate.len > 0);
        }
        let limits = self.draft_limits(chunks, Turn::Alone);
        let candidates: Vec<Candidate> = prospects.iter().map(|prospect| prospect.candidate).collect();
        choose(&self.draft_costs, work_of(chunks), &candidates, limits).iter().any(|&len| len > 0)
    }

    fn may_draft(&self) -> bool {
        !self.drafters.is_empty() || self.running.values().any(|group| !group.request.prediction.is_empty())
    }

    /// Asks the drafters about every sequence that decodes.
    fn prospects(&mut self, chunks: &[PlannedChunk]) -> Vec<Prospect> {
        let mut prospects: Vec<Prospect> = Vec::new();
        let takes_draft = |chunk: &PlannedChunk| chunk.is_decode && chunk.draft_len() == 0;
        for (index, chunk) in chunks.iter().enumerate().filter(|(_, chunk)| takes_draft(chunk)) {
            let max_len = self.max_draft_len(chunk);
            let mut candidate = Candidate::without_draft(chunk.positions.start);
            if max_len > 0 {
                let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
                let (scope, prompt_len) = (group.request.scope, group.request.prompt.len());
                let Sequence { drafts, tokens, .. } = &mut group.sequences[chunk.sequence];
                let context = DraftContext { scope, sequence: 0, tokens, prompt_len };
                self.drafters.look_up(context, &group.request.prediction, drafts, self.model.config().vocab_size);
                if let Some((acceptance, draft)) = drafts.acceptance.as_ref().zip(drafts.best()) {
                    candidate.len = draft.len().min(max_len);
                    candidate.rates = acceptance.rates(draft);
                }
            }
            prospects.push(Prospect { chunk: index, is_for_model: false, catches_up: false, candidate });
        }
        match self.drafters.model {
            Some(_) => self.add_model_prospects(chunks, &mut prospects),
            None => self.add_mtp_prospects(chunks, &mut prospects),
        }
        prospects
    }

    /// Replaces lookups by the draft model where it promises more tokens per second.
    fn add_model_prospects(&self, chunks: &[PlannedChunk], prospects: &mut [Prospect]) {
        let Some(model) = &self.drafters.model else { return };
        let plain_seconds = self.draft_costs.predict(work_of(chunks));
        let seconds_per_token =
            model.step_seconds(prospects.iter().map(|prospect| chunks[prospect.chunk].positions.end));
        // Candidates as they will be when the draft model has caught up.
        let mut later: Vec<Candidate> = prospects.iter().map(|prospect| prospect.candidate).collect();
        for (prospect, later) in prospects.iter_mut().zip(&mut later) {
            let chunk = &chunks[prospect.chunk];
            let sequence = self.sequence_of(chunk);
            let (id, num_tokens) = (sequence.drafts.id, sequence.tokens.len());
            let max_len = self.max_draft_len(chunk);
            let num_behind = model.num_behind(id, num_tokens);
            let Some((num_behind, acceptance)) = num_behind.zip(sequence.drafts.acceptance.as_ref()) else { continue };
            let rate = acceptance.rate(DrafterKind::DraftModel, Level::LOWEST);
            let mut candidate =
                Candidate { len: max_len, rates: [rate; MAX_DRAFT_LEN], seconds_per_token, ..prospect.candidate };
            let gain = 1.0 - promise(&prospect.candidate, plain_seconds) / promise(&candidate, plain_seconds);
            // With a fixed length there is no choice between a draft and none.
            let is_fixed = self.drafters.options.fixed_draft_len.is_some();
            if max_len == 0 || !(gain > 0.0 || is_fixed && prospect.candidate.len == 0) {
                continue;
            }
            let start_seconds = model.catch_up_seconds(num_tokens - num_behind, num_behind);
            if model.is_within_reach(id, num_tokens) || is_fixed {
                candidate.start_seconds = if model.is_caught_up(id, num_tokens) { 0.0 } else { start_seconds };
                (prospect.is_for_model, prospect.candidate) = (true, candidate);
                *later = candidate;
                continue;
            }
            // Before the first measurement of the draft model its time is 0: the first part of a prompt tells.
            let gained_seconds = gain * self.num_expected(chunk) as f64 * plain_seconds;
            prospect.catches_up = start_seconds <= CATCH_UP_SHARE * gained_seconds;
            *later = candidate;
        }
        if prospects.iter().any(|prospect| prospect.catches_up) {
            let lengths = choose(&self.draft_costs, work_of(chunks), &later, self.draft_limits(chunks, Turn::Alone));
            prospects.iter_mut().zip(lengths).for_each(|(prospect, len)| prospect.catches_up &= len > 0);
        }
    }

    /// Replaces lookups by the model's own layer for further tokens where it promises more tokens per second.
    fn add_mtp_prospects(&self, chunks: &[PlannedChunk], prospects: &mut [Prospect]) {
        let drafter = &self.drafters.mtp;
        if !self.drafters.options.mtp || self.model.config().predictor.is_none() || drafter.is_disabled() {
            return;
        }
        let plain_seconds = self.draft_costs.predict(work_of(chunks));
        let seconds_per_token =
            drafter.step_seconds(prospects.iter().map(|prospect| chunks[prospect.chunk].positions.end));
        for prospect in prospects {
            let chunk = &chunks[prospect.chunk];
            let sequence = self.sequence_of(chunk);
            // The layer starts from the row of the position before the last token.
            let max_len = if sequence.tokens.len() > 1 { self.max_draft_len(chunk) } else { 0 };
            let Some(acceptance) = sequence.drafts.acceptance.as_ref().filter(|_| max_len > 0) else { continue };
            let rate = acceptance.rate(DrafterKind::Mtp, Level::LOWEST);
            let candidate =
                Candidate { len: max_len, rates: [rate; MAX_DRAFT_LEN], seconds_per_token, ..prospect.candidate };
            let is_fixed = self.drafters.options.fixed_draft_len.is_some() && prospect.candidate.len == 0;
            if is_fixed || promise(&candidate, plain_seconds) > promise(&prospect.candidate, plain_seconds) {
                (prospect.is_for_model, prospect.candidate) = (true, candidate);
            }
        }
    }

    /// Returns the number of tokens that the sequence of a chunk is expected to generate still: those that it has
    /// generated, or [`EXPECTED_TOKENS`], within its limits.
    fn num_expected(&self, chunk: &PlannedChunk) -> usize {
        let request = &self.running[&chunk.group].request;
        let num_tokens = self.sequence_of(chunk).tokens.len();
        let num_output = num_tokens - request.prompt.len();
        (request.max_positions(self.model.config()) - num_tokens).min(num_output.max(EXPECTED_TOKENS))
    }

    /// Whether a draft model may compute parts of prompts beside this step: tenants that share the step do not wait
    /// for prompts of others.
    fn may_prefill(&self, chunks: &[PlannedChunk], turn: Turn) -> bool {
        let Some(model) = self.drafters.model.as_ref().filter(|_| turn != Turn::Alone) else { return true };
        let seconds = model.min_prefill_seconds();
        seconds <= (MAX_SHARED_LENGTHENING - 1.0) * self.draft_costs.predict(work_of(chunks))
    }

    /// Returns the number of tokens that may be drafted for a chunk's sequence: within its limits, and within the
    /// blocks that it has or that are reserved for its request.
    fn max_draft_len(&self, chunk: &PlannedChunk) -> usize {
        let group = &self.running[&chunk.group];
        if !group.request.speculate || group.search.is_some() {
            return 0;
        }
        let (sequence, room) = (&group.sequences[chunk.sequence], self.draft_room(chunk));
        // The row after the last drafted token gives a token as well.
        let tokens_left = group.request.max_positions(self.model.config()) - sequence.tokens.len();
        self.drafters.options.max_len().min(tokens_left.saturating_sub(1)).min(room)
    }

    /// Returns the number of positions after a chunk in the blocks that its sequence has or that are reserved for its
    /// request now, at most the number of recurrent states that can be saved for it.
    fn draft_room(&self, chunk: &PlannedChunk) -> usize {
        let group = &self.running[&chunk.group];
        let num_held = group.sequences[chunk.sequence].table.as_ref().map_or(0, |table| table.blocks().len());
        let num_reserved = group.reservation.as_ref().map_or(0, Reservation::num_blocks);
        let room = ((num_held + num_reserved) * self.options.block_len).saturating_sub(chunk.positions.end);
        if !self.cache.has_states() {
            return room;
        }
        let sequences = self.running.values().flat_map(|group| &group.sequences);
        room.min(self.cache.max_draft_len(sequences.filter(|sequence| sequence.is_running()).count()))
    }

    fn draft_lengths(&mut self, chunks: &[PlannedChunk], prospects: &[Prospect], turn: Turn) -> Vec<usize> {
        let limits = self.draft_limits(chunks, turn);
        let candidates: Vec<Candidate> = prospects.iter().map(|prospect| prospect.candidate).collect();
        if let Some(len) = self.drafters.options.fixed_draft_len {
            let mut rows_left = limits.num_rows;
            let fixed = candidates.iter().map(|candidate| {
                let len = len.min(candidate.len).min(rows_left);
                rows_left -= len;
                len
            });
            return fixed.collect();
        }
        self.drafters.lengths.choose(&self.draft_costs, work_of(chunks), &candidates, limits)
    }

    fn draft_limits(&self, chunks: &[PlannedChunk], turn: Turn) -> Limits {
        let num_rows: usize = chunks.iter().map(PlannedChunk::num_tokens).sum();
        let max_lengthening = if turn == Turn::Alone { f64::INFINITY } else { MAX_SHARED_LENGTHENING };
        Limits { num_rows: self.options.step_tokens.saturating_sub(num_rows), max_lengthening }
    }

    /// Runs the draft model for the chunks with these indices and draft lengths. Returns the time that it took.
    fn draft_with_model(&mut self, chunks: &mut [PlannedChunk], wanted: &[(usize, usize)]) -> Duration {
        let started = self.clock.now();
        let Engine { running, drafters, clock, costs, .. } = self;
        let (mut requests, mut of_chunk): (Vec<WantedDraft<'_>>, Vec<usize>) = (Vec::new(), Vec::new());
        for (id, group) in running.iter_mut() {
            let scope = group.request.scope;
            for (i, sequence) in group.sequences.iter_mut().enumerate() {
                let is_wanted = |(chunk, _): &&(usize, usize)| {
                    let chunk = &chunks[*chunk];
                    (chunk.group, chunk.sequence) == (*id, i)
                };
                let Some(&(chunk, max_len)) = wanted.iter().find(is_wanted) else { continue };
                drafters.know(sequence.drafts.id);
                of_chunk.push(chunk);
                requests.push(WantedDraft {
                    sequence: sequence.drafts.id,
                    scope,
                    tokens: &sequence.tokens,
                    max_len,
                    sampler: &sequence.sampler,
                    history: &mut sequence.history,
                    state: sequence.state,
                    draft: Vec::new(),
                });
            }
        }
        let model = drafters.model.as_mut().expect("it has prospects");
        // A model whose embedding is on another device than the drafts cannot take them from there.
        let takes_kept = self.model.token_slots().num_slots > 0;
        if let Some(drafts) = takes_kept.then(|| model.launch_chain(&requests)).flatten() {
            for (chunk, draft) in of_chunk.into_iter().zip(drafts) {
                self.plan_chained(&mut chunks[chunk], draft);
            }
            self.drafters.chain_launched = Some(started);
            return Duration::ZERO;
        }
        if drafters.options.fixed_draft_len.is_none() {
            // A token waits no longer for the prompt of its own request than for another step.
            model.limit_prefill(costs.predict(work_of(chunks)));
        }
        model.propose(&mut requests, &**clock);
        let drafts: Vec<Vec<u32>> = requests.into_iter().map(|request| request.draft).collect();
        let vocab_size = self.model.config().vocab_size;
        for (chunk, draft) in of_chunk.into_iter().zip(drafts) {
            let num_valid = draft.iter().take_while(|&&token| (token as usize) < vocab_size).count();
            if num_valid > 0 {
                self.plan_draft(&mut chunks[chunk], &draft[..num_valid], DrafterKind::DraftModel);
            }
        }
        self.clock.now() - started
    }

    /// Drafts with the model's own layer for the chunks with these indices and draft lengths. Returns the time that it
    /// took.
    fn draft_with_mtp(&mut self, chunks: &mut [PlannedChunk], wanted: &[(usize, usize)]) -> Duration {
        let started = self.clock.now();
        // The layer writes to the blocks of the drafted tokens.
        let lens: Vec<usize> = wanted.iter().map(|&(chunk, len)| self.take_draft_blocks(&chunks[chunk], len)).collect();
        let Engine { running, drafters, clock, model, kv, options, .. } = self;
        let (mut drafts, mut of_chunk): (Vec<MtpDraft<'_>>, Vec<usize>) = (Vec::new(), Vec::new());
        for (id, group) in running.iter_mut() {
            let scope = group.request.scope;
            for (i, sequence) in group.sequences.iter_mut().enumerate() {
                let is_wanted = |&(_, &(chunk, _)): &(usize, &(usize, usize))| {
                    (chunks[chunk].group, chunks[chunk].sequence) == (*id, i)
                };
                let Some((index, &(chunk, _))) = wanted.iter().enumerate().find(is_wanted) else { continue };
                of_chunk.push(chunk);
                let wanted = WantedDraft {
                    sequence: sequence.drafts.id,
                    scope,
                    tokens: &sequence.tokens,
                    max_len: lens[index],
                    sampler: &sequence.sampler,
                    history: &mut sequence.history,
                    state: sequence.state,
                    draft: Vec::new(),
                };
                let blocks = sequence.table.as_ref().expect("a running sequence has blocks").blocks();
                drafts.push(MtpDraft { wanted, blocks });
            }
        }
        drafters.mtp.propose((&mut **model, kv, options.block_len), &mut drafts, &**clock);
        let drafts: Vec<Vec<u32>> = drafts.into_iter().map(|draft| draft.wanted.draft).collect();
        for (chunk, draft) in of_chunk.into_iter().zip(drafts) {
            self.plan_draft(&mut chunks[chunk], &draft, DrafterKind::Mtp);
        }
        self.clock.now() - started
    }

    /// Takes the blocks for a draft of `len` tokens. Returns the length for which there are blocks.
    fn take_draft_blocks(&mut self, chunk: &PlannedChunk, len: usize) -> usize {
        let len = len.min(self.draft_room(chunk));
        let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        let table = group.sequences[chunk.sequence].table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, chunk.positions.end + len).expect("these blocks are reserved");
        len
    }

    /// Lengthens a chunk by a draft. The draft is cut if the drafts of the request's other sequences have taken the
    /// blocks that [`Engine::max_draft_len`] counted on.
    fn plan_draft(&mut self, chunk: &mut PlannedChunk, draft: &[u32], drafter: DrafterKind) {
        let draft = &draft[..draft.len().min(self.draft_room(chunk))];
        if draft.is_empty() {
            return;
        }
        let sequence = self.lengthen(chunk, draft.len());
        let last = *sequence.tokens.last().expect("a sequence that decodes has tokens");
        sequence.drafts.plan(last, draft, drafter);
        if matches!(drafter, DrafterKind::DraftModel | DrafterKind::Mtp) {
            sequence.drafts.add_drafted(drafter, draft);
        }
    }

    /// Lengthens a chunk by a draft that only the device knows. It is cut as by [`Engine::plan_draft`].
    fn plan_chained(&mut self, chunk: &mut PlannedChunk, draft: ChainedDraft) {
        let draft = ChainedDraft { len: draft.len.min(self.draft_room(chunk)), ..draft };
        if draft.len == 0 {
            return;
        }
        let sequence = self.lengthen(chunk, draft.len);
        let last = *sequence.tokens.last().expect("a sequence that decodes has tokens");
        sequence.drafts.plan_chained(last, draft);
    }

    /// Waits for the drafted tokens of a step that was launched while only the device knew them.
    pub(super) fn finish_chain(&mut self, step: &mut Step) -> Result<(), Error> {
        let Engine { running, drafters, clock, .. } = self;
        let Some((launched, model)) = drafters.chain_launched.take().zip(drafters.model.as_mut()) else {
            return Ok(());
        };
        let drafts = model.finish_chain(&**clock, launched)?;
        for chunk in step.chunks.iter().filter(|chunk| chunk.draft_len() > 0) {
            let sequence =
                &mut running.get_mut(&chunk.group).expect("a planned request runs").sequences[chunk.sequence];
            if let Some(row) = sequence.drafts.chained_row() {
                sequence.drafts.set_chained(&drafts[row][..chunk.draft_len()]);
            }
        }
        // The device begins with the step itself when the draft is complete.
        let now = clock.now();
        step.drafting_time += now - launched;
        step.launched = Some(now);
        Ok(())
    }

    /// Lengthens a chunk by `draft_len` rows, takes the blocks for them, and returns its sequence.
    fn lengthen(&mut self, chunk: &mut PlannedChunk, draft_len: usize) -> &mut Sequence {
        chunk.positions.end += draft_len;
        chunk.wanted = 0..chunk.num_tokens();
        let group = self.running.get_mut(&chunk.group).expect("a planned request runs");
        let reservation = group.reservation.as_mut().expect("a running request has a reservation");
        let sequence = &mut group.sequences[chunk.sequence];
        let table = sequence.table.as_mut().expect("a running sequence has blocks");
        self.cache.grow(table, reservation, chunk.positions.end).expect("these blocks are reserved");
        sequence
    }

    fn sequence_of(&self, chunk: &PlannedChunk) -> &Sequence {
        &self.running[&chunk.group].sequences[chunk.sequence]
    }

    /// Lets drafters forget the sequences that have ended.
    pub(super) fn forget_drafts(&mut self) {
        if self.drafters.is_empty() {
            return;
        }
        let waiting = self.waiting.values().flatten().map(|(_, group)| group);
        let sequences = self.running.values().chain(waiting).flat_map(|group| &group.sequences);
        let live: BTreeSet<u64> = sequences.map(|sequence| sequence.drafts.id).collect();
        self.drafters.retain(&live);
    }
}

/// Returns the largest number of expected tokens per second that a draft promises to its sequence alone, if a step
/// with it took as long as one without.
fn promise(candidate: &Candidate, plain_seconds: f64) -> f64 {
    let promise =
        |len: usize| (1.0 + candidate.expected(len)) / (plain_seconds + len as f64 * candidate.seconds_per_token);
    (0..=candidate.len).map(promise).fold(0.0, f64::max)
}

fn work_of(chunks: &[PlannedChunk]) -> Work {
    chunks.iter().fold(Work::default(), |work, chunk| work.and(chunk.work()))
}
