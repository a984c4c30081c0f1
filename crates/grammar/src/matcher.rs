//! The position of one sequence within its grammar.

use llguidance::Matcher;
use llguidance::toktrie::TokEnv;
use pellucid_sampling::{Error, TokenMatcher};

/// A matcher of `llguidance` with the end tokens of the model.
pub(crate) struct GrammarMatcher {
    pub(crate) inner: Matcher,
    pub(crate) env: TokEnv,
    /// Number of tokens that were accepted, end tokens aside.
    num_tokens: usize,
    /// Number of end tokens that were accepted; nothing follows the first.
    num_ends: usize,
    /// Runs of forced tokens, by ascending position. All are kept, so that a rollback finds them again.
    runs: Vec<ForcedRun>,
    /// Number of tokens at which no run was found, as last searched.
    no_run_at: Option<usize>,
}

/// Text that the grammar forces, as tokens. The parser splits it into tokens as a whole: behind its first token, it
/// might split the rest in another way, and would tokenize it again for each token.
#[derive(Debug)]
struct ForcedRun {
    /// Number of tokens before it.
    start: usize,
    tokens: Vec<u32>,
}

impl std::fmt::Debug for GrammarMatcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("GrammarMatcher")
    }
}

impl GrammarMatcher {
    pub(crate) fn new(inner: Matcher, env: TokEnv) -> GrammarMatcher {
        GrammarMatcher { inner, env, num_tokens: 0, num_ends: 0, runs: Vec::new(), no_run_at: None }
    }

    /// Returns the tokens that are left of the last run of forced tokens.
    fn run_left(&self) -> &[u32] {
        let last = self.runs.last().filter(|_| !self.is_complete());
        last.and_then(|run| run.tokens.get(self.num_tokens - run.start..)).unwrap_or_default()
    }

    /// Finds the tokens that are forced from here on, unless they are known.
    fn find_run(&mut self) {
        if self.is_complete() || !self.run_left().is_empty() || self.no_run_at == Some(self.num_tokens) {
            return;
        }
        let tokens = self.inner.compute_ff_tokens();
        if tokens.is_empty() {
            self.no_run_at = Some(self.num_tokens);
        } else {
            self.runs.push(ForcedRun { start: self.num_tokens, tokens });
        }
    }

    /// Whether these tokens may come next.
    pub(crate) fn allows(&mut self, tokens: &[u32]) -> bool {
        !self.is_complete() && self.inner.validate_tokens(tokens).is_ok_and(|num_valid| num_valid == tokens.len())
    }

    fn is_end(&self, token: u32) -> bool {
        self.env.tok_trie().eos_tokens().contains(&token)
    }

    /// Returns the error of the parser in one line.
    fn error(&self, fallback: impl std::fmt::Display) -> Error {
        let text = self.inner.get_error().unwrap_or_else(|| fallback.to_string());
        let first = text.lines().next().unwrap_or_default();
        // The parser's name of a mask without a token. Compilation refuses such grammars, where it can find them.
        if first.is_empty() || first.contains("NoExtension") {
            return Error::Grammar("no token of this model's vocabulary continues the text that it requires".into());
        }
        Error::Grammar(first.to_owned())
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
        if let Some(&token) = self.forced().first() {
            words[token as usize / 32] |= 1 << (token % 32);
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
        if self.run_left().first().is_some_and(|&forced| forced != token) {
            // The caller did not follow the mask. The run does not hold behind another token.
            self.runs.pop();
        }
        self.inner.consume_token(token).map_err(|error| self.error(error))?;
        self.num_tokens += 1;
        Ok(())
    }

    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error> {
        let num_ends = self.num_ends.min(num_tokens);
        self.num_ends -= num_ends;
        self.inner.rollback(num_tokens - num_ends).map_err(|error| self.error(error))?;
        self.num_tokens -= num_tokens - num_ends;
        let num_kept = self.runs.partition_point(|run| run.start <= self.num_tokens);
        self.runs.truncate(num_kept);
        self.no_run_at = None;
        Ok(())
    }

    fn may_end(&mut self) -> bool {
        self.is_complete() || self.inner.is_accepting().unwrap_or(false)
    }

    fn is_complete(&self) -> bool {
        self.num_ends > 0 || (self.inner.is_stopped() && !self.inner.is_error())
    }

    fn forced(&mut self) -> &[u32] {
        self.find_run();
        self.run_left()
    }

    fn expected(&mut self) -> String {
        crate::expected::describe(self)
    }
}
