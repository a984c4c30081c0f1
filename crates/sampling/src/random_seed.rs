//! Seeds for requests that bring none.

/// Seeds are below this: few enough digits to type again, and a whole number in every JSON reader, also after adding
/// the index of a reply.
const LIMIT: u64 = 1_000_000_000_000;

/// Returns a random seed from the operating system.
///
/// # Panics
/// When the operating system has no randomness to give.
pub fn random_seed() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    u64::from_le_bytes(bytes) % LIMIT
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn seeds_differ_and_are_short() {
        let seeds: std::collections::BTreeSet<u64> = (0..100).map(|_| random_seed()).collect();
        assert_eq!(seeds.len(), 100, "{seeds:?}");
        assert!(seeds.iter().all(|&seed| seed < LIMIT));
    }
}
