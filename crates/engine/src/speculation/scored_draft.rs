//! Tokens that a drafter proposes for one sequence, with its confidence in each.

use super::{DrafterKind, MAX_DRAFT_LEN};

/// Number of levels of confidence.
pub const NUM_LEVELS: usize = 4;

/// A drafter's own confidence in a token: 0 (a guess) to 3. The levels only separate the cases; the rate at which the
/// tokens of a level are right is measured by [`Acceptance`](super::Acceptance).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Level(u8);

impl Level {
    /// A guess. Drafters that know no confidence use it for all tokens.
    pub const LOWEST: Level = Level(0);

    /// Level of a token before which `num_matched` tokens agree with the source that proposes it.
    pub fn of_match(num_matched: usize) -> Level {
        Level(match num_matched {
            0..=2 => 0,
            3..=4 => 1,
            5..=8 => 2,
            _ => 3,
        })
    }

    /// Level of a token that the drafter itself gives a probability.
    pub fn of_probability(probability: f64) -> Level {
        Level(match probability {
            p if p >= 0.9 => 3,
            p if p >= 0.6 => 2,
            p if p >= 0.3 => 1,
            _ => 0,
        })
    }

    /// Index from 0 to [`NUM_LEVELS`] - 1.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

/// A proposal of up to [`MAX_DRAFT_LEN`] tokens. It needs no memory of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScoredDraft {
    /// Drafter that proposes it.
    pub drafter: DrafterKind,
    len: usize,
    tokens: [u32; MAX_DRAFT_LEN],
    levels: [Level; MAX_DRAFT_LEN],
}

impl ScoredDraft {
    /// Returns an empty proposal.
    pub fn new(drafter: DrafterKind) -> ScoredDraft {
        ScoredDraft { drafter, len: 0, tokens: [0; MAX_DRAFT_LEN], levels: [Level::LOWEST; MAX_DRAFT_LEN] }
    }

    /// Adds a token; one beyond [`MAX_DRAFT_LEN`] is left out.
    pub fn push(&mut self, token: u32, level: Level) {
        if self.len < MAX_DRAFT_LEN {
            (self.tokens[self.len], self.levels[self.len]) = (token, level);
            self.len += 1;
        }
    }

    /// Keeps the first `len` tokens.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Proposed tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens[..self.len]
    }

    /// Confidence in each token.
    pub fn levels(&self) -> &[Level] {
        &self.levels[..self.len]
    }

    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is proposed.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}
