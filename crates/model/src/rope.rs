//! The frequencies of rotary positions (RoPE), and the scalings that extend a model's context after training.
//!
//! Pair i of `rotary_size / 2` is rotated by `position * base^(-2i / rotary_size)`. A scaling changes these
//! frequencies, and some scalings also multiply cosine and sine by an attention factor.

/// Rotary positions as a model defines them.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeConfig {
    pub base: f32,
    /// Number of values of a head that are rotated; even, at most the head's size.
    pub rotary_size: usize,
    pub scaling: RopeScaling,
}

/// How the trained context was extended.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    None,
    /// Position interpolation: every frequency divided by the factor.
    Linear {
        factor: f32,
    },
    /// Llama 3: low frequencies divided by the factor, high ones kept, a smooth transition in between.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_context_len: f32,
    },
    /// YaRN: like Llama 3, with a transition between the pairs that make `beta_slow` and `beta_fast` rotations over the
    /// original context.
    Yarn {
        factor: f32,
        /// Pairs with more rotations than this over the original context keep their frequency.
        beta_fast: f32,
        /// Pairs with fewer rotations than this are divided by the factor.
        beta_slow: f32,
        original_context_len: f32,
        attention_factor: f32,
        /// Round the ends of the transition to whole pairs, outwards.
        truncate: bool,
    },
    /// A divisor for each frequency, as GGUF files carry Llama 3's scaling.
    Factors {
        factors: Vec<f32>,
    },
    /// LongRoPE: a divisor for each frequency, one set for short contexts and one for long ones.
    ///
    /// The set is chosen once, by the context that the model is loaded for. The reference implementation chooses by the
    /// current length, which would not match the keys that are already cached.
    LongRope {
        short: Vec<f32>,
        long: Vec<f32>,
        original_context_len: usize,
        attention_factor: f32,
    },
}

/// The frequencies of the pairs, and the factor of cosine and sine.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeFrequencies {
    pub frequencies: Vec<f32>,
    pub factor: f32,
}

impl RopeConfig {
    /// Returns the frequencies for a model that is loaded for `context_len` tokens.
    pub fn frequencies(&self, context_len: usize) -> RopeFrequencies {
        let base: Vec<f32> = (0..self.rotary_size / 2)
            .map(|i| (1.0 / f64::from(self.base).powf(2.0 * i as f64 / self.rotary_size as f64)) as f32)
            .collect();
        let divided =
            |divisors: &[f32]| base.iter().zip(divisors).map(|(frequency, divisor)| frequency / divisor).collect();
        match &self.scaling {
            RopeScaling::None => RopeFrequencies { frequencies: base, factor: 1.0 },
            RopeScaling::Linear { factor } => {
                RopeFrequencies { frequencies: base.iter().map(|frequency| frequency / factor).collect(), factor: 1.0 }
            }
            RopeScaling::Factors { factors } => RopeFrequencies { frequencies: divided(factors), factor: 1.0 },
            RopeScaling::LongRope { short, long, original_context_len, attention_factor } => {
                let divisors = if context_len > *original_context_len { long } else { short };
                RopeFrequencies { frequencies: divided(divisors), factor: *attention_factor }
            }
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context_len } => {
                let stretch = |frequency: f32| {
                    let rotations = original_context_len * frequency / std::f32::consts::TAU;
                    let keep = (rotations - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    let keep = keep.clamp(0.0, 1.0);
                    (1.0 - keep) * frequency / factor + keep * frequency
                };
                RopeFrequencies { frequencies: base.iter().map(|&frequency| stretch(frequency)).collect(), factor: 1.0 }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_context_len, attention_factor, truncate } => {
                // The index of the pair that makes `beta` rotations over the original context.
                let pair = |beta: f32| {
                    let wavelength = f64::from(*original_context_len) / (f64::from(beta) * std::f64::consts::TAU);
                    self.rotary_size as f64 * wavelength.ln() / (2.0 * f64::from(self.base).ln())
                };
                let (low, high) = (pair(*beta_fast), pair(*beta_slow));
                let (low, high) = if *truncate { (low.floor(), high.ceil()) } else { (low, high) };
                let (low, high) = (low.max(0.0), high.min(self.rotary_size as f64 - 1.0));
                let width = if high > low { high - low } else { 0.001 };
                let stretch = |(i, &frequency): (usize, &f32)| {
                    let interpolated = ((i as f64 - low) / width).clamp(0.0, 1.0) as f32;
                    frequency / factor * interpolated + frequency * (1.0 - interpolated)
                };
                RopeFrequencies {
                    frequencies: base.iter().enumerate().map(stretch).collect(),
                    factor: *attention_factor,
                }
            }
        }
    }
}

/// Returns YaRN's default factor of cosine and sine.
pub(crate) fn yarn_attention_factor(factor: f32) -> f32 {
    scaled_yarn_attention_factor(factor, 1.0)
}

/// Returns YaRN's factor of cosine and sine with its logarithm multiplied by `scale`.
pub(crate) fn scaled_yarn_attention_factor(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

/// Returns LongRoPE's default factor of cosine and sine, for a context extended from `original` to `extended` tokens.
pub(crate) fn long_rope_attention_factor(extended: f32, original: f32) -> f32 {
    let factor = extended / original;
    if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unscaled_frequencies_fall_from_one_towards_one_over_base() {
        let rope = RopeConfig { base: 10_000.0, rotary_size: 8, scaling: RopeScaling::None };
        let found = rope.frequencies(2048);
        assert_eq!(found.frequencies.len(), 4);
        for (found, expected) in found.frequencies.iter().zip([1.0, 0.1, 0.01, 0.001]) {
            assert!((found - expected).abs() < 1e-9);
        }
    }

    #[test]
    fn long_rope_chooses_by_the_loaded_context() {
        let scaling = RopeScaling::LongRope {
            short: vec![1.0, 1.0],
            long: vec![2.0, 4.0],
            original_context_len: 100,
            attention_factor: 1.25,
        };
        let rope = RopeConfig { base: 10_000.0, rotary_size: 4, scaling };
        assert_eq!(rope.frequencies(100).frequencies[0], 1.0);
        assert_eq!(rope.frequencies(101).frequencies[0], 0.5);
        assert_eq!(rope.frequencies(101).factor, 1.25);
    }
}
