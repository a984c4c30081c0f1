//! Compiles the tree of a pattern to a nondeterministic automaton over classes of characters (Thompson's construction).

use std::collections::HashMap;

use super::char_classes::CharClasses;
use super::parser::{CharSet, Node, Refused};

pub(super) type StateId = u32;

/// A state of the automaton. `Split` prefers its first successor.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum State {
    Char {
        set: u32,
        next: StateId,
    },
    Split(StateId, StateId),
    /// Goes on if the look-ahead with this number matches here.
    Ahead {
        look: u32,
        negative: bool,
        next: StateId,
    },
    /// Goes on if the condition with this number holds for the character before.
    Behind {
        condition: u32,
        next: StateId,
    },
    Match,
}

/// The part of an automaton that belongs to one look-ahead, or to the pattern itself.
#[derive(Debug, PartialEq)]
pub(super) struct Part {
    pub(super) start: StateId,
    pub(super) accept: StateId,
}

/// An automaton. The part of a look-ahead comes before those that use it; the last part is the pattern's.
#[derive(Debug)]
pub(super) struct Program {
    pub(super) states: Vec<State>,
    pub(super) parts: Vec<Part>,
    /// Part of each state.
    pub(super) part_of: Vec<u32>,
    /// States that go to a state without reading a character.
    pub(super) predecessors: Vec<Vec<StateId>>,
    pub(super) classes: CharClasses,
    /// For each class of characters, the `Char` states that accept it.
    pub(super) accepting: Vec<Vec<StateId>>,
    /// For each class of characters, the index of the look-behind conditions that hold after it; the last entry is for
    /// the start of the text.
    pub(super) behind_of: Vec<u32>,
    /// For each such index, whether each condition holds.
    pub(super) behind_values: Vec<Vec<bool>>,
    sets: Vec<CharSet>,
}

impl PartialEq for Program {
    /// Whether both automata have the same states over the same sets: the patterns differ in spelling only.
    fn eq(&self, other: &Program) -> bool {
        self.states == other.states && self.sets == other.sets && self.parts == other.parts
    }
}

/// Maximum states of an automaton. Patterns of known models have at most 2,100; most have fewer than 100.
const MAX_STATES: usize = 2304;
/// Maximum look-aheads and look-behinds.
const MAX_LOOKS: usize = 64;
/// Maximum combinations of a class of characters with the conditions of look-behinds.
const MAX_SYMBOLS: usize = 8192;

struct Compiler {
    states: Vec<State>,
    part_of: Vec<u32>,
    parts: Vec<Part>,
    sets: Vec<CharSet>,
    set_numbers: HashMap<CharSet, u32>,
    conditions: Vec<(u32, bool)>,
    steps: usize,
}

impl Program {
    pub(super) fn compile(node: &Node) -> Result<Program, Refused> {
        let mut compiler = Compiler {
            states: Vec::new(),
            part_of: Vec::new(),
            parts: Vec::new(),
            sets: Vec::new(),
            set_numbers: HashMap::new(),
            conditions: Vec::new(),
            steps: 0,
        };
        compiler.part(node)?;
        let Compiler { states, part_of, parts, sets, conditions, .. } = compiler;
        let classes = CharClasses::new(&sets);
        let mut predecessors = vec![Vec::new(); states.len()];
        let mut accepting = vec![Vec::new(); classes.len()];
        for (from, state) in (0..).zip(&states) {
            match *state {
                State::Char { set, .. } => {
                    let matching = (0..classes.len()).filter(|class| classes.contains(set, *class));
                    matching.for_each(|class| accepting[class].push(from));
                }
                State::Split(first, second) => {
                    predecessors[first as usize].push(from);
                    predecessors[second as usize].push(from);
                }
                State::Ahead { next, .. } | State::Behind { next, .. } => predecessors[next as usize].push(from),
                State::Match => {}
            }
        }
        let mut behind_values: Vec<Vec<bool>> = Vec::new();
        let mut behind_of = Vec::new();
        for class in (0..classes.len()).map(Some).chain([None]) {
            let holds = |&(set, negative): &(u32, bool)| class.is_some_and(|c| classes.contains(set, c)) != negative;
            let values: Vec<bool> = conditions.iter().map(holds).collect();
            let known = behind_values.iter().position(|known| *known == values);
            behind_of.push(known.unwrap_or(behind_values.len()) as u32);
            if known.is_none() {
                behind_values.push(values);
            }
            if behind_values.len() * classes.len() > MAX_SYMBOLS {
                return Err(too_large());
            }
        }
        Ok(Program { states, parts, part_of, predecessors, classes, accepting, behind_of, behind_values, sets })
    }
}

