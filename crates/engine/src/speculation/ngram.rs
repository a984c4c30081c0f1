//! Prompt lookup: proposes what followed the same n-gram earlier in the prompt or the output of a sequence.

use super::cursor::Cursor;
use super::ngram_table::{Match, NgramTables};
use super::{DrafterKind, ScoredDraft};

/// Proposes tokens of one sequence from its own tokens. It takes 24 to 48
/// bytes a token.
#[derive(Debug)]
pub struct NgramDrafter {
    tables: NgramTables<3>,
    cursor: Option<Cursor>,
    /// Number of tokens that the cursor has followed.
    num_followed: usize,
}

impl Default for NgramDrafter {
    fn default() -> NgramDrafter {
        NgramDrafter { tables: NgramTables::new([4, 3, 2]), cursor: None, num_followed: 0 }
    }
}

impl NgramDrafter {
    /// Proposes up to `max_len` tokens after `tokens`, the prompt and the output so far. Tokens that are new since the
    /// last call are added to the index; the list may only grow.
    pub fn propose(&mut self, tokens: &[u32], max_len: usize) -> ScoredDraft {
        if tokens.len() < self.num_followed {
            self.cursor = None;
        }
        let mut was_wrong = false;
        for &token in tokens.get(self.num_followed..).unwrap_or_default() {
            // Nothing is followed in the prompt, so this loop is short.
            let Some(cursor) = self.cursor else { break };
            was_wrong = tokens.get(cursor.next) != Some(&token);
            self.cursor = cursor.follow(tokens, token);
        }
        self.num_followed = tokens.len();
        self.tables.extend(tokens);
        let mut best: Option<Match> = None;
        self.tables.find(tokens, tokens, |found| {
            if best.is_none_or(|best| found.len > best.len) {
                best = Some(found);
            }
        });
        // A match of the same length counts more than a cursor that was just wrong.
        let is_better = |found: &Match, cursor: Cursor| found.len + usize::from(was_wrong) > cursor.evidence;
        let found = best.filter(|found| self.cursor.is_none_or(|cursor| is_better(found, cursor)));
        self.cursor = found.map(Cursor::from).or(self.cursor);
        match self.cursor {
            Some(cursor) => cursor.propose(DrafterKind::Ngram, tokens, max_len, true),
            None => ScoredDraft::new(DrafterKind::Ngram),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Level;
    use super::super::ngram_table::common_suffix;
    use super::*;
    use proptest::prelude::*;

    fn propose(tokens: &[u32], max_len: usize) -> Vec<u32> {
        NgramDrafter::default().propose(tokens, max_len).tokens().to_vec()
    }

    #[test]
    fn the_longest_match_wins_and_the_latest_among_equals() {
        assert_eq!(propose(&[1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 2), [7, 9]);
        assert_eq!(propose(&[1, 2, 7, 1, 2, 8, 1, 2], 1), [8]);
        assert_eq!(propose(&[1, 2, 3, 4, 5], 4), [0; 0]);
        assert_eq!(propose(&[1, 2, 1], 4), [0; 0], "one token is no n-gram");
        assert_eq!(propose(&[], 4), [0; 0]);
    }

    #[test]
    fn text_with_a_period_goes_on() {
        assert_eq!(propose(&[9, 1, 2, 3, 1, 2, 3, 1, 2], 7), [3, 1, 2, 3, 1, 2, 3]);
    }

    #[test]
    fn a_replaced_token_does_not_end_a_copy() {
        let source: Vec<u32> = (100..140).collect();
        let (mut drafter, mut tokens) = (NgramDrafter::default(), source.clone());
        tokens.extend(&source[..20]);
        assert_eq!(drafter.propose(&tokens, 3).tokens(), [120, 121, 122]);
        tokens.push(7);
        let draft = drafter.propose(&tokens, 3);
        assert_eq!(draft.tokens(), [121, 122, 123]);
        assert!(draft.levels()[0] < Level::of_match(20), "with less confidence than before");
        tokens.extend([8, 9]);
        assert_eq!(drafter.propose(&tokens, 3).tokens(), [0; 0]);
    }

    #[test]
    fn confidence_grows_with_the_match() {
        let mut tokens: Vec<u32> = (0..30).collect();
        tokens.extend(0..2);
        let draft = NgramDrafter::default().propose(&tokens, 10);
        assert_eq!(draft.tokens(), (2..12).collect::<Vec<u32>>());
        assert_eq!(draft.levels()[0], Level::LOWEST);
        assert_eq!(draft.levels()[9], Level::of_match(11));
    }

    proptest! {
        /// With tokens that rarely repeat, chains reach all occurrences.
        #[test]
        fn a_first_proposal_is_that_of_a_naive_search(
            tokens in prop::collection::vec(0u32..40, 0..120),
            max_len in 0usize..6,
        ) {
            let ends = (2..tokens.len()).rev().map(|end| (common_suffix(&tokens[..end], &tokens), end));
            let mut best = (1, 0);
            ends.for_each(|(len, end)| if len > best.0 { best = (len, end) });
            let found = NgramDrafter::default().propose(&tokens, max_len);
            prop_assert!(found.len() <= max_len);
            if best.0 < 2 {
                prop_assert!(found.is_empty());
            } else if max_len > 0 {
                prop_assert_eq!(found.tokens()[0], tokens[best.1]);
                prop_assert_eq!(found.levels()[0], Level::of_match(best.0));
            }
        }

        #[test]
        fn any_steps_give_proposals_without_a_panic(
            tokens in prop::collection::vec(0u32..5, 0..300),
            cuts in prop::collection::vec((0usize..300, 0usize..20), 1..20),
        ) {
            let mut drafter = NgramDrafter::default();
            for (cut, max_len) in cuts {
                let draft = drafter.propose(&tokens[..cut.min(tokens.len())], max_len);
                prop_assert!(draft.tokens().iter().all(|token| tokens.contains(token)));
                prop_assert!(draft.len() <= max_len);
            }
        }
    }
}
