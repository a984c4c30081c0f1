//! XTC, "exclude top choices" (text-generation-webui, pull request 6335, 2024): where several tokens are probable enough, drop
//! all of them but the least probable, so that the text leaves the beaten path without losing its sense.
//!
//! Whether it happens at a position is a coin of its own, keyed like every other random number (`philox.rs`).

use crate::candidates::{Candidates, by_rank, units_of_share};

/// Drops every candidate with p >= threshold except the last of them by rank.
pub(crate) fn exclude_top_choices(set: &mut Candidates<'_>, threshold: f32) {
    let mass = set.mass();
    let least = units_of_share(&mass, threshold);
    let weigh = set.weigher();
    // p >= threshold is h <= -ln(threshold * total); a little farther for rounding, and then exactly.
    let reach = -libm::log(f64::from(threshold) * mass.total) + 1e-3;
    let mut top = set.from(set.cut_at(reach));
    top.retain(|candidate| weigh(candidate.logit) >= least);
    if let Some(last) = top.iter().copied().max_by(by_rank) {
        let mut dropped: Vec<u32> = top.iter().map(|candidate| candidate.id).filter(|&id| id != last.id).collect();
        dropped.sort_unstable();
        if !dropped.is_empty() {
            set.remove(&dropped);
        }
    }
}
