//! Regular expressions from model files, matched in time proportional to the text.
//!
//! Model files are untrusted, and a backtracking engine takes exponential or quadratic time for patterns and texts that
//! were built for it. [`Pattern`] finds the same matches as such an engine (leftmost, the first alternative, greedy
//! before lazy) without backtracking. It supports look-ahead of any kind, look-behind of one character, and possessive
//! quantifiers of one character: more than the tokenizers of known models use. Everything else is refused at load.
//!
//! `parser.rs` reads the syntax, `program.rs` compiles it, `scan.rs` finds matches. Pre-tokenizers and normalizers use
//! this; it knows nothing of either.

mod char_classes;
mod parser;
mod program;
mod scan;
#[cfg(test)]
mod tests;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use crate::error::Error;
use parser::Refused;
use program::Program;
use scan::Cache;

/// Maximum bytes of a pattern. The longest of a known model has 1,600.
const MAX_PATTERN_BYTES: usize = 64 << 10;
/// Maximum caches that are kept for later searches: about one for each thread that tokenizes.
const MAX_CACHES: usize = 16;

/// A compiled regular expression. Clones share the automaton.
#[derive(Clone)]
pub(crate) struct Pattern(Arc<Compiled>);

struct Compiled {
    text: String,
    program: Program,
    caches: Mutex<Vec<Cache>>,
}

impl fmt::Debug for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pattern").field(&self.0.text).finish()
    }
}

impl PartialEq for Pattern {
    /// Whether both have the same automaton. Files spell the same pattern in different ways.
    fn eq(&self, other: &Pattern) -> bool {
        self.0.program == other.0.program
    }
}

impl Pattern {
    /// Compiles a pattern. `key` says in errors which setting of the file it is.
    pub(crate) fn new(key: &str, text: &str) -> Result<Pattern, Error> {
        if text.len() > MAX_PATTERN_BYTES {
            let expected = format!("at most {MAX_PATTERN_BYTES} bytes");
            return Err(Error::invalid(key, expected, format!("{} bytes", text.len())));
        }
        let compiled = parser::parse(text).and_then(|node| Program::compile(&node)).and_then(|program| {
            let what = "more than 64 states and a table of transitions that is too large";
            if scan::is_bounded(&program) { Ok(program) } else { Err(Refused { what: what.to_owned(), at: 0 }) }
        });
        let program = compiled.map_err(|refused| {
            let position = text[..refused.at].chars().count() + 1;
            let shown: String = text.chars().take(80).collect();
            Error::invalid(
                key,
                "a regular expression that can be matched in linear time",
                format!("{} at character {position} of {shown:?}", refused.what),
            )
        })?;
        Ok(Pattern(Arc::new(Compiled { text: text.to_owned(), program, caches: Mutex::default() })))
    }

    /// Calls `emit` with the bytes of each match, from the left; matches do not overlap. An empty match directly after
    /// another match is skipped.
    pub(crate) fn for_each_match(&self, text: &str, emit: &mut dyn FnMut(Range<usize>)) {
        let caches = || self.0.caches.lock().unwrap_or_else(PoisonError::into_inner);
        let known = caches().pop();
        let mut cache = known.unwrap_or_else(|| Cache::new(&self.0.program));
        cache.matches(&self.0.program, text, emit);
        let mut caches = caches();
        if caches.len() < MAX_CACHES {
            caches.push(cache);
        }
    }
}
