//! A guard that blocks text in which a regular expression matches.
//!
//! Matching takes time linear in the text: the expressions become one automaton without backtracking, whose states
//! remember the piece in which their match began (`scanner`). A piece is held back exactly while a match that began in
//! it or before it may still be completed. That is bounded, because an expression without a maximum length is refused.
//!
//! The arguments of a call are searched twice: as they are written, and with the escapes of JSON decoded (`escapes`).
//!
//! Text is compared after `normalize`: every character in its compatibility form, invisible ones left out. Letter case
//! does not matter unless an expression says `(?-i)`.

mod escapes;
mod normalize;
mod scanner;

use std::collections::HashSet;
use std::sync::Arc;

use regex_automata::nfa::thompson::{Compiler, NFA, State, WhichCaptures};
use regex_syntax::ParserBuilder;
use regex_syntax::hir::Hir;

use self::normalize::normalized;
use self::scanner::{PatternScanner, TextScan};
use super::{Guard, GuardError, PromptText, ReplyScanner, ReplyText, Verdict};

/// Maximum bytes that an expression may match. A reply is held back while a match of this length may be completed.
pub const MAX_MATCH_BYTES: usize = 4096;
/// Maximum bytes of the automaton of all expressions.
const MAX_AUTOMATON_BYTES: usize = 64 << 20;
/// Maximum depth of parentheses in an expression.
const MAX_NESTING: u32 = 100;

/// Reason why patterns were refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PatternError {
    /// One of the patterns is refused.
    #[error("line {line}: {reason}")]
    Line {
        /// Line of the pattern, from 1.
        line: usize,
        /// Why it is refused.
        reason: String,
    },
    /// The patterns are refused together, because they need too much memory.
    #[error("the patterns cannot be compiled: {reason}")]
    All {
        /// Why they are refused.
        reason: String,
    },
    /// There are no patterns.
    #[error("there is no pattern: expected a regular expression on each line")]
    Empty,
}

/// Blocks text in which one of several regular expressions matches.
#[derive(Debug, Clone)]
pub struct PatternGuard {
    automaton: Arc<Automaton>,
}

/// The automaton of all expressions, and the lines that they were read from.
#[derive(Debug)]
struct Automaton {
    nfa: NFA,
    /// Line of each expression, from 1.
    lines: Vec<usize>,
    /// Whether a match can begin with each byte.
    can_begin: [bool; 256],
}

impl Automaton {
    fn new(nfa: NFA, lines: Vec<usize>) -> Automaton {
        let mut can_begin = [false; 256];
        let (mut stack, mut reached) = (vec![nfa.start_anchored()], HashSet::new());
        while let Some(state) = stack.pop() {
            if !reached.insert(state) {
                continue;
            }
            let mut allow = |start: u8, end: u8| can_begin[start as usize..=end as usize].fill(true);
            match nfa.state(state) {
                State::ByteRange { trans } => allow(trans.start, trans.end),
                State::Sparse(sparse) => sparse.transitions.iter().for_each(|trans| allow(trans.start, trans.end)),
                State::Dense(dense) => {
                    (0..=u8::MAX).filter(|&byte| dense.matches_byte(byte).is_some()).for_each(|byte| allow(byte, byte));
                }
                // Assertions may hold.
                State::Look { next, .. } | State::Capture { next, .. } => stack.push(*next),
                State::Union { alternates } => stack.extend(alternates.iter()),
                State::BinaryUnion { alt1, alt2 } => stack.extend([*alt1, *alt2]),
                State::Fail | State::Match { .. } => {}
            }
        }
        Automaton { nfa, lines, can_begin }
    }

    /// Returns the rule for the operator. The expression itself may be a secret.
    fn rule(&self, pattern: usize) -> String {
        format!("line {}", self.lines[pattern])
    }
}

