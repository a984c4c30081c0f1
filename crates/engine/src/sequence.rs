//! One sequence of a request: its tokens, its block table and its sampler.

use pellucid_sampling::{History, Sampler, State};

use crate::kv_cache::BlockTable;
use crate::{FinishReason, TokenEvent};

/// A list of tokens, prompt and output, that grows by one token at a time. Owned by the engine's loop.
pub(crate) struct Sequence {
    pub(crate) choice: usize,
    /// Prompt and output.
    pub(crate) tokens: Vec<u32>,
    /// Positions whose keys and values are stored.
    pub(crate) num_computed: usize,
    /// Present while it runs.
    pub(crate) table: Option<BlockTable>,
    pub(crate) sampler: Sampler,
    pub(crate) history: History,
    pub(crate) state: State,
    pub(crate) finish: Option<FinishReason>,
    /// The device takes its tokens for those that are chosen: the last one was.
    pub(crate) is_foreseen: bool,
    /// The step that was launched ahead computes its next position, and from the right token as far as is known.
    pub(crate) is_ahead: bool,
    /// A digest did not do and its row was gone: the position is computed again, and the row looked at.
    pub(crate) needs_row: bool,
    /// For `best_of`: the tokens held back.
    pub(crate) held: Vec<TokenEvent>,
    /// Tokens drawn, the one that ended it included, and the sum of their log probabilities.
    pub(crate) num_drawn: usize,
    pub(crate) total_logprob: f64,
}

impl Sequence {
    pub(crate) fn new(choice: usize, prompt: &[u32], sampler: Sampler) -> Sequence {
        Sequence {
            choice,
            tokens: prompt.to_vec(),
            num_computed: 0,
            table: None,
            history: sampler.history(prompt),
            state: sampler.state(),
            sampler,
            finish: None,
            is_foreseen: false,
            is_ahead: false,
            needs_row: false,
            held: Vec::new(),
            num_drawn: 0,
            total_logprob: 0.0,
        }
    }

    pub(crate) fn num_left(&self) -> usize {
        self.tokens.len() - self.num_computed
    }

    pub(crate) fn is_running(&self) -> bool {
        self.finish.is_none() && self.table.is_some()
    }

    /// Mean log probability of what was drawn, by which `best_of` chooses. To end is a choice like any other: without it a reply that ends at
    /// once would cost nothing.
    pub(crate) fn mean_logprob(&self) -> f64 {
        self.total_logprob / self.num_drawn.max(1) as f64
    }
}
