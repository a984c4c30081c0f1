//! The position of one sequence within its answer and calls.
//!
//! In free text, the matcher looks for triggers in the bytes of the tokens and allows every token, but for the few that
//! complete a trigger and go on with text that the grammar of calls forbids. Elsewhere it asks parsers. Where both an
//! answer of a grammar and a call may begin, their parsers run side by side until one is left.

use std::sync::Arc;

use pellucid_sampling::{Error, TokenMatcher};

use super::constraint::{Forbidden, Shared};
use super::marker::{find, next_tokens, partial, spell, text_of, trimmed};
use crate::matcher::GrammarMatcher;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Free answer, in which a trigger begins calls.
    Free,
    /// An answer of a grammar, its heading, or calls may begin.
    Choice,
    /// An answer of a grammar.
    Answer,
    /// Calls.
    Calls,
}

/// Indices of the two parsers.
const ANSWER: usize = 0;
const CALLS: usize = 1;

/// Everything that changes with a token, but for the parsers.
#[derive(Debug, Clone)]
struct Position {
    phase: Phase,
    /// The end of the text, which may belong to a trigger or a heading.
    held: Vec<u8>,
    /// Whether the answer has nothing but white space.
    is_at_start: bool,
    /// Number of tokens that each parser has accepted; `None` if it excluded the text.
    alive: [Option<usize>; 2],
    has_ended: bool,
}

/// The position of one sequence.
pub(super) struct ReplyMatcher {
    shared: Arc<Shared>,
    now: Position,
    /// Positions before each accepted token.
    history: Vec<Position>,
    /// Parsers, made when they are needed, and the number of tokens that each holds.
    parsers: [Option<GrammarMatcher>; 2],
    lengths: [usize; 2],
}

impl std::fmt::Debug for ReplyMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ReplyMatcher({:?})", self.now.phase)
    }
}

impl ReplyMatcher {
    pub(super) fn new(shared: Arc<Shared>) -> ReplyMatcher {
        let rules = &shared.rules;
        let has_answer = rules.answer.is_some() && rules.answer_open.is_none() && !rules.is_call_required();
        let now = Position {
            phase: if rules.is_constrained() { Phase::Choice } else { Phase::Free },
            held: Vec::new(),
            is_at_start: true,
            alive: [has_answer.then_some(0), rules.calls.as_ref().map(|_| 0)],
            has_ended: false,
        };
        ReplyMatcher { shared, now, history: Vec::new(), parsers: [None, None], lengths: [0; 2] }
    }

    /// Returns a parser at the number of tokens that the position says.
    fn parser(&mut self, which: usize) -> Result<&mut GrammarMatcher, Error> {
        let rules = &self.shared.rules;
        let grammar = match which {
            ANSWER => rules.answer.as_ref(),
            _ => rules.calls.as_ref().map(|calls| &calls.grammar),
        };
        let Some(grammar) = grammar else { return Err(Error::Grammar("the reply has no such part".into())) };
        let parser = self.parsers[which].get_or_insert_with(|| grammar.grammar_matcher());
        let wanted = self.now.alive[which].unwrap_or(0);
        let num_extra = self.lengths[which].saturating_sub(wanted);
        if num_extra > 0 {
            parser.rollback(num_extra)?;
            self.lengths[which] = wanted;
        }
        Ok(parser)
    }

    /// Moves a parser past tokens, or excludes it if it does not allow them.
    fn advance(&mut self, which: usize, tokens: &[u32]) -> Result<bool, Error> {
        if self.now.alive[which].is_none() {
            return Ok(false);
        }
        if !self.parser(which)?.allows(tokens) {
            self.now.alive[which] = None;
            return Ok(false);
        }
        tokens.iter().try_for_each(|&token| self.accept_in(which, token))?;
        Ok(true)
    }

    fn accept_in(&mut self, which: usize, token: u32) -> Result<(), Error> {
        self.parser(which)?.accept(token)?;
        self.lengths[which] += 1;
        self.now.alive[which] = Some(self.lengths[which]);
        Ok(())
    }

    fn may_end_in(&mut self, which: usize) -> bool {
        self.now.alive[which].is_some() && self.parser(which).is_ok_and(GrammarMatcher::may_end)
    }

