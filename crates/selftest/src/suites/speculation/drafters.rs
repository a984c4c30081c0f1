//! Drafters for the proof: right, often wrong, always wrong, and hostile. None of them may change a reply.

use std::collections::HashMap;

use pellucid_engine::{DraftContext, Drafter, Request, TokenEvent};

use super::super::RandomData;
use crate::Outcome;

/// The replies of an earlier run without drafts, by prompt. A request may have several.
#[derive(Debug, Clone, Default)]
pub struct Recording {
    replies: HashMap<Vec<u32>, Vec<RecordedReply>>,
}

/// A reply with the token that ended it, and the second most probable token at each position.
#[derive(Debug, Clone)]
struct RecordedReply {
    tokens: Vec<u32>,
    second_best: Vec<u32>,
}

impl Recording {
    /// Records the replies of requests. The second best tokens are known for requests with at least two log
    /// probabilities a token; elsewhere token 0 stands in.
    pub fn of<'a>(outcomes: impl IntoIterator<Item = (&'a Request, &'a Outcome)>) -> Recording {
        let mut recording = Recording::default();
        for (request, outcome) in outcomes {
            let replies = recording.replies.entry(request.prompt.clone()).or_default();
            for events in &outcome.events {
                let second = |event: &TokenEvent| {
                    event.logprobs.as_ref().and_then(|logprobs| logprobs.top.get(1)).map_or(0, |&(id, _)| id)
                };
                replies.push(RecordedReply {
                    tokens: events.iter().map(|event| event.id).collect(),
                    second_best: events.iter().map(second).collect(),
                });
            }
        }
        recording
    }

    /// Returns the first recorded reply that begins with the output so far.
    fn find(&self, context: &DraftContext<'_>) -> Option<&RecordedReply> {
        let (prompt, output) = context.tokens.split_at(context.prompt_len);
        self.replies.get(prompt)?.iter().find(|reply| reply.tokens.starts_with(output))
    }
}

/// Proposes a recorded reply, and beyond its end more tokens, which a reply must not get.
#[derive(Debug)]
pub struct HonestDrafter {
    pub recording: Recording,
    /// One proposal in `error_every` is wrong.
    pub error_every: Option<usize>,
    pub vocab_size: usize,
    num_proposed: usize,
}

impl HonestDrafter {
    pub fn new(recording: Recording, error_every: Option<usize>, vocab_size: usize) -> HonestDrafter {
        HonestDrafter { recording, error_every, vocab_size, num_proposed: 0 }
    }
}

impl Drafter for HonestDrafter {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let Some(reply) = self.recording.find(context) else { return };
        let num_output = context.tokens.len() - context.prompt_len;
        for at in num_output..num_output + max_len {
            let token = reply.tokens.get(at).copied().unwrap_or(at as u32 % self.vocab_size as u32);
            self.num_proposed += 1;
            let is_wrong = self.error_every.is_some_and(|every| self.num_proposed.is_multiple_of(every));
            draft.push(if is_wrong { (token + 1) % self.vocab_size as u32 } else { token });
        }
    }
}

/// Proposes the second most probable token of a recorded reply at every position: plausible, and wrong for greedy
/// requests.
#[derive(Debug)]
pub struct SecondBestDrafter(pub Recording);

impl Drafter for SecondBestDrafter {
    fn propose(&mut self, context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let Some(reply) = self.0.find(context) else { return };
        let num_output = context.tokens.len() - context.prompt_len;
        draft.extend(reply.second_best.iter().skip(num_output).take(max_len));
    }
}

/// Proposes random tokens, and sometimes none.
#[derive(Debug)]
pub struct RandomDrafter {
    random: RandomData,
    vocab_size: usize,
}

impl RandomDrafter {
    pub fn new(seed: u64, vocab_size: usize) -> RandomDrafter {
        RandomDrafter { random: RandomData(seed), vocab_size }
    }
}

impl Drafter for RandomDrafter {
    fn propose(&mut self, _context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let len = self.random.below(max_len + 1);
        draft.extend((0..len).map(|_| self.random.below(self.vocab_size) as u32));
    }
}

/// Proposes one token again and again.
#[derive(Debug)]
pub struct ConstantDrafter(pub u32);

impl Drafter for ConstantDrafter {
    fn propose(&mut self, _context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        draft.extend(std::iter::repeat_n(self.0, max_len));
    }
}

/// Proposes ids at the edge of the vocabulary and beyond it, and more of them than it may.
#[derive(Debug)]
pub struct EdgeDrafter {
    pub vocab_size: usize,
    /// Number of calls, which decides where the first id outside the vocabulary stands.
    pub num_calls: usize,
}

impl Drafter for EdgeDrafter {
    fn propose(&mut self, _context: &DraftContext<'_>, max_len: usize, draft: &mut Vec<u32>) {
        let vocab_size = self.vocab_size as u32;
        let ids = [vocab_size - 1, 0, vocab_size, u32::MAX, 1, vocab_size + 1];
        draft.extend(ids.iter().cycle().skip(self.num_calls % ids.len()).take(max_len + 40));
        self.num_calls += 1;
    }
}
