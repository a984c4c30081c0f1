//! Elementary functions in plain arithmetic that the compiler can vectorise.
//!
//! The C library's `expf` differs between versions and machines. These functions give the same bits everywhere, which
//! deterministic replies need, and they run in sixteen lanes at a time.

pub(crate) const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// ln 2 in two parts, the first with few enough bits that `n * LN2_HIGH` is exact for |n| < 2^9.
pub(crate) const LN2_HIGH: f32 = 0.693_359_4;
pub(crate) const LN2_LOW: f32 = -2.121_944_4e-4;
/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer in the default rounding mode.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// The range of [`exp`], within which the powers of two that it multiplies by are normal floats.
pub(crate) const EXP_LOWEST: f32 = -87.3;
pub(crate) const EXP_HIGHEST: f32 = 88.3;
/// The Taylor polynomial of e^r, highest power first.
pub(crate) const EXP_TAYLOR: [f32; 8] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];

/// e^x with a relative error under 2e-7; zero below -87.3, and e^88.3 above 88.3.
///
/// x = n ln 2 + r with |r| <= ln 2 / 2; e^r by its Taylor polynomial of degree 7 (the next term is under 6e-9), times
/// 2^n.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = x.clamp(EXP_LOWEST, EXP_HIGHEST);
    let shifted = clamped * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (clamped - n * LN2_HIGH) - n * LN2_LOW;
    let p = EXP_TAYLOR[1..].iter().fold(EXP_TAYLOR[0], |p, coefficient| p * r + coefficient);
    let result = p * power_of_two(shifted);
    // NaN passes through the clamp and the polynomial; below the range the true value is under 1.3e-38.
    if x < EXP_LOWEST { 0.0 } else { result }
}

/// 2^n for `shifted` = [`ROUND`] + n with an integer n of -126 to 127. The lowest bits of such a float are n; shifting
/// them to the exponent drops the other bits.
#[inline(always)]
pub(crate) fn power_of_two(shifted: f32) -> f32 {
    f32::from_bits(shifted.to_bits().wrapping_add(127) << 23)
}

/// tanh x = 1 - 2 / (e^2x + 1); absolute error under 2e-7.
#[inline(always)]
pub(crate) fn tanh(x: f32) -> f32 {
    1.0 - 2.0 / (exp(2.0 * x) + 1.0)
}

#[inline(always)]
pub(crate) fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Upper bound of the gate and bounds of the other factor of [`clamped_swiglu`], and the factor in its sigmoid.
const SWIGLU_LIMIT: f32 = 7.0;
const SWIGLU_ALPHA: f32 = 1.702;

/// `x * sigmoid(1.702 x) * (up + 1)` with x at most 7 and up from -7 to 7. NaN passes through.
#[inline(always)]
pub(crate) fn clamped_swiglu(x: f32, up: f32) -> f32 {
    let x = if x > SWIGLU_LIMIT { SWIGLU_LIMIT } else { x };
    let up = up.clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT);
    x / (1.0 + exp(-SWIGLU_ALPHA * x)) * (up + 1.0)
}

#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// max(x, 0)^2. NaN passes through.
#[inline(always)]
pub(crate) fn squared_relu(x: f32) -> f32 {
    if x < 0.0 { 0.0 } else { x * x }
}

/// ln(1 + e^x); x itself above 20, where the difference is under 2.1e-9.
pub(crate) fn softplus(x: f32) -> f32 {
    if x > 20.0 { x } else { libm::log1pf(exp(x)) }
}

/// x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))), written as x * sigmoid(2 ...).
#[inline(always)]
pub(crate) fn gelu_tanh(x: f32) -> f32 {
    const TWO_SQRT_2_OVER_PI: f32 = 1.595_769;
    let inner = TWO_SQRT_2_OVER_PI * (x + 0.044715 * x * x * x);
    x / (1.0 + exp(-inner))
}

/// x/2 (1 + erf(x / sqrt 2)).
#[inline(always)]
pub(crate) fn gelu(x: f32) -> f32 {
    0.5 * x * (1.0 + libm::erff(x * std::f32::consts::FRAC_1_SQRT_2))
}

/// The sum of sixteen lanes in a fixed tree: the upper half is added to the lower half until one value is left.
#[inline(always)]
pub(crate) fn sum_lanes(mut lanes: [f32; 16]) -> f32 {
    let mut width = 8;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_tenths_of_a_millionth() {
        let mut x = -87.0f32;
        while x < 88.0 {
            let expected = f64::from(x).exp();
            let relative = (f64::from(exp(x)) - expected).abs() / expected;
            assert!(relative < 2e-7, "exp({x}): relative error {relative}");
            x += if cfg!(miri) { 1.7 } else { 0.001_7 };
        }
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(f32::NAN).is_nan());
    }

    #[test]
    fn activations_agree_with_their_formulas() {
        let mut x = -20.0f64;
        while x < 20.0 {
            let narrow = x as f32;
            let x64 = f64::from(narrow);
            let inner = (2.0 / std::f64::consts::PI).sqrt() * (x64 + 0.044715 * x64.powi(3));
            let pairs = [
                ("silu", silu(narrow), x64 / (1.0 + (-x64).exp())),
                ("gelu", gelu(narrow), 0.5 * x64 * (1.0 + libm::erf(x64 / 2f64.sqrt()))),
                ("gelu_tanh", gelu_tanh(narrow), 0.5 * x64 * (1.0 + inner.tanh())),
            ];
            for (name, found, expected) in pairs {
                assert!((f64::from(found) - expected).abs() < 4e-6, "{name}({x}): {found}, expected {expected}");
            }
            assert!((f64::from(tanh(narrow)) - x64.tanh()).abs() < 3e-7);
            let relative = f64::from(softplus(narrow)) / x64.exp().ln_1p() - 1.0;
            assert!(relative.abs() < 4e-7, "softplus({x}): relative error {relative}");
            x += if cfg!(miri) { 1.3 } else { 0.013 };
        }
    }
}
