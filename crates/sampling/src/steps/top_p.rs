//! Top-p (Holtzman et al., "The curious case of neural text degeneration", 2019): the smallest set, from the most probable down, whose
//! sum reaches p. Never empty: the most probable is always in it.

use crate::candidates::{Candidates, by_rank, units_of_share};

/// How far below the highest to look for the set, in nats, first near and then farther: what lies below it need not be listed.
const REACHES: [f64; 9] = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 18.0, f64::INFINITY];

pub(crate) fn top_p(set: &mut Candidates<'_>, p: f32) {
    let target = units_of_share(&set.mass(), p);
    if set.row().is_some() {
        let cuts = REACHES.map(|reach| set.cut_at(reach));
        let reached = cuts.into_iter().find(|&cut| set.weight_from(cut) >= target);
        set.keep_from(reached.unwrap_or(f32::NEG_INFINITY));
    }
    set.keep_until(target, by_rank);
}
