//! Philox4x32-10: a function from a key and a counter to 128 random bits.
//!
//! Randomness here is a function, not a stream: there is no state to store, copy or synchronize, and the number for a
//! position and a token does not depend on the order of calls. Defined in Salmon et al., "Parallel random numbers: as
//! easy as 1, 2, 3" (2011). [`token_word`] computes the number of one token, [`TokenWords`] those of many; they agree
//! bit for bit.

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key after each round: the fractions of the golden ratio and of the square root of 3, times 2^32.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const NUM_ROUNDS: usize = 10;

/// Third word of the counter: separates numbers that serve different purposes at one position.
const TOKEN_LANE: u32 = 0;
const XTC_LANE: u32 = 1;

/// Returns four random words for a key and a counter.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut key = key;
    let mut words = counter;
    for _ in 0..NUM_ROUNDS {
        let low = u64::from(MULTIPLIERS[0]) * u64::from(words[0]);
        let high = u64::from(MULTIPLIERS[1]) * u64::from(words[2]);
        words =
            [(high >> 32) as u32 ^ words[1] ^ key[0], high as u32, (low >> 32) as u32 ^ words[3] ^ key[1], low as u32];
        key = next_key(key);
    }
    words
}

/// Returns a number strictly between 0 and 1 for a seed, a position and a token.
pub fn uniform(seed: u64, position: u32, token: u32) -> f64 {
    unit(token_word(seed, position, token))
}

/// Returns the random word of a token.
pub(crate) fn token_word(seed: u64, position: u32, token: u32) -> u32 {
    philox(split(seed), [position, token, TOKEN_LANE, 0])[0]
}

/// Returns the number that decides whether XTC acts at a position.
pub(crate) fn xtc_coin(seed: u64, position: u32) -> f64 {
    unit(philox(split(seed), [position, 0, XTC_LANE, 0])[0])
}

/// Returns (n + 1/2) / 2^24 for the 24 high bits n of a word: never 0 and never 1. An f64, because the highest of these
/// numbers has 25 bits: an f32 would round it to 1, and with ln(1) = 0 the least probable token could win the race.
pub(crate) fn unit(word: u32) -> f64 {
    (f64::from(word >> 8) + 0.5) / 16_777_216.0
}

fn split(seed: u64) -> [u32; 2] {
    [seed as u32, (seed >> 32) as u32]
}

fn next_key(key: [u32; 2]) -> [u32; 2] {
    [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])]
}

/// The random words of many tokens at one position.
///
/// Only the token differs between the counters, so the products of the first three rounds that depend on the position
/// alone are computed once, and the last round computes only the word that is used: 15 products per token instead of
/// 20. Words are the low halves of u64 lanes, as a vector multiplication 32 x 32 -> 64 needs them; the high halves are
/// ignored.
#[derive(Debug, Clone)]
pub(crate) struct TokenWords {
    keys: [[u32; 2]; NUM_ROUNDS],
    /// Word that round 2 combines with the token's product, with the round key applied.
    second_round: u32,
    /// The two words that round 3 combines with products, with the round key applied, and the low product for round 4.
    third_round: [u32; 3],
}

/// Tokens computed in parallel: enough to hide the latency of a multiplication, few enough for sixteen vector
/// registers.
pub(crate) const LANES: usize = 4;

impl TokenWords {
    pub(crate) fn new(seed: u64, position: u32) -> Self {
        let mut key = split(seed);
        let keys = std::array::from_fn(|_| {
            let this = key;
            key = next_key(key);
            this
        });
        let product = |multiplier: u32, word: u32| {
            let product = u64::from(multiplier) * u64::from(word);
            ((product >> 32) as u32, product as u32)
        };
        // Round 1 turns (position, token, 0, 0) into (token ^ key, 0, a ^ key, b) with:
        let (a, b) = product(MULTIPLIERS[0], position);
        // Round 2 turns that into (c ^ key, d, token's, token's) with:
        let (c, d) = product(MULTIPLIERS[1], a ^ keys[0][1]);
        // Round 3 into (token's, token's, token's, f) with:
        let (e, f) = product(MULTIPLIERS[0], c ^ keys[1][0]);
        TokenWords { second_round: b ^ keys[1][1], third_round: [d ^ keys[2][0], e ^ keys[2][1], f], keys }
    }

