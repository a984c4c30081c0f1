//! Min-p (Nguyen et al., "Turning up the heat", 2024): keep p_i >= min_p * max p.
//!
//! The total cancels, so no probability is needed: e^-h >= min_p is h <= -ln min_p.

use crate::candidates::Candidates;

pub(crate) fn min_p(set: &mut Candidates<'_>, p: f32) {
    set.keep_from(set.cut_at(-libm::log(f64::from(p))));
}
