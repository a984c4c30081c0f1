//! A place in a source of tokens that a sequence seems to repeat, for the lookup drafters.
//!
//! The cursor goes on with the sequence. After a token that differs it assumes that the sequence replaced one token and
//! goes on after it, with less evidence: edited text is mostly a copy with single tokens changed. A second difference
//! soon after the first leaves no evidence.

use super::ngram_table::{MAX_MATCH, Match};
use super::{DrafterKind, Level, ScoredDraft};

/// Part of the evidence that remains after a token that differs.
const AFTER_MISS: usize = 4;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Cursor {
    /// Position in the source of the token that may follow.
    pub(super) next: usize,
    /// Number of tokens before it that agree, up to [`MAX_MATCH`]; less if some of them differ.
    pub(super) evidence: usize,
}

impl From<Match> for Cursor {
    fn from(found: Match) -> Cursor {
        Cursor { next: found.position, evidence: found.len }
    }
}

impl Cursor {
    /// Goes on after `token` of the sequence. `None` if the source has ended, or too little of it agrees.
    pub(super) fn follow(self, source: &[u32], token: u32) -> Option<Cursor> {
        let is_equal = *source.get(self.next)? == token;
        let evidence = if is_equal { (self.evidence + 1).min(MAX_MATCH) } else { self.evidence / AFTER_MISS };
        (evidence > 0).then_some(Cursor { next: self.next + 1, evidence })
    }

    /// Proposes what follows in the source, up to `max_len` tokens. If the source is the sequence itself, it goes on
    /// with the proposed tokens: text with a period repeats it.
    pub(super) fn propose(self, drafter: DrafterKind, source: &[u32], max_len: usize, repeats: bool) -> ScoredDraft {
        let mut draft = ScoredDraft::new(drafter);
        for i in 0..max_len {
            let position = self.next + i;
            let own = position.checked_sub(source.len()).filter(|_| repeats).and_then(|i| draft.tokens().get(i));
            let Some(&token) = source.get(position).or(own) else { break };
            draft.push(token, Level::of_match(self.evidence + i));
        }
        draft
    }
}
