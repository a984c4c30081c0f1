//! Finds the matches of an automaton in a text, in time proportional to the text.
//!
//! For each position, a pass from the end computes the states from which a match can still be completed, and with
//! them whether each look-ahead holds. A pass from the start then never tries in vain: it begins a match at the first
//! position from which one can be completed, and at each choice takes the first branch that leads to one. This is the
//! match that a backtracking engine finds (Frisch and Cardelli, "Greedy regular expression matching", 2004).
//!
//! The sets of states are numbered and their transitions are cached, so a character usually costs two table lookups.
//! The first pass keeps one set for each block of the text; the second computes the others again, block by block. The
//! cache is emptied between blocks if it has grown too large, so its memory is bounded for every pattern and text. A
//! pattern of more than 64 states is accepted only if the sets of all texts fit the cache, so each is computed once.
//! The worst case of a smaller one, a set not seen before at each character, costs one visit of every state for each
//! character and pass.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use super::program::{Program, State, StateId};

/// Characters of a block.
const BLOCK_CHARS: usize = 512;
/// Bytes from which the cache is emptied before the next block.
const CACHE_BYTES: usize = 4 << 20;
/// States of a pattern whose table may be larger than the cache.
const FREE_STATES: usize = 64;
/// Maximum visits of states to compute a whole table: about 0.2 seconds. The largest known table takes 1.6 million.
const MAX_TABLE_WORK: usize = 1 << 26;
const UNKNOWN: u32 = u32::MAX;
const UNKNOWN_STATE: u16 = u16::MAX;
const FOUND: u16 = u16::MAX - 1;

/// The states from which a match can be completed, as bits.
type Viable = Arc<[u64]>;

/// Sets of states that were met, and transitions between them.
pub(super) struct Cache {
    sets: Vec<Viable>,
    numbers: HashMap<Viable, u32>,
    /// For each set and symbol, the set one character earlier.
    earlier: Vec<u32>,
    /// For each set and state, the `Char` state to go to, or `FOUND`.
    chosen: Vec<u16>,
    /// The set of each position of the current block.
    block: Vec<u32>,
    stack: Vec<StateId>,
    visited: Vec<u64>,
}

/// The end of a block, with the set of states there.
struct Checkpoint {
    end: usize,
    set: Viable,
}

/// A match under way.
#[derive(Clone, Copy)]
struct Open {
    begin: usize,
    state: StateId,
}

fn bit(set: &[u64], state: StateId) -> bool {
    set[state as usize / 64] >> (state % 64) & 1 == 1
}

fn set_bit(set: &mut [u64], state: StateId) {
    set[state as usize / 64] |= 1 << (state % 64);
}

impl Cache {
    pub(super) fn new(program: &Program) -> Cache {
        Cache {
            sets: Vec::new(),
            numbers: HashMap::new(),
            earlier: Vec::new(),
            chosen: Vec::new(),
            block: Vec::new(),
            stack: Vec::new(),
            visited: vec![0; program.states.len().div_ceil(64)],
        }
    }

    fn bytes(&self) -> usize {
        4 * self.earlier.len() + 2 * self.chosen.len() + 16 * self.sets.len() * self.visited.len()
    }

    fn empty_if_large(&mut self) {
        if self.bytes() > CACHE_BYTES {
            self.sets.clear();
            self.numbers.clear();
            self.earlier.clear();
            self.chosen.clear();
        }
    }

    fn number(&mut self, program: &Program, set: Viable) -> u32 {
        if let Some(&number) = self.numbers.get(&set) {
            return number;
        }
        let number = self.sets.len() as u32;
        self.numbers.insert(set.clone(), number);
        self.sets.push(set);
        self.earlier.resize(self.sets.len() * num_symbols(program), UNKNOWN);
        self.chosen.resize(self.sets.len() * program.states.len(), UNKNOWN_STATE);
        number
    }

