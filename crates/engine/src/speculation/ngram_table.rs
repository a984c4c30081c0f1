//! An index of the n-grams of a growing list of tokens, shared by the lookup drafters.
//!
//! A table maps the hash of `n` tokens to the position after their last occurrence, and each position to the one before
//! it with the same hash, as deflate does. A lookup walks at most [`MAX_CHAIN`] occurrences and compares tokens, so it
//! takes bounded time whatever the tokens are. Memory is linear in the tokens: 8 to 16 bytes each, for each `n`. If
//! there is not enough memory, the table is empty and finds nothing.

use crate::fallible;

/// Maximum occurrences that a lookup considers: the most recent ones.
const MAX_CHAIN: usize = 16;
/// Tokens that are compared at most; a longer match counts as this long.
pub(super) const MAX_MATCH: usize = 32;
/// Smallest number of hashes.
const MIN_HEADS: usize = 64;

/// A place in the source at which the tokens before it agree with the last tokens of a sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Match {
    /// Position in the source of the token that may follow.
    pub(super) position: usize,
    /// Number of tokens that agree, up to [`MAX_MATCH`].
    pub(super) len: usize,
}

/// Returns the number of tokens in which the ends of two lists agree, up to [`MAX_MATCH`].
pub(super) fn common_suffix(a: &[u32], b: &[u32]) -> usize {
    a.iter().rev().zip(b.iter().rev()).take(MAX_MATCH).take_while(|(a, b)| a == b).count()
}

/// N-grams of `K` lengths, in descending order, of one list of tokens. The list itself is an argument of each call; it
/// may only grow.
#[derive(Debug)]
pub(super) struct NgramTables<const K: usize> {
    tables: [Table; K],
    has_failed: bool,
}

impl<const K: usize> NgramTables<K> {
    pub(super) fn new(lengths: [usize; K]) -> NgramTables<K> {
        debug_assert!(lengths.is_sorted_by(|a, b| a > b));
        NgramTables { tables: lengths.map(Table::new), has_failed: false }
    }

    /// Adds the tokens of `source` that were not there at the last call. A list that became shorter is indexed anew.
    pub(super) fn extend(&mut self, source: &[u32]) {
        if self.has_failed || u32::try_from(source.len()).is_err() {
            return;
        }
        if self.tables.iter_mut().any(|table| table.extend(source).is_err()) {
            self.tables.iter_mut().for_each(Table::clear);
            self.has_failed = true;
        }
    }

    /// Calls `visit` with the most recent occurrences in `source` of the longest n-gram at the end of `query` that
    /// occurs there, the latest first.
    pub(super) fn find(&self, source: &[u32], query: &[u32], mut visit: impl FnMut(Match)) {
        for table in &self.tables {
            let mut is_found = false;
            for position in table.occurrences(query) {
                let len = common_suffix(&source[..position], query);
                if len >= table.n {
                    is_found = true;
                    visit(Match { position, len });
                }
            }
            if is_found {
                return;
            }
        }
    }
}

/// The n-grams of one length.
#[derive(Debug)]
struct Table {
    n: usize,
    /// One more than the last position after an n-gram, by the n-gram's hash; 0 if there is none. Its length is a
    /// power of two.
    heads: Vec<u32>,
    /// For each position, one more than the position before it with the same hash.
    previous: Vec<u32>,
}

fn bucket(ngram: &[u32], num_buckets: usize) -> usize {
    let mix = |hash: u64, &token: &u32| (hash ^ u64::from(token)).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    let hash = ngram.iter().fold(0x243f_6a88_85a3_08d3, mix);
    // The high bits depend on all tokens.
    (hash.wrapping_mul(0xd6e8_feb8_6659_fd93) >> 32) as usize & (num_buckets - 1)
}

impl Table {
    fn new(n: usize) -> Table {
        Table { n, heads: Vec::new(), previous: Vec::new() }
    }

    fn clear(&mut self) {
        (self.heads, self.previous) = (Vec::new(), Vec::new());
    }

