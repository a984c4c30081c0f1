//! Constraints on the tokens of a reply: a grammar that says which tokens may come next.
//!
//! The engine asks for a mask before it samples and tells the matcher each token of the reply. It knows neither text
//! nor grammars: the crate `grammar` implements both traits.

use std::fmt::Debug;

use crate::Error;

/// A compiled constraint of one request. Shared between threads; never changes.
pub trait TokenConstraint: Debug + Send + Sync {
    /// Returns a matcher at the beginning of a reply. Every sequence of a request has its own.
    fn matcher(&self) -> Box<dyn TokenMatcher>;
}

/// The position of one sequence within its constraint.
pub trait TokenMatcher: Debug + Send {
    /// Whether every token may come next, end tokens included, as in free text before a tool call. No mask is computed
    /// then. Must be cheap: the engine calls it several times for each token.
    fn allows_all(&self) -> bool {
        false
    }

    /// Writes which tokens may come next: token t is bit t % 32 of word t / 32, and 1 allows it. End tokens are allowed
    /// only where the reply may end.
    fn mask(&mut self, words: &mut [u32]) -> Result<(), Error>;

    /// Moves past a token, which the last mask allowed. An end token changes nothing.
    fn accept(&mut self, token: u32) -> Result<(), Error>;

    /// Takes back the last `num_tokens` accepted tokens.
    fn rollback(&mut self, num_tokens: usize) -> Result<(), Error>;

    /// Whether the reply may end here.
    fn may_end(&mut self) -> bool;

    /// Whether the reply must end here, because no token can follow.
    fn is_complete(&self) -> bool;

    /// Returns tokens that must come next, one after the other: at each of their positions, the mask allows only that
    /// token. None of them is an end token. Must be cheap where there are none, because the engine calls it for each
    /// token; an empty list is always right, and so is a part of the run.
    fn forced(&mut self) -> &[u32] {
        &[]
    }

    /// Describes in words what may come next, for traces.
    fn expected(&mut self) -> String;
}
