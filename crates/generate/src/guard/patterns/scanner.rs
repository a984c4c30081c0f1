//! Runs the automaton of all expressions over texts that arrive in pieces.
//!
//! The automaton is a Thompson NFA. A thread is a state and the number of the piece in which its match began. Threads
//! are kept in the order of their beginnings and each state once, so the first thread of a state is the oldest. Their
//! number is at most that of the states, and each character takes time linear in it.

use std::sync::Arc;

use regex_automata::nfa::thompson::State;
use regex_automata::util::primitives::StateID;

use super::super::{Passage, ReplyScanner, Scan};
use super::Automaton;
use super::escapes::DecodedScan;
use super::normalize::normalized;

/// A match in progress.
#[derive(Debug, Clone, Copy)]
struct Thread {
    state: StateID,
    /// Number of the piece in which the match began.
    piece: usize,
}

/// Searches one text.
#[derive(Debug)]
pub(super) struct TextScan {
    automaton: Arc<Automaton>,
    /// Threads behind the last character, before the assertions there are known to hold: they depend on the next one.
    threads: Vec<Thread>,
    /// Last character; `None` at the beginning.
    before: Option<char>,
    /// Piece and number of the expression of the first match.
    found: Option<(usize, usize)>,
    scratch: Scratch,
}

/// Memory of a step, kept to avoid allocations.
#[derive(Debug, Default)]
struct Scratch {
    /// Step in which each state was last reached.
    reached: Vec<u32>,
    step: u32,
    stack: Vec<StateID>,
    current: Vec<Thread>,
}

impl TextScan {
    pub(super) fn new(automaton: Arc<Automaton>) -> TextScan {
        let reached = vec![0; automaton.nfa.states().len()];
        let scratch = Scratch { reached, ..Scratch::default() };
        TextScan { automaton, threads: Vec::new(), before: None, found: None, scratch }
    }

    /// Piece and number of the expression of the match that is complete first; of those, the one that began first.
    pub(super) fn found(&self) -> Option<(usize, usize)> {
        self.found
    }

    /// Number of the first piece that may belong to a match that is not complete.
    pub(super) fn held_from(&self) -> Option<usize> {
        self.threads.first().map(|thread| thread.piece)
    }

    /// Returns a search that goes on behind the same text.
    pub(super) fn fork(&self) -> TextScan {
        let fresh = TextScan::new(self.automaton.clone());
        TextScan { threads: self.threads.clone(), before: self.before, found: self.found, ..fresh }
    }

    pub(super) fn push(&mut self, piece: usize, text: &str) {
        text.chars().for_each(|character| self.push_character(piece, character));
    }

    pub(super) fn push_character(&mut self, piece: usize, character: char) {
        for character in normalized(character) {
            if self.found.is_some() {
                return;
            }
            self.step(piece, character);
        }
    }

    /// Ends the text, where assertions about its end hold.
    pub(super) fn finish(&mut self) {
        if self.found.is_none() {
            self.close_over(&[]);
        }
        self.threads.clear();
    }

    /// Begins a match at `character`, and takes every thread over it.
    fn step(&mut self, piece: usize, character: char) {
        let mut buffer = [0; 4];
        let bytes = character.encode_utf8(&mut buffer).as_bytes();
        if self.automaton.can_begin[bytes[0] as usize] {
            self.threads.push(Thread { state: self.automaton.nfa.start_anchored(), piece });
        }
        for &byte in bytes {
            // Assertions stand between characters, so `before` matters at the first byte only.
            self.close_over(bytes);
            if self.found.is_some() {
                return;
            }
            self.take_byte(byte);
        }
        self.before = Some(character);
    }

    /// Replaces the threads by all that they reach without a byte, and looks for a complete match. `next` is the next
    /// character.
    fn close_over(&mut self, next: &[u8]) {
        let TextScan { automaton, threads, before, found, scratch } = self;
        let Scratch { reached, step, stack, current } = scratch;
        let mut around = [0; 8];
        let at = before.map_or(0, |before| before.encode_utf8(&mut around).len());
        around[at..at + next.len()].copy_from_slice(next);
        let around = &around[..at + next.len()];
        *step = step.wrapping_add(1);
        current.clear();
        for thread in threads.drain(..) {
            stack.push(thread.state);
            while let Some(state) = stack.pop() {
                if std::mem::replace(&mut reached[state.as_usize()], *step) == *step {
                    continue;
                }
                match automaton.nfa.state(state) {
                    State::Look { look, next } => {
                        if automaton.nfa.look_matcher().matches(*look, around, at) {
                            stack.push(*next);
                        }
                    }
                    State::Union { alternates } => stack.extend(alternates.iter().rev()),
                    State::BinaryUnion { alt1, alt2 } => stack.extend([*alt2, *alt1]),
                    State::Capture { next, .. } => stack.push(*next),
                    State::Match { pattern_id } => {
                        found.get_or_insert((thread.piece, pattern_id.as_usize()));
                    }
                    State::Fail => {}
                    State::ByteRange { .. } | State::Sparse(_) | State::Dense(_) => {
                        current.push(Thread { state, piece: thread.piece });
                    }
                }
            }
        }
        std::mem::swap(threads, current);
    }

