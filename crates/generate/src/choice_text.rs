//! The text of one choice as it grows: token ids become characters, thoughts and calls are separated from the answer,
//! stop strings are held back and removed, log probabilities are released together with their text.
//!
//! Every reply goes through here, whole or streamed, over HTTP or in a terminal, so that these cannot differ.

use std::collections::VecDeque;
use std::sync::Arc;

use pellucid_engine::{Error, Proposal, TokenEvent, fallible};
use pellucid_sampling::{Logprobs, TokenTrace};
use pellucid_tokenizer::{StopFilter, TextStream, TokenKind, Tokenizer};

use crate::{CallDelta, Finish, PartKind, ReplyPart, ReplySplitter, TokenVerdict};

/// A piece of one choice that can be shown; [`Delta::append`] joins pieces to whole replies.
#[derive(Debug, Clone, Default)]
pub struct Delta {
    /// Number of the choice, counted over all prompts of a generation.
    pub choice: usize,
    /// Thoughts that follow those of earlier pieces; they precede the text.
    pub thoughts: String,
    /// Text that follows the text of earlier pieces. Never half a character, never a part of a stop string.
    pub text: String,
    /// Pieces of calls of tools, behind the text.
    pub calls: Vec<CallDelta>,
    /// Tokens whose text ends in this piece, where the request reports log probabilities.
    pub tokens: Vec<ReplyToken>,
    /// How each token was chosen, where the request asks for traces.
    pub traces: Vec<ReplyTrace>,
    /// Ids of the tokens whose text ends in this piece, where the request asks for them. The last piece adds the token
    /// that ended the choice.
    pub ids: Vec<u32>,
    /// Why the choice ended; set in its last piece.
    pub finish: Option<Finish>,
    /// Score of a beam; set in its last piece.
    pub score: Option<f64>,
}

impl Delta {
    /// Returns a piece of `choice` that holds nothing yet.
    pub fn new(choice: usize) -> Delta {
        Delta { choice, ..Delta::default() }
    }

    /// Whether there is nothing to show.
    pub fn is_empty(&self) -> bool {
        self.thoughts.is_empty()
            && self.text.is_empty()
            && self.calls.is_empty()
            && self.tokens.is_empty()
            && self.traces.is_empty()
            && self.ids.is_empty()
            && self.finish.is_none()
    }

    /// Adds the next piece of the same choice; fails if there is no memory for it.
    pub fn append(&mut self, next: Delta) -> Result<(), Error> {
        fallible::append(&mut self.thoughts, &next.thoughts)?;
        fallible::append(&mut self.text, &next.text)?;
        for call in next.calls {
            match self.calls.last_mut() {
                Some(last) if last.index == call.index => fallible::append(&mut last.arguments, &call.arguments)?,
                _ => fallible::push(&mut self.calls, call)?,
            }
        }
        fallible::extend(&mut self.tokens, next.tokens)?;
        fallible::extend(&mut self.traces, next.traces)?;
        fallible::extend(&mut self.ids, next.ids)?;
        self.finish = next.finish.or(self.finish.take());
        self.score = next.score.or(self.score);
        Ok(())
    }
}

/// How a token was chosen.
#[derive(Debug, Clone)]
pub struct ReplyTrace {
    /// The effect of each step of the sampler.
    pub token: TokenTrace,
    /// The token that a drafter proposed for this position, if one did. It had no influence on the choice.
    pub proposal: Option<Proposal>,
    /// Number of sequences in the step that computed the token.
    pub batch_size: usize,
    /// Verdicts of the guards on the token, in their order. The traces of a blocked token are never shown.
    pub verdicts: Vec<TokenVerdict>,
}

impl ReplyTrace {
    /// Returns the trace of a token; `None` if the request does not ask for traces.
    pub(crate) fn of(token: TokenEvent) -> Option<ReplyTrace> {
        let TokenEvent { trace, proposal, batch_size, .. } = token;
        trace.map(|trace| ReplyTrace { token: *trace, proposal, batch_size, verdicts: Vec::new() })
    }