    /// Looks for a trigger in a free answer.
    fn read(&mut self, bytes: &[u8]) -> Result<(), Error> {
        let shared = self.shared.clone();
        let Some(calls) = shared.rules.calls.as_ref().filter(|calls| !calls.is_at_start || self.now.is_at_start) else {
            return Ok(());
        };
        self.now.held.extend_from_slice(bytes);
        let text = if calls.is_at_start { trimmed(&self.now.held) } else { &self.now.held };
        let found = if calls.is_at_start {
            calls.triggers.iter().rposition(|trigger| text.starts_with(trigger.as_bytes())).map(|index| (0, index))
        } else {
            find(text, &calls.triggers)
        };
        let Some((at, index)) = found else {
            if calls.is_at_start {
                self.now.is_at_start = calls.triggers.iter().any(|trigger| trigger.as_bytes().starts_with(text));
            }
            let num_kept = match calls.is_at_start {
                true if self.now.is_at_start => text.len(),
                true => 0,
                false => partial(text, &calls.triggers),
            };
            self.now.held.drain(..self.now.held.len() - num_kept);
            return Ok(());
        };
        let trigger = &calls.triggers[index];
        let trie = shared.env.tok_trie();
        let mut tokens = spell(&shared.tokenizer, trie, trigger);
        tokens.extend(trie.greedy_tokenize(&text[at + trigger.len()..]));
        self.now.held.clear();
        self.now.phase = Phase::Calls;
        self.now.alive = [None, Some(0)];
        match self.advance(CALLS, &tokens)? {
            true => Ok(()),
            false => Err(Error::Grammar("a call begins in a way that is not allowed".into())),
        }
    }

    /// Returns the heading of an answer, where one may be written.
    fn heading(&self) -> Option<&[u8]> {
        let rules = &self.shared.rules;
        rules.answer_open.as_ref().filter(|_| !rules.is_call_required()).map(String::as_bytes)
    }

    /// Takes a token in the phase of choice.
    fn choose(&mut self, token: u32, bytes: &[u8]) -> Result<(), Error> {
        let is_answer = self.advance(ANSWER, &[token])?;
        let is_call = self.advance(CALLS, &[token])?;
        self.now.held.extend_from_slice(bytes);
        if self.heading() == Some(&self.now.held) {
            let has_grammar = self.shared.rules.answer.is_some();
            self.now.held.clear();
            self.now.alive = [Some(0), None];
            self.now.phase = if has_grammar { Phase::Answer } else { Phase::Free };
            return Ok(());
        }
        let is_heading = self.heading().is_some_and(|heading| heading.starts_with(&self.now.held));
        match (is_heading, is_answer, is_call) {
            (false, false, false) => {
                return Err(Error::Grammar("the reply begins in a way that is not allowed".into()));
            }
            (false, true, false) => self.now.phase = Phase::Answer,
            (false, false, true) => self.now.phase = Phase::Calls,
            _ => return Ok(()),
        }
        self.now.held.clear();
        Ok(())
    }

    /// Returns the tokens that are forbidden at this position of free text.
    fn forbidden(&self) -> impl Iterator<Item = u32> {
        let shared = &self.shared;
        let calls = shared.rules.calls.as_ref().filter(|calls| !calls.is_at_start || self.now.is_at_start);
        let applies = move |entry: &&Forbidden| {
            let Some(calls) = calls else { return false };
            let before = entry.before.map(|before| &calls.triggers[entry.trigger].as_bytes()[..before]);
            match before {
                // White space may precede a trigger, but no other text may precede one that counts at the start.
                None | Some([]) => !calls.is_at_start || self.now.held.is_empty(),
                Some(before) if calls.is_at_start => self.now.held == before,
                Some(before) => self.now.held.ends_with(before),
            }
        };
        shared.forbidden.iter().filter(applies).map(|entry| entry.token)
    }

    fn mask_of_choice(&mut self, words: &mut [u32]) -> Result<(), Error> {
        let mut part = vec![0; words.len()];
        for which in [ANSWER, CALLS] {
            if self.now.alive[which].is_some() {
                self.parser(which)?.mask(&mut part)?;
                words.iter_mut().zip(&part).for_each(|(word, part)| *word |= part);
            }
        }
        if let Some(rest) = self.heading().and_then(|heading| heading.strip_prefix(&*self.now.held)) {
            let tokens = next_tokens(&self.shared.tokenizer, self.shared.env.tok_trie(), rest);
            tokens.into_iter().for_each(|token| set(words, token, true));
        }
        Ok(())
    }
}