    /// Returns the set at a position from that at the next one. `class` is that of the character between them.
    #[inline]
    fn step_back(&mut self, program: &Program, set: u32, class: usize, behind: usize) -> u32 {
        let slot = set as usize * num_symbols(program) + class * program.behind_values.len() + behind;
        match self.earlier[slot] {
            UNKNOWN => {
                let viable = self.viable(program, Some((set, class)), behind);
                let number = self.number(program, viable);
                self.earlier[slot] = number;
                number
            }
            known => known,
        }
    }

    /// Computes the states from which a match can be completed at a position. `next` is the set at the next position
    /// and the class of the character between; `None` at the end of the text.
    fn viable(&mut self, program: &Program, next: Option<(u32, usize)>, behind: usize) -> Viable {
        let mut found = vec![0; self.visited.len()];
        let mut readers: Vec<Vec<StateId>> = vec![Vec::new(); program.parts.len()];
        if let Some((set, class)) = next {
            let after = &self.sets[set as usize];
            for &state in &program.accepting[class] {
                if let State::Char { next, .. } = program.states[state as usize]
                    && bit(after, next)
                {
                    readers[program.part_of[state as usize] as usize].push(state);
                }
            }
        }
        // A look-ahead is decided before the parts that contain it.
        for (part, mut pending) in program.parts.iter().zip(readers) {
            pending.push(part.accept);
            while let Some(state) = pending.pop() {
                if bit(&found, state) {
                    continue;
                }
                let holds = match program.states[state as usize] {
                    State::Ahead { look, negative, .. } => bit(&found, program.parts[look as usize].start) != negative,
                    State::Behind { condition, .. } => program.behind_values[behind][condition as usize],
                    _ => true,
                };
                if holds {
                    set_bit(&mut found, state);
                    pending.extend_from_slice(&program.predecessors[state as usize]);
                }
            }
        }
        found.into()
    }

    /// Returns the `Char` state that a match goes to from `state`, or `FOUND` if it ends here.
    #[inline]
    fn choose(&mut self, program: &Program, set: u32, state: StateId) -> u16 {
        let slot = set as usize * program.states.len() + state as usize;
        if self.chosen[slot] == UNKNOWN_STATE {
            self.chosen[slot] = self.first_viable(program, set, state);
        }
        self.chosen[slot]
    }

    fn first_viable(&mut self, program: &Program, set: u32, state: StateId) -> u16 {
        let viable = &self.sets[set as usize];
        self.visited.fill(0);
        self.stack.clear();
        self.stack.push(state);
        while let Some(state) = self.stack.pop() {
            if !bit(viable, state) || bit(&self.visited, state) {
                continue;
            }
            set_bit(&mut self.visited, state);
            match program.states[state as usize] {
                // A program has fewer than 2^15 states.
                State::Char { .. } => return state as u16,
                State::Match => break,
                State::Split(first, second) => self.stack.extend([second, first]),
                State::Ahead { next, .. } | State::Behind { next, .. } => self.stack.push(next),
            }
        }
        FOUND
    }

    /// Calls `emit` for each match, from the left. An empty match directly after another is skipped.
    pub(super) fn matches(&mut self, program: &Program, text: &str, emit: &mut dyn FnMut(Range<usize>)) {
        let checkpoints = self.checkpoints(program, text);
        let mut begin = 0;
        let mut open = None;
        let mut last_end = None;
        for checkpoint in checkpoints.iter().rev() {
            self.empty_if_large();
            self.fill_block(program, text, begin, checkpoint);
            self.walk_block(program, text, begin..checkpoint.end, &mut open, &mut last_end, emit);
            begin = checkpoint.end;
        }
    }

    /// Returns the ends of all blocks with their sets, the last block first.
    fn checkpoints(&mut self, program: &Program, text: &str) -> Vec<Checkpoint> {
        self.empty_if_large();
        let last = text.chars().next_back();
        let set = self.viable(program, None, behind(program, last));
        let mut checkpoints = vec![Checkpoint { end: text.len(), set: set.clone() }];
        // The first block needs no checkpoint before it.
        if text.len() <= BLOCK_CHARS {
            return checkpoints;
        }
        let mut number = self.number(program, set);
        let mut end = text.len();
        let mut chars = text.chars().rev().peekable();
        let mut count = 0;
        while let Some(c) = chars.next() {
            let before = behind(program, chars.peek().copied());
            number = self.step_back(program, number, program.classes.of(c), before);
            end -= c.len_utf8();
            count += 1;
            if count % BLOCK_CHARS == 0 && end > 0 {
                let set = self.sets[number as usize].clone();
                checkpoints.push(Checkpoint { end, set: set.clone() });
                self.empty_if_large();
                number = self.number(program, set);
            }
        }
        checkpoints
    }

