//! The rounds of a call: in each, one draft step computes the missing rows of the sequences and gives those that are
//! caught up one more drafted token.

use std::panic::{AssertUnwindSafe, catch_unwind};

use pellucid_model::{Chunk, ChunkIds, ChunkState};
use pellucid_sampling::State;

use super::sample::{self, Chain};
use super::sequences::NotStarted;
use super::{DraftModel, MAX_FAILED_STEPS, WantedDraft, internal_error};
use crate::kv_cache::TenantId;
use crate::scheduler::Work;
use crate::{Clock, Error, MAX_DRAFT_LEN};

/// Maximum rows that a sequence lacks when its prompt is computed: the tokens of one accepted draft, and the target's.
pub(super) const MAX_READY_ROWS: usize = MAX_DRAFT_LEN + 1;

/// Minimum rows of prompts of a call that catches up.
pub(super) const MIN_PREFILL_ROWS: usize = 64;

/// A sequence that still takes part in the rounds of a call.
pub(super) struct Job {
    /// Index in the list of wanted drafts.
    index: usize,
    sequence: u64,
    tenant: TenantId,
    /// Maximum tokens of its draft.
    pub(super) max_len: usize,
    /// State after the drafted tokens.
    state: State,
    is_done: bool,
}

/// The rows of one sequence in a draft step.
struct PlannedRows {
    /// Index in the list of jobs.
    job: usize,
    first_position: usize,
    num_rows: usize,
    /// Whether the next token is sampled from the last row.
    samples: bool,
}

