//! A constraint for tests of the engine: a finite automaton over token ids, without text or grammar.

use std::collections::BTreeMap;
use std::sync::Arc;

use pellucid_sampling::{Error, TokenConstraint, TokenMatcher};

/// Maximum forced tokens that a matcher reports at once. A longer run is reported in parts.
const MAX_RUN: usize = 5;

/// A state of an [`Automaton`].
#[derive(Debug, Clone, Default)]
pub struct AutomatonState {
    /// State after each of these tokens.
    pub next: BTreeMap<u32, usize>,
    /// State after any other token; `None` excludes them.
    pub otherwise: Option<usize>,
    /// Whether the reply may end here.
    pub may_end: bool,
}

/// A finite automaton; state 0 is the first.
#[derive(Debug, Clone)]
pub struct Automaton {
    pub states: Vec<AutomatonState>,
    /// Tokens that end a reply.
    pub end_ids: Vec<u32>,
    /// Never say that every token is allowed, so that masks are computed in free text too.
    pub always_masks: bool,
    /// Never say which tokens are forced, so that each is sampled.
    pub hides_forced: bool,
}

impl Automaton {
    /// Creates an automaton without states.
    pub fn new(end_ids: &[u32]) -> Automaton {
        Automaton { states: Vec::new(), end_ids: end_ids.to_vec(), always_masks: false, hides_forced: false }
    }

    /// Adds a state that allows only these tokens, each with the state after it.
    pub fn state(mut self, next: &[(u32, usize)]) -> Automaton {
        self.states.push(AutomatonState { next: next.iter().copied().collect(), ..AutomatonState::default() });
        self
    }

    /// Adds a state of free text: these tokens lead to other states, all others stay in it, and the reply may end.
    pub fn free(mut self, next: &[(u32, usize)]) -> Automaton {
        let otherwise = Some(self.states.len());
        self.states.push(AutomatonState { next: next.iter().copied().collect(), otherwise, may_end: true });
        self
    }

    /// Lets the reply end in the last state too.
    pub fn may_end(mut self) -> Automaton {
        self.states.last_mut().expect("a state").may_end = true;
        self
    }

    /// Whether a whole reply, without its end token, is one that the automaton allows.
    pub fn accepts(&self, tokens: &[u32]) -> bool {
        let last = tokens.iter().try_fold(0, |state, &token| self.after(state, token));
        last.is_some_and(|state| self.states[state].may_end || self.is_final(state))
    }

    fn after(&self, state: usize, token: u32) -> Option<usize> {
        let state = &self.states[state];
        state.next.get(&token).copied().or(state.otherwise)
    }

    fn is_final(&self, state: usize) -> bool {
        self.states[state].next.is_empty() && self.states[state].otherwise.is_none()
    }
}

#[derive(Debug)]
struct AutomatonMatcher {
    automaton: Arc<Automaton>,
    /// The first state, and the state after each token.
    path: Vec<usize>,
    has_ended: bool,
    /// Forced tokens, as last asked for.
    run: Vec<u32>,
}

impl AutomatonMatcher {
    fn current(&self) -> usize {
        *self.path.last().expect("the first state")
    }
}

impl TokenConstraint for Automaton {
    fn matcher(&self) -> Box<dyn TokenMatcher> {
        Box::new(AutomatonMatcher {
            automaton: Arc::new(self.clone()),
            path: vec![0],
            has_ended: false,
            run: Vec::new(),
        })
    }
}

impl TokenMatcher for AutomatonMatcher {
    fn allows_all(&self) -> bool {
        let state = &self.automaton.states[self.current()];
        state.otherwise.is_some() && state.may_end && !self.automaton.always_masks
    }

    fn mask(&mut self, words: &mut [u32]) -> Result<(), Error> {
        assert!(!self.allows_all(), "a mask of free text is not needed");
        let state = &self.automaton.states[self.current()];
        words.fill(if state.otherwise.is_some() { u32::MAX } else { 0 });
        let mut set = |token: u32, is_allowed: bool| {
            let (word, bit) = (token as usize / 32, 1 << (token % 32));
            words[word] = if is_allowed { words[word] | bit } else { words[word] & !bit };
        };
        self.automaton.end_ids.iter().for_each(|&token| set(token, state.may_end));
        state.next.keys().for_each(|&token| set(token, true));
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        if self.automaton.end_ids.contains(&token) {
            self.has_ended = true;
            return Ok(());
        }
        let after = self.automaton.after(self.current(), token);
        self.path.push(after.ok_or_else(|| Error::Grammar(format!("token {token} is not allowed")))?);
        Ok(())
    }

    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error> {
        self.path.truncate(self.path.len() - num_tokens);
        Ok(())
    }

    fn may_end(&mut self) -> bool {
        self.is_complete() || self.automaton.states[self.current()].may_end
    }

    fn is_complete(&self) -> bool {
        self.has_ended || self.automaton.is_final(self.current())
    }

    fn forced(&mut self) -> &[u32] {
        self.run.clear();
        let mut current = self.current();
        while self.run.len() < MAX_RUN && !self.has_ended && !self.automaton.hides_forced {
            let state = &self.automaton.states[current];
            let is_choice = state.next.len() != 1 || state.otherwise.is_some() || state.may_end;
            let Some((&token, &next)) = state.next.iter().next().filter(|_| !is_choice) else { break };
            self.run.push(token);
            current = next;
        }
        &self.run
    }

    fn expected(&mut self) -> String {
        format!("expected by state {}", self.current())
    }
}