impl TokenMatcher for ReplyMatcher {
    fn allows_all(&self) -> bool {
        !self.now.has_ended && self.now.phase == Phase::Free && self.forbidden().next().is_none()
    }

    fn mask(&mut self, words: &mut [u32]) -> Result<(), Error> {
        words.fill(0);
        if self.now.has_ended {
            self.shared.tokenizer.end_ids().iter().for_each(|&id| set(words, id, true));
            return Ok(());
        }
        match self.now.phase {
            Phase::Free => {
                words.fill(u32::MAX);
                self.forbidden().for_each(|id| set(words, id, false));
                Ok(())
            }
            Phase::Choice => self.mask_of_choice(words),
            Phase::Answer => self.parser(ANSWER)?.mask(words),
            Phase::Calls => self.parser(CALLS)?.mask(words),
        }
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        self.history.push(self.now.clone());
        if self.now.has_ended || self.shared.tokenizer.end_ids().contains(&token) {
            self.now.has_ended = true;
            return Ok(());
        }
        match self.now.phase {
            Phase::Answer => return self.accept_in(ANSWER, token),
            Phase::Calls => return self.accept_in(CALLS, token),
            Phase::Free | Phase::Choice => {}
        }
        let (mut bytes, is_control) = text_of(&self.shared.tokenizer, token);
        if is_control && !self.shared.is_marker(&bytes) {
            bytes.clear();
        }
        if self.now.phase == Phase::Free { self.read(&bytes) } else { self.choose(token, &bytes) }
    }

    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error> {
        let Some(length) = self.history.len().checked_sub(num_tokens) else {
            return Err(Error::Grammar("more tokens were taken back than accepted".into()));
        };
        if let Some(position) = self.history.drain(length..).next() {
            self.now = position;
        }
        Ok(())
    }

    fn may_end(&mut self) -> bool {
        match self.now.phase {
            _ if self.now.has_ended => true,
            Phase::Free => true,
            Phase::Choice => self.may_end_in(ANSWER) || self.may_end_in(CALLS),
            Phase::Answer => self.may_end_in(ANSWER),
            Phase::Calls => self.may_end_in(CALLS),
        }
    }

    fn is_complete(&self) -> bool {
        let which = match self.now.phase {
            _ if self.now.has_ended => return true,
            Phase::Answer => ANSWER,
            Phase::Calls => CALLS,
            Phase::Free | Phase::Choice => return false,
        };
        Some(self.lengths[which]) == self.now.alive[which]
            && self.parsers[which].as_ref().is_some_and(GrammarMatcher::is_complete)
    }

    fn forced(&mut self) -> &[u32] {
        match self.now.phase {
            _ if self.now.has_ended => &[],
            Phase::Answer => self.parser(ANSWER).map(GrammarMatcher::forced).unwrap_or_default(),
            Phase::Calls => self.parser(CALLS).map(GrammarMatcher::forced).unwrap_or_default(),
            Phase::Free | Phase::Choice => &[],
        }
    }

    fn expected(&mut self) -> String {
        match self.now.phase {
            _ if self.now.has_ended => "expected the end".into(),
            Phase::Free => "expected any text".into(),
            Phase::Choice => "expected the beginning of an answer or of a call".into(),
            Phase::Answer => self.parser(ANSWER).map_or_else(|error| error.to_string(), GrammarMatcher::expected),
            Phase::Calls => self.parser(CALLS).map_or_else(|error| error.to_string(), GrammarMatcher::expected),
        }
    }
}

impl Shared {
    /// Whether a control token of this text is a trigger or the heading of an answer, or a part of one.
    fn is_marker(&self, text: &[u8]) -> bool {
        let Ok(text) = std::str::from_utf8(text) else { return false };
        let triggers = self.rules.calls.iter().flat_map(|calls| &calls.triggers);
        triggers.chain(&self.rules.answer_open).any(|marker| marker.contains(text))
    }
}

fn set(words: &mut [u32], id: u32, is_allowed: bool) {
    if let Some(word) = words.get_mut(id as usize / 32) {
        let bit = 1 << (id % 32);
        *word = if is_allowed { *word | bit } else { *word & !bit };
    }
}
