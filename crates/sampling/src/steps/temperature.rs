//! Temperature: logit / T. Below 1 it sharpens, above 1 it flattens, at 0 it leaves the highest alone.

use crate::candidates::Candidates;

/// At 0, and where 1/T is beyond an f32 so that the least difference decides, only the highest logit stays; ties to the lowest id.
pub(crate) fn temperature(set: &mut Candidates<'_>, temperature: f64) {
    if ((1.0 / temperature) as f32).is_finite() {
        set.cool(temperature);
    } else if let Some(best) = set.best() {
        set.keep_only(best);
    }
}

/// Dynamic temperature: hot where the model is unsure, cold where it is sure.
///
/// T = low + (high - low) * (entropy / highest possible entropy)^exponent, where low and high are temperature -+ range (low not below
/// 0), the entropy is that of the candidates as they come in, and ln(number of candidates) is the highest possible.
pub(crate) fn dynamic(set: &mut Candidates<'_>, temperature: f32, range: f32, exponent: f32) {
    let count = set.count();
    if count < 2 {
        return;
    }
    let low = (f64::from(temperature) - f64::from(range)).max(0.0);
    let high = f64::from(temperature) + f64::from(range);
    let share = (set.mass().entropy() / libm::log(count as f64)).clamp(0.0, 1.0);
    self::temperature(set, low + (high - low) * libm::pow(share, f64::from(exponent)));
}
