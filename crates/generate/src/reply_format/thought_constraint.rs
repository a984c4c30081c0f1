//! A constraint for replies with thoughts: ends thoughts that reach their budget, and applies another constraint to the
//! answer alone.
//!
//! It follows the text of a reply with the same [`ThoughtSplitter`] that separates the parts for the reader, so both
//! agree where the answer begins. Thoughts are free. When they have `budget` tokens, the tokens of the closing marker
//! are the only ones allowed, one after the other, whatever the model would choose.

use std::sync::Arc;

use pellucid_sampling::{Error, TokenConstraint, TokenMatcher};

use super::marker_tokens::MarkerTokens;
use super::thoughts::{ThoughtSplitter, ThoughtState};

/// Bytes of white space that may precede a constrained answer: models are trained to write line breaks there.
const MAX_BLANK: usize = 8;

/// Constrains replies with thoughts; see the head of the file.
#[derive(Debug, Clone)]
pub struct ThoughtConstraint {
    /// The markers of the model.
    pub tokens: Arc<MarkerTokens>,
    /// Whether the prompt ends with the opening marker.
    pub is_open: bool,
    /// Maximum tokens of the thoughts, markers not included.
    pub budget: Option<usize>,
    /// Constrains the answer.
    pub answer: Option<Arc<dyn TokenConstraint>>,
}

impl TokenConstraint for ThoughtConstraint {
    fn matcher(&self) -> Box<dyn TokenMatcher> {
        let splitter = ThoughtSplitter::new(self.tokens.markers.clone(), self.is_open);
        // Without thoughts, the answer begins with the reply, unless it needs a heading.
        let begins = splitter.state() == ThoughtState::Start && !self.tokens.markers.needs_heading();
        let answer = if begins { AnswerPosition::Begun { first: 0, num_tokens: 0 } } else { AnswerPosition::None };
        let now = Position { splitter, num_thought: 0, forced: Vec::new(), num_blank: 0, answer, has_ended: false };
        let mut matcher = ThoughtMatcher {
            rules: self.clone(),
            answer: self.answer.as_ref().map(|answer| answer.matcher()),
            in_answer: (0, 0),
            now,
            before: Vec::new(),
            tokens: Vec::new(),
        };
        matcher.force_if_exhausted();
        Box::new(matcher)
    }
}

/// A sequence's position in a reply with thoughts.
#[derive(Debug)]
struct ThoughtMatcher {
    rules: ThoughtConstraint,
    answer: Option<Box<dyn TokenMatcher>>,
    /// Tokens that the matcher of the answer has accepted: index of the first, and their number.
    in_answer: (usize, usize),
    now: Position,
    /// The position before each token, and the tokens.
    before: Vec<Position>,
    tokens: Vec<u32>,
}

#[derive(Debug, Clone)]
struct Position {
    splitter: ThoughtSplitter,
    /// Tokens of thoughts, markers not included.
    num_thought: usize,
    /// Tokens that must come next to end the thoughts.
    forced: Vec<u32>,
    /// Bytes of white space behind the closing marker.
    num_blank: usize,
    answer: AnswerPosition,
    /// Whether an end token was accepted.
    has_ended: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum AnswerPosition {
    /// No token of the answer can come yet.
    None,
    /// The answer has `num_tokens` tokens, the first at index `first` of the reply. At the beginning of a reply they
    /// may still turn out to be the opening marker.
    Begun { first: usize, num_tokens: usize },
}

fn set(words: &mut [u32], id: u32, is_allowed: bool) {
    if let Some(word) = words.get_mut(id as usize / 32) {
        let bit = 1 << (id % 32);
        *word = if is_allowed { *word | bit } else { *word & !bit };
    }
}

impl ThoughtMatcher {
    fn state(&self) -> ThoughtState {
        self.now.splitter.state()
    }

    fn is_exhausted(&self) -> bool {
        self.rules.budget.is_some_and(|budget| self.now.num_thought >= budget)
    }

    /// Decides that the thoughts end here if they have reached their budget.
    fn force_if_exhausted(&mut self) {
        if self.state() == ThoughtState::Thought && self.now.forced.is_empty() && self.is_exhausted() {
            self.now.forced = self.rules.tokens.closing(self.now.splitter.num_marker_held());
        }
    }

    /// Whether the matcher of the answer decides alone what comes next.
    fn is_answer(&self) -> bool {
        let has_tokens = matches!(self.now.answer, AnswerPosition::Begun { num_tokens: 1.., .. });
        self.state() == ThoughtState::Answer || self.state() == ThoughtState::Closed && has_tokens
    }

