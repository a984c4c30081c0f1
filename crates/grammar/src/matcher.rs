//! The position of one sequence within its grammar.

use llguidance::Matcher;
use llguidance::toktrie::TokEnv;
use pellucid_sampling::{Error, TokenMatcher};

/// A matcher of `llguidance` with the end tokens of the model.
pub(crate) struct GrammarMatcher {
    pub(crate) inner: Matcher,
    pub(crate) env: TokEnv,
    /// Number of end tokens that were accepted; nothing follows the first.
    num_ends: usize,
}

impl std::fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GrammarMatcher")
    }
}

impl GrammarMatcher {
    pub(crate) fn new(inner: Matcher, env: TokEnv) -> GrammarMatcher {
        GrammarMatcher { inner, env, num_ends: 0 }
    }

    fn is_end(&self, token: u32) -> bool {
        self.env.tok_trie().eos_tokens().contains(&token)
    }

    /// Returns the error of the parser in one line.
    fn error(&self, fallback: impl std::fmt::Display) -> Error {
        let text = self.inner.get_error().unwrap_or_else(|| fallback.to_string());
        Error::Grammar(text.lines().next().unwrap_or_default().to_owned())
    }
}

impl TokenMatcher for GrammarMatcher {
    fn mask(&mut self, words: &mut [u32]) -> Result<(), Error> {
        words.fill(0);
        if self.is_complete() {
            for &id in self.env.tok_trie().eos_tokens() {
                words[id as usize / 32] |= 1 << (id % 32);
            }
            return Ok(());
        }
        let mask = self.inner.compute_mask().map_err(|error| self.error(error))?;
        // The parser's mask has a few more bits than there are tokens; none of them is set.
        let num_words = words.len().min(mask.as_slice().len());
        words[..num_words].copy_from_slice(&mask.as_slice()[..num_words]);
        Ok(())
    }

    fn accept(&mut self, token: u32) -> Result<(), Error> {
        if self.num_ends > 0 || self.is_end(token) {
            self.num_ends += 1;
            return Ok(());
        }
        self.inner.consume_token(token).map_err(|error| self.error(error))
    }

    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error> {
        let num_ends = self.num_ends.min(num_tokens);
        self.num_ends -= num_ends;
        self.inner.rollback(num_tokens - num_ends).map_err(|error| self.error(error))
    }

    fn may_end(&mut self) -> bool {
        self.is_complete() || self.inner.is_accepting().unwrap_or(false)
    }

    fn is_complete(&self) -> bool {
        self.num_ends > 0 || (self.inner.is_stopped() && !self.inner.is_error())
    }

    fn forced(&mut self) -> Vec<u32> {
        if self.is_complete() { Vec::new() } else { self.inner.compute_ff_tokens() }
    }

    fn expected(&mut self) -> String {
        crate::expected::describe(self)
    }
}
