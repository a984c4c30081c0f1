//! XTC, "exclude top choices" (text-generation-webui, pull request 6335, 2024): where several tokens are probable
//! enough, drops all of them but the least probable, so that the text becomes less predictable and stays coherent.
//!
//! A random number of its own decides whether this happens at a position; it is keyed like every other one
//! (`philox.rs`).

use super::step::{Effect, percent};
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::{Candidates, by_rank, units_of_share};
use crate::philox::xtc_coin;

pub(super) const DESCRIPTION: Description = Description {
    name: "xtc",
    label: |_| "xtc",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "with `xtc_probability`, drops every token of at least `xtc_threshold` but the least probable of them",
    is_used: |p| p.xtc_probability > 0.0,
    option: |_| "xtc_probability",
    short_setting: |p| p.xtc_probability.to_string(),
    meaning: |p| {
        let (often, probable) = (percent(p.xtc_probability), percent(p.xtc_threshold));
        format!("{often} of the time, takes out all but the last of those with {probable} or more")
    },
    build: |p, _| Box::new(Xtc { probability: p.xtc_probability, threshold: p.xtc_threshold }),
};

#[derive(Debug)]
struct Xtc {
    probability: f32,
    threshold: f32,
}

impl Step for Xtc {
    fn setting(&self) -> String {
        format!("probability {}, threshold {}", self.probability, self.threshold)
    }

    fn apply(&self, set: &mut Candidates<'_>, context: &Context<'_>) -> Result<(), Error> {
        if xtc_coin(context.seed, context.input.position) < f64::from(self.probability) {
            exclude_top_choices(set, self.threshold);
        }
        Ok(())
    }
}

/// Drops every candidate with p >= threshold except the last of them by rank.
fn exclude_top_choices(set: &mut Candidates<'_>, threshold: f32) {
    let mass = set.mass();
    let least = units_of_share(&mass, threshold);
    let weigh = set.weigher();
    // p >= threshold is h <= -ln(threshold * total). The search goes 1e-3 farther for rounding, then the weights decide
    // exactly.
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
