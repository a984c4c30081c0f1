//! Gaps between the tokens of a reply, counted in buckets.

use std::time::Duration;

/// Upper bounds of the buckets in seconds; a last bucket has no bound.
pub const GAP_BOUNDS_S: [f64; 14] =
    [0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 2.5, 10.0];

/// Number of gaps in each bucket, and their sum. A gap is the time between two steps that gave a request tokens,
/// whatever number each of them gave.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GapHistogram {
    /// Gaps of at most each of [`GAP_BOUNDS_S`] that no earlier bucket counts, and last the longer ones.
    pub counts: [u64; GAP_BOUNDS_S.len() + 1],
    /// Sum of all gaps.
    pub sum: Duration,
}

impl GapHistogram {
    pub(crate) fn observe(&mut self, gap: Duration) {
        let bucket = GAP_BOUNDS_S.partition_point(|&bound| bound < gap.as_secs_f64());
        self.counts[bucket] += 1;
        self.sum += gap;
    }

    /// Returns the number of gaps.
    pub fn count(&self) -> u64 {
        self.counts.iter().sum()
    }
}

impl std::ops::AddAssign for GapHistogram {
    fn add_assign(&mut self, other: GapHistogram) {
        self.counts.iter_mut().zip(other.counts).for_each(|(count, more)| *count += more);
        self.sum += other.sum;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_counted_in_the_first_bucket_that_holds_it() {
        let mut gaps = GapHistogram::default();
        for ms in [1, 2, 3, 100, 20_000] {
            gaps.observe(Duration::from_millis(ms));
        }
        let mut expected = [0; GAP_BOUNDS_S.len() + 1];
        (expected[0], expected[1], expected[2], expected[8], expected[14]) = (1, 1, 1, 1, 1);
        assert_eq!((gaps.counts, gaps.count()), (expected, 5));
        assert_eq!(gaps.sum, Duration::from_millis(20_106));
        gaps += gaps;
        assert_eq!(gaps.count(), 10);
    }
}
