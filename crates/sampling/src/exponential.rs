//! The exponential function of a whole row of logits: same bits on every machine, and simple enough to run four or more at a time.
//!
//! Only sums, products and bit moves, each rounded once as IEEE 754 says, so no platform's mathematics library plays a part.

/// Below this the result is smaller than the smallest normal f32 and counts as nothing.
pub(crate) const LEAST_EXPONENT: f32 = -87.0;

/// `e^x` for x at most 0, within 1.2e-7 of the true value, relatively; 0 below [`LEAST_EXPONENT`].
///
/// x = n ln 2 + r with n whole and r at most ln(2) / 2 in size; e^r by a polynomial, times 2^n through the exponent's bits.
#[inline(always)]
pub(crate) fn exp_of_nonpositive(x: f32) -> f32 {
    /// Adding 1.5 * 2^23 leaves no bits for a fraction: the sum's low bits are the nearest whole number.
    const ROUND: f32 = 12_582_912.0;
    /// ln 2 in two parts; the first has few enough bits for n times it to be exact.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Written as a comparison because it is one instruction, and because it takes -inf.
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