    /// Excludes the tokens that would end the thoughts and begin an answer in one.
    fn exclude_straddling(&self, words: &mut [u32]) {
        let close = self.rules.tokens.markers.close.as_str();
        let begins_answer = |text: &str| {
            let answer = text.find(close).map(|at| &text[at + close.len()..]);
            answer.is_some_and(|answer| !answer.trim().is_empty())
        };
        let excluded = self.rules.tokens.matching(self.now.splitter.held(), begins_answer);
        excluded.into_iter().for_each(|id| set(words, id, false));
    }

    /// Allows the tokens that continue one of `markers`. Only text of thoughts may follow in the same token.
    fn allow_markers(&self, markers: &[String], words: &mut [u32]) {
        let open = self.rules.tokens.markers.open.as_str();
        let continues = |text: &str| {
            let text = text.trim_start();
            markers.iter().any(|marker| {
                let rest = text.strip_prefix(marker.as_str());
                marker.starts_with(text) || rest.is_some_and(|rest| marker == open || rest.trim().is_empty())
            })
        };
        let allowed = self.rules.tokens.matching(self.now.splitter.held(), continues);
        allowed.into_iter().for_each(|id| set(words, id, true));
    }

    fn answer_mask(&mut self, words: &mut [u32]) -> Result<(), Error> {
        match &mut self.answer {
            Some(answer) if !answer.allows_all() => answer.mask(words),
            _ => {
                words.fill(u32::MAX);
                Ok(())
            }
        }
    }

    /// Writes the mask at the beginning of a reply that has an answer with a constraint.
    fn mask_start(&mut self, words: &mut [u32]) -> Result<(), Error> {
        match self.now.answer {
            AnswerPosition::Begun { .. } => self.answer_mask(words)?,
            AnswerPosition::None => words.fill(0),
        }
        let markers = &self.rules.tokens.markers;
        let mut beginnings = vec![markers.open.trim_start().to_owned()];
        let channels = markers.channels.iter().filter(|_| markers.needs_heading());
        beginnings.extend(channels.map(|channels| channels.answers[0].trim_start().to_owned()));
        self.allow_markers(&beginnings, words);
        Ok(())
    }

    /// Writes the mask behind the closing marker, where an answer with a constraint follows.
    fn mask_closed(&mut self, words: &mut [u32]) -> Result<(), Error> {
        if let Some(heading) = self.rules.tokens.markers.answer_heading() {
            words.fill(0);
            self.allow_markers(&[heading], words);
            return Ok(());
        }
        self.answer_mask(words)?;
        if self.now.num_blank < MAX_BLANK {
            self.rules.tokens.blanks.iter().for_each(|&id| set(words, id, true));
        }
        Ok(())
    }

    /// Moves the position past a token's text; returns the state before it.
    fn advance(&mut self, token: u32) -> ThoughtState {
        let before = self.state();
        let text = self.rules.tokens.text_of(token);
        self.now.splitter.push(&text);
        if !self.now.forced.is_empty() {
            self.now.forced.remove(0);
        } else if before == ThoughtState::Thought && self.state() == before {
            self.now.num_thought += 1;
        }
        if before == ThoughtState::Closed && text.trim().is_empty() {
            self.now.num_blank += text.len();
        }
        before
    }

    /// Decides whether the last token belongs to the answer. `is_allowed` says whether an answer may begin with the
    /// tokens so far.
    fn place_answer(&mut self, before: ThoughtState, is_allowed: bool) {
        let index = self.tokens.len() - 1;
        let after = self.state();
        let needs_heading = self.rules.tokens.markers.needs_heading();
        let is_blank = self.rules.tokens.blanks.binary_search(&self.tokens[index]).is_ok();
        let belongs = match (before, self.now.answer) {
            (_, AnswerPosition::None) | (ThoughtState::Thought, _) => false,
            (ThoughtState::Answer, _) => true,
            (ThoughtState::Start, _) => is_allowed && after != ThoughtState::Thought,
            (ThoughtState::Closed, AnswerPosition::Begun { num_tokens, .. }) => num_tokens > 0 || !is_blank,
        };
        let begins = after == ThoughtState::Answer || after == ThoughtState::Closed && !needs_heading;
        self.now.answer = match self.now.answer {
            AnswerPosition::Begun { first, num_tokens: 1.. } if belongs => {
                AnswerPosition::Begun { first, num_tokens: index + 1 - first }
            }
            _ if belongs => AnswerPosition::Begun { first: index, num_tokens: 1 },
            _ if begins => AnswerPosition::Begun { first: index + 1, num_tokens: 0 },
            _ => AnswerPosition::None,
        };
    }