    /// Whether the proposed token is the one that was chosen; `None` without a proposal.
    pub fn is_accepted(&self) -> Option<bool> {
        self.proposal.map(|proposal| proposal.token == self.token.draw.winner.id)
    }
}

/// A token with its log probabilities.
#[derive(Debug, Clone, PartialEq)]
pub struct ReplyToken {
    /// Id in the vocabulary.
    pub id: u32,
    /// `None` for the first token of an echoed prompt, which has no token before it to be predicted from.
    pub logprobs: Option<Logprobs>,
    /// Characters of the choice's text before the token.
    pub offset: usize,
    /// Whether no text precedes the token, where some tokenizers drop a leading space; see
    /// [`Tokenizer::shown_bytes`].
    pub at_start: bool,
    /// The part of the reply to which the token belongs.
    pub part: PartKind,
}

/// How a reply's tokens become text.
#[derive(Debug, Clone, Copy)]
pub struct TextRules<'r> {
    /// The text ends before the first of these that is complete.
    pub stop: &'r [String],
    /// Stop strings take effect from this token on.
    pub min_tokens: usize,
    /// Whether to report tokens with their log probabilities.
    pub reports_logprobs: bool,
    /// Whether to report the ids of tokens.
    pub reports_ids: bool,
    /// Separates thoughts and calls from the text; `None` shows the reply as it is.
    pub splitter: Option<&'r ReplySplitter>,
}

/// The text of one choice; see the head of the file.
#[derive(Debug)]
pub struct ChoiceText {
    choice: usize,
    /// `None` after the end.
    stream: Option<TextStream<Arc<Tokenizer>>>,
    splitter: Option<ReplySplitter>,
    stops: StopFilter,
    min_tokens: usize,
    /// Bytes that were decoded, and bytes that were released or belong to markers; the difference is held back.
    num_decoded: usize,
    num_released: usize,
    /// Characters that were decoded.
    num_characters: usize,
    reports_logprobs: bool,
    reports_ids: bool,
    held: VecDeque<HeldToken>,
    num_tokens: usize,
    /// Ends of the tokens whose part is not known yet; see [`HeldToken::end`].
    undecided: VecDeque<usize>,
    num_thought_tokens: usize,
    finish: Option<Finish>,
}

/// A token whose text is not released yet.
#[derive(Debug)]
struct HeldToken {
    /// The token is released when this number of bytes is.
    end: usize,
    token: ReplyToken,
    trace: Option<Box<ReplyTrace>>,
}

impl ChoiceText {
    /// Returns a choice without text; `stream` decodes its ids.
    pub fn new(choice: usize, stream: TextStream<Arc<Tokenizer>>, rules: TextRules<'_>) -> ChoiceText {
        let mut splitter = rules.splitter.cloned();
        if let Some(splitter) = &mut splitter {
            splitter.set_choice(choice);
        }
        ChoiceText {
            choice,
            stream: Some(stream),
            splitter,
            stops: StopFilter::new(rules.stop),
            min_tokens: rules.min_tokens,
            num_decoded: 0,
            num_released: 0,
            num_characters: 0,
            reports_logprobs: rules.reports_logprobs,
            reports_ids: rules.reports_ids,
            held: VecDeque::new(),
            num_tokens: 0,
            undecided: VecDeque::new(),
            num_thought_tokens: 0,
            finish: None,
        }
    }

    /// Number of the choice, counted over all prompts of a generation.
    pub fn choice(&self) -> usize {
        self.choice
    }

    /// Tokens that were pushed before the end.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }

    /// Tokens of thoughts among them, markers included.
    pub fn num_thought_tokens(&self) -> usize {
        self.num_thought_tokens
    }

    /// Why the choice ended; `None` while it goes on.
    pub fn finish(&self) -> Option<&Finish> {
        self.finish.as_ref()
    }

