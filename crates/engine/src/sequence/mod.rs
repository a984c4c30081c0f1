//! One sequence of a request: its tokens, its block table and its sampler.

mod grammar;
mod loop_guard;

use pellucid_sampling::{History, Sampler, State};

use crate::engine::look_ahead::SequenceLookAhead;
use crate::kv_cache::{BlockTable, KvCache};
use crate::speculation::SequenceDrafts;
use crate::{Error, FinishReason, Request, TokenEvent, fallible};

pub(crate) use grammar::SequenceGrammar;
use loop_guard::LoopGuard;
pub use loop_guard::{MAX_PERIOD, Repetition};

/// Output tokens for which a new sequence has room, so that a long prompt is not copied for the first of them.
const NUM_SPARE: usize = 256;

/// A list of tokens, prompt and output, that grows by one token at a time. Owned by the engine's loop.
pub(crate) struct Sequence {
    pub(crate) choice: usize,
    /// Prompt and output.
    pub(crate) tokens: Vec<u32>,
    /// Positions whose keys and values are stored.
    pub(crate) num_computed: usize,
    /// Positions that were computed at least once. More than `num_computed` after a preemption.
    pub(crate) num_ever_computed: usize,
    /// Present while it runs.
    pub(crate) table: Option<BlockTable>,
    pub(crate) sampler: Sampler,
    pub(crate) history: History,
    pub(crate) state: State,
    /// Present if the request has a constraint.
    pub(crate) grammar: Option<SequenceGrammar>,
    pub(crate) finish: Option<FinishReason>,
    pub(crate) loop_guard: LoopGuard,
    pub(crate) look_ahead: SequenceLookAhead,
    pub(crate) drafts: SequenceDrafts,
    /// Number of steps since the last one that computed something of it, while it could be computed.
    pub(crate) num_skipped: u32,
    /// Tokens held back for `best_of`.
    pub(crate) held: Vec<TokenEvent>,
    /// Number of sampled tokens, including the one that ended the sequence.
    pub(crate) num_sampled: usize,
    /// Sum of the log probabilities of the sampled tokens.
    pub(crate) total_logprob: f64,
}

impl Sequence {
    pub(crate) fn new(choice: usize, prompt: &[u32], sampler: Sampler) -> Result<Sequence, Error> {
        let mut tokens = fallible::with_capacity(prompt.len() + NUM_SPARE)?;
        tokens.extend_from_slice(prompt);
        Ok(Sequence {
            choice,
            tokens,
            num_computed: 0,
            num_ever_computed: 0,
            table: None,
            history: sampler.try_history(prompt, NUM_SPARE).map_err(|_| fallible::out_of_memory())?,
            state: sampler.state(),
            sampler,
            grammar: None,
            finish: None,
            loop_guard: LoopGuard::default(),
            look_ahead: SequenceLookAhead::default(),
            drafts: SequenceDrafts::default(),
            num_skipped: 0,
            held: Vec::new(),
            num_sampled: 0,
            total_logprob: 0.0,
        })
    }

    /// Makes room for the next token.
    pub(crate) fn reserve(&mut self) -> Result<(), Error> {
        fallible::reserve(&mut self.tokens, 1)?;
        self.history.try_reserve().map_err(|_| fallible::out_of_memory())
    }

    /// Returns the number of tokens that are still to be computed.
    pub(crate) fn num_left(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    /// Whether a grammar excludes tokens from the next position.
    pub(crate) fn is_masked(&self) -> bool {
        self.grammar.as_ref().is_some_and(|grammar| !grammar.allows_all())
    }

    pub(crate) fn is_running(&self) -> bool {
        self.finish.is_none() && self.table.is_some()
    }

    /// Ends the sequence and gives its blocks back.
    pub(crate) fn end(&mut self, reason: FinishReason, cache: &mut KvCache) {
        self.finish = Some(reason);
        self.release(cache);
    }

    /// Gives its blocks back. Later requests may go on from them.
    pub(crate) fn release(&mut self, cache: &mut KvCache) {
        if let Some(table) = self.table.take() {
            cache.end(table, &self.tokens);
        }
    }

    /// Returns why `request` ends the sequence after its last token, which is no end or stop token.
    pub(crate) fn finish_at_limit(&mut self, request: &Request, context_len: usize) -> Option<FinishReason> {
        let num_output = self.tokens.len() - request.prompt.len();
        request.limit(self.tokens.len(), context_len).or_else(|| {
            let is_guarded = request.loop_guard && num_output >= request.sampling.min_tokens as usize;
            let output = &self.tokens[request.prompt.len()..];
            is_guarded.then(|| self.loop_guard.check(output)).flatten().map(FinishReason::Repetition)
        })
    }

    /// Whether the loop guard ended the sequence.
    pub(crate) fn is_loop(&self) -> bool {
        matches!(self.finish, Some(FinishReason::Repetition(_)))
    }

    /// Returns the mean log probability of the sampled tokens, by which `best_of` ranks. The end token counts: without
    /// it, a reply that ends at once would cost nothing.
    pub(crate) fn mean_logprob(&self) -> f64 {
        self.total_logprob / self.num_sampled.max(1) as f64
    }
}
