//! Constraints for the simulator: random automata with free text, choices and forced tokens.

use std::sync::Arc;

use pellucid_sampling::TokenConstraint;
use pellucid_testing::Automaton;

use crate::{Random, VOCAB};

const MAX_STATES: usize = 12;

/// Returns a random automaton. Its last state may be final.
pub(crate) fn draw(random: &mut Random) -> Arc<dyn TokenConstraint> {
    let num_states = 1 + random.below(MAX_STATES);
    let mut automaton = Automaton::new(&[VOCAB as u32 - 1]);
    for state in 0..num_states {
        // Most states follow each other, so that runs of forced tokens occur.
        let mut step = |num: usize| -> Vec<(u32, usize)> {
            let mut next = |_| {
                let after = if random.chance(4) { random.below(num_states) } else { (state + 1) % num_states };
                (random.below(VOCAB - 1) as u32, after)
            };
            (0..num).map(&mut next).collect()
        };
        let (forced, several, free) = (step(1), step(4), step(2));
        automaton = match random.below(8) {
            0 | 1 => automaton.free(&free),
            2 | 3 => automaton.state(&several),
            4 => automaton.state(&several).may_end(),
            5 if state > 0 && state + 1 == num_states => automaton.state(&[]),
            _ => automaton.state(&forced),
        };
    }
    Arc::new(automaton)
}
