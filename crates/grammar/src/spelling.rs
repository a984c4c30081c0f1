//! Refuses grammars that a model could begin but not end, because its vocabulary lacks a character.
//!
//! Most vocabularies have a token for every byte and need no check. Others would reach a position where no token
//! continues the text that the grammar requires, in the middle of a reply. The check is conservative: a character
//! counts as available only if it is a token by itself.

use std::collections::{BTreeSet, HashMap};

use llguidance::api::ParserLimits;
use llguidance::derivre::StateID;
use llguidance::earley::regexvec::{LexemeSet, RegexVec};
use llguidance::earley::{CGrammar, CSymIdx};
use llguidance::toktrie::TokTrie;

use crate::finite::reachable;

/// Maximum steps of the lexer for one expression. An expression that needs more is not checked.
const MAX_STEPS: usize = 200_000;

/// The characters of a vocabulary that does not spell every text.
pub(crate) struct Characters {
    /// Characters that occur in tokens.
    all: Vec<char>,
    /// Characters that are tokens.
    single: BTreeSet<char>,
}

/// How far the vocabulary can spell the texts of an expression.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// Every text that can be begun can be ended.
    Whole,
    /// No text can be begun.
    Never,
    /// A text can be begun that ends in this state, from which no end can be reached.
    Partial(StateID),
}

impl Characters {
    /// Reads the tokens; `None` for a vocabulary that spells every text.
    pub(crate) fn new(trie: &TokTrie, spells_all: bool) -> Option<Characters> {
        if spells_all {
            return None;
        }
        let (mut all, mut single) = (BTreeSet::new(), BTreeSet::new());
        for id in 0..trie.vocab_size() as u32 {
            let Ok(text) = std::str::from_utf8(trie.token(id)) else { continue };
            all.extend(text.chars());
            let mut characters = text.chars();
            if let (Some(character), None) = (characters.next(), characters.next()) {
                single.insert(character);
            }
        }
        Some(Characters { all: all.into_iter().collect(), single })
    }

    /// Checks that a reply which follows the grammar can always go on to an end.
    pub(crate) fn check(&self, grammar: &CGrammar, limits: &ParserLimits) -> Result<(), String> {
        let mut lexer = grammar.lexer_spec().to_regex_vec(&mut limits.clone()).map_err(|error| error.to_string())?;
        let symbols = reachable(grammar);
        let num_symbols = symbols.iter().map(|symbol| symbol.as_index() + 1).max().unwrap_or(0);
        let mut is_spelled = vec![false; num_symbols];
        let mut missing = None;
        for &symbol in &symbols {
            let data = grammar.sym_data(symbol);
            let spelling = data.lexeme.map(|lexeme| {
                let mut only = LexemeSet::new(grammar.lexer_spec().lexemes.len());
                only.add(lexeme);
                let start = lexer.initial_state(&only);
                let spelling = self.spelling(&mut lexer, start);
                if spelling == Spelling::Never && missing.is_none() {
                    missing = self.missing(&mut lexer, start);
                }
                spelling
            });
            if let Some(Spelling::Partial(state)) = spelling {
                return Err(problem(self.missing(&mut lexer, state)));
            }
            let is_empty = data.is_nullable || !data.cond_nullable.is_empty();
            is_spelled[symbol.as_index()] = is_empty || spelling == Some(Spelling::Whole);
        }
        // A rule is spelled if its symbols are. Repeated until nothing changes; chains of rules are short.
        let rule_is_spelled =
            |is_spelled: &[bool], symbols: &[CSymIdx]| symbols.iter().position(|symbol| !is_spelled[symbol.as_index()]);
        let mut has_changed = true;
        while std::mem::replace(&mut has_changed, false) {
            for &symbol in &symbols {
                let is_known = is_spelled[symbol.as_index()];
                let mut rules = grammar.rules_of(symbol).iter();
                if !is_known && rules.any(|&rule| rule_is_spelled(&is_spelled, grammar.rule_rhs(rule).0).is_none()) {
                    is_spelled[symbol.as_index()] = true;
                    has_changed = true;
                }
            }
        }
        let is_stuck = |rule| matches!(rule_is_spelled(&is_spelled, grammar.rule_rhs(rule).0), Some(1..));
        let is_stuck_in = |symbol: &CSymIdx| grammar.rules_of(*symbol).iter().any(|&rule| is_stuck(rule));
        match is_spelled[grammar.start().as_index()] && !symbols.iter().any(is_stuck_in) {
            true => Ok(()),
            false => Err(problem(missing)),
        }
    }

    fn spelling(&self, lexer: &mut RegexVec, start: StateID) -> Spelling {
        // Tokens that mark structure are spelled by their id.
        if !lexer.transition(start, TokTrie::SPECIAL_TOKEN_MARKER).is_dead() {
            return Spelling::Whole;
        }
        let mut states = vec![start];
        let mut index_of = HashMap::from([(start, 0)]);
        // For each state, the states before it from which a single token leads to it.
        let mut before: Vec<Vec<usize>> = vec![Vec::new()];
        let mut next = 0;
        while let Some(&state) = states.get(next) {
            if (next + 1) * self.all.len() > MAX_STEPS || lexer.has_error() {
                return Spelling::Whole;
            }
            for &character in &self.all {
                let mut bytes = [0; 4];
                let bytes = character.encode_utf8(&mut bytes).bytes();
                let reached = bytes.fold(state, |state, byte| lexer.transition(state, byte));
                if reached.is_dead() {
                    continue;
                }
                let index = *index_of.entry(reached).or_insert(states.len());
                if index == states.len() {
                    states.push(reached);
                    before.push(Vec::new());
                }
                if self.single.contains(&character) {
                    before[index].push(next);
                }
            }
            next += 1;
        }
        let accepts = |state: &StateID| {
            let state = lexer.state_desc(*state);
            state.greedy_accepting.is_some() || state.lazy_accepting.is_some()
        };
        let mut can_end: Vec<bool> = states.iter().map(accepts).collect();
        let mut open: Vec<usize> = (0..states.len()).filter(|&index| can_end[index]).collect();
        while let Some(index) = open.pop() {
            for &earlier in &before[index] {
                if !std::mem::replace(&mut can_end[earlier], true) {
                    open.push(earlier);
                }
            }
        }
        match can_end.iter().rposition(|&can_end| !can_end) {
            None => Spelling::Whole,
            Some(_) if states.len() == 1 => Spelling::Never,
            Some(last) => Spelling::Partial(states[last]),
        }
    }

    /// Returns the first character that a text needs behind a state and that is no token.
    fn missing(&self, lexer: &mut RegexVec, start: StateID) -> Option<char> {
        let mut state = start;
        for _ in 0..64 {
            let live = |lexer: &mut RegexVec, byte: u8| !lexer.transition(state, byte).is_dead();
            let byte = (0..128).find(|&byte| live(lexer, byte))?;
            if !self.single.contains(&char::from(byte)) {
                return Some(char::from(byte));
            }
            state = lexer.transition(state, byte);
        }
        None
    }
}

fn problem(missing: Option<char>) -> String {
    let character = missing.map_or_else(|| "a character".into(), |character| format!("the character {character:?}"));
    format!("this model's vocabulary cannot spell {character}, which a reply would need")
}
