//! The pieces of one choice behind its guards: each is held back until every guard has passed it.
//!
//! Guards form a line: pieces that one guard passes go to the next. When a guard blocks, the pieces before the blocked
//! ones still have to pass the guards behind it, and a last piece without content ends the choice. Pieces are passed or
//! blocked as a whole, so text, log probabilities and traces of a token stay together.

use std::collections::VecDeque;

use super::{Guards, Passage, ReplyScanner, Scan, VerdictKind};
use crate::{Delta, Finish};

/// The guards of one choice; see the head of the file.
#[derive(Debug)]
pub(crate) struct GuardedChoice {
    stages: Vec<Stage>,
}

impl GuardedChoice {
    pub(crate) fn new(guards: &Guards) -> GuardedChoice {
        GuardedChoice { stages: (0..guards.len()).map(|number| Stage::new(guards, number)).collect() }
    }

    /// Adds the next piece and returns those that every guard has passed. The last one has a finish:
    /// [`Finish::ContentFilter`] if the choice is blocked.
    pub(crate) fn push(&mut self, delta: Delta) -> Vec<Delta> {
        self.stages
            .iter_mut()
            .fold(vec![delta], |passed, stage| passed.into_iter().flat_map(|d| stage.push(d)).collect())
    }
}

/// One guard of a choice.
#[derive(Debug)]
struct Stage {
    guards: Guards,
    /// Number of the guard in the list.
    number: usize,
    scanner: Box<dyn ReplyScanner>,
    held: VecDeque<Delta>,
    /// Number of the first piece that is held.
    first_held: usize,
    is_over: bool,
}

impl Stage {
    fn new(guards: &Guards, number: usize) -> Stage {
        let scanner = guards.guard(number).begin_reply();
        Stage { guards: guards.clone(), number, scanner, held: VecDeque::new(), first_held: 0, is_over: false }
    }

    fn push(&mut self, delta: Delta) -> Vec<Delta> {
        if self.is_over {
            return Vec::new();
        }
        let (choice, is_last) = (delta.choice, delta.finish.is_some());
        let scan = self.scan(&delta, is_last);
        self.held.push_back(delta);
        match scan {
            Scan::Passed(end) => {
                let passed = self.release(end);
                if is_last {
                    self.is_over = true;
                    self.guards.count(self.number, VerdictKind::ReplyPassed);
                }
                passed
            }
            Scan::Blocked { from, rule } => {
                self.is_over = true;
                self.guards.count(self.number, VerdictKind::ReplyBlocked);
                let guard = self.guards.guard(self.number).name();
                let mut passed = self.release(from);
                self.held.clear();
                passed.push(Delta { finish: Some(Finish::ContentFilter { guard, rule }), ..Delta::new(choice) });
                passed
            }
        }
    }

    /// Lets the guard see a piece.
    fn scan(&mut self, delta: &Delta, is_last: bool) -> Scan {
        let number = self.first_held + self.held.len();
        let mut scan = Scan::Passed(if self.held.is_empty() { number + 1 } else { self.first_held });
        for (passage, text) in texts(delta) {
            scan = self.scanner.push(number, passage, text);
            if matches!(scan, Scan::Blocked { .. }) {
                return scan;
            }
        }
        if !is_last {
            return scan;
        }
        match self.scanner.finish() {
            Scan::Passed(_) => Scan::Passed(number + 1),
            blocked => blocked,
        }
    }

    /// Returns the held pieces before number `end`.
    fn release(&mut self, end: usize) -> Vec<Delta> {
        let num_passed = end.saturating_sub(self.first_held).min(self.held.len());
        self.first_held += num_passed;
        self.held.drain(..num_passed).collect()
    }
}

/// Returns the texts of a piece in their order.
fn texts(delta: &Delta) -> impl Iterator<Item = (Passage, &str)> {
    let thoughts = (Passage::Thoughts, delta.thoughts.as_str());
    let calls = delta.calls.iter().flat_map(|call| {
        let (passage, space) = (Passage::Call(call.index), call.name.as_ref().map(|_| " "));
        let texts = [call.name.as_deref(), space, Some(call.arguments.as_str())];
        texts.into_iter().flatten().map(move |text| (passage, text))
    });
    [thoughts, (Passage::Answer, delta.text.as_str())].into_iter().chain(calls).filter(|(_, text)| !text.is_empty())
}
