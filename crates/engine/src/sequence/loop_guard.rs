//! Loop guard: ends a reply whose last tokens repeat one passage over and over. Small models fall into such loops, and
//! a greedy one never comes out again.
//!
//! The rule: a reply loops with the period p, 1 <= p <= [`MAX_PERIOD`], as soon as its last `256 + 2p` tokens have the
//! period p, which means that each of them equals the token p places before it. The number of repeats that it takes
//! depends on the length of what is repeated:
//!
//! | period in tokens | 1 | 4 | 16 | 64 | 128 | 256 | 512 |
//! |---|---|---|---|---|---|---|---|
//! | tail in tokens | 258 | 264 | 288 | 384 | 512 | 768 | 1,280 |
//! | repeats | 258 | 66 | 18 | 6 | 4 | 3 | 2.5 |
//!
//! Short passages repeat in legitimate text (laughter, rules of dashes, arrays of zeros, equal rows of a table), whole
//! paragraphs do not. Only the output of the sequence counts, so neither the prompt nor the batch, chunks, preemption
//! or other choices matter, and the same reply ends at the same token everywhere.
//!
//! The Z-function of the reversed tail gives, for every period at once, the number of tokens that continue it, in time
//! linear in the tail. That number grows by at most 1 with each token. Therefore a pass also tells how many tokens
//! later the rule can hold at the earliest, and no pass is made before: text without repeats costs one pass over at
//! most 1,280 tokens every 250 tokens or so. The guard of a sequence is one number.

/// Longest passage, in tokens, whose repetition is found.
pub const MAX_PERIOD: usize = 512;
/// Tokens that have to be repeated in addition to one whole period.
const MIN_REPEATED: usize = 256;
/// Longest tail that decides: that of the longest period.
const MAX_TAIL: usize = MIN_REPEATED + 2 * MAX_PERIOD;

/// A loop at the end of a reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Repetition {
    /// Number of tokens of the passage that is repeated.
    pub period: usize,
    /// Number of whole times that the passage occurs in a row, the first included.
    pub repeats: usize,
}

/// The guard of one sequence.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct LoopGuard {
    /// Number of output tokens before which the rule cannot hold.
    next_pass: usize,
}

impl LoopGuard {
    /// Returns the loop at the end of `output`, if there is one. Called after each token with the whole output of the
    /// sequence; calls may be left out.
    pub(crate) fn check(&mut self, output: &[u32]) -> Option<Repetition> {
        if output.len() < self.next_pass.max(MIN_REPEATED + 2) {
            return None;
        }
        let tail = &output[output.len().saturating_sub(MAX_TAIL)..];
        let repeated = repeated_by_period(tail);
        let mut num_missing = usize::MAX;
        for (period, &num_repeated) in (1..).zip(&repeated[1..]) {
            let required = MIN_REPEATED + period;
            let num_repeated = usize::from(num_repeated);
            if num_repeated >= required {
                return Some(Repetition { period, repeats: (num_repeated + period) / period });
            }
            num_missing = num_missing.min(required - num_repeated);
        }
        self.next_pass = output.len() + num_missing;
        None
    }
}