    /// Changes the token from which stop strings take effect.
    pub fn set_min_tokens(&mut self, min_tokens: usize) {
        self.min_tokens = min_tokens;
    }

    /// Returns a piece with text that precedes the reply. Offsets of later tokens include it.
    pub fn echo(&mut self, text: String, tokens: Vec<ReplyToken>) -> Delta {
        self.num_characters += text.chars().count();
        Delta { text, tokens, ..Delta::new(self.choice) }
    }

    /// Adds a token and returns what can be shown now. Tokens after the end are ignored.
    pub fn push(&mut self, mut token: TokenEvent) -> Delta {
        let Some(stream) = self.stream.as_mut().filter(|_| self.finish.is_none()) else {
            return Delta::new(self.choice);
        };
        self.num_tokens += 1;
        let at_start = stream.is_at_start();
        let (piece, parts) = match &mut self.splitter {
            None => {
                let piece = stream.push(token.id);
                let parts = Vec::from_iter((!piece.is_empty()).then(|| ReplyPart::Answer(piece.clone())));
                (piece, parts)
            }
            Some(splitter) => {
                let control = stream.tokenizer().token(token.id).filter(|token| token.kind == TokenKind::Control);
                let (piece, is_control) = match control {
                    Some(control) => (control.piece.into(), true),
                    None => (stream.push(token.id), false),
                };
                let parts = splitter.push(&piece, is_control);
                (piece, parts)
            }
        };
        let offset = self.num_characters;
        self.num_decoded += piece.len();
        self.num_characters += piece.chars().count();
        // A token that completes no character is released with the one that does.
        let end = self.num_decoded + usize::from(piece.is_empty());
        if self.reports_logprobs || self.reports_ids || token.trace.is_some() {
            let part = PartKind::Answer;
            let reply_token = ReplyToken { id: token.id, logprobs: token.logprobs.take(), offset, at_start, part };
            let trace = ReplyTrace::of(token).map(Box::new);
            self.held.push_back(HeldToken { end, token: reply_token, trace });
        }
        if self.splitter.is_some() {
            self.undecided.push_back(end);
            self.assign_parts();
        }
        let mut delta = self.release(parts);
        if let Some(found) = self.stops.found() {
            let finish = Finish::StopString(found.to_owned());
            self.finish = Some(finish.clone());
            // Traces include tokens whose text is not shown.
            delta.traces.extend(self.remaining_traces());
            delta.finish = Some(finish);
        }
        delta
    }

    /// Ends the choice. Text that was held back is released, unless it completes a stop string.
    pub fn end(&mut self, finish: Finish) -> Delta {
        let Some(mut delta) = self.release_rest() else { return Delta::new(self.choice) };
        let num_calls = self.splitter.as_ref().map_or(0, ReplySplitter::num_calls);
        let finish = match delta.finish.take().unwrap_or(finish) {
            Finish::EndToken(id) | Finish::StopToken(id) if num_calls > 0 => Finish::ToolCalls(id),
            finish => finish,
        };
        if let (Finish::EndToken(id) | Finish::StopToken(id) | Finish::ToolCalls(id), true) =
            (&finish, self.reports_ids)
        {
            delta.ids.extend(id);
        }
        self.finish = Some(finish.clone());
        Delta { finish: Some(finish), ..delta }
    }

    /// Ends the choice because a guard blocked it. What is held back is never shown. Tokens beyond the numbers that are
    /// given were generated while the guard judged, and do not count.
    pub(crate) fn block(&mut self, finish: Finish, num_tokens: usize, num_thought_tokens: usize) {
        (self.num_tokens, self.num_thought_tokens) = (num_tokens, num_thought_tokens);
        self.stream = None;
        self.held.clear();
        self.finish = Some(finish);
    }

