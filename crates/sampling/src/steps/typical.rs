//! Typical sampling (Meister et al., "Locally typical sampling", 2022): order by |-ln p_i - entropy|, and keep the smallest set whose
//! sum reaches p. Ties go to the more probable, then to the lower id. Never empty.

use crate::candidates::{Candidate, Candidates, by_rank, units_of_share};

pub(crate) fn typical(set: &mut Candidates<'_>, p: f32) {
    let mass = set.mass();
    let target = units_of_share(&mass, p);
    // -ln p = h + ln(total), so the distance to the entropy is that of h to its mean.
    let mean_handicap = mass.handicap / mass.total;
    let (largest, temperature) = (f64::from(set.largest()), set.temperature());
    let distance =
        move |candidate: &Candidate| ((largest - f64::from(candidate.logit)) / temperature - mean_handicap).abs();
    // The most probable, with h = 0, is as far from the mean as the mean is from 0. So those with h up to twice the mean and one are
    // exactly those at most the mean and one away; only if they do not reach the target must a row be searched farther.
    if set.row().is_some() {
        let cut = set.cut_at(2.0 * mean_handicap + 1.0);
        set.keep_from(if set.weight_from(cut) >= target { cut } else { f32::NEG_INFINITY });
    }
    set.keep_until(target, |a, b| distance(a).total_cmp(&distance(b)).then_with(|| by_rank(a, b)));
}
