//! The numbers that people ask for, of a request and of the engine.

use std::time::Duration;

/// Counts and times of one request.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct RequestStats {
    pub prompt_tokens: usize,
    /// Prompt tokens whose keys and values were found instead of computed.
    pub cached_tokens: usize,
    /// Over all choices or beams, those that were not returned included.
    pub output_tokens: usize,
    pub preemptions: usize,
    /// From submission to the first step that computed for it.
    pub queue_time: Duration,
    /// From submission to the first token.
    pub time_to_first_token: Duration,
    /// From the first token to the end.
    pub decode_time: Duration,
    /// From submission to the end.
    pub total_time: Duration,
    /// Steps that computed a token after the first.
    pub decode_steps: usize,
}

impl RequestStats {
    /// Mean time of a step after the first token; `None` when there was none.
    pub fn time_per_output_token(&self) -> Option<Duration> {
        self.decode_time.checked_div(u32::try_from(self.decode_steps).ok()?)
    }
}

/// Counts of the engine since it started, and what it holds now.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct EngineStats {
    pub steps: u64,
    /// Those of them that were on the device before the step that they follow had ended.
    pub steps_ahead: u64,
    /// Tokens computed in such steps and not used: they had followed from a token that was not chosen, or for somebody who had gone.
    pub tokens_discarded: u64,
    /// Time of all steps, from admission to the last event sent.
    pub step_time: Duration,
    /// The part of it in which the model was at work, with what was done while the device computed; the rest is the engine's own.
    pub forward_time: Duration,
    /// Tokens computed that a sequence already had: prompts, and what was computed again after a preemption.
    pub prefill_tokens: u64,
    /// Tokens computed one at a time behind the sequence's end.
    pub decode_tokens: u64,
    /// Prompt tokens found instead of computed.
    pub cached_tokens: u64,
    /// Those of them that were found in prefixes that the operator declared shared.
    pub shared_cached_tokens: u64,
    pub finished_requests: u64,
    pub cancelled_requests: u64,
    pub failed_requests: u64,
    pub preemptions: u64,
    pub num_waiting: usize,
    /// Sequences in the batch.
    pub num_running: usize,
    pub blocks_in_use: usize,
    /// Promised to requests that run, and not in use yet.
    pub blocks_reserved: usize,
    pub blocks_idle: usize,
    pub num_blocks: usize,
}