impl PatternGuard {
    /// Reads expressions, one on each line. Empty lines and lines that begin with `#` are skipped.
    ///
    /// ```
    /// use pellucid_generate::PatternGuard;
    ///
    /// PatternGuard::parse("# names of products\nproject\\s{1,5}orion\n\\bhunter2\\b").unwrap();
    /// let error = PatternGuard::parse("secret.*word").unwrap_err();
    /// assert!(error.to_string().starts_with("line 1: the expression can match a text of any length"));
    /// ```
    pub fn parse(text: &str) -> Result<PatternGuard, PatternError> {
        let (mut expressions, mut lines) = (Vec::new(), Vec::new());
        for (number, line) in (1..).zip(text.lines()) {
            let line = line.trim();
            if !line.is_empty() && !line.starts_with('#') {
                expressions.push(parse_line(line).map_err(|reason| PatternError::Line { line: number, reason })?);
                lines.push(number);
            }
        }
        if expressions.is_empty() {
            return Err(PatternError::Empty);
        }
        let config = NFA::config().which_captures(WhichCaptures::None).nfa_size_limit(Some(MAX_AUTOMATON_BYTES));
        let nfa = Compiler::new().configure(config).build_many_from_hir(&expressions);
        let nfa = nfa.map_err(|error| PatternError::All { reason: error.to_string() })?;
        Ok(PatternGuard { automaton: Arc::new(Automaton::new(nfa, lines)) })
    }

    /// Number of expressions.
    pub fn num_patterns(&self) -> usize {
        self.automaton.lines.len()
    }

    /// Returns the rule of the first match in `text`.
    pub fn find(&self, text: &str) -> Option<String> {
        let mut scan = TextScan::new(self.automaton.clone());
        scan.push(0, text);
        scan.finish();
        scan.found().map(|(_, pattern)| self.automaton.rule(pattern))
    }
}

impl Guard for PatternGuard {
    fn name(&self) -> &'static str {
        "patterns"
    }

    fn judge_prompt(&self, prompt: &PromptText) -> Result<Verdict, GuardError> {
        let turns = prompt.turns.iter().map(|turn| turn.text.as_str());
        let mut texts = std::iter::once(prompt.text.as_str()).chain(turns);
        Ok(texts.find_map(|text| self.find(text)).map_or(Verdict::Pass, Verdict::Block))
    }

    fn judge_reply(&self, _: &PromptText, reply: &ReplyText) -> Result<Verdict, GuardError> {
        Ok(self.find(&reply.joined()).map_or(Verdict::Pass, Verdict::Block))
    }

    fn scanner(&self) -> Option<Box<dyn ReplyScanner>> {
        Some(Box::new(PatternScanner::new(self.automaton.clone())))
    }
}

/// Parses an expression and refuses one that could hold text back without end, or that could never match.
fn parse_line(line: &str) -> Result<Hir, String> {
    let compared: String = line.chars().flat_map(normalized).collect();
    if compared != line {
        let found = line.chars().find(|&found| !normalized(found).eq([found])).unwrap_or_default();
        let form: String = normalized(found).collect();
        let form = if form.is_empty() { "left out".into() } else { format!("written as {form:?}") };
        return Err(format!("{found:?} never matches: in the text that is compared, it is {form}"));
    }
    let mut parser = ParserBuilder::new().case_insensitive(true).nest_limit(MAX_NESTING).build();
    let hir = parser.parse(line).map_err(|error| format!("the regular expression is not valid: {error}"))?;
    let properties = hir.properties();
    if properties.minimum_len() == Some(0) {
        return Err("the expression matches the empty text, so it would block everything".into());
    }
    match properties.maximum_len() {
        Some(bytes) if bytes <= MAX_MATCH_BYTES => Ok(hir),
        Some(bytes) => Err(format!("the expression can match {bytes} bytes: expected at most {MAX_MATCH_BYTES}")),
        None if properties.minimum_len().is_none() => Err("the expression can never match".into()),
        None => Err("the expression can match a text of any length, and a reply would be held back until its end: \
                     write a bound such as .{0,100} instead of .* or .+"
            .into()),
    }
}

#[cfg(test)]
mod tests;
