//! The rule for everything that fills up and that tenants share: the queue, memory that clients occupy, connections.
//!
//! It is the dynamic threshold of shared-memory switches (Choudhury and Hahne, 1998): each tenant may hold as much as
//! is still free. One greedy tenant ends at half of the total, two at a third each, `n` at one part in `n + 1`. The
//! part that stays free is what a tenant that comes later finds. No tenant has a fixed part, so nothing is set aside
//! for tenants that are absent, and tenants may be added while the server runs.

/// Whether a tenant that holds `own` may take `more`, when all tenants together, itself included, hold `all` of
/// `total`. A single tenant may take everything.
///
/// A tenant that holds nothing may take whatever is free, so that no request is refused for ever because of its size.
pub fn within_share(own: usize, all: usize, total: usize, more: usize, num_tenants: usize) -> bool {
    let Some(left) = total.checked_sub(all).and_then(|free| free.checked_sub(more)) else { return false };
    // `all` is at most `total` here and includes `own`, so the sum is at most `total`.
    num_tenants <= 1 || own == 0 || own + more <= left
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Lets each tenant take one unit at a time, in turns, until all are refused; returns what each holds.
    fn fill(num_greedy: usize, num_tenants: usize, total: usize) -> Vec<usize> {
        let mut held = vec![0; num_greedy];
        loop {
            let before: usize = held.iter().sum();
            for i in 0..num_greedy {
                let all = held.iter().sum();
                held[i] += usize::from(within_share(held[i], all, total, 1, num_tenants));
            }
            if held.iter().sum::<usize>() == before {
                return held;
            }
        }
    }

    #[test]
    fn a_single_tenant_may_take_everything() {
        assert_eq!(fill(1, 1, 64), [64]);
        assert!(within_share(0, 0, 64, 64, 1));
        assert!(!within_share(0, 0, 64, 65, 1));
        assert!(!within_share(64, 64, 64, 1, 1));
    }

    #[test]
    fn greedy_tenants_leave_a_part_for_one_that_comes_later() {
        assert_eq!(fill(1, 2, 64), [32]);
        assert_eq!(fill(2, 3, 63), [21, 21]);
        assert_eq!(fill(3, 9, 64), [16, 16, 16]);
        assert!(within_share(0, 32, 64, 1, 2), "positive control: what one greedy tenant leaves can be taken");
        assert_eq!(fill(1, 1, 64), [64], "without the rule nothing is left");
    }

    #[test]
    fn a_large_take_keeps_to_the_share_too() {
        assert!(within_share(1, 1, 64, 31, 2) && !within_share(1, 1, 64, 32, 2));
        assert!(within_share(0, 0, 64, 64, 2), "the only way for a request of this size");
    }

    #[test]
    fn the_smallest_total_can_be_used() {
        assert_eq!(fill(2, 2, 1), [1, 0]);
        assert!(!within_share(0, 0, 0, 1, 2));
    }

    #[test]
    fn counts_at_the_limits_do_not_overflow() {
        assert!(!within_share(usize::MAX, usize::MAX, usize::MAX, usize::MAX, 2));
        assert!(!within_share(1, 1, usize::MAX, usize::MAX, 2));
        assert!(!within_share(0, 10, 5, 0, 2), "more is held than there is");
        assert!(within_share(0, 0, usize::MAX, usize::MAX, usize::MAX));
    }

    proptest! {
        #[test]
        fn takes_of_any_size_never_exceed_the_total(
            takes in prop::collection::vec((0usize..4, 1usize..40), 0..60),
            total in 1usize..200,
        ) {
            let mut held = [0; 4];
            for (tenant, more) in takes {
                let all = held.iter().sum();
                if within_share(held[tenant], all, total, more, 4) {
                    held[tenant] += more;
                }
                prop_assert!(held.iter().sum::<usize>() <= total);
            }
        }

        #[test]
        fn a_newcomer_finds_what_the_greedy_left(num_greedy in 1usize..20, total in 1usize..500) {
            let held = fill(num_greedy, num_greedy + 1, total);
            let free = total - held.iter().sum::<usize>();
            prop_assert!(free >= total / (num_greedy + 1));
            prop_assert_eq!(within_share(0, total - free, total, 1, num_greedy + 1), free > 0);
        }
    }
}
