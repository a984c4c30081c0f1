//! The exponential function for a row of logits: the same bits on every machine, and simple enough to vectorize.
//!
//! It uses only sums, products and bit shifts, each rounded once as IEEE 754 defines, and no function of a platform's
//! library.

/// Below this exponent the result is 0: it would be smaller than the smallest normal f32.
pub(crate) const LEAST_EXPONENT: f32 = -87.0;

/// Returns e^x for x <= 0 with a relative error below 1.2e-7; 0 below [`LEAST_EXPONENT`].
///
/// x = n ln 2 + r with an integer n and |r| <= ln(2) / 2. A polynomial gives e^r; adding n to the exponent bits
/// multiplies by 2^n.
#[inline(always)]
pub(crate) fn exp_of_nonpositive(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves no bits for a fraction: the low bits of the sum are the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has few enough bits for n times it to be exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // A comparison, because it is one instruction and handles -inf.
    let clamped = if x > LEAST_EXPONENT { x } else { LEAST_EXPONENT };
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN_2_HIGH) - n * LN_2_LOW;
    // Close to 1/k!: the polynomial meets (e^r - 1 - r) / r^2 at the Chebyshev nodes of the interval of r, which keeps
    // e^r within 1.1e-8.
    let mut sum = 1.392_618_2e-3;
    sum = sum * r + 8.363_178e-3;
    sum = sum * r + 4.166_655_5e-2;
    sum = sum * r + 1.666_657_7e-1;
    sum = sum * r + 0.5;
    let power = (sum * r) * r + r + 1.0;
    let scaled = f32::from_bits(power.to_bits().wrapping_add(shifted.to_bits() << 23));
    if x >= LEAST_EXPONENT { scaled } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn agrees_with_the_true_function() {
        let mut worst = 0.0f64;
        for i in 0..870_000 {
            let x = -(i as f32) * 1e-4;
            let exact = libm::exp(f64::from(x));
            worst = worst.max(((f64::from(exp_of_nonpositive(x)) - exact) / exact).abs());
        }
        assert!(worst < 1.2e-7, "worst relative error {worst:e}");
    }

    #[test]
    fn ends() {
        assert_eq!(exp_of_nonpositive(0.0), 1.0);
        assert_eq!(exp_of_nonpositive(-0.0), 1.0);
        assert!(exp_of_nonpositive(-87.0) > 0.0);
        assert_eq!(exp_of_nonpositive(-87.1), 0.0);
        assert_eq!(exp_of_nonpositive(f32::MIN), 0.0);
        assert_eq!(exp_of_nonpositive(f32::NEG_INFINITY), 0.0);
    }
}