    /// Whether an answer may go on with this token. Asked only at the beginning of a reply, where the token may also
    /// belong to the opening marker.
    fn continues_answer(&mut self, token: u32) -> Result<bool, Error> {
        let is_undecided = self.state() == ThoughtState::Start && self.now.answer != AnswerPosition::None;
        let Some(answer) = self.answer.as_mut().filter(|answer| is_undecided && !answer.allows_all()) else {
            return Ok(true);
        };
        let mut words = vec![0; self.rules.tokens.vocab_size.div_ceil(32)];
        answer.mask(&mut words)?;
        Ok(words.get(token as usize / 32).is_some_and(|word| word >> (token % 32) & 1 == 1))
    }

    /// Makes the matcher of the answer accept the tokens that belong to it, and no others.
    fn follow(&mut self) -> Result<(), Error> {
        let (Some(answer), Some(rules)) = (&mut self.answer, &self.rules.answer) else { return Ok(()) };
        let (first, num_tokens) = match self.now.answer {
            AnswerPosition::Begun { first, num_tokens } => (first, num_tokens),
            AnswerPosition::None => (self.in_answer.0, 0),
        };
        if first != self.in_answer.0 && self.in_answer.1 > 0 {
            *answer = rules.matcher();
            self.in_answer.1 = 0;
        } else if num_tokens < self.in_answer.1 {
            answer.rollback(self.in_answer.1 - num_tokens)?;
            self.in_answer.1 = num_tokens;
        }
        let accepted = self.in_answer.1;
        for &token in self.tokens.iter().skip(first + accepted).take(num_tokens - accepted) {
            answer.accept(token)?;
        }
        self.in_answer = (first, num_tokens);
        Ok(())
    }
}

impl TokenMatcher for ThoughtMatcher {
    fn allows_all(&self) -> bool {
        let Some(answer) = &self.answer else {
            let may_reopen = self.state() == ThoughtState::Closed && self.is_exhausted();
            return self.now.forced.is_empty() && !may_reopen;
        };
        self.now.forced.is_empty() && self.is_answer() && answer.allows_all()
    }

    fn mask(&mut self, words: &mut [u32]) -> Result<(), Error> {
        if let Some(&next) = self.now.forced.first() {
            words.fill(0);
            set(words, next, true);
            return Ok(());
        }
        if self.is_answer() {
            return self.answer_mask(words);
        }
        match self.state() {
            ThoughtState::Start if self.answer.is_some() => self.mask_start(words)?,
            ThoughtState::Closed if self.answer.is_some() => self.mask_closed(words)?,
            ThoughtState::Thought if self.answer.is_some() => {
                words.fill(u32::MAX);
                self.exclude_straddling(words);
                if !self.may_end() {
                    self.rules.tokens.end_ids().iter().for_each(|&id| set(words, id, false));
                }
            }
            _ => words.fill(u32::MAX),
        }
        if self.state() == ThoughtState::Closed && self.is_exhausted() {
            let open = self.rules.tokens.markers.open.trim();
            let reopens = |text: &str| text.trim_start().starts_with(open);
            let excluded = self.rules.tokens.matching(self.now.splitter.held(), reopens);
            excluded.into_iter().for_each(|id| set(words, id, false));
        }
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        let is_allowed = self.continues_answer(token)?;
        self.before.push(self.now.clone());
        self.tokens.push(token);
        if self.rules.tokens.end_ids().contains(&token) {
            self.now.has_ended = true;
            return Ok(());
        }
        let before = self.advance(token);
        self.force_if_exhausted();
        self.place_answer(before, is_allowed);
        self.follow()
    }

    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error> {
        let kept = self.tokens.len().saturating_sub(num_tokens);
        if let Some(position) = self.before.drain(kept..).next() {
            self.now = position;
        }
        self.tokens.truncate(kept);
        self.follow()
    }

    fn may_end(&mut self) -> bool {
        self.now.has_ended || self.now.forced.is_empty() && self.answer.as_mut().is_none_or(|answer| answer.may_end())
    }

    fn is_complete(&self) -> bool {
        let is_full = self.answer.as_ref().is_some_and(|answer| answer.is_complete());
        self.now.has_ended || self.now.answer != AnswerPosition::None && is_full
    }

    fn forced(&mut self) -> &[u32] {
        if !self.now.forced.is_empty() {
            return &self.now.forced;
        }
        let is_answer = self.is_answer();
        self.answer.as_mut().filter(|_| is_answer).map_or(&[], |answer| answer.forced())
    }

    fn expected(&mut self) -> String {
        if !self.now.forced.is_empty() {
            let budget = self.rules.budget.unwrap_or_default();
            return format!("the end of the thoughts, which have reached thinking_budget ({budget})");
        }
        match (self.state(), &mut self.answer) {
            (ThoughtState::Thought, _) => "thoughts".into(),
            (ThoughtState::Start, Some(answer)) => format!("thoughts or {}", answer.expected()),
            (_, Some(answer)) => answer.expected(),
            (_, None) => "any text".into(),
        }
    }
}
