//! Min-p (Nguyen et al., "Turning up the heat", 2024): keeps p_i >= min_p * max p.
//!
//! The total cancels, so no probability is needed: e^-h >= min_p is h <= -ln min_p.

use super::step::{Effect, percent};
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::Candidates;
use crate::digest::DigestPlan;

pub(super) const DESCRIPTION: Description = Description {
    name: "min_p",
    label: |_| "min-p",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "keeps tokens with p_i >= min_p x the highest p",
    is_used: |p| p.min_p > 0.0,
    option: |_| "min_p",
    short_setting: |p| p.min_p.to_string(),
    meaning: |p| format!("keeps those at least {} as probable as the best", percent(p.min_p)),
    build: |p, _| Box::new(MinP { p: p.min_p }),
};

#[derive(Debug)]
struct MinP {
    p: f32,
}

impl Step for MinP {
    fn setting(&self) -> String {
        self.p.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        set.keep_from(set.cut_at(-libm::log(f64::from(self.p))));
        Ok(())
    }

    fn plan_digest(&self, plan: &mut DigestPlan) -> bool {
        plan.shortlist.min_p = self.p;
        true
    }
}
