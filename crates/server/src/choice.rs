//! The text of one choice as it grows: ids become characters, stop strings are kept back, log probabilities leave with their text.
//!
//! Whole replies, streams and WebSockets all go through here, so they cannot differ.

use std::collections::VecDeque;
use std::sync::Arc;

use pellucid_engine::TokenEvent;
use pellucid_sampling::{Logprobs, TokenTrace};
use pellucid_tokenizer::{StopFilter, TextStream, Tokenizer};

/// A piece of one choice that can be shown.
#[derive(Debug, Default)]
pub(crate) struct Delta {
    /// Of the choice, over all prompts.
    pub(crate) index: usize,
    pub(crate) text: String,
    /// The tokens whose text is shown with this piece, where they are asked for.
    pub(crate) tokens: Vec<ShownToken>,
    pub(crate) traces: Vec<TokenTrace>,
    pub(crate) ending: Option<Ending>,
}

impl Delta {
    pub(crate) fn is_empty(&self) -> bool {
        self.text.is_empty() && self.tokens.is_empty() && self.traces.is_empty() && self.ending.is_none()
    }
}

/// A token with its log probabilities.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ShownToken {
    pub(crate) id: u32,
    /// `None` for the first token of a prompt, which nothing precedes.
    pub(crate) logprobs: Option<Logprobs>,
    /// Characters of the choice's text before it.
    pub(crate) offset: usize,
}

/// Why a choice ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Ending {
    /// The model said that it is done, with this token where it is known.
    End(Option<u32>),
    StopToken(Option<u32>),
    StopText(String),
    MaxTokens,
    Context,
    Deadline,
}

impl Ending {
    /// In OpenAI's words.
    pub(crate) fn finish_reason(&self) -> &'static str {
        match self {
            Ending::End(_) | Ending::StopToken(_) | Ending::StopText(_) => "stop",
            Ending::MaxTokens | Ending::Context | Ending::Deadline => "length",
        }
    }

    /// In ours.
    pub(crate) fn name(&self) -> &'static str {
        match self {
            Ending::End(_) => "end_of_sequence",
            Ending::StopToken(_) => "stop_token",
            Ending::StopText(_) => "stop_string",
            Ending::MaxTokens => "max_tokens",
            Ending::Context => "context_full",
            Ending::Deadline => "timeout",
        }
    }
}

/// See the module's head.
#[derive(Debug)]
pub(crate) struct ChoiceText {
    index: usize,
    stream: Option<TextStream<Arc<Tokenizer>>>,
    stops: StopFilter,
    /// Stop strings count from this token on.
    min_tokens: usize,
    /// Bytes that were decoded, and that were shown; the difference is held back.
    num_decoded: usize,
    num_shown: usize,
    /// Characters that were decoded.
    num_characters: usize,
    reports_logprobs: bool,
    /// Tokens whose text is not all shown yet, each with the number of bytes that must be.
    held: VecDeque<(usize, ShownToken, Option<Box<TokenTrace>>)>,
    pub(crate) num_tokens: usize,
    pub(crate) ending: Option<Ending>,
}

impl ChoiceText {
    pub(crate) fn new(
        index: usize,
        stream: TextStream<Arc<Tokenizer>>,
        stops: &[String],
        min_tokens: usize,
        reports_logprobs: bool,
    ) -> ChoiceText {
        ChoiceText {
            index,
            stream: Some(stream),
            stops: StopFilter::new(stops),
            min_tokens,
            num_decoded: 0,
            num_shown: 0,
            num_characters: 0,
            reports_logprobs,
            held: VecDeque::new(),
            num_tokens: 0,
            ending: None,
        }
    }

    /// Stop strings count from another token on.
    pub(crate) fn set_min_tokens(&mut self, min_tokens: usize) {
        self.min_tokens = min_tokens;
    }

    /// Text before the reply that is shown with it: offsets count it.
    pub(crate) fn echo(&mut self, text: &str, tokens: Vec<ShownToken>) -> Delta {
        self.num_characters += text.chars().count();
        Delta { index: self.index, text: text.to_owned(), tokens, ..Delta::default() }
    }

    /// A token of the reply. Nothing comes after the end.
    pub(crate) fn push(&mut self, token: TokenEvent) -> Delta {
        let Some(stream) = self.stream.as_mut().filter(|_| self.ending.is_none()) else {
            return Delta { index: self.index, ..Delta::default() };
        };
        self.num_tokens += 1;
        let piece = stream.push(token.id);
        let offset = self.num_characters;
        self.num_decoded += piece.len();
        self.num_characters += piece.chars().count();
        if self.reports_logprobs || token.trace.is_some() {
            // A token that completes no character leaves with the one that does.
            let end = self.num_decoded + usize::from(piece.is_empty());
            self.held.push_back((end, ShownToken { id: token.id, logprobs: token.logprobs, offset }, token.trace));
        }
        let shown = if self.num_tokens < self.min_tokens {
            // Something is held back where stop strings have counted before.
            self.stops.release() + &piece
        } else {
            self.stops.push(&piece)
        };
        let mut delta = self.show(shown);
        if let Some(found) = self.stops.found() {
            let ending = Ending::StopText(found.to_owned());
            self.ending = Some(ending.clone());
            // Tokens that are not shown were chosen all the same.
            delta.traces.extend(self.held.drain(..).filter_map(|(.., trace)| trace).map(|trace| *trace));
            delta.ending = Some(ending);
        }
        delta
    }

    /// The end: what was held back is text after all, unless it completes a stop string.
    pub(crate) fn end(&mut self, ending: Ending) -> Delta {
        let Some(stream) = self.stream.take().filter(|_| self.ending.is_none()) else {
            return Delta { index: self.index, ..Delta::default() };
        };
        let rest = stream.finish();
        self.num_decoded += rest.len();
        let mut shown = self.stops.push(&rest);
        let ending = match self.stops.found() {
            Some(found) => Ending::StopText(found.to_owned()),
            None => {
                shown.push_str(&std::mem::replace(&mut self.stops, StopFilter::new(&[])).finish());
                // Everything is shown, so every token leaves, those without text included.
                self.num_decoded = usize::MAX;
                self.num_shown = usize::MAX - shown.len();
                ending
            }
        };
        let mut delta = self.show(shown);
        delta.traces.extend(self.held.drain(..).filter_map(|(.., trace)| trace).map(|trace| *trace));
        self.ending = Some(ending.clone());
        Delta { ending: Some(ending), ..delta }
    }

    /// Text that leaves, with the tokens that it completes.
    fn show(&mut self, text: String) -> Delta {
        self.num_shown += text.len();
        let mut delta = Delta { index: self.index, text, ..Delta::default() };
        while self.held.front().is_some_and(|(end, ..)| *end <= self.num_shown) {
            let Some((_, token, trace)) = self.held.pop_front() else { break };
            if self.reports_logprobs {
                delta.tokens.push(token);
            }
            delta.traces.extend(trace.map(|trace| *trace));
        }
        delta
    }
}