    /// Takes every thread over a byte; those that it does not fit end.
    fn take_byte(&mut self, byte: u8) {
        let nfa = &self.automaton.nfa;
        self.threads.retain_mut(|thread| {
            let next = match nfa.state(thread.state) {
                State::ByteRange { trans } => trans.matches_byte(byte).then_some(trans.next),
                State::Sparse(transitions) => transitions.matches_byte(byte),
                State::Dense(transitions) => transitions.matches_byte(byte),
                _ => None,
            };
            next.inspect(|&next| thread.state = next).is_some()
        });
    }
}

/// Searches one passage.
#[derive(Debug)]
struct PassageScan {
    passage: Passage,
    written: TextScan,
    /// The text with its escapes decoded, from the first escape of a call on. Before that, both texts are the same.
    decoded: Option<DecodedScan>,
}

impl PassageScan {
    fn push(&mut self, piece: usize, text: &str) {
        if let Some(decoded) = &mut self.decoded {
            decoded.push(piece, text);
            return self.written.push(piece, text);
        }
        let escape = text.find('\\').filter(|_| matches!(self.passage, Passage::Call(_)));
        let (before, rest) = text.split_at(escape.unwrap_or(text.len()));
        self.written.push(piece, before);
        if escape.is_some() {
            self.decoded = Some(DecodedScan::after(&self.written));
            self.push(piece, rest);
        }
    }

    fn finish(&mut self) {
        self.written.finish();
        self.decoded.iter_mut().for_each(DecodedScan::finish);
    }

    fn found(&self) -> Option<(usize, usize)> {
        self.written.found().into_iter().chain(self.decoded.iter().filter_map(DecodedScan::found)).min()
    }

    fn held_from(&self) -> Option<usize> {
        self.written.held_from().into_iter().chain(self.decoded.iter().filter_map(DecodedScan::held_from)).min()
    }
}

/// Searches all passages of a reply.
#[derive(Debug)]
pub(super) struct PatternScanner {
    automaton: Arc<Automaton>,
    passages: Vec<PassageScan>,
    /// Pieces that were added.
    num_pieces: usize,
}

impl PatternScanner {
    pub(super) fn new(automaton: Arc<Automaton>) -> PatternScanner {
        PatternScanner { automaton, passages: Vec::new(), num_pieces: 0 }
    }

    /// Returns the scan of a passage. A call is complete when the next one begins.
    fn passage(&mut self, passage: Passage) -> &mut PassageScan {
        let at = self.passages.iter().position(|known| known.passage == passage);
        let at = at.unwrap_or_else(|| {
            let written = TextScan::new(self.automaton.clone());
            self.passages.push(PassageScan { passage, written, decoded: None });
            self.passages.len() - 1
        });
        &mut self.passages[at]
    }

    fn scan(&self) -> Scan {
        match self.passages.iter().filter_map(PassageScan::found).min() {
            Some((piece, pattern)) => {
                // A match in one passage does not release what another holds back.
                let from = self.held_from().map_or(piece, |held| held.min(piece));
                Scan::Blocked { from, rule: self.automaton.rule(pattern) }
            }
            None => Scan::Passed(self.held_from().unwrap_or(self.num_pieces)),
        }
    }

    fn held_from(&self) -> Option<usize> {
        self.passages.iter().filter_map(PassageScan::held_from).min()
    }
}

impl ReplyScanner for PatternScanner {
    fn push(&mut self, piece: usize, passage: Passage, text: &str) -> Scan {
        self.num_pieces = piece + 1;
        if let Passage::Call(index) = passage {
            let is_complete = |scan: &PassageScan| matches!(scan.passage, Passage::Call(other) if other < index);
            self.passages.iter_mut().filter(|scan| is_complete(scan)).for_each(PassageScan::finish);
            self.passages.retain(|scan| !is_complete(scan) || scan.found().is_some());
        }
        self.passage(passage).push(piece, text);
        self.scan()
    }

    fn finish(&mut self) -> Scan {
        self.passages.iter_mut().for_each(PassageScan::finish);
        match self.scan() {
            Scan::Passed(_) => Scan::Passed(self.num_pieces),
            blocked => blocked,
        }
    }
}
