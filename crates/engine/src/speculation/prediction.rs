//! Follows the output that a client predicted, such as the file before an edit.

use std::cmp::Reverse;

use super::cursor::Cursor;
use super::ngram_table::{Match, NgramTables};
use super::{DrafterKind, ScoredDraft};
use crate::{Error, fallible};

/// Evidence at the start: a client that predicts an output expects it to begin so.
const INITIAL_EVIDENCE: usize = 5;
/// Maximum distance from its place at which the cursor looks for a single token of the output.
const WINDOW: usize = 32;

/// Proposes tokens of one sequence from its predicted output. After a difference it finds its place again: at the
/// longest match with the end of the output, and the nearest among equals.
#[derive(Debug)]
pub struct PredictionDrafter {
    predicted: Vec<u32>,
    tables: NgramTables<3>,
    cursor: Option<Cursor>,
    /// The last place of the cursor.
    place: usize,
    /// Number of tokens of the output that the cursor has followed.
    num_followed: usize,
}

impl PredictionDrafter {
    /// Returns a drafter for a sequence without output.
    pub fn new(predicted: &[u32]) -> Result<PredictionDrafter, Error> {
        let predicted = fallible::copy_of(predicted)?;
        let mut tables = NgramTables::new([4, 3, 2]);
        tables.extend(&predicted);
        let cursor = Some(Cursor { next: 0, evidence: INITIAL_EVIDENCE });
        Ok(PredictionDrafter { predicted, tables, cursor, place: 0, num_followed: 0 })
    }

    /// Proposes up to `max_len` tokens after `output`, which may only grow from call to call.
    pub fn propose(&mut self, output: &[u32], max_len: usize) -> ScoredDraft {
        if output.len() < self.num_followed {
            (self.cursor, self.place, self.num_followed) = (None, 0, output.len());
        }
        for num_tokens in self.num_followed + 1..=output.len() {
            self.follow(&output[..num_tokens]);
        }
        self.num_followed = output.len();
        match self.cursor {
            Some(cursor) => cursor.propose(DrafterKind::Prediction, &self.predicted, max_len, false),
            None => ScoredDraft::new(DrafterKind::Prediction),
        }
    }

    /// Goes on after the last token of `output`.
    fn follow(&mut self, output: &[u32]) {
        let token = output[output.len() - 1];
        let was_expected = self.cursor.is_some_and(|cursor| self.predicted.get(cursor.next) == Some(&token));
        self.cursor = self.cursor.and_then(|cursor| cursor.follow(&self.predicted, token));
        // While the prediction holds there is nothing to search.
        if !was_expected {
            let mut best: Option<Match> = None;
            self.tables.find(&self.predicted, output, |found| {
                let rank = |found: Match| (found.len, Reverse(found.position.abs_diff(self.place)));
                if best.is_none_or(|best| rank(found) > rank(best)) {
                    best = Some(found);
                }
            });
            // A match counts more than a cursor that was just wrong.
            let found = best.filter(|found| self.cursor.is_none_or(|cursor| found.len >= cursor.evidence));
            self.cursor = found.map(Cursor::from).or(self.cursor).or_else(|| self.nearest(token));
        }
        if let Some(cursor) = self.cursor {
            self.place = cursor.next;
        }
    }

    /// Returns the place after the nearest occurrence of a single token, with the least evidence.
    fn nearest(&self, token: u32) -> Option<Cursor> {
        let (start, end) = (self.place.saturating_sub(WINDOW), (self.place + WINDOW).min(self.predicted.len()));
        let found = (start..end).filter(|&position| self.predicted[position] == token);
        let nearest = found.min_by_key(|position| position.abs_diff(self.place))?;
        Some(Cursor { next: nearest + 1, evidence: 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::super::ngram_table::common_suffix;
    use super::*;
    use proptest::prelude::*;

    fn drafter(predicted: impl IntoIterator<Item = u32>) -> PredictionDrafter {
        PredictionDrafter::new(&predicted.into_iter().collect::<Vec<u32>>()).unwrap()
    }

    #[test]
    fn the_prediction_is_proposed_from_its_start_to_its_end() {
        let mut drafter = drafter(1..6);
        assert_eq!(drafter.propose(&[], 2).tokens(), [1, 2]);
        assert_eq!(drafter.propose(&[1, 2, 3], 4).tokens(), [4, 5]);
        assert_eq!(drafter.propose(&[1, 2, 3, 4, 5], 4).tokens(), [0; 0]);
        assert_eq!(drafter.propose(&[1, 2, 3, 4, 5, 9], 4).tokens(), [0; 0]);
        assert_eq!(super::PredictionDrafter::new(&[]).unwrap().propose(&[], 4).len(), 0);
    }

    #[test]
    fn the_place_is_found_again_after_an_edit() {
        let output: Vec<u32> = (0..50).collect();
        // Replaced: goes on at once.
        let mut replaced = drafter(0..100);
        assert_eq!(replaced.propose(&[&output[..], &[777]].concat(), 2).tokens(), [51, 52]);
        // Inserted: the first token after it tells.
        let mut inserted = drafter(0..100);
        let with_new: Vec<u32> = output.iter().copied().chain([777, 778, 779, 50, 51]).collect();
        assert_eq!(inserted.propose(&with_new, 2).tokens(), [52, 53]);
        // Deleted.
        let mut deleted = drafter(0..100);
        assert_eq!(deleted.propose(&[&output[..], &[70, 71]].concat(), 2).tokens(), [72, 73]);
    }

    #[test]
    fn among_equal_matches_the_nearest_is_followed() {
        // A line that occurs four times.
        let predicted: Vec<u32> = (0..4).flat_map(|line| [1, 2, 3, 100 + line]).collect();
        let mut drafter = drafter(predicted);
        let output = [1, 2, 3, 100, 1, 2, 3, 101, 55, 56, 57, 58, 1, 2, 3];
        assert_eq!(drafter.propose(&output, 1).tokens(), [102]);
    }

    proptest! {
        #[test]
        fn a_lost_cursor_finds_the_longest_match(
            predicted in prop::collection::vec(0u32..60, 0..100),
            from in 0usize..100,
            len in 2usize..9,
        ) {
            let mut drafter = drafter(predicted.iter().copied());
            let (start, end) = (from.min(predicted.len()), (from + len).min(predicted.len()));
            // Tokens that the prediction does not have, then a part of it.
            let mut output = vec![1000; 8];
            output.extend(&predicted[start..end]);
            let draft = drafter.propose(&output, 1);
            let best = (2..predicted.len()).map(|end| common_suffix(&predicted[..end], &output)).max().unwrap_or(0);
            if best >= 2 && end < predicted.len() {
                let followers = (2..predicted.len()).filter(|&end| common_suffix(&predicted[..end], &output) == best);
                let followers: Vec<u32> = followers.map(|end| predicted[end]).collect();
                prop_assert!(followers.contains(&draft.tokens()[0]), "{draft:?} is none of {followers:?}");
            }
        }

        #[test]
        fn any_output_is_followed_without_a_panic(
            predicted in prop::collection::vec(0u32..4, 0..60),
            output in prop::collection::vec(0u32..4, 0..100),
            cuts in prop::collection::vec((0usize..100, 0usize..20), 1..12),
        ) {
            let mut drafter = drafter(predicted.iter().copied());
            for (cut, max_len) in cuts {
                let draft = drafter.propose(&output[..cut.min(output.len())], max_len);
                prop_assert!(draft.len() <= max_len);
                let mut parts = predicted.windows(draft.len().max(1));
                prop_assert!(draft.is_empty() || parts.any(|part| part == draft.tokens()));
            }
        }
    }
}
