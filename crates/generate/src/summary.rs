//! Token counts and times of a generation.

use std::sync::Arc;
use std::time::{Duration, Instant};

use pellucid_engine::{Error, GapHistogram, MissReason, PrefixMiss, Probe, RequestStats, SpeculationStats, fallible};
use pellucid_tokenizer::Tokenizer;

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
    /// From the start of the request to the first token, the queue not included; `None` when there was no token.
    pub prefill_time: Option<Duration>,
    /// From the first token to the last.
    pub decode_time: Duration,
    /// Mean time between tokens; `None` with fewer than two tokens.
    pub time_per_output_token: Option<Duration>,
    /// Part of the steps in which the tokens were sampled; `None` until the engine has told it.
    pub sampling_time: Option<Duration>,
    /// Time that guards took for prompt and replies; `None` without guards. Guards judge beside the steps, so it is a
    /// part of no other time.
    pub guard_time: Option<Duration>,
    /// From submission to the end, or until now.
    pub total_time: Duration,
    /// Gaps between tokens; `None` until the engine has told them, which it does for replies that end without a stop
    /// string.
    pub gaps: Option<GapHistogram>,
    /// Why prompts were not found whole in the prefix cache, if the request asks for it.
    pub misses: Vec<Arc<ReplyMiss>>,
    /// Result of the request's probe; `None` if a guard blocked a reply.
    pub probe: Option<Arc<ReplyProbe>>,
    /// Why each choice ended; `None` for choices that go on.
    pub finishes: Vec<Option<Finish>>,
}

/// Result of a probe, with the tokenizer that names its tokens.
#[derive(Debug)]
pub struct ReplyProbe {
    /// The engine's result.
    pub probe: Probe,
    /// The tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
}

/// Why a prompt was not found whole in the prefix cache, with the tokenizer that names its tokens.
#[derive(Debug)]
pub struct ReplyMiss {
    /// The engine's answer.
    pub miss: PrefixMiss,
    /// The tokenizer of the model.
    pub tokenizer: Arc<Tokenizer>,
}

impl ReplyMiss {
    /// Returns a sentence without texts of the prompt, for logs.
    pub fn sentence(&self) -> String {
        let reused = self.miss.reused;
        match &self.miss.reason {
            MissReason::Differs(found) => {
                format!("token {} differs from that of the nearest cached prompt", found.position)
            }
            MissReason::Evicted => format!("the block after {reused} tokens was evicted"),
            MissReason::OtherSalt => format!("the block after {reused} tokens is cached under another cache_salt"),
            MissReason::NoSnapshot => {
                format!("the block after {reused} tokens is cached, but no snapshot of the model's state is")
            }
            MissReason::NoWindow => {
                format!("the block after {reused} tokens is cached, but not the windows that some layers need to go on")
            }
            MissReason::New if reused == 0 => "no prompt with this beginning is cached".to_owned(),
            MissReason::New => {
                format!("the block after {reused} tokens is not cached; only whole blocks of tokens are")
            }
        }
    }
}

/// Times of one request: the engine's own as soon as it reports them, and until then when it sent its events. A reply
/// that a stop string or a guard ends does not wait for the engine's own.
#[derive(Debug)]
pub(crate) struct Timing {
    submitted: Instant,
    started: Option<Instant>,
    first_token: Option<Instant>,
    /// Last token of each choice.
    last_tokens: Vec<Option<Instant>>,
    /// All tokens of each choice, if there are guards, which may end it before tokens that the engine has sent.
    all_tokens: Option<Vec<Vec<Instant>>>,
}

impl Timing {
    pub(crate) fn new(submitted: Instant, num_choices: usize, has_guards: bool) -> Timing {
        Timing {
            submitted,
            started: None,
            first_token: None,
            last_tokens: vec![None; num_choices],
            all_tokens: has_guards.then(|| vec![Vec::new(); num_choices]),
        }
    }

    /// The engine started the request at `sent`.
    pub(crate) fn start(&mut self, sent: Instant) {
        self.started = Some(sent);
    }

    /// The engine sent a token of a choice at `sent`.
    pub(crate) fn token(&mut self, choice: usize, sent: Instant) -> Result<(), Error> {
        self.first_token.get_or_insert(sent);
        self.last_tokens[choice] = Some(sent);
        match &mut self.all_tokens {
            Some(tokens) => fallible::push(&mut tokens[choice], sent),
            None => Ok(()),
        }
    }

    /// A guard ended a choice after its first `num_tokens` tokens.
    pub(crate) fn cut(&mut self, choice: usize, num_tokens: usize) {
        if let Some(tokens) = &mut self.all_tokens {
            tokens[choice].truncate(num_tokens);
            self.last_tokens[choice] = tokens[choice].last().copied();
        }
    }

    pub(crate) fn queue_time(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        stats.map(|stats| stats.queue_time).or(self.started.map(|started| started - self.submitted))
    }

    pub(crate) fn time_to_first_token(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        let sent = self.first_token? - self.submitted;
        Some(stats.map_or(sent, |stats| stats.time_to_first_token))
    }

    pub(crate) fn decode_time(&self, stats: Option<&RequestStats>) -> Option<Duration> {
        let sent = self.between_tokens()?;
        Some(stats.map_or(sent, |stats| stats.decode_time))
    }

    /// `num_tokens` is the number of tokens of the longest choice.
    pub(crate) fn time_per_output_token(&self, stats: Option<&RequestStats>, num_tokens: usize) -> Option<Duration> {
        if let Some(stats) = stats {
            return stats.time_per_output_token();
        }
        self.between_tokens()?.checked_div(u32::try_from(num_tokens).ok()?.checked_sub(1)?)
    }

    /// Returns the time from the first token to the last.
    fn between_tokens(&self) -> Option<Duration> {
        Some(self.last_tokens.iter().copied().max()?? - self.first_token?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_that_a_guard_cuts_has_the_time_of_the_tokens_that_it_keeps() {
        let submitted = Instant::now();
        let at = |milliseconds| submitted + Duration::from_millis(milliseconds);
        let mut timing = Timing::new(submitted, 2, true);
        timing.start(at(1));
        for (choice, sent) in [(0, 10), (1, 10), (0, 20), (1, 20), (0, 30)] {
            timing.token(choice, at(sent)).unwrap();
        }
        let decode = |timing: &Timing| timing.decode_time(None).unwrap().as_millis();
        assert_eq!((decode(&timing), timing.queue_time(None)), (20, Some(Duration::from_millis(1))));
        assert_eq!(timing.time_per_output_token(None, 3), Some(Duration::from_millis(10)));
        timing.cut(0, 1);
        assert_eq!(decode(&timing), 10, "the last token is one of the other choice");
        timing.cut(1, 0);
        assert_eq!((decode(&timing), timing.time_to_first_token(None)), (0, Some(Duration::from_millis(10))));
    }
}
