//! Proposes what followed the longest suffix of a sequence in recent output of the same scope.
//!
//! Each scope (tenant and salt) has a store of its own, and a lookup names the scope: no output, and no time of a
//! lookup, depends on another scope's output. A store is a list of tokens with an index of its n-grams. The most recent
//! occurrences of the longest n-gram vote on the next token; their agreement and the length of the match are the
//! confidence. Output is forgotten in whole generations: a scope has two, and when the newer is full, the older is
//! dropped. The tokens of a tenant and of all tenants are bounded; beyond that the least recently used scope of the
//! tenant, or the least recently used tenant, is dropped.

use std::collections::BTreeMap;

use super::cursor::Cursor;
use super::ngram_table::{Match, NgramTables};
use super::{DrafterKind, Level, ScoredDraft};
use crate::fallible;
use crate::kv_cache::{Scope, TenantId};

/// Between two outputs of a generation. It is no token, so that no match goes across and no proposal has it.
const SEPARATOR: u32 = u32::MAX;
/// Shortest and longest n-gram of the index. An output that is shorter than the shortest is not kept.
const NGRAM_LENGTHS: [usize; 3] = [12, 6, 3];
/// Tokens that a scope counts for at least, which bounds the number of scopes.
const MIN_SCOPE_TOKENS: usize = 256;
/// Maximum occurrences that vote.
const MAX_VOTES: usize = 16;

/// Bounds of a [`SuffixStore`], in tokens; each takes about 50 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SuffixLimits {
    /// Maximum tokens of a tenant, over all its salts.
    pub tenant_tokens: usize,
    /// Maximum tokens of all tenants together.
    pub total_tokens: usize,
}

impl Default for SuffixLimits {
    fn default() -> SuffixLimits {
        SuffixLimits { tenant_tokens: 1 << 16, total_tokens: 1 << 20 }
    }
}

/// Recent output of all tenants, each for itself.
#[derive(Debug, Default)]
pub struct SuffixStore {
    limits: SuffixLimits,
    tenants: BTreeMap<TenantId, Tenant>,
    num_tokens: usize,
    /// Number of additions; the age of stores.
    num_added: u64,
}

#[derive(Debug, Default)]
struct Tenant {
    scopes: BTreeMap<Scope, ScopeOutput>,
    num_tokens: usize,
    last_added: u64,
}

#[derive(Debug, Default)]
struct ScopeOutput {
    newer: Generation,
    older: Generation,
    last_added: u64,
}

/// Outputs that are forgotten together.
#[derive(Debug)]
struct Generation {
    tokens: Vec<u32>,
    tables: NgramTables<3>,
}

impl Default for Generation {
    fn default() -> Generation {
        Generation { tokens: Vec::new(), tables: NgramTables::new(NGRAM_LENGTHS) }
    }
}

impl Generation {
    /// Adds an output; does nothing if there is not enough memory.
    fn add(&mut self, output: &[u32]) {
        if fallible::reserve(&mut self.tokens, output.len() + 1).is_ok() {
            self.tokens.extend_from_slice(output);
            self.tokens.push(SEPARATOR);
            self.tables.extend(&self.tokens);
        }
    }

    /// Returns the best place to follow, with its confidence.
    fn find(&self, tokens: &[u32]) -> Option<(Cursor, Level)> {
        let mut found = [Match { position: 0, len: 0 }; MAX_VOTES];
        let mut num_found = 0;
        self.tables.find(&self.tokens, tokens, |found_match| {
            if num_found < MAX_VOTES {
                found[num_found] = found_match;
                num_found += 1;
            }
        });
        let found = &found[..num_found];
        // Shorter matches than the longest know less of the context.
        let longest = found.iter().map(|found| found.len).max()?;
        let votes = || found.iter().filter(|found| found.len == longest).map(|found| self.tokens[found.position]);
        let support = |position: usize| votes().filter(|&token| token == self.tokens[position]).count();
        // The latest of those with the most votes: matches are in the order of their age.
        let mut best: Option<(usize, usize)> = None;
        for position in found.iter().filter(|found| found.len == longest).map(|found| found.position) {
            if best.is_none_or(|(most, _)| support(position) > most) {
                best = Some((support(position), position));
            }
        }
        let (most, position) = best?;
        let agreement = Level::of_probability(most as f64 / votes().count() as f64);
        Some((Cursor { next: position, evidence: longest }, agreement))
    }
}

impl ScopeOutput {
    fn num_tokens(&self) -> usize {
        (self.newer.tokens.len() + self.older.tokens.len()).max(MIN_SCOPE_TOKENS)
    }
}

impl SuffixStore {
    /// Returns an empty store.
    pub fn new(limits: SuffixLimits) -> SuffixStore {
        SuffixStore { limits, ..SuffixStore::default() }
    }

