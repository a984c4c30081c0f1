//! Philox4x32-10: a function from a key and a counter to 128 random bits.
//!
//! Randomness here is a function, not a stream: nothing has to be stored, copied or kept in step, and the number for a position and
//! a token is the same whoever asks, in whatever order. Defined in Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (2011).

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
/// Added to the key after each round: the golden ratio and the square root of three less one, as fractions of 2^32.
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const NUM_ROUNDS: usize = 10;

/// The four words for a counter under a key.
pub fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let mut key = key;
    let mut words = counter;
    for _ in 0..NUM_ROUNDS {
        let low = u64::from(MULTIPLIERS[0]) * u64::from(words[0]);
        let high = u64::from(MULTIPLIERS[1]) * u64::from(words[2]);
        words =
            [(high >> 32) as u32 ^ words[1] ^ key[0], high as u32, (low >> 32) as u32 ^ words[3] ^ key[1], low as u32];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    words
}

/// A number strictly between 0 and 1 for a seed, a position and a token: the 24 high bits of the first word, in the middle of their step.
pub fn uniform(seed: u64, position: u32, token: u32) -> f32 {
    let word = philox([seed as u32, (seed >> 32) as u32], [position, token, 0, 0])[0];
    ((word >> 8) as f32 + 0.5) * (1.0 / 16_777_216.0)
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
    fn uniform_numbers_never_reach_zero_or_one() {
        for token in 0..100_000 {
            let u = uniform(7, 3, token);
            assert!(u > 0.0 && u < 1.0);
        }
        let mean = (0..100_000).map(|token| f64::from(uniform(1, 0, token))).sum::<f64>() / 1e5;
        assert!((mean - 0.5).abs() < 0.005, "the mean of uniform numbers is {mean}");
    }
}