    /// Returns the text that is held back, for a reply that its reader cancels. The choice stays without a finish
    /// unless the text completes a stop string.
    pub fn flush(&mut self) -> Delta {
        let Some(delta) = self.release_rest() else { return Delta::new(self.choice) };
        self.finish.clone_from(&delta.finish);
        delta
    }

    /// Releases everything that is held back; `None` after the end. The piece has a finish if it completes a stop
    /// string.
    fn release_rest(&mut self) -> Option<Delta> {
        let stream = self.stream.take().filter(|_| self.finish.is_none())?;
        let rest = stream.finish();
        self.num_decoded += rest.len();
        let parts = match &mut self.splitter {
            None => vec![ReplyPart::Answer(rest)],
            Some(splitter) => {
                let mut parts = splitter.push(&rest, false);
                parts.extend(splitter.finish());
                parts
            }
        };
        self.num_decoded += usize::from(!self.undecided.is_empty());
        self.assign_parts();
        let mut delta = self.release(parts);
        let finish = self.stops.found().map(|found| Finish::StopString(found.to_owned()));
        if finish.is_none() {
            delta.text.push_str(&self.stops.release());
            // All text is released, so every token is, those without text included.
            self.num_released = usize::MAX;
            self.release_tokens(&mut delta);
        }
        delta.traces.extend(self.remaining_traces());
        Some(Delta { finish, ..delta })
    }

    /// Gives the tokens whose text was decided by the last piece their part. Text that may become a marker belongs to
    /// no part until it is known.
    fn assign_parts(&mut self) {
        let Some(splitter) = &self.splitter else { return };
        let decided = self.num_decoded - splitter.num_held();
        let first = self.undecided.front().copied().unwrap_or(usize::MAX);
        for held in self.held.iter_mut().filter(|held| (first..=decided).contains(&held.end)) {
            held.token.part = splitter.part();
        }
        let mut num_decided = 0;
        while self.undecided.pop_front_if(|end| *end <= decided).is_some() {
            num_decided += 1;
        }
        if splitter.part() == PartKind::Thought {
            self.num_thought_tokens += num_decided;
        }
    }

    fn remaining_traces(&mut self) -> impl Iterator<Item = ReplyTrace> {
        self.held.drain(..).filter_map(|held| held.trace).map(|trace| *trace)
    }

    /// Returns a piece with what can be shown of `parts`, and the tokens that it completes.
    fn release(&mut self, parts: Vec<ReplyPart>) -> Delta {
        let mut delta = Delta::new(self.choice);
        for part in parts {
            if self.stops.is_stopped() {
                break;
            }
            match part {
                // Text is held back here only if `min_tokens` was raised in flight.
                ReplyPart::Answer(text) if self.num_tokens < self.min_tokens => {
                    delta.text.push_str(&(self.stops.release() + &text));
                }
                ReplyPart::Answer(text) => delta.text.push_str(&self.stops.push(&text)),
                // A stop string does not span parts.
                ReplyPart::Thought(text) => {
                    delta.text.push_str(&self.stops.release());
                    delta.thoughts.push_str(&text);
                }
                ReplyPart::Call(call) => {
                    delta.text.push_str(&self.stops.release());
                    delta.calls.push(call);
                }
            }
        }
        if self.stops.is_stopped() {
            self.num_released += delta.text.len();
        } else {
            let num_held = self.stops.num_held() + self.splitter.as_ref().map_or(0, ReplySplitter::num_held);
            self.num_released = self.num_decoded.saturating_sub(num_held);
        }
        self.release_tokens(&mut delta);
        delta
    }

    /// Adds the tokens whose text is released.
    fn release_tokens(&mut self, delta: &mut Delta) {
        while let Some(held) = self.held.pop_front_if(|held| held.end <= self.num_released) {
            if self.reports_ids {
                delta.ids.push(held.token.id);
            }
            if self.reports_logprobs {
                delta.tokens.push(held.token);
            }
            delta.traces.extend(held.trace.map(|trace| *trace));
        }
    }
}
