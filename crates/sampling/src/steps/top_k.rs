//! Top-k: keeps the k highest logits; ties go to the lower ids.

use super::step::Effect;
use super::{Context, Description, Step};
use crate::Error;
use crate::candidates::Candidates;
use crate::digest::DigestPlan;

pub(super) const DESCRIPTION: Description = Description {
    name: "top_k",
    label: |_| "top-k",
    effect: Effect::Truncates,
    is_movable: true,
    summary: "keeps the k highest logits, ties to the lower ids",
    is_used: |p| p.top_k != 0,
    option: |_| "top_k",
    short_setting: |p| p.top_k.to_string(),
    meaning: |p| format!("keeps the {} most probable", p.top_k),
    build: |p, _| Box::new(TopK { k: p.top_k }),
};

#[derive(Debug)]
struct TopK {
    k: u32,
}

impl Step for TopK {
    fn setting(&self) -> String {
        self.k.to_string()
    }

    fn apply(&self, set: &mut Candidates<'_>, _: &Context<'_>) -> Result<(), Error> {
        set.keep_highest(self.k as usize);
        Ok(())
    }

    fn plan_digest(&self, plan: &mut DigestPlan) -> bool {
        plan.shortlist.k = plan.shortlist.k.min(self.k);
        true
    }
}
