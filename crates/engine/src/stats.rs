//! The numbers that people ask for after a reply.

use std::time::Duration;

/// Counts and times of one reply.
#[derive(Debug, Clone, Copy, Default)]
pub struct Stats {
    pub prompt_tokens: usize,
    /// Prompt tokens whose keys and values were already stored by the turn before.
    pub cached_tokens: usize,
    pub output_tokens: usize,
    pub time_to_first_token: Duration,
    /// From the first token to the last.
    pub decode_time: Duration,
}

impl Stats {
    /// Mean time for each token after the first; `None` when there is at most one.
    pub fn time_per_output_token(&self) -> Option<Duration> {
        let later_tokens = u32::try_from(self.output_tokens.checked_sub(1)?).ok()?;
        self.decode_time.checked_div(later_tokens)
    }
}