    fn extend(&mut self, source: &[u32]) -> Result<(), crate::Error> {
        if source.len() < self.previous.len() {
            self.previous.clear();
            self.heads.fill(0);
        }
        if source.len() > self.heads.len() {
            let num_buckets = source.len().next_power_of_two().max(MIN_HEADS);
            let mut heads = fallible::with_capacity(num_buckets)?;
            heads.resize(num_buckets, 0);
            self.heads = heads;
            self.previous.clear();
        }
        let num_new = source.len() - self.previous.len();
        fallible::reserve(&mut self.previous, num_new)?;
        let num_buckets = self.heads.len();
        for position in self.previous.len()..source.len() {
            let Some(start) = position.checked_sub(self.n) else {
                self.previous.push(0);
                continue;
            };
            let head = &mut self.heads[bucket(&source[start..position], num_buckets)];
            self.previous.push(*head);
            *head = position as u32 + 1;
        }
        Ok(())
    }

    /// Returns the positions after the n-gram at the end of `query`, the latest first. Some may follow another n-gram
    /// with the same hash.
    fn occurrences(&self, query: &[u32]) -> impl Iterator<Item = usize> + '_ {
        let ngram = query.len().checked_sub(self.n).map(|start| &query[start..]);
        let head =
            ngram.filter(|_| !self.heads.is_empty()).map_or(0, |ngram| self.heads[bucket(ngram, self.heads.len())]);
        let next = |position: &usize| (self.previous[*position] as usize).checked_sub(1);
        std::iter::successors((head as usize).checked_sub(1), next).take(MAX_CHAIN)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Few distinct tokens make many occurrences, so only those that a chain can reach are compared.
        #[test]
        fn occurrences_are_those_of_a_naive_search(
            tokens in prop::collection::vec(0u32..6, 0..200),
            query in prop::collection::vec(0u32..6, 0..12),
            cuts in prop::collection::vec(0usize..200, 0..4),
        ) {
            let mut tables = NgramTables::new([4, 2]);
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(tokens.len())).collect();
            cuts.sort_unstable();
            cuts.iter().for_each(|&cut| tables.extend(&tokens[..cut]));
            tables.extend(&tokens);
            let mut found = Vec::new();
            tables.find(&tokens, &query, |found_match| found.push(found_match));
            let all = |n: usize| -> Vec<Match> {
                let ends = (n..tokens.len()).rev().map(|position| {
                    Match { position, len: common_suffix(&tokens[..position], &query) }
                });
                ends.filter(|found| found.len >= n).collect()
            };
            let expected = if all(4).is_empty() { all(2) } else { all(4) };
            // Other n-grams with the same hash take places in a chain.
            prop_assert!(expected.starts_with(&found), "{found:?} of {expected:?}");
            prop_assert!(!found.is_empty() || expected.is_empty());
        }
    }

    #[test]
    fn a_shorter_list_is_indexed_anew() {
        let mut tables = NgramTables::new([2]);
        tables.extend(&[1, 2, 3, 4, 5, 1, 2, 9]);
        let other = [7, 1, 2, 4];
        tables.extend(&other);
        let mut found = Vec::new();
        tables.find(&other, &[0, 1, 2], |found_match| found.push(found_match));
        assert_eq!(found, [Match { position: 3, len: 2 }]);
    }

    #[test]
    fn the_longest_ngrams_are_found_first_and_chains_are_bounded() {
        let mut tables = NgramTables::new([3, 2]);
        let mut source = vec![5, 1, 2, 3];
        (0..100).for_each(|_| source.extend([8, 1, 2, 4]));
        tables.extend(&source);
        let lookup = |query: &[u32]| {
            let mut found = Vec::new();
            tables.find(&source, query, |found_match| found.push(found_match.len));
            found
        };
        assert_eq!(lookup(&[5, 1, 2]), [3], "not the hundred matches of two tokens");
        assert_eq!(lookup(&[0, 1, 2]).len(), MAX_CHAIN);
        assert_eq!(lookup(&[2]), [0; 0]);
        assert_eq!(lookup(&[]), [0; 0]);
    }
}