/// Returns, for every period up to [`MAX_PERIOD`], the number of last tokens that equal the token one period before
/// them. This is the Z-function of the reversed tail.
fn repeated_by_period(tail: &[u32]) -> [u16; MAX_PERIOD + 1] {
    let len = tail.len();
    let reversed = |i: usize| tail[len - 1 - i];
    let mut repeated = [0; MAX_PERIOD + 1];
    // The match that reaches furthest: the reversed tokens start..end equal those from 0 on.
    let (mut start, mut end) = (0, 0);
    for period in 1..=MAX_PERIOD.min(len.saturating_sub(1)) {
        let mut matched = if period < end { usize::from(repeated[period - start]).min(end - period) } else { 0 };
        while period + matched < len && reversed(matched) == reversed(period + matched) {
            matched += 1;
        }
        if period + matched > end {
            (start, end) = (period, period + matched);
        }
        repeated[period] = matched as u16;
    }
    repeated
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The rule by its definition, in quadratic time.
    fn reference(output: &[u32]) -> Option<usize> {
        (1..=MAX_PERIOD).find(|&period| {
            let required = 256 + 2 * period;
            output.len() >= required
                && (output.len() - required + period..output.len()).all(|i| output[i] == output[i - period])
        })
    }

    /// Feeds the tokens one by one. Returns the number of tokens at the end, and the loop.
    fn follow(output: &[u32]) -> Option<(usize, Repetition)> {
        let mut guard = LoopGuard::default();
        (1..=output.len()).find_map(|len| Some((len, guard.check(&output[..len])?)))
    }

    fn reference_follow(output: &[u32]) -> Option<(usize, usize)> {
        (1..=output.len()).find_map(|len| Some((len, reference(&output[..len])?)))
    }

    /// Tokens that never repeat.
    fn text(range: std::ops::Range<u32>) -> Vec<u32> {
        range.map(|i| 1000 + i).collect()
    }

    #[test]
    fn a_loop_ends_at_the_documented_token() {
        for period in [1, 2, 3, 4, 16, 64, 100, 128, 256, 511, 512] {
            for num_before in [0, 1, 90, 3000] {
                let mut output = text(0..num_before as u32);
                output.extend((0..period as u32).cycle().take(2000));
                let (len, found) = follow(&output).unwrap();
                let tail = 256 + 2 * period;
                assert_eq!((len, found.period), (num_before + tail, period), "{num_before} before");
                assert_eq!(found.repeats, tail / period);
            }
        }
    }

    #[test]
    fn repeats_that_end_in_time_are_no_loop() {
        for period in [1, 4, 16, 64, 128, 256, 512] {
            // One token less than a loop, then other text, again and again.
            let mut output = Vec::new();
            for round in 0..4 {
                output.extend((0..period as u32).cycle().take(256 + 2 * period - 1));
                output.extend(text(round * 10..round * 10 + 10));
            }
            assert_eq!(follow(&output), None, "period {period}");
        }
        // A passage that is longer than the maximum, and a list that counts.
        assert_eq!(follow(&(0..513).cycle().take(5000).collect::<Vec<u32>>()), None);
        let list: Vec<u32> = (0..1000).flat_map(|row| [1, 2, 5000 + row, 3]).collect();
        assert_eq!(follow(&list), None);
        // The rows of a table: 30 equal rows of 8 tokens.
        let table: Vec<u32> = text(0..20).into_iter().chain((0..8).cycle().take(240)).chain(text(20..40)).collect();
        assert_eq!(follow(&table), None);
    }

    #[test]
    fn text_costs_few_passes() {
        let output = text(0..10_000);
        let (mut guard, mut passes, mut last) = (LoopGuard::default(), 0, 0);
        for len in 1..=output.len() {
            assert_eq!(guard.check(&output[..len]), None);
            passes += usize::from(guard.next_pass != last);
            last = guard.next_pass;
        }
        assert_eq!(passes, 10_000 / 257);
    }

    #[test]
    fn calls_may_be_left_out() {
        let output: Vec<u32> = (0..5).cycle().take(4000).collect();
        let mut guard = LoopGuard::default();
        assert_eq!(guard.check(&output[..200]), None);
        assert_eq!(guard.check(&output), Some(Repetition { period: 5, repeats: 256 }));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Passages of few different tokens, repeated and disturbed, so that periods within periods occur.
        #[test]
        fn equals_the_reference(
            parts in prop::collection::vec((prop::collection::vec(0_u32..3, 1..40), 1_usize..400), 1..5),
        ) {
            let output: Vec<u32> =
                parts.iter().flat_map(|(passage, len)| passage.iter().copied().cycle().take(*len)).collect();
            let found = follow(&output).map(|(len, repetition)| (len, repetition.period));
            prop_assert_eq!(found, reference_follow(&output));
        }

        #[test]
        fn long_periods_equal_the_reference(period in 1_usize..530, num_before in 0_usize..60, total in 0_usize..1500) {
            let output: Vec<u32> = text(0..num_before as u32)
                .into_iter()
                .chain((0..period as u32).map(|i| i * i % 7).collect::<Vec<_>>().into_iter().cycle().take(total))
                .collect();
            let found = follow(&output).map(|(len, repetition)| (len, repetition.period));
            prop_assert_eq!(found, reference_follow(&output));
        }
    }
}
