//! Statistics of a request and of the engine.

mod gaps;

use std::time::Duration;

use crate::SpeculationStats;
pub use gaps::{GAP_BOUNDS_S, GapHistogram};

/// Counts and times of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestStats {
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: usize,
    /// Generated tokens of all choices or beams, including those that were not returned.
    pub output_tokens: usize,
    /// Part of `output_tokens` that a grammar forced: no other token was possible.
    pub forced_tokens: usize,
    /// Times that the request was preempted.
    pub preemptions: usize,
    /// From submission to the start of the request.
    pub queue_time: Duration,
    /// From submission to the first token.
    pub time_to_first_token: Duration,
    /// From the first token to the end.
    pub decode_time: Duration,
    /// From submission to the end.
    pub total_time: Duration,
    /// Part of its steps in which its tokens were sampled and entered; the model had computed before.
    pub sampling_time: Duration,
    /// Tokens after the first; of several sequences, those of the one that got most in each step.
    pub tokens_after_first: usize,
    /// Gaps between the steps that gave it tokens.
    pub gaps: GapHistogram,
    /// Drafted and accepted tokens.
    pub speculation: SpeculationStats,
}

impl RequestStats {
    /// Returns the mean time of a token after the first; `None` if there was none.
    pub fn time_per_output_token(&self) -> Option<Duration> {
        self.decode_time.checked_div(u32::try_from(self.tokens_after_first).ok()?)
    }
}

/// Counters of the engine since it started, and what it holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    /// Steps that were run.
    pub steps: u64,
    /// Steps that were launched before the step that they follow had ended.
    pub steps_ahead: u64,
    /// Tokens of such steps that were discarded: another token was sampled before them, or their request ended or was
    /// paused.
    pub tokens_discarded: u64,
    /// Total time of all steps, from admission to the last event sent.
    pub step_time: Duration,
    /// Part of `step_time` in which the model was computing. The rest is the overhead of the engine.
    pub forward_time: Duration,
    /// Computed tokens of prompts, and tokens that were computed again after a preemption.
    pub prefill_tokens: u64,
    /// Computed tokens of replies: one for each sequence and step, the drafted tokens that were accepted, and tokens
    /// that a grammar forced.
    pub decode_tokens: u64,
    /// Prompt tokens that were looked up in the prefix cache: those of every prompt that is not scored.
    pub looked_up_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// The part of `cached_tokens` that was found in prefixes that the operator declared shared.
    pub shared_cached_tokens: u64,
    /// Tokens of replies that a grammar forced.
    pub forced_tokens: u64,
    /// Drafts that the model checked, each of one or more tokens of a sequence.
    pub num_drafts: u64,
    /// Drafted and accepted tokens of all requests.
    pub speculation: SpeculationStats,
    /// Errors of the draft model: failed steps, and logits that could not be sampled. Requests do not notice them.
    pub draft_errors: u64,
    /// Gaps between the tokens of all requests.
    pub gaps: GapHistogram,
    /// Requests that ended with a complete reply or by their deadline.
    pub finished_requests: u64,
    /// Requests whose client disconnected.
    pub cancelled_requests: u64,
    /// Requests that ended with an error.
    pub failed_requests: u64,
    /// Times that a request was preempted.
    pub preemptions: u64,
    /// Requests in the queue.
    pub num_waiting: usize,
    /// Sequences in the batch.
    pub num_running: usize,
    /// Blocks that running sequences hold.
    pub blocks_in_use: usize,
    /// Blocks reserved for running requests and not in use yet.
    pub blocks_reserved: usize,
    /// Blocks that only the prefix cache holds.
    pub blocks_idle: usize,
    /// Blocks of layers with sliding windows that sequences hold or that are kept for later requests.
    pub window_blocks_taken: usize,
    /// Those that are kept.
    pub window_blocks_kept: usize,
    /// Blocks of layers with sliding windows; 0 if these have the blocks of the other layers.
    pub num_window_blocks: usize,
    /// All blocks of KV memory.
    pub num_blocks: usize,
    /// Positions of a block.
    pub block_len: usize,
}
