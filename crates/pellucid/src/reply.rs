//! A whole reply.

use std::fmt;

use pellucid_generate::{Delta, Finish, ReplyToken, ReplyTrace, Summary, ToolCall};

/// The answer to a request. Displays as the text of its first choice.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Reply {
    /// The choices, at least one; of a beam search, the best first.
    pub choices: Vec<Choice>,
    /// Token counts and times.
    pub summary: Summary,
    /// Seed of the first choice. With it, the same request gives the same reply.
    pub seed: u64,
    /// Parts of the schemas of tools that calls need not satisfy, such as
    /// `tools[0].function.parameters.properties.tags.uniqueItems`. Only tools with `is_strict: false` have such parts.
    pub not_enforced: Vec<String>,
}

/// One choice of a reply.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Choice {
    /// Thoughts that the model wrote before its answer; empty for a model that writes none.
    pub thoughts: String,
    /// The text; of a chat, the answer without thoughts.
    pub text: String,
    /// Calls of tools that the model made, without one that `max_tokens` cut off.
    pub calls: Vec<ToolCall>,
    /// Why it ended.
    pub finish: Finish,
    /// The tokens with their log probabilities, if [`Request::logprobs`](crate::Request::logprobs) was set.
    pub tokens: Vec<ReplyToken>,
    /// How each token was chosen, the one that ended the reply included, if
    /// [`Request::trace`](crate::Request::trace) was set.
    pub traces: Vec<ReplyTrace>,
    /// Score of a beam: the sum of log probabilities, divided by the length to the power of the length penalty.
    pub score: Option<f64>,
}

impl Reply {
    /// Returns the text of the first choice.
    pub fn text(&self) -> &str {
        &self.choices[0].text
    }

    /// Returns the text of the first choice.
    pub fn into_text(mut self) -> String {
        self.choices.swap_remove(0).text
    }

    /// Returns the thoughts of the first choice, which precede its text.
    pub fn thoughts(&self) -> &str {
        &self.choices[0].thoughts
    }

    /// Returns the calls of tools in the first choice; see [`Choice::calls`].
    pub fn calls(&self) -> &[ToolCall] {
        &self.choices[0].calls
    }

    /// Returns why the first choice ended.
    pub fn finish(&self) -> &Finish {
        &self.choices[0].finish
    }

    pub(crate) fn new(choices: Vec<Delta>, summary: Summary, seed: u64) -> Reply {
        let choices = choices.into_iter().map(Choice::from).collect();
        Reply { choices, summary, seed, not_enforced: Vec::new() }
    }
}

impl From<Delta> for Choice {
    /// All pieces of a choice together; the last of them says why it ended.
    fn from(whole: Delta) -> Choice {
        let Delta { thoughts, text, calls, tokens, traces, finish, score, .. } = whole;
        let calls = calls.iter().filter_map(ToolCall::of).collect();
        Choice { thoughts, text, calls, finish: finish.unwrap_or(Finish::Deadline), tokens, traces, score }
    }
}

impl fmt::Display for Reply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}