impl DraftModel {
    /// Runs rounds until every draft is complete or has to wait for a later call.
    pub(super) fn draft(&mut self, wanted: &mut [WantedDraft<'_>], clock: &dyn Clock) {
        self.sequences.begin_call();
        let mut jobs = self.jobs(wanted);
        let mut prefill_left = self.prefill_rows(&jobs);
        while !self.is_disabled {
            let round = self.plan(wanted, &mut jobs, &mut prefill_left);
            if round.is_empty() {
                break;
            }
            let started = clock.now();
            if let Err(error) = self.run(wanted, &jobs, &round) {
                self.fail_round(&mut jobs, &round, error);
                continue;
            }
            self.commit(wanted, &mut jobs, &round);
            let work = round.iter().fold(Work::default(), |work, rows| work.and(rows.work()));
            self.costs.measure(work, (clock.now() - started).as_secs_f64());
        }
    }

    /// Returns the number of rows of prompts that a call may compute: those that are predicted to take no longer than
    /// the limit, but at least [`MIN_PREFILL_ROWS`], so that every prompt is computed in the end.
    fn prefill_rows(&self, jobs: &[Job]) -> usize {
        let known = jobs.iter().filter_map(|job| self.sequences.get(job.sequence));
        let depth = known.map(|sequence| sequence.num_computed).max().unwrap_or(0);
        let mut num_rows = self.options.chunk_len.min(self.options.step_tokens);
        let is_too_long = |num_rows: usize| {
            let seconds = self.costs.predict(Work::chunk(depth, num_rows));
            seconds > self.max_prefill_seconds || (seconds == 0.0 && self.max_prefill_seconds.is_finite())
        };
        while num_rows > MIN_PREFILL_ROWS && is_too_long(num_rows) {
            num_rows = (num_rows / 2).max(MIN_PREFILL_ROWS);
        }
        num_rows
    }

    /// Returns the sequences that can take part, after comparing what is stored of each with its tokens.
    pub(super) fn jobs(&mut self, wanted: &[WantedDraft<'_>]) -> Vec<Job> {
        let mut jobs: Vec<Job> = Vec::with_capacity(wanted.len());
        for (index, wanted) in wanted.iter().enumerate() {
            let (sequence, len) = (wanted.sequence, wanted.tokens.len());
            let is_twice = jobs.iter().any(|job| job.sequence == sequence);
            debug_assert!(!is_twice, "sequence {sequence} is wanted twice");
            if is_twice || len == 0 || len > self.context_len() || self.failed.contains(&sequence) {
                continue;
            }
            if let Err(error) = self.sequences.refresh(sequence, wanted.scope, wanted.tokens) {
                self.report(error);
                continue;
            }
            let num_computed = self.sequences.get(sequence).map_or(0, |sequence| sequence.num_computed);
            if let Err(error) = self.check_ids(&wanted.tokens[num_computed..]) {
                self.fail(sequence, error);
                continue;
            }
            // The last drafted token is not computed, so it may be one position past the context.
            let max_len = wanted.max_len.min(MAX_DRAFT_LEN).min(self.context_len() + 1 - len);
            let tenant = wanted.scope.tenant;
            jobs.push(Job { index, sequence, tenant, max_len, state: wanted.state, is_done: false });
        }
        jobs
    }

    /// Plans a draft step and takes the blocks for it. Sequences that are caught up come first. The others share
    /// `prefill_left` rows, each tenant the same part, the shortest rest first.
    fn plan(&mut self, wanted: &[WantedDraft<'_>], jobs: &mut [Job], prefill_left: &mut usize) -> Vec<PlannedRows> {
        let mut order: Vec<(usize, usize)> = (jobs.iter().enumerate())
            .filter(|(_, job)| !job.is_done)
            .map(|(i, job)| (self.num_left(job, wanted), i))
            .collect();
        order.sort_unstable();
        let behind = || order.iter().filter(|(left, _)| *left > MAX_READY_ROWS).map(|&(_, i)| i);
        let mut tenants: Vec<TenantId> = behind().map(|i| jobs[i].tenant).collect();
        tenants.sort_unstable();
        tenants.dedup();
        let mut shares = vec![prefill_left.div_ceil(tenants.len().max(1)); tenants.len()];
        let mut rows_left = self.options.step_tokens;
        let mut round: Vec<PlannedRows> = Vec::new();
        for (_, i) in order {
            let Some(num_left) = self.prepare(wanted, jobs, i, &round) else { continue };
            let share = tenants.binary_search(&jobs[i].tenant).ok().map(|tenant| &mut shares[tenant]);
            let is_prefill = num_left > MAX_READY_ROWS;
            let limit = match &share {
                Some(share) if is_prefill => (**share).min(*prefill_left),
                _ => usize::MAX,
            };
            let num_rows = num_left.min(limit).min(rows_left);
            if num_rows == 0 {
                continue;
            }
            let Job { sequence, max_len, .. } = jobs[i];
            let first_position = self.sequences.get(sequence).expect("it was prepared").num_computed;
            if !self.sequences.grow(sequence, first_position + num_rows) {
                self.give_up(wanted, &mut jobs[i]);
                continue;
            }
            rows_left -= num_rows;
            if let Some(share) = share.filter(|_| is_prefill) {
                *share -= num_rows;
                *prefill_left -= num_rows;
            }
            round.push(PlannedRows { job: i, first_position, num_rows, samples: num_rows == num_left && max_len > 0 });
        }
        round
    }

    /// Starts a sequence that is not known yet. Returns the number of rows that it lacks; `None` if it has to wait, or
    /// takes no part any more.
    fn prepare(
        &mut self,
        wanted: &[WantedDraft<'_>],
        jobs: &mut [Job],
        i: usize,
        round: &[PlannedRows],
    ) -> Option<usize> {
        let wanted_draft = &wanted[jobs[i].index];
        let (sequence, tokens) = (jobs[i].sequence, wanted_draft.tokens);
        if self.sequences.get(sequence).is_none() {
            // The choices of a request have the same prompt. One computes it, and the next finds it in the cache.
            let shares_prefix = |rows: &PlannedRows| {
                let other = &wanted[jobs[rows.job].index];
                let len = self.options.block_len.min(tokens.len()).min(other.tokens.len());
                rows.num_rows > MAX_READY_ROWS
                    && other.scope == wanted_draft.scope
                    && other.tokens[..len] == tokens[..len]
            };
            if tokens.len() > self.options.block_len && round.iter().any(shares_prefix) {
                return None;
            }
            match self.sequences.start(sequence, wanted_draft.scope, tokens, jobs[i].max_len) {
                Ok(()) => {}
                Err(why) => {
                    if let NotStarted::Failed(error) = why {
                        self.report(error);
                    }
                    jobs[i].is_done = true;
                    return None;
                }
            }
        }
        let num_left = self.num_left(&jobs[i], wanted);
        jobs[i].is_done = num_left == 0;
        (num_left > 0).then_some(num_left)
    }

    /// Refuses tokens that the draft model does not have.
    fn check_ids(&self, tokens: &[u32]) -> Result<(), Error> {
        let vocab_size = self.model.config().vocab_size;
        match tokens.iter().find(|&&id| id as usize >= vocab_size) {
            Some(&id) => Err(Error::IdOutsideVocabulary { id, vocab_size }),
            None => Ok(()),
        }
    }

    /// Returns the number of rows that a job lacks.
    fn num_left(&self, job: &Job, wanted: &[WantedDraft<'_>]) -> usize {
        let num_left = match self.sequences.get(job.sequence) {
            Some(sequence) => sequence.num_left(),
            None => wanted[job.index].tokens.len(),
        };
        // Without a draft, the row of the last token is left to the call that needs its logits.
        num_left - usize::from(job.max_len == 0)
    }

    /// Ends the draft of a sequence for which there are no blocks. If not even its own tokens fit, others may have the
    /// blocks that it holds.
    fn give_up(&mut self, wanted: &[WantedDraft<'_>], job: &mut Job) {
        job.is_done = true;
        if wanted[job.index].draft.is_empty() {
            self.sequences.release(job.sequence);
        }
    }

    /// Computes the rows of a round. A panic of the model becomes an error.
    fn run(&mut self, wanted: &[WantedDraft<'_>], jobs: &[Job], round: &[PlannedRows]) -> Result<(), Error> {
        let DraftModel { model, kv, sequences, batch, logits, options, .. } = self;
        let has_digests = model.supports_digests();
        batch.clear();
        for rows in round {
            let job = &jobs[rows.job];
            let sequence = sequences.get(job.sequence).expect("it was planned");
            let end = rows.first_position + rows.num_rows;
            let sampler = wanted[job.index].sampler;
            let query = (rows.samples && has_digests).then(|| sample::query(sampler, end as u32)).flatten();
            let chunk = Chunk {
                ids: ChunkIds::Tokens(&sequence.tokens[rows.first_position..end]),
                first_position: rows.first_position,
                blocks: sequence.table.blocks(),
                wanted: rows.num_rows - usize::from(rows.samples)..rows.num_rows,
                queries: query.as_slice(),
                state: ChunkState::default(),
            };
            batch.push(chunk, options.block_len);
        }
        let work = || {
            model.launch(batch, kv, logits)?;
            model.finish(logits)
        };
        match catch_unwind(AssertUnwindSafe(work)) {
            Ok(outcome) => Ok(outcome?),
            Err(panic) => Err(internal_error(&*panic)),
        }
    }

    /// Records the computed positions and samples the drafted tokens.
    fn commit(&mut self, wanted: &mut [WantedDraft<'_>], jobs: &mut [Job], round: &[PlannedRows]) {
        self.num_failed_steps = 0;
        let mut row = 0;
        for rows in round {
            let job = &mut jobs[rows.job];
            let wanted = &mut wanted[job.index];
            let sequence = self.sequences.get_mut(job.sequence).expect("it was planned");
            sequence.num_computed = rows.first_position + rows.num_rows;
            // The last token stays out: its position is computed again if the target has no further token by then.
            self.sequences.index(job.sequence, wanted.tokens.len() - 1);
            if !rows.samples {
                continue;
            }
            if let Err(error) = self.sample_token(wanted, job, row) {
                job.is_done = true;
                self.fail(job.sequence, error);
            }
            row += 1;
        }
    }

    /// Samples the next drafted token of a sequence from wanted row `row`.
    fn sample_token(&mut self, wanted: &mut WantedDraft<'_>, job: &mut Job, row: usize) -> Result<(), Error> {
        let DraftModel { model, logits, memory, sequences, .. } = self;
        let position = (wanted.tokens.len() + wanted.draft.len()) as u32;
        let chain = Chain { sampler: wanted.sampler, history: &*wanted.history, position };
        let draw = || sample::sample(&mut **model, logits, row, &chain, &mut job.state, memory);
        let choice = match catch_unwind(AssertUnwindSafe(draw)) {
            Ok(choice) => choice?,
            Err(panic) => return Err(internal_error(&*panic)),
        };
        let sizes = [wanted.sampler.vocab_size(), model.config().vocab_size];
        if sizes.iter().any(|&size| choice.token as usize >= size) {
            // A token of the padding, which only one of the two models has.
            job.is_done = true;
            return Ok(());
        }
        wanted.history.try_reserve().map_err(|_| crate::fallible::out_of_memory())?;
        wanted.history.push(choice.token);
        wanted.draft.push(choice.token);
        let sequence = sequences.get_mut(job.sequence).expect("it was planned");
        sequence.tokens.push(choice.token);
        job.is_done = choice.end.is_some() || wanted.draft.len() >= job.max_len;
        Ok(())
    }

    /// Ends the drafts of a failed step. It is not known which sequence was the reason.
    fn fail_round(&mut self, jobs: &mut [Job], round: &[PlannedRows], error: Error) {
        let sequences: Vec<u64> = round.iter().map(|rows| jobs[rows.job].sequence).collect();
        round.iter().for_each(|rows| jobs[rows.job].is_done = true);
        self.fail_sequences(&sequences, error);
    }

    /// Gives up the sequences of a failed step.
    pub(super) fn fail_sequences(&mut self, sequences: &[u64], error: Error) {
        self.num_failed_steps += 1;
        for &sequence in sequences {
            self.sequences.release(sequence);
            self.failed.insert(sequence);
        }
        if matches!(error, Error::DeviceLost(_)) || self.num_failed_steps >= MAX_FAILED_STEPS {
            self.disable(error);
        } else {
            self.report(error);
        }
    }
}

impl PlannedRows {
    fn work(&self) -> Work {
        Work::chunk(self.first_position, self.num_rows)
    }
}
