//! The merge loop shared by byte-pair encoding with ranks and with scores.
//!
//! A piece starts as one symbol per byte or character. The best adjacent pair is joined until no pair can be joined.
//! Short pieces scan for the best pair; long pieces keep candidates in a heap, O(n log n), so that a megabyte without a
//! split does not take minutes. The caller's [`Pairs`] ranks the pairs; nothing here knows about text.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, TryReserveError};

/// One symbol: a token that covers `len` bytes from `start`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Symbol {
    pub(crate) id: u32,
    pub(crate) start: u32,
    pub(crate) len: u32,
}

/// A join that the model allows. The lowest `rank` is joined first; of equal ranks, the leftmost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Join {
    pub(crate) rank: u32,
    pub(crate) id: u32,
}

pub(crate) trait Pairs {
    fn join(&self, left: Symbol, right: Symbol) -> Option<Join>;
}

/// Maximum number of symbols for which a scan over all pairs is cheaper than a heap.
const SCAN_LIMIT: usize = 48;

/// Joins symbols in place; the remaining symbols are the tokens, in order. Fails if there is no memory for a long
/// piece.
pub(crate) fn merge(symbols: &mut Vec<Symbol>, pairs: &impl Pairs) -> Result<(), TryReserveError> {
    if symbols.len() > SCAN_LIMIT {
        return merge_by_heap(symbols, pairs);
    }
    merge_by_scan(symbols, pairs);
    Ok(())
}

fn merge_by_scan(symbols: &mut Vec<Symbol>, pairs: &impl Pairs) {
    let mut joins: [Option<Join>; SCAN_LIMIT] = [None; SCAN_LIMIT];
    for at in 1..symbols.len() {
        joins[at - 1] = pairs.join(symbols[at - 1], symbols[at]);
    }
    loop {
        let num_pairs = symbols.len().saturating_sub(1);
        let mut best: Option<(u32, usize)> = None;
        for (at, join) in joins[..num_pairs].iter().enumerate() {
            if let Some(join) = join
                && best.is_none_or(|(rank, _)| join.rank < rank)
            {
                best = Some((join.rank, at));
            }
        }
        let Some((_, at)) = best else { return };
        let Some(join) = joins[at] else { return };
        symbols[at] = Symbol { id: join.id, start: symbols[at].start, len: symbols[at].len + symbols[at + 1].len };
        symbols.remove(at + 1);
        joins.copy_within(at + 1..num_pairs, at);
        joins[num_pairs - 1] = None;
        if at > 0 {
            joins[at - 1] = pairs.join(symbols[at - 1], symbols[at]);
        }
        joins[at] = symbols.get(at + 1).and_then(|&right| pairs.join(symbols[at], right));
    }
}

const NONE: u32 = u32::MAX;

/// A pair that may be joined. It is stale if either side has changed since; symbols only grow, so its length shows
/// that.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    left: u32,
    len: u32,
    id: u32,
}

fn merge_by_heap(symbols: &mut Vec<Symbol>, pairs: &impl Pairs) -> Result<(), TryReserveError> {
    let count = symbols.len() as u32;
    let (mut next, mut previous) = (Vec::new(), Vec::new());
    next.try_reserve_exact(symbols.len())?;
    next.extend(1..=count);
    next[count as usize - 1] = NONE;
    previous.try_reserve_exact(symbols.len())?;
    previous.extend((0..count).map(|at| at.wrapping_sub(1)));
    let candidate = |symbols: &[Symbol], left: u32, right: u32| {
        let (a, b) = (symbols[left as usize], symbols[right as usize]);
        let join = pairs.join(a, b)?;
        Some(Reverse(Candidate { rank: join.rank, left, len: a.len + b.len, id: join.id }))
    };
    let mut first = Vec::new();
    first.try_reserve_exact(symbols.len())?;
    first.extend((1..count).filter_map(|right| candidate(symbols.as_slice(), right - 1, right)));
    let mut heap = BinaryHeap::from(first);
    while let Some(Reverse(top)) = heap.pop() {
        let left = top.left as usize;
        let right = next[left];
        // A symbol that was joined into the one on its left has length zero.
        if symbols[left].len == 0 || right == NONE || symbols[left].len + symbols[right as usize].len != top.len {
            continue;
        }
        symbols[left].id = top.id;
        symbols[left].len = top.len;
        symbols[right as usize].len = 0;
        let after = next[right as usize];
        next[left] = after;
        heap.try_reserve(2)?;
        if after != NONE {
            previous[after as usize] = top.left;
            heap.extend(candidate(symbols, top.left, after));
        }
        if previous[left] != NONE {
            heap.extend(candidate(symbols, previous[left], top.left));
        }
    }
    symbols.retain(|symbol| symbol.len > 0);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A toy model: pairs of small ids join by an arbitrary but fixed rule.
    struct Toy;
    impl Pairs for Toy {
        fn join(&self, left: Symbol, right: Symbol) -> Option<Join> {
            let mix = left.id.wrapping_mul(31).wrapping_add(right.id.wrapping_mul(17)) % 23;
            (mix < 12 && left.id < 40 && right.id < 40).then_some(Join { rank: mix, id: 3 + mix * 4 })
        }
    }

    proptest! {
        /// The heap and the scan produce the same tokens.
        #[test]
        fn heap_agrees_with_scan(ids in prop::collection::vec(0u32..6, 1..SCAN_LIMIT)) {
            let symbols: Vec<Symbol> =
                ids.iter().enumerate().map(|(at, &id)| Symbol { id, start: at as u32, len: 1 }).collect();
            let (mut scanned, mut heaped) = (symbols.clone(), symbols);
            merge_by_scan(&mut scanned, &Toy);
            merge_by_heap(&mut heaped, &Toy).unwrap();
            let plain = |list: &[Symbol]| list.iter().map(|s| (s.id, s.start, s.len)).collect::<Vec<_>>();
            prop_assert_eq!(plain(&scanned), plain(&heaped));
        }
    }
}