    /// Adds the output of a sequence that has ended. Of a long one the end is kept.
    pub fn add(&mut self, scope: Scope, output: &[u32]) {
        let generation_tokens = self.limits.tenant_tokens / 2;
        let output = &output[output.len().saturating_sub(generation_tokens.saturating_sub(1))..];
        if output.len() <= NGRAM_LENGTHS[NGRAM_LENGTHS.len() - 1] {
            return;
        }
        self.num_added += 1;
        let tenant = self.tenants.entry(scope.tenant).or_default();
        tenant.last_added = self.num_added;
        let stored = tenant.scopes.entry(scope).or_default();
        stored.last_added = self.num_added;
        if stored.newer.tokens.len() + output.len() + 1 > generation_tokens {
            stored.older = std::mem::take(&mut stored.newer);
        }
        stored.newer.add(output);
        let before = tenant.num_tokens;
        tenant.num_tokens = tenant.scopes.values().map(ScopeOutput::num_tokens).sum();
        while tenant.num_tokens > self.limits.tenant_tokens && tenant.scopes.len() > 1 {
            let (&oldest, stored) = tenant.scopes.iter().min_by_key(|(_, stored)| stored.last_added).expect("several");
            tenant.num_tokens -= stored.num_tokens();
            tenant.scopes.remove(&oldest);
        }
        self.num_tokens = self.num_tokens + tenant.num_tokens - before;
        while self.num_tokens > self.limits.total_tokens && self.tenants.len() > 1 {
            let (&oldest, tenant) = self.tenants.iter().min_by_key(|(_, tenant)| tenant.last_added).expect("several");
            self.num_tokens -= tenant.num_tokens;
            self.tenants.remove(&oldest);
        }
    }

    /// Proposes up to `max_len` tokens after `tokens`, the prompt and output of a sequence.
    pub fn propose(&self, scope: Scope, tokens: &[u32], max_len: usize) -> ScoredDraft {
        let mut draft = ScoredDraft::new(DrafterKind::Suffix);
        let Some(stored) = self.tenants.get(&scope.tenant).and_then(|tenant| tenant.scopes.get(&scope)) else {
            return draft;
        };
        let generations = [&stored.newer, &stored.older];
        let found = generations.into_iter().filter_map(|generation| Some((generation, generation.find(tokens)?)));
        // The newer one among equals.
        let best = found.reduce(|a, b| if b.1.0.evidence > a.1.0.evidence { b } else { a });
        if let Some((generation, (cursor, agreement))) = best {
            let end = generation.tokens[cursor.next..].iter().position(|&token| token == SEPARATOR).unwrap_or(0);
            for i in 0..max_len.min(end) {
                let of_match = Level::of_match(cursor.evidence + i);
                let level = if i == 0 { of_match.min(agreement) } else { of_match };
                draft.push(generation.tokens[cursor.next + i], level);
            }
        }
        draft
    }

    /// Forgets the output of a tenant.
    pub fn forget(&mut self, tenant: TenantId) {
        if let Some(tenant) = self.tenants.remove(&tenant) {
            self.num_tokens -= tenant.num_tokens;
        }
    }

