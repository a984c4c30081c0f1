//! Top-p (Holtzman et al., "The curious case of neural text degeneration", 2019): keeps the smallest set, from the most
//! probable token down, whose sum reaches p. The most probable token is always in it.

use super::step::{Effect, percent};
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::{Candidates, by_rank, units_of_share};
use crate::digest::DigestPlan;

pub(super) const DESCRIPTION: Description = Description {
    name: "top_p",
    label: |_| "top-p",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "keeps the most probable tokens until their sum reaches p",
    is_used: |p| p.top_p < 1.0,
    option: |_| "top_p",
    short_setting: |p| p.top_p.to_string(),
    meaning: |p| format!("keeps the top ones that together reach {}", percent(p.top_p)),
    build: |p, _| Box::new(TopP { p: p.top_p }),
};

/// Distances below the highest logit, in nats, at which to look for the set, near first: tokens farther down need not
/// be listed.
const REACHES: [f64; 9] = [2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 18.0, f64::INFINITY];

#[derive(Debug)]
struct TopP {
    p: f32,
}

impl Step for TopP {
    fn setting(&self) -> String {
        self.p.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        let target = units_of_share(&set.mass(), self.p);
        if set.row().is_some() {
            let cuts = REACHES.map(|reach| set.cut_at(reach));
            let reached = cuts.into_iter().find(|&cut| set.weight_from(cut) >= target);
            set.keep_from(reached.unwrap_or(f32::NEG_INFINITY));
        }
        set.keep_until(target, by_rank);
        Ok(())
    }

    fn plan_digest(&self, plan: &mut DigestPlan) -> bool {
        plan.shortlist.p = self.p;
        true
    }
}