fn too_large() -> Refused {
    Refused { what: format!("more than {MAX_STATES} states, or more than {MAX_LOOKS} look-arounds"), at: 0 }
}

impl Compiler {
    fn push(&mut self, state: State, part: &mut Vec<StateId>) -> Result<StateId, Refused> {
        if self.states.len() >= MAX_STATES {
            return Err(too_large());
        }
        let id = self.states.len() as StateId;
        self.states.push(state);
        self.part_of.push(0);
        part.push(id);
        Ok(id)
    }

    /// Compiles a look-ahead or the whole pattern; returns its number.
    fn part(&mut self, node: &Node) -> Result<u32, Refused> {
        let mut members = Vec::new();
        let accept = self.push(State::Match, &mut members)?;
        let start = self.emit(node, accept, &mut members)?;
        let number = self.parts.len() as u32;
        if self.parts.len() + self.conditions.len() >= MAX_LOOKS {
            return Err(too_large());
        }
        for id in members {
            self.part_of[id as usize] = number;
        }
        self.parts.push(Part { start, accept });
        Ok(number)
    }

    fn set(&mut self, set: &CharSet) -> u32 {
        let number = self.sets.len() as u32;
        *self.set_numbers.entry(set.clone()).or_insert_with(|| {
            self.sets.push(set.clone());
            number
        })
    }

    /// Adds the states that match `node` and then continue at `next`; returns the first of them.
    fn emit(&mut self, node: &Node, next: StateId, part: &mut Vec<StateId>) -> Result<StateId, Refused> {
        // Repetitions of nothing add no states, but must end too.
        self.steps += 1;
        if self.steps > 4 * MAX_STATES {
            return Err(too_large());
        }
        match node {
            Node::Set(set) => {
                let set = self.set(set);
                self.push(State::Char { set, next }, part)
            }
            Node::Concat(nodes) => nodes.iter().rev().try_fold(next, |next, node| self.emit(node, next, part)),
            Node::Alternate(nodes) => {
                let mut entry = None;
                for node in nodes.iter().rev() {
                    let first = self.emit(node, next, part)?;
                    entry = Some(match entry {
                        None => first,
                        Some(second) => self.push(State::Split(first, second), part)?,
                    });
                }
                Ok(entry.unwrap_or(next))
            }
            Node::Repeat { node, min, max, greedy } => self.repeat(node, (*min, *max), *greedy, next, part),
            Node::Ahead { node, negative } => {
                let look = self.part(node)?;
                self.push(State::Ahead { look, negative: *negative, next }, part)
            }
            Node::Behind { set, negative } => {
                let condition = (self.set(set), *negative);
                let known = self.conditions.iter().position(|known| *known == condition);
                let number = known.unwrap_or(self.conditions.len());
                if known.is_none() {
                    self.conditions.push(condition);
                }
                self.push(State::Behind { condition: number as u32, next }, part)
            }
        }
    }

    fn repeat(
        &mut self,
        node: &Node,
        (min, max): (u32, Option<u32>),
        greedy: bool,
        next: StateId,
        part: &mut Vec<StateId>,
    ) -> Result<StateId, Refused> {
        let split = |again, done| if greedy { State::Split(again, done) } else { State::Split(done, again) };
        let mut entry = next;
        let mut copies = min;
        match max {
            None => {
                let fork = self.push(State::Split(next, next), part)?;
                let body = self.emit(node, fork, part)?;
                self.states[fork as usize] = split(body, next);
                // With `min` of 1 or more, the body of the loop is the last copy.
                entry = if min > 0 { body } else { fork };
                copies = min.saturating_sub(1);
            }
            Some(max) => {
                for _ in min..max {
                    let body = self.emit(node, entry, part)?;
                    entry = self.push(split(body, next), part)?;
                }
            }
        }
        for _ in 0..copies {
            entry = self.emit(node, entry, part)?;
        }
        Ok(entry)
    }
}