    /// Computes the set of every position from `begin` to the checkpoint; the last position comes first.
    fn fill_block(&mut self, program: &Program, text: &str, begin: usize, checkpoint: &Checkpoint) {
        let before_block = text[..begin].chars().next_back();
        let mut number = self.number(program, checkpoint.set.clone());
        self.block.clear();
        self.block.push(number);
        let mut chars = text[begin..checkpoint.end].chars().rev().peekable();
        while let Some(c) = chars.next() {
            let before = behind(program, chars.peek().copied().or(before_block));
            number = self.step_back(program, number, program.classes.of(c), before);
            self.block.push(number);
        }
    }

    /// Goes through a block from its start. The position at its end belongs to the next block, or is the text's end.
    fn walk_block(
        &mut self,
        program: &Program,
        text: &str,
        block: Range<usize>,
        open: &mut Option<Open>,
        last_end: &mut Option<usize>,
        emit: &mut dyn FnMut(Range<usize>),
    ) {
        let Some(whole) = program.parts.last() else { return };
        let mut at = block.start;
        let mut index = self.block.len() - 1;
        loop {
            if index == 0 && at < text.len() {
                return;
            }
            let set = self.block[index];
            // A match that ends here may be followed by one that begins here.
            if let Some(Open { begin, state }) = *open
                && self.go_on(program, set, at, state, open)
            {
                emit(begin..at);
                *last_end = Some(at);
            }
            if open.is_none() && bit(&self.sets[set as usize], whole.start) {
                let ends = self.go_on(program, set, at, whole.start, open);
                if ends && *last_end != Some(at) {
                    emit(at..at);
                    *last_end = Some(at);
                }
            }
            let Some(c) = text[at..].chars().next() else { return };
            at += c.len_utf8();
            index -= 1;
        }
    }

    /// Continues a match at `at` from `state`, before it reads a character. Returns whether it ends here.
    #[inline]
    fn go_on(&mut self, program: &Program, set: u32, at: usize, state: StateId, open: &mut Option<Open>) -> bool {
        let begin = open.map_or(at, |open| open.begin);
        let chosen = self.choose(program, set, state);
        *open = match program.states.get(chosen as usize) {
            Some(State::Char { next, .. }) => Some(Open { begin, state: *next }),
            _ => None,
        };
        open.is_none()
    }
}

/// Whether matching takes a bounded number of table lookups for each character: the sets of all texts are few enough
/// for the cache, or the pattern is small.
pub(super) fn is_bounded(program: &Program) -> bool {
    if program.states.len() <= FREE_STATES {
        return true;
    }
    let num_behind = program.behind_values.len();
    let mut cache = Cache::new(program);
    for behind in 0..num_behind {
        let at_end = cache.viable(program, None, behind);
        cache.number(program, at_end);
    }
    let mut work = 0;
    let mut set = 0;
    while set < cache.sets.len() {
        for symbol in 0..num_symbols(program) {
            work += program.states.len();
            if work > MAX_TABLE_WORK || cache.bytes() > CACHE_BYTES {
                return false;
            }
            cache.step_back(program, set as u32, symbol / num_behind, symbol % num_behind);
        }
        set += 1;
    }
    true
}

fn num_symbols(program: &Program) -> usize {
    program.classes.len() * program.behind_values.len()
}

/// Returns the index of the look-behind conditions that hold after a character, or at the start of the text.
#[inline]
fn behind(program: &Program, before: Option<char>) -> usize {
    if program.behind_values.len() == 1 {
        return 0;
    }
    let class = before.map_or(program.classes.len(), |c| program.classes.of(c));
    program.behind_of[class] as usize
}