    /// Number of tokens of all tenants; a scope counts for at least a few hundred.
    pub fn num_tokens(&self) -> usize {
        self.num_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::super::MAX_DRAFT_LEN;
    use super::super::ngram_table::common_suffix;
    use super::*;
    use proptest::prelude::*;

    const LIMITS: SuffixLimits = SuffixLimits { tenant_tokens: 2048, total_tokens: 4096 };

    fn scope(tenant: u32) -> Scope {
        Scope::of(TenantId(tenant))
    }

    #[test]
    fn output_is_proposed_within_its_scope_only() {
        let mut store = SuffixStore::new(LIMITS);
        let output: Vec<u32> = (1..40).collect();
        let salted = Scope::salted(TenantId(1), "salt");
        store.add(scope(1), &output);
        assert_eq!(store.propose(scope(1), &[7, 8, 9], 3).tokens(), [10, 11, 12]);
        assert_eq!(store.propose(scope(1), &[38, 39], 3).tokens(), [0; 0], "two tokens are too few");
        assert_eq!(store.propose(scope(1), &[37, 38, 39], 3).tokens(), [0; 0], "the output ends");
        for other in [scope(2), salted] {
            assert!(store.propose(other, &output[..20], 3).is_empty());
        }
        store.add(salted, &(100..140).collect::<Vec<u32>>());
        assert!(store.propose(scope(1), &[100, 101, 102], 3).is_empty());
        assert_eq!(store.propose(salted, &[100, 101, 102], 1).tokens(), [103]);
        store.forget(TenantId(1));
        assert!(store.propose(scope(1), &output[..20], 3).is_empty() && store.num_tokens() == 0);
    }

    #[test]
    fn proposals_end_with_an_output_and_matches_do_not_cross_it() {
        let mut store = SuffixStore::new(LIMITS);
        store.add(scope(1), &[1, 2, 3, 4, 5]);
        store.add(scope(1), &[6, 7, 8, 9, 10]);
        assert_eq!(store.propose(scope(1), &[1, 2, 3], 9).tokens(), [4, 5]);
        assert!(store.propose(scope(1), &[4, 5, 6], 9).is_empty());
    }

    #[test]
    fn occurrences_vote_on_the_next_token() {
        let mut store = SuffixStore::new(LIMITS);
        let long: Vec<u32> = (0..10).collect();
        for next in [50, 50, 50, 60] {
            store.add(scope(1), &[&long[..], &[next, next + 1, 9]].concat());
        }
        let draft = store.propose(scope(1), &long, 2);
        assert_eq!(draft.tokens(), [50, 51]);
        assert_eq!(draft.levels()[0], Level::of_probability(0.75));
        (0..9).for_each(|_| store.add(scope(1), &[&long[..], &[60, 61, 9]].concat()));
        assert_eq!(store.propose(scope(1), &long, 2).tokens(), [60, 61]);
    }

    #[test]
    fn old_output_is_forgotten_in_generations() {
        let mut store = SuffixStore::new(LIMITS);
        let output = |i: u32| -> Vec<u32> { (i * 1000..i * 1000 + 300).collect() };
        for i in 0..20 {
            store.add(scope(1), &output(i));
            assert!(store.num_tokens() <= LIMITS.tenant_tokens);
            assert!(!store.propose(scope(1), &output(i)[..20], 5).is_empty(), "the newest is there");
        }
        assert!(store.propose(scope(1), &output(0)[..20], 5).is_empty());
        assert!(!store.propose(scope(1), &output(17)[..20], 5).is_empty());
        let endless: Vec<u32> = (0..10_000).collect();
        store.add(scope(1), &endless);
        assert!(store.num_tokens() <= LIMITS.tenant_tokens);
        assert_eq!(store.propose(scope(1), &endless[9000..9500], 1).tokens(), [9500]);
    }

    #[test]
    fn the_least_recently_used_scope_and_tenant_are_dropped() {
        let mut store = SuffixStore::new(LIMITS);
        let output: Vec<u32> = (0..900).collect();
        for tenant in [1, 2, 3, 4, 2, 5] {
            store.add(scope(tenant), &output);
        }
        let knows = |store: &SuffixStore, scope: Scope| !store.propose(scope, &output[..20], 1).is_empty();
        assert!(store.num_tokens() <= LIMITS.total_tokens);
        assert_eq!([1, 2, 3, 4, 5].map(|tenant| knows(&store, scope(tenant))), [false, true, false, true, true]);
        // A tenant with many salts has no more than another with none.
        for i in 0..1000 {
            store.add(Scope::salted(TenantId(5), &i.to_string()), &output[..20]);
        }
        assert!(store.num_tokens() <= LIMITS.total_tokens && knows(&store, scope(2)) && !knows(&store, scope(5)));
        assert!(store.tenants[&TenantId(5)].scopes.len() <= LIMITS.tenant_tokens / MIN_SCOPE_TOKENS);
    }

    proptest! {
        #[test]
        fn proposals_follow_a_longest_match(
            outputs in prop::collection::vec(prop::collection::vec(0u32..30, 0..60), 1..8),
            query in prop::collection::vec(0u32..30, 0..4),
            (from, at, len) in (0usize..8, 0usize..60, 0usize..20),
        ) {
            let mut store = SuffixStore::new(LIMITS);
            outputs.iter().for_each(|output| store.add(scope(1), output));
            // A part of an output after other tokens.
            let part = &outputs[from % outputs.len()];
            let start = at.min(part.len());
            let query = [&query[..], &part[start..(start + len).min(part.len())]].concat();
            let draft = store.propose(scope(1), &query, MAX_DRAFT_LEN);
            let kept = outputs.iter().filter(|output| output.len() > 3);
            let ends = kept.flat_map(|output| (3..=output.len()).map(|end| output.split_at(end)));
            let places: Vec<(usize, &[u32])> =
                ends.map(|(before, after)| (common_suffix(before, &query), after)).collect();
            let longest = places.iter().map(|(len, _)| *len).max().unwrap_or(0);
            if longest < 3 {
                prop_assert!(draft.is_empty());
            } else {
                let mut followers = places.iter().filter(|(len, _)| *len == longest);
                prop_assert!(followers.any(|(_, rest)| rest.starts_with(draft.tokens())
                    && (rest.len().min(MAX_DRAFT_LEN) == draft.len())), "{draft:?} in {places:?}");
            }
        }

        #[test]
        fn memory_is_bounded_and_counted(
            additions in prop::collection::vec((0u32..6, 0usize..5, 0usize..3000), 1..60),
        ) {
            let mut store = SuffixStore::new(LIMITS);
            for (tenant, salt, len) in additions {
                let scope = if salt == 0 { scope(tenant) } else { Scope::salted(TenantId(tenant), &salt.to_string()) };
                store.add(scope, &(0..len as u32).collect::<Vec<u32>>());
                let counted: usize = store.tenants.values().map(|tenant| tenant.num_tokens).sum();
                let held: usize = store.tenants.values().flat_map(|tenant| tenant.scopes.values())
                    .map(|stored| stored.newer.tokens.len() + stored.older.tokens.len()).sum();
                prop_assert_eq!(counted, store.num_tokens());
                prop_assert!(held <= counted && counted <= LIMITS.total_tokens);
                prop_assert!(store.tenants.values().all(|tenant| tenant.num_tokens <= LIMITS.tenant_tokens));
            }
        }
    }
}
