//! Token counts and times of a generation.

use std::time::{Duration, Instant};

use pellucid_engine::{RequestStats, SpeculationStats};

use crate::Finish;

/// Counts and times of all replies of a generation. Of several prompts, counts are added up and the longest times are
/// taken.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Generated tokens, those of replies that `best_of` or beam search did not return included.
    pub completion_tokens: usize,
    /// Generated tokens of thoughts, markers included, in the replies that are returned.
    pub thought_tokens: usize,
    /// Prompt tokens that were found in the prefix cache.
    pub cached_tokens: usize,
    /// Times that a request was preempted and computed again.
    pub preemptions: usize,
    /// Tokens that drafters proposed, and those of them that the model chose. The replies are the same without them.
    pub speculation: SpeculationStats,
    /// From submission to the first step that computed for the request.
    pub queue_time: Duration,
    /// From submission to the first token; `None` when there was no token.
    pub time_to_first_token: Option<Duration>,
    /// From the first token to the last.
    pub decode_time: Duration,
    /// Mean time between tokens; `None` with fewer than two tokens.
    pub time_per_output_token: Option<Duration>,
    /// From submission to the end, or until now.
    pub total_time: Duration,
    /// Why each choice ended; `None` for choices that go on.
    pub finishes: Vec<Option<Finish>>,
}

/// Times of one request: the engine's own as soon as it reports them, and until then when its events were read.
#[derive(Debug)]
pub(crate) struct Timing {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    last_token: Option<Instant>,
}

impl Timing {
    pub(crate) fn new(submitted: Instant) -> Timing {
        Timing { submitted, started: None, first_token: None, last_token: None }
    }

    pub(crate) fn start(&mut self) {
        self.started = Some(Instant::now());
    }

    pub(crate) fn token(&mut self) {
        let now = Instant::now();
        self.first_token.get_or_insert(now);
        self.last_token = Some(now);
    }

    pub(crate) fn queue_time(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        stats.map(|stats| stats.queue_time).or(self.started.map(|started| started - self.submitted))
    }

    pub(crate) fn time_to_first_token(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        let read = self.first_token? - self.submitted;
        Some(stats.map_or(read, |stats| stats.time_to_first_token))
    }

    pub(crate) fn decode_time(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        let read = self.last_token? - self.first_token?;
        Some(stats.map_or(read, |stats| stats.decode_time))
    }

    /// `num_tokens` is the number of tokens of the longest choice.
    pub(crate) fn time_per_output_token(&self, stats: Option<&RequestStats>, num_tokens: usize) -> Option<Duration> {
        if let Some(stats) = stats {
            return stats.time_per_output_token();
        }
        (self.last_token? - self.first_token?).checked_div(u32::try_from(num_tokens).ok()?.checked_sub(1)?)
    }
}