    /// Sets `words[i]` to the word of `tokens[i]`, in groups of [`LANES`]; an incomplete last group stays unchanged.
    pub(crate) fn fill(&self, tokens: &[u32], words: &mut [u32]) {
        for (tokens, words) in tokens.as_chunks().0.iter().zip(words.as_chunks_mut().0) {
            self.fill_lanes(tokens, words);
        }
    }

    /// Returns the word of one token.
    pub(crate) fn of(&self, token: u32) -> u32 {
        let mut words = [0; LANES];
        self.fill_lanes(&[token; LANES], &mut words);
        words[0]
    }

    #[inline(always)]
    fn fill_lanes(&self, tokens: &[u32; LANES], words: &mut [u32; LANES]) {
        let multiply = |word: u64, which: usize| (word & 0xFFFF_FFFF) * u64::from(MULTIPLIERS[which]);
        let [mut w0, mut w1, mut w2, mut w3] = [[0u64; LANES]; 4];
        for lane in 0..LANES {
            let low = multiply(u64::from(tokens[lane] ^ self.keys[0][0]), 0);
            let high = multiply((low >> 32) ^ u64::from(self.second_round), 1);
            w0[lane] = (high >> 32) ^ u64::from(self.third_round[0]);
            w1[lane] = high;
            w2[lane] = low ^ u64::from(self.third_round[1]);
            w3[lane] = u64::from(self.third_round[2]);
        }
        for key in &self.keys[3..NUM_ROUNDS - 1] {
            for lane in 0..LANES {
                let (low, high) = (multiply(w0[lane], 0), multiply(w2[lane], 1));
                w0[lane] = (high >> 32) ^ w1[lane] ^ u64::from(key[0]);
                w1[lane] = high;
                w2[lane] = (low >> 32) ^ w3[lane] ^ u64::from(key[1]);
                w3[lane] = low;
            }
        }
        for lane in 0..LANES {
            let high = multiply(w2[lane], 1);
            words[lane] = ((high >> 32) ^ w1[lane]) as u32 ^ self.keys[NUM_ROUNDS - 1][0];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The known answers that the authors publish with their reference implementation (Random123, kat_vectors).
    #[test]
    fn published_known_answers() {
        assert_eq!(philox([0; 2], [0; 4]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(philox([u32::MAX; 2], [u32::MAX; 4]), [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]);
        assert_eq!(
            philox([0xa409_3822, 0x299f_31d0], [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn many_tokens_get_the_words_that_each_gets_alone() {
        for (seed, position) in [(0, 0), (u64::MAX, u32::MAX), (0x0123_4567_89ab_cdef, 77), (42, 0x8000_0001)] {
            let tokens: [u32; 64] = std::array::from_fn(|i| (i as u32).wrapping_mul(0x9E37_79B9) >> (i % 16));
            let mut words = [0; 64];
            TokenWords::new(seed, position).fill(&tokens, &mut words);
            for (token, word) in tokens.into_iter().zip(words) {
                assert_eq!(word, token_word(seed, position, token), "seed {seed}, position {position}, token {token}");
            }
        }
    }

    #[test]
    fn uniform_numbers_never_reach_zero_or_one() {
        assert!(unit(0) > 0.0 && unit(u32::MAX) < 1.0);
        let mean = (0..100_000).map(|token| uniform(1, 0, token)).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 0.005, "the mean of uniform numbers is {mean}");
    }

    #[test]
    fn the_coin_is_not_the_number_of_a_token() {
        let coin = xtc_coin(5, 9);
        assert!((0..10_000).filter(|&token| uniform(5, 9, token) == coin).count() < 3);
    }
}
